"""Defines the settings that recipes share. Importing it does not import torch.

Defaults are here, presets in the TOML files of a recipe. Command-line options are named ``--section.field``.
"""

# No postponed annotations: the command line would resolve them in the module of the subclass.

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from cyclopts import Group

from shoal.decide.batch import MicroBatch
from shoal.env.machine import num_gpus
from shoal.errors import UsageError, require_positive
from shoal.optim.lr_schedules import Schedule

T = TypeVar("T")

REQUIRED = Group("Required", sort_key=0)
"""Options without which a recipe does not start; the first group of ``--help``."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Settings of the training loop that do not depend on the data."""

    seed: int = 42
    """Seed of the initial weights, the data order, masking and dropout."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast type; auto: bf16 on GPUs that have it, fp16 on others (where it cannot be used, fp32), fp32 on
    CPUs."""
    loss_scale: float | None = None
    """Static loss scale for fp16; default: dynamic."""
    compile: bool | None = None
    """Compile the model with torch.compile; default: on GPUs, if there is a C compiler."""
    max_nonfinite_steps: int = 5
    """Stop after this many consecutive steps whose loss is not finite."""

    def __post_init__(self) -> None:
        require_positive("train", self, "max_nonfinite_steps")
        require_positive("train", self, "total_steps", "global_batch_size", "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Settings of a loop with one batch size and one schedule."""

    total_steps: int = 125_000
    """Optimizer steps of the whole run."""
    global_batch_size: int = 4_096
    """Sequences in one optimizer step, over all workers."""
    micro_batch_size: MicroBatch | None = None
    """Sequences per forward pass of a worker; default: the largest divisor of its share up to 64; auto: the
    largest that fits into memory."""


OPTIMIZER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "lamb": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "bias_correction": True},
    "lans": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6},
    "adamw": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6},
    "adafactor": {},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "lars": {"momentum": 0.9, "nesterov": False, "trust_coefficient": 1e-3, "lars_form": "mlperf"},
    "novograd": {
        "beta1": 0.9,
        "beta2": 0.25,
        "eps": 1e-7,
        "bias_correction": True,
        "reg_inside_moment": True,
        "grad_averaging": False,
        "init_zero": False,
    },
}
"""The options that only some optimizers have, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer.

    Options that only some optimizers have are ``None`` by default; :meth:`options` resolves them.

    Raises:
        UsageError: an option is set that the optimizer does not have.
    """

    optimizer: Literal["lamb", "lans", "adamw", "adafactor"] = "lamb"
    """LAMB or LANS for large batches, torch's AdamW, or T5's Adafactor."""
    weight_decay: float = 0.01
    """Weight decay; biases and norms have none."""
    beta1: float | None = None
    """Decay of the first moment (not of Adafactor, SGD, LARS); default: 0.9."""
    beta2: float | None = None
    """Decay of the second moment (likewise); default: 0.999, of NovoGrad 0.25."""
    eps: float | None = None
    """Added to the root of the second moment (likewise); default: 1e-6, of NovoGrad 1e-7."""
    bias_correction: bool | None = None
    """Bias correction of the moments (LAMB, NovoGrad); default: yes. The original ALBERT and NovoGrad's paper
    have none."""
    max_grad_norm: float | None = 1.0
    """Clip gradients to this norm; --optim.max-grad-norm none: do not clip."""
    clip: Literal["global", "worker"] = "global"
    """Clip the averaged gradient, or each worker's own before averaging."""

    def __post_init__(self) -> None:
        own = OPTIMIZER_OPTIONS[self.optimizer]
        for name in dict.fromkeys(name for options in OPTIMIZER_OPTIONS.values() for name in options):
            value = getattr(self, name, None)
            if value is not None and name not in own:
                choices = get_args(get_type_hints(type(self))["optimizer"])
                owners = [choice for choice in choices if name in OPTIMIZER_OPTIONS[choice]]
                raise UsageError(
                    f"optim.{name} {value} is not an option of {self.optimizer}: leave it out or choose "
                    f"--optim.optimizer {' or '.join(owners)}"
                )

    def options(self) -> dict[str, Any]:
        """Return the options that are specific to the chosen optimizer, with defaults filled in."""
        defaults = OPTIMIZER_OPTIONS[self.optimizer]
        given = {name: getattr(self, name, None) for name in defaults}
        return {name: value if given[name] is None else given[name] for name, value in defaults.items()}


