"""Defines one stage of a split model: a module that communicates with its neighbours only.

A stage holds its parameters and buffers under their original names (below ``weights``) and runs one of two
bodies on them, the training or the evaluation graph, selected by ``stage.train()`` and ``stage.eval()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.fx.node import map_aggregate


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A value of one micro-batch that travels between two stages; always contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """A gradient comes back."""

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class Body:
    """The graph or chain that a stage runs in one mode."""

    run: Callable[..., tuple[Any, ...]]
    """Takes the relayed values, then the root inputs in the order of ``input_names``."""
    input_names: tuple[str, ...]
    relayed_in: tuple[TensorSpec, ...]
    """Empty for the first stage."""
    relayed_out: tuple[TensorSpec, ...]
    """Empty for the last stage."""


class StageModule(nn.Module):
    """A contiguous part of a model.

    ``parameter_names`` and ``buffer_names`` map the names in this module to the canonical ones of the model.
    A parameter that several stages use is one ``nn.Parameter`` object in all of them.
    """

    def __init__(
        self,
        *,
        index: int,
        num_stages: int,
        weights: nn.Module,
        constants: nn.Module,
        bodies: Mapping[bool, Body],
        output_spec: Any,
        device: torch.device,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        weights: parameters and buffers under their canonical names.
        constants: tensors that the model made while it was traced, as buffers that are not saved.
        bodies: the training body under ``True``, the evaluation body under ``False``, unless never run.
        device: where the model was traced.
        aliases: other name of a tied weight -> its canonical name, where ``weights`` has other names.
        """
        super().__init__()
        self.index = index
        self.num_stages = num_stages
        self.weights = weights
        self.constants = constants
        self.output_spec = output_spec
        self._bodies = dict(bodies)
        self._device = device
        self._aliases = dict(aliases or {})

    @property
    def body(self) -> Body:
        """Return the body of the current mode."""
        return self._bodies[self.training]

    @property
    def parameter_names(self) -> dict[str, str]:
        """This module's parameter name -> the canonical name in the model."""
        names = [name for name, _ in self.weights.named_parameters(remove_duplicate=False)]
        return {f"weights.{name}": self._aliases.get(name, name) for name in names}

    @property
    def buffer_names(self) -> dict[str, str]:
        """This module's buffer name -> the canonical name in the model; constants of the graph have none."""
        names = [name for name, _ in self.weights.named_buffers(remove_duplicate=False)]
        return {f"weights.{name}": self._aliases.get(name, name) for name in names}

    def forward(self, *relayed: Tensor, **inputs: Tensor) -> tuple[Any, ...]:
        """Compute the values for the next stage; the last stage returns the model's flattened outputs.

        Args:
            relayed: values as specified by ``body.relayed_in``.
            inputs: root inputs by name; those that the stage does not read are ignored.
        """
        body = self.body
        values = [_contiguous_gradient(value) for value in relayed]
        outputs = body.run(*values, *(inputs[name] for name in body.input_names))
        if self.index == self.num_stages - 1:
            return tuple(outputs)
        return tuple(
            _to_send(value, spec, values) for value, spec in zip(outputs, body.relayed_out, strict=True)
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StageModule:
        """Move or convert as every module does; devices inside the graphs follow."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        tensors = [*self.parameters(), *self.buffers()] or [fn(torch.empty(0, device=self._device))]
        self.move_graphs(tensors[0].device)
        return self

    def move_graphs(self, device: torch.device) -> None:
        """Retarget the graphs, which create masks and positions, to a device; a stage may have no weights."""
        if device != self._device:
            for body in self._bodies.values():
                if isinstance(body.run, nn.Module):
                    retarget(body.run, self._device, device)
            self._device = device


def replace_tensors(root: nn.Module, replace: Callable[[Tensor], Tensor | None]) -> None:
    """Exchange parameters and buffers of a module tree in place.

    Args:
        replace: returns the new tensor, made a parameter where the old one is, or ``None`` to keep the old.
            It is called once per tensor, so that shared tensors stay shared; a parameter is taken as it is.
    """
    known: dict[int, tuple[Tensor, Tensor | None]] = {}
    for module in root.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, old in table.items():
                if old is None:
                    continue
                if id(old) not in known:
                    new = replace(old)
                    if isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter | None):
                        new = nn.Parameter(new, old.requires_grad)
                    known[id(old)] = (old, new)
                if (new := known[id(old)][1]) is not None:
                    table[name] = new


def own_part(tensor: Tensor) -> Tensor:
    """Return this worker's part of a tensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def owner_of(container: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module below ``container`` that holds a dotted name, made if missing, and the last part."""
    *path, field = name.split(".")
    for part in path:
        if part not in container._modules:
            container.add_module(part, nn.Module())
        container = container.get_submodule(part)
    return container, field


class _ContiguousGradient(torch.autograd.Function):
    """The identity with a contiguous gradient, which is sent as it is."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _contiguous_gradient(value: Tensor) -> Tensor:
    if value.requires_grad and torch.is_grad_enabled():
        return cast(Tensor, _ContiguousGradient.apply(value))
    return value


def _to_send(value: Tensor, spec: TensorSpec, received: list[Tensor]) -> Tensor:
    """Return a value as specified: a contiguous tensor that owns its memory."""
    if value.dtype != spec.dtype:  # autocast
        value = value.to(spec.dtype)
    if value._is_view() or any(value is other for other in received):
        value = value.clone(memory_format=torch.contiguous_format)
    value = value.contiguous()
    if spec.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
        # no differentiable ancestor: the returned gradient is discarded
        value = value.detach().requires_grad_()
    return value


def retarget(module: nn.Module, old: torch.device, new: torch.device) -> None:
    """Replace a device in the arguments of all operations, nested graphs included."""

    def exchange(value: Any) -> Any:
        return new if isinstance(value, torch.device) and value.type == old.type else value

    for graph_module in module.modules():
        if isinstance(graph_module, fx.GraphModule):
            for node in graph_module.graph.nodes:
                node.args = map_aggregate(node.args, exchange)
                node.kwargs = map_aggregate(node.kwargs, exchange)
            graph_module.recompile()
