"""Trains an own loop with Hugging Face Accelerate on the backend "shoal".

    torchrun --nproc-per-node 2 examples/accelerate_loop.py

Accelerate uses an existing process group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    dist.init_process_group("shoal")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs = torch.randn(2_000, 20)
    dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for batch, labels in loader:
        loss = F.cross_entropy(model(batch), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()).mean().item()
    accelerator.print(f"{dist.get_backend()}, {accelerator.num_processes} workers: last loss {mean:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
