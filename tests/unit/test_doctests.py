"""Runs the examples in the docstrings of the package."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.data.images.synthetic import make_images
from synthetic_text import prepare, random_documents

SOURCES = Path(__file__).resolve().parents[2] / "src"
FRAMEWORKS = ("jax", "keras", "tensorflow")
"""Packages whose examples ``real/test_jax.py`` and the others run."""
MODULES = [
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCES.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8") and path.parent.name not in FRAMEWORKS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the examples find prepared text and images."""
    path = tmp_path_factory.mktemp("examples")
    documents = random_documents([400] * 20, vocab_size=100)
    prepare(path / "runs" / "text", {"train": documents, "validation": documents[:2]}, vocab_size=100)
    make_images(path / "runs" / "images", num_train=20, num_validation=10, size=48)
    (path / "runs" / "example").mkdir()
    return path


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    try:
        failed, attempted = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert attempted and not failed, f"{failed} of {attempted} examples failed; see the output"


@pytest.mark.parametrize("name", sorted(set(shoal.__all__) - {"__version__"}))
def test_public_names_are_documented_with_an_example(name: str) -> None:
    documented = getattr(shoal, name).__doc__ or ""
    assert ">>> " in documented, f"shoal.{name} has no example in its docstring"


def test_import_is_quick_and_needs_no_torch() -> None:
    program = "import sys, shoal; assert not {'torch', 'numpy'} & set(sys.modules); shoal.nothing"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "AttributeError: module 'shoal' has no attribute 'nothing'" in done.stderr


@pytest.mark.parametrize(
    "package", ["shoal", "shoal.horovod_torch", *(f"shoal.{name}" for name in FRAMEWORKS)]
)
def test_the_stub_names_the_same(package: str) -> None:
    """Type checkers read ``__init__.pyi``."""
    stub = SOURCES.joinpath(*package.split("."), "__init__.pyi").read_text(encoding="utf-8")
    lines = [line for line in stub.splitlines() if line.startswith("from ")]
    imported = {line.rpartition(" ")[2]: line.split()[1] for line in lines}
    modules = importlib.import_module(package)._MODULES
    assert imported == {name: module.removesuffix(f".{name}") for name, module in modules.items()}
