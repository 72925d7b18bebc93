"""Trains with ``Run``: exact resume, signal handling, record and report, on any number of workers.

    python examples/own_recipe.py
    torchrun --nproc-per-node 2 examples/own_recipe.py     # the same batches, the same losses
    shoal report runs/digits

Stop it with SIGTERM or kill it: the same command resumes with the bits of an uninterrupted run (docs/run.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoal import Run
from shoal.train.config import LoopConfig, RunOutputConfig
from shoal.train.run import Sizes


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Noisy pictures of seven-segment digits, drawn from their index."""

    SEGMENTS = (0x77, 0x24, 0x5D, 0x6D, 0x2E, 0x6B, 0x7B, 0x25, 0x7F, 0x6F)

    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        digit = index % 10
        noise = torch.randn(7, generator=torch.Generator().manual_seed(index))
        lit = torch.tensor([(self.SEGMENTS[digit] >> bit) & 1 for bit in range(7)])
        return lit + 0.4 * noise, torch.tensor(digit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/digits"))
    args = parser.parse_args()
    settings = RunOutputConfig(log_frequency=20, checkpoint_frequency=100)
    with Run.open(args.run_dir, settings=settings, loop=LoopConfig(seed=1), recipe="digits") as run:
        torch.manual_seed(run.seed)
        model = nn.Sequential(nn.Linear(7, 64), nn.GELU(), nn.Linear(64, 10))
        ddp = run.data_parallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run.keep(model=model, optimizer=optimizer)

        for step in run.steps(Digits(), Sizes(global_batch_size=96), until=200):
            with step:
                for pictures, digits in step:
                    logits = ddp(pictures)
                    loss = F.cross_entropy(logits, digits, reduction="sum")
                    step.backward(loss / step.num_samples)
                    step.add(step.num_samples, accuracy=(logits.argmax(1) == digits).sum())
                step.update(optimizer, max_norm=1.0)
            if run.due(every=100):
                run.evaluation("validation", {"accuracy": accuracy(model)}, num_samples=500)
        return run.finish(lambda directory: torch.save(model.state_dict(), directory / "model.pt"))


@torch.inference_mode()
def accuracy(model: nn.Module) -> float:
    """Return the part of 500 other pictures that ``model`` reads right."""
    pictures, digits = (
        torch.stack(part) for part in zip(*(Digits()[4_000 + i] for i in range(500)), strict=True)
    )
    model.eval()
    right = (model(pictures).argmax(1) == digits).float().mean().item()
    model.train()
    return right


if __name__ == "__main__":
    sys.exit(main())
