"""Measures the norms of the gradients of a model's layers, for lines of the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from shoal.train.gradients import Update
from shoal.train.world import run_on_all


class LayerNorms:
    """Measures the norm of each layer's gradient in the steps that have a line.

    A layer is the part of a model up to the first number in a parameter's name (``encoder.layer.3``), or the
    module that has the parameter.

    Args:
        kept: the state of the run, with its models.
        is_due: returns whether a step has a line.
        control: the workers, which may have different layers.
    """

    def __init__(
        self, kept: Mapping[str, Any], is_due: Callable[[int], bool], control: dist.ProcessGroup | None
    ) -> None:
        self._kept, self._is_due, self._control = kept, is_due, control
        self._layers: dict[str, list[nn.Parameter]] | None = None

    def measure(self, step: int, update: Update) -> dict[str, float]:
        """Return the norms by layer, as they are now; nothing for a step without a line. A collective."""
        if not self._is_due(step):
            return {}
        if self._layers is None:
            own = self._own_layers()
            names = [name for worker in run_on_all(self._control, lambda: list(own)) for name in worker]
            self._layers = {name: own.get(name, []) for name in dict.fromkeys(names)}
        return {name: update.norm_of_gradients(parameters) for name, parameters in self._layers.items()}

    def _own_layers(self) -> dict[str, list[nn.Parameter]]:
        models = {name: each for name, each in self._kept.items() if isinstance(each, nn.Module)}
        layers: dict[str, list[nn.Parameter]] = {}
        for key, model in models.items():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    layer = layer_of(name if len(models) == 1 else f"{key}.{name}")
                    layers.setdefault(layer, []).append(parameter)
        return layers


def layer_of(name: str) -> str:
    """Return the layer of a parameter.

    Example:
        >>> layer_of("encoder.layer.3.attention.weight"), layer_of("head.bias"), layer_of("scale")
        ('encoder.layer.3', 'head', 'scale')
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1]) or name


def before_clipping(norms: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return the norms of layers scaled so that they make up ``whole``, the norm before clipping."""
    total = math.hypot(*norms.values())
    factor = whole / total if total > 0 and math.isfinite(total) and math.isfinite(whole) else 1.0
    return {name: norm * factor for name, norm in norms.items()}
