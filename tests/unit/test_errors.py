"""Exit codes, suggestions and ranges."""

from __future__ import annotations

import json
import math
import re
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.errors import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USAGE,
    MODULES_OF_EXTRAS,
    ShoalError,
    UsageError,
    did_you_mean,
    import_extra,
    missing_extra,
    require_positive,
)


@pytest.mark.parametrize(
    ("value", "limits", "rule"),
    [
        (0, {}, "at least 1"),
        (1.0, {"least": 0, "below": 1}, "at least 0 and below 1"),
        (-0.1, {"least": 0, "most": 1}, "from 0 to 1"),
        (1.1, {"least": 0, "most": 1}, "from 0 to 1"),
        (math.nan, {"least": 0, "most": 1}, "from 0 to 1"),
    ],
)
def test_a_number_out_of_its_range_is_named(value: float, limits: dict[str, float], rule: str) -> None:
    with pytest.raises(UsageError, match=f"^train.rate {value} must be {rule}$"):
        require_positive("train", SimpleNamespace(rate=value), "rate", **limits)


def test_numbers_at_the_ends_of_their_range_are_taken() -> None:
    numbers = SimpleNamespace(low=0, high=1, none=None)
    require_positive("train", numbers, "low", "high", "none", least=0, most=1)


def test_exit_codes_differ_and_the_errors_carry_theirs() -> None:
    assert len({EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_STOPPED}) == 4
    assert (ShoalError("x").exit_code, UsageError("x").exit_code) == (EXIT_FAILURE, EXIT_USAGE)


def test_usage_error_is_caught_as_either() -> None:
    """Libraries expect a ValueError for a wrong argument, the command line a ShoalError."""
    for kind in (UsageError, ShoalError, ValueError):
        with pytest.raises(kind, match="wrong"):
            raise UsageError("wrong")
    assert not issubclass(ShoalError, ValueError)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("learning-rate", " Did you mean 'learning_rate'?"),
        ("warmup_step", " Did you mean 'warmup_steps'?"),
        ("zebra", ""),
        ("", ""),
    ],
)
def test_did_you_mean(word: str, text: str) -> None:
    assert did_you_mean(word, iter(["learning_rate", "warmup_steps", "weight_decay"])) == text
    assert did_you_mean(word, []) == ""


# ---- packages that are not installed -----------------------------------------------------------------------


TORCH = "pip install 'torch>=2.11' 'safetensors>=0.5' 'tensorboardX>=2.6.4'"
TEXT = "pip install 'transformers>=5.0' 'tokenizers>=0.22' 'sentencepiece>=0.2.1' 'protobuf>=5'"
NAMESAKES = {"google-auth", "googleapis-common-protos"}
"""Distributions that only share the name of a module with one that an extra requires."""


def test_modules_of_extras_are_those_that_the_package_requires() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = pyproject["project"]["optional-dependencies"]
    distributions = metadata.packages_distributions()
    for extra, modules in MODULES_OF_EXTRAS.items():
        required = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in extras[extra]}
        names = (name for module in modules for name in distributions.get(module, [module]))
        found = {name.lower().replace("_", "-") for name in names}
        assert required <= found and found - required <= NAMESAKES


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "torch",
            f"needs torch, which is not installed: {TORCH}",
        ),
        (
            "torch.distributed",
            f"needs torch, which is not installed: {TORCH}",
        ),
        (
            "google.protobuf",
            f"needs google, which is not installed: {TEXT}",
        ),
        ("torchlike", ""),
        ("", ""),
    ],
)
def test_missing_extra(module: str, text: str) -> None:
    absent = ModuleNotFoundError("No module", name=module)
    assert missing_extra(absent) == text
    wrapped = ImportError("cannot import the command")
    wrapped.__cause__ = absent
    assert missing_extra(wrapped) == text
    assert missing_extra(ImportError("no such name", name="torch")) == ""  # it is there, but too old


def test_a_package_that_is_not_installed_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert import_extra("json", "vision", "numbers need json") is json
    monkeypatch.syspath_prepend(tmp_path)
    for name, line in {
        "needs_torch": "raise ModuleNotFoundError('no torch', name='torch')",
        "old": "from json import dance",
    }.items():
        (tmp_path / f"{name}.py").write_text(line)
    with pytest.raises(UsageError) as raised:
        import_extra("needs_torch", "vision", "images need needs_torch")
    assert str(raised.value) == (
        "images need needs_torch, which cannot be imported (no torch); "
        "pip install 'torchvision' 'pillow>=11' 'faster-coco-eval>=1.7'"
    )
    with pytest.raises(
        ShoalError, match=r"cannot import name 'dance' from 'json'.*pip install 'torchvision'"
    ) as raised:
        import_extra("old", "vision", "images need old")
    assert raised.value.exit_code == EXIT_FAILURE


def test_no_page_or_message_installs_shoal_by_its_name() -> None:
    """The name is not registered: an index may have a stranger's package under it."""
    root = Path(__file__).parents[2]
    files = [root / "README.md", *(root / "docker").iterdir()]
    files += [path for folder in ("docs", "src", "benchmarks") for path in (root / folder).rglob("*.*")]
    by_name = re.compile(r"pip\S* (?:install|wheel)\b[^\n#]* ['\"]?shoal(?![\w.…/-])")
    texts = {path: path.read_text() for path in files if path.suffix in {"", ".md", ".py", ".sh", ".txt"}}
    assert len(texts) > 300
    assert [f"{path}: {found[0]}" for path, text in texts.items() for found in by_name.finditer(text)] == []
    assert by_name.search("pip install --pre 'shoal[torch]==0.*'") and by_name.search("pip install shoal\n")
