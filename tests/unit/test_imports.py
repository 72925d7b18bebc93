"""Walks every import of the package and fails on a cycle or on an arrow that the architecture does not allow.

Imports inside functions and under ``TYPE_CHECKING`` count as well, and so does a text that names a module, as
``import_module`` takes it: they make the same knot, only later.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shoal"
CSRC = ROOT / "csrc"

NOUNS = frozenset({"errors", "json_text", "atomic_io", "record", "env", "formatting"})
DECIDERS = NOUNS | {"decide"}
DOERS = frozenset({"comm", "pipelining", "optim", "data", "models"})
NATIVE = frozenset({"native", "_core"})
LAYERS = frozenset({"attention", "dropout"})
BELOW_RECIPES = DECIDERS | NATIVE | LAYERS | DOERS | {"train"}

# Modules that each top-level module may import, besides those inside itself. "shoal" is the package's own
# __init__ (its version), which everybody may read.
ALLOWED: dict[str, frozenset[str]] = {
    "shoal": frozenset({"errors", "comm", "data", "optim", "pipelining", "recipes", "train"}),  # public names
    "errors": frozenset(),
    "json_text": frozenset({"errors"}),
    "atomic_io": frozenset({"errors"}),
    "record": frozenset({"errors", "json_text"}),
    "env": frozenset({"errors"}),
    "formatting": frozenset({"errors"}),
    "decide": NOUNS,
    "_core": frozenset(),
    "native": NOUNS | {"_core"},
    "attention_kernel": frozenset({"decide"}),
    "attention_operators": frozenset({"attention_kernel"}),
    "attention": frozenset({"attention_operators", "decide", "env"}),
    "dropout": frozenset({"attention", "decide"}),
    **dict.fromkeys(sorted(DOERS), DECIDERS | NATIVE | LAYERS),
    "train": DECIDERS | NATIVE | LAYERS | DOERS,
    "recipes": BELOW_RECIPES | {"launch", "planner"},
    "horovod_torch": NOUNS | NATIVE | {"comm"},
    "jax": NOUNS | NATIVE | {"comm"},
    "tensorflow": NOUNS | NATIVE | {"comm", "keras"},
    "keras": NOUNS | NATIVE | {"comm", "jax", "tensorflow"},
    "planner": DECIDERS | {"models"},
    "launch": frozenset({"errors", "json_text", "env", "comm"}),
    "report": frozenset({"errors", "atomic_io", "record", "formatting"}),
    "bench": DECIDERS | NATIVE | {"comm", "jax", "launch", "tensorflow"},
    "bug_report": NOUNS,
    "doctor": BELOW_RECIPES | {"bug_report"},
    "cli": BELOW_RECIPES | {"recipes", "planner", "launch", "report", "bench", "doctor"},
    "__main__": frozenset({"cli"}),
}

# Directories of csrc that each one may include, besides itself. bindings.cc may include all.
CORE_ALLOWED: dict[str, frozenset[str]] = {
    "base": frozenset(),
    **dict.fromkeys(("transport", "optim", "image", "detection"), frozenset({"base"})),
    "engine": frozenset({"base", "transport", "optim"}),
    "device": frozenset({"base", "engine"}),
    "c_api": frozenset({"base", "transport", "engine", "device"}),
    "mpi_abi": frozenset({"c_api"}),
}

Graph = dict[str, set[str]]


# ---- the checker ----------------------------------------------------------------------------------------


def module_sources(package: Path) -> dict[str, Path]:
    """Return the modules of a package by dotted name; a compiled module has the path of its stub."""
    sources: dict[str, Path] = {}
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")]):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        sources.setdefault(".".join(parts), path)
    return sources


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements of a module, those within others too; expressions are most of a tree's nodes."""
    left: list[ast.AST] = [tree]
    while left:
        parent = left.pop()
        for field in ("body", "handlers", "cases", "orelse", "finalbody"):
            left += getattr(parent, field, ())
        yield parent


def imported_names(tree: ast.Module, module: str, *, is_package: bool) -> list[tuple[str, str | None]]:
    """Return every import of a module as (module, name or None), relative ones made absolute."""
    found: list[tuple[str, str | None]] = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + (1 if is_package else 0)
                base = ".".join([*parts[:keep], *filter(None, [node.module])])
            found += [(base, alias.name) for alias in node.names]
    return found


