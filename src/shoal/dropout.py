"""Drops elements by random numbers that belong to samples, not to workers.

torch's dropout draws from the generator of its process, so its masks change with the number of workers and
with the size of micro-batches. Here every sample has a 64-bit key
(:func:`shoal.decide.rng.dropout_keys`). An element is dropped by a hash of its sample's key, of the dropout's
number in the model (its *site*) and of its own position in the sample. A step therefore computes the gradient
of the whole global batch however the batch is divided. The masks need no generator state, and on a CPU they
are several times faster to make than torch's.

Fused attention kernels of libraries draw masks of their own. So attention with dropout is computed
explicitly here, with the matrix of weights in memory, and over packed sequences on a GPU by kernels of this
package (:mod:`shoal.attention`). Without attention dropout, and in evaluation, :class:`SampleDropout` leaves
it to torch's fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from shoal.attention import runs_kernels
from shoal.decide.rng import DROPOUT_RANGE, GOLDEN, ROUNDS, signed

_GOLDEN = signed(GOLDEN)
_FIRST, _SECOND = (signed(multiplier) for _, multiplier in ROUNDS)


def fold_in(keys: Tensor, counters: Tensor | int) -> Tensor:
    """Return a key per pair of a key and a counter, which broadcast: ``shoal.decide.rng.draw`` on tensors.

    Args:
        keys: int64, any bits.
        counters: int64 of at least 0, such as positions.
    """
    x = keys + (signed((counters + 1) * GOLDEN) if isinstance(counters, int) else _steps(counters))
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def before_site(keys: Tensor, site: int) -> Tensor:
    """Return keys with which the sites 0, 1, ... draw what ``site``, ``site + 1``, ... draw with ``keys``."""
    return keys + signed(site * GOLDEN)


def _steps(counters: Tensor) -> Tensor:
    """Return ``(counters + 1) * _GOLDEN``.

    The complement has the same bits, and is no index to torch.compile: a product of positions and a constant
    would be one, and Inductor computes indices in 32 bits on a GPU, where Triton refuses the constant.
    """
    return ~counters * -_GOLDEN


def site_keys(keys: Tensor, positions: Tensor, num_sites: int) -> Tensor:
    """Return the keys of tokens at the sites from 0, int64 ``[num_sites, T]``; on a GPU by one kernel.

    Args:
        keys: int64 ``[T]``, of the tokens' samples.
        positions: ``[T]``, in their samples.
    """
    if runs_kernels(keys.device):
        of_sites: Tensor = torch.ops.shoal.site_keys(keys, positions, num_sites)
        return of_sites
    return fold_in(fold_in(keys, positions), torch.arange(num_sites, device=keys.device)[:, None])


def row_keys(keys: Tensor, shape: Sequence[int], site: int | None = None) -> Tensor:
    """Return a key per row of a tensor, int64 ``shape``.

    A key depends on the indices of its row, not on the sizes of the dimensions, so that padding does not
    change it.

    Args:
        keys: int64 ``[shape[0]]``, of the samples.
        shape: of the tensor without its last dimension.
        site: number of the dropout in the model, if ``keys`` do not have it yet.
    """
    mixed: Tensor = torch.ops.shoal.row_keys(keys, shape, site)
    return mixed


def dropout(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """Return ``x`` with elements set to zero with probability ``p``, and the others divided by ``1 - p``.

    Args:
        x: ``[..., width]``.
        keys: int64 ``[...]``, one per row of ``x``; rows of one key lose the same elements.
        p: from 0 to 1; rounded to a multiple of 2**-16.
    """
    num_dropped = round(p * DROPOUT_RANGE)
    if not num_dropped:
        return x
    keep: Tensor = torch.ops.shoal.keep_mask(keys, x.shape[-1], num_dropped)
    # Autograd keeps the mask, a byte per element, where torch's dropout on a CPU keeps four. A Function that
    # returned this result, changed in place, would have no gradient in code that torch 2.11 compiles.
    return (x * keep).mul_(
        DROPOUT_RANGE / (DROPOUT_RANGE - num_dropped) if num_dropped < DROPOUT_RANGE else 0.0
    )


# As operations of torch, each is one node of an exported graph, where its steps would be three quarters of a
# T5. torch.compile replaces them by their steps and fuses these.
_library = torch.library.Library("shoal", "DEF")  # type: ignore[no-untyped-call]


def _operation(schema: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make a function of tensors ``torch.ops.shoal.NAME``, on all devices."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = _library.define(schema)  # type: ignore[no-untyped-call]
        _library.impl(name, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
        return function

    return register


@_operation("row_keys(Tensor keys, SymInt[] shape, int? site) -> Tensor")
def _row_keys(keys: Tensor, shape: Sequence[int], site: int | None) -> Tensor:
    """Compute :func:`row_keys`."""
    if site is not None:
        keys = fold_in(keys, site)
    for size in shape[1:]:
        keys = fold_in(keys[..., None], torch.arange(size, device=keys.device))
    return keys


@_operation("keep_mask(Tensor keys, SymInt width, int num_dropped) -> Tensor")
def _keep_mask(keys: Tensor, width: int | torch.SymInt, num_dropped: int) -> Tensor:
    """Return true for kept elements, bool ``[*keys.shape, width]``; drops ``num_dropped`` of 2**16."""
    # One hash serves four elements, 16 bits each. Its last operation is a multiplication: shifts of signed
    # numbers repeat the sign, which an exclusive or would cancel in the topmost bit.
    most = num_dropped - (DROPOUT_RANGE // 2 + 1)
    # torch.compiler.is_compiling() is false here in torch 2.11.
    if get_proxy_mode() is not None or isinstance(width, torch.SymInt):
        # To view hashes as int16, Inductor would write them to memory. So each element computes its own.
        column = torch.arange(width, device=keys.device)
        x = _hash(keys[..., None] + _steps((column >> 2) - 1))
        return (x >> ((column & 3) << 4)).to(torch.int16) > most
    x = _hash(keys[..., None] + _steps(torch.arange(-1, (width + 3) // 4 - 1, device=keys.device)))
    return x.view(torch.int16)[..., :width] > most


def _hash(x: Tensor) -> Tensor:
    x = (x ^ (x >> 32)) * _FIRST
    return (x ^ (x >> 29)) * _SECOND


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    p: float,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return ``scaled_dot_product_attention`` whose weights, all in memory, are dropped by ``keys``.

    Args:
        query: ``[B, heads, S, d]``; all arguments but ``keys`` and ``p`` are those of torch's function.
        keys: int64 ``[B, heads, S]``.
        p: probability of dropping a weight.
    """
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
    # Queries are S / d times smaller than scores; with 16 or 64 columns a head the bits are the same.
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1).to(value.dtype)
    return dropout(weights, keys, p) @ value


