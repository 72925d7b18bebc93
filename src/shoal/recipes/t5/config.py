"""All settings of T5 pretraining; presets are the TOML files beside this one. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from shoal.data.text.span_config import MAX_SENTINELS, SpanConfig
from shoal.errors import UsageError
from shoal.models.t5_config import T5ModelConfig, num_parameters
from shoal.optim.lr_schedules import InverseSquareRoot
from shoal.train.config import (
    DistributedConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    require_positive,
)
from shoal.train.parallel_config import ParallelConfig

PRESETS = ("tiny", "small", "base", "large", "3b")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, and how examples are made of it."""

    path: Path | None = None
    """Directory that `shoal prepare text` wrote."""
    input_length: int = 512
    """Tokens of an input, sentinels and end token included; the target's follow from it (114)."""
    noise_density: float = 0.15
    """Part of the text's tokens that is replaced and predicted."""
    mean_span_length: float = 3.0
    """Tokens replaced by one sentinel, on average."""
    verify: Literal["sizes", "checksums"] = "checksums"
    """Compare only sizes at the start, or read every byte once (1.5 GB/s, by the main worker)."""
    loader_processes: int = 0
    """Processes that make examples; 0: a thread of the worker, enough for text."""


@dataclass(frozen=True, kw_only=True)
class T5OptimConfig(OptimizerConfig):
    """The optimizer and its schedule, in optimizer steps."""

    optimizer: Literal["lamb", "lans", "adamw", "adafactor"] = "adafactor"
    """Adafactor, whose rate is relative to a weight's size, or one of the others."""
    learning_rate: float = 1.0
    """The rate is this / sqrt(max(step, hold_steps)), for Adafactor relative to the size of each weight."""
    hold_steps: int = 10_000
    """Steps before the rate begins to fall."""
    weight_decay: float = 0.0
    """Decay of weights, not of biases and norms."""
    max_grad_norm: float | None = None
    """Clip gradients to this norm; Adafactor clips its updates instead."""


@dataclass(frozen=True, kw_only=True)
class T5PretrainConfig:
    """Span-corruption pretraining of T5."""

    recipe: ClassVar[str] = "t5"
    fixed: ClassVar[tuple[str, ...]] = (
        "model",
        "data.input_length",
        "data.noise_density",
        "data.mean_span_length",
        "train.seed",
        "train.global_batch_size",
        "optim.optimizer",
    )
    """What must stay when a run goes on; the layout may change."""

    model: T5ModelConfig = field(default_factory=T5ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: T5OptimConfig = field(default_factory=T5OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        require_positive("train", self.train, "total_steps", "global_batch_size", "micro_batch_size")
        require_positive("train", self.train, "max_nonfinite_steps")
        require_positive("optim", self.optim, "hold_steps")
        require_positive("run", self.run, "log_frequency", "validation_frequency", "validation_samples")
        require_positive("run", self.run, "checkpoint_frequency", "keep_checkpoints")
        if self.train.precision == "fp16":
            raise UsageError("train.precision fp16: T5's activations overflow in it; use bf16 or fp32")
        if self.distributed.wire != "fp32":
            raise UsageError(
                f"distributed.wire {self.distributed.wire}: the stages of T5 average their gradients in "
                "fp32; leave it out"
            )
        if self.train.compile:
            raise UsageError("train.compile does not go with the stages of T5: leave it out")
        self.spans()

    def spans(self) -> SpanConfig:
        """Return what an example is made of.

        Raises:
            UsageError: a number out of its range.
        """
        data = self.data
        return SpanConfig(
            input_length=data.input_length,
            noise_density=data.noise_density,
            mean_span_length=data.mean_span_length,
            seed=self.train.seed,
        )

    @property
    def schedule(self) -> InverseSquareRoot:
        """The learning rate's schedule."""
        return InverseSquareRoot(base=self.optim.learning_rate, hold_steps=self.optim.hold_steps)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise a :class:`UsageError` where tokens and sentinels do not fit into the embedding."""
        if vocab_size + MAX_SENTINELS > self.model.vocab_size:
            raise UsageError(
                f"model.vocab_size {self.model.vocab_size} is too small for the {vocab_size:,} tokens of "
                f"{self.data.path} and {MAX_SENTINELS} sentinels: it must be at least "
                f"{vocab_size + MAX_SENTINELS}"
            )

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.model)
