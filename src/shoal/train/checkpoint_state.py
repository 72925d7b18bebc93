"""A training state as a flat table of named tensors and a tree of plain values, and back.

Models are stored under the names that the unwrapped model gives its parameters and persistent buffers, and
optimizers under the names of the parameters that they update, so that a checkpoint knows neither
DistributedDataParallel, ``torch.compile``, activation checkpointing nor how many workers there were. A tied
parameter is stored once.

``torch.distributed.checkpoint.state_dict`` gives such names too, but it fills an optimizer without state by
taking a step with gradients of zero. That would count as a step in the moments' bias correction of a run
whose first steps all overflowed; here an optimizer is only read, and is rebuilt from what was stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.errors import ShoalError, UsageError, did_you_mean

_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_MOST_NAMES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """``tensors`` alias the live state; ``values`` hold all else, by the keys of the state."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """What a checkpoint holds under one name: the global shape and the element type."""

    size: tuple[int, ...]
    dtype: torch.dtype


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of ``model`` by their names in the unwrapped model.

    Raises:
        ShoalError: the model keeps extra state that is not a tensor (``get_extra_state``).
    """
    inner = _unwrap(model)
    persistent = inner.state_dict(keep_vars=True)
    if extra := [name for name, value in persistent.items() if not isinstance(value, Tensor)]:
        raise ShoalError(f"the model keeps extra state {extra[0]!r}, which a checkpoint cannot hold")
    tensors: dict[str, Tensor] = {
        _plain_name(name): parameter for name, parameter in inner.named_parameters()
    }
    kept = {_plain_name(name) for name in persistent}
    for name, buffer in inner.named_buffers():
        if _plain_name(name) in kept:
            tensors[_plain_name(name)] = buffer
    return {name: tensor.detach() for name, tensor in tensors.items()}


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Return the tensors of ``state`` under flat names, and its plain values.

    ``state`` maps names to models, optimizers, tensors, and values that JSON can hold.

    Raises:
        ShoalError: a value is none of these, or an optimizer updates a parameter of no model in ``state``.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for key, item in state.items():
        if isinstance(item, nn.Module):
            tensors |= {f"{key}.{name}": tensor for name, tensor in named_tensors(item).items()}
        elif isinstance(item, Optimizer):
            values[key] = _optimizer_values(item, _names_of_parameters(state), key)
            tensors |= {
                f"{key}.state.{name}.{entry}": value.detach()
                for name, entry, value in _optimizer_state(item, _names_of_parameters(state), key)
                if isinstance(value, Tensor)
            }
        elif isinstance(item, Tensor):
            tensors[key] = item.detach()
        else:
            values[key] = _checked_json(key, item)
    return FlatState(tensors=tensors, values=values)


def restore(
    state: Mapping[str, Any],
    saved: Mapping[str, SavedTensor],
    values: Mapping[str, Any],
    read: Callable[[dict[str, Tensor]], None],
) -> dict[str, Any]:
    """Fill the models, optimizers and tensors of ``state`` and return the plain values stored beside them.

    ``read`` fills the tensors that it is given, by their flat names. Nothing is changed before every name
    and shape has been compared.

    Raises:
        UsageError: the stored model, optimizer or its parameter groups are other ones.
    """
    targets: dict[str, Tensor] = {}
    fresh: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, item in state.items():
        if isinstance(item, nn.Module):
            current = named_tensors(item)
            _check_model(key, current, _below(saved, key))
            targets |= {f"{key}.{name}": tensor for name, tensor in current.items()}
        elif isinstance(item, Optimizer):
            names = _names_of_parameters(state)
            _check_optimizer(key, item, names, values.get(key))
            fresh[key] = _empty_optimizer_state(key, item, names, saved)
            for name, entries in fresh[key].items():
                targets |= {f"{key}.state.{name}.{entry}": t for entry, t in entries.items()}
        elif isinstance(item, Tensor):
            _check_model(key, {"": item}, {"": saved[key]} if key in saved else {})
            targets[key] = item.detach()
    read(targets)
    for key, item in state.items():
        if isinstance(item, Optimizer):
            _load_optimizer(item, _names_of_parameters(state), fresh[key], values[key])
    return {key: value for key, value in values.items() if not isinstance(state.get(key), Optimizer)}


def _unwrap(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def _below(saved: Mapping[str, SavedTensor], key: str) -> dict[str, SavedTensor]:
    prefix = f"{key}."
    return {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}


def _names_of_parameters(state: Mapping[str, Any]) -> dict[nn.Parameter, str]:
    return {
        parameter: _plain_name(name)
        for item in state.values()
        if isinstance(item, nn.Module)
        for name, parameter in _unwrap(item).named_parameters()
    }


def _name_of(parameter: Any, names: Mapping[nn.Parameter, str], key: str) -> str:
    if parameter not in names:
        raise ShoalError(
            f"{key!r} updates a parameter of shape {tuple(parameter.shape)} of no model in the state"
        )
    return names[parameter]


def _optimizer_state(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], key: str
) -> Iterator[tuple[str, str, Any]]:
    for parameter, entries in optimizer.state.items():
        for entry, value in entries.items():
            yield _name_of(parameter, names, key), entry, value


