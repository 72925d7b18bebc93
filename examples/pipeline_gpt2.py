"""Splits GPT-2 over the workers automatically and trains it as a pipeline, backward first.

    torchrun --nproc-per-node 2 examples/pipeline_gpt2.py

The model is transformers' own class, unchanged. Here it is small and has random weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import shoal


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=4,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 64, (8, 32))
    mesh = shoal.make_mesh("cpu", pipeline=dist.get_world_size())

    stage = shoal.pipeline(model, {"input_ids": ids, "labels": ids}, mesh=mesh["pp"], microbatches=4)
    optimizer = torch.optim.AdamW(stage.module.parameters(), lr=3e-3)  # over this worker's layers alone
    if dist.get_rank() == 0:
        print(stage.plan)
    for step in range(30):
        loss = stage.step(input_ids=ids, labels=ids)  # forward and backward of all micro-batches
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {float(loss):.3f}")
    stage.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
