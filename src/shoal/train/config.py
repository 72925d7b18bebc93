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
from typing import Any, Literal, TypeVar

from cyclopts import Group

from shoal.data.objects import scheme_of
from shoal.decide.batch import MicroBatch, StagesConfig
from shoal.decide.batch import ScheduleName as ScheduleName  # options resolve inherited annotations here
from shoal.decide.bounded_waiting import WaitingRule
from shoal.decide.members import read_counts
from shoal.env.machine import num_gpus
from shoal.errors import UsageError, require_positive
from shoal.formatting import parse_bytes

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
    shard_optimizer: bool = False
    """Divide the optimizer's state over the data-parallel workers (ZeRO-1): the same bits with less memory,
    and one more pass of the weights through the network."""
    overfit_steps: int = 0
    """Train on the data of the first N steps over and over, to see whether the model can learn it; 0: on all
    data."""

    def __post_init__(self) -> None:
        require_positive("train", self, "max_nonfinite_steps")
        require_positive("train", self, "overfit_steps", least=0)
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


_TRACKERS = ("wandb", "mlflow")


@dataclass(frozen=True, kw_only=True)
class RunOutputConfig:
    """Run directory, and frequencies of lines and checkpoints."""

    name: str | None = None
    """Name in reports; default: recipe and preset."""
    dir: Path | None = None
    """Run directory; default: runs/NAME. The same directory continues the run."""
    log_frequency: int = 50
    """Steps between log lines; without a terminal, one every 15 s is shown."""
    checkpoint_frequency: int = 5_000
    """Steps between checkpoints."""
    keep_checkpoints: int = 3
    """Number of most recent checkpoints to keep."""
    upload_to: str | None = None
    """s3:// or gs://BUCKET/PREFIX to which checkpoints and the record are copied beside training; a run
    directory without newer ones continues from there."""
    save: bool = True
    """Write checkpoints, and the trained model at the end; a run without them cannot be resumed."""
    keep_best: str | None = None
    """Score, such as lm_loss or f1, whose best checkpoint is kept, exported at the end, and taken where
    the run is named as a model; SCORE:min or SCORE:max if its name does not say which is better."""
    patience: int = 0
    """With keep-best: evaluations in a row without a better score after which the run ends; 0: it goes on."""
    until: str | None = None
    """End the run at the first evaluation that meets all conditions, such as
    'box_AP>=0.377,mask_AP>=0.339'."""
    validation_beside: int = 0
    """Processes on the first worker's host that evaluate during training; 0: training stops for
    evaluations."""
    validation_hosts: int = 0
    """Hosts, the last ones of the job, that evaluate during training instead of taking part in it."""
    samples: tuple[Path, ...] = ()
    """Files of inputs, such as prompts: at each evaluation, `shoal predict` computes their outputs beside
    training, on CPUs."""
    evaluate: Path | None = None
    """Do not train; evaluate this checkpoint of a run with the same settings, and write scores to run.dir."""
    plan: Path | None = None
    """File of `shoal plan --json` for this run: `shoal report` shows it beside what was measured."""
    report_to: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Experiment trackers that get settings, figures and scores: wandb, mlflow; by their own packages."""
    mlperf_log: Path | None = None
    """File to which MLPerf training log lines (:::MLLOG) are appended."""
    layer_norms: bool = False
    """Write the norm of the gradient of each layer into the lines of the record."""
    profile: int = 0
    """Steps that the first worker traces with torch's profiler, from the third after the start on, into
    profile-steps-FIRST-LAST.json of the run directory."""

    def __post_init__(self) -> None:
        require_positive("run", self, "log_frequency", "checkpoint_frequency", "keep_checkpoints")
        require_positive("run", self, "validation_samples", "evaluation_batch_size")
        require_positive("run", self, "validation_frequency", "validation_beside", "profile", least=0)
        require_positive("run", self, "validation_hosts", least=0)
        for name in self.report_to:
            if name not in _TRACKERS:
                raise UsageError(f"run.report_to {name!r} must be one of {', '.join(_TRACKERS)}")
        if self.validation_beside and self.validation_hosts:
            raise UsageError(
                "run.validation_beside and run.validation_hosts are two ways to evaluate beside training: "
                "leave one of them out"
            )
        if self.validation_hosts and not getattr(self, "validation_frequency", 1):
            raise UsageError(
                f"run.validation_hosts {self.validation_hosts} would have nothing to do before the end: set "
                "--run.validation-frequency N"
            )
        beside = "run.validation_hosts" if self.validation_hosts else "run.validation_beside"
        if self.evaluates_beside and not self.save:
            raise UsageError(f"{beside} needs weights on disk: leave --run.no-save out")
        if self.samples and not self.save:
            raise UsageError("run.samples needs weights on disk: leave --run.no-save out")
        require_positive("run", self, "patience", least=0)
        if self.patience and self.keep_best is None:
            raise UsageError(f"run.patience {self.patience} needs a score: set --run.keep-best SCORE")
        if self.upload_to is not None and not self.save:
            raise UsageError("run.upload_to copies checkpoints: leave --run.no-save out")
        if self.upload_to is not None and scheme_of(self.upload_to) not in ("s3", "gs"):
            raise UsageError(
                f"run.upload_to {self.upload_to!r} must be the location of an object store: "
                "s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
            )
        if self.dir is not None and scheme_of(self.dir) is not None:
            raise UsageError(
                f"run.dir {self.dir} must be a folder: name one on this host's disk, and "
                "--run.upload-to s3://BUCKET/PREFIX, to which its checkpoints are copied"
            )
        if self.keep_best is not None and not self.save:
            raise UsageError("run.keep_best needs checkpoints: leave --run.no-save out")
        if self.keep_best is not None and self.evaluates_beside:
            raise UsageError(
                f"run.keep_best does not go with {beside}, whose scores come after the weights have changed: "
                "leave one of them out"
            )
        if self.until is not None and not getattr(self, "validation_frequency", 1):
            raise UsageError(f"run.until {self.until!r} needs evaluations: set --run.validation-frequency N")

    @property
    def evaluates_beside(self) -> bool:
        """Return whether evaluations run beside training, in processes or on hosts of their own."""
        return bool(self.validation_beside or self.validation_hosts)

    @property
    def hosts_apart(self) -> int:
        """Return the hosts of the job that do not train."""
        return 0 if self.evaluate is not None else self.validation_hosts


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunOutputConfig):
    """Run directory and frequencies, with evaluation by steps."""

    validation_frequency: int = 2_000
    """Steps between evaluations on held-out data; 0: only at the end."""
    validation_samples: int = 2_048
    """Maximum number of held-out sequences per evaluation."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Devices of workers and communication between them."""

    backend: str = "auto"
    """torch.distributed backend. auto: shoal with helper hosts and on CPUs (gloo where shoal's process group
    in C++ does not load); nccl on GPUs of one host; on GPUs of several hosts the faster of nccl and shoal,
    measured at the start. A run that continues keeps its backend."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: one GPU per worker if there are enough, else the CPU."""
    timeout_s: float = 600.0
    """Timeout of collectives in seconds."""
    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of fp32 gradients on the network: bf16 halves the bytes; int8 (blocks with error feedback)
    sends a quarter."""
    shares: str = "equal"
    """Division of the global batch among workers: equal; by-speed: proportional to the measured speed of
    each; or the directory of a run, whose shares are repeated."""
    bucket_mb: float | None = None
    """Size of DistributedDataParallel's buckets in MiB; default: 25, larger from about 100 workers on."""
    elastic: str | None = None
    """LEAST:MOST workers, such as 4:8: the run goes on when workers are lost, and takes in others; default: a
    lost worker ends it."""
    worker_patience_s: float = 60.0
    """With elastic: a worker that stands still for so many seconds is lost."""

    def __post_init__(self) -> None:
        require_positive("distributed", self, "worker_patience_s")
        if self.elastic is None:
            return
        read_counts(self.elastic)
        allowed = {"backend": ("auto", "shoal"), "wire": ("fp32", "bf16"), "shares": ("equal",)}
        for name, goes in allowed.items():
            if (value := getattr(self, name)) not in goes:
                raise UsageError(
                    f"distributed.elastic does not go with distributed.{name} {value}: use "
                    f"{' or '.join(goes)}, or leave elastic out"
                )


