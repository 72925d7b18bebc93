"""Recomputes layers of a stage in the backward pass, as the model does that it was made of.

An exported graph has no activation checkpointing: ``torch.export`` traces what a checkpoint runs. So the
layers for which a model of transformers has it on are found by their names, and the nodes of each in a stage
become a *segment*, of which only the inputs are kept. Values, and the order in which gradients are summed,
are those of the stage without segments: all bits are the same.

A segment that writes into a value from outside, such as a norm's statistics, would write twice; it is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from shoal.pipelining.assemble import assemble
from shoal.pipelining.dataflow import Dataflow, num_bytes
from shoal.pipelining.export_graph import CHECKPOINTS
from shoal.pipelining.random_streams import are_set, recomputation
from shoal.pipelining.unit_runner import UnitModule, unit_modules
from shoal.pipelining.units import Units

_LOGGER = logging.getLogger(__name__)


class Segment(NamedTuple):
    """Body positions [begin, end) of a graph."""

    begin: int
    end: int
    recomputes: bool


def recomputed_layers(model: nn.Module) -> frozenset[str]:
    """Return the names of the layers of a model that transformers computes again in the backward pass.

    Layers are the entries of module lists. Where only the module around the list has the switch, all are.
    """
    on = {name for name, module in model.named_modules() if getattr(module, CHECKPOINTS, False) is True}
    entries = {
        f"{name}.{entry}": name.rpartition(".")[0]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for entry, _ in module.named_children()
    }
    layers = on & entries.keys()
    for around in on - layers:
        if not any(layer.startswith(f"{around}." if around else "") for layer in layers):
            layers |= {layer for layer, owner in entries.items() if owner == around}
    if on and not layers:
        _LOGGER.warning(
            "%s has activation checkpointing on, but no list of layers: its stages keep all activations",
            type(model).__name__,
        )
    return frozenset(layers)


def segments_of(flow: Dataflow, begin: int, end: int, layers: frozenset[str]) -> list[Segment]:
    """Divide the body positions [begin, end): one segment for each layer, and for what is between."""
    segments: list[Segment] = []
    for layer, group in groupby(range(begin, end), lambda position: _layer_of(flow.body[position], layers)):
        positions = list(group)
        first, recomputes = positions[0], layer is not None
        if segments and any(not isinstance(node.meta.get("val"), Tensor) for node in flow.crossing(first)):
            first, _, recomputes = segments.pop()  # a tuple is no argument of a segment
        last = positions[-1] + 1
        segments.append(Segment(first, last, recomputes and not _writes_outside(flow, first, last)))
    return segments


def _layer_of(node: fx.Node, layers: frozenset[str]) -> str | None:
    """Return the outermost of the layers whose code made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((name for name, _ in stack.values() if name in layers), None)


def _writes_outside(flow: Dataflow, begin: int, end: int) -> bool:
    """Return whether a value from outside of these positions is changed in place there or behind them."""
    own = set(flow.body[begin:end])
    outside = {each for node in own for each in node.all_input_nodes} - own - flow.glue
    return any(flow.changes(node, begin) for node in outside)


class SegmentedRun(nn.Module):
    """Runs the segments of a stage; takes and returns what one module of the whole stage would.

    Args:
        segments: of the stage's positions, in order.
        relayed: values that the stage receives.
        results: values that it returns.
    """

    def __init__(
        self,
        flow: Dataflow,
        segments: Sequence[Segment],
        *,
        relayed: Sequence[fx.Node],
        results: Sequence[Any],
        weights: nn.Module,
        constants: nn.Module,
    ) -> None:
        super().__init__()
        *before, (begin, end, _) = segments
        units = unit_modules(flow, [each[:2] for each in before], weights, constants, relayed=relayed)
        known = {*relayed, *(node for unit in units for node in unit.results)}
        needed = flow.needed([*flow.body[begin:end], *results], known)
        sources = {source for node in needed - known for source in node.all_input_nodes}
        last_relayed = tuple(node for node in flow.nodes if node in known & (sources | {*_nodes(results)}))
        module, input_names = assemble(
            flow, begin, end, relayed=last_relayed, results=results, weights=weights, constants=constants
        )
        last = UnitModule(module=module, input_names=input_names, relayed=last_relayed, results=())
        self._relayed = tuple(relayed)
        self._steps = [(unit, each.recomputes) for unit, each in zip([*units, last], segments, strict=True)]
        names = {name for unit, _ in self._steps for name in unit.input_names}
        self.input_names = tuple(name for name in flow.exported.input_nodes.values() if name in names)
        self.graphs = nn.ModuleList(unit.module for unit, _ in self._steps)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a checkpoint's contexts are no part of a graph
    def forward(self, *values: Tensor) -> tuple[Any, ...]:
        """Run the stage on the relayed values, then the root inputs of ``input_names``."""
        known: dict[fx.Node, Any] = dict(zip(self._relayed, values, strict=False))
        inputs = dict(zip(self.input_names, values[len(self._relayed) :], strict=True))
        outputs: tuple[Any, ...] = ()
        for unit, recomputes in self._steps:
            outputs = _run(unit, known, inputs, recomputes=recomputes)
            known |= zip(unit.results, outputs, strict=False)
        return outputs


def _run(
    unit: UnitModule, known: Mapping[fx.Node, Any], inputs: Mapping[str, Tensor], *, recomputes: bool
) -> tuple[Any, ...]:
    arguments = [*(known[node] for node in unit.relayed), *(inputs[name] for name in unit.input_names)]
    outputs: tuple[Any, ...]
    if not recomputes:
        outputs = unit.module(*arguments)
    else:
        outputs = checkpoint(
            unit.module,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=not are_set(),
            context_fn=recomputation,
        )
    return outputs


def _nodes(values: Sequence[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


# ---- cost ------------------------------------------------------------------------------------------------


def with_recomputation(units: Units, forward: Sequence[float], backward: Sequence[float]) -> list[float]:
    """Return the seconds of units' backward passes with what these compute again."""
    shares = [sum(each) for each in zip(*_shares(units).values(), strict=True)] or [0.0] * len(units)
    return [b + share * f for f, b, share in zip(forward, backward, shares, strict=True)]


def kept_bytes(units: Units, saved: Sequence[int]) -> tuple[list[int], int]:
    """Return the bytes that units keep, and the most that one layer computes again.

    A recomputed segment keeps the values that cross its begin, of those from the segment before.

    Args:
        saved: bytes that units keep if nothing is computed again.
    """
    flow, kept, most = units.flow, list(map(float, saved)), 0.0
    before = 0
    for segment, shares in _shares(units).items():
        again = [share * size for share, size in zip(shares, saved, strict=True)]
        most = max(most, sum(again))
        kept = [all_of - part for all_of, part in zip(kept, again, strict=True)]
        first = next(index for index, share in enumerate(shares) if share)
        inputs = [node for node in flow.crossing(segment.begin) if flow.position[node] >= before]
        kept[first] += sum(map(num_bytes, inputs))
        before = segment.begin
    return list(map(round, kept)), round(most)


def _shares(units: Units) -> dict[Segment, list[float]]:
    """Return the share of each unit's nodes in each recomputed segment of the whole model."""
    flow = units.flow
    segments = segments_of(flow, 0, len(flow.body), recomputed_layers(flow.exported.model))
    return {
        each: [
            max(0, min(end, each.end) - max(begin, each.begin)) / (end - begin) for begin, end in units.ranges
        ]
        for each in segments
        if each.recomputes
    }
