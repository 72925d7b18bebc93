"""Trains in its own loop with LAMB, checkpoints and packed text; each part works without the others.

    shoal prepare text builtin --out runs/text --vocab-size 2048
    python examples/own_loop.py --text runs/text

A packed batch has no padding: ``cu_seqlens`` has the begin of each sequence, for variable-length attention.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.data.text.examples import ExampleConfig

RUN, STEPS = Path("runs/own-loop"), 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path("runs/text"))
    args = parser.parse_args()

    shards = shoal.TextShards(args.text, "train")
    reader = shoal.ExampleReader(shards, ExampleConfig(max_seq_length=32, max_predictions_per_seq=5))
    loader = DataLoader(
        range(len(reader)), batch_size=16, shuffle=True, collate_fn=lambda rows: pack(reader, rows)
    )

    vocab_size = shards.manifest.vocab_size
    model = nn.Sequential(
        nn.Embedding(vocab_size, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, vocab_size)
    )
    optimizer = shoal.Lamb(model.parameters(), lr=1e-2, weight_decay=0.01)
    RUN.mkdir(parents=True, exist_ok=True)
    checkpointer = shoal.Checkpointer(RUN)
    restored = checkpointer.restore({"model": model, "optimizer": optimizer})
    step = restored.step if restored else 0
    while step < STEPS:
        for batch in islice(loader, STEPS - step):
            context = bag_of_words(model[0](batch["input_ids"]), batch["cu_seqlens"])
            logits = model[1:](context[sequence_of(batch["masked_rows"], batch["cu_seqlens"])])
            loss = F.cross_entropy(logits, batch["masked_ids"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
                checkpointer.save(step, {"model": model, "optimizer": optimizer})
    checkpointer.finish()


def pack(reader: shoal.ExampleReader, indices: list[int]) -> dict[str, torch.Tensor]:
    """Return examples packed into one row of tokens."""
    arrays = reader.micro_batch(reader.batch(0, indices))
    return {name: torch.as_tensor(array) for name, array in arrays.items()}


def bag_of_words(hidden: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return the mean ``[B, width]`` over the tokens of each sequence."""
    lengths = cu_seqlens.diff().long()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.zeros(len(lengths), hidden.shape[1]).index_add(0, rows, hidden) / lengths[:, None]


def sequence_of(rows: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return the number of the sequence that each token belongs to."""
    return torch.bucketize(rows, cu_seqlens[1:].long(), right=True)


if __name__ == "__main__":
    main()
