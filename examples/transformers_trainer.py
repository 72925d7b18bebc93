"""Trains with transformers' Trainer on the backend "shoal".

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

The Trainer keeps a process group that exists; ``ddp_backend="shoal"`` would be refused by accelerate, which
knows a fixed list of names.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def examples(count: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of 8 tokens, and whether the first is one of the upper half."""
    ids = torch.randint(0, 50, (count, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": (row[0] >= 25).long()} for row in ids]


def main() -> None:
    dist.init_process_group("shoal")
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=8,
    )
    arguments = TrainingArguments(
        output_dir="runs/trainer",
        use_cpu=True,
        per_device_train_batch_size=16,
        max_steps=20,
        learning_rate=5e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=examples(1_000))
    result = trainer.train()
    if dist.get_rank() == 0:
        print(f"{dist.get_backend()}, {dist.get_world_size()} workers: loss {result.training_loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
