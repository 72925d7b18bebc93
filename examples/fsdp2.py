"""Shards parameters, gradients and optimizer state over the workers (FSDP2) on the backend "shoal".

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shoal


def main() -> None:
    dist.init_process_group("shoal")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = shoal.Lamb(model.parameters(), lr=2e-2)  # its trust ratios are those of the whole tensors

    torch.manual_seed(1 + dist.get_rank())
    for step in range(60):
        inputs = torch.randn(32, 20)
        labels = (inputs.sum(dim=1) > 0).long()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
