"""Loss of BERT-small under bf16 autocast: what is between products in bf16, or in fp32.

A GPU's autocast gives the results of norms, and so the sums around each block, in fp32. shoal stores them in
bf16, with statistics of fp32 (``shoal.models.encoder``): half the bytes. Both kinds learn masked bytes of
WikiText-2's validation file with the same seeds, batches and dropout, and are scored on its test file.
BERT-small has four layers of 512 (Turc et al., arXiv 1908.08962). ``--steps`` and ``--seeds`` shorten it.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import Benchmark
from shoal.env.settings import test_data_dir
from shoal.models.pretraining import BertPretraining
from shoal.models.text_config import BertModelConfig

SEEDS = (1, 2, 3)
STEPS, QUICK_STEPS = 1000, 50
RATE = 1e-3
BATCH, LENGTH, MASK_ID = 64, 16, 256
MASKED = LENGTH * 15 // 100
MODEL = BertModelConfig(
    vocab_size=257, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048,
    max_position_embeddings=LENGTH,
)  # fmt: skip


def packed_bytes(text: bytes, seed: int) -> dict[str, Any]:
    """Return a micro-batch of random windows of ``text`` with 15 % of their bytes masked."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, generator=generator)
    starts = draw(len(text) - LENGTH, (BATCH,))
    rows = [torch.frombuffer(bytearray(text[start : start + LENGTH]), dtype=torch.uint8) for start in starts]
    ids = torch.cat(rows).long()
    ranks = (
        torch.rand(BATCH, LENGTH - 1, generator=generator).argsort(1)[:, :MASKED] + 1
    )  # none of the firsts
    masked = (ranks.sort(1).values + torch.arange(BATCH)[:, None] * LENGTH).flatten()
    return {
        "input_ids": ids.index_fill(0, masked, MASK_ID),
        "token_type_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(LENGTH).repeat(BATCH),
        "cu_seqlens": torch.arange(BATCH + 1) * LENGTH,
        "max_seqlen": LENGTH,
        "masked_rows": masked,
        "masked_ids": ids[masked],
        "labels": torch.zeros(BATCH, dtype=torch.int64),
        "dropout_keys": draw(1 << 62, (BATCH,)),
    }


def held_out_loss(seed: int, steps: int, train: bytes, test: bytes) -> float:
    """Train a model and return its mean loss of masked bytes, in nats."""
    torch.manual_seed(seed)
    model = BertPretraining(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)

    def loss(text: bytes, batch_seed: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            sums: tuple[Tensor, ...] = model(**packed_bytes(text, batch_seed))
        return sums[0] / (BATCH * MASKED)

    for step in range(steps):
        optimizer.zero_grad()
        loss(train, seed * steps + step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        return mean(loss(test, batch_seed).item() for batch_seed in range(50))


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--steps", type=int, help="optimizer steps of each run")
    options.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    bench = Benchmark("bf16_residual", options=options)
    steps: int = bench.args.steps or (QUICK_STEPS if bench.quick else STEPS)
    texts = [(test_data_dir() / "wikitext2" / f"{name}.txt").read_bytes() for name in ("valid", "test")]
    in_bf16, in_fp32 = [], []
    for seed in bench.args.seeds:
        in_bf16.append(held_out_loss(seed, steps, *texts))
        with mock.patch("shoal.models.encoder._computes_in_bf16", lambda _: False):
            in_fp32.append(held_out_loss(seed, steps, *texts))
        print(f"seed {seed}: {in_bf16[-1]:.4f} in bf16, {in_fp32[-1]:.4f} in fp32", flush=True)
    above = [ours / theirs - 1 for ours, theirs in zip(in_bf16, in_fp32, strict=True)]
    bench.limit(
        f"BERT-small, {steps} steps in bf16: held-out loss above that with residuals in fp32",
        mean(above),
        0.005,
        unit="relative",
        formula=f"mean of {len(above)} seeds; {', '.join(f'{each:+.2%}' for each in above)}",
    )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
