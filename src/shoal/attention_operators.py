"""Makes the kernels of attention operators of torch.

Each is a ``triton_op``: torch.compile replaces it by the launches of its kernels, which need no call of
Python then, and whose outputs it places as its own. Only :mod:`shoal.attention` loads this module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.triton_op(
    "shoal::attention",
    mutates_args=(),
    schema="(Tensor? query, Tensor stacked, Tensor? keys, Tensor? bias, Tensor cu_queries, Tensor cu_keys,"
    " Tensor? num_keys, Tensor? documents, SymInt max_queries, SymInt max_keys, bool is_causal,"
    " int num_dropped, float scale) -> (Tensor, Tensor)",
)
def _attention(
    query: Tensor | None, stacked: Tensor, keys: Tensor | None, bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    """Compute :func:`shoal.attention_kernel.forward`, which is loaded here: few processes need Triton."""
    from shoal.attention_kernel import Packing, forward

    *packing, num_dropped, scale = others
    return forward(query, stacked, keys, bias, Packing(*packing), num_dropped, scale)


def _fake(query: Tensor | None, stacked: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    num_rows, num_heads, width = stacked.shape
    num_queries, num_heads = (num_rows, num_heads // 3) if query is None else query.shape[:2]
    sums = stacked.new_empty(num_heads, num_queries, dtype=torch.float32)
    return stacked.new_empty(num_queries, num_heads, width), sums


_attention.register_fake(_fake)


@torch.library.triton_op(
    "shoal::attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor? query, Tensor stacked, Tensor? keys, Tensor? bias, Tensor cu_queries,"
    " Tensor cu_keys, Tensor? num_keys, Tensor? documents, Tensor out, Tensor log_sums, SymInt max_queries,"
    " SymInt max_keys, bool is_causal, int num_dropped, float scale, bool needs_bias_grad)"
    " -> (Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad: Tensor,
    query: Tensor | None,
    stacked: Tensor,
    keys: Tensor | None,
    bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`shoal.attention_kernel.backward`; gradients of what is not there are empty."""
    from shoal.attention_kernel import Packing, backward

    cu_queries, cu_keys, num_keys, documents, out, log_sums, *numbers = others
    max_queries, max_keys, is_causal, num_dropped, scale, needs_bias_grad = numbers
    packing = Packing(cu_queries, cu_keys, num_keys, documents, max_queries, max_keys, is_causal)
    query_grad, stacked_grad, bias_grad = backward(
        grad,
        query,
        stacked,
        keys,
        bias,
        packing,
        out,
        log_sums,
        num_dropped,
        scale,
        needs_bias_grad=needs_bias_grad,
    )
    return (
        stacked.new_empty(0) if query_grad is None else query_grad,
        stacked_grad,
        stacked.new_empty(0) if bias_grad is None else bias_grad,
    )


def _fake_backward(
    grad: Tensor,
    query: Tensor | None,
    stacked: Tensor,
    keys: Tensor | None,
    bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    needs_bias_grad = others[-1]
    return (
        stacked.new_empty((0,) if query is None else query.shape),
        stacked.new_empty(stacked.shape),
        torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
        if bias is not None and needs_bias_grad
        else stacked.new_empty(0),
    )


_attention_backward.register_fake(_fake_backward)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.numbers = inputs[:8], inputs[8:]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_of_sums: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    of_query, of_stacked, of_bias = torch.ops.shoal.attention_backward(
        grad, *ctx.saved_tensors, *ctx.numbers, ctx.needs_input_grad[3]
    )
    has_query, has_bias = ctx.saved_tensors[0] is not None, ctx.needs_input_grad[3]
    return of_query if has_query else None, of_stacked, None, of_bias if has_bias else None, *(None,) * 9


_attention.register_autograd(_differentiate, setup_context=_keep_for_backward)


@torch.library.triton_op("shoal::site_keys", mutates_args=())
def _site_keys(keys: Tensor, positions: Tensor, num_sites: int) -> Tensor:
    """Compute :func:`shoal.attention_kernel.site_keys`."""
    from shoal.attention_kernel import site_keys

    return site_keys(keys, positions, num_sites)


_site_keys.register_fake(lambda keys, _, num_sites: keys.new_empty(num_sites, keys.shape[0]))
