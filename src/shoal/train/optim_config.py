"""Defines the settings of optimizers and of their schedules. Importing it does not import torch.

Each optimizer has a class with the options that only some optimizers have. The settings of a recipe inherit
those of the optimizers that it offers; they are ``None`` unless given.
"""

# No postponed annotations: the command line would resolve them in the module of the subclass.

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from shoal.errors import UsageError
from shoal.optim.lr_schedules import LRSchedule
from shoal.train.config import ServersConfig, check_clip, check_delayed_momentum, check_normalised


def _option(default: Any) -> Any:
    """Return a field of an optimizer's options with this default for the optimizer."""
    return field(default=None, metadata={"optimizer_default": default})


@dataclass(frozen=True, kw_only=True)
class MomentOptions:
    """Options of LANS and AdamW."""

    beta1: float | None = _option(0.9)
    """Decay of the first moment; default: 0.9."""
    beta2: float | None = _option(0.999)
    """Decay of the second moment; default: 0.999."""
    eps: float | None = _option(1e-6)
    """Added to the root of the second moment; default: 1e-6."""


@dataclass(frozen=True, kw_only=True)
class LambOptions(MomentOptions):
    """Options of LAMB."""

    bias_correction: bool | None = _option(True)
    """Bias correction of the moments; default: yes. The original ALBERT and NovoGrad's paper have none."""


@dataclass(frozen=True, kw_only=True)
class NovogradOptions(LambOptions):
    """Options of NovoGrad."""

    beta2: float | None = _option(0.25)
    """Decay of the second moment; default: 0.999, of NovoGrad 0.25."""
    eps: float | None = _option(1e-7)
    """Added to the root of the second moment; default: 1e-6, of NovoGrad 1e-7."""
    reg_inside_moment: bool | None = _option(True)
    """Normalize and decay the gradient before the momentum, not after it; default: yes."""
    grad_averaging: bool | None = _option(False)
    """Multiply gradients by 1 - beta1 in the momentum; default: no."""
    init_zero: bool | None = _option(False)
    """Initialize squared norms to 0 instead of those of the first step; default: no."""


@dataclass(frozen=True, kw_only=True)
class SgdOptions:
    """Options of SGD."""

    momentum: float | None = _option(0.9)
    """Decay of the momentum; default: 0.9."""
    nesterov: bool | None = _option(True)
    """Nesterov's momentum; default: with sgd, not with lars."""


@dataclass(frozen=True, kw_only=True)
class LarsOptions(SgdOptions):
    """Options of LARS."""

    nesterov: bool | None = _option(False)
    """Nesterov's momentum; default: with sgd, not with lars."""
    trust_coefficient: float | None = _option(1e-3)
    """Norm of an update relative to that of the weight; default: 0.001 (0.013 in AWS's clip form)."""
    lars_form: Literal["mlperf", "paper", "larc"] | None = _option("mlperf")
    """mlperf (default): plain momentum for biases and norms; paper: trust ratio and decay for them too; larc:
    as mlperf, with the trust ratio clipped to at most 1."""


@dataclass(frozen=True, kw_only=True)
class AdafactorOptions:
    """Options of Adafactor: it has none of its own."""


@dataclass(frozen=True, kw_only=True)
class MuonOptions(MomentOptions):
    """Options of Muon, and of the AdamW beside it."""

    muon_momentum: float | None = _option(0.95)
    """Nesterov's momentum of the matrices that Muon updates; default: 0.95."""


OPTIMIZERS: Mapping[str, type[Any]] = {
    "lamb": LambOptions,
    "lans": MomentOptions,
    "adamw": MomentOptions,
    "adafactor": AdafactorOptions,
    "muon": MuonOptions,
    "sgd": SgdOptions,
    "lars": LarsOptions,
    "novograd": NovogradOptions,
}
"""The options of each optimizer."""


def defaults_of(optimizer: str) -> dict[str, Any]:
    """Return the options that are specific to an optimizer, with their defaults."""
    return {option.name: option.metadata["optimizer_default"] for option in fields(OPTIMIZERS[optimizer])}


