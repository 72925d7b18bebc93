"""Splits a model by lists of module names, one per stage: for models that cannot be exported, or by choice.

The named modules form a chain: each gets the output of the one before and, by name, those of the model's
inputs that its ``forward`` also takes. Other models are refused: the chain must return what the model
returns, and hold all of its parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import UsageError, did_you_mean
from shoal.pipelining.export_graph import alias_names, in_mode
from shoal.pipelining.measure_cost import undisturbed
from shoal.pipelining.random_streams import own_stream, streams
from shoal.pipelining.stage import Body, StageModule, TensorSpec, owner_of

Inputs = Mapping[str, Tensor]


def split_by_modules(model: nn.Module, stages: Sequence[Sequence[str]], inputs: Inputs) -> list[StageModule]:
    """Return a stage for each list of module names; training and evaluation run the same modules.

    The chain is run once on ``inputs``, an example micro-batch, and compared with the model in evaluation
    mode (on the meta device only its shapes).

    Raises:
        UsageError: an unknown, repeated or overlapping name, a parameter that no named module holds, modules
            that do not fit together, or a chain that computes something else than the model.
    """
    names = [name for stage in stages for name in stage]
    _check_names(model, stages, names)
    links = [_Link(model.get_submodule(name), name, index) for index, name in enumerate(names)]
    with undisturbed(model), streams(0, 0, range(1)):
        values = _values_between(links, inputs)
        output_spec = _compare(model, links, inputs)
    aliases = alias_names(model)
    device = next((t.device for t in (*model.parameters(), *inputs.values())), torch.device("cpu"))
    split, first = [], 0
    for index, stage in enumerate(stages):
        last = first + len(stage)
        received = _specs(values[first - 1], names[first - 1]) if index else ()
        sent = _specs(values[last - 1], names[last - 1]) if index < len(stages) - 1 else ()
        chain = _Chain(links[first:last], list(inputs))
        body = Body(run=chain, input_names=chain.input_names, relayed_in=received, relayed_out=sent)
        weights = nn.Module()
        for link in links[first:last]:
            owner, field = owner_of(weights, link.name)
            owner.add_module(field, link.module)
        split.append(
            StageModule(
                index=index,
                num_stages=len(stages),
                weights=weights,
                constants=nn.Module(),
                bodies={True: body, False: body},
                output_spec=output_spec,
                device=device,
                aliases=aliases,
            )
        )
        first = last
    return split


@dataclass(frozen=True, eq=False)
class _Link:
    """A module of the chain; its random operations draw from a stream of its own, independent of its
    stage."""

    module: nn.Module
    name: str
    key: int

    def __call__(self, previous: tuple[Any, ...], inputs: Inputs) -> Any:
        """Run the module on the output of the previous one (none for the first) and on the inputs."""
        by_name = {name: inputs[name] for name in self.takes(list(inputs), len(previous))}
        if not previous and not by_name:  # the parameter name of a Sequential is arbitrary
            previous = tuple(inputs.values())[:1]
        device = next((t.device for t in (*previous, *by_name.values()) if isinstance(t, Tensor)), None)
        with own_stream(self.key, device) if device else nullcontext():
            return self.module(*previous, **by_name)

    def takes(self, names: list[str], num_positional: int) -> list[str]:
        """Return the model's inputs that the module takes by name, behind its positional arguments."""
        behind = list(inspect.signature(self.module.forward).parameters)[num_positional:]
        return [name for name in names if name in behind]


class _Chain:
    """Runs the modules of one stage on relayed values and on the root inputs that they take."""

    def __init__(self, links: list[_Link], names: list[str]) -> None:
        self._links = links
        # The number of relayed values is only known at run time: a name is read if any module may take it.
        self.input_names = tuple(
            name for name in names if any(name in link.takes(names, 0) for link in links)
        )
        if links[0].key == 0 and not links[0].takes(names, 0):
            self.input_names = tuple(dict.fromkeys([names[0], *self.input_names]))

    def __call__(self, *values: Tensor) -> tuple[Any, ...]:
        num_relayed = len(values) - len(self.input_names)
        inputs = dict(zip(self.input_names, values[num_relayed:], strict=True))
        value: Any = values[:num_relayed]
        for link in self._links:
            value = link(_as_tuple(value), inputs)
        return tuple(pytree.tree_leaves(value))


def _values_between(links: list[_Link], inputs: Inputs) -> list[Any]:
    """Return the output of each module of the chain for the example."""
    values: list[Any] = []
    for link in links:
        try:
            values.append(link(_as_tuple(values[-1] if values else ()), inputs))
        except (TypeError, RuntimeError, ValueError, IndexError) as error:
            received = f"what {links[len(values) - 1].name!r} returns" if values else "the model's inputs"
            reason = (str(error).splitlines() or [""])[0]
            raise UsageError(
                f"module {link.name!r} does not take {received}: {reason}; name modules of which each "
                "takes what the one before returns"
            ) from error
    return values


def _compare(model: nn.Module, links: list[_Link], inputs: Inputs) -> Any:
    """Return the structure of the model's output; refuse a chain that returns anything else."""
    with in_mode(model, False), torch.no_grad():
        expected, spec = pytree.tree_flatten(model(**inputs))
        outputs, output_spec = pytree.tree_flatten(_values_between(links, inputs)[-1])
    if spec != output_spec or not all(map(_same, expected, outputs)):
        raise UsageError(
            f"the modules {[link.name for link in links]}, one after the other, do not return what "
            f"{type(model).__name__} returns: it computes more between them, so it cannot be split by names; "
            "move that into a module"
        )
    return spec


def _same(left: Any, right: Any) -> bool:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return bool(left == right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.is_meta or torch.allclose(left, right, rtol=1e-5, atol=1e-6, equal_nan=True)


def _check_names(model: nn.Module, stages: Sequence[Sequence[str]], names: list[str]) -> None:
    known = dict(model.named_modules())
    for index, stage in enumerate(stages):
        if not stage:
            raise UsageError(f"stage {index} has no modules: name at least one for each stage")
    for name in names:
        if not name or name not in known:
            raise UsageError(
                f"{type(model).__name__} has no module {name!r}.{did_you_mean(name, known)} "
                f"Its own are {[child for child, _ in model.named_children()]}"
            )
        inside = [other for other in names if other != name and other.startswith(f"{name}.")]
        if names.count(name) > 1 or inside:
            raise UsageError(
                f"module {name!r} is named twice{f', with {inside[0]!r} in it' if inside else ''}"
            )
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        held = {id(t) for n in names for t in (*known[n].parameters(), *known[n].buffers())}
        lost = [name for name, tensor in tensors if id(tensor) not in held]
        if lost:
            raise UsageError(
                f"{kind} {lost[0]!r} is in none of the modules {names}"
                f"{f' ({len(lost) - 1} more)' if len(lost) > 1 else ''}: name the module that holds it"
            )


def _specs(value: Any, name: str) -> tuple[TensorSpec, ...]:
    values = _as_tuple(value)
    wrong = [type(each).__name__ for each in values if not isinstance(each, Tensor)]
    if wrong:
        raise UsageError(
            f"module {name!r} ends a stage and returns a {wrong[0]}: only tensors, or a tuple of them, travel"
        )
    return tuple(
        TensorSpec(shape=tuple(each.shape), dtype=each.dtype, requires_grad=each.requires_grad)
        for each in values
    )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
