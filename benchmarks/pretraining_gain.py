"""Gain of pretraining on WikiText for SQuAD, with the same number of finetuning steps.

The commands that a user gives: prepare, ``train bert --preset tiny``, then ``finetune squad`` twice, from the
pretrained weights and, with ``--model.from-scratch``, from random ones. Training questions are those of the
first 200 of XQuAD's paragraphs, the last 40 are held out. So small a model learns by heart what it is trained
on and little else: the questions that it has seen tell the two apart, the others are shown beside them.
``--report FILE`` writes the page with both curves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark
from shoal.env.settings import TEST_DATA, test_data_dir

NUM_TRAINING_PARAGRAPHS = 200
SEQUENCE = 128
SEEDS = (1, 2, 3)
MODEL = ("--model.vocab-size", "4096")
"""Beside the preset's 2 layers of 128."""
STEPS = 300


def shoal(*arguments: str | Path) -> None:
    """Run a shoal command; its output is shown if it fails."""
    command = [sys.executable, "-m", "shoal", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")


def split_questions(source: Path, folder: Path) -> tuple[Path, Path]:
    """Write the first paragraphs and the others as files of their own."""
    whole = json.loads(source.read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in whole["data"] for paragraph in article["paragraphs"]]
    files = []
    for name, part in (
        ("seen", paragraphs[:NUM_TRAINING_PARAGRAPHS]),
        ("held-out", paragraphs[NUM_TRAINING_PARAGRAPHS:]),
    ):
        files.append(folder / f"{name}.json")
        files[-1].write_text(json.dumps({"version": "1.1", "data": [{"title": name, "paragraphs": part}]}))
    return files[0], files[1]


def pretrain(data: Path, folder: Path) -> Path:
    """Pretrain on WikiText-2's two files; return the run."""
    text, run = folder / "text", folder / "pretrained"
    files = [data / "wikitext2" / f"{name}.txt" for name in ("valid", "test")]
    shoal("prepare", "text", *files, "--out", text, "--tokenizer", "wordpiece", "--vocab-size", "4096")
    shoal(
        "train", "bert", "--preset", "tiny", *MODEL, "--data.path", text, "--run.dir", run, "--workers", "2",
        "--phase2.max-seq-length", str(SEQUENCE),
    )  # fmt: skip
    return run


def finetune(model: Path, questions: tuple[Path, Path], run: Path, *options: str) -> tuple[float, float]:
    """Finetune; return F1 on the questions seen and on those held out."""
    seen, held_out = questions
    shoal(
        "finetune", "squad", "--preset", "tiny", "--model", model, "--data", seen, "--eval", seen,
        "--run.dir", run, "--window.max-seq-length", str(SEQUENCE), "--train.total-steps", str(STEPS),
        "--run.validation-frequency", str(STEPS // 6), "--run.log-frequency", "10", *options,
    )  # fmt: skip
    scores: list[dict[str, Any]] = [json.loads((run / "scores.json").read_text())]
    again = run.with_name(f"{run.name}-held-out")
    shoal(
        "finetune", "squad", "--preset", "tiny", "--model", run, "--data", seen, "--eval", held_out,
        "--run.dir", again, "--window.max-seq-length", str(SEQUENCE), "--train.total-steps", "1",
        "--optim.learning-rate", "0",
    )  # fmt: skip
    scores.append(json.loads((again / "scores.json").read_text()))
    return scores[0]["f1"], scores[1]["f1"]


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--report", type=Path, metavar="FILE", help="write the page with both curves")
    bench = Benchmark("pretraining_gain", options=options)
    data = test_data_dir()
    if not (data / "wikitext2").is_dir():
        raise SystemExit(f"{data} has no wikitext2: name a folder with the test data in {TEST_DATA}")
    seeds = SEEDS[:1] if bench.quick else SEEDS
    found: dict[str, list[tuple[float, float]]] = {"pretrained": [], "random": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = pretrain(data, folder)
        questions = split_questions(data / "squad" / "xquad.en.json", folder)
        for seed in seeds:
            for start, rows in found.items():
                scratch = ("--model.from-scratch",) if start == "random" else ()
                run = folder / f"{start}-{seed}"
                rows.append(finetune(model, questions, run, "--train.seed", str(seed), *scratch))
        if bench.args.report:
            runs = [folder / f"{start}-{seeds[0]}" for start in found]
            shoal("report", *runs, "--out", bench.args.report.absolute())
    for column, (what, target) in enumerate((("questions seen", 1.0), ("held-out questions", None))):
        bench.add(
            f"F1 after {STEPS} steps, {what}",
            ours=[row[column] for row in found["pretrained"]],
            peer=[row[column] for row in found["random"]],
            peer_name="finetuned from random weights",
            unit="F1",
            better="higher",
            target=target,
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
