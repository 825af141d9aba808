"""`python -m kdtr_cli` is `kdtr`."""

import sys

from kdtr_cli.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
