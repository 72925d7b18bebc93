"""A stage's parameters and buffers on its device: moved, or allocated for a model on meta; sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shoal.errors import UsageError
from shoal.pipeline.runner import StageRunner

Initialise = Callable[[str, Tensor], None]
"""Fills a parameter or buffer that was allocated empty; called with its canonical name."""


def put_on(device: torch.device, runners: Iterable[StageRunner], initialise: Initialise | None) -> None:
    """Move what the stages hold to ``device``; what several of them share is moved once and stays shared.

    Raises:
        UsageError: the model is on the meta device and nothing says what its parameters shall be.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for runner in runners:
        stage = runner.stage
        names = {**stage.parameter_names, **stage.buffer_names}
        for path, module in stage.named_modules():
            for table in (module._parameters, module._buffers):
                for own, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in moved:
                        name = names.get(f"{path}.{own}", own)
                        moved[id(tensor)] = (tensor, _on(device, tensor, name, initialise))
                    table[own] = moved[id(tensor)][1]  # type: ignore[assignment]
        stage.follow_device()


def _on(device: torch.device, tensor: Tensor, name: str, initialise: Initialise | None) -> Tensor:
    if tensor.device == device:
        return tensor
    if not tensor.is_meta:
        new = tensor.detach().to(device)
    elif initialise is None:
        raise UsageError(
            f"{name} is on the meta device: give pipeline() initialise=, a function of a name and a tensor "
            "that fills it, or make the model on the cpu"
        )
    else:
        new = torch.empty_like(tensor, device=device, requires_grad=False)
        with torch.no_grad():
            initialise(name, new)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def held(runners: Iterable[StageRunner]) -> tuple[dict[str, nn.Parameter], dict[str, Tensor], set[str]]:
    """Return all stages' parameters and buffers by canonical name, and the buffers that are not saved."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    saved: set[str] = set()
    for runner in runners:
        stage = runner.stage
        for own, parameter in stage.named_parameters(remove_duplicate=False):
            parameters.setdefault(stage.parameter_names.get(own, own), parameter)
        for own, buffer in stage.named_buffers(remove_duplicate=False):
            if own in stage.buffer_names:  # others are constants of the graph
                buffers.setdefault(stage.buffer_names[own], buffer)
        saved |= {stage.buffer_names[own] for own in stage.state_dict() if own in stage.buffer_names}
    return parameters, buffers, set(buffers) - saved


def shard_state(runners: Iterable[StageRunner], mesh: DeviceMesh) -> None:
    """Wrap each stage by FSDP2, with gradients summed over the replicas.

    A parameter that several stages of this rank use stays whole: FSDP2 knows none outside of its module.
    """
    stages = list(runners)
    counts: dict[nn.Parameter, int] = {}
    for runner in stages:
        for parameter in set(runner.parameters()):
            counts[parameter] = counts.get(parameter, 0) + 1
    shared = {parameter for parameter, count in counts.items() if count > 1}
    for runner in stages:
        own = set(runner.parameters())
        if own <= shared:
            continue
        fully_shard(runner, mesh=mesh, ignored_params=shared & own)
        runner.set_gradient_divide_factor(1.0)  # type: ignore[operator]  # fully_shard has changed its class
        runner.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
