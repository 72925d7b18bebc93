"""Chooses up to 128 places at which an exported model may be cut and few bytes cross.

A graph has hundreds or thousands of nodes, and most cuts between them are poor: inside an attention or a
feed-forward layer several times as many bytes are alive as between two layers. The nodes are divided into
windows, and each window offers its cheapest cut, the one nearest to a module boundary among equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import fx

from shoal.errors import UsageError
from shoal.pipelining.dataflow import Dataflow, num_bytes
from shoal.pipelining.export_graph import ExportedGraph

MOST_UNITS = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """The units of an exported model, in order; a cut i stands before unit i."""

    flow: Dataflow
    starts: tuple[int, ...]
    """The body position at which each unit begins; the first is 0."""
    relay_bytes: tuple[int, ...]
    """Entry i: bytes that cross a cut after unit i, as ``ModelCost.relay_bytes``."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The body positions [begin, end) of each unit."""
        return list(zip(self.starts, (*self.starts[1:], len(self.flow.body)), strict=True))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Name of the innermost module that holds each unit."""
        return tuple(_common_module(self.flow.body[begin:end]) for begin, end in self.ranges)

    @cached_property
    def parameters(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """The parameters of each unit: (canonical name, bytes)."""
        names = self.flow.exported.parameter_nodes
        per_unit = []
        for begin, end in self.ranges:
            leaves = self.flow.leaves(self.flow.body[begin:end])
            per_unit.append(tuple(sorted((names[node], num_bytes(node)) for node in leaves if node in names)))
        return tuple(per_unit)

    def bounds(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the body positions [begin, end) of each stage; the cuts are units, and grow."""
        starts = [0, *(self.starts[cut] for cut in cuts), len(self.flow.body)]
        return list(pairwise(starts))


def units_of(exported: ExportedGraph, *, most: int = MOST_UNITS) -> Units:
    """Return the units of an exported model.

    Args:
        most: upper limit; a model with fewer legal cuts offers them all.
    """
    flow = Dataflow(exported)
    if not flow.body:
        raise UsageError("the model computes nothing from its parameters: there is nothing to split")
    offers: list[tuple[int, int, int]] = []  # (position, bytes, depth of the module that is cut)
    for position, crossing in flow.crossings():
        if flow.may_cut(position, crossing):
            depth = len(_modules_of(*flow.body[position - 1 : position + 1]))
            offers.append((position, sum(map(num_bytes, crossing)), depth))
    chosen = offers if len(offers) < most else _cheapest(offers, len(flow.body), most - 1)
    return Units(
        flow=flow,
        starts=(0, *(position for position, _, _ in chosen)),
        relay_bytes=tuple(crossing_bytes for _, crossing_bytes, _ in chosen),
    )


def _cheapest(offers: list[tuple[int, int, int]], num_nodes: int, windows: int) -> list[tuple[int, int, int]]:
    """Return the cheapest offer of each window of equally many nodes."""
    best: dict[int, tuple[int, int, int]] = {}
    for offer in offers:
        window = offer[0] * windows // num_nodes
        if window not in best or offer[1:] < best[window][1:]:
            best[window] = offer
    return list(best.values())


def module_path(node: fx.Node) -> str:
    """Return the dotted name of the module whose code made the node; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _modules_of(*nodes: fx.Node) -> list[str]:
    """Return the parts of the name of the innermost module that holds all the nodes."""
    common = []
    for parts in zip(*(module_path(node).split(".") for node in nodes), strict=False):
        if len(set(parts)) > 1 or not parts[0]:
            break
        common.append(parts[0])
    return common


def _common_module(nodes: Sequence[fx.Node]) -> str:
    """Return the innermost module around all nodes; where that is the model, the first node's."""
    placed = [node for node in nodes if module_path(node)]
    if not placed:
        return "(model)"
    return ".".join(_modules_of(*placed)) or module_path(placed[0])
