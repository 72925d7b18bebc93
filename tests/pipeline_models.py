"""Tiny models of the architectures that pipelines must train unmodified, each with one batch.

Every model returns its own loss as ``.loss``, a mean over the targets of the batch: labels that are not -100
where there are labels of tokens, else rows. Rows have different numbers of them, so that a mean of
micro-batch means would not be the mean of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models import resnet50
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_outputs import ImageClassifierOutput

Batch = dict[str, Tensor]
Case = Callable[[], tuple[nn.Module, Batch]]

ROWS, LENGTH, VOCAB, PADDING = 8, 12, 61, 1
SEED = 11
FAMILIES = ("albert", "gpt2", "t5", "vit", "resnet50")
"""A model of each kind, for the quick tests: the others have no operation and no tie of another kind."""


def cases(dropout: float = 0.0) -> dict[str, Case]:
    """Return the builders by name; each makes its model from a seed, in training mode, and a batch of 8 rows.

    Args:
        dropout: everywhere; ResNet-50 has none.
    """
    return {
        "bert": lambda: _seeded(lambda: BertForMaskedLM(_encoder(BertConfig, dropout)), _masked_tokens),
        "albert": lambda: _seeded(
            lambda: AlbertForMaskedLM(
                _encoder(AlbertConfig, dropout, embedding_size=16, classifier_dropout_prob=dropout)
            ),
            _masked_tokens,
        ),
        "roberta": lambda: _seeded(
            lambda: RobertaForMaskedLM(_encoder(RobertaConfig, dropout, pad_token_id=PADDING)), _masked_tokens
        ),
        "distilbert": lambda: _seeded(lambda: _distilbert(dropout), _masked_tokens),
        "gpt2": lambda: _seeded(lambda: _gpt2(dropout), _causal_tokens),
        "llama": lambda: _seeded(lambda: _llama(dropout), _causal_tokens),
        "t5": lambda: _seeded(lambda: _t5(dropout), _source_and_target),
        "bart": lambda: _seeded(lambda: _bart(dropout), _source_and_target),
        "vit": lambda: _seeded(lambda: _vit(dropout), _pixels),
        "resnet50": lambda: _seeded(Resnet50, _images),
    }


class Resnet50(nn.Module):
    """torchvision's ResNet-50 of narrow bottlenecks with its loss; BatchNorm keeps statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = resnet50(num_classes=10, width_per_group=8)

    def forward(self, images: Tensor, labels: Tensor) -> ImageClassifierOutput:
        logits = self.backbone(images)
        return ImageClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def _seeded(build: Callable[[], nn.Module], make_batch: Callable[[], Batch]) -> tuple[nn.Module, Batch]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return build().train(), make_batch()


def _encoder(config: type, dropout: float, **changes: object) -> object:
    return config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=LENGTH + 4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **changes,
    )


def _distilbert(dropout: float) -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48}
    config = DistilBertConfig(
        **sizes, max_position_embeddings=LENGTH, dropout=dropout, attention_dropout=dropout
    )
    return DistilBertForMaskedLM(config)


def _gpt2(dropout: float) -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    config = GPT2Config(
        **sizes,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


def _llama(dropout: float) -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    config = LlamaConfig(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def _t5(dropout: float) -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0)
    )


def _bart(dropout: float) -> PreTrainedModel:
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        max_position_embeddings=LENGTH + 4,
        **layers,
        **heads,
        dropout=dropout,
        attention_dropout=dropout,
    )
    return BartForConditionalGeneration(config)


def _vit(dropout: float) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    config = ViTConfig(
        **sizes,
        image_size=16,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return ViTForImageClassification(config)


def _padded() -> tuple[Tensor, Tensor]:
    """Return token ids [rows, length] of rows of different lengths, and the mask of those that count."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1))
    mask = torch.arange(LENGTH) < lengths
    return torch.randint(5, VOCAB, (ROWS, LENGTH)).masked_fill(~mask, PADDING), mask


def _masked_tokens() -> Batch:
    tokens, mask = _padded()
    predicted = mask & (torch.rand(ROWS, LENGTH) < 0.4)
    predicted[:, 0] = True
    labels = torch.randint(5, VOCAB, (ROWS, LENGTH)).masked_fill(~predicted, -100)
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}


def _causal_tokens() -> Batch:
    tokens, mask = _padded()
    labels = tokens.masked_fill(~mask, -100)
    labels[:, 0] = -100  # nothing predicts the first: so as many labels as targets are left
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}


def _source_and_target() -> Batch:
    source, source_mask = _padded()
    target, target_mask = _padded()
    labels = target.masked_fill(~target_mask, -100)
    return {"input_ids": source, "attention_mask": source_mask.long(), "labels": labels}


def _pixels() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(0, 10, (ROWS,))}


def _images() -> Batch:
    return {"images": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(0, 10, (ROWS,))}
