"""The arrows of docs/architecture.md, read from the source itself.

Each rule is a function from a module's path and text to what it breaks, so that the second half of this file can show
every rule a text that breaks it: a rule that sees nothing is no rule.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kdtr_cli
from kdtr_cli.cli.main import COMMANDS

pytestmark = pytest.mark.quick

PACKAGE = Path(kdtr_cli.__file__).parent
KERNELS = PACKAGE.parent / "kernels_cu"
PAGE = PACKAGE.parent / "docs/architecture.md"

#: What the modules of each package may import of the others; `errors`, and the version in the package itself, are for
#: all. What an arrow reaches by another arrow it may import too: the command line renders reports, for example.
BELOW = {
    "pytest_plugin": {"testing", "workflows", "report", "parity", "engine", "reference", "ddtree", "model", "bundle"},
    "testing": {"workflows", "report", "parity", "engine", "reference", "ddtree", "model", "bundle"},
    "cli": {"workflows", "report", "parity", "engine", "reference", "ddtree", "model", "bundle"},
    "workflows": {"report", "parity", "engine", "reference", "ddtree", "model", "bundle"},
    "report": {"parity"},
    "parity": set(),
    "engine": {"ddtree", "model"},
    "reference": {"ddtree", "model"},
    "ddtree": {"model"},
    "model": set(),
    "bundle": set(),
}

#: CuPy is imported here alone, and inside functions, so that everything else works without it.
CUPY_MODULES = {"engine/devices/gpu.py", "engine/compile.py"}

#: `parity` works on arrays that it is given: these open files.
FILE_MODULES = {
    "h5py",
    "io",
    "mmap",
    "os",
    "pathlib",
    "pickle",
    "safetensors",
    "shutil",
    "subprocess",
    "tempfile",
    "zipfile",
}
FILE_CALLS = {
    "open",
    "load",
    "save",
    "savez",
    "savez_compressed",
    "savetxt",
    "loadtxt",
    "genfromtxt",
    "fromfile",
    "tofile",
}
FILE_CALLS |= {"memmap", "read_text", "read_bytes", "write_text", "write_bytes"}

#: Never imported: the tool works offline and without a deep learning framework. But an engine that is such a framework
#: has to import it: in its own module, when it is asked.
FRAMEWORK_MODULES = {"workflows/engine_hf.py": {"torch", "transformers"}}
FOREIGN = {"torch", "transformers", "tensorflow", "jax", "requests", "httpx", "urllib3", "huggingface_hub"}

MODULE_LINES = 400
KERNEL_LINES = 300
#: Files that may be longer, each with the reason.
LONGER: dict[str, str] = {
    "kernels_cu/cpu/scheduler.h": "the fibre scheduler of the CPU device: one state machine, and no kernel",
}


@dataclass(frozen=True)
class Import:
    """One imported name: `from module import name`, or `import module` with an empty name."""

    module: str
    name: str
    line: int
    lazy: bool  # inside a function

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def package(self, modules: frozenset[str]) -> str:
        """The package of kdtr_cli that is imported from ('engine'), or the module in it ('errors')."""
        parts = self.module.split(".")[1:]
        if not parts and self.name in modules:
            return self.name
        return parts[0] if parts else ""


def imports(path: str, text: str) -> Iterator[Import]:
    """Every import of the module at `path` (relative to kdtr_cli), those for type checkers included."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, "", child.lineno, lazy)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    here = ["kdtr_cli", *Path(path).parts[:-1]]
                    base = ".".join([*here[: len(here) - child.level + 1], *([base] if base else [])])
                for alias in child.names:
                    yield Import(base, alias.name, child.lineno, lazy)
            yield from visit(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from visit(ast.parse(text), False)


def package_of(path: str) -> str:
    parts = Path(path).parts
    return parts[0] if len(parts) > 1 else ""


def wrong_arrows(path: str, text: str) -> list[str]:
    own = package_of(path)
    found = []
    for item in imports(path, text):
        if item.top != "kdtr_cli":
            continue
        other = item.package(frozenset(BELOW))
        allowed = {"cli"} if path == "__main__.py" else BELOW.get(own, set()) | {own}
        if other not in allowed | {"errors", ""}:
            found.append(f"{path}:{item.line} imports {other}")
    return found


def opened_files(path: str, text: str) -> list[str]:
    if package_of(path) != "parity":
        return []
    found = [f"{path}:{i.line} imports {i.module}" for i in imports(path, text) if i.top in FILE_MODULES]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in FILE_CALLS:
                found.append(f"{path}:{node.lineno} calls {name}")
    return found


def careless_cupy(path: str, text: str) -> list[str]:
    return [
        f"{path}:{item.line} imports {item.module}"
        for item in imports(path, text)
        if item.top in ("cupy", "cupyx", "cupy_backends") and not (path in CUPY_MODULES and item.lazy)
    ]


def foreign_imports(path: str, text: str) -> list[str]:
    return [
        f"{path}:{item.line} imports {item.module}"
        for item in imports(path, text)
        if item.top in FOREIGN and not (item.lazy and item.top in FRAMEWORK_MODULES.get(path, set()))
    ]


def private_imports(path: str, text: str) -> list[str]:
    """Private names of another package, imported or reached through an imported module."""
    own = package_of(path)
    found = []
    modules: dict[str, str] = {}  # what a kdtr_cli module of another package is called here
    for item in imports(path, text):
        if item.top not in ("kdtr_cli", "kernels_cu") or (item.top == "kdtr_cli" and item.package(frozenset()) == own):
            continue
        parts = [p for p in [*item.module.split("."), item.name] if p.startswith("_") and not p.startswith("__")]
        if parts:
            found.append(f"{path}:{item.line} imports {'.'.join(parts)}")
        modules[item.name] = item.module
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            found.append(f"{path}:{node.lineno} uses {node.value.id}.{node.attr}")
    return found


def defined_names(tree: ast.Module) -> set[str]:
    """The names that a module's top level binds, `if` and `try` blocks included."""
    names: set[str] = set()
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                todo += getattr(node, part, [])
            todo += [s for handler in getattr(node, "handlers", []) for s in handler.body]
        else:
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names


def untidy_face(path: str, text: str) -> list[str]:
    """No docstring, no `__all__`, or an `__all__` that isn't sorted, unique, literal and true."""
    tree = ast.parse(text)
    found = [] if ast.get_docstring(tree) else [f"{path} has no docstring"]
    listed = None
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            try:
                listed = ast.literal_eval(node.value)
            except ValueError:
                return [*found, f"{path}: __all__ is not a literal"]
    if listed is None:
        return [*found, f"{path} has no __all__"]
    unknown = set(listed) - defined_names(tree) - {"__version__"}
    found += [f"{path}: __all__ names {name}, which is not there" for name in sorted(unknown)]
    found += [f"{path}: __all__ names {name} twice" for name in sorted({n for n in listed if listed.count(n) > 1})]
    private = [n for n in listed if n.startswith("_") and not n.startswith("__")]
    return found + [f"{path}: __all__ names the private {name}" for name in private]


def too_long(name: str, text: str, limit: int, longer: dict[str, str]) -> list[str]:
    """Over the limit without a reason, or with a reason that is no longer needed."""
    lines = len(text.splitlines())
    if lines > limit and not longer.get(name):
        return [f"{name} has {lines} lines, over {limit}: split it, or give the reason in LONGER"]
    if lines <= limit and name in longer:
        return [f"{name} has {lines} lines: it needs no place in LONGER"]
    return []


def untrue_page(page: str, paths: list[str]) -> list[str]:
    """Packages and modules that the page lacks, and modules that its table names though they are not there."""
    table = dict(re.findall(r"(?m)^\| `(\w+)` \| (.*) \|$", page))
    there: dict[str, set[str]] = {}
    for path in map(Path, paths):
        if len(path.parts) > 1:
            there.setdefault(path.parts[0], set()).update({path.stem, *path.parts[1:-1]} - {"__init__"})
    found = []
    for package, modules in there.items():
        if f"      {package}/ " not in page:
            found.append(f"{package}/ is not in the layout")
        names = set(re.findall(r"`([\w*]+)`", table.get(package, "")))
        groups = {n: {m for m in modules if m == n or (n.endswith("_*") and f"{m}_".startswith(n[:-1]))} for n in names}
        commands = set(COMMANDS) if package == "cli" else set()
        found += [f"{package}/{m} is not named" for m in sorted(modules - commands - set().union(*groups.values()))]
        found += [f"{package}/{name} is not there" for name in sorted(names) if not groups[name]]
    return found


RULES = [wrong_arrows, opened_files, careless_cupy, foreign_imports, private_imports, untidy_face]


def sources() -> list[str]:
    return sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))


