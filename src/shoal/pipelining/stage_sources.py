"""Provides the stages of a model: of its exported graph, of modules that the user named, or the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.decide.cost import ModelCost, Unit
from shoal.pipelining.export_graph import alias_names, export_model
from shoal.pipelining.measure_cost import measure_cost
from shoal.pipelining.random_streams import draws, dropout_of_streams
from shoal.pipelining.roofline import DeviceRates, estimate_cost
from shoal.pipelining.split import split
from shoal.pipelining.split_modules import split_by_modules
from shoal.pipelining.stage import Body, StageModule

Batch = Mapping[str, Tensor]

DEFAULT_RATES = DeviceRates(flops_per_s=60e12, bytes_per_s=1.3e12)
"""For devices that a model was not measured on: about the rate of an A100 in matrix products of TF32."""


class Graph:
    """An exported model. ``aliases`` are other names of tied weights -> canonical names.

    Raises:
        UsageError: it cannot be exported; the message has the line and the reason.
    """

    def __init__(self, model: nn.Module, part: Batch, values: Batch) -> None:
        self._model, self._values = model, values
        self._training = export_model(model, part, training=True)
        self._evaluation = export_model(model, part, training=False)
        self.aliases = self._training.aliases
        self._whole: StageModule | None = None

    def cost(self, device: torch.device) -> ModelCost:
        """Measure the units if the model is on the device or on meta; a model on another device, or too large
        for this one, is estimated with the rates of a usual GPU."""
        if self._training.device.type == device.type:
            return measure_cost(self._training)
        if self._training.device.type == "meta" and not any(v.is_meta for v in self._values.values()):
            values = {name: value.to(device) for name, value in self._values.items()}
            with suppress(torch.OutOfMemoryError):
                return measure_cost(self._training, stand_in=values)
        return estimate_cost(self._training, DEFAULT_RATES)

    def stages(self, cuts: Sequence[int]) -> list[StageModule]:
        """Return its stages, which begin at the units ``cuts`` and at the first."""
        return split(self._training, cuts, evaluation=self._evaluation)

    def unsplit(self, part: Batch) -> Any:
        """Run the model itself, or, if it draws random numbers, its graph, which draws them from streams."""
        graphs = [each for each in self._training.module.modules() if isinstance(each, torch.fx.GraphModule)]
        if not any(draws(node) for graph in graphs for node in graph.graph.nodes):
            return self._model(**part)
        if self._whole is None:
            (self._whole,) = split(self._training, [])
        return self._training.unflatten(self._whole(**part))


class Named:
    """A model whose stages are lists of module names given by the user.

    It has one unit per stage. Their times are unknown and count as equal.

    Raises:
        UsageError: the modules are not a chain that computes the model.
    """

    def __init__(self, model: nn.Module, part: Batch, modules: Sequence[Sequence[str]]) -> None:
        self._stages = split_by_modules(model, modules, part)
        (self._whole,) = split_by_modules(model, [[name for stage in modules for name in stage]], part)
        self.aliases = alias_names(model)

    def cost(self, device: torch.device) -> ModelCost:
        return _equal_cost(self._stages)

    def stages(self, cuts: Sequence[int]) -> list[StageModule]:
        return self._stages

    def unsplit(self, part: Batch) -> Any:
        whole = self._whole.train()
        return pytree.tree_unflatten(list(whole(**part)), whole.output_spec)


class Whole:
    """A model that one stage runs as it is: nothing is exported, and its own ``compile`` serves it.

    Its dropout draws the numbers of the stages of :class:`Graph`; nothing else in it may be random. Weights
    and mode of the stage are those of the model.
    """

    def __init__(self, model: nn.Module, part: Batch) -> None:
        self._model, self._names = model, tuple(part)
        self._device = next(model.parameters()).device
        self.aliases = alias_names(model)

    def cost(self, device: torch.device) -> ModelCost:
        return _equal_cost(self.stages(()))

    def stages(self, cuts: Sequence[int]) -> list[StageModule]:
        body = Body(run=self._run, input_names=self._names, relayed_in=(), relayed_out=())
        stage = StageModule(
            index=0,
            num_stages=1,
            weights=self._model,
            constants=nn.Module(),
            bodies={True: body, False: body},
            output_spec=pytree.tree_structure(None),
            device=self._device,
            aliases=self.aliases,
        )
        return [stage]

    def _run(self, *inputs: Tensor) -> tuple[Any]:
        return (self.unsplit(dict(zip(self._names, inputs, strict=True))),)

    def unsplit(self, part: Batch) -> Any:
        device = next(iter(part.values())).device
        with dropout_of_streams(device):
            return self._model(**part)


def _equal_cost(stages: Sequence[StageModule]) -> ModelCost:
    """Return one unit per stage, of equal times."""
    units = tuple(
        Unit(
            name=f"stage {stage.index}",
            forward_s=1e-3,
            backward_s=2e-3,
            parameters=tuple(
                (stage.parameter_names.get(own, own), parameter.nbytes)
                for own, parameter in stage.named_parameters()
            ),
        )
        for stage in stages
    )
    relays = (sum(spec.num_bytes for spec in stage.body.relayed_out) for stage in stages[:-1])
    return ModelCost(units=units, relay_bytes=tuple(relays), source="roofline")


Source = Graph | Named | Whole
"""A model that can be split."""