def named_modules(tree: ast.Module, known: Collection[str]) -> set[str]:
    """Return the modules that texts name, as ``"shoal.optim.lamb"`` or ``"shoal.optim.lamb:Lamb"``.

    Another process's module (after ``-m``) and a package with data (``files``) are not imported.
    """
    texts: set[str] = set()
    others: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.List(elts=words) | ast.Tuple(elts=words):
                pairs = itertools.pairwise(words)
                others |= {id(b) for a, b in pairs if isinstance(a, ast.Constant) and a.value == "-m"}
            case ast.Call(func=ast.Name(id="files") | ast.Attribute(attr="files"), args=arguments):
                others |= {id(argument) for argument in arguments}
            case ast.Constant(value=str(text)) if id(node) not in others:
                texts.add(text.partition(":")[0])
    return texts & set(known)


def import_graph(package: Path, parse: Callable[[str], ast.Module] = ast.parse) -> Graph:
    """Return which modules of the package each of its modules imports.

    Args:
        parse: returns the tree of a source text, whose imports count.
    """
    sources = module_sources(package)
    root = package.name
    known = {*sources, f"{root}._core"}
    graph: Graph = {}
    for module, path in sources.items():
        tree = parse(path.read_text(encoding="utf-8"))
        targets = named_modules(tree, known - {root})
        for base, name in imported_names(tree, module, is_package=path.stem == "__init__"):
            if base.split(".")[0] != root:
                continue
            if name and f"{base}.{name}" in known:
                targets.add(f"{base}.{name}")
            else:
                targets.add(base)
        graph[module] = targets - {module}
    return graph


def unit_of(module: str) -> str:
    """``shoal.data.text`` -> ``data``; the package itself -> ``shoal``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def wrong_arrows(graph: Graph) -> list[str]:
    """Return one sentence for each import that the table does not allow and each module it does not know."""
    wrong: list[str] = []
    for unit in sorted({unit_of(module) for module in graph} - set(ALLOWED)):
        wrong.append(
            f"shoal.{unit} is a new top-level module: say in ALLOWED where it belongs and what it may import"
        )
    for module in sorted(graph):
        unit = unit_of(module)
        for target in sorted(graph[module]):
            other = unit_of(target)
            allowed = ALLOWED.get(unit, frozenset()) | {unit, "shoal"}
            if unit in ALLOWED and other not in allowed:
                may = ", ".join(sorted(ALLOWED[unit])) or "nothing of shoal"
                wrong.append(f"{module} imports {target}, but {unit} may only import {may}")
    return wrong


def find_cycle(graph: Graph) -> list[str] | None:
    """Return the modules along one cycle, first and last the same, or ``None``.

    Importing a module imports the packages around it, which may load it by a public name: no knot.
    """
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        around = {target for target in graph.get(module, ()) if module.startswith(f"{target}.")}
        for target in sorted(graph.get(module, set()) - around):
            if cycle := visit(target):
                return cycle
        done.add(path.pop())
        return None

    for module in sorted(graph):
        if cycle := visit(module):
            return cycle
    return None


def environment_reads(source: str) -> list[int]:
    """Return the lines that reach the environment variables through ``os``."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    lines: list[int] = []
    if not any(name in source for name in names):
        return lines
    for node in ast.walk(ast.parse(source)):
        attribute = (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        )
        imported = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in names for alias in node.names)
        )
        if attribute or imported:
            lines.append(node.lineno)
    return lines


def json_reads(source: str) -> list[int]:
    """Return the lines that read JSON through the standard library."""
    lines: list[int] = []
    if "json" not in source:
        return lines
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            of_json = isinstance(node.value, ast.Name) and node.value.id == "json"
            found = of_json and node.attr in {"loads", "load"}
        else:
            found = isinstance(node, ast.ImportFrom) and node.module == "json"
        if found:
            lines.append(node.lineno)
    return lines


# ---- the package ----------------------------------------------------------------------------------------


def test_imports_go_one_way() -> None:
    graph = import_graph(PACKAGE)
    units: Graph = {}
    for module, targets in graph.items():
        units.setdefault(unit_of(module), set()).update(map(unit_of, targets))
    for unit in (*ALLOWED, *sorted(set(units) - set(ALLOWED))):
        if unit in units:
            arrows = sorted(units[unit] - {unit, "shoal"})
            print(f"{unit:>10} -> {', '.join(arrows) or '(nothing of shoal)'}")
    assert not wrong_arrows(graph), "\n".join(wrong_arrows(graph))
    cycle = find_cycle(graph)
    assert cycle is None, "imports form a cycle: " + " -> ".join(cycle or [])


