"""Wraps the causal language models of transformers for training on packed documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shoal.errors import UsageError
from shoal.models.directory import load_weights, one_line, quiet_transformers


class CausalLM(nn.Module):
    """Computes the losses of any causal model of transformers on blocks of packed documents.

    Args:
        weights: the model; its attention has to keep documents apart by ``position_ids`` (sdpa, eager,
            flash and flex attention of transformers do).
        z_loss: weight of the squared log of the softmax's sum, which keeps logits small; 0: none.

    Example:

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=16)
        >>> model = CausalLM(GPT2LMHeadModel(sizes))
        >>> ids = torch.arange(8).reshape(1, 8)
        >>> sums = model(input_ids=ids, position_ids=ids % 4, labels=ids + 1)
        >>> [each.shape for each in sums]
        [torch.Size([]), torch.Size([]), torch.Size([])]
    """

    def __init__(self, weights: PreTrainedModel, *, z_loss: float = 0.0) -> None:
        """Take the model of transformers."""
        super().__init__()
        self.weights, self.z_loss = weights, z_loss

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return the sums over targets of what is minimized, of the cross-entropy, and of right tokens.

        Args:
            input_ids: int64 ``[B, T]``.
            position_ids: int64 ``[B, T]``; a document begins wherever it does not rise by one.
            labels: int64 ``[B, T]``, the token after each; -100 where there is no target. They are not
                shifted here, unlike the ``labels`` of transformers.

        Returns:
            Three scalars: loss with z-loss, loss, and the number of targets that are the likeliest token.
        """
        logits = self.weights(
            input_ids=input_ids, position_ids=position_ids, attention_mask=None, use_cache=False
        ).logits
        logits, targets = logits.flatten(0, 1).float(), labels.flatten()
        loss = functional.cross_entropy(logits, targets, reduction="sum")
        has_target = targets >= 0
        num_correct = ((logits.detach().argmax(-1) == targets) & has_target).sum()
        total = loss
        if self.z_loss:
            total = loss + self.z_loss * (logits.logsumexp(-1).square() * has_target).sum()
        return total, loss.detach(), num_correct


def open_causal(source: Path, **options: Any) -> PreTrainedModel:
    """Return the causal model of ``source``, in fp32.

    Args:
        source: a transformers directory, whose weights it has, or a ``config.json``, with random weights.
        options: replaces settings of the configuration, such as ``attn_implementation="eager"``.

    Raises:
        UsageError: there is no such model, it has no weights, or it is no causal language model.
        ShoalError: the weights cannot be read.
    """
    if source.is_dir():
        model: PreTrainedModel = load_weights(AutoModelForCausalLM, source, **options)
        return model
    if not source.is_file():
        raise UsageError(
            f"{source} does not exist: name a transformers directory, or a config.json for random weights"
        )
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(source, local_files_only=True)
            fresh: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{source}: is no causal language model: {one_line(error)}") from None
    return fresh
