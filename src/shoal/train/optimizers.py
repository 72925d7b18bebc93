"""Builds the optimizers that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer

from shoal.optim.lamb import parameter_groups
from shoal.optim.lr_schedules import RATE_KEY, set_learning_rate
from shoal.optim.moments import check_options
from shoal.optim.muon import Muon as ShardedMuon
from shoal.train.optim_config import OptimizerConfig, VisionOptimizerConfig


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    learning_rate: float = 0.0,
) -> Optimizer:
    """Return an optimizer over the parameters that require a gradient.

    Biases and norms have no weight decay and, with LAMB and LARS, no trust ratio. ``lars_form`` ``paper``
    treats all parameters the same. Clipping is not part of the optimizer.

    Args:
        named_parameters: those of ``model.named_parameters()``.
        config: name and options of the optimizer.
        learning_rate: the initial one; the loop sets that of each step (:func:`set_learning_rate`).

    Raises:
        UsageError: an option is out of range.
    """
    options = config.options()
    check_options({**options, "weight_decay": config.weight_decay})  # torch's raise ValueError
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    groups = parameter_groups(trained, config.weight_decay)
    if options.get("lars_form") == "paper":
        groups = [{**group, "weight_decay": config.weight_decay, "trust_ratio": True} for group in groups]
    if isinstance(config, VisionOptimizerConfig) and config.bias_rate != 1.0:
        biases = {parameter for name, parameter in trained if name.rpartition(".")[2] == "bias"}
        groups = _with_rate_of(biases, config.bias_rate, groups)
    if config.optimizer not in ("lamb", "lars"):
        groups = [{key: value for key, value in g.items() if key != "trust_ratio"} for g in groups]
    optimizer = _made(config.optimizer, groups, options)
    set_learning_rate(optimizer, learning_rate)
    return optimizer


def build_optimizers(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    matrices: Collection[str],
) -> dict[str, Optimizer]:
    """Return what updates a model, by the names of checkpoints: one optimizer, or AdamW and Muon.

    Muon (https://kellerjordan.github.io/posts/muon) updates matrices of hidden layers, and AdamW all others.
    Its steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2), so both have
    one learning rate and one weight decay.

    Args:
        named_parameters: those of ``model.named_parameters()``.
        config: name and options of the optimizer.
        matrices: names of the two-dimensional parameters that Muon updates, where it is chosen.

    Raises:
        UsageError: an option is out of range.
    """
    if config.optimizer != "muon":
        return {"optimizer": build_optimizer(named_parameters, config)}
    options, decay = config.options(), config.weight_decay
    momentum = options.pop("muon_momentum")
    check_options({**options, "momentum": momentum, "weight_decay": decay})
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    chosen = [parameter for name, parameter in trained if name in matrices]
    groups = parameter_groups([each for each in trained if each[0] not in matrices], decay)
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
    kind = ShardedMuon if any(isinstance(parameter, DTensor) for parameter in chosen) else Muon
    muon = kind(chosen, lr=0.0, weight_decay=decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
    return {"optimizer": _made("adamw", groups, options), "muon": muon}


def _with_rate_of(
    biases: set[nn.Parameter], rate: float, groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Split each group into ``biases``, with the relative learning rate ``rate``, and other parameters."""
    divided = []
    for group in groups:
        for inside, extra in ((False, {}), (True, {RATE_KEY: rate})):
            params = [parameter for parameter in group["params"] if (parameter in biases) == inside]
            divided.append({**group, **extra, "params": params})
    return [group for group in divided if group["params"]] or groups


def _shards_apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split groups that have shards beside whole tensors, which torch's fused kernels do not take together.

    A weight that stages share is whole on each of them, beside the shards of the others.
    """
    divided = []
    for group in groups:
        kinds: dict[bool, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        divided += [{**group, "params": params} for params in kinds.values()]
    return divided or groups


_CLASSES = {
    "adafactor": "shoal.optim.adafactor:Adafactor",
    "adamw": "torch.optim:AdamW",
    "lamb": "shoal.optim.lamb:Lamb",
    "lans": "shoal.optim.lans:Lans",
    "lars": "shoal.optim.lars:Lars",
    "novograd": "shoal.optim.novograd:Novograd",
    "sgd": "torch.optim:SGD",
}
"""Module and class of each optimizer; only the chosen one is imported."""


def _made(name: str, groups: list[dict[str, Any]], options: dict[str, Any]) -> Optimizer:
    """Return the optimizer with these options of :class:`OptimizerConfig` and a learning rate of 0."""
    module, _, kind = _CLASSES[name].partition(":")
    make: Callable[..., Optimizer] = getattr(import_module(module), kind)
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    if name == "adamw":
        options["fused"] = True
        groups = _shards_apart(groups)
    elif name == "sgd":
        options["nesterov"] &= options["momentum"] > 0  # torch refuses it without momentum
        whole = not any(isinstance(p, DTensor) for group in groups for p in group["params"])
        options["fused"] = whole  # torch's fused SGD does not take shards
    elif name == "lars":
        options["eta"] = options.pop("trust_coefficient")
        options["form"] = "larc" if options.pop("lars_form") == "larc" else "lars"
    return make(groups, lr=0.0, **options)
