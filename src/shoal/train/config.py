"""The settings that every recipe shares. Standard library only.

Defaults live here, presets in the recipe's TOML files; options are named ``--section.field``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from shoal.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The loop, whatever it trains on for how long."""

    seed: int = 42
    """Seed of the initial weights, the data order, masking and dropout."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast type; auto: bf16 where the device computes in it natively, else fp32."""
    loss_scale: float | None = None
    """Static loss scale for fp16; default: dynamic."""
    compile: bool | None = None
    """torch.compile the model; default: on GPUs."""
    max_nonfinite_steps: int = 5
    """Stop after so many steps in a row whose loss is not finite."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """The loop of a run with one batch and one schedule: how long, how large a batch, in what precision."""

    total_steps: int = 125_000
    """Optimizer steps of the whole run."""
    global_batch_size: int = 4_096
    """Sequences in one optimizer step, over all workers."""
    micro_batch_size: int | None = None
    """Sequences a worker computes at once; default: the largest divisor of its share up to 64."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, and the form of its schedule."""

    optimizer: Literal["lamb", "lans", "adamw", "adafactor"] = "lamb"
    """LAMB or LANS for large batches, torch's AdamW, or T5's Adafactor."""
    power: float = 1.0
    """Power of the polynomial decay."""
    decay_from: Literal["warmup", "start"] = "warmup"
    """Count the decay from the end of warm-up and constant rate, or from step 0 (Google's ALBERT, NVIDIA's
    BERT; a jump after warm-up)."""
    weight_decay: float = 0.01
    """Decay of weights, not of biases and norms."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-6
    """Added to the root of the second moment."""
    bias_correction: bool = True
    """Correct the moments for their start at 0 (paper, apex); the original ALBERT does not."""
    max_grad_norm: float | None = 1.0
    """Clip gradients to this norm; none with --optim.max-grad-norm none."""
    clip: Literal["global", "worker"] = "global"
    """Clip the averaged gradient, or each worker's own before averaging."""

    def __post_init__(self) -> None:
        if self.optimizer != "lamb" and not self.bias_correction:
            raise UsageError(
                f"optim.bias_correction false is a variant of LAMB; {self.optimizer} always corrects: leave "
                "it out or choose --optim.optimizer lamb"
            )
        if self.optimizer == "adafactor":
            for name in ("beta1", "beta2", "eps"):
                value = getattr(self, name)
                if value != getattr(type(self), name):
                    raise UsageError(
                        f"optim.{name} {value} is of no use to adafactor, whose decays and epsilons are the "
                        "paper's: leave it out or choose --optim.optimizer adamw"
                    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig(OptimizerConfig):
    """The optimizer and its schedule, in optimizer steps."""

    learning_rate: float = 1.76e-3
    """Learning rate at the end of the warm-up."""
    end_learning_rate: float = 0.0
    """Learning rate after the last step."""
    warmup_steps: int = 3_125
    """Steps of linear warm-up from 0."""
    constant_steps: int = 0
    """Steps at the learning rate between warm-up and decay."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run lives and what it writes when."""

    name: str | None = None
    """Name in reports; default: recipe and preset."""
    dir: Path | None = None
    """Run directory; default: runs/NAME. The same directory continues the run."""
    log_frequency: int = 50
    """Steps between lines of the record."""
    validation_frequency: int = 2_000
    """Steps between evaluations on held-out data."""
    validation_samples: int = 2_048
    """Held-out sequences an evaluation reads at most."""
    checkpoint_frequency: int = 5_000
    """Steps between checkpoints."""
    keep_checkpoints: int = 3
    """How many checkpoints stay on disk."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How workers talk and what they run on."""

    backend: str | None = None
    """torch.distributed backend; default: nccl on GPUs, shoal where there are helper hosts, else gloo."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: a GPU a worker if there are enough, else the CPU."""
    timeout_s: float = 600.0
    """Deadline of every collective."""
    bucket_mb: float | None = None
    """Size of DistributedDataParallel's buckets in MiB; default: 25, more from about 100 workers on."""


def required(value: T | None) -> T:
    """Return a setting that the command line has made sure of."""
    assert value is not None, "the command line must fill this setting in"
    return value


def require_positive(section: str, config: object, *names: str) -> None:
    """Raise a :class:`UsageError` for the first of the named settings that is below 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"{section}.{name} {value} must be at least 1")


def as_tree(config: object) -> dict[str, Any]:
    """Return a dataclass as nested dictionaries of JSON values; unset settings are left out.

    A setting that was set to none although it has a default is ``"none"``, so that reading it back does not
    bring the default back.
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
    return str(value) if isinstance(value, Path) else value


def to_toml(tree: Mapping[str, Any]) -> str:
    """Return a two-level tree of strings, numbers, booleans and lists of these as TOML."""
    lines: list[str] = []
    for section, values in tree.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml_value(value)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UsageError: the file is missing, not UTF-8, or not TOML (with the line).
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"the config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the config file {path} cannot be read: {error}") from None