@dataclass(frozen=True, kw_only=True)
class VisionOptimizerConfig(OptimizerConfig):
    """The optimizer of an image recipe, with SGD, LARS and NovoGrad."""

    optimizer: Literal["sgd", "lars", "novograd", "lamb", "adamw"] = "sgd"  # type: ignore[assignment]
    """torch's SGD with momentum; LARS, NovoGrad or LAMB for large batches; torch's AdamW."""
    weight_decay: float = 1e-4
    """Weight decay; biases and norms have none."""
    bias_rate: float = 1.0
    """Learning rate of biases as a multiple of that of other parameters (2 in Mask R-CNN)."""
    momentum: float | None = None
    """Decay of the momentum (sgd, lars); default: 0.9."""
    nesterov: bool | None = None
    """Nesterov's momentum; default: with sgd, not with lars."""
    trust_coefficient: float | None = None
    """LARS: norm of an update relative to that of the weight; default: 0.001 (0.013 in AWS's clip form)."""
    lars_form: Literal["mlperf", "paper", "larc"] | None = None
    """mlperf (default): plain momentum for biases and norms; paper: trust ratio and decay for them too; larc:
    as mlperf, with the trust ratio clipped to at most 1."""
    reg_inside_moment: bool | None = None
    """NovoGrad: normalize and decay the gradient before the momentum, not after it; default: yes."""
    grad_averaging: bool | None = None
    """NovoGrad: multiply gradients by 1 - beta1 in the momentum; default: no."""
    init_zero: bool | None = None
    """NovoGrad: initialize squared norms to 0 instead of those of the first step; default: no."""
    max_grad_norm: float | None = None
    """Clip gradients to this norm; default: no."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.bias_rate < math.inf:
            raise UsageError(f"optim.bias_rate {self.bias_rate} must be a number of at least 0")


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
class PhasesOptimConfig(DecayConfig, OptimizerConfig):
    """The optimizer, and the form of the schedules of several phases."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Rates, PhasesOptimConfig):
    """The optimizer and its schedule, in optimizer steps."""


@dataclass(frozen=True, kw_only=True)
class RunOutputConfig:
    """Run directory, and frequencies of lines and checkpoints."""

    name: str | None = None
    """Name in reports; default: recipe and preset."""
    dir: Path | None = None
    """Run directory; default: runs/NAME. The same directory continues the run."""
    log_frequency: int = 50
    """Steps between log lines; if the output is not a terminal, it shows one every 15 s."""
    checkpoint_frequency: int = 5_000
    """Steps between checkpoints."""
    keep_checkpoints: int = 3
    """Number of most recent checkpoints to keep."""
    save: bool = True
    """Write checkpoints, and the trained model at the end; a run without them cannot be resumed."""
    until: str | None = None
    """End the run at the first evaluation that meets all conditions, such as
    'box_AP>=0.377,mask_AP>=0.339'."""
    validation_beside: int = 0
    """Processes on the first worker's host that evaluate during training; 0: training stops for
    evaluations."""
    evaluate: Path | None = None
    """Do not train; evaluate this checkpoint of a run with the same settings, and write scores to run.dir."""
    mlperf_log: Path | None = None
    """File to which MLPerf training log lines (:::MLLOG) are appended."""

    def __post_init__(self) -> None:
        require_positive("run", self, "log_frequency", "checkpoint_frequency", "keep_checkpoints")
        require_positive("run", self, "validation_samples", "evaluation_batch_size")
        require_positive("run", self, "validation_frequency", "validation_beside", least=0)
        if self.validation_beside and not self.save:
            raise UsageError("run.validation_beside needs weights on disk: leave --run.no-save out")
        if self.until is not None and not getattr(self, "validation_frequency", 1):
            raise UsageError(f"run.until {self.until!r} needs evaluations: set --run.validation-frequency N")


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunOutputConfig):
    """Run directory and frequencies, with evaluation by steps."""

    validation_frequency: int = 2_000
    """Steps between evaluations on held-out data; 0: only at the end."""
    validation_samples: int = 2_048
    """Maximum number of held-out sequences per evaluation."""


