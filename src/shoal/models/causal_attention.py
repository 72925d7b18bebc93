"""Adds the attention of this package to those of transformers, by the name ``shoal``.

It computes what ``sdpa`` does. The packed documents of a block, which :func:`documents_of` describes, are
attended to by own kernels (:mod:`shoal.attention`) where there are any, else by ``sdpa`` with a mask.
"""

from __future__ import annotations

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


def documents_of(config: PreTrainedConfig, position_ids: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the bounds of documents as the 4-dimensional mask of a model, int32 ``[B, 1, 2, T]``.

    transformers hands such a mask to each layer as it is; so no host waits to look for documents.

    Args:
        config: of the model.
        position_ids: ``[B, T]``; a document begins wherever it does not rise by one.
        dtype: of weights.

    Returns:
        None where the model has another attention, in an exported graph, or where no kernels take its heads.
    """
    device_type = position_ids.device.type
    # There is no autocast for the meta device.
    if is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    num_columns = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (
        config._attn_implementation != NAME
        or torch.compiler.is_exporting()
        or not has_kernels(position_ids.device, dtype, num_columns, 0.0)
    ):
        return None
    return document_bounds(position_ids).transpose(0, 1)[:, None]


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
        key: ``[B, key heads, T, d]``, as is ``value``.
        attention_mask: those of ``sdpa``, or :func:`documents_of`.
        dropout: of attention weights.
        scaling: of the scores; default: d ** -0.5.
        options: those of ``sdpa``, and a ``sliding_window``.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return _by_sdpa(module, query, key, value, attention_mask, dropout, scaling, options)
    bounds = attention_mask[:, 0].transpose(0, 1)
    if (window := options.get("sliding_window")) is not None:
        bounds = windowed(bounds, window)
    keys = None
    takes = _takes(query, key, value, dropout, options)
    if takes and dropout:
        keys = next_row_keys((query.shape[0], query.shape[2]))
    if not takes or (dropout and keys is None):
        return _by_sdpa(module, query, key, value, _mask(bounds[0]), dropout, scaling, options)
    return _by_kernels(query, key, value, bounds, keys, dropout, scaling), None


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
    others = ("softcap", "s_aux", "position_bias")
    return (
        query.shape[2:] == key.shape[2:] == value.shape[2:]
        and all(options.get(name) is None for name in others)
        and has_kernels(value.device, value.dtype, value.shape[3], dropout)
    )


def _mask(first: Tensor) -> Tensor:
    """Return the mask ``[B, 1, T, T]`` of ``sdpa`` for rows that see those from their first one on."""
    rows = torch.arange(first.shape[1], device=first.device)
    return ((rows[None] >= first[..., None]) & (rows <= rows[:, None]))[:, None]


def _by_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    keys: Tensor | None,
    p: float,
    scale: float | None,
) -> Tensor:
    """Return the context of kernels, whose sequences are the blocks."""
    num_blocks, _, length, _ = query.shape
    begins = torch.arange(0, num_blocks * length + 1, length, device=query.device, dtype=torch.int32)
    rows, *others = (each.to(value.dtype).transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    context = packed_attention(
        rows,
        torch.cat(others, 1),
        None if keys is None else keys.flatten(),
        p,
        cu_queries=begins,
        cu_keys=begins,
        documents=bounds.flatten(1),
        max_queries=length,
        max_keys=length,
        is_causal=True,
        scale=scale,
    )
    return context.view(num_blocks, length, *context.shape[1:])


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
