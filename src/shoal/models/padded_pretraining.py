"""Computes pretraining losses on padded batches of one shape, which a pipeline needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.pretraining import Pretraining
from shoal.models.token_losses import at_least_fp32

SUMS = ("mlm_loss", "mlm_correct", "sentence_loss", "sentence_correct")
"""Names of the values that ``sums`` of the output adds up, in their order."""


class PaddedPretraining(nn.Module):
    """A model to pretrain with its loss; its parameters have their names in ``model``.

    Losses, gradients and dropout are those of ``model`` on the same examples without padding.

    Args:
        model: whose parameters it uses.
    """

    def __init__(self, model: Pretraining) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self._packed = (model,)  # no child, which would rename the parameters
        num_recomputed = len(model.encoder.layers) if model.encoder.activation_checkpointing else 0
        self.recomputed = nn.ModuleList(_Recomputed() for _ in range(num_recomputed))

    def forward(
        self,
        *,
        input_ids: Tensor,
        token_type_ids: Tensor,
        lengths: Tensor,
        wanted: Tensor,
        masked_ids: Tensor,
        masked_weights: Tensor,
        weights: Tensor,
        labels: Tensor,
        dropout_keys: Tensor,
        samples_per_target: Tensor,
    ) -> dict[str, Tensor]:
        """Return ``loss`` and the ``sums`` over the micro-batch (:data:`SUMS`), float32 ``[4]``.

        The loss is (masked-LM losses * ``samples_per_target`` + sentence losses) / B: its mean over all
        samples is the sum of the means over all targets and all samples.

        Args:
            weights: ``[B]`` 1, or 0 for rows that only fill the batch.
            samples_per_target: ``[]`` of the global batch.

        The others are those of :class:`shoal.data.text.padded_examples.PaddedExamples`.
        """
        (model,) = self._packed
        (num, width), device = input_ids.shape, input_ids.device
        rows = wanted + (torch.arange(num, device=device) * width)[:, None]
        hidden = model.encoder(
            input_ids.flatten(),
            token_type_ids.flatten(),
            torch.arange(width, device=device).repeat(num),
            torch.arange(num + 1, device=device) * width,
            width,
            wanted=torch.cat([rows[:, 0], rows[:, 1:].flatten()]),
            dropout_keys=dropout_keys,
            lengths=lengths,
            calls=tuple(self.recomputed),
        )
        mlm = _sums(model.mlm_logits(hidden[num:]), masked_ids.flatten(), masked_weights.flatten())
        logits = model.sentence_logits(hidden[:num], model.encoder.sample_keys(dropout_keys, lengths))
        sentence = torch.zeros_like(mlm) if logits is None else _sums(logits, labels, weights)
        loss = (mlm[0] * samples_per_target + sentence[0]) / num
        return {"loss": loss, "sums": torch.cat([mlm, sentence]).detach()}


class _Recomputed(nn.Module):
    """Calls a layer of the encoder, whose modules are called in parts, or more than once.

    By its name stages find what they compute again (:mod:`shoal.pipelining.recompute`).
    """

    gradient_checkpointing = True

    def forward(self, layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return the layer's output."""
        return layer(*inputs)


def _sums(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of losses and of correct predictions, float32 ``[2]``."""
    logits = at_least_fp32(logits)
    losses = F.cross_entropy(logits, targets, reduction="none")
    best = logits.gather(1, targets[:, None]).squeeze(1) >= logits.amax(dim=1)
    return torch.stack([(losses * weights).sum(), (best * weights).sum()])
