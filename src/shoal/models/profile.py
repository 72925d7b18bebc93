"""Counts layers, FLOPs and operations of a model's training step without computing it.

The model and its inputs are on the meta device, so the largest ones take seconds and no memory. FLOPs come
from the formulas of ``torch.utils.flop_counter`` for matrix products and convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shoal.models.step_memory import FusedAttention

_FREE = frozenset(
    {"detach", "alias", "empty", "empty_like", "empty_strided", "lift_fresh", "_unsafe_view", "new_empty"}
)
"""Operations without a kernel, besides views."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One forward and backward pass of ``num_samples`` samples."""

    layers: tuple[tuple[str, int, float], ...]
    """(module with own parameters, their number, forward FLOPs) in the order of first use. A product without
    parameters (attention) counts for the module before it, a shared parameter for its first user."""
    num_operations: int
    """Kernels; a convolution's backward pass has two."""
    num_samples: int


def profile_step(model: nn.Module, loss: Callable[[], Tensor], *, num_samples: int) -> StepProfile:
    """Run ``loss()`` and its backward pass on the meta device and count.

    Args:
        model: its modules with parameters are the layers.
        loss: computes a scalar with ``model`` from meta tensors.
        num_samples: in the batch of ``loss``.
    """
    counter = _Counter()
    handles = [
        module.register_forward_pre_hook(counter.entering(name))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        with FusedAttention(), counter:
            value = loss()
            counter.in_forward = False
            value.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    parameters = _first_users(model, counter.order)
    layers = tuple((name, parameters.get(name, 0), counter.flops.get(name, 0.0)) for name in counter.order)
    return StepProfile(
        layers=layers,
        num_operations=counter.num_operations,
        num_samples=num_samples,
    )


def _first_users(model: nn.Module, order: list[str]) -> dict[str, int]:
    """Return the number of parameters of each module of ``order`` that no module before it has."""
    modules = dict(model.named_modules())
    seen: set[int] = set()
    counts = {}
    for name in order:
        own = [p for p in modules[name].parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        counts[name] = sum(p.numel() for p in own)
    # Parameters whose module is never called (decoders by weight alone) count for the last one.
    counts[order[-1]] += sum(p.numel() for p in model.parameters() if id(p) not in seen)
    return counts


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: list[str] = []
        self.flops: dict[str, float] = {}
        self.current = ""
        self.in_forward = True
        self.num_operations = 0

    def entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            if name not in self.flops:
                self.flops[name] = 0.0
                self.order.append(name)
            self.current = name

        return enter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if self.in_forward and packet in flop_registry and self.current:
            self.flops[self.current] += flop_registry[packet](*args, **kwargs, out_val=out)
        if not func.is_view and packet.__name__ not in _FREE:
            self.num_operations += 2 if packet.__name__ == "convolution_backward" else 1
        return out