_MODES = ("off", "sync", "bounded", "async", "local")
_MODES_OF: Mapping[str, tuple[str, ...]] = {
    "replicas": ("sync", "bounded", "async", "local"),
    "weights": ("sync",),
    **dict.fromkeys(("wait_for", "late", "grace_s"), ("bounded", "local")),
    **dict.fromkeys(("staleness", "extrapolation"), ("bounded",)),
    "compensation": ("async",),
    **dict.fromkeys(("local_steps", "fragments", "delay", "mix", "outer_rate", "outer_momentum"), ("local",)),
}
"""By option of :class:`ServersConfig`: the modes that have it."""
_CHOICES: Mapping[str, tuple[object, ...]] = {
    "mode": _MODES,
    "late": ("drop", "next", "partial"),
    "replicas": (1, 2),
    "weights": ("fp32", "bf16"),
}
"""By option of :class:`ServersConfig`: its values, where they are few."""


@dataclass(frozen=True, kw_only=True)
class ServersConfig:
    """Updates by the servers of backend shoal, which keep weights in the memory of at least two hosts.

    Options that only some modes have are refused in the others.

    Raises:
        UsageError: an option does not go with the mode or with another option.
    """

    mode: Literal["off", "sync", "bounded", "async", "local"] = "off"
    """Gradients with which servers step: off: none, each worker runs the optimizer; sync: those of all
    workers; bounded: those of wait-for workers, or stale ones; async (experimental): each on arrival; local:
    the changes of local steps (DiLoCo)."""
    replicas: Literal[1, 2] = 1
    """Copies of weights on servers; with 2, workers keep one of the helper hosts' weights, and losing a
    helper changes no result."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Mode sync: format in which servers return weights. bf16 halves these bytes: forward passes use rounded
    weights, servers and checkpoints have float32."""
    wait_for: int | None = None
    """Number of workers that a step (bounded) or an average (local) waits for; the others are late. Default:
    all."""
    late: Literal["drop", "next", "partial"] = "drop"
    """With wait-for: drop late gradients, or add them to the next step; or (local) take the steps that late
    workers have done by then."""
    grace_s: float = 0.0
    """With wait-for: seconds that a step with enough gradients waits for the others; with late partial, for
    the ends of their local steps."""
    staleness: int | None = None
    """Mode bounded: steps that the weights of a gradient may lack, so that workers run ahead. With late next:
    maximum staleness of a late gradient, default 1."""
    extrapolation: float = 0.0
    """With staleness alone: compute gradients at extrapolated weights, moved on by this multiple of the last
    step for each step that they lack."""
    compensation: float = 0.0
    """Mode async: strength of the correction for weights that changed since the gradient (DC-ASGD)."""
    local_steps: int | None = None
    """Mode local: steps of each worker on its own between averages."""
    fragments: int = 1
    """Mode local: parts of the model, each averaged at its own time within the steps; the largest average has
    about 1/N of the bytes."""
    delay: int = 0
    """Mode local: steps that workers take while an average is under way."""
    mix: float = 0.5
    """With delay: part of a worker's own weights that it keeps when it merges an average."""
    outer_rate: float = 0.7
    """Mode local: learning rate of the outer optimizer; 1 with momentum 0 averages the weights."""
    outer_momentum: float = 0.9
    """Mode local: Nesterov momentum of the outer optimizer."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                shown = ", ".join(map(str, choices))
                raise UsageError(f"servers.{name} {value!r} must be one of {shown}")
        require_positive("servers", self, "wait_for", "local_steps", "fragments")
        require_positive("servers", self, "staleness", "grace_s", "delay", "outer_rate", least=0)
        require_positive("servers", self, "compensation", "extrapolation", least=0)
        require_positive("servers", self, "mix", "outer_momentum", least=0, below=1)
        for field in fields(self):
            value, modes = getattr(self, field.name), _MODES_OF.get(field.name, _MODES)
            if value != field.default and self.mode not in modes:
                raise UsageError(
                    f"servers.{field.name} {value} is for --servers.mode {' or '.join(modes)}, not for mode "
                    f"{self.mode}"
                )
        if self.wait_for is None and (self.late != "drop" or self.grace_s):
            raise UsageError(
                f"servers.late {self.late} and grace_s {self.grace_s:g}: no gradient is late where steps "
                "wait for all workers; set --servers.wait-for too"
            )
        if self.mode == "bounded":
            self._check_bounded()
        elif self.mode == "local":
            self._check_local()

    def _check_bounded(self) -> None:
        if self.late == "partial":
            raise UsageError(
                "servers.late partial is for local steps: a gradient has no part that is done; set "
                "--servers.late drop or next"
            )
        if self.wait_for is None and self.staleness is None:
            raise UsageError(
                "servers.mode bounded: set --servers.wait-for or --servers.staleness; mode sync waits for all"
            )
        if self.staleness == 0:
            raise UsageError(
                "servers.staleness 0: each step would wait for all workers; give at least 1, or use "
                "--servers.mode sync"
            )
        if self.wait_for is not None and self.staleness is not None and self.late == "drop":
            raise UsageError(
                f"servers.wait_for {self.wait_for} with staleness {self.staleness}: gradients that are "
                "dropped have none; set --servers.late next, or leave one of them out"
            )
        if self.extrapolation and self.wait_for is not None:
            raise UsageError(
                f"servers.extrapolation {self.extrapolation} is for workers that run ahead, whose staleness "
                "is known before the gradient; set --servers.staleness, without wait-for"
            )

    def _check_local(self) -> None:
        if self.local_steps is None:
            raise UsageError("servers.mode local: set --servers.local-steps, such as 50")
        if not self.fragments <= self.local_steps:
            raise UsageError(
                f"servers.fragments {self.fragments} in every {self.local_steps} local steps: each is sent "
                f"after a step of its own; give 1 to {self.local_steps}"
            )
        if self.delay > (most := self.local_steps // self.fragments):
            raise UsageError(
                f"servers.delay {self.delay}: of {self.fragments} fragments in every {self.local_steps} "
                f"local steps, one is sent {most} steps after the other; give 0 to {most}"
            )
        if self.late == "next" and self.fragments > 1:
            raise UsageError(
                f"servers.late next with fragments {self.fragments}: the next exchange is of another "
                "fragment than the late change; set --servers.late drop, or leave one of them out"
            )
        if self.late == "partial" and not self.grace_s:
            raise UsageError(
                "servers.late partial with grace_s 0: late workers hand over what they have at the end of a "
                "local step; set --servers.grace-s to more seconds than one takes"
            )

    @property
    def option(self) -> str:
        """The mode as messages name it; empty if it is off."""
        return "" if self.mode == "off" else f"servers.mode {self.mode}"

    @property
    def is_synchronous(self) -> bool:
        """True if each step takes the gradients of all workers."""
        return self.mode in ("off", "sync")

    @property
    def streams(self) -> bool:
        """True if exchanges of local steps are in fragments, or overlap the next steps."""
        return self.fragments > 1 or self.delay > 0

    def rule(self, num_workers: int) -> WaitingRule:
        """Return which gradients a step takes, of this number of workers.

        Raises:
            UsageError: ``wait_for`` is more than there are workers.
        """
        if self.mode == "async":
            return WaitingRule(num_workers, 1, "next", asynchronous=True)
        most = num_workers - (self.mode == "local")
        wait_for = most if self.wait_for is None else self.wait_for
        if wait_for > most:
            raise UsageError(
                f"servers.wait_for {wait_for} must be from 1 to {most} with {num_workers} workers; leave it "
                "out to wait for all"
            )
        if wait_for == num_workers and (self.late != "drop" or self.grace_s):
            raise UsageError(
                f"servers.wait_for {wait_for} with late {self.late} and grace_s {self.grace_s:g}: no "
                f"gradient of {num_workers} workers is late; leave them out"
            )
        staleness = int(self.late == "next") if self.staleness is None else self.staleness
        return WaitingRule(num_workers, wait_for, self.late, staleness, self.grace_s)


def check_clip(servers: ServersConfig, *, per_worker: bool) -> None:
    """Check that servers get gradients that no worker has clipped.

    Raises:
        UsageError: each worker clips its own.
    """
    if servers.option and per_worker:
        raise UsageError(
            f"{servers.option} with optim.clip worker: servers clip the mean; use --optim.clip global"
        )


def check_delayed_momentum(servers: ServersConfig, shown: str, momentum: float) -> None:
    """Check that steps which wait for no worker have no momentum.

    With momentum, a delay of one step lowers the largest stable learning rate 38-fold.

    Args:
        shown: the optimizer's option and its value, for the error.

    Raises:
        UsageError: they have.
    """
    if servers.mode == "async" and momentum:
        raise UsageError(
            f"{servers.option} with {shown}: with momentum {momentum}, gradients that are late soon make "
            "training diverge; set it to 0, or use --servers.mode bounded, which keeps gradients in the "
            "order of their batches"
        )


def check_normalised(option: str, max_norm: float | None) -> None:
    """Check that servers do not clip what LANS divides by its norm.

    Args:
        option: has the norm, for the error.

    Raises:
        UsageError: ``max_norm`` is finite.
    """
    if max_norm is not None and max_norm < math.inf:
        raise UsageError(
            f"{option} {max_norm} with LANS, which divides each gradient by its norm: leave it out "
            "(--optim.max-grad-norm none)"
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(StagesConfig):
    """Division of the model and the batch over the workers: workers = pipeline × data."""

    layout: Literal["given", "auto"] = "given"
    """given: the settings below; auto: the fastest layout that fits the memory, by a cost model."""
    devices: int | None = None
    """Devices to plan for, with layout auto or in a dry run; default: the workers."""
    memory: str | None = None
    """Memory of a device, such as 40GB, for layout auto and for predictions in a dry run."""
    device: Literal["v100", "a100", "h100"] = "a100"
    """Device whose rates and links the cost model uses: those of p3dn.24xlarge, p4d.24xlarge or p5.48xlarge
    in the planner's catalog."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("parallel", self, "devices")
        if self.memory is not None:
            parse_bytes(self.memory)

    @property
    def is_searched(self) -> bool:
        return self.layout == "auto"


