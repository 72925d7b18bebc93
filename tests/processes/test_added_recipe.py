"""A recipe of another package: a script, presets and one entry point give it every command.

``tests/digits_recipe`` is that package. It is installed into a folder as by pip, with its entry point in the
metadata, and is found by processes that have the folder on their path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from digits_recipe.digits import Digits
from forked import command, fork_process, wait_for
from forked_programs import find_recipes
from shoal import recipes
from shoal.record import Evaluation, Start, read_record

PACKAGE = Path(__file__).resolve().parents[1] / "digits_recipe"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and its metadata."""
    folder = tmp_path_factory.mktemp("site-packages")
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = folder / "digits_recipe-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: digits-recipe\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[shoal.recipes]\ndigits = digits_recipe:DIGITS\n")
    return folder


def with_package(folder: Path, arguments: tuple[str, ...], files: list[Path]) -> None:
    """Run a command in a process that is forked from one in which the package was not installed."""
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)  # of the workers, which find the package themselves
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    find_recipes()
    command(arguments, files, folder.parent)


def shoal(folder: Path, *arguments: str) -> str:
    files = [folder.parent / "out", folder.parent / "err"]
    for file in files:
        file.unlink(missing_ok=True)
    exit_codes = wait_for([fork_process(with_package, folder, arguments, files)])
    out, err = (file.read_text() for file in files)
    assert exit_codes == [0], out + err
    return out


@pytest.fixture(scope="module")
def run_dir(installed: Path) -> Path:
    """A run of the recipe."""
    shoal(installed, "train", "digits", "--run.dir", str(installed.parent / "run"), "--workers", "1")
    return installed.parent / "run"


def test_train(installed: Path, run_dir: Path) -> None:
    help_text = shoal(installed, "train", "--help")
    assert "digits" in help_text and "Train a network to read the digits of clocks." in help_text
    rows = read_record(run_dir)
    assert next(row.recipe for row in rows if isinstance(row, Start)) == "digits"
    assert [row.step for row in rows if isinstance(row, Evaluation)] == [30]
    assert next(row for row in rows if isinstance(row, Evaluation)).metrics["accuracy"] > 0.5
    assert (run_dir / "model.pt").is_file()


def test_predict_and_evaluate_are_those_of_the_run(installed: Path, run_dir: Path, tmp_path: Path) -> None:
    held_out, file = Digits(1_000, 200), tmp_path / "digits.txt"
    file.write_text("".join(f"{' '.join(map(repr, x.tolist()))} {int(y)}\n" for x, y in held_out))
    model = ("--model", str(run_dir), "--device", "cpu", "--workers", "1")
    (last,) = (row for row in read_record(run_dir) if isinstance(row, Evaluation))
    said = shoal(installed, "evaluate", "digits", str(file), *model)
    assert float(said.removeprefix("accuracy ")) == pytest.approx(last.metrics["accuracy"], abs=1e-6)
    rows = [
        json.loads(line) for line in shoal(installed, "predict", "digits", str(file), *model).splitlines()
    ]
    right = [row["digit"] == int(digit) for row, (_, digit) in zip(rows, held_out, strict=True)]
    assert sum(right) / 200 == pytest.approx(last.metrics["accuracy"], abs=1e-6)


def test_bench_train_counts_its_sample(installed: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ("--batch", "8", "--steps", "2", "--warm-up", "1", "--json", str(file), "--workers", "1")
    shoal(installed, "bench", "train", "digits", *options)
    result = json.loads(file.read_text())
    assert (result["recipe"], result["unit"], result["global_batch"]) == ("digits-tiny", "digits", 8)
    assert len(result["samples_s"]) == 2
    assert result["flops_per_sample"] == 3 * 2 * (7 * 32 + 32 * 10)


def test_plan(installed: Path) -> None:
    said = shoal(installed, "plan", "digits-wide", "--cluster", "2xp4d.24xlarge", "--global-batch", "4096")
    assert "digits-wide on 2xp4d.24xlarge" in said and "time to train" in said


def test_submit(installed: Path) -> None:
    pods = ("--image", "shoal:1", "--claim", "runs", "--gpus-per-host", "8", "--dry-run")
    machine = ("--machine", "p4d.24xlarge")
    words = ("shoal", "train", "digits", "--preset", "wide")
    said = shoal(installed, "submit", "kubernetes", "--hosts", "2", *pods, *machine, "--", *words)
    assert "digits-wide on 2xp4d.24xlarge" in said


def test_a_process_finds_it_by_its_entry_point(installed: Path) -> None:
    program = "from shoal.recipes import RECIPES, script; print(*RECIPES); print(script('digits').PRESETS)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    names, presets = done.stdout.splitlines()
    assert names == " ".join([*recipes.RECIPES, "digits"]), "ours come first"
    assert presets == "('tiny', 'wide')"


def test_it_cannot_replace_one_of_ours_and_has_to_be_a_recipe(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    metadata = tmp_path / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[shoal.recipes]\nbert = digits_recipe:DIGITS\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert recipes.installed() == {"digits": recipes.installed()["digits"]}
    (metadata / "entry_points.txt").write_text("[shoal.recipes]\nother = json:loads\n")
    with pytest.raises(TypeError, match=r"entry point other .* not a Recipe"):
        recipes.installed()
