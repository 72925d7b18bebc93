"""Trains with Lightning on the backend "shoal", by its name in the strategy.

torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """Tells whether the numbers of a row have a positive sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self.model(inputs), labels)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    inputs = torch.randn(2_000, 20, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, (inputs.sum(dim=1) > 0).long()), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend="shoal"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    if trainer.is_global_zero:
        loss = float(trainer.callback_metrics["loss"])
        print(f"{torch.distributed.get_backend()}, {trainer.world_size} workers: loss {loss:.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
