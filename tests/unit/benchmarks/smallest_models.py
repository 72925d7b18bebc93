"""The smallest models of the recipes with a batch each, on which demands of a GPU are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu.counts import packed_batch
from torch import Tensor, nn

from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.encoder import packed_inputs
from shoal.models.pretraining import AlbertPretraining, BertPretraining
from shoal.models.resnet import new_resnet
from shoal.models.resnet_config import ResNetConfig
from shoal.models.t5 import new_t5
from shoal.models.tasks import QuestionAnswering, span_loss
from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
SMALL_DETECTOR = MaskRCNNConfig(
    backbone="resnet18", anchor_sizes=(8, 16, 32, 64, 128), proposals_a_level=60, proposals=100,
    proposal_samples=40, region_samples=32,
)  # fmt: skip
BERT, ALBERT = BertModelConfig(**SIZES), AlbertModelConfig(**SIZES, embedding_size=16)

Made = tuple[nn.Module, Callable[[str], Callable[[], Tensor]]]
"""A model, and what computes its loss on a device."""


def pretraining(model: Any) -> Made:
    def loss(device: str) -> Callable[[], Tensor]:
        batch = packed_batch(4, 20, num_masked=2, device=device)
        return lambda: (lambda sums: sums[0] + sums[2])(model(**batch))

    return model, loss


def squad() -> Made:
    from transformers import BertConfig, BertForQuestionAnswering

    model = QuestionAnswering(BertForQuestionAnswering(BertConfig(**SIZES)))

    def loss(device: str) -> Callable[[], Tensor]:
        batch = packed_inputs(packed_batch(4, 20, num_masked=2, device=device))
        where = torch.ones(4, dtype=torch.int64, device=device)
        return lambda: span_loss(*model(**batch), batch, where, where)

    return model, loss


def resnet() -> Made:
    model = new_resnet(ResNetConfig(network="resnet18"), 10)

    def loss(device: str) -> Callable[[], Tensor]:
        images, labels = (
            torch.zeros(2, 3, 32, 32, device=device),
            torch.zeros(2, dtype=torch.int64).to(device),
        )
        return lambda: nn.functional.cross_entropy(model(images).float(), labels)

    return model, loss


def t5() -> Made:
    config = T5ModelConfig(vocab_size=97, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    model = new_t5(config, pad_id=0, end_id=1)

    def loss(device: str) -> Callable[[], Tensor]:
        ids = {
            n: torch.ones(2, k, dtype=torch.int64, device=device)
            for n, k in (("input_ids", 9), ("labels", 5))
        }
        return lambda: model(**ids).loss

    return model, loss


MODELS: dict[str, Callable[[], Made]] = {
    "albert": lambda: pretraining(AlbertPretraining(ALBERT)),
    "bert": lambda: pretraining(BertPretraining(BERT)),
    "squad": squad,
    "resnet50": resnet,
    "t5": t5,
}


def detection_batch() -> tuple[Tensor, dict[str, Tensor], Tensor]:
    random = torch.Generator().manual_seed(1)
    boxes = torch.tensor([[[10.0, 10, 60, 50], [60, 20, 100, 70]], [[5, 5, 40, 80], [50, 30, 90, 60]]])
    places = torch.tensor([[[0, 10, 10, 40, 50], [2000, 20, 60, 50, 40]]]).expand(2, 2, 5)
    targets = {
        "sizes": torch.tensor([[96, 128], [96, 128]]),
        "boxes": boxes,
        "labels": torch.ones(2, 2, dtype=torch.int64),
        "num_objects": torch.tensor([2, 2]),
        "masks": torch.ones(2, 4000, dtype=torch.uint8),
        "mask_places": places,
    }
    return torch.randn(2, 3, 96, 128, generator=random), targets, torch.tensor([1, 2])