_STEP_OPTIONS = ("local_steps", "asynchronous", "wait_for", "staleness", "update")
"""Options of :class:`DistributedConfig` that have steps taken elsewhere than on every worker."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Devices of workers and communication between them."""

    backend: str | None = None
    """torch.distributed backend; default: nccl on GPUs, shoal if there are helper hosts, else gloo."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: one GPU per worker if there are enough, else the CPU."""
    timeout_s: float = 600.0
    """Timeout of collectives in seconds."""
    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of fp32 gradients on the network: bf16 halves the bytes; int8 (blocks with error feedback, CPU
    only) sends a quarter."""
    shares: str = "equal"
    """Division of the global batch among workers: equal; by-speed: proportional to the measured speed of
    each; or the directory of a run, whose shares are repeated."""
    update: Literal["workers", "servers"] = "workers"
    """Processes that run the optimizer: all workers, or the servers of backend shoal, which then keep its
    state (on CPUs of at least two hosts)."""
    replicas: int = 1
    """Copies of weights on servers; with 2, workers keep a copy of the helper hosts' weights, and the loss of
    a helper does not change the result."""
    wait_for: int | None = None
    """Number of gradients with which servers take a step; later ones are late. Default: all workers."""
    late: Literal["drop", "next"] = "drop"
    """With wait-for or quorum: drop late gradients, or add them to the next step."""
    staleness: int | None = None
    """Let workers continue with weights on servers that lack up to this number of steps. With late next:
    maximum staleness of a late gradient, default 1."""
    grace_s: float = 0.0
    """With wait-for or quorum: seconds that a step with enough gradients waits for the others."""
    asynchronous: bool = False
    """Apply each worker's gradient on arrival, with any staleness; the optimizer must have no momentum
    (--optim.beta1 0)."""
    compensation: float = 0.0
    """With asynchronous: strength of the correction for weights that changed since the gradient (DC-ASGD)."""
    extrapolation: float = 0.0
    """With staleness alone: compute gradients at extrapolated weights, moved on by this multiple of the last
    step for each step that they lack."""
    local_steps: int | None = None
    """Let each worker take this number of steps on its own between averages (DiLoCo; backend shoal)."""
    local_fragments: int = 1
    """With local-steps: number of parts of the model, each averaged at its own time within the steps; the
    largest average has about 1/N of the bytes."""
    local_delay: int = 0
    """With local-steps: steps that workers take while an average is under way."""
    local_mix: float = 0.5
    """With local-delay: part of a worker's own weights that it keeps when it merges an average."""
    quorum: int | None = None
    """With local-steps: number of workers with which an average is made; late and grace-s apply to the
    others. Default: all."""
    outer_rate: float = 0.7
    """With local-steps: learning rate of the outer optimizer; 1 with momentum 0 averages the weights."""
    outer_momentum: float = 0.9
    """With local-steps: Nesterov momentum of the outer optimizer."""
    bucket_mb: float | None = None
    """Size of DistributedDataParallel's buckets in MiB; default: 25, larger from about 100 workers on."""

    def __post_init__(self) -> None:
        require_positive("distributed", self, "wait_for", "local_steps", "local_fragments", "quorum")
        require_positive("distributed", self, "local_delay", "local_mix", least=0)
        require_positive("distributed", self, "outer_rate", least=0)
        require_positive("distributed", self, "outer_momentum", least=0, below=1)
        require_positive("distributed", self, "staleness", "grace_s", least=0)
        if self.replicas not in (1, 2) or (self.replicas == 2 and not self.step_option):
            raise UsageError(
                f"distributed.replicas {self.replicas}: weights on servers are kept once or twice; give 1, "
                "or 2 with --distributed.update servers, wait-for, staleness or local-steps"
            )
        if (self.local_fragments, self.local_delay) != (1, 0):
            given = f"local_fragments {self.local_fragments} and local_delay {self.local_delay}"
            if self.local_steps is None:
                raise UsageError(
                    f"distributed.{given} are for workers that step by themselves; set "
                    "--distributed.local-steps too"
                )
            if self.quorum is not None:
                raise UsageError(
                    f"distributed.quorum {self.quorum} with {given}: fragments are exchanged by all workers; "
                    "leave one of them out"
                )
        if self.quorum is not None and self.local_steps is None:
            raise UsageError(
                f"distributed.quorum {self.quorum} is for workers that step by themselves; set "
                "--distributed.local-steps too, or use --distributed.wait-for"
            )
        if self.wait_for is None and self.quorum is None and self.late != "drop":
            raise UsageError(
                "distributed.late next: no gradient is late where steps wait for all workers; set "
                "--distributed.wait-for too, or with local steps --distributed.quorum"
            )
        if self.wait_for is None and self.quorum is None and self.grace_s:
            raise UsageError(
                f"distributed.grace_s {self.grace_s}: steps wait for all workers in any case; set "
                "--distributed.wait-for too, or with local steps --distributed.quorum"
            )
        if self.staleness == 0:
            raise UsageError(
                "distributed.staleness 0: each step would wait for all workers; give at least 1, or leave it "
                "out (--distributed.update servers has servers take such steps)"
            )
        if self.wait_for is not None and self.staleness is not None and self.late == "drop":
            raise UsageError(
                f"distributed.wait_for {self.wait_for} with staleness {self.staleness}: gradients that are "
                "dropped have none; set --distributed.late next, or leave one of them out"
            )
        if self.asynchronous and not (self.wait_for is None is self.staleness):
            raise UsageError(
                "distributed.asynchronous with wait_for or staleness: asynchronous steps wait for nobody; "
                "leave one of them out"
            )
        require_positive("distributed", self, "compensation", "extrapolation", least=0)
        if self.extrapolation and not (self.wait_for is None and self.staleness):
            raise UsageError(
                f"distributed.extrapolation {self.extrapolation} is for workers that go on with stale "
                "weights; set --distributed.staleness, without wait-for"
            )
        if self.compensation and not self.asynchronous:
            raise UsageError(
                f"distributed.compensation {self.compensation} is for asynchronous steps; set "
                "--distributed.asynchronous too"
            )
        if self.local_steps is not None:
            for name in _STEP_OPTIONS[1:]:
                if (value := getattr(self, name)) not in (None, False, "workers"):
                    raise UsageError(
                        f"distributed.local_steps {self.local_steps} with {name} {value}: each worker "
                        "steps by itself; leave one of them out"
                    )
        if not self.is_loose:
            return
        if self.wire != "fp32":
            raise UsageError(
                f"{self.step_option} with distributed.wire {self.wire}: gradients go to the servers in fp32; "
                "use --distributed.wire fp32"
            )
        if self.shares != "equal":
            raise UsageError(
                f"{self.step_option} with distributed.shares {self.shares}: workers that do not wait for "
                "each other have equal parts; leave one of them out"
            )

    @property
    def is_loose(self) -> bool:
        """True if workers step without agreeing before each step."""
        return self.step_option not in ("", "distributed.update servers")

    @property
    def step_option(self) -> str:
        """The option, with its value, that has steps taken elsewhere than on every worker; empty if none."""
        for name in _STEP_OPTIONS:
            if (value := getattr(self, name)) not in (None, False, "workers"):
                return f"distributed.{name} {value}"
        return ""