def refuses_fp16(
    config: object, loop: LoopConfig, distributed: DistributedConfig, servers: ServersConfig
) -> str:
    """Return the recipe or the option that cannot take fp16 with its loss scale; empty if none.

    Args:
        config: all settings; a recipe that cannot has the name in an attribute ``refuses_fp16``.
        loop: workers that step apart can take a static loss scale.
        distributed: communication between workers.
        servers: updates by servers.
    """
    if distributed.wire == "int8":
        return "distributed.wire int8"
    if not servers.is_synchronous and loop.loss_scale is None:
        return servers.option
    return getattr(config, "refuses_fp16", "")


def auto_precision(capability: tuple[int, int] | None, no_fp16: str) -> str:
    """Return the precision that ``auto`` stands for on a kind of device.

    Args:
        capability: the compute capability of a GPU; ``None``: a CPU, whatever units for bf16 it has.
        no_fp16: the recipe or the option that cannot take fp16 (:func:`refuses_fp16`); may be empty.
    """
    if capability is None:
        return "fp32"
    return "bf16" if capability >= (8, 0) else "fp32" if no_fp16 else "fp16"


def precision_here(config: Any) -> tuple[str, str]:
    """Return the precision in which this host would train, and the type of its device, for a dry run.

    Args:
        config: settings with the sections ``train`` and ``distributed``, and ``servers`` if it has modes.
    """
    name, capability = config.train.precision, None
    device = "cuda" if config.distributed.device != "cpu" and num_gpus() else "cpu"
    if name == "auto":
        if device == "cuda":
            from torch import cuda

            capability = cuda.get_device_capability(0)
        servers = getattr(config, "servers", ServersConfig())
        no_fp16 = refuses_fp16(config, config.train, config.distributed, servers)
        name = auto_precision(capability, no_fp16)
    return name, device


