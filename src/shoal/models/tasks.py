"""Computes question answering and sequence classification on packed batches, and loads such models.

Heads, dropouts and poolers are those of transformers' ``*ForQuestionAnswering`` and
``*ForSequenceClassification``, so that weights load in both directions. Losses are separate functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from shoal.errors import UsageError
from shoal.models.directory import load_weights, model_type_of, one_line, resolve
from shoal.models.encoder import Encoder, drop_in_head, token_keys
from shoal.models.layers import ALBERTS
from shoal.models.pretraining import masked_lm_logits
from shoal.models.token_losses import at_least_fp32


class TaskModel(nn.Module):
    """A transformers model with a head, computed on :func:`shoal.models.encoder.packed_inputs`.

    Args:
        weights: the transformers model; its modules hold all parameters, under their names there.
        activation_checkpointing: recompute layers in the backward pass.
        new_parts: names of parameters that no file has values for.
    """

    def __init__(
        self,
        weights: PreTrainedModel,
        *,
        activation_checkpointing: bool = False,
        new_parts: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.weights = weights
        self.encoder = Encoder(weights.base_model, activation_checkpointing=activation_checkpointing)
        self.new_parts = new_parts

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the encoder's layers (:meth:`shoal.models.encoder.Encoder.compile`)."""
        self.encoder.compile(*args, **options)


class QuestionAnswering(TaskModel):
    """Scores of each token as the first and the last of the answer."""

    def forward(self, *, dropout_keys: Tensor | None = None, **packed: Any) -> tuple[Tensor, Tensor]:
        """Return (start logits ``[T]``, end logits ``[T]``) of a packed micro-batch."""
        keys = self.encoder.sample_keys(dropout_keys, packed["cu_seqlens"])
        hidden = self.encoder(**packed, dropout_keys=keys)
        if self.weights.config.model_type == "distilbert":
            of_tokens = (
                None if keys is None else token_keys(keys, packed["position_ids"], packed["cu_seqlens"])
            )
            hidden = drop_in_head(hidden, of_tokens, self.weights.dropout.p)
        start, end = self.weights.qa_outputs(hidden).unbind(1)
        return start, end


class SequenceClassification(TaskModel):
    """Scores of each sequence's labels."""

    def forward(self, *, dropout_keys: Tensor | None = None, **packed: Any) -> Tensor:
        """Return the logits ``[B, num_labels]`` of a packed micro-batch."""
        keys = self.encoder.sample_keys(dropout_keys, packed["cu_seqlens"])
        first = self.encoder(**packed, wanted=packed["cu_seqlens"][:-1].long(), dropout_keys=keys)
        weights, base = self.weights, self.weights.base_model
        model_type = weights.config.model_type
        if model_type == "roberta":
            head = weights.classifier
            pooled = torch.tanh(head.dense(drop_in_head(first, keys, head.dropout.p)))
            pooled = drop_in_head(pooled, keys, head.dropout.p, site=1)
        elif model_type in ALBERTS:
            pooled = drop_in_head(base.pooler_activation(base.pooler(first)), keys, weights.dropout.p)
        elif model_type == "distilbert":
            pooled = drop_in_head(F.relu(weights.pre_classifier(first)), keys, weights.dropout.p)
        else:
            pooled = drop_in_head(base.pooler(first[:, None]), keys, weights.dropout.p)
        last = weights.classifier.out_proj if model_type == "roberta" else weights.classifier
        logits: Tensor = last(pooled)
        return logits


class MaskedLM(TaskModel):
    """Scores of the vocabulary at masked tokens; ``encoder`` computes their hidden states."""

    def mlm_logits(self, hidden: Tensor) -> Tensor:
        """Return the masked-LM logits ``[M, vocab]`` of ``[M, hidden]``."""
        return masked_lm_logits(self.weights, hidden)