def refuses_fp16(config: object, loop: LoopConfig, distributed: DistributedConfig) -> str:
    """Return what cannot take fp16 with its loss scale, if something: a recipe, or an option.

    Args:
        config: all settings; a recipe that cannot has the name in an attribute ``refuses_fp16``.
        loop: a fixed loss scale is one that steps without agreement can take.
        distributed: how workers communicate.
    """
    if distributed.wire == "int8":
        return "distributed.wire int8"
    if distributed.is_loose and loop.loss_scale is None:
        return distributed.step_option
    return getattr(config, "refuses_fp16", "")


def auto_precision(capability: tuple[int, int] | None, no_fp16: str) -> str:
    """Return what ``auto`` is, by the kind of the device alone.

    Args:
        capability: the compute capability of a GPU; ``None``: a CPU, whatever units for bf16 it has.
        no_fp16: what cannot take fp16 with its loss scale, if something (:func:`refuses_fp16`).
    """
    if capability is None:
        return "fp32"
    return "bf16" if capability >= (8, 0) else "fp32" if no_fp16 else "fp16"


def activation_bytes(config: Any) -> int:
    """Return the bytes of an activation, for a dry run, in the precision in which this host would train.

    Args:
        config: settings with the sections ``train`` and ``distributed``.
    """
    name, capability = config.train.precision, None
    if name == "auto":
        if config.distributed.device != "cpu" and num_gpus():
            from torch import cuda

            capability = cuda.get_device_capability(0)
        name = auto_precision(capability, refuses_fp16(config, config.train, config.distributed))
    return 4 if name == "fp32" else 2


