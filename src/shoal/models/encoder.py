"""Computes BERT-like encoders on packed batches, without the padding that transformers computes with.

1. Embeddings, linear layers and norms run on ``[T, hidden]``, the tokens of all sequences.
2. Attention runs on ``[B, heads, S, d]``: queries, keys and values are padded, the context is unpadded. For
   sequences of equal length both are views.
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

from shoal.dropout import attention, dropout, fold_in
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
    of_samples = keys.repeat_interleave(cu_seqlens.diff(), output_size=position_ids.shape[0])
    return fold_in(of_samples, position_ids)


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
        self._keys_of_sites = _keys_of_sites

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
        """
        layout = _PackedLayout(position_ids, cu_seqlens, max_seqlen, lengths)
        keys = self.sample_keys(dropout_keys, cu_seqlens)
        of_rows, of_weights = self._site_keys(keys, position_ids, cu_seqlens, max_seqlen)
        hidden = embed(self.base, input_ids, token_type_ids, position_ids, of_rows[0])
        if _computes_in_bf16(hidden):
            hidden = hidden.bfloat16()
        last = len(self.layers) - 1
        run: Callable[..., Tensor] = self._layer
        if self.activation_checkpointing and self.base.training:
            run = partial(checkpoint, self._layer, use_reentrant=False, preserve_rng_state=False)
        for number, layer in enumerate(self.layers):
            site_keys = (of_rows[2 * number + 1], of_rows[2 * number + 2], of_weights[number])
            hidden = run(layer, hidden, wanted if number == last else None, layout, site_keys)
        return hidden if self.final_norm is None else _norm(self.final_norm, hidden)

    def compile(self, **options: Any) -> None:
        """Compile the layers with ``torch.compile``, which takes these options.

        All layers share the compiled code, a graph for each kind of layer and of batch, so compiling takes
        the same time for any number of layers. So is the making of their dropout's keys, whose steps would
        be 28 operations, each on a number per head and token of all layers. Embeddings and heads stay as
        they are.
        """
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # of `_add`
        self._keys_of_sites = torch.compile(_keys_of_sites, **options)
        self._layer = torch.compile(MethodType(Encoder._layer, self), **options)  # type: ignore[method-assign]

    def sample_keys(self, dropout_keys: Tensor | None, cu_seqlens: Tensor) -> Tensor | None:
        """Return the keys ``[B]`` to drop by: none outside of training, random ones where none are given."""
        if not self.base.training:
            return None
        if dropout_keys is not None:
            return dropout_keys
        return torch.randint(1 << 62, (cu_seqlens.shape[0] - 1,), device=cu_seqlens.device)

    def _site_keys(
        self, keys: Tensor | None, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """Return the keys of the rows ``[T]`` of each site, and of each layer's weights ``[B, heads, S]``."""
        num_layers = len(self.layers)
        num_sites = 2 * num_layers + 1
        if keys is None or not self._drops:
            return [None] * num_sites, [None] * num_layers
        drops_weights = any(layer.attention_dropout for layer in self.layers)
        of_rows, of_weights = self._keys_of_sites(
            token_keys(keys, position_ids, cu_seqlens),
            keys,
            num_sites,
            (num_layers, self.layers[0].num_heads, max_seqlen) if drops_weights else None,
        )
        return of_rows.unbind(), [None] * num_layers if of_weights is None else of_weights.unbind()

    def _layer(
        self,
        layer: TransformerLayer,
        hidden: Tensor,
        wanted: Tensor | None,
        layout: _PackedLayout,
        keys: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> Tensor:
        pre = self.final_norm is not None
        dense_keys, output_keys, weight_keys = keys
        source = _norm(layer.attention_norm, hidden) if pre else hidden
        asking, residual = source, hidden
        if wanted is not None:
            residual = _Collect.apply(hidden, wanted)
            asking = _Collect.apply(source, wanted) if pre else residual
            dense_keys, output_keys = (k if k is None else k[wanted] for k in (dense_keys, output_keys))
        context = _attend(layer, asking, wanted, source, layout, weight_keys)
        summed = _add(residual, drop(layer.dense(context), dense_keys, layer.dense_dropout))
        attended = summed if pre else _norm(layer.attention_norm, summed)
        fed = layer.down(layer.activation(layer.up(_norm(layer.output_norm, attended) if pre else attended)))
        out = _add(attended, drop(fed, output_keys, layer.output_dropout))
        return out if pre else _norm(layer.output_norm, out)


def _computes_in_bf16(rows: Tensor) -> bool:
    """Return whether products are computed in bf16; then what is between them is stored in bf16 as well."""
    device_type = rows.device.type
    return (
        is_autocast_available(device_type)  # not for the meta device
        and torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) == torch.bfloat16
    )


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


def _keys_of_sites(
    of_tokens: Tensor, keys: Tensor, num_sites: int, weights: tuple[int, int, int] | None
) -> tuple[Tensor, Tensor | None]:
    """Return the keys of rows at all sites, ``[num_sites, T]``, and of weights, ``[layers, B, heads, S]``.

    Args:
        of_tokens: ``[T]``.
        keys: ``[B]``, of the samples.
        weights: layers, heads and S; ``None``: weights are not dropped.
    """
    sites = torch.arange(num_sites, device=keys.device)
    of_rows = fold_in(of_tokens, sites[:, None])
    if weights is None:
        return of_rows, None
    num_layers, num_heads, max_seqlen = weights
    layers = torch.arange(num_sites, num_sites + num_layers, device=keys.device)
    padded = fold_in(keys[:, None], torch.arange(max_seqlen, device=keys.device))
    heads = torch.arange(num_heads, device=keys.device)[:, None]
    return of_rows, fold_in(fold_in(padded, layers[:, None, None])[:, :, None], heads)


def _attend(
    layer: TransformerLayer,
    asking: Tensor,
    wanted: Tensor | None,
    source: Tensor,
    layout: _PackedLayout,
    weight_keys: Tensor | None,
) -> Tensor:
    """Return the context ``[W, hidden]`` of the queries ``asking``, each over its sequence in ``source``."""
    unpad_index = layout.unpad_index
    asking_index = unpad_index if wanted is None else unpad_index.index_select(0, wanted)

    def heads(rows: Tensor, index: Tensor, *, is_padded: bool) -> Tensor:
        padded = rows if is_padded else _spread(rows, index, layout.num_sequences * layout.max_seqlen)
        heads_last = padded.view(layout.num_sequences, layout.max_seqlen, layer.num_heads, -1)
        return heads_last.transpose(1, 2)

    if wanted is None:
        of_query, of_key, of_value = _products((layer.query, layer.key, layer.value), source)
    else:
        of_query, (of_key, of_value) = layer.query(asking), _products((layer.key, layer.value), source)
    query = heads(of_query, asking_index, is_padded=layout.is_full and wanted is None)
    key = heads(of_key, unpad_index, is_padded=layout.is_full)
    value = heads(of_value, unpad_index, is_padded=layout.is_full)
    if weight_keys is None or not layer.attention_dropout:
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=layout.mask)
    else:
        context = attention(query, key, value, weight_keys, layer.attention_dropout, attn_mask=layout.mask)
    padded = context.transpose(1, 2).flatten(2).flatten(0, 1)
    return padded if layout.is_full and wanted is None else _Collect.apply(padded, asking_index)