PUBLIC = frozenset({"shoal.pipelining"})
"""Packages that users import from: ``from shoal.pipelining import pipeline``."""


def test_packages_reexport_nothing() -> None:
    for module, path in module_sources(PACKAGE).items():
        if path.stem == "__init__" and module not in PUBLIC:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            imports = imported_names(tree, module, is_package=True)
            inside = [base for base, _ in imports if base.split(".")[0] == "shoal"]
            assert not inside, f"{path.relative_to(ROOT)} imports {inside}: packages re-export nothing"


def test_only_env_reads_environment_variables() -> None:
    for module, path in module_sources(PACKAGE).items():
        if unit_of(module) != "env":
            lines = environment_reads(path.read_text(encoding="utf-8"))
            assert not lines, f"{path.relative_to(ROOT)}, lines {lines}: only shoal.env reads os.environ"


def test_only_json_text_reads_json() -> None:
    """It makes one error of all that can be wrong with a text."""
    for module, path in module_sources(PACKAGE).items():
        if module != "shoal.json_text":
            lines = json_reads(path.read_text(encoding="utf-8"))
            assert not lines, f"{path.relative_to(ROOT)}, lines {lines}: read JSON with json_text.parse_json"


def test_core_knows_neither_python_nor_torch_nor_xla() -> None:
    foreign = re.compile(r'#\s*include\s*[<"](nanobind/|pybind11/|Python\.h|torch/|ATen/|c10/|xla/)')
    sources = [path for path in CSRC.rglob("*") if path.suffix in {".h", ".hpp", ".cc", ".cpp", ".inc"}]
    assert sources
    for path in sources:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if match := foreign.search(line):
                allowed = path == CSRC / "bindings.cc" and match[1] == "nanobind/"
                assert allowed, f"{path.relative_to(ROOT)}, line {number}: {line.strip()}"


def forbidden_includes(core: Path) -> list[str]:
    """Return the includes in the core's sources that do not go down, each as "FILE: LINE"."""
    include = re.compile(r'#\s*(?:include|define SHOAL_KERNELS)\s+"(\w+)/')
    wrong = []
    for part, allowed in CORE_ALLOWED.items():
        for path in sorted((core / part).iterdir()):
            for line in path.read_text(encoding="utf-8").splitlines():
                if (match := include.match(line)) and match[1] not in allowed | {part}:
                    wrong.append(f"{path.relative_to(core)}: {line}")
    return wrong


def test_includes_of_the_core_go_down() -> None:
    assert {path.name for path in CSRC.iterdir() if path.is_dir()} == set(CORE_ALLOWED)
    assert forbidden_includes(CSRC) == []


def test_an_include_that_goes_up_is_found(tmp_path: Path) -> None:
    for part in CORE_ALLOWED:
        (tmp_path / part).mkdir()
    (tmp_path / "transport" / "shm.h").write_text('#include "base/mutex.h"\n#include "engine/types.h"\n')
    (tmp_path / "base" / "sum.cc").write_text('#define SHOAL_KERNELS "optim/lamb_kernels.inc"\n')
    assert forbidden_includes(tmp_path) == [
        'base/sum.cc: #define SHOAL_KERNELS "optim/lamb_kernels.inc"',
        'transport/shm.h: #include "engine/types.h"',
    ]


# Refuses every import that is neither of the standard library, nor of shoal, nor named.
_IMPORT_ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {allowed}:
            raise ImportError(name + " is not allowed here")

