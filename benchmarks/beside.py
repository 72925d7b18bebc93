"""Step time of a training whose weights are evaluated beside it, against the same without evaluations.

Two runs of ``shoal finetune classify`` on one worker with one thread, by turns. In the middle of the first
begins an evaluation, in another process and on another core; the second has none. Samples are the times of
the steps of the second half, of the first run those that were taken before the scores came. The copy of the
weights, the start of the process, its priority and its memory traffic are in them. What two cores of this
machine cost each other is measured in the same turns: a third run, without evaluations, whose second half has
a process beside it that multiplies matrices.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Benchmark
from benchmarks.machine import ForeignCores
from shoal.record import Evaluation, Step, read_record

LIMIT = 1.03
WORDS = ["sun", "moon", "river", "stone", "bird", "tree", "wind", "light", "road", "hill", "rain", "field"]


def prepare(folder: Path, size: str) -> None:
    """Write a BERT without weights, pairs to train on and as many to evaluate as take some seconds."""
    from transformers import BertConfig

    from shoal.data.text.tokenizer import train_tokenizer
    from shoal.data.text.tokenizer_files import tokenizer_json

    tokenizer = train_tokenizer("wordpiece", [" ".join(WORDS)] * 20, vocab_size=120, lowercase=True)
    (folder / "bert").mkdir()
    (folder / "bert" / "tokenizer.json").write_bytes(tokenizer_json(tokenizer))
    hidden, layers = {"tiny": (64, 2), "small": (256, 4), "base": (768, 12)}[size]
    config = BertConfig(
        vocab_size=120,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        intermediate_size=4 * hidden,
    )
    config.architectures = ["BertModel"]
    config.save_pretrained(folder / "bert")
    for name, count in (("train", 512), ("held-out", {"tiny": 4_000, "small": 2_000, "base": 300}[size])):
        rows = [
            f"{WORDS[i % 12]} {WORDS[i % 7]}\t{WORDS[i % 5]}\t{'same' if i % 2 else 'other'}"
            for i in range(count)
        ]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence1\tsentence2\tgold_label", *rows]) + "\n")


def train(folder: Path, *, beside: bool, steps: int, number: int) -> tuple[list[float], float]:
    """Return the seconds of each step of the second half, and the share of them beside the evaluation."""
    run_dir = folder / f"{'beside' if beside else 'plain'}-{number}"
    command = [
        *(sys.executable, "-m", "shoal", "finetune", "classify", "--preset", "tiny"),
        *("--model", folder / "bert", "--model.from-scratch"),
        *("--data", folder / "train.tsv", "--eval", folder / "held-out.tsv"),
        *("--run.dir", run_dir, "--run.log-frequency", 1, "--run.checkpoint-frequency", steps),
        *("--train.total-steps", steps, "--train.global-batch-size", 16, "--workers", 1),
        *("--distributed.device", "cpu", "--run.validation-frequency", steps // 2 if beside else steps),
        *("--run.validation-beside", int(beside)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"training failed:\n{done.stdout}\n{done.stderr}")
    rows = read_record(run_dir)
    scored = [row.time_s for row in rows if isinstance(row, Evaluation) and row.beside]
    taken = [row for row in rows if isinstance(row, Step) and row.step > steps // 2]
    during = [row.step_s for row in taken if not beside or row.time_s < max(scored, default=0.0)]
    return during, len(during) / len(taken)


NEIGHBOUR = """
import torch
torch.set_num_threads(1)
a = torch.randn(512, 512)
while True:
    a @ a
"""


@contextmanager
def neighbour() -> Iterator[None]:
    """Multiply matrices in another process, with one thread and the priority of an evaluation."""
    process = subprocess.Popen(["nice", "-n", "10", sys.executable, "-c", NEIGHBOUR])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--size", choices=("tiny", "small", "base"), default="small", help="of the model")
    options.add_argument("--steps", type=int, default=0, help="optimizer steps of a run")
    bench = Benchmark("beside", options=options)
    size: str = bench.args.size
    steps = bench.args.steps or {"tiny": 1_500, "small": 300, "base": 60}[size]
    with_it: list[float] = []
    without: list[float] = []
    disturbed: list[float] = []
    foreign: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), size)
        for number in range(2 if bench.quick else 4):
            with ForeignCores() as watch:
                without += train(Path(name), beside=False, steps=steps, number=number)[0]
                taken, share = train(Path(name), beside=True, steps=steps, number=number)
            if not taken:
                raise SystemExit(f"no evaluation ended within {steps} steps: raise --steps")
            print(f"{100 * share:.0f} % of the steps were taken beside an evaluation", file=sys.stderr)
            with_it += taken
            foreign.append(watch.cores or 0.0)
            with neighbour():
                disturbed += train(Path(name), beside=False, steps=steps, number=number + 100)[0]
    bench.add(
        f"BERT {size}, 1 worker with 1 thread: step time beside an evaluation",
        ours=[1_000 * value for value in with_it],
        peer=[1_000 * value for value in without],
        peer_name="the same without evaluations",
        unit="ms",
        target=1 / LIMIT,
        foreign_cores=foreign,
    )
    bench.add(
        f"BERT {size}, 1 worker with 1 thread: step time beside an evaluation, against any other work",
        ours=[1_000 * value for value in with_it],
        peer=[1_000 * value for value in disturbed],
        peer_name="without evaluations, beside matrix products of another process",
        unit="ms",
        target=1 / LIMIT,
    )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
