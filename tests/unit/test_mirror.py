"""Checks that the tests mirror the source: in folders, in names, and with tests of every module.

To find the tests of a module: ``grep -rl shoal.comm.routes tests``.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from test_imports import CSRC, PACKAGE, ROOT, Graph, import_graph, imported_names, module_sources, unit_of

TESTS = ROOT / "tests"
NOT_OF_THE_PACKAGE = {"benchmarks"}
"""Folders of ``tests/unit`` for code outside of ``src/shoal``."""

# Modules that no test names, and that no tested module of their package imports: others run them.
# module: (test, a part of what it runs)
RUN_BY_OTHERS = {
    "shoal.__main__": ("processes/test_train_command.py", '"-m", "shoal"'),
    "shoal.bench.collectives": ("processes/test_bench_comm.py", '"comm"'),
    "shoal.bench.framework_calls": ("real/test_framework_launch.py", '"comm"'),
    "shoal.cli.bench": ("processes/test_bench_comm.py", '"bench"'),
    "shoal.cli.launch": ("processes/test_launch_in_job.py", '"launch"'),
    "shoal.cli.pipeline": ("unit/report/test_pipeline_figure.py", '"pipeline"'),
    "shoal.cli.prepare": ("processes/test_prepare_images.py", '"prepare"'),
    "shoal.cli.prepare_text": ("processes/test_train_command.py", '"prepare", "text"'),
}


def has_code(path: Path) -> bool:
    """Return whether a module is more than a docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not isinstance(node, ast.Expr | ast.ImportFrom) for node in body)


@cache
def named_in(file: Path, known: frozenset[str]) -> tuple[frozenset[str], frozenset[Path]]:
    """Return the modules of the package that a file imports or names, and its helpers in ``tests``."""
    text = file.read_text(encoding="utf-8")
    found = known.intersection(re.findall(r"\bshoal(?:\.\w+)+", text))  # as in "-m shoal.comm.server"
    helpers = set()
    for base, name in imported_names(ast.parse(text), file.stem, is_package=False):
        found |= {base, f"{base}.{name}"} & known
        for folder in (file.parent, TESTS, TESTS / "processes"):
            helper = folder / f"{base}.py"
            if helper.is_file() and not helper.name.startswith("test_"):
                helpers.add(helper)
    return found, frozenset(helpers)


@cache
def shoal_modules_of(test: Path, known: frozenset[str]) -> frozenset[str]:
    """Return the modules of the package that a test file imports or names, or its helpers in ``tests`` do."""
    found: frozenset[str] = frozenset()
    done, left = {test}, [test]
    while left:
        modules, helpers = named_in(left.pop(), known)
        found |= modules
        left += helpers - done
        done |= helpers
    return found


def reached(tested: set[str], graph: Graph) -> set[str]:
    """Return the tested modules and those of the same package that they import."""
    done, left = set(tested), list(tested)
    while left:
        module = left.pop()
        for target in graph.get(module, set()) - done:
            if unit_of(target) == unit_of(module):
                done.add(target)
                left.append(target)
    return done


def test_every_module_has_tests() -> None:
    sources = module_sources(PACKAGE)
    tests = set(TESTS.rglob("test_*.py")) - {Path(__file__)}
    tested: set[str] = set().union(*(shoal_modules_of(test, frozenset(sources)) for test in tests))
    without = {
        module
        for module in set(sources) - reached(tested, import_graph(PACKAGE))
        if sources[module].suffix == ".py" and has_code(sources[module])
    }
    assert without == set(RUN_BY_OTHERS), "write a test, or name the one that runs it in RUN_BY_OTHERS"
    for module, (test, command) in RUN_BY_OTHERS.items():
        assert command in (TESTS / test).read_text(encoding="utf-8"), f"{test} does not run {module}"


def test_folders_of_unit_tests_are_packages_that_they_import() -> None:
    known = frozenset(module_sources(PACKAGE))
    for test in sorted((TESTS / "unit").glob("*/**/test_*.py")):
        parts = test.relative_to(TESTS / "unit").parent.parts
        if parts[0] in NOT_OF_THE_PACKAGE:
            continue
        package = ".".join(("shoal", *parts))
        assert package in known, f"{test.relative_to(ROOT)}: there is no {package}"
        modules = shoal_modules_of(test, known)
        assert any(module == package or module.startswith(f"{package}.") for module in modules), (
            f"{test.relative_to(ROOT)} imports nothing of {package}: move it to the package that it tests"
        )


def test_names_of_core_tests_are_those_of_sources() -> None:
    """``topology_test.cc`` tests ``topology.cc``; ``engine_faults_test.cc`` faults of ``engine.cc``;
    ``image_finish_test.cc`` tests ``image/finish.cc``."""
    sources = {path.with_suffix("").relative_to(CSRC) for path in CSRC.rglob("*.*")}
    names = {path.name for path in sources} | {f"{path.parent.name}_{path.name}" for path in sources}
    names |= {path.parent.name for path in sources}
    for test in sorted((TESTS / "core").glob("*_test.c*")):
        name = test.stem.removesuffix("_test")
        prefixes = {name} | {name[:end] for end, letter in enumerate(name) if letter == "_"}
        assert prefixes & names, f"{test.name} is named after no source of csrc"