def owners_of(option: str, config: type[Any]) -> list[str]:
    """Return the optimizers among those that the settings ``config`` offer that have an option."""
    return [name for name in get_args(get_type_hints(config)["optimizer"]) if option in defaults_of(name)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer; a subclass names those that a recipe offers, and inherits their options.

    Raises:
        UsageError: an option is set that the optimizer does not have.
    """

    optimizer: str
    """Name of the optimizer."""
    weight_decay: float = 0.01
    """Weight decay; biases and norms have none."""
    max_grad_norm: float | None = None
    """Clip gradients to this norm; default: no."""
    clip: Literal["global", "worker"] = "global"
    """Clip the averaged gradient, or each worker's own before averaging."""

    def __post_init__(self) -> None:
        own = defaults_of(self.optimizer)
        for option in fields(self):
            value = getattr(self, option.name)
            if "optimizer_default" in option.metadata and value is not None and option.name not in own:
                owners = " or ".join(owners_of(option.name, type(self)))
                raise UsageError(
                    f"optim.{option.name} {value} is not an option of {self.optimizer}: leave it out or "
                    f"choose --optim.optimizer {owners}"
                )

    def options(self) -> dict[str, Any]:
        """Return the options that are specific to the chosen optimizer, with defaults filled in."""
        own = defaults_of(self.optimizer)
        values = {name: getattr(self, name) for name in own}
        return own | {name: value for name, value in values.items() if value is not None}


def check_served(optim: OptimizerConfig, servers: ServersConfig) -> None:
    """Check that servers can take the steps of a recipe's optimizer, before anything starts.

    Raises:
        UsageError: they cannot: clipping per worker, clipping of gradients that are normalised, or momentum
            of steps that do not wait.
    """
    if not servers.option:
        return
    check_clip(servers, per_worker=optim.clip == "worker")
    if servers.mode == "local":  # each worker steps by itself
        return
    if optim.optimizer == "lans":
        check_normalised(f"{servers.option} with optim.max_grad_norm", optim.max_grad_norm)
    own = optim.options()
    option = "momentum" if "momentum" in own else "beta1"
    check_delayed_momentum(servers, f"optim.{option} {own.get(option)}", own.get(option) or 0.0)


@dataclass(frozen=True, kw_only=True)
class TextOptimizerConfig(LambOptions, MomentOptions, AdafactorOptions, OptimizerConfig):
    """The optimizer of a text recipe."""

    optimizer: Literal["lamb", "lans", "adamw", "adafactor"] = "lamb"
    """LAMB or LANS for large batches, torch's AdamW, or T5's Adafactor."""
    max_grad_norm: float | None = 1.0
    """Clip gradients to this norm; --optim.max-grad-norm none: do not clip."""


@dataclass(frozen=True, kw_only=True)
class VisionOptimizerConfig(
    LarsOptions, SgdOptions, NovogradOptions, LambOptions, MomentOptions, OptimizerConfig
):
    """The optimizer of an image recipe."""

    optimizer: Literal["sgd", "lars", "novograd", "lamb", "adamw"] = "sgd"
    """torch's SGD with momentum; LARS, NovoGrad or LAMB for large batches; torch's AdamW."""
    weight_decay: float = 1e-4
    """Weight decay; biases and norms have none."""
    bias_rate: float = 1.0
    """Learning rate of biases as a multiple of that of other parameters (2 in Mask R-CNN)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.bias_rate < math.inf:
            raise UsageError(f"optim.bias_rate {self.bias_rate} must be a number of at least 0")


# ---- schedules ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Learning rates of a run or of a phase; durations in optimizer steps."""

    learning_rate: float = 1.76e-3
    """Learning rate at the end of the warm-up."""
    end_learning_rate: float = 0.0
    """Learning rate after the last step."""
    warmup_steps: int = 3_125
    """Steps of linear warm-up from 0."""
    constant_steps: int = 0
    """Steps at the learning rate between warm-up and decay."""


@dataclass(frozen=True, kw_only=True)
class DecayConfig:
    """The form of a polynomial decay."""

    power: float = 1.0
    """Power of the polynomial decay."""
    decay_from: Literal["warmup", "start"] = "warmup"
    """Count the decay from the end of warm-up and constant rate, or from step 0 (Google's ALBERT, NVIDIA's
    BERT; the rate drops after warm-up)."""


@dataclass(frozen=True, kw_only=True)
class PhasesOptimConfig(DecayConfig, TextOptimizerConfig):
    """The optimizer, and the form of the schedules of several phases."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Rates, PhasesOptimConfig):
    """The optimizer and its schedule, in optimizer steps."""


def schedule_of(rates: Rates, optim: DecayConfig, total_steps: int) -> LRSchedule:
    """Return the learning-rate schedule of the settings."""
    return LRSchedule(
        base=rates.learning_rate,
        end=rates.end_learning_rate,
        warmup_steps=rates.warmup_steps,
        constant_steps=rates.constant_steps,
        total_steps=total_steps,
        power=optim.power,
        decay_from=optim.decay_from,
    )


def check_rates(section: str, settings: Any) -> None:
    """Raise a :class:`UsageError` that names the setting if one of a section's schedule is below 0."""
    for name in (setting.name for setting in fields(settings)):
        value = getattr(settings, name)
        if name.endswith(("learning_rate", "power")) and value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{section}.{name} {value} must be a number of at least 0")


def check_warmup(section: str, warmup_steps: int, steps_section: str, total_steps: int) -> None:
    """Raise a :class:`UsageError` if the warm-up is negative or longer than the training."""
    if not 0 <= warmup_steps <= total_steps:
        raise UsageError(
            f"{section}.warmup_steps {warmup_steps} must lie between 0 and {steps_section}.total_steps "
            f"{total_steps}: set --{section}.warmup-steps too"
        )
