"""Computes BERT-like encoders on packed batches, without the padding that transformers computes with.

1. Embeddings, linear layers and norms run on ``[T, hidden]``, the tokens of all sequences.
2. So does attention on a GPU, by kernels of :mod:`shoal.attention`. Elsewhere it runs on
   ``[B, heads, S, d]``: queries, keys and values are padded, the context is unpadded. For sequences of equal
   length both are views.
3. The last layer computes queries, output projection and feed-forward only for the rows that a loss or head
   reads. Keys and values come from all tokens, so the results are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from shoal.attention import has_kernels, packed_attention
from shoal.dropout import attention, dropout, fold_in, site_keys
from shoal.models.layers import TransformerLayer, embed, embedding_dropout, final_norm_of, layers_of

PACKED_INPUTS = ("input_ids", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen", "dropout_keys")
"""Keys of a packed micro-batch (:mod:`shoal.data.packing`), which all models over it take by these names."""

_HEAD_SITE = 1 << 32
"""Sites of dropout in heads are counted from here."""


def packed_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the packed sequences of a micro-batch without their targets."""
    return {name: batch[name] for name in PACKED_INPUTS if name in batch}


def full_sequences(num_sequences: int, length: int) -> dict[str, Any]:
    """Return a packed micro-batch of sequences of this length, without values on the meta device."""
    names = ("input_ids", "token_type_ids", "position_ids")
    with torch.device("meta"):
        batch = {name: torch.empty(num_sequences * length, dtype=torch.int64) for name in names}
        offsets = torch.empty(num_sequences + 1, dtype=torch.int64)
    return {**batch, "cu_seqlens": offsets, "max_seqlen": length}


