"""A model's parameters without the model: in one process, in stages, sharded; with gradients made up.

Gradients are noise plus a tenth of the weights, so that each worker makes its part of them and a wrong weight
shows in all later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from shoal.optim.adafactor import Adafactor
from shoal.optim.lamb import Lamb
from shoal.optim.lans import Lans
from shoal.optim.lars import Lars
from shoal.optim.moments import local_box
from shoal.optim.novograd import Novograd
from shoal.train.optim_config import VisionOptimizerConfig
from shoal.train.optimizers import build_optimizer

# neither size of the first two divides by 2; of one row the second shard is empty
SHAPES = {
    "shared.weight": (17, 12),
    "first.weight": (9, 12),
    "first.bias": (9,),
    "second.weight": (12, 15),
    "second.scale": (1,),
    "second.filters": (3, 10, 11),
}
ALIASES = {"decoder.weight": "shared.weight"}
"""The tied weight's other name; the first and the last stage use it."""

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], Optimizer]


def without_ratio(make: Callable[..., Optimizer]) -> MakeOptimizer:
    return lambda groups: make(
        [{key: group[key] for key in group if key != "trust_ratio"} for group in groups], lr=0.05
    )


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "lamb": partial(Lamb, lr=0.05),
    "lans": without_ratio(Lans),
    "lars": partial(Lars, lr=0.5, eta=0.1),
    "larc": partial(Lars, lr=0.1, eta=0.05, form="larc", nesterov=True),
    "novograd": without_ratio(partial(Novograd, bias_correction=True)),
    "novograd, decay outside": without_ratio(partial(Novograd, reg_inside_moment=False, init_zero=True)),
    "sgd": lambda groups: build_optimizer(
        [("weight", p) for group in groups for p in group["params"]], VisionOptimizerConfig(), 0.05
    ),
    "adafactor": without_ratio(Adafactor),
    "adafactor, factored": without_ratio(partial(Adafactor, min_factored_size=9)),
    "adamw": without_ratio(torch.optim.AdamW),
    "adamw, fused": without_ratio(partial(torch.optim.AdamW, fused=True)),
}


def make_parameters(names: Iterable[str]) -> dict[str, nn.Parameter]:
    parameters = {}
    for name in names:
        generator = torch.Generator().manual_seed(list(SHAPES).index(name))
        parameters[name] = nn.Parameter(torch.randn(SHAPES[name], generator=generator) * 0.5)
    return parameters


def set_gradient(name: str, parameter: nn.Parameter, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 * step + list(SHAPES).index(name))
    noise = torch.randn(SHAPES[name], generator=generator) * scale
    if isinstance(parameter, DTensor):
        noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.grad = noise + 0.1 * parameter.detach()


def check_parts(named: Mapping[str, nn.Parameter], alone: Mapping[str, nn.Parameter]) -> None:
    """Compare what this worker holds with the whole model in one process: 1e-6 of a tensor's largest weight,
    before training or after (the one scale crosses 0)."""
    before = make_parameters(alone)
    for name, parameter in named.items():
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        expected = alone[name][local_box(parameter)]
        assert mine.shape == expected.shape
        if mine.numel():
            largest = max(float(p.detach().abs().max()) for p in (before[name], alone[name]))
            difference = float((mine - expected).detach().abs().max())
            assert difference <= 1e-6 * largest, (name, difference, largest)