def _products(layers: Sequence[nn.Linear], rows: Tensor) -> Sequence[Tensor]:
    """Return the outputs of layers of one size that read the same rows; in compiled code by one product."""
    if not torch.compiler.is_compiling():
        return [layer(rows) for layer in layers]
    weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
    return F.linear(rows, weight, bias).chunk(len(layers), dim=1)


class _PackedLayout:
    """Relates the T tokens of a packed batch to the ``B * S`` positions of the padded one.

    Attributes:
        unpad_index: ``[T]`` position of each token in the flattened padded batch.
        is_full: whether both are the same.
        mask: bool ``[B, 1, 1, S]``, false in the padding; none without padding.
    """

    def __init__(
        self, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int, attended: Tensor | None = None
    ) -> None:
        lengths = cu_seqlens.diff()
        device, num_tokens = position_ids.device, position_ids.shape[0]
        self.num_sequences, self.max_seqlen = cu_seqlens.shape[0] - 1, max_seqlen
        self.is_full = num_tokens == self.num_sequences * max_seqlen  # by sizes: no GPU is waited for
        firsts = torch.arange(self.num_sequences, device=device) * max_seqlen
        self.unpad_index = firsts.repeat_interleave(lengths, output_size=num_tokens) + position_ids
        self.mask: Tensor | None = None
        if attended is not None or not self.is_full:
            lengths = lengths if attended is None else attended
            self.mask = (torch.arange(max_seqlen, device=device) < lengths[:, None])[:, None, None, :]


def _spread(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Write rows to distinct rows of a zero tensor: the transpose of ``_Collect``."""
    return rows.new_zeros(num_rows, rows.shape[1]).index_copy_(0, index, rows)


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
