"""Trains a DistributedDataParallel model on the backend "shoal"; only one line differs from gloo.

torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal


def main() -> None:
    dist.init_process_group("shoal")  # no import needed: torch finds the backend by its entry point
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2)))
    model.register_comm_hook(None, shoal.bf16_wire)  # half the bytes; leave it out for fp32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(1 + dist.get_rank())  # each worker has data of its own
    for step in range(60):
        inputs = torch.randn(32, 20)
        labels = (inputs.sum(dim=1) > 0).long()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()  # averages the gradients over all workers
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