def check_combination(
    loop: LoopConfig, distributed: DistributedConfig, servers: ServersConfig, *, clip: str
) -> None:
    """Check that backend, wire format, parts of workers and place of the optimizer's state go together.

    Raises:
        UsageError: another backend than shoal with servers that update; fp16 with int8, or with a dynamic
            loss scale and workers that do not wait for each other; a format other than fp32 with clipping per
            worker or with servers that update; unequal parts for workers that do not wait for each other; or
            a division of the optimizer's state that servers have, or of which each worker needs its own.
    """
    if distributed.elastic is not None and (servers.option or loop.shard_optimizer):
        raise UsageError(
            f"distributed.elastic does not go with {servers.option or 'train.shard_optimizer'}: each worker "
            "has the whole state, which it gives to others; leave one of them out"
        )
    if servers.option and distributed.backend != "auto" and "shoal" not in distributed.backend:
        raise UsageError(
            f"{servers.option} with distributed.backend {distributed.backend}: servers belong to backend "
            "shoal; leave --distributed.backend out"
        )
    if loop.shard_optimizer and servers.option:
        whose = "each worker's own" if servers.mode == "local" else "on the servers, divided among them"
        raise UsageError(
            f"{servers.option} with train.shard_optimizer: the optimizer's state is {whose}; leave one of "
            "them out"
        )
    if distributed.wire == "int8" and loop.precision == "fp16":
        raise UsageError(
            "distributed.wire int8 with train.precision fp16: the residuals of error feedback would be in "
            "units of a loss scale that changes; use --train.precision bf16 or --distributed.wire bf16"
        )
    if not servers.is_synchronous and loop.precision == "fp16" and loop.loss_scale is None:
        raise UsageError(
            f"{servers.option} with train.precision fp16: a dynamic loss scale follows each step of all "
            "workers; use bf16, or set --train.loss-scale"
        )
    if distributed.wire != "fp32" and clip == "worker":
        raise UsageError(
            f"distributed.wire {distributed.wire} with optim.clip worker: gradients clipped per worker are "
            "averaged in fp32; use --optim.clip global or --distributed.wire fp32"
        )
    if distributed.wire != "fp32" and servers.option:
        raise UsageError(
            f"{servers.option} with distributed.wire {distributed.wire}: gradients go to the servers in "
            "fp32; use --distributed.wire fp32"
        )
    if distributed.shares != "equal" and not servers.is_synchronous:
        raise UsageError(
            f"{servers.option} with distributed.shares {distributed.shares}: workers that do not wait for "
            "each other have equal parts; leave one of them out"
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
