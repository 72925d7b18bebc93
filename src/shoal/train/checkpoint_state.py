"""A training state as a flat table of named tensors and a tree of plain values, and back.

Models are stored under the names that the unwrapped model gives its parameters and persistent buffers, and
optimizers under the names of the parameters that they update, so that a checkpoint knows neither
DistributedDataParallel, ``torch.compile``, activation checkpointing, the stages of a pipeline nor how many
workers there were. A tied parameter is stored once, and its other names beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.train.checkpoint_optimizer import (
    Values,
    check_optimizer,
    checked_json,
    empty_state,
    load_optimizer,
    merged,
    tensors_of,
    values_of,
)

_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_MOST_NAMES_SHOWN = 5

Held = dict[str, Any]
"""What a worker's models and optimizers consist of, by the keys of its state; values that JSON can hold."""


@runtime_checkable
class OwnState(Protocol):
    """State of which every worker has its own part, under names that no other worker uses.

    Any number of workers read back what any number have saved; a checkpoint may also hold nothing of it.
    """

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this worker's tensors, for a checkpoint."""

    def tensors_to_read(self, saved: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors to fill, by those of all workers' ``saved`` names that this worker takes over."""

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what the tensors have been filled with."""


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """``tensors`` alias the live state; ``optimizers`` and ``values`` hold all else, by the state's keys."""

    tensors: dict[str, Tensor]
    optimizers: dict[str, Values]
    values: dict[str, Any]

    def all_values(self, workers: Sequence[Any] | None = None) -> dict[str, Any]:
        """Return what to store beside the tensors: the values, and of the optimizers what all workers have.

        Args:
            workers: every worker's ``[values, optimizers]``, where their optimizers differ; the first
                worker's other values are taken.
        """
        if workers is None:
            return self.values | self.optimizers
        keys = dict.fromkeys(key for _, optimizers in workers for key in optimizers)
        together = {key: merged([parts[key] for _, parts in workers if key in parts]) for key in keys}
        return {**workers[0][0], **together}


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


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the other names of the model's tied parameters, each with the one that they are stored under.

    A :class:`shoal.pipelining.state_dict.ModelPart` says those of the whole model.
    """
    inner = _unwrap(model)
    if isinstance(told := getattr(inner, "aliases", None), dict):
        return told
    first: dict[nn.Parameter, str] = {}
    names = [(name, first.setdefault(p, name)) for name, p in inner.named_parameters(remove_duplicate=False)]
    return {_plain_name(name): _plain_name(stored) for name, stored in names if name != stored}


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Return the tensors of ``state`` under flat names, and its plain values.

    ``state`` maps names to models, optimizers, tensors, workers' own state, and values that JSON can hold.

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
            tensors |= {f"{key}.state.{name}": t for name, t in tensors_of(item, names, key).items()}
        elif isinstance(item, Tensor):
            tensors[key] = item.detach()
        elif isinstance(item, OwnState):
            tensors |= {f"{key}.{name}": tensor for name, tensor in item.own_tensors().items()}
        else:
            values[key] = checked_json(key, item)
    return FlatState(tensors=tensors, optimizers=optimizers, values=values)


def held(state: Mapping[str, Any]) -> Held:
    """Return what this worker's part of the state consists of, to be told to the others.

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
    saved: Mapping[str, SavedTensor],
    values: Mapping[str, Any],
    read: Callable[[dict[str, Tensor]], None],
    workers: Sequence[Held],
) -> dict[str, Any]:
    """Fill the models, optimizers and tensors of ``state`` and return the plain values stored beside them.

    ``read`` fills the tensors that it is given, by their flat names. Nothing is changed before every name
    and shape has been compared.

    Args:
        workers: what each worker's part of the state consists of (:func:`held`), this one's among them.

    Raises:
        UsageError: the stored model, optimizer or its parameter groups are other ones.
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
    for key in optimizers:
        parts = [_renamed(w["optimizers"][key], renamed) for w in workers if key in w["optimizers"]]
        check_optimizer(key, parts, values.get(key))
        entries = {name: (t.size, t.dtype) for name, t in _below(saved, f"{key}.state").items()}
        fresh[key] = empty_state({name: parameter for parameter, name in names.items()}, entries)
        for name, tensors in fresh[key].items():
            targets |= {f"{key}.state.{name}.{entry}": tensor for entry, tensor in tensors.items()}
    read(targets)
    for key, tensors in own.items():
        state[key].read(tensors)
    for key, optimizer in optimizers.items():
        load_optimizer(optimizer, names, fresh[key], values[key])
    return {
        key: value for key, value in values.items() if not isinstance(state.get(key), Optimizer | nn.Module)
    }


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


def _stored_names(
    everywhere: set[str],
    saved: Mapping[str, SavedTensor],
    saved_aliases: Mapping[str, str],
    model: nn.Module,
) -> dict[str, str]:
    """Return the names of tied parameters that were stored under another of their names, with that name."""
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
    key: str, current: Mapping[str, Tensor], saved: Mapping[str, SavedTensor], everywhere: set[str]
) -> None:
    """Compare this worker's tensors with the stored ones; ``everywhere`` are the names of all workers."""
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
    if surplus := [name for name in saved if name not in everywhere]:
        raise UsageError(f"the checkpoint holds {_shown(key, surplus)}, which the model does not have")


def _dotted(key: str, name: str) -> str:
    return f"{key}.{name}" if name else key


def _shown(key: str, names: list[str]) -> str:
    shown = ", ".join(_dotted(key, name) for name in names[:_MOST_NAMES_SHOWN])
    more = len(names) - _MOST_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
