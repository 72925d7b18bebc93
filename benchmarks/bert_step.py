"""Is a step of BERT faster than transformers' ``Trainer`` on the same sequences?

BERT's recipe on segments of WikiText, then finetuning on the lengths of SQuAD and of MNLI. Both sides have
the same weights (their losses are compared before anything is measured), batches, dropout, fused AdamW and
clipping, and take their steps by turns in one process. The Trainer has SDPA and pads to the longest of the
batch; a padded place of it counts for nothing: both sides are measured in tokens that are text. The fill in
a row's name is the share of the Trainer's places that hold one.

On CPUs, two workers also run our step, alternately over backend shoal (the default) and over gloo.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.harness import Benchmark, peer_module
from benchmarks.machine import ForeignCores
from benchmarks.worker import run_alone, run_here
from shoal.env.settings import TEST_DATA, test_data_dir

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: a model, its precision and its batches."""

    title: str
    target: float
    batch_size: dict[Device, int]
    """Sequences in a step: the published number a GPU, fewer where a step would take minutes."""
    max_seq_length: int
    needs: tuple[str, ...]
    """Files of the test data, beside the tokenizer."""
    tokenizer: str = "tokenizers/bert-uncased-vocab.txt"
    compiled: bool = False
    """Both sides are compiled on a GPU."""


VOCABULARY = "tokenizers/bert-uncased-vocab.txt"
CASES = {
    "pretraining": Case(
        title="pretraining, WikiText",
        target=1.2,
        batch_size={"cpu": 8, "cuda": 64},
        max_seq_length=128,
        needs=("wikitext2/test.txt", "wikitext2/valid.txt"),
    ),
    "albert": Case(
        title="ALBERT's pretraining, WikiText",
        target=1.0,
        batch_size={"cpu": 8, "cuda": 64},
        max_seq_length=512,
        needs=("wikitext2/test.txt", "wikitext2/valid.txt"),
        tokenizer="tokenizers/albert_spiece.model",
        compiled=True,
    ),
    "squad": Case(
        title="SQuAD",
        target=1.3,
        batch_size={"cpu": 8, "cuda": 32},
        max_seq_length=384,
        needs=("squad/cs224n-dev-v2.0.json",),
    ),
    "mnli": Case(
        title="MNLI",
        target=1.3,
        batch_size={"cpu": 32, "cuda": 32},
        max_seq_length=128,
        needs=("nli/xnli.en.dev.tsv",),
    ),
}
NUM_STEPS = {"cpu": 8, "cuda": 60}
MAX_FOREIGN = 0.3
MOST_RETAKEN = 1


def measure(case: str, device: Device, size: str, num_steps: int) -> tuple[dict[str, Any], float]:
    """Run one case in a process of its own; return its result (see the worker), and foreign cores."""
    spec = {"case": case, "device": device, "size": size, "num_steps": num_steps}
    threads = "1" if size == "tiny" else str(os.cpu_count() or 1)
    with ForeignCores() as watch:
        result = run_alone("benchmarks.bert_step_worker:measure", spec, settings={"OMP_NUM_THREADS": threads})
    return result, watch.cores or 0.0


def compare_backends(bench: Benchmark, name: str, size: str, num_steps: int) -> None:
    """Add the row of shoal against gloo, two workers with one thread each."""
    spec = {"case": name, "device": "cpu", "size": size, "num_steps": num_steps}
    with ForeignCores() as watch:
        result = run_here("benchmarks.bert_step_worker:over_both", spec, 2, settings={"OMP_NUM_THREADS": "1"})
    bench.add(
        f"{'ALBERT' if name == 'albert' else 'BERT'}-{size}, {CASES[name].title}, 2 workers, over shoal",
        ours=result["ours"],
        peer=result["peer"],
        peer_name="the same over gloo",
        unit="tokens/s",
        target=1.0,
        better="higher",
        foreign_cores=[watch.cores or 0.0],
        num_retaken=0,
    )


def require_data(case: Case) -> None:
    """Look for the files of a case.

    Raises:
        SystemExit: one is not there.
    """
    for name in (case.tokenizer, *case.needs):
        if not (file := test_data_dir() / name).is_file():
            raise SystemExit(
                f"{file} is not there: this benchmark reads the test data; name its folder in {TEST_DATA}"
            )


def compare_with_trainer(bench: Benchmark, name: str, size: str, num_steps: int) -> None:
    """Add the row of a case against transformers' ``Trainer``; measured again once, if it was disturbed."""
    case, device = CASES[name], bench.args.device
    result, foreign = measure(name, device, size, num_steps)
    num_retaken = 0
    while foreign > MAX_FOREIGN and num_retaken < MOST_RETAKEN and size != "tiny":
        result, foreign = measure(name, device, size, num_steps)
        num_retaken += 1
    model = "ALBERT" if name == "albert" else "BERT"
    batch = f"{case.batch_size[device]} × ≤{case.max_seq_length}"
    bench.add(
        f"{model}-{size}, {case.title}, {batch}, fill {result['fill']:.2f}",
        ours=result["ours"],
        peer=result["peer"],
        peer_name="transformers.Trainer",
        unit="tokens/s",
        target=case.target,
        better="higher",
        foreign_cores=[foreign],
        num_retaken=num_retaken,
    )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--case", choices=tuple(CASES), action="append", help="only these")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="fp32 on cpu, bf16 on cuda")
    options.add_argument(
        "--size", choices=("base", "large", "tiny"), default="base", help="tiny only shows that it runs"
    )
    options.add_argument(
        "--backends", action="store_true", help="only the rows of shoal against gloo, on CPUs"
    )
    bench = Benchmark("bert_step", options=options)
    device, size, backends = bench.args.device, bench.args.size, bench.args.backends
    if backends and device != "cpu":
        raise SystemExit("--backends compares on CPUs: leave out --device cuda")
    names = bench.args.case or list(CASES)
    for name in names:
        require_data(CASES[name])
    if not backends:
        peer_module("accelerate")
    num_steps = NUM_STEPS[device] // (2 if bench.quick else 1) if size != "tiny" else 2
    for name in names:
        if not backends:
            compare_with_trainer(bench, name, size, num_steps)
        if device == "cpu":
            compare_backends(bench, name, size, num_steps)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
