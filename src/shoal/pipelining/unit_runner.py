"""Runs an exported model unit by unit, forward and backward, inside a context per unit.

A unit's inputs are detached from the graph of the unit before, so that its backward pass runs alone; the
order is that of training, all forward passes before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from shoal.pipelining.assemble import assemble
from shoal.pipelining.dataflow import Dataflow

Watch = Callable[[int, bool], AbstractContextManager[object]]
"""Returns the context to enter around a unit's pass: (unit, whether forward)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitModule:
    """A unit as a module of its own; rebuilt values belong to the first unit that needs them."""

    module: fx.GraphModule
    input_names: tuple[str, ...]
    relayed: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def unit_modules(
    flow: Dataflow,
    ranges: Sequence[tuple[int, int]],
    weights: nn.Module,
    constants: nn.Module,
    *,
    relayed: Sequence[fx.Node] = (),
) -> list[UnitModule]:
    """Return ranges of body positions as modules on these weights.

    Args:
        constants: to which those that they need are added.
        relayed: values from before the first range.
    """
    known: set[fx.Node] = set(relayed)
    modules = []
    for begin, end in ranges:
        needed = flow.needed(flow.body[begin:end], known)
        new = [
            node for node in flow.nodes if node in needed and node not in known and node.op == "call_function"
        ]
        own = set(new)
        received = tuple({source: None for node in new for source in node.all_input_nodes if source in known})
        results = tuple(node for node in new if _is_result(node, own, flow))
        module, input_names = assemble(
            flow, begin, end, relayed=received, results=results, weights=weights, constants=constants
        )
        modules.append(UnitModule(module=module, input_names=input_names, relayed=received, results=results))
        known |= set(results)
    return modules


def run_units(
    modules: Sequence[UnitModule], inputs: Mapping[str, Tensor], gradient: set[fx.Node], watch: Watch
) -> None:
    """Run all units forward, then all backward, with gradients of ones."""
    values: dict[fx.Node, Tensor] = {}
    outcomes: list[list[Tensor]] = []
    for index, unit in enumerate(modules):
        relayed = [values[node].detach().requires_grad_(node in gradient) for node in unit.relayed]
        arguments = [*relayed, *(inputs[name] for name in unit.input_names)]
        with watch(index, True):
            outputs = unit.module(*arguments)
        values |= {node: value.detach() for node, value in zip(unit.results, outputs, strict=True)}
        outcomes.append([value for value in outputs if value.requires_grad])
    values.clear()
    for index in reversed(range(len(modules))):
        outputs = outcomes.pop()
        gradients = [torch.ones_like(value) for value in outputs]
        with watch(index, False):
            if outputs:
                torch.autograd.backward(outputs, gradients)


def _is_result(node: fx.Node, own: set[fx.Node], flow: Dataflow) -> bool:
    """Return whether later units may use a value; each rebuilds glue that is written in place."""
    used = any(user not in own for user in node.users)
    return (
        used
        and isinstance(node.meta.get("val"), Tensor)
        and not (node in flow.glue and flow.is_written(node))
    )
