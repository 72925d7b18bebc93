"""Estimates the cost of each unit of a model on a device that is absent, or for a model that fits none.

Every unit's passes run on the meta device, where operations have shapes and no values. An operation takes as
long as its arithmetic or its memory traffic at the device's rates, whichever is longer, and no less than its
launch (the roofline model of Williams, Waterman, Patterson, CACM 2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shoal.decide.cost import ModelCost
from shoal.errors import UsageError
from shoal.pipelining.export_graph import ExportedGraph
from shoal.pipelining.measure_cost import all_weights, cost_of, saved_bytes
from shoal.pipelining.recompute import with_recomputation
from shoal.pipelining.stage import replace_tensors, retarget
from shoal.pipelining.unit_runner import run_units, unit_modules
from shoal.pipelining.units import Units, units_of


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Achieved rates of a device, not those of its data sheet."""

    flops_per_s: float
    """Of matrix products, in the precision of the run; data sheets promise about twice as much."""
    bytes_per_s: float
    """Memory bandwidth."""
    launch_s: float = 5e-6
    """Lower bound of an operation."""


def estimate_cost(exported: ExportedGraph, rates: DeviceRates, *, units: Units | None = None) -> ModelCost:
    """Return the estimated cost of every unit, for one micro-batch; nothing is allocated.

    Fused attention counts as the operations that it is made of, so its memory is an upper bound. Values count
    in the precision that the model was exported in.

    Raises:
        UsageError: the model was not exported for training.
    """
    if not exported.training:
        raise UsageError("an estimate needs a model exported for training")
    units = units or units_of(exported)
    weights, constants = all_weights(exported.model), nn.Module()
    modules = unit_modules(units.flow, units.ranges, weights, constants)
    replace_tensors(
        nn.ModuleList([weights, constants]), lambda tensor: torch.empty_like(tensor, device="meta")
    )
    if exported.device.type != "meta":
        for piece in modules:
            retarget(piece.module, exported.device, torch.device("meta"))
    inputs = {name: value.to("meta") for name, value in exported.inputs.items()}
    clock = _Clock(rates, len(modules))
    run_units(modules, inputs, units.flow.gradient, clock.watch)
    saved = saved_bytes(modules, inputs, units)
    forward, backward = clock.seconds[True], clock.seconds[False]
    return cost_of(units, forward, with_recomputation(units, forward, backward), saved, "roofline")


class _Clock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the time of the operations that are dispatched while a unit's pass runs."""

    def __init__(self, rates: DeviceRates, num_units: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = {forward: [0.0] * num_units for forward in (True, False)}
        self._rates = rates
        self._spent = 0.0

    @contextmanager
    def watch(self, index: int, forward: bool) -> Iterator[None]:
        self._spent = 0.0
        with self:
            yield
        self.seconds[forward][index] = self._spent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._spent += self._time(func, args, kwargs, out)
        return out

    def _time(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        storages = {each.untyped_storage()._cdata for each in read}
        is_view = all(each.untyped_storage()._cdata in storages for each in outputs)
        if is_view and not func._schema.is_mutable:
            return 0.0
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count else 0
        traffic = sum(_num_bytes(each) for each in (*read, *outputs))
        return max(flops / self._rates.flops_per_s, traffic / self._rates.bytes_per_s, self._rates.launch_s)


def _num_bytes(value: Tensor) -> int:
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