def token_keys(keys: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the dropout keys of tokens, int64 ``[T]``, from those of their samples, ``[B]``."""
    return fold_in(_of_tokens(keys, position_ids, cu_seqlens), position_ids)


def _of_tokens(keys: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the key of each token's sample."""
    return keys.repeat_interleave(cu_seqlens.diff(), output_size=position_ids.shape[0])


def drop(x: Tensor, keys: Tensor | None, p: float) -> Tensor:
    """Return ``x`` after dropout; without keys (outside of training) as it is."""
    return x if keys is None else dropout(x, keys, p)


def drop_in_head(x: Tensor, keys: Tensor | None, p: float, *, site: int = 0) -> Tensor:
    """Return ``x`` after a dropout in the head; ``keys`` are those of its samples or tokens."""
    return x if keys is None else dropout(x, fold_in(keys, _HEAD_SITE + site), p)


class Encoder:
    """Computes the last hidden states of a base model for packed batches.

    It is not a module: parameters belong to the transformers model around ``base``, under its names alone.

    Args:
        base: ``BertModel``, ``AlbertModel``, ``RobertaModel`` or ``DistilBertModel``.
        activation_checkpointing: recompute layers in the backward pass.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        *,
        activation_checkpointing: bool = False,
    ) -> None:
        self.base = base
        self.layers = layers_of(base)
        base.embeddings.dropout = nn.Identity()  # drawn by `embed`, from the keys of samples
        self._drops = embedding_dropout(base) > 0 or any(
            layer.attention_dropout or layer.dense_dropout or layer.output_dropout for layer in self.layers
        )
        self.activation_checkpointing = activation_checkpointing
        self.final_norm = final_norm_of(base)  # layers are pre-norm where there is one

    def __call__(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        wanted: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        lengths: Tensor | None = None,
        calls: Sequence[Callable[..., Tensor]] = (),
    ) -> Tensor:
        """Return the last hidden states, ``[T, hidden]``, or ``[W, hidden]`` of the rows ``wanted``.

        Args:
            input_ids: ``[T]`` token ids, one sequence after the other.
            token_type_ids: ``[T]`` segments; not read by models without them.
            position_ids: ``[T]`` position of each token in its sequence, from 0.
            cu_seqlens: ``[B + 1]`` the first token of each sequence, and T.
            max_seqlen: tokens S of the longest sequence.
            wanted: ``[W]`` rows to return, no row twice; default: all.
            dropout_keys: int64 ``[B]``, keys of the samples (:mod:`shoal.dropout`), which training reads;
                default: drawn from torch's generator.
            lengths: ``[B]`` tokens to attend to, of sequences that are padded to S tokens each; default: all.
            calls: for each layer a function that calls one with its inputs; default: none around them.
        """
        keys = self.sample_keys(dropout_keys, cu_seqlens)
        of_sites = self._site_keys(keys, position_ids, cu_seqlens)
        hidden = embed(self.base, input_ids, token_type_ids, position_ids, of_sites[0])
        if _computes_in_bf16(hidden):
            hidden = hidden.bfloat16()
        layout = self._layout(hidden, position_ids, cu_seqlens, max_seqlen, lengths, wanted)
        last = len(self.layers) - 1
        run: Callable[..., Tensor] = self._layer
        if self.activation_checkpointing and self.base.training and not torch.compiler.is_exporting():
            run = partial(checkpoint, self._layer, use_reentrant=False, preserve_rng_state=False)
        for number, layer in enumerate(self.layers):
            sites = (2 * number + 1, 2 * number + 2, 2 * (last + 1) + 1 + number)
            call = partial(calls[number], run) if calls else run
            hidden = call(layer, hidden, number == last, layout, tuple(of_sites[site] for site in sites))
        hidden = layout.as_asked(hidden)
        return hidden if self.final_norm is None else _norm(self.final_norm, hidden)

    def compile(self, **options: Any) -> None:
        """Compile the layers with ``torch.compile``, which takes these options.

        All layers share the compiled code, a graph for each kind of layer and of batch, so compiling takes
        the same time for any number of layers. Embeddings and heads stay as they are.
        """
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # of `_add`
        self._layer = torch.compile(MethodType(Encoder._layer, self), **options)  # type: ignore[method-assign]

    def sample_keys(self, dropout_keys: Tensor | None, cu_seqlens: Tensor) -> Tensor | None:
        """Return the keys ``[B]`` to drop by: none outside of training, random ones where none are given."""
        if not self.base.training:
            return None
        if dropout_keys is not None:
            return dropout_keys
        return torch.randint(1 << 62, (cu_seqlens.shape[0] - 1,), device=cu_seqlens.device)

    def _site_keys(
        self, keys: Tensor | None, position_ids: Tensor, cu_seqlens: Tensor
    ) -> Sequence[Tensor | None]:
        """Return the keys of tokens ``[T]`` at each site, of rows and then of each layer's weights."""
        num_sites = 3 * len(self.layers) + 1
        if keys is None or not self._drops:
            return [None] * num_sites
        return site_keys(_of_tokens(keys, position_ids, cu_seqlens), position_ids, num_sites).unbind()

    def _layout(self, hidden: Tensor, *sequences: Any) -> _Layout:
        """Return how attention is computed on the device of ``hidden``."""
        num_columns = self.layers[0].query.out_features // self.layers[0].num_heads
        highest = max(layer.attention_dropout for layer in self.layers)
        there = has_kernels(hidden.device, _type_of_products(hidden), num_columns, highest)
        return _PackedLayout(*sequences) if there else _PaddedLayout(*sequences)

    def _layer(
        self,
        layer: TransformerLayer,
        hidden: Tensor,
        is_last: bool,
        layout: _Layout,
        keys: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> Tensor:
        pre = self.final_norm is not None
        wanted = layout.wanted if is_last else None
        dense_keys, output_keys, weight_keys = keys
        source = _norm(layer.attention_norm, hidden) if pre else hidden
        asking, residual = source, hidden
        if wanted is not None:
            residual = _Collect.apply(hidden, wanted)
            asking = _Collect.apply(source, wanted) if pre else residual
            dense_keys, output_keys, weight_keys = (k if k is None else k[wanted] for k in keys)
        context = layout.attend(layer, source, None if wanted is None else asking, weight_keys)
        summed = _add(residual, drop(layer.dense(context), dense_keys, layer.dense_dropout))
        attended = summed if pre else _norm(layer.attention_norm, summed)
        fed = layer.down(layer.activation(layer.up(_norm(layer.output_norm, attended) if pre else attended)))
        out = _add(attended, drop(fed, output_keys, layer.output_dropout))
        return out if pre else _norm(layer.output_norm, out)


def _type_of_products(rows: Tensor) -> torch.dtype:
    """Return the type in which products of rows are computed."""
    device_type = rows.device.type
    # There is no autocast for the meta device.
    if is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return rows.dtype


def _computes_in_bf16(rows: Tensor) -> bool:
    """Return whether products are computed in bf16; then what is between them is stored in bf16 as well."""
    return _type_of_products(rows) == torch.bfloat16


def _add(residual: Tensor, output: Tensor) -> Tensor:
    """Return the sum, which compiled code stores for the backward pass.

    Left to itself, Inductor stores the block's output, and three of its kernels drop and add again.
    """
    if not torch.compiler.is_compiling():
        return residual + output
    policy = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    stored: Tensor = checkpoint(
        torch.add, residual, output, use_reentrant=False, preserve_rng_state=False, context_fn=policy
    )
    return stored


def _norm(norm: nn.LayerNorm, rows: Tensor) -> Tensor:
    """Return the normalised rows in their own type; statistics, scale and bias are of the parameters' type.

    Under autocast a module's result would be fp32 on a GPU: twice the bytes for each step between products.
    """
    device_type = rows.device.type
    with torch.autocast(device_type, enabled=False) if is_autocast_available(device_type) else nullcontext():
        normed: Tensor = norm(rows.to(norm.weight.dtype))
    return normed.to(rows.dtype)


class _PackedLayout:
    """Computes attention over the tokens of sequences as they are.

    Attributes:
        wanted: ``[W]`` rows of the last layer's queries, in the order of sequences; none: all.
    """

    def __init__(
        self,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        attended: Tensor | None,
        wanted: Tensor | None,
    ) -> None:
        self.cu_seqlens, self.max_seqlen, self.attended = cu_seqlens, max_seqlen, attended
        self.wanted = wanted
        if wanted is not None:
            self.wanted, self._order = wanted.sort()
            self._cu_wanted = torch.searchsorted(self.wanted, cu_seqlens.to(wanted.dtype))

    def as_asked(self, rows: Tensor) -> Tensor:
        """Return the rows of ``wanted`` in the order in which they were asked for."""
        return rows if self.wanted is None else _spread(rows, self._order, rows.shape[0])

    def attend(
        self, layer: TransformerLayer, source: Tensor, asking: Tensor | None, weight_keys: Tensor | None
    ) -> Tensor:
        """Return the context ``[W, hidden]`` of queries ``asking``, each over its sequence in ``source``."""
        query, others = None, [layer.query, layer.key, layer.value]
        if asking is not None:
            query, others = _heads(layer.query(asking), layer.num_heads), others[1:]
        return packed_attention(
            query,
            _heads(_stacked(others, source), len(others) * layer.num_heads),
            weight_keys,
            layer.attention_dropout,
            cu_queries=self.cu_seqlens if asking is None else self._cu_wanted,
            cu_keys=self.cu_seqlens,
            num_keys=self.attended,
            max_queries=self.max_seqlen,
            max_keys=self.max_seqlen,
        ).flatten(1)


class _PaddedLayout:
    """Computes attention over the ``B * S`` positions of the padded batch.

    Attributes:
        wanted: ``[W]`` rows of the last layer's queries; none: all.
        unpad_index: ``[T]`` position of each token in the flattened padded batch.
        is_full: whether all positions have a token.
        mask: bool ``[B, 1, 1, S]``, false in the padding; none without padding.
    """

    def __init__(
        self,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        attended: Tensor | None,
        wanted: Tensor | None,
    ) -> None:
        lengths = cu_seqlens.diff()
        device, num_tokens = position_ids.device, position_ids.shape[0]
        self.num_sequences, self.max_seqlen, self.wanted = cu_seqlens.shape[0] - 1, max_seqlen, wanted
        self.is_full = num_tokens == self.num_sequences * max_seqlen  # by sizes: no GPU is waited for
        firsts = torch.arange(self.num_sequences, device=device) * max_seqlen
        self.unpad_index = firsts.repeat_interleave(lengths, output_size=num_tokens) + position_ids
        self.mask: Tensor | None = None
        if attended is not None or not self.is_full:
            lengths = lengths if attended is None else attended
            self.mask = (torch.arange(max_seqlen, device=device) < lengths[:, None])[:, None, None, :]

    def as_asked(self, rows: Tensor) -> Tensor:
        """Return the rows as they are, in the order of ``wanted``."""
        return rows

    def attend(
        self, layer: TransformerLayer, source: Tensor, asking: Tensor | None, weight_keys: Tensor | None
    ) -> Tensor:
        """Return the context ``[W, hidden]`` of queries ``asking``, each over its sequence in ``source``."""
        index, is_full = self.unpad_index, self.is_full and asking is None
        if asking is None or self.wanted is None:
            of_query, of_key, of_value = _products((layer.query, layer.key, layer.value), source)
        else:
            of_query, (of_key, of_value) = layer.query(asking), _products((layer.key, layer.value), source)
            index = index.index_select(0, self.wanted)
        query = self._by_head(layer, of_query if is_full else self._padded(of_query, index))
        key, value = (
            self._by_head(layer, each if self.is_full else self._padded(each, self.unpad_index))
            for each in (of_key, of_value)
        )
        if weight_keys is None or not layer.attention_dropout:
            context = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        else:
            padded = weight_keys if is_full else self._padded(weight_keys, index)
            numbers = torch.arange(layer.num_heads, device=index.device)[:, None]
            keys = fold_in(padded.view(self.num_sequences, 1, self.max_seqlen), numbers)
            context = attention(query, key, value, keys, layer.attention_dropout, attn_mask=self.mask)
        rows = context.transpose(1, 2).flatten(2).flatten(0, 1)
        return rows if is_full else _Collect.apply(rows, index)

    def _padded(self, rows: Tensor, index: Tensor) -> Tensor:
        return _spread(rows, index, self.num_sequences * self.max_seqlen)

    def _by_head(self, layer: TransformerLayer, padded: Tensor) -> Tensor:
        """Return rows of all positions as ``[B, heads, S, d]``."""
        num_columns = layer.query.out_features // layer.num_heads  # Inductor fails on -1 here
        return padded.view(self.num_sequences, self.max_seqlen, layer.num_heads, num_columns).transpose(1, 2)


_Layout = _PackedLayout | _PaddedLayout


def _heads(rows: Tensor, num_heads: int) -> Tensor:
    return rows.view(rows.shape[0], num_heads, -1)


def _products(layers: Sequence[nn.Linear], rows: Tensor) -> Sequence[Tensor]:
    """Return the outputs of layers of one size that read the same rows; in compiled code by one product."""
    if not torch.compiler.is_compiling():
        return [layer(rows) for layer in layers]
    return _stacked(layers, rows).chunk(len(layers), dim=1)


def _stacked(layers: Sequence[nn.Linear], rows: Tensor) -> Tensor:
    """Return the outputs of layers that read the same rows, side by side; in compiled code by one product."""
    if not torch.compiler.is_compiling():
        return torch.cat([layer(rows) for layer in layers], dim=1)
    weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
    return F.linear(rows, weight, bias)


def _spread(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Write rows, or numbers, to distinct places of a zero tensor: the transpose of ``_Collect``."""
    return rows.new_zeros(num_rows, *rows.shape[1:]).index_copy_(0, index, rows)


class _Collect(torch.autograd.Function):
    """Reads distinct rows: the transpose of :func:`_spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, grad.shape[1]).index_copy_(0, index, grad), None
