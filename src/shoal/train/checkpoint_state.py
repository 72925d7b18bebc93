"""Converts a training state into named tensors and plain values, and back.

Model tensors have the names of the unwrapped model's parameters and persistent buffers, and optimizer state
those of the parameters. A checkpoint is therefore independent of DistributedDataParallel, ``torch.compile``,
activation checkpointing, pipeline stages and the number of workers. A tied parameter is stored once, with
its other names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.json_text import parse_json
from shoal.optim.moments import parameters_of
from shoal.train.checkpoint_files import DTYPES, StoredTensor
from shoal.train.gradients import DataParallel

_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_MOST_NAMES_SHOWN = 5

LocalState = dict[str, Any]
"""Tensor names of a worker's models and values of its optimizers, by the keys of the state; JSON values."""

Names = Mapping[nn.Parameter, str]
"""The names of a state's parameters."""

Values = dict[str, Any]
"""State of an optimizer besides tensors: class, groups with the names of their parameters, plain entries."""


Held = Callable[[Optimizer], Iterable[nn.Parameter]]
"""Returns the parameters of an optimizer whose state a worker keeps."""


@runtime_checkable
class OwnState(Protocol):
    """State that differs per worker, under names that no other worker uses.

    The number of workers that read it may differ from the number that saved it, and a checkpoint may hold
    none of it.
    """

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this worker's tensors, for a checkpoint."""

    def tensors_to_read(self, saved: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Return tensors to fill, by those of all workers' ``saved`` names that this one restores."""

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state from the filled tensors."""


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """``tensors`` alias the live state; ``optimizers`` and ``values`` hold the rest, by the state's keys."""

    tensors: dict[str, Tensor]
    optimizers: dict[str, Values]
    values: dict[str, Any]

    def all_values(self, workers: Sequence[Any] | None = None) -> dict[str, Any]:
        """Return the values to store: those of the first worker, and the merged ones of all optimizers.

        Args:
            workers: ``[values, optimizers]`` of every worker, if optimizers differ between workers.
        """
        if workers is None:
            return self.values | self.optimizers
        keys = dict.fromkeys(key for _, optimizers in workers for key in optimizers)
        together = {key: merged([parts[key] for _, parts in workers if key in parts]) for key in keys}
        return {**workers[0][0], **together}


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


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, each with the name under which the tensor is stored.

    The aliases of a :class:`shoal.pipelining.state_dict.ModelPart` are those of the whole model.
    """
    inner = _unwrap(model)
    if isinstance(aliases := getattr(inner, "aliases", None), dict):
        return aliases
    first: dict[nn.Parameter, str] = {}
    names = [(name, first.setdefault(p, name)) for name, p in inner.named_parameters(remove_duplicate=False)]
    return {_plain_name(name): _plain_name(stored) for name, stored in names if name != stored}


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Return the tensors of ``state`` under flat names, and its plain values.

    Args:
        state: models, optimizers, tensors, :class:`OwnState` and JSON values by name.

    Raises:
        ShoalError: a value is none of these, or an optimizer updates a parameter of no model in ``state``.
    """
    tensors: dict[str, Tensor] = {}
    optimizers: dict[str, Values] = {}
    values: dict[str, Any] = {}
    names = _names_of_parameters(state)
    for key, item in state.items():
        if isinstance(item, nn.Module):
            tensors |= {f"{key}.{name}": tensor for name, tensor in named_tensors(item).items()}
            if aliases := aliases_of(item):
                values[key] = {"aliases": aliases}
        elif isinstance(item, Optimizer):
            optimizers[key] = values_of(item, names, key)
            tensors |= {
                f"{key}.state.{name}.{entry}": value.detach()
                for name, entry, value in _entries(item, names, key)
                if isinstance(value, Tensor)
            }
        elif isinstance(item, Tensor):
            tensors[key] = item.detach()
        elif isinstance(item, OwnState):
            tensors |= {f"{key}.{name}": tensor for name, tensor in item.own_tensors().items()}
        else:
            values[key] = checked_json(key, item)
    return FlatState(tensors=tensors, optimizers=optimizers, values=values)


def local_state(state: Mapping[str, Any]) -> LocalState:
    """Return a description of this worker's part of the state, to exchange with other workers.

    Raises:
        ShoalError: as :func:`flatten`.
    """
    names = _names_of_parameters(state)
    models = {key: list(named_tensors(item)) for key, item in state.items() if isinstance(item, nn.Module)}
    optimizers = {
        key: values_of(item, names, key) for key, item in state.items() if isinstance(item, Optimizer)
    }
    return {"models": models, "optimizers": optimizers}


def restore(
    state: Mapping[str, Any],
    saved: Mapping[str, StoredTensor],
    values: Mapping[str, Any],
    read: Callable[[dict[str, Tensor]], None],
    workers: Sequence[LocalState],
    held: Held,
) -> dict[str, Any]:
    """Fill the models, optimizers and tensors of ``state`` and return the other stored values.

    All names and shapes are compared before anything is changed.

    Args:
        state: as for :func:`flatten`.
        saved: the stored tensors by flat name.
        values: the stored values.
        read: fills tensors, given by flat name, from the checkpoint.
        workers: :func:`local_state` of all workers, including this one.
        held: returns the parameters of an optimizer whose state this worker keeps.

    Raises:
        UsageError: the stored model, optimizer or parameter groups differ from those of ``state``.
    """
    targets: dict[str, Tensor] = {}
    fresh: dict[str, dict[str, dict[str, Tensor]]] = {}
    renamed: dict[str, str] = {}
    own: dict[str, dict[str, Tensor]] = {}
    for key, item in state.items():
        if isinstance(item, nn.Module):
            everywhere = {name for worker in workers for name in worker["models"].get(key, ())}
            below = _below(saved, key)
            old_names = _stored_names(everywhere, below, values.get(key, {}).get("aliases", {}), item)
            renamed |= old_names
            current = {old_names.get(name, name): tensor for name, tensor in named_tensors(item).items()}
            elsewhere = {old_names.get(name, name) for name in everywhere}
            _check_model(key, current, below, elsewhere)
            targets |= {f"{key}.{name}": tensor for name, tensor in current.items()}
        elif isinstance(item, Tensor):
            _check_model(key, {"": item}, {"": saved[key]} if key in saved else {}, {""})
            targets[key] = item.detach()
        elif isinstance(item, OwnState):
            own[key] = item.tensors_to_read(_below(saved, key))
            targets |= {f"{key}.{name}": tensor for name, tensor in own[key].items()}
    names = {p: renamed.get(name, name) for p, name in _names_of_parameters(state).items()}
    optimizers = {key: item for key, item in state.items() if isinstance(item, Optimizer)}
    for key, optimizer in optimizers.items():
        parts = [_renamed(w["optimizers"][key], renamed) for w in workers if key in w["optimizers"]]
        check_optimizer(key, parts, values.get(key))
        parameters = {names[parameter]: parameter for parameter in held(optimizer)}
        fresh[key] = empty_state(parameters, _below(saved, f"{key}.state"))
        for name, tensors in fresh[key].items():
            targets |= {f"{key}.state.{name}.{entry}": tensor for entry, tensor in tensors.items()}
    read(targets)
    for key, tensors in own.items():
        state[key].read(tensors)
    for key, optimizer in optimizers.items():
        load_optimizer(optimizer, names, held(optimizer), fresh[key], values[key])
    return {
        key: value for key, value in values.items() if not isinstance(state.get(key), Optimizer | nn.Module)
    }


def _unwrap(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def _below(saved: Mapping[str, StoredTensor], key: str) -> dict[str, StoredTensor]:
    prefix = f"{key}."
    return {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}


def _names_of_parameters(state: Mapping[str, Any]) -> dict[nn.Parameter, str]:
    return {
        parameter: _plain_name(name)
        for item in state.values()
        if isinstance(item, nn.Module)
        for name, parameter in _unwrap(item).named_parameters()
    }


def _stored_names(
    everywhere: set[str],
    saved: Mapping[str, StoredTensor],
    saved_aliases: Mapping[str, str],
    model: nn.Module,
) -> dict[str, str]:
    """Return the stored name of each tied parameter that was stored under another one of its names."""
    others: dict[str, list[str]] = {}
    for alias, stored in [*saved_aliases.items(), *((a, b) for b, a in aliases_of(model).items())]:
        others.setdefault(alias, []).append(stored)
    return {
        name: other
        for name in everywhere
        if name not in saved
        for other in others.get(name, ())
        if other in saved and other not in everywhere
    }


def _renamed(values: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    groups = [
        group | {"params": [names.get(name, name) for name in group["params"]]}
        for group in values["param_groups"]
    ]
    return values | {"param_groups": groups}


def _check_model(
    key: str, current: Mapping[str, Tensor], saved: Mapping[str, StoredTensor], everywhere: set[str]
) -> None:
    """Raise if this worker's tensors differ from the stored ones; ``everywhere``: names of all workers."""
    for name, tensor in current.items():
        if name in saved and saved[name].size != tuple(tensor.shape):
            raise UsageError(
                f"{_dotted(key, name)} has shape {tuple(tensor.shape)}, but {saved[name].size} in the "
                "checkpoint: the model's size was changed; set the former size, or start a new run"
            )
    if missing := [name for name in current if name not in saved]:
        near = did_you_mean(missing[0], saved)
        raise UsageError(
            f"the checkpoint does not hold {_shown(key, missing)}: it is of another model.{near}"
        )
    if surplus := [name for name in saved if name not in everywhere]:
        raise UsageError(f"the checkpoint holds {_shown(key, surplus)}, which the model does not have")


def _dotted(key: str, name: str) -> str:
    return f"{key}.{name}" if name else key


def _shown(key: str, names: list[str]) -> str:
    shown = ", ".join(_dotted(key, name) for name in names[:_MOST_NAMES_SHOWN])
    more = len(names) - _MOST_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


# ---- optimizers ------------------------------------------------------------------------------------------
#
# Workers with different stages of a model have optimizers over different parameters. These are stored as one
# optimizer of the whole model, in which groups of equal options are merged, so that any other division of
# the model can restore its share.
#
# ``torch.distributed.checkpoint.state_dict`` gives such names too, but initializes an optimizer without state
# by a step with zero gradients. In a run whose first steps all overflowed that would count in the bias
# correction of the moments. Here saving only reads an optimizer, and loading rebuilds it from stored values.


def values_of(optimizer: Optimizer, names: Names, key: str) -> Values:
    """Return the class, groups and entries that are not tensors; ``key`` is the optimizer's name in errors.

    Groups that only tell shards from whole weights are merged, as :func:`merged` does those of workers.

    Raises:
        ShoalError: JSON cannot represent a value, or a parameter has no name.
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
    values: Values = {"class": type(optimizer).__name__, "state": state, "param_groups": groups}
    if len({isinstance(parameter, DTensor) for parameter in parameters_of(optimizer)}) > 1:
        values |= {"param_groups": _united(groups), "parts": 1}
    return values


def merged(parts: Sequence[Values]) -> Values:
    """Return the values of the whole model's optimizer, given those of each worker's.

    If their groups differ, those of equal options are merged, a parameter on several workers occurs once,
    and ``"parts"`` is the number of different ones.
    """
    parts = list({json.dumps(part, sort_keys=True): part for part in parts}.values())
    if len(parts) == 1:
        return parts[0]
    state: dict[str, dict[str, Any]] = {}
    for part in parts:
        state |= part["state"]
    if all(part["param_groups"] == parts[0]["param_groups"] for part in parts):
        return parts[0] | {"state": state}
    groups = _united([group for part in parts for group in part["param_groups"]])
    return {"class": parts[0]["class"], "state": state, "param_groups": groups, "parts": len(parts)}


def check_optimizer(key: str, parts: Sequence[Values], stored: Values | None) -> None:
    """Raise a :class:`UsageError` if the optimizers differ in class or groups from the stored one."""
    if stored is None:
        raise UsageError(
            f"the checkpoint holds no {key}: it cannot be continued with other options than it was written "
            "with (--servers.mode local keeps one for each worker), only its model can be loaded"
        )
    if other := next((part["class"] for part in parts if part["class"] != stored["class"]), None):
        raise UsageError(
            f"the checkpoint was written with {stored['class']}, and {key} is {other} now; use the former, "
            "or start a new run from the checkpoint's model"
        )
    ours = merged(parts)
    groups = [ours["param_groups"], stored["param_groups"]]
    if "parts" in ours or "parts" in stored:  # groups of equal options are merged on one side
        groups = [_united(one) for one in groups]
    if _divisions(groups[0]) != _divisions(groups[1]):
        raise UsageError(
            f"the parameter groups of {key} differ from those of the checkpoint; start a new run"
        )


def empty_state(
    parameters: Mapping[str, nn.Parameter], stored: Mapping[str, StoredTensor]
) -> dict[str, dict[str, Tensor]]:
    """Return tensors to fill: like the parameter if they have its shape, otherwise plain ones on the CPU.

    Args:
        parameters: this worker's parameters by stored name.
        stored: the stored entries of the state by ``name.entry``.
    """
    empty: dict[str, dict[str, Tensor]] = {}
    for flat_name, tensor in stored.items():
        name, _, entry = flat_name.rpartition(".")
        if name in parameters:
            parameter, dtype = parameters[name], DTYPES[tensor.dtype]
            empty.setdefault(name, {})[entry] = (
                torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                if tuple(parameter.shape) == tensor.size
                else torch.empty(tensor.size, dtype=dtype)
            )
    return empty


def load_optimizer(
    optimizer: Optimizer,
    names: Names,
    held: Iterable[nn.Parameter],
    tensors: Mapping[str, dict[str, Tensor]],
    stored: Values,
) -> None:
    """Load the optimizer's state of the ``held`` parameters, and the stored values of all.

    Args:
        tensors: of the state, by stored name and entry.
    """
    ordered, kept = parameters_of(optimizer), set(held)
    state = {
        index: {**stored["state"][name], **tensors.get(name, {})}
        for index, parameter in enumerate(ordered)
        if parameter in kept and (name := names[parameter]) in stored["state"]
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
    for index, entries in state.items():  # load_state_dict casts to the parameter's type: restore the stored
        for entry, value in entries.items():
            loaded = optimizer.state[ordered[index]].get(entry)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[ordered[index]][entry] = value.to(loaded.device)


def checked_json(name: str, value: Any) -> Any:
    """Return a copy of ``value`` as read back from JSON: tuples become lists, keys become strings.

    Raises:
        ShoalError: JSON cannot represent it.
    """
    try:
        return _json_copy(value)
    except (TypeError, RecursionError) as error:
        raise ShoalError(f"the state's {name!r} cannot be stored as JSON: {error}") from None


def _json_copy(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_json_copy(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json_copy(item) for key, item in value.items()}
    raise TypeError(f"an object of type {type(value).__name__} is not serializable")


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
    """Return the groups, those of equal options merged, with each parameter once."""
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
    """Return ``value`` as a tuple or tensor if ``current`` is one; JSON does not distinguish them."""
    if isinstance(current, tuple):
        return tuple(value)
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return value
