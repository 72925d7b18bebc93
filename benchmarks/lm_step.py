"""Is a step of a GPT-2 faster than transformers' ``Trainer``, on packed rows and on padded documents?

A GPT-2 of 10 million parameters on paragraphs of WikiText, with a vocabulary of 8,192. Both sides have the
same weights (their losses are compared before anything is measured), SDPA, fused AdamW and clipping, and take
their steps by turns in one process. Our side trains on packed blocks. The Trainer has the same blocks; or
paragraphs that it pads to the longest of a batch, as they come or grouped by length, about as many tokens a
step. A padded place counts for nothing: both sides are measured in tokens that are text. The fill in a row's
name is the share of the Trainer's places that hold one.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.bert_step import MAX_FOREIGN, MOST_RETAKEN
from benchmarks.harness import Benchmark, peer_module
from benchmarks.machine import ForeignCores
from benchmarks.worker import run_alone
from shoal.env.settings import TEST_DATA, test_data_dir

CASES = {"packed": 1.1, "padded": 1.5, "grouped": None}
"""Targets."""
TITLES = {
    "packed": "the same packed rows",
    "padded": "paragraphs padded to the longest of a batch",
    "grouped": "padded paragraphs grouped by length",
}
FILES = ("wikitext2/valid.txt", "wikitext2/test.txt")
NUM_STEPS = 12


def measure(spec: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Run one case in a process of its own; return its result (see the worker), and foreign cores."""
    threads = "1" if spec["size"] == "tiny" else str(os.cpu_count() or 1)
    with ForeignCores() as watch:
        result = run_alone("benchmarks.lm_step_worker:measure", spec, settings={"OMP_NUM_THREADS": threads})
    return result, watch.cores or 0.0


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--case", choices=tuple(CASES), action="append", help="only these")
    options.add_argument(
        "--size", choices=("10m", "tiny"), default="10m", help="tiny only shows that it runs"
    )
    bench = Benchmark("lm_step", options=options)
    peer_module("accelerate")
    for name in FILES:
        if not (test_data_dir() / name).is_file():
            raise SystemExit(
                f"{test_data_dir() / name} is not there: name the folder of the test data in {TEST_DATA}"
            )
    is_tiny = bench.args.size == "tiny"
    for case in bench.args.case or CASES:
        num_steps = 2 if is_tiny else NUM_STEPS // (2 if bench.quick else 1)
        spec = {"case": case, "size": bench.args.size, "num_steps": num_steps}
        result, foreign = measure(spec)
        num_retaken = 0
        while foreign > MAX_FOREIGN and num_retaken < MOST_RETAKEN and not is_tiny:
            result, foreign = measure(spec)
            num_retaken += 1
        bench.add(
            f"GPT-2 of {result['parameters'] / 1e6:.1f} M, {TITLES[case]}, fill {result['fill']:.2f}",
            ours=result["ours"],
            peer=result["peer"],
            peer_name="transformers.Trainer",
            unit="tokens/s",
            target=CASES[case],
            better="higher",
            foreign_cores=[foreign],
            num_retaken=num_retaken,
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
