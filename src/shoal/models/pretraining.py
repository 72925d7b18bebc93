"""Computes the pretraining losses of ALBERT, BERT, RoBERTa and DistilBERT on packed batches.

The modules and their names are those of ``AlbertForPreTraining``, ``BertForPreTraining``,
``RobertaForMaskedLM`` and ``DistilBertForMaskedLM``, so that weights load in both directions. A step computes
less than those classes do: the encoder works on packed batches (:mod:`shoal.models.encoder`), and the
masked-LM head runs on the masked tokens only, ``[M, vocab]`` instead of ``[B, S, vocab]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    BertConfig,
    BertForPreTraining,
    DistilBertConfig,
    DistilBertForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from shoal.models.albert_prelayernorm import AlbertPreLayerNormConfig, AlbertPreLayerNormForPreTraining
from shoal.models.encoder import PACKED_INPUTS, Encoder, drop_in_head
from shoal.models.layers import fused_activation
from shoal.models.text_config import AlbertModelConfig, BertModelConfig
from shoal.models.token_losses import summed_losses

PRETRAINING_INPUTS = (*PACKED_INPUTS, "masked_rows", "masked_ids", "labels")


def pretraining_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a batch that a model takes, without those for the loader and the record."""
    return {name: batch[name] for name in PRETRAINING_INPUTS}


"""Keys of a micro-batch that :class:`Pretraining` takes."""