def kernel_files() -> list[str]:
    found = [p for p in KERNELS.rglob("*") if p.suffix in (".cu", ".cuh", ".cpp", ".h", ".hpp", ".py")]
    return sorted(f"kernels_cu/{p.relative_to(KERNELS)}" for p in found)


class TestSource:
    def test_there_is_something_to_look_at(self):
        assert {package_of(path) for path in sources()} >= {
            "cli",
            "workflows",
            "parity",
            "engine",
            "reference",
            "model",
        }
        assert len(kernel_files()) > 5

    def test_every_package_has_its_arrows(self):
        folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
        assert folders <= set(BELOW), "give the new package its arrows"

    def test_the_arrows_make_no_circle(self):
        for name, below in BELOW.items():
            for other in below:
                assert name not in BELOW[other]
                assert BELOW[other] <= below, f"{name} reaches {other}, so it may import what that does"

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
    def test_rule(self, rule):
        broken = [b for path in sources() for b in rule(path, (PACKAGE / path).read_text(encoding="utf-8"))]
        assert not broken, "\n".join(broken)

    def test_the_page_names_every_package_and_module(self):
        broken = untrue_page(PAGE.read_text(encoding="utf-8"), sources())
        assert not broken, "\n".join(broken)

    def test_modules_are_short(self):
        broken = [
            b
            for path in sources()
            for b in too_long(path, (PACKAGE / path).read_text(encoding="utf-8"), MODULE_LINES, LONGER)
        ]
        assert not broken, "\n".join(broken)

    def test_kernels_are_short(self):
        broken = [
            b
            for name in kernel_files()
            for b in too_long(name, (KERNELS.parent / name).read_text(encoding="utf-8"), KERNEL_LINES, LONGER)
        ]
        assert not broken, "\n".join(broken)

    def test_a_reason_belongs_to_a_file(self):
        assert set(LONGER) <= {*sources(), *kernel_files()}


