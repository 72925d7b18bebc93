"""Allocates and initialises the stages of a model that was split on the meta device.

Every process builds the whole model on the meta device, splits it, and allocates its own stages only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

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

    A weight that several of the stages use becomes one object again, and the model's own modules hold the new
    weights too. Each module of the model is initialised from a stream of (seed, its index in the model), so
    that the values do not depend on the layout, as long as no cut divides a module that draws for several
    parameters at once.

    Args:
        model: the one that was exported.
        initialise: called with each module, those without real weights included; default: transformers'
            ``_init_weights`` of the nearest model around it, else its ``reset_parameters``. Pass
            ``lambda module: None`` for weights that are then loaded from a checkpoint.

    Raises:
        UsageError: without ``initialise``, a module with weights has neither method.
    """
    held = nn.ModuleList(stage.weights for stage in stages)
    on_meta = {id(t) for t in (*held.parameters(), *held.buffers()) if t.is_meta}
    replace_tensors(
        nn.ModuleList([held, model]),
        lambda old: torch.empty_like(old, device=device) if id(old) in on_meta else None,
    )
    for stage in stages:
        stage.follow_device()
    allocated = {id(tensor) for tensor in (*held.parameters(), *held.buffers())}
    modules = list(model.named_modules())
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        for number, (name, module) in reversed(list(enumerate(modules))):  # children before parents
            torch.manual_seed(int(random_keys(seed, Stream.STAGE_WEIGHTS, number)[0]))
            (initialise or _default(model, name, module, allocated))(module)


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