def check_wire(distributed: DistributedConfig, *, precision: str, clip: str) -> None:
    """Check that the wire format works with the precision and the clipping.

    Raises:
        UsageError: int8 with fp16, or a format other than fp32 with clipping per worker.
    """
    if distributed.wire == "int8" and precision == "fp16":
        raise UsageError(
            "distributed.wire int8 with train.precision fp16: the residuals of error feedback would be in "
            "units of a loss scale that changes; use --train.precision bf16 or --distributed.wire bf16"
        )
    if distributed.wire != "fp32" and clip == "worker":
        raise UsageError(
            f"distributed.wire {distributed.wire} with optim.clip worker: gradients clipped per worker are "
            "averaged in fp32; use --optim.clip global or --distributed.wire fp32"
        )


def schedule_of(rates: Rates, optim: DecayConfig, total_steps: int) -> Schedule:
    """Return the learning-rate schedule of the settings."""
    return Schedule(
        base=rates.learning_rate,
        end=rates.end_learning_rate,
        warmup_steps=rates.warmup_steps,
        constant_steps=rates.constant_steps,
        total_steps=total_steps,
        power=optim.power,
        decay_from=optim.decay_from,
    )


def check_warmup(section: str, warmup_steps: int, steps_section: str, total_steps: int) -> None:
    """Raise a :class:`UsageError` if the warm-up is negative or longer than the training."""
    if not 0 <= warmup_steps <= total_steps:
        raise UsageError(
            f"{section}.warmup_steps {warmup_steps} must lie between 0 and {steps_section}.total_steps "
            f"{total_steps}: set --{section}.warmup-steps too"
        )


def settings_lines(config: object) -> list[str]:
    """Return the settings as TOML, for a dry run."""
    return [to_toml(as_tree(config))]


def required(value: T | None) -> T:
    """Return a setting that the command line has filled in."""
    assert value is not None, "the command line must fill this setting in"
    return value


def as_tree(config: object) -> dict[str, Any]:
    """Return a dataclass as nested dictionaries of JSON values, without unset settings.

    ``None`` for a setting with another default becomes ``"none"``, so that reading it back does not restore
    the default. Paths that exist become absolute: they mean the same to a reader in another directory.
    """
    tree: dict[str, Any] = {}
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if is_dataclass(value):
            tree[field.name] = as_tree(value)
        elif value is None and field.default is not None and field.default is not MISSING:
            tree[field.name] = "none"
        elif value is not None:
            tree[field.name] = _plain(value)
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value.absolute() if value.exists() else value)
    return value