GOOD = '"""Text."""\n\n__all__ = ["f"]\n\n\ndef f():\n    return 1\n'


class TestRulesSee:
    """Every rule goes red for the fault that it is there for, and stays green for what is right."""

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
    def test_a_tidy_module_breaks_nothing(self, rule):
        for package in BELOW:
            assert rule(f"{package}/x.py", GOOD) == []

    @pytest.mark.parametrize(
        ("path", "text"),
        [
            ("reference/x.py", "from kdtr_cli.engine.kernels import TABLE"),
            ("reference/x.py", "import kdtr_cli.engine.kernels"),
            ("reference/x.py", "from kdtr_cli import engine"),
            ("reference/x.py", "from ..engine import kernels"),
            ("reference/x.py", "from .. import engine"),
            ("engine/devices/x.py", "from ...reference import arith"),
            ("engine/x.py", "def f():\n    from kdtr_cli.reference import arith"),
            ("engine/x.py", "if TYPE_CHECKING:\n    from kdtr_cli.bundle.reader import Bundle"),
            ("parity/x.py", "from kdtr_cli.bundle.reader import Bundle"),
            ("parity/x.py", "from kdtr_cli.report import text"),
            ("report/x.py", "from kdtr_cli.bundle.reader import Bundle"),
            ("report/x.py", "from kdtr_cli.workflows import diff"),
            ("model/x.py", "from kdtr_cli.reference import arith"),
            ("bundle/x.py", "from kdtr_cli.model import config"),
            ("workflows/x.py", "from kdtr_cli.cli import console"),
            ("ddtree/x.py", "from kdtr_cli.reference import arith"),
            ("errors.py", "from kdtr_cli.model import config"),
            ("testing/x.py", "from kdtr_cli.cli import console"),
            ("testing/x.py", "from kdtr_cli.pytest_plugin import goldens"),
            ("workflows/x.py", "from kdtr_cli.testing.parity import assert_parity"),
        ],
    )
    def test_an_upward_import(self, path, text):
        assert wrong_arrows(path, text)

    @pytest.mark.parametrize(
        ("path", "text"),
        [
            ("cli/x.py", "from kdtr_cli.workflows.diff import judge"),
            ("cli/x.py", "from kdtr_cli.cli import console"),
            ("cli/x.py", "from kdtr_cli import __version__"),
            ("pytest_plugin/x.py", "from kdtr_cli.testing.parity import assert_parity"),
            ("parity/x.py", "from kdtr_cli.errors import InputError"),
            ("parity/x.py", "from . import metrics"),
            ("reference/x.py", "from kdtr_cli.model import config\nfrom ..ddtree.tree import build"),
            ("__main__.py", "from kdtr_cli.cli.main import main"),
        ],
    )
    def test_a_downward_import_is_right(self, path, text):
        assert wrong_arrows(path, text) == []

    @pytest.mark.parametrize(
        "text",
        [
            "import h5py",
            "from pathlib import Path",
            "def f():\n    import os.path",
            "open('x')",
            "np.load('x')",
            "array.tofile('x')",
        ],
    )
    def test_a_file_in_parity(self, text):
        assert opened_files("parity/x.py", text)
        assert opened_files("workflows/x.py", text) == []

    @pytest.mark.parametrize(
        ("path", "text"),
        [
            ("engine/transformer.py", "def f():\n    import cupy"),
            ("engine/devices/gpu.py", "import cupy as cp"),
            ("engine/compile.py", "from cupy.cuda import compiler"),
            ("engine/devices/gpu.py", "try:\n    import cupy\nexcept ImportError:\n    cupy = None"),
            ("engine/devices/gpu.py", "class A:\n    import cupyx"),
        ],
    )
    def test_a_careless_cupy(self, path, text):
        assert careless_cupy(path, text)

    def test_a_lazy_cupy_is_right(self):
        assert careless_cupy("engine/devices/gpu.py", "class A:\n    def f(self):\n        import cupy") == []

    def test_a_framework(self):
        assert foreign_imports("workflows/x.py", "def f():\n    import torch.nn")
        assert foreign_imports("workflows/engine_hf.py", "import torch")
        assert foreign_imports("workflows/engine_hf.py", "def f():\n    import requests")
        assert foreign_imports("engine/engine_hf.py", "def f():\n    import torch")

    def test_a_framework_that_is_the_engine(self):
        assert foreign_imports("workflows/engine_hf.py", "def f():\n    import torch\n    import transformers") == []
        assert set(FRAMEWORK_MODULES) <= set(sources())

    @pytest.mark.parametrize(
        "text",
        [
            "from kdtr_cli.reference.arith import _fold",
            "from kdtr_cli.reference import _hidden",
            "import kdtr_cli.reference._hidden",
            "from kdtr_cli.reference import arith\narith._fold(1)",
        ],
    )
    def test_a_private_name_of_another_package(self, text):
        assert private_imports("workflows/x.py", text)
        assert private_imports("reference/x.py", text) == []

    @pytest.mark.parametrize(
        "text",
        [
            "",
            '"""Text."""',
            "__all__ = []",
            '"""Text."""\n__all__ = ["gone"]',
            '"""Text."""\n__all__ = ["a", "a"]\na = 1',
            '"""Text."""\n__all__ = ["_a"]\n_a = 1',
            '"""Text."""\n__all__ = [name for name in dir()]',
        ],
    )
    def test_an_untidy_face(self, text):
        assert untidy_face("model/x.py", text)

    def test_a_face_with_all_kinds_of_names_is_right(self):
        text = (
            '"""Text."""\nimport os\nfrom a import b as c\n__all__: list[str] = ["os", "c", "d", "e", "F", "g", "h"]\n'
            "d: int = 1\n(e, g) = 1, 2\nclass F: ...\ntry:\n    h = 1\nexcept E:\n    h = 2\n"
        )
        assert untidy_face("model/x.py", text) == []

    def test_a_long_module_and_a_stale_reason(self):
        assert too_long("x.py", "\n" * 401, 400, {})
        assert too_long("x.py", "\n" * 401, 400, {"x.py": ""})
        assert too_long("x.py", "\n" * 400, 400, {"x.py": "once was long"})
        assert too_long("x.py", "\n" * 400, 400, {}) == []
        assert too_long("x.py", "\n" * 401, 400, {"x.py": "one table"}) == []

    def test_a_page_that_is_not_true(self):
        page = "      parity/   judges\n\n| `parity` | `judge_*`, `rows` |\n"
        assert untrue_page(page, ["parity/judge.py", "parity/judge_rounds.py", "parity/rows.py", "errors.py"]) == []
        assert untrue_page(page, ["parity/judge.py"]) == ["parity/rows is not there"]
        assert untrue_page(page, ["parity/rows.py", "parity/judge.py", "parity/judges.py"]) == [
            "parity/judges is not named"
        ]
        assert untrue_page(page, ["parity/judge.py", "parity/rows.py", "bundle/reader.py"]) == [
            "bundle/ is not in the layout",
            "bundle/reader is not named",
        ]
