"""Allocates and initialises the stages of a model that was split on the meta device.

Every process builds the whole model on the meta device, splits it, and allocates its own stages only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.decide.rng import Stream, random_keys
from shoal.errors import UsageError
from shoal.pipelining.stage import StageModule, replace_tensors

Initialise = Callable[[nn.Module], object]


def init_meta(
    stages: Sequence[StageModule],
    model: nn.Module,
    device: torch.device,
    *,
    initialise: Initialise | None = None,
    seed: int = 0,
) -> None:
    """Allocate the weights of these stages on a device and initialise them; those of others stay on meta.

    Of weights that are divided over workers only this one's parts are allocated, and one whole weight at a
    time. A weight that several of the stages use becomes one object again, and the model's own modules hold
    the new weights too. Each random operation draws from a stream of (seed, index of the module in the model,
    number of the operation in it), also those on weights that stay on meta, so that the values do not depend
    on the layout.

    Args:
        model: the one that was exported.
        initialise: called with each module, those without real weights included; default: transformers'
            ``_init_weights`` of the nearest model around it, else its ``reset_parameters``. Pass
            ``lambda module: None`` for weights that are then loaded from a checkpoint.

    Raises:
        UsageError: without ``initialise``, a module with weights has neither method.
    """
    held = nn.ModuleList(stage.weights for stage in stages)
    _allocate(held, device)
    _join(stages, model)
    for stage in stages:
        stage.move_graphs(device)
    _initialise(held, model, device, initialise, seed)


def init_whole(model: nn.Module, device: torch.device, *, seed: int = 0) -> None:
    """Allocate a whole model that is on the meta device, with the weights that its stages would get."""
    _allocate(model, device)
    _initialise(model, model, device, None, seed)


def _allocate(held: nn.Module, device: torch.device) -> None:
    replace_tensors(held, lambda old: torch.empty_like(old, device=device) if old.is_meta else None)


def _join(stages: Sequence[StageModule], model: nn.Module) -> None:
    """Give the model's own modules the tensors of the stages."""
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    held: dict[str, Tensor] = {}
    for stage in stages:
        known = stage.parameter_names | stage.buffer_names
        for named in (stage.named_parameters, stage.named_buffers):
            held |= {known[own]: each for own, each in named(remove_duplicate=False) if own in known}
    replace_tensors(model, lambda old: held.get(names[id(old)]))


def _initialise(
    held: nn.Module, model: nn.Module, device: torch.device, initialise: Initialise | None, seed: int
) -> None:
    allocated = {id(tensor) for tensor in (*held.parameters(), *held.buffers())}
    modules = list(model.named_modules())
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        for number, (name, module) in reversed(list(enumerate(modules))):  # children before parents
            with _NumberedDraws(seed, number):
                (initialise or _default(model, name, module, allocated))(module)


class _NumberedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds torch's generators before each random operation inside, by the number of the operation.

    A module that draws for several weights gives each the same values, whichever of the others are on meta,
    where an operation draws nothing.
    """

    def __init__(self, seed: int, module: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._module, self._operation = seed, module, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            key = random_keys(self._seed, Stream.STAGE_WEIGHTS, self._module, self._operation)
            torch.manual_seed(int(key[0]))
            self._operation += 1
            if args and isinstance(args[0], DTensor):
                return _draw_part(func, args[0], *args[1:], **(kwargs or {}))
        if func is torch.ops.aten.select.int and isinstance(args[0], DTensor):
            return _select_part(*args)
        return func(*args, **(kwargs or {}))


def _select_part(part: DTensor, dim: int, index: int) -> Tensor:
    """Return what this worker has of a row, such as that of padding; DTensor would return a copy of it."""
    sizes, offsets = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
    if offsets[dim] <= index < offsets[dim] + sizes[dim]:
        return part.to_local().select(dim, index - offsets[dim])
    return part.to_local().new_empty(0)


def _draw_part(func: Any, part: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Fill this worker's part of a tensor in place with what the operation draws for the whole."""
    local = part.to_local()
    whole = torch.empty(part.shape, dtype=part.dtype, device=local.device)
    func(whole, *args, **kwargs)
    sizes, offsets = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
    local.copy_(whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))])
    return part


def _default(model: nn.Module, name: str, module: nn.Module, allocated: set[int]) -> Initialise:
    parts = name.split(".") if name else []
    for length in range(len(parts), -1, -1):
        around = model.get_submodule(".".join(parts[:length]))
        if callable(getattr(around, "_init_weights", None)):
            return cast(Initialise, around._init_weights)
    if callable(reset := getattr(module, "reset_parameters", None)):
        return lambda each: reset()
    own = [n for n, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    lost = [n for n in own if id(getattr(module, n)) in allocated]
    if lost:
        raise UsageError(
            f"cannot initialise {lost[0]!r} of module {name!r} ({type(module).__name__}): "
            "give it a method reset_parameters, or pass initialise"
        )
    return lambda each: None
