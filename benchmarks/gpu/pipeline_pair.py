"""Are two processes on one GPU, as a pipeline of two, right? Their gradients against those of one process.

A small T5 in fp32 without dropout: each stage's gradients are compared with those of the whole model on the
same device. NCCL refuses two ranks on one device; backend "shoal" carries activations over gloo through the
host's memory.

    python -m benchmarks.gpu.pipeline_pair --device cuda --json pair.json
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import shoal.comm
from benchmarks.harness import Benchmark
from benchmarks.pipeline_workers import NUM_MICRO_BATCHES, t5
from shoal.env.variables import child_environment
from shoal.pipelining import pipeline

NUM_STAGES = 2
MOST_ERROR = {"cpu": 1e-5, "cuda": 1e-4}
"""Of a gradient's largest element, in fp32; sums of atomic additions differ on a GPU."""


def worst_error(rank: int, device: torch.device) -> float:
    """Return the largest error of any gradient of this stage, relative to the gradient's largest element."""
    model, batch = t5(small=True)
    model.to(device)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    model(**batch).loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    stage = pipeline(model, batch, microbatches=NUM_MICRO_BATCHES, schedule="1f1b", device=device)
    stage.step(**batch)
    worst = 0.0
    for name, parameter in stage.module.named_parameters():
        right = wanted[name]
        if right is not None and parameter.grad is not None:
            difference = (parameter.grad - right).abs().max() / right.abs().max().clamp(min=1e-12)
            worst = max(worst, float(difference))
        elif (right is None) != (parameter.grad is None):
            raise SystemExit(f"rank {rank}: {name} has a gradient in one of the two only")
    stage.close()
    return worst


def work(device: torch.device, out: Path) -> None:
    """Do the part of one rank, which torchrun's variables name."""
    shoal.comm.register()
    dist.init_process_group("shoal")
    rank = dist.get_rank()
    out.with_suffix(f".{rank}").write_text(json.dumps(worst_error(rank, device)))
    dist.barrier()
    dist.destroy_process_group()


def run_pair(device: str) -> list[float]:
    """Run both ranks and return the worst error of each.

    Raises:
        SystemExit: one of them failed.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        out = Path(folder) / "error"
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.pipeline_pair",
            "--device",
            device,
            "--rank-of",
            str(out),
        ]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(NUM_STAGES)}
        ranks = [
            subprocess.Popen(command, env=child_environment(**common, RANK=str(rank), LOCAL_RANK="0"))
            for rank in range(NUM_STAGES)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"a stage ended with status {max(codes, key=abs)}; see above")
        return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(NUM_STAGES)]


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    bench = Benchmark("gpu.pipeline_pair", options=options)
    if bench.args.rank_of is not None:
        device = torch.device("cuda", 0) if bench.args.device == "cuda" else torch.device("cpu")
        work(device, bench.args.rank_of)
        return 0
    bench.limit(
        f"worst gradient of T5 in {NUM_STAGES} stages on one {bench.args.device} device",
        max(run_pair(bench.args.device)),
        MOST_ERROR[bench.args.device],
        unit="of its largest element",
        formula="one process",
    )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