sys.meta_path.insert(0, Refuse())
import {module}
"""


def _modules(*units: str) -> list[str]:
    return [module for module in module_sources(PACKAGE) if unit_of(module) in units]


@pytest.mark.parametrize(
    ("modules", "third_party"),
    [
        pytest.param(_modules(*sorted(NOUNS), "doctor"), set(), id="nouns and doctor: none"),
        pytest.param(_modules("decide"), {"numpy"}, id="decide: numpy"),
    ],
)
def test_imports_without_third_party_packages(modules: list[str], third_party: set[str]) -> None:
    assert modules
    program = _IMPORT_ALONE.format(allowed={"shoal", *third_party}, module=", ".join(modules))
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


# ---- the checker itself ---------------------------------------------------------------------------------


def _package(folder: Path, files: dict[str, str]) -> Path:
    for name, source in {"__init__.py": "", **files}.items():
        path = folder / "shoal" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder / "shoal"


def test_checker_accepts_what_the_architecture_allows(tmp_path: Path) -> None:
    package = _package(
        tmp_path,
        {
            "errors.py": "import os\n",
            "record.py": "from shoal.errors import ShoalError\nfrom shoal import __version__\n",
            "train/__init__.py": "",
            "train/loop.py": "from shoal import record\nfrom shoal import _core\nfrom . import parts\n",
            "train/parts.py": "import numpy\n",
        },
    )
    graph = import_graph(package)
    assert graph["shoal.train.loop"] == {"shoal.record", "shoal._core", "shoal.train.parts"}
    assert graph["shoal.record"] == {"shoal.errors", "shoal"}
    assert wrong_arrows(graph) == []
    assert find_cycle(graph) is None


@pytest.mark.parametrize(
    "source",
    [
        "from shoal.train.loop import step",
        "import shoal.train.loop",
        "from shoal.train import loop",
        "from ..train import loop",
        "def f():\n    from shoal.train import loop",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shoal.train.loop import step",
        "from importlib import import_module\nimport_module('shoal.train.loop').step()",
        "CLASSES = {'step': 'shoal.train.loop:Step'}",
    ],
)
def test_checker_sees_a_wrong_arrow(tmp_path: Path, source: str) -> None:
    package = _package(
        tmp_path,
        {
            "data/__init__.py": "",
            "data/text.py": source,
            "train/__init__.py": "",
            "train/loop.py": "",
        },
    )
    (message,) = wrong_arrows(import_graph(package))
    assert message.startswith("shoal.data.text imports shoal.train.loop, but data may only import ")


def test_checker_leaves_other_processes_and_data_out(tmp_path: Path) -> None:
    source = """
from importlib.resources import files
COMMAND = [sys.executable, "-m", "shoal.train.loop"]
FILES = files("shoal.train")
"""
    package = _package(tmp_path, {"data/text.py": source, "train/__init__.py": "", "train/loop.py": ""})
    assert import_graph(package)["shoal.data.text"] == set()


def test_checker_sees_siblings_and_new_modules(tmp_path: Path) -> None:
    package = _package(
        tmp_path,
        {
            "optim/__init__.py": "",
            "optim/lamb.py": "import shoal.data.text",
            "data/__init__.py": "",
            "data/text.py": "",
            "utils.py": "import shoal.optim.lamb",
        },
    )
    messages = wrong_arrows(import_graph(package))
    assert messages[0].startswith("shoal.utils is a new top-level module: say in ALLOWED where it belongs")
    assert messages[1].startswith("shoal.optim.lamb imports shoal.data.text, but optim may only import")
    assert len(messages) == 2


def test_checker_sees_a_cycle(tmp_path: Path) -> None:
    package = _package(
        tmp_path,
        {
            "train/__init__.py": "",
            "train/a.py": "from shoal.train import b",
            "train/b.py": "def late():\n    from shoal.train.c import f",
            "train/c.py": "import_module('shoal.train.a')",
            "train/d.py": "from . import a, b, c",
        },
    )
    graph = import_graph(package)
    assert wrong_arrows(graph) == []
    assert find_cycle(graph) == ["shoal.train.a", "shoal.train.b", "shoal.train.c", "shoal.train.a"]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nos.environ['A']", [2]),
        ("import os\n\nos.getenv('A')", [3]),
        ("from os import environ", [1]),
        ("import os\nos.path.join('a', 'b')\nenviron = {}\nenviron['A']", []),
    ],
)
def test_checker_sees_reads_of_the_environment(source: str, lines: list[int]) -> None:
    assert environment_reads(source) == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import json\njson.loads('1')", [2]),
        ("import json\n\njson.load(file)", [3]),
        ("from json import loads", [1]),
        ("import json\njson.dumps(1)\nload('x')\nother.loads('x')", []),
    ],
)
def test_checker_sees_reads_of_json(source: str, lines: list[int]) -> None:
    assert json_reads(source) == lines
