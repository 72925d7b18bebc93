"""Trains with two optimizers: Muon for the matrices inside the model, AdamW for all other weights.

    python examples/muon_adamw.py
    torchrun --nproc-per-node 2 examples/muon_adamw.py     # the same batches

The model learns to add two numbers modulo 31. ``step.update(muon, adamw)`` clips the gradients of both
together and updates both; checkpoints hold the state of both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal import Run
from shoal.train.config import LoopConfig, RunOutputConfig
from shoal.train.run import Sizes

MODULUS, STEPS = 31, 150


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MODULUS, 64)
        self.hidden = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.head = nn.Linear(128, MODULUS)

    def forward(self, pairs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.embedding(pairs).flatten(1)))
        return logits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/muon"))
    args = parser.parse_args()
    pairs = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS))
    dataset = TensorDataset(pairs, pairs.sum(dim=1) % MODULUS)

    settings = RunOutputConfig(log_frequency=25, checkpoint_frequency=50)
    with Run.open(args.run_dir, settings=settings, loop=LoopConfig(seed=1), recipe="muon") as run:
        torch.manual_seed(run.seed)
        model = Adder()
        ddp = run.data_parallel(model)
        matrices = [p for p in model.hidden.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0)
        adamw = torch.optim.AdamW(others, lr=5e-3, weight_decay=0.01)
        run.keep(model=model, muon=muon, adamw=adamw)

        for step in run.steps(dataset, Sizes(global_batch_size=248), until=STEPS):
            with step:
                left = 1 - (step.number - 1) / STEPS  # both rates fall to 0
                muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = 0.02 * left, 5e-3 * left
                for inputs, sums in step:
                    logits = ddp(inputs)
                    loss = F.cross_entropy(logits, sums, reduction="sum")
                    step.backward(loss / step.num_samples)
                    step.add(step.num_samples, accuracy=(logits.argmax(1) == sums).sum())
                step.update(muon, adamw, max_norm=1.0)
        return run.finish(lambda directory: torch.save(model.state_dict(), directory / "model.pt"))


if __name__ == "__main__":
    sys.exit(main())
