"""An optimizer's state by the names of the parameters that it updates, on one worker or on many.

Where each worker holds a part of the model (a pipeline's stages), each has an optimizer over its own
parameters. Together they are the one optimizer of the whole model: groups of equal options are one group.
That is what is stored, so that any other division of the model takes its share of it.

``torch.distributed.checkpoint.state_dict`` gives such names too, but it fills an optimizer without state by
taking a step with gradients of zero. That would count as a step in the moments' bias correction of a run
whose first steps all overflowed; here an optimizer is only read, and is rebuilt from what was stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json

Names = Mapping[nn.Parameter, str]
"""The names of a state's parameters."""

Values = dict[str, Any]
"""What is not a tensor: the optimizer's class, its groups with their parameters' names, and plain state."""


def tensors_of(optimizer: Optimizer, names: Names, key: str) -> dict[str, Tensor]:
    """Return the tensors of the state by ``name.entry``; ``key`` names the optimizer in errors."""
    return {
        f"{name}.{entry}": value.detach()
        for name, entry, value in _entries(optimizer, names, key)
        if isinstance(value, Tensor)
    }


def values_of(optimizer: Optimizer, names: Names, key: str) -> Values:
    """Return what is not a tensor.

    Raises:
        ShoalError: a value is nothing that JSON can hold, or a parameter has no name.
    """
    state: dict[str, dict[str, Any]] = {}
    for name, entry, value in _entries(optimizer, names, key):
        state.setdefault(name, {})
        if not isinstance(value, Tensor):
            state[name][entry] = checked_json(f"{key}.state.{name}.{entry}", value)
    groups = [
        {
            field: checked_json(f"{key}.{field}", value.item() if isinstance(value, Tensor) else value)
            for field, value in group.items()
            if field != "params"
        }
        | {"params": [_name_of(parameter, names, key) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "state": state, "param_groups": groups}


def merged(parts: Sequence[Values]) -> Values:
    """Return the values of the optimizer of which each worker has one of ``parts``.

    Where these differ, groups of equal options become one, a parameter that several workers hold counts once,
    and ``"parts"`` says how many different ones there were.
    """
    parts = list({json.dumps(part, sort_keys=True): part for part in parts}.values())
    if len(parts) == 1:
        return parts[0]
    state: dict[str, dict[str, Any]] = {}
    for part in parts:
        state |= part["state"]
    groups = _united([group for part in parts for group in part["param_groups"]])
    return {"class": parts[0]["class"], "state": state, "param_groups": groups, "parts": len(parts)}


def check_optimizer(key: str, parts: Sequence[Values], stored: Values | None) -> None:
    """Check that the optimizer of which the workers have ``parts`` is the one that was stored.

    Raises:
        UsageError: it is of another class, or it has other groups.
    """
    if stored is None:
        raise UsageError(
            f"the checkpoint holds no {key}: it cannot be continued, only its model can be loaded"
        )
    if other := next((part["class"] for part in parts if part["class"] != stored["class"]), None):
        raise UsageError(
            f"the checkpoint was written with {stored['class']}, and {key} is {other} now; give the former, "
            "or begin a new run from the checkpoint's model"
        )
    ours = merged(parts)
    groups = [ours["param_groups"], stored["param_groups"]]
    if "parts" in ours or "parts" in stored:  # one side had to unite groups of equal options
        groups = [_united(one) for one in groups]
    if _divisions(groups[0]) != _divisions(groups[1]):
        raise UsageError(
            f"the parameter groups of {key} are other ones than in the checkpoint; begin a new run"
        )


def empty_state(
    parameters: Mapping[str, nn.Parameter], stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, dict[str, Tensor]]:
    """Return tensors to be filled: like the parameter where the shape is its own, else plain on the CPU.

    Args:
        parameters: those that this worker has, by their stored names.
        stored: shape and type of each entry of the state, by ``name.entry``.
    """
    empty: dict[str, dict[str, Tensor]] = {}
    for flat_name, (size, dtype) in stored.items():
        name, _, entry = flat_name.rpartition(".")
        parameter = parameters.get(name)
        if parameter is not None:
            empty.setdefault(name, {})[entry] = (
                torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                if tuple(parameter.shape) == size
                else torch.empty(size, dtype=dtype)
            )
    return empty


def load_optimizer(
    optimizer: Optimizer, names: Names, tensors: Mapping[str, dict[str, Tensor]], stored: Values
) -> None:
    """Rebuild the state from ``tensors``, by stored name and entry, and the stored values."""
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {**stored["state"][name], **tensors.get(name, {})}
        for index, parameter in enumerate(ordered)
        if (name := names[parameter]) in stored["state"]
    }
    of_name = {name: group for group in stored["param_groups"] for name in group["params"]}
    groups, first = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        values = of_name[names[group["params"][0]]] if count else group
        restored = {field: _as_before(group.get(field), value) for field, value in values.items()}
        groups.append(restored | {"params": list(range(first, first + count))})
        first += count
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for index, entries in state.items():  # load_state_dict casts to the parameter's type: put back the exact
        for entry, value in entries.items():
            loaded = optimizer.state[ordered[index]].get(entry)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[ordered[index]][entry] = value.to(loaded.device)


def checked_json(name: str, value: Any) -> Any:
    """Return ``value`` as JSON gives it back.

    Raises:
        ShoalError: JSON cannot hold it.
    """
    try:
        return parse_json(json.dumps(value), f"the state's {name!r}")
    except (TypeError, ValueError, RecursionError) as error:
        raise ShoalError(f"the state's {name!r} cannot be stored as JSON: {error}") from None


def _entries(optimizer: Optimizer, names: Names, key: str) -> Iterator[tuple[str, str, Any]]:
    for parameter, entries in optimizer.state.items():
        for entry, value in entries.items():
            yield _name_of(parameter, names, key), entry, value


def _name_of(parameter: Any, names: Names, key: str) -> str:
    if parameter not in names:
        raise ShoalError(
            f"{key!r} updates a parameter of shape {tuple(parameter.shape)} of no model in the state"
        )
    return names[parameter]


def _united(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with those of equal options made one, each parameter once."""
    params: dict[str, dict[str, None]] = {}
    for group in groups:
        options = json.dumps({field: group[field] for field in group if field != "params"})
        params.setdefault(options, {}).update(dict.fromkeys(group["params"]))
    return [
        parse_json(options, "the options of an optimizer") | {"params": list(names)}
        for options, names in params.items()
    ]


def _divisions(groups: Sequence[dict[str, Any]]) -> set[frozenset[str]]:
    return {frozenset(group["params"]) for group in groups if group["params"]}


def _as_before(current: Any, value: Any) -> Any:
    """Return ``value`` as a tuple or a tensor where it was one: JSON does not tell."""
    if isinstance(current, tuple):
        return tuple(value)
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return value
