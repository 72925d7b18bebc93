"""Counts the memory that a training step keeps for its backward pass, without computing the step.

The forward pass runs on tensors without values (``FakeTensorMode``) that claim to be on the device, in the
precision of the run. So autocast's choices, the copies that it makes of weights, the way in which attention
is computed and activation checkpointing are those of the training. All storages that are alive at the end
count, but weights, buffers and inputs.

Peaks are within 10 % of those of torch's ``MemTracker`` over forward and backward pass. On GPUs, compiled
layers keep less than these.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.attention import assuming_kernels
from shoal.decide.footprint import Activations, Numerics

TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of autocast by precision."""


def kept_activations(
    model: nn.Module,
    inputs: Mapping[str, Any],
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor],
    *,
    num_samples: int,
    numerics: Numerics,
    apart: bool = False,
) -> Activations:
    """Return what a forward pass keeps until the backward pass, and what that adds where it holds most.

    That is at the largest operation: gradients of its output, its input and its weight. They count as twice
    the largest tensor of the forward pass, and the largest weight in fp32.

    Args:
        model: in training mode, on any device; a copy of it is counted.
        inputs: one batch, of which only shapes matter.
        loss: computes a scalar from the model and its inputs.
        num_samples: in the batch.
        numerics: of a device, which need not be there.
        apart: tell what the backward pass adds apart from what is kept.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> kept_activations(
        ...     model, {"x": torch.empty(2, 4)}, lambda model, inputs: model(inputs["x"]).sum(),
        ...     num_samples=2, numerics=Numerics.FP32,
        ... )
        Activations(sample_bytes=98.0, fixed_bytes=128.0, once_sample_bytes=0.0, once_fixed_bytes=0.0)
    """
    copied = copy.deepcopy(model)  # before the mode begins, which copies no tensors with values
    with FakeTensorMode(allow_non_fake_inputs=True), assuming_kernels(numerics.has_kernels):
        device = torch.device("cpu" if numerics.is_cpu else "cuda:0")
        weights = replace_weights(copied, device)
        placed = {
            name: _empty(each, device) if isinstance(each, Tensor) else each for name, each in inputs.items()
        }
        alive = _Alive(weights, [each for each in placed.values() if isinstance(each, Tensor)])
        with autocast_on(device.type, TYPES[numerics.precision]), FusedAttention(), alive:
            value = loss(copied, placed)
        gc.collect()  # outputs in cycles, which would count until some later collection
        copies = alive.copies_bytes
        held = sum(alive.sizes.values()) - copies
        del value
    gradient = max((4.0 * each.numel() for each in copied.parameters() if each.requires_grad), default=0.0)
    added = 2 * alive.largest_bytes
    if not apart:
        return Activations(sample_bytes=(held + added) / num_samples, fixed_bytes=copies + gradient)
    return Activations(
        sample_bytes=held / num_samples,
        fixed_bytes=copies,
        once_sample_bytes=added / num_samples,
        once_fixed_bytes=gradient,
    )


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def replace_weights(model: nn.Module, device: torch.device) -> list[Tensor]:
    """Replace parameters and buffers by ones on ``device``, and return these; tied ones stay tied."""
    new: dict[int, Tensor] = {}
    for module in model.modules():
        held: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in held:
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in new:
                    made = _empty(old, device)
                    new[id(old)] = (
                        nn.Parameter(made, old.requires_grad) if isinstance(old, nn.Parameter) else made
                    )
                tensors[name] = new[id(old)]
    return list(new.values())


@contextmanager
def autocast_on(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Enter autocast as ``torch.autocast`` does on a machine that has such a device."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()  # inside another autocast too: its copies of weights would count
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


class FusedAttention(TorchFunctionMode):
    """Computes attention as one kernel, as accelerators do; meta tensors would have its matrices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args[:3]
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        causal = bool(kwargs.get("is_causal", False)) or mask is not None
        dropout = float(kwargs.get("dropout_p", 0.0))
        fused = torch.ops.aten._scaled_dot_product_efficient_attention
        return fused(query, key, value, None, True, dropout, causal)[0]


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the sizes of the storages that operations made and that are still alive."""

    def __init__(self, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}
        self.largest_bytes = 0
        """Of the largest one that was ever alive, copies of weights left out."""
        self._weights = {each.untyped_storage()._cdata for each in weights}
        self._copies: set[int] = set()
        self._known = self._weights | {each.untyped_storage()._cdata for each in inputs}

    @property
    def copies_bytes(self) -> int:
        """Bytes of the casts of weights."""
        return sum(self.sizes[each] for each in self._copies)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default
        from_weight = is_cast and args[0].untyped_storage()._cdata in self._weights
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._add(each.untyped_storage(), from_weight)
        return out

    def _add(self, storage: torch.UntypedStorage, is_copy: bool) -> None:
        key = storage._cdata
        if key in self._known or key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        if is_copy:
            self._copies.add(key)
        else:
            self.largest_bytes = max(self.largest_bytes, storage.nbytes())
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        del self.sizes[key]
        self._copies.discard(key)
