"""Exports models with autograd functions of their own, or refuses those whose gradients would be lost.

``torch.export`` traces the forward pass of a ``torch.autograd.Function`` and drops its backward pass, so that
a stage has the gradients that autograd finds for the operations of the forward pass. Both are compared for
the first call of each function, on zeros and numbers of 1e-4 to 1e4; one that only saves memory has equal
ones. A reentrant checkpoint
(``torch.utils.checkpoint``) runs its forward pass without gradients: what it calls is exported instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from shoal.errors import UsageError

_MAGNITUDES = (0.0, 1e-4, 1.0, 1e4)
_TOLERANCE = 1e-3


@contextmanager
def traced_gradients() -> Iterator[None]:
    """Let functions be exported whose gradients are those of their forward passes.

    Raises:
        UsageError: a function is called that has others; the message names its class.
    """
    own = Function.__dict__["apply"]
    known: set[type] = set()

    def apply(cls: type[Function], *inputs: Any, **options: Any) -> Any:
        if cls is CheckpointFunction:
            function, _preserves_random_state, *rest = inputs
            return function(*rest)
        of_class = own.__get__(None, cls)
        if cls not in known and not cls.__module__.startswith("torch."):  # such as those of custom operators
            _require_equal_gradients(cls, of_class, inputs)
            known.add(cls)
        return of_class(*inputs, **options)

    Function.apply = classmethod(apply)
    try:
        yield
    finally:
        Function.apply = own


def _require_equal_gradients(
    cls: type[Function], own_apply: Callable[..., Any], inputs: Sequence[Any]
) -> None:
    for integers in (_distinct, torch.zeros_like):  # rows that are gathered, or small numbers
        with suppress(Exception):  # of any kind: the function is not made for these values
            with _disable_current_modes(), torch.enable_grad():
                traced = _gradients(lambda *given: _forward(cls, given), inputs, integers)
                own = _gradients(own_apply, inputs, integers)
            if all(map(_is_close, traced, own)):
                return
            break
    raise UsageError(
        f"torch.export would drop the backward pass of {cls.__qualname__}, a torch.autograd.Function "
        "whose gradients are not those of its forward pass"
    )


class _Context:
    """Takes what a forward pass saves for its own backward pass."""

    def __init__(self, num_inputs: int) -> None:
        self.needs_input_grad = (True,) * num_inputs

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _forward(cls: type[Function], inputs: Sequence[Any]) -> Any:
    if cls.setup_context is not Function.setup_context:
        return cls.forward(*inputs)
    return cls.forward(_Context(len(inputs)), *inputs)


def _distinct(like: Tensor) -> Tensor:
    return torch.arange(like.numel()).reshape(like.shape).to(like.dtype)


def _gradients(
    run: Callable[..., Any], inputs: Sequence[Any], integers: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return the gradients of all inputs of floating point; each call makes the same values."""
    random = torch.Generator().manual_seed(0)
    leaves: list[Tensor] = []

    def made(like: Tensor) -> Tensor:
        if not like.is_floating_point():
            return integers(torch.empty(like.shape, dtype=like.dtype))
        values = torch.randn(like.shape, generator=random)
        scales = torch.tensor(_MAGNITUDES)[torch.randint(len(_MAGNITUDES), like.shape, generator=random)]
        leaves.append((values * scales).to(like.dtype).requires_grad_())
        return leaves[-1].clone()  # which a function may change in place

    outputs = [
        each
        for each in tree_leaves(run(*tree_map_only(Tensor, made, list(inputs))))
        if isinstance(each, Tensor) and each.requires_grad
    ]
    sent = [torch.randn(each.shape, generator=random).to(each.dtype) for each in outputs]
    return list(torch.autograd.grad(outputs, leaves, sent, allow_unused=True, materialize_grads=True))


def _is_close(traced: Tensor, own: Tensor) -> bool:
    return torch.allclose(traced, own, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