class Pretraining(nn.Module):
    """Masked-LM and sentence losses of a packed micro-batch, the base of ALBERT and BERT.

    A subclass creates ``encoder`` and the heads.
    """

    encoder: Encoder
    config: AlbertModelConfig | BertModelConfig

    @property
    def weights(self) -> PreTrainedModel:
        """The transformers model that holds the weights."""
        return next(part for part in self.children() if isinstance(part, PreTrainedModel))

    def mlm_logits(self, hidden: Tensor) -> Tensor:
        """Return the masked-LM logits ``[M, vocab]`` of ``[M, hidden]``."""
        return masked_lm_logits(self.weights, hidden)

    def sentence_logits(self, first: Tensor, keys: Tensor | None = None) -> Tensor | None:
        """Return the sentence logits ``[B, 2]`` of the hidden states of [CLS], ``[B, hidden]``.

        Args:
            keys: int64 ``[B]`` to drop by, in training.

        Returns:
            ``None`` for a model without a task about two sentences.
        """
        raise NotImplementedError

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the encoder's layers (:meth:`shoal.models.encoder.Encoder.compile`)."""
        self.encoder.compile(*args, **options)

    def forward(
        self,
        *,
        masked_rows: Tensor,
        masked_ids: Tensor,
        labels: Tensor,
        dropout_keys: Tensor | None = None,
        **packed: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sums (masked-LM loss, correct predictions, sentence loss, correct sentences).

        The latter two are 0 without a task about two sentences.

        Args:
            masked_rows: ``[M]`` which of the T tokens to predict, none twice, none a [CLS].
            masked_ids: ``[M]`` the tokens there.
            labels: ``[B]`` 1 where the segments are swapped (ALBERT) or the second is foreign (BERT).
            dropout_keys: ``[B]`` keys of the samples (:mod:`shoal.dropout`), which training reads; default:
                drawn from torch's generator.
            packed: the micro-batch (:data:`shoal.models.encoder.PACKED_INPUTS`).
        """
        keys = self.encoder.sample_keys(dropout_keys, packed["cu_seqlens"])
        first_rows = packed["cu_seqlens"][:-1].long()
        num_first = len(first_rows)
        hidden = self.encoder(**packed, wanted=torch.cat([first_rows, masked_rows]), dropout_keys=keys)
        of_tokens = summed_losses(self.mlm_logits(hidden[num_first:]), masked_ids)
        sentence_logits = self.sentence_logits(hidden[:num_first], keys)
        if sentence_logits is None:
            none = torch.zeros(2, device=hidden.device)
            return *of_tokens, none[0], none[1]
        return *of_tokens, *summed_losses(sentence_logits, labels)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    device: torch.device,
    sum_over_workers: Callable[[Sequence[float]], list[float]],
    task: Literal["sop", "nsp"] | None,
) -> tuple[dict[str, float], int]:
    """Return mean losses in nats and accuracies on held-out examples, and the number of examples.

    Args:
        model: a :class:`Pretraining`, or a wrapper of one.
        batches: this worker's packed micro-batches.
        device: the model's.
        sum_over_workers: returns each value summed over all workers.
        task: sentence order or next sentence, as in the metrics' names, or none.
    """
    sums: Tensor | None = None
    num_masked = num_sequences = 0
    model.eval()
    for batch in batches:
        inputs = pretraining_inputs(batch)
        inputs |= {name: v.to(device) for name, v in inputs.items() if isinstance(v, Tensor)}
        values = torch.stack(model(**inputs)).double()
        sums = values if sums is None else sums + values
        num_masked += len(batch["masked_ids"])
        num_sequences += len(batch["labels"])
    model.train()
    own = [0.0] * 4 if sums is None else sums.tolist()
    *totals, masked, sequences = sum_over_workers([*own, num_masked, num_sequences])
    names = ("mlm_loss", "mlm_accuracy", *((f"{task}_loss", f"{task}_accuracy") if task else ()))
    counts = (masked, masked, sequences, sequences)
    metrics = {n: value / max(count, 1) for n, value, count in zip(names, totals, counts, strict=False)}
    return metrics, int(sequences)


class AlbertPretraining(Pretraining):
    """Masked LM and sentence order (Lan et al. 2019, arXiv 1909.11942).

    Args:
        config: its sizes.
    """

    def __init__(self, config: AlbertModelConfig) -> None:
        super().__init__()
        self.config = config
        kind = AlbertPreLayerNormForPreTraining if config.pre_layer_norm else AlbertForPreTraining
        self.albert = kind(transformers_config(config))
        predictions = self.albert.predictions
        predictions.activation = fused_activation(predictions.activation)
        self.encoder = Encoder(self.albert.albert, activation_checkpointing=config.activation_checkpointing)

    def sentence_logits(self, first: Tensor, keys: Tensor | None = None) -> Tensor:
        base, head = self.albert.albert, self.albert.sop_classifier
        pooled = base.pooler_activation(base.pooler(first))
        logits: Tensor = head.classifier(drop_in_head(pooled, keys, head.dropout.p))
        return logits


class BertPretraining(Pretraining):
    """Masked LM and next sentence (Devlin et al. 2018, arXiv 1810.04805).

    Args:
        config: its sizes.
    """

    def __init__(self, config: BertModelConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertForPreTraining(transformers_config(config))
        self.encoder = Encoder(self.bert.bert, activation_checkpointing=config.activation_checkpointing)

    def sentence_logits(self, first: Tensor, keys: Tensor | None = None) -> Tensor:
        logits: Tensor = self.bert.cls.seq_relationship(self.bert.bert.pooler(first[:, None]))
        return logits


class MaskedLMPretraining(Pretraining):
    """Masked LM alone (Liu et al. 2019, arXiv 1907.11692; Sanh et al. 2019, arXiv 1910.01108).

    Args:
        config: its sizes; ``family`` is ``roberta`` or ``distilbert``.
    """

    def __init__(self, config: BertModelConfig) -> None:
        super().__init__()
        self.config = config
        kind = RobertaForMaskedLM if config.family == "roberta" else DistilBertForMaskedLM
        self.model = kind(transformers_config(config))
        self.encoder = Encoder(
            self.model.base_model, activation_checkpointing=config.activation_checkpointing
        )

    def sentence_logits(self, first: Tensor, keys: Tensor | None = None) -> Tensor | None:
        return None


def new_encoder(config: AlbertModelConfig | BertModelConfig) -> Pretraining:
    """Return a model to pretrain, with random weights from torch's generator."""
    if isinstance(config, AlbertModelConfig):
        return AlbertPretraining(config)
    return BertPretraining(config) if config.family == "bert" else MaskedLMPretraining(config)


def masked_lm_logits(weights: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the masked-LM logits ``[M, vocab]`` of ``[M, hidden]`` by the head of a transformers model."""
    match weights.config.model_type:
        case "distilbert":
            hidden = weights.vocab_layer_norm(weights.activation(weights.vocab_transform(hidden)))
            logits: Tensor = weights.vocab_projector(hidden)
        case "roberta":
            logits = weights.lm_head(hidden)
        case "albert" | "albert-prelayernorm":
            logits = weights.predictions(hidden)
        case _:
            logits = weights.cls.predictions(hidden)
    return logits


_OURS = frozenset({"checkpoint_path", "activation_checkpointing", "pre_layer_norm", "family"})
"""Settings that the configurations of transformers do not have."""


def transformers_config(config: AlbertModelConfig | BertModelConfig) -> PretrainedConfig:
    """Return the configuration of the transformers model."""
    values = {name: value for name, value in vars(config).items() if name not in _OURS}
    if isinstance(config, AlbertModelConfig):
        return AlbertPreLayerNormConfig(**values) if config.pre_layer_norm else AlbertConfig(**values)
    if config.family == "distilbert":
        return DistilBertConfig(**{_OF_DISTILBERT.get(name, name): value for name, value in values.items()})
    if config.family == "roberta":
        values["max_position_embeddings"] += config.pad_token_id + 1
        return RobertaConfig(**values, type_vocab_size=1)
    return BertConfig(**values)


_OF_DISTILBERT = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
"""Names of the settings in DistilBERT's configuration, where they differ."""