def to_toml(tree: Mapping[str, Any]) -> str:
    """Return a two-level tree of strings, numbers, booleans and lists of these as TOML.

    Raises:
        UsageError: a string has bytes that are not UTF-8, which TOML cannot represent.
    """
    lines: list[str] = []
    for section, values in tree.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml_value(f'{section}.{name}', value)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(name, item) for item in value)}]"
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} {text!r} is not UTF-8, as config.toml is; choose a name that is") from None
    # JSON strings are TOML strings, except that TOML requires U+007F to be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UsageError: the file is missing, not UTF-8, not TOML (with the line), or nested too deeply.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"the config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"the config file {path} cannot be read: {error}") from None


_DURATIONS = {
    "steps": ("warmup_steps", "constant_steps", "hold_steps", "milestones"),
    "epochs": ("warmup_epochs",),
}
"""Settings of a schedule that are a part of ``total_steps`` or ``total_epochs``."""
_FEWEST_LINES = 20
"""Lines of the record, and so points of a report's curves, that a shortened preset has at least."""


def shortened(preset: dict[str, Any], given: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return a preset for the steps or epochs that the user gave, and what was changed, in words.

    If they are fewer than the preset's, the durations of its schedule that the user did not give shrink in
    proportion, and lines of the record are written at least 20 times. Phases share ``--train.total-steps``
    in the proportion of their own.

    Args:
        preset: settings in sections.
        given: texts of the options that the user gave, such as ``{"--train.total-steps": "60"}``.

    Example:
        >>> preset = {"train": {"total_steps": 2400}, "optim": {"warmup_steps": 200}}
        >>> tree, changes = shortened(preset, {"--train.total-steps": "60"})
        >>> tree["optim"], changes
        ({'warmup_steps': 5}, ['optim.warmup_steps 5 instead of 200'])
    """
    tree = {section: dict(values) for section, values in preset.items()}
    changes: list[str] = []

    def change(section: str, name: str, value: Any) -> None:
        old = tree.get(section, {}).get(name)
        if f"--{section}.{name.replace('_', '-')}" not in given and old not in (None, value):
            tree[section][name] = value
            changes.append(f"{section}.{name} {value} instead of {old}")

    steps = _number(given.get("--train.total-steps", ""))
    for section, own in _shares(preset, steps).items():
        change(section, "total_steps", own)
    for section in preset:
        for unit, names in _DURATIONS.items():
            whole = preset[section].get(f"total_{unit}")
            part = _number(given.get(f"--{section}.total-{unit}", "")) or tree[section].get(f"total_{unit}")
            if whole is None or part is None or not 0 < part < whole:
                continue
            of = "optim" if section == "train" else section
            for name in names:
                old = preset.get(of, {}).get(name)
                if isinstance(old, list):
                    change(of, name, [max(1, each * part // whole) for each in old])
                elif old is not None:
                    fewer = old * part // whole if unit == "steps" else old * part / whole
                    change(of, name, max(fewer, int(name == "hold_steps")))  # a rate is held from step 1 on
    log_frequency = preset.get("run", {}).get("log_frequency")
    if steps and log_frequency is not None and steps < preset.get("train", {}).get("total_steps", steps + 1):
        change("run", "log_frequency", min(log_frequency, max(1, int(steps) // _FEWEST_LINES)))
    return tree, changes


def _number(text: str) -> int | float | None:
    """Return the number that an option was given, or nothing: what is none is refused when it is parsed."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _shares(preset: Mapping[str, Any], steps: int | float | None) -> dict[str, int]:
    """Return the steps of each phase of a preset that has phases, if all of them together are ``steps``."""
    own = {section: each["total_steps"] for section, each in preset.items() if section.startswith("phase")}
    if not own or not steps:
        return {}
    shares = {section: int(each * steps // sum(own.values())) for section, each in own.items()}
    shares[max(own, key=own.__getitem__)] += int(steps) - sum(shares.values())
    return shares
