"""The cases of tests/parity are those of the reports too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