class SampleDropout(TorchFunctionMode):
    """Makes dropout inside this context depend on the keys of samples.

    It takes the place of ``torch.nn.functional.dropout`` (and so of ``torch.nn.Dropout``) and of
    ``scaled_dot_product_attention`` with dropout, in any module, on tensors whose first dimension is the
    number of samples, or a multiple of it that holds them one after the other. On other tensors torch's own
    dropout runs. The n-th call inside is site n. Activation checkpointing inside needs
    :meth:`recomputation`.

    Args:
        keys: int64 ``[num_samples]``.
        site: number of the first call.
        stride: by how much the site grows with each call.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        >>> x, keys = torch.ones(3, 4), torch.tensor([10, 11, 12])
        >>> with SampleDropout(keys):
        ...     whole = model(x)
        >>> with SampleDropout(keys[1:]):
        ...     part = model(x[1:])
        >>> torch.equal(whole[1:], part)
        True
    """

    def __init__(self, keys: Tensor, site: int = 0, stride: int = 1) -> None:
        super().__init__()
        self.keys = keys
        self.site = site
        self.stride = stride

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self.dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        return func(*args, **kwargs)

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[Any]]:
        """Return the contexts of a checkpointed forward pass and of its repetition in the backward pass.

        For the argument ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.
        """
        return nullcontext(), SampleDropout(self.keys, self.site, self.stride)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Compute ``torch.nn.functional.dropout``."""
        if not training or p == 0 or not self._holds_samples(input):
            return F.dropout(input, p, training, inplace)
        dropped = dropout(input, self.next_keys(input.shape[:-1]), p)
        return input.copy_(dropped) if inplace else dropped

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Compute ``torch.nn.functional.scaled_dot_product_attention``."""
        if not dropout_p or not self._holds_samples(query):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, **options
            )
        # Kernels fold the number of the head in, behind the position.
        by_position = self.next_keys((query.shape[0], query.shape[2], query.shape[1]))
        keys = by_position.transpose(1, 2).contiguous()
        return attention(
            query, key, value, keys, dropout_p, attn_mask=attn_mask, is_causal=is_causal, **options
        )

    def _holds_samples(self, x: Tensor) -> bool:
        return x.ndim > 1 and x.shape[0] % self.keys.shape[0] == 0

    def next_keys(self, shape: Sequence[int]) -> Tensor:
        """Return the keys of the rows of a tensor, ``shape``, at the next site."""
        num_samples, site = self.keys.shape[0], self.site
        self.site += self.stride
        folded = (num_samples, shape[0] // num_samples, *shape[1:])
        return row_keys(self.keys, folded, site).reshape(shape)


def next_row_keys(shape: Sequence[int]) -> Tensor | None:
    """Return the keys of rows at the next site of the :class:`SampleDropout` around, int64 ``shape``.

    None: there is none around.
    """
    around = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return around.next_keys(shape) if isinstance(around, SampleDropout) else None


def compile_blocks(blocks: Iterable[nn.Module], **options: Any) -> None:
    """Compile modules of one class in place with ``torch.compile``, which takes these options.

    The modules share the compiled code: repeated layers of a model are one graph, however many they are.
    Inside of :class:`SampleDropout`, the number of a module's first dropout goes into its keys, which are an
    input of the graph. In evaluation they run as they are, since a model that writes has new shapes with each
    token.

    Example:
        >>> layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        >>> compile_blocks(layers, backend="eager")
        >>> torch.nn.Sequential(*layers)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    run = torch.compile(_run_block, **options)
    for block in blocks:
        block.forward = partial(_call_block, run, block)


def _call_block(run: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled block with the keys of the dropout around it, which is not active inside."""
    if not block.training:
        return type(block).forward(block, *args, **kwargs)
    around = _get_current_function_mode()  # type: ignore[no-untyped-call]
    if not isinstance(around, SampleDropout):
        return run(block, None, 1, args, kwargs)[0]
    with _pop_mode_temporarily():
        outputs, used = run(block, before_site(around.keys, around.site), around.stride, args, kwargs)
    around.site += used
    return outputs


def _run_block(
    block: nn.Module, keys: Tensor | None, stride: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, int]:
    """Return the outputs of a block, and by how much the site has grown in it."""
    forward = type(block).forward
    if keys is None:
        return forward(block, *args, **kwargs), 0
    dropout = SampleDropout(keys, stride=stride)
    with dropout:
        outputs = forward(block, *args, **kwargs)
    return outputs, dropout.site