def span_loss(
    start_logits: Tensor, end_logits: Tensor, packed: Mapping[str, Any], start: Tensor, end: Tensor
) -> Tensor:
    """Return the sum over sequences of the mean of both cross entropies, each over its own sequence.

    (transformers' loss on padded batches lets padding compete: its scores are in the denominator.)

    Args:
        start_logits: ``[T]`` scores as the answer's first token.
        end_logits: ``[T]`` scores as its last.
        packed: the micro-batch; its ``cu_seqlens`` and ``max_seqlen`` are read.
        start: ``[B]`` position of the first token in its sequence.
        end: ``[B]`` position of the last.
    """
    cu_seqlens = packed["cu_seqlens"]
    pad_index = cu_seqlens[:-1, None] + torch.arange(packed["max_seqlen"], device=cu_seqlens.device)
    outside = pad_index >= cu_seqlens[1:, None]
    pad_index = pad_index.masked_fill(outside, 0)

    def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        scores = at_least_fp32(logits)[pad_index].masked_fill(outside, -torch.inf)
        return F.cross_entropy(scores, target, reduction="sum")

    return (cross_entropy(start_logits, start) + cross_entropy(end_logits, end)) / 2


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross entropy of ``logits [B, num_labels]`` with ``labels [B]``."""
    return F.cross_entropy(at_least_fp32(logits), labels, reduction="sum")


def score_loss(logits: Tensor, scores: Tensor) -> Tensor:
    """Return the summed squared error of ``logits [B, 1]`` from ``scores [B]``."""
    return F.mse_loss(at_least_fp32(logits)[:, 0], scores, reduction="sum")


# ------------------------------------------------------------------------------------------------ reading

_CLASSES: dict[type, Any] = {
    MaskedLM: AutoModelForMaskedLM,
    QuestionAnswering: AutoModelForQuestionAnswering,
    SequenceClassification: AutoModelForSequenceClassification,
}
Task = TypeVar("Task", MaskedLM, QuestionAnswering, SequenceClassification)


def load_task_model(
    kind: type[Task],
    source: str | Path,
    *,
    labels: Sequence[str] = (),
    from_scratch: bool = False,
    dropout: float | None = None,
    activation_checkpointing: bool = False,
) -> Task:
    """Return the model of ``source`` with the head of a task.

    A head that the source lacks (it was pretrained, or finetuned for another task) is drawn from torch's
    generator, so seed that first. ``new_parts`` of the model has the names of new parameters.

    Args:
        kind: ``QuestionAnswering``, ``SequenceClassification`` or ``MaskedLM``.
        source: a transformers directory, or ``hub:NAME``.
        labels: names of the labels, in the order of the logits; a single one is that of a score, as of a
            regression; default: those of the source.
        from_scratch: take only the sizes; all weights are new.
        dropout: of hidden states and of attention; default: that of the source.
        activation_checkpointing: recompute layers in the backward pass.

    Raises:
        UsageError: no transformers directory, another architecture, pickled weights, weights that do not fit.
        ShoalError: files that cannot be read.
    """
    directory = resolve(source)
    config = _task_config(directory, kind, labels, dropout)
    if from_scratch:
        weights = _CLASSES[kind].from_config(config, dtype=torch.float32)
        new = {name for name, _ in weights.named_parameters()}
    else:
        weights, new = _read_weights(_CLASSES[kind], directory, config)
    return kind(weights, activation_checkpointing=activation_checkpointing, new_parts=tuple(sorted(new)))


def _task_config(
    directory: Path, kind: type, labels: Sequence[str], dropout: float | None
) -> PretrainedConfig:
    model_type = model_type_of(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{directory / 'config.json'}: cannot be used: {one_line(error)}") from None
    if kind is QuestionAnswering:
        config.num_labels = 2  # start and end
    elif labels:
        there = [config.id2label[number] for number in sorted(config.id2label)]
        theirs, asked = ([name.lower() for name in names] for names in (there, labels))
        if theirs != asked and sorted(theirs) == sorted(asked):
            raise UsageError(
                f"{directory / 'config.json'}: the labels there are {', '.join(there)}, asked for are "
                f"{', '.join(labels)}: give them in the order of the model"
            )
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
        config.problem_type = "regression" if len(labels) == 1 else None
    if dropout is not None:
        distilbert = ("dropout", "attention_dropout")
        others = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        for name in distilbert if model_type == "distilbert" else others:
            setattr(config, name, dropout)
    return config


def _read_weights(
    model_class: Any, directory: Path, config: PretrainedConfig
) -> tuple[PreTrainedModel, set[str]]:
    """Return the model with the weights of ``directory``, and the names of those that it lacks."""
    model, report = load_weights(
        model_class,
        directory,
        config=config,
        ignore_mismatched_sizes=True,  # reported below
        output_loading_info=True,
    )
    for name, there, here in sorted(report["mismatched_keys"]):
        raise UsageError(
            f"{directory}: {name} has shape {tuple(there)} there and {tuple(here)} in the model; take the "
            "config.json, vocabulary and labels that belong to these weights"
        )
    new = set(report["missing_keys"])
    prefix = f"{model.base_model_prefix}."
    lacking = sorted(name for name in new if name.startswith(prefix) and ".pooler" not in name)
    if lacking:
        raise UsageError(
            f"{directory}: {lacking[0]} and {len(lacking) - 1} more of the encoder's weights are not there; "
            "are config.json and the weights of the same model?"
        )
    return model, new
