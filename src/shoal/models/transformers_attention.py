"""Adds the attention of this package to those of transformers, by the name ``shoal``.

It computes what ``sdpa`` does. What :func:`documents_of` and :func:`num_keys_of` describe is attended to by
own kernels (:mod:`shoal.attention`) where there are any, else by ``sdpa`` with a mask. transformers hands
these descriptions, of four dimensions, to each layer as they are; so no host waits to look for documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from shoal.attention import document_bounds, has_kernels, packed_attention, windowed
from shoal.dropout import next_row_keys

NAME = "shoal"
"""Of the implementation."""


def uses_kernels(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, num_columns: int
) -> bool:
    """Return whether a model may be given the descriptions of this module.

    Not in an exported graph, with another attention, or where no kernels take its heads.

    Args:
        dtype: of weights.
        num_columns: of a head.
    """
    # There is no autocast for the meta device.
    if is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return (
        config._attn_implementation == NAME
        and not torch.compiler.is_exporting()
        and has_kernels(device, dtype, num_columns, 0.0)
    )


def documents_of(position_ids: Tensor) -> Tensor:
    """Return the bounds of documents, int32 ``[B, 1, 2, T]``.

    Args:
        position_ids: ``[B, T]``; a document begins wherever it does not rise by one.
    """
    return document_bounds(position_ids).transpose(0, 1)[:, None]


def num_keys_of(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return how many tokens of each sequence are attended to, int32 ``[B, 1, 1, 1]``.

    Args:
        ids: ``[B, T]``.
        mask: ``[B, T]``, 0 in the padding, which is behind the tokens; none: nothing is padded.
    """
    if mask is None:
        return torch.full((ids.shape[0], 1, 1, 1), ids.shape[1], device=ids.device, dtype=torch.int32)
    return mask.sum(1, dtype=torch.int32)[:, None, None, None]


@dataclass(frozen=True)
class _Keys:
    """The keys that queries attend to.

    Attributes:
        bounds: of documents, ``[2, B, T]``; none: each sequence is one.
        num_keys: ``[B]`` from the first one; none: all.
        is_causal: none behind the query.
        bias: ``[heads, T, keys]`` of scores.
    """

    bounds: Tensor | None
    num_keys: Tensor | None
    is_causal: bool
    bias: Tensor | None

    @classmethod
    def of(cls, module: nn.Module, description: Tensor, options: dict[str, Any]) -> _Keys:
        """Return those of a layer."""
        if description.shape[2] == 1:
            # The cross attention of T5 has biases of zeros.
            is_cross, bias = module.is_decoder and not module.is_causal, options.get("position_bias")
            causal = bool(module.is_causal)
            return cls(None, description.flatten(), causal, None if is_cross or bias is None else bias[0])
        bounds, window = description[:, 0].transpose(0, 1), options.get("sliding_window")
        return cls(bounds if window is None else windowed(bounds, window), None, True, None)

    def mask(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the mask of ``sdpa``, ``[B, 1, T or 1, keys]``."""
        at = torch.arange(key.shape[2], device=key.device)
        rows = torch.arange(query.shape[2], device=key.device)[:, None]
        if self.bounds is not None:
            return ((at >= self.bounds[0][..., None]) & (at <= rows))[:, None]
        assert self.num_keys is not None
        is_there = (at < self.num_keys[:, None])[:, None, None]
        return is_there & (at <= rows) if self.is_causal else is_there


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the context ``[B, T, heads, d]`` of a layer, and no weights.

    Args:
        module: the layer.
        query: ``[B, heads, T, d]``.
        key: ``[B, key heads, keys, d]``, as is ``value``.
        attention_mask: those of ``sdpa``, :func:`documents_of` or :func:`num_keys_of`.
        dropout: of attention weights.
        scaling: of the scores; default: d ** -0.5.
        options: those of ``sdpa``, and a ``sliding_window``.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return _by_sdpa(module, query, key, value, attention_mask, dropout, scaling, options)
    attended, takes = _Keys.of(module, attention_mask, options), _takes(query, key, value, dropout, options)
    keys = next_row_keys((query.shape[0], query.shape[2])) if takes and dropout else None
    if not takes or (dropout and keys is None):
        mask = attended.mask(query, key)
        return _by_sdpa(module, query, key, value, mask, dropout, scaling, options)
    return _by_kernels(query, key, value, attended, keys, dropout, scaling), None


def _by_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    context: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **options
    )
    return context


def _takes(query: Tensor, key: Tensor, value: Tensor, dropout: float, options: dict[str, Any]) -> bool:
    """Return whether the kernels compute this attention."""
    return (
        query.shape[3] == key.shape[3] == value.shape[3]
        and all(options.get(name) is None for name in ("softcap", "s_aux"))
        and has_kernels(value.device, value.dtype, value.shape[3], dropout)
    )


def _by_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: _Keys,
    keys: Tensor | None,
    p: float,
    scale: float | None,
) -> Tensor:
    """Return the context of kernels, of sequences of one length."""
    (num_sequences, _, num_queries, _), num_keys = query.shape, key.shape[2]
    begins = torch.arange(num_sequences + 1, device=query.device, dtype=torch.int32)
    rows, *others = (each.to(value.dtype).transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    context = packed_attention(
        rows,
        torch.cat(others, 1),
        None if keys is None else keys.flatten(),
        p,
        cu_queries=begins * num_queries,
        cu_keys=begins * num_keys,
        bias=attended.bias,
        num_keys=attended.num_keys,
        documents=None if attended.bounds is None else attended.bounds.flatten(1),
        max_queries=num_queries,
        max_keys=num_keys,
        is_causal=attended.is_causal,
        scale=scale,
    )
    return context.view(num_sequences, num_queries, *context.shape[1:])


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
