"""Prints the shape of the source: sizes, floors and closures. It is a report to read; nothing has to hold.

    make shape

Code lines are those without blanks, comments, docstrings and the texts below fields and constants.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

from test_imports import Graph, import_graph, module_sources, unit_of  # noqa: E402

PACKAGE = ROOT / "src" / "shoal"
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_WIDTH = 14


def texts(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the docstrings of a tree, and the texts below fields and constants."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant | ast.JoinedStr):
                yield child.value


def code_lines(source: str, tree: ast.AST) -> set[int]:
    """Return the numbers of the code lines of a source text."""
    skipped: set[int] = set()
    for text in texts(tree):
        skipped.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return {n for n, line in lines if line.strip() and not line.lstrip().startswith("#")} - skipped


def without_choices(source: str) -> ast.Module:
    """Return the tree of a source text without the imports that only a choice reaches.

    They stand in a branch of a function, or behind one that returns: a feature is imported where an option
    chooses it. Imports for types alone, which nothing loads, are left out too.
    """
    return _WithoutChoices().visit(ast.parse(source))  # type: ignore[no-any-return]


class _WithoutChoices(ast.NodeTransformer):
    def __init__(self) -> None:
        self._in_function = self._in_branch = False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        before = self._in_function, self._in_branch
        if isinstance(node, FUNCTION):
            self._in_function, self._in_branch = True, False
        elif isinstance(node, ast.If):
            self._in_branch = self._in_function or "TYPE_CHECKING" in ast.unparse(node.test)
        elif isinstance(node, ast.match_case):
            self._in_branch = True
        super().generic_visit(node)
        self._in_function, self._in_branch = before
        if self._in_function and isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return):
            self._in_branch = True  # what follows in this block
        return node

    def _visit_import(self, node: ast.Import | ast.ImportFrom) -> ast.AST:
        return ast.Pass() if self._in_branch else node

    visit_Import = visit_ImportFrom = _visit_import  # names of ast


def closure(graph: Graph, start: str, left_out: frozenset[str] = frozenset()) -> set[str]:
    """Return the modules that importing ``start`` reaches, itself included.

    Public names of a package (``import shoal``) are not followed: a package imports nothing by itself.
    """
    reached, waiting = {start}, [start]
    while waiting:
        module = waiting.pop()
        packages = {target for target in graph if target.startswith(f"{module}.")}
        new = graph.get(module, set()) - packages - reached - left_out
        reached |= new
        waiting += new
    return reached


def floors(graph: Graph, modules: set[str]) -> int:
    """Return the number of modules in the longest chain of imports among ``modules``."""
    height: dict[str, int] = {}

    def of(module: str) -> int:
        if module not in height:
            below = [target for target in graph[module] & modules if not module.startswith(f"{target}.")]
            height[module] = 1 + max(map(of, below), default=0)
        return height[module]

    return max(map(of, modules), default=0)


def print_sizes(sources: dict[str, Path], graph: Graph) -> None:
    """Print sizes by package, then the longest functions, files and classes."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    functions: list[tuple[int, str]] = []
    classes: list[tuple[int, str]] = []
    for module, path in sources.items():
        if path.suffix == ".pyi":
            continue
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        code = code_lines(source, tree)
        lines[unit_of(module)] += len(code)
        files[unit_of(module)] += 1
        for node in ast.walk(tree):
            if isinstance(node, FUNCTION):
                inside = code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                functions.append((len(inside), f"{module}.{node.name}"))
            elif isinstance(node, ast.ClassDef):
                methods = sum(isinstance(child, FUNCTION) for child in node.body)
                classes.append((methods, f"{module}.{node.name}"))
    print(f"{'package':<{_WIDTH}}   files  code lines  floors")
    for unit, count in lines.most_common():
        inside_unit = {module for module in graph if unit_of(module) == unit}
        print(f"{unit:<{_WIDTH}}  {files[unit]:6}  {count:10,}  {floors(graph, inside_unit):6}")
    print(f"{'all':<{_WIDTH}}  {files.total():6}  {lines.total():10,}\n")
    lengths = sorted(length for length, _ in functions)
    tail = lengths[len(lengths) * 9 // 10]
    print(f"functions: {len(lengths):,}, median {statistics.median(lengths):g}, 9 of 10 below {tail + 1}")
    for title, sizes in (("longest functions, lines", functions), ("widest classes, methods", classes)):
        print(f"{title}: {', '.join(f'{name} {size}' for size, name in sorted(sizes, reverse=True)[:5])}")


def print_imports(graph: Graph, plain: Graph, recipes: list[str]) -> None:
    """Print how much each recipe imports, and how many modules have one importer.

    Args:
        plain: the imports that no choice is needed for (:func:`without_choices`).
    """
    importers = Counter(target for targets in graph.values() for target in targets)
    once = sum(importers[module] == 1 for module in graph)
    print(f"\nmodules that one other module imports: {once} of {len(graph)}")
    chosen = frozenset(f"shoal.recipes.{name}" for name in recipes)
    optimizers = frozenset(module for module in graph if module.startswith("shoal.optim."))
    modes = {module for module in graph["shoal.train.servers.choice"] if ".servers." in module}
    layouts = frozenset(m for m in graph if unit_of(m) == "pipelining") | {
        "shoal.data.text.padded_examples",  # the graphs of stages have one shape
        "shoal.models.padded_pretraining",
        "shoal.recipes.divided",
        "shoal.recipes.stages",
    }
    print("modules that a recipe reaches; without recipes, optimizers, modes and layouts that are chosen;")
    print("without what any other option chooses:")
    for name in recipes:
        module = f"shoal.recipes.{name}"
        named = (chosen | optimizers | modes | layouts) - {module}
        every, own = closure(graph, module), closure(graph, module, named)
        needed = closure(plain, module, named)
        print(f"  {name:<{_WIDTH}}  {len(every):4}  {len(own):4}  {len(needed):4}")


def print_recipe_names(sources: dict[str, Path], recipes: list[str]) -> None:
    """Print where code outside a recipe's script has its name as a text.

    Models are left out: transformers' model types and the names of networks are texts there.
    """
    print("\nfiles that name a recipe by a text, outside its script:")
    for module, path in sources.items():
        if (
            path.suffix == ".pyi"
            or unit_of(module) == "models"
            or module.removeprefix("shoal.recipes.") in recipes
        ):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        hidden = set(map(id, texts(tree)))
        names = [
            f"{node.value} {node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value in recipes and id(node) not in hidden
        ]
        if names:
            print(f"  {path.relative_to(ROOT)}: {', '.join(names)}")


def print_texts() -> None:
    """Print the lengths of the README and of the examples, which are to be read at a sitting."""
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "examples").glob("*.py")}
    longest = max(lines, key=lambda path: lines[path])
    readme = (ROOT / "README.md").read_text(encoding="utf-8").count("\n")
    print(
        f"\nREADME: {readme} lines; {len(lines)} examples, the longest {longest.name} with {lines[longest]}"
    )


def main() -> None:
    """Print the report."""
    sources, graph = module_sources(PACKAGE), import_graph(PACKAGE)
    plain = import_graph(PACKAGE, without_choices)
    recipes = sorted(folder.name for folder in (PACKAGE / "recipes" / "presets").iterdir() if folder.is_dir())
    print_sizes(sources, graph)
    print_imports(graph, plain, recipes)
    print_recipe_names(sources, recipes)
    print_texts()


if __name__ == "__main__":
    main()
