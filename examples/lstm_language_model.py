"""Trains an LSTM that predicts the next character, on the language reference inside Python.

    python examples/lstm_language_model.py
    torchrun --nproc-per-node 2 examples/lstm_language_model.py     # the same batches

The loss is a mean over characters: ``targets`` counts them, and ``step.num_targets`` is their number in the
global batch. A window begins with an empty state, so that a step's samples depend on nothing before it.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoal import Run
from shoal.train.config import LoopConfig, RunOutputConfig
from shoal.train.run import Sizes

LENGTH = 48
TEXT = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))


class Windows(Dataset[Tensor]):
    """Pieces of the text: ``LENGTH`` characters and the one after them."""

    def __len__(self) -> int:
        return (len(TEXT) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return TEXT[index * LENGTH : (index + 1) * LENGTH + 1]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 48)
        self.lstm = nn.LSTM(48, 96, batch_first=True)
        self.head = nn.Linear(96, 128)

    def forward(self, characters: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(characters))[0])
        return logits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/lstm"))
    args = parser.parse_args()
    settings = RunOutputConfig(log_frequency=20, checkpoint_frequency=60)
    with Run.open(args.run_dir, settings=settings, loop=LoopConfig(seed=1), recipe="lstm") as run:
        torch.manual_seed(run.seed)
        model = LanguageModel()
        ddp = run.data_parallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        run.keep(model=model, optimizer=optimizer)

        sizes = Sizes(global_batch_size=32)
        for step in run.steps(Windows(), sizes, until=60, targets=lambda batch: batch[:, 1:].numel()):
            with step:
                for batch in step:
                    inputs, following = batch[:, :-1], batch[:, 1:]
                    logits = ddp(inputs)
                    loss = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
                    step.backward(loss / step.num_targets)
                    step.add(step.num_targets, bits_per_character=loss / math.log(2))
                step.update(optimizer, max_norm=1.0)
        return run.finish(lambda directory: torch.save(model.state_dict(), directory / "model.pt"))


if __name__ == "__main__":
    sys.exit(main())
