"""Gradients in bf16 and in 8-bit blocks: bytes and time saved, and the cost.

Steps/s and bytes: DDP on emulated hosts with links of 200 Mbit/s, where communication dominates, over the
two-hop backend with servers beside the workers; the peer is the same with fp32. Bytes are those of the hosts'
network interfaces, with all headers, against what the format needs.

``--curves`` instead trains ALBERT's tiny preset on WikiText-2 with each format, with three seeds (three
quarters of an hour), and compares the loss on held-out text at the end; ``--report FILE`` writes the page
with all curves.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.comm_formats_worker import FORMATS
from benchmarks.comm_runs import watched
from benchmarks.ddp_emulated_worker import BATCH, COMPUTATION
from benchmarks.harness import Benchmark
from benchmarks.pretraining_gain import shoal
from benchmarks.worker import run_on_hosts
from shoal.comm.int8_blocks import BLOCK, BLOCK_BYTES
from shoal.env.settings import TEST_DATA, test_data_dir
from shoal.launch.emulated import Cluster
from shoal.record import End, read_record

NIC = "200mbit"
TARGETS = {"bf16": 1.5, "int8": 1.8}
BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": BLOCK_BYTES / BLOCK}
HEADERS = 1.1
"""Ethernet, IP and TCP headers are 66 bytes to 1448 of data, an acknowledgement 66 more to two such."""
SEEDS = (1, 2, 3)
WORSE = 0.99
"""A held-out loss up to a percent above that with fp32 counts as the same."""


@dataclass(frozen=True)
class Case:
    model: str
    num_hosts: int
    sequence: int
    repeats: int
    quick_repeats: int


# BERT-base takes 2.2 GB a worker, its residuals included.
CASES = (Case("albert-base", 8, 8, 7, 3), Case("bert-base", 4, 32, 3, 1))


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Train on a cluster; return seconds and bytes of each step."""
    spec = {"model": case.model, "sequence": case.sequence, "repeats": repeats}
    with Cluster(hosts=case.num_hosts, nic=NIC, announce_rates=False) as cluster:
        result: dict[str, Any] = run_on_hosts(cluster, "benchmarks.comm_formats_worker:measure", spec)
    return result


def add_rows(bench: Benchmark, case: Case) -> None:
    count = case.quick_repeats if bench.quick else case.repeats
    result, foreign, num_retaken = watched(
        partial(measure, case, count), most_retaken=0 if bench.quick else 1
    )
    steps = {name: [1 / s for s in seconds] for name, seconds in result["samples"].items()}
    what = f"{case.model}, {case.num_hosts} hosts, {BATCH} × {case.sequence}"
    for name in (*TARGETS, COMPUTATION):
        bench.add(
            f"{what}, {name}",
            ours=steps[name],
            peer=steps["fp32"],
            peer_name="fp32, the same backend",
            unit="steps/s",
            better="higher",
            target=TARGETS.get(name),
            foreign_cores=[foreign],
            num_retaken=num_retaken,
        )
    hops = 2 * (case.num_hosts - 1) / case.num_hosts
    for name in FORMATS:
        bench.limit(
            f"{what}, {name}, sent by a host in a step",
            [count / 1e6 for count in result["sent"][name]],
            HEADERS * hops * BYTES[name] * result["count"] / 1e6,
            unit="MB",
            formula=f"{HEADERS} × 2 (n - 1) / n × {BYTES[name]:.4g} bytes a number",
        )


# ---- curves -----------------------------------------------------------------------------------------------


def held_out_loss(run: Path) -> float:
    last = read_record(run)[-1]
    if not isinstance(last, End):
        raise SystemExit(f"{run} has no end")
    return last.metrics["mlm_loss"]


def add_curves(bench: Benchmark, steps: int, report: Path | None) -> None:
    data = test_data_dir()
    if not (data / "wikitext2").is_dir():
        raise SystemExit(f"{data} has no wikitext2: name a folder with the test data in {TEST_DATA}")
    seeds = SEEDS[:1] if bench.quick else SEEDS
    losses: dict[str, list[float]] = {name: [] for name in FORMATS}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        files = [data / "wikitext2" / f"{name}.txt" for name in ("valid", "test")]
        shoal("prepare", "text", *files, "--out", text, "--tokenizer", "wordpiece", "--vocab-size", "2048")
        runs = []
        for seed in seeds:
            for name in FORMATS:
                run = Path(folder) / f"{name}-{seed}"
                shoal(
                    "train", "albert", "--preset", "tiny", "--data.path", text, "--run.dir", run,
                    "--workers", "2", "--distributed.backend", "shoal", "--distributed.wire", name,
                    "--train.seed", str(seed), "--train.total-steps", str(steps),
                )  # fmt: skip
                losses[name].append(held_out_loss(run))
                runs.append(run)
        if report:
            shoal("report", *runs, "--out", report.absolute())
    for name in TARGETS:
        bench.add(
            f"ALBERT tiny, held-out MLM loss after {steps} steps, {name}",
            ours=losses[name],
            peer=losses["fp32"],
            peer_name=f"fp32, {len(seeds)} seeds",
            unit="nat",
            target=WORSE,
        )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    models = [case.model for case in CASES]
    options.add_argument("--model", choices=models, action="append", help="only these")
    options.add_argument("--curves", action="store_true", help="loss curves instead of speed")
    options.add_argument("--steps", type=int, help="of a curve; default: the preset's 2,400, quick: 300")
    options.add_argument("--report", type=Path, metavar="FILE", help="write the page with all curves")
    bench = Benchmark("comm_formats", options=options)
    if bench.args.curves:
        add_curves(bench, bench.args.steps or (300 if bench.quick else 2400), bench.args.report)
        return bench.finish()
    for case in CASES:
        if not bench.args.model or case.model in bench.args.model:
            add_rows(bench, case)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