def _optimizer_values(optimizer: Optimizer, names: Mapping[nn.Parameter, str], key: str) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for name, entry, value in _optimizer_state(optimizer, names, key):
        state.setdefault(name, {})
        if not isinstance(value, Tensor):
            state[name][entry] = _checked_json(f"{key}.state.{name}.{entry}", value)
    groups = [
        {
            field: _checked_json(f"{key}.{field}", value.item() if isinstance(value, Tensor) else value)
            for field, value in group.items()
            if field != "params"
        }
        | {"params": [_name_of(parameter, names, key) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "state": state, "param_groups": groups}


def _checked_json(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ShoalError(f"the state's {name!r} cannot be stored as JSON: {error}") from None


def _check_model(key: str, current: Mapping[str, Tensor], saved: Mapping[str, SavedTensor]) -> None:
    for name, tensor in current.items():
        if name in saved and saved[name].size != tuple(tensor.shape):
            raise UsageError(
                f"{_dotted(key, name)} has shape {tuple(tensor.shape)}, but {saved[name].size} in the "
                "checkpoint: the model's size was changed; give the size it had, or begin a new run"
            )
    if missing := [name for name in current if name not in saved]:
        near = did_you_mean(missing[0], saved)
        raise UsageError(
            f"the checkpoint does not hold {_shown(key, missing)}: it is of another model.{near}"
        )
    if surplus := [name for name in saved if name not in current]:
        raise UsageError(f"the checkpoint holds {_shown(key, surplus)}, which the model does not have")


def _dotted(key: str, name: str) -> str:
    return f"{key}.{name}" if name else key


def _shown(key: str, names: list[str]) -> str:
    shown = ", ".join(_dotted(key, name) for name in names[:_MOST_NAMES_SHOWN])
    more = len(names) - _MOST_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _check_optimizer(
    key: str, optimizer: Optimizer, names: Mapping[nn.Parameter, str], stored: dict[str, Any] | None
) -> None:
    if stored is None:
        raise UsageError(
            f"the checkpoint holds no {key}: it cannot be continued, only its model can be loaded"
        )
    if stored["class"] != type(optimizer).__name__:
        raise UsageError(
            f"the checkpoint was written with {stored['class']}, and {key} is {type(optimizer).__name__} "
            "now; give the former, or begin a new run from the checkpoint's model"
        )
    current = [[_name_of(p, names, key) for p in group["params"]] for group in optimizer.param_groups]
    if current != [group["params"] for group in stored["param_groups"]]:
        raise UsageError(
            f"the parameter groups of {key} are other ones than in the checkpoint; begin a new run"
        )


def _empty_optimizer_state(
    key: str, optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: Mapping[str, SavedTensor]
) -> dict[str, dict[str, Tensor]]:
    """Return tensors to be filled: like the parameter where the shape is its own, else plain on the CPU."""
    of_name = {name: parameter for parameter, name in names.items()}
    empty: dict[str, dict[str, Tensor]] = {}
    for flat_name, tensor in _below(saved, f"{key}.state").items():
        name, _, entry = flat_name.rpartition(".")
        parameter = of_name[name]
        empty.setdefault(name, {})[entry] = (
            torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)
            if tuple(parameter.shape) == tensor.size
            else torch.empty(tensor.size, dtype=tensor.dtype)
        )
    return empty


def _load_optimizer(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    tensors: Mapping[str, dict[str, Tensor]],
    stored: Mapping[str, Any],
) -> None:
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {**stored["state"][name], **tensors.get(name, {})}
        for index, parameter in enumerate(ordered)
        if (name := names[parameter]) in stored["state"]
    }
    groups, first = [], 0
    for group, values in zip(optimizer.param_groups, stored["param_groups"], strict=True):
        count = len(group["params"])
        restored = {field: _as_before(group.get(field), value) for field, value in values.items()}
        groups.append(restored | {"params": list(range(first, first + count))})
        first += count
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for index, entries in state.items():  # load_state_dict casts to the parameter's type: put back the exact
        for entry, value in entries.items():
            loaded = optimizer.state[ordered[index]].get(entry)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[ordered[index]][entry] = value.to(loaded.device)


def _as_before(current: Any, value: Any) -> Any:
    """Return ``value`` as a tuple or a tensor where it was one: JSON does not tell."""
    if isinstance(current, tuple):
        return tuple(value)
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return value
