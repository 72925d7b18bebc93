"""Measures the cost of each unit of a model on this device: times its passes and counts saved bytes.

Times are minima over repetitions. Running a unit alone costs some microseconds that it does not cost inside a
stage, so the whole model is timed alternately with the units, and their times are scaled to its sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.decide.cost import ModelCost, Unit
from shoal.errors import UsageError
from shoal.pipelining.assemble import container_of
from shoal.pipelining.export_graph import ExportedGraph
from shoal.pipelining.random_streams import streams
from shoal.pipelining.recompute import kept_bytes, with_recomputation
from shoal.pipelining.split import split
from shoal.pipelining.stage import StageModule, own_part, replace_tensors, retarget
from shoal.pipelining.unit_runner import UnitModule, run_units, unit_modules
from shoal.pipelining.units import Units, units_of


def measure_cost(
    exported: ExportedGraph, *, repetitions: int = 5, stand_in: Mapping[str, Tensor] | None = None
) -> ModelCost:
    """Return the measured cost of every unit, for one micro-batch, on the device that the model is on.

    The model is unchanged afterwards: gradients, buffers and generators too. It needs the memory of a
    training step of the whole model. For a model on the meta device, all weights of one shape are one
    made-up tensor with one gradient, so that only the values between the units need much memory.

    Args:
        repetitions: of each pass, after one warm-up.
        stand_in: for a model on the meta device, inputs as those of the export on the device to measure.

    Raises:
        UsageError: the model is on the meta device without ``stand_in``, or was not exported for training.
    """
    if (exported.device.type == "meta" and stand_in is None) or not exported.training:
        raise UsageError(
            "measuring needs a model on a real device, exported for training: estimate_cost takes one on meta"
        )
    units, inputs = units_of(exported), stand_in or exported.inputs
    weights, constants = all_weights(exported.model), nn.Module()
    modules = unit_modules(units.flow, units.ranges, weights, constants)
    (whole,) = split(exported, [], units=units)
    device = exported.device
    if stand_in is not None:
        device = next(iter(stand_in.values())).device
        replace_tensors(nn.ModuleList([weights, constants, whole]), _made_up(device))
        for piece in modules:
            retarget(piece.module, exported.device, device)
        whole.move_graphs(device)
    timings, whole_timings = Timings(len(modules), device), Timings(1, device)
    with undisturbed(exported.model), streams(0, 0, range(1)):
        saved = saved_bytes(modules, inputs, units)
        for repetition in range(repetitions + 1):
            timings.counts = whole_timings.counts = repetition > 0
            weights.zero_grad()  # the first gradient of a weight is kept, not added: less memory
            run_units(modules, inputs, units.flow.gradient, timings.watch)
            weights.zero_grad()
            _run_whole(whole, inputs, whole_timings)
    if stand_in is not None:  # the graphs, which are cycles, outlive this call and would keep them
        replace_tensors(nn.ModuleList([weights, constants, whole]), _to_meta)
    of_units = timings.best | {False: with_recomputation(units, timings.best[True], timings.best[False])}
    forward, backward = (_scaled(of_units[f], whole_timings.best[f][0]) for f in (True, False))
    return cost_of(units, forward, backward, saved, "measured")


class Timings:
    """The shortest time of each unit's passes, in seconds."""

    def __init__(self, num_units: int, device: torch.device) -> None:
        self.counts = True
        self._device = device
        self.best = {forward: [float("inf")] * num_units for forward in (True, False)}

    @contextmanager
    def watch(self, index: int, forward: bool) -> Iterator[None]:
        """Time what runs inside."""
        self._wait()
        started = time.perf_counter()
        yield
        self._wait()
        if self.counts:
            self.best[forward][index] = min(self.best[forward][index], time.perf_counter() - started)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def saved_bytes(modules: list[UnitModule], inputs: Mapping[str, Tensor], units: Units) -> list[int]:
    """Return the bytes that each unit saves for its backward pass; a storage counts for the first unit only.

    Parameters, buffers and root inputs do not count.
    """
    model = units.flow.exported.model
    weights = [t for piece in modules for t in (*piece.module.parameters(), *piece.module.buffers())]
    seen = {t.untyped_storage()._cdata for t in (*weights, *model.parameters(), *inputs.values())}
    kept: list[Tensor] = []  # a storage that is freed would give its address to another
    sums = [0] * len(modules)

    @contextmanager
    def watch(index: int, forward: bool) -> Iterator[None]:
        def keep(value: Tensor) -> Tensor:
            storage = value.untyped_storage()
            if forward and storage._cdata not in seen:
                seen.add(storage._cdata)
                sums[index] += storage.nbytes()
                kept.append(value.detach())
            return value.detach()

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            yield

    run_units(modules, inputs, units.flow.gradient, watch)
    return sums


def cost_of(
    units: Units, forward: list[float], backward: list[float], saved: list[int], source: Any
) -> ModelCost:
    """Combine the figures of all units into one cost.

    Args:
        saved: bytes that units keep if nothing is computed again.
    """
    kept, recomputed = kept_bytes(units, saved)
    figures = zip(units.names, forward, backward, units.parameters, kept, strict=True)
    return ModelCost(
        units=tuple(
            Unit(name=name, forward_s=f, backward_s=b, parameters=parameters, saved_bytes=num_bytes)
            for name, f, b, parameters, num_bytes in figures
        ),
        relay_bytes=units.relay_bytes,
        source=source,
        recomputed_bytes=recomputed,
    )


def all_weights(model: nn.Module) -> nn.Module:
    """Return all parameters and buffers of a model, by their canonical names."""
    return container_of(model, {name for name, _ in (*model.named_parameters(), *model.named_buffers())})


def _made_up(device: torch.device) -> Callable[[Tensor], Tensor | None]:
    """Return the substitute for a tensor on meta: a random matrix, or ones, shared by all of its shape."""
    tensors: dict[tuple[Any, ...], Tensor] = {}

    def replace(tensor: Tensor) -> Tensor | None:
        if not tensor.is_meta:
            return None
        is_parameter = isinstance(tensor, nn.Parameter)
        tensor = own_part(tensor)
        key = (tensor.shape, tensor.dtype, is_parameter, tensor.requires_grad)
        if key not in tensors:
            new = torch.ones_like(tensor, device=device, requires_grad=False)
            if tensor.ndim > 1 and tensor.is_floating_point():
                new.uniform_(-0.05, 0.05)
            tensors[key] = nn.Parameter(new, tensor.requires_grad) if key[2] else new
        return tensors[key]

    return replace


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _run_whole(stage: StageModule, inputs: Mapping[str, Tensor], timings: Timings) -> None:
    with timings.watch(0, True):
        outputs = stage(**inputs)
    kept = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
    gradients = [torch.ones_like(value) for value in kept]
    with timings.watch(0, False):
        torch.autograd.backward(kept, gradients)


def _scaled(times: list[float], whole: float) -> list[float]:
    factor = whole / sum(times)
    return [each * factor for each in times]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the gradients and buffers of a model on leaving."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
