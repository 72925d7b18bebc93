"""All settings of ALBERT pretraining; presets are the TOML files beside this one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.errors import UsageError
from shoal.models.albert_config import AlbertModelConfig
from shoal.train.config import DistributedConfig, OptimConfig, RunConfig, TrainConfig, require_positive

PRESETS = ("tiny", "base", "large", "xlarge")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, and how examples are made of it."""

    path: Path | None = None
    """Directory that `shoal prepare text` wrote."""
    max_seq_length: int = 512
    """Tokens in an example, the special ones included."""
    max_predictions_per_seq: int = 20
    """Masked tokens in an example at most."""
    mask_prob: float = 0.15
    """Part of the tokens that is predicted."""
    max_ngram: int = 3
    """Longest run of whole words masked together."""
    short_seq_prob: float = 0.1
    """Part of the examples that is shorter than it could be."""
    verify: Literal["sizes", "checksums"] = "checksums"
    """Compare only sizes at the start, or read every byte once (1.5 GB/s, by the main worker)."""
    loader_processes: int = 0
    """Processes that make examples; 0: a thread of the worker, enough for text."""


@dataclass(frozen=True, kw_only=True)
class AlbertPretrainConfig:
    """Masked-LM and sentence-order pretraining of ALBERT."""

    model: AlbertModelConfig = field(default_factory=AlbertModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        require_positive("train", self.train, "total_steps", "global_batch_size", "micro_batch_size")
        require_positive("train", self.train, "max_nonfinite_steps")
        require_positive("run", self.run, "log_frequency", "validation_frequency", "validation_samples")
        require_positive("run", self.run, "checkpoint_frequency", "keep_checkpoints")
        if not 0 <= self.optim.warmup_steps <= self.train.total_steps:
            raise UsageError(
                f"optim.warmup_steps {self.optim.warmup_steps} must lie between 0 and train.total_steps "
                f"{self.train.total_steps}"
            )
        if self.data.max_seq_length > self.model.max_position_embeddings:
            raise UsageError(
                f"data.max_seq_length {self.data.max_seq_length} is more than model.max_position_embeddings "
                f"{self.model.max_position_embeddings}: shorten the one or raise the other"
            )


FIXED = (
    "model",
    "data.max_seq_length",
    "data.max_predictions_per_seq",
    "data.mask_prob",
    "data.max_ngram",
    "data.short_seq_prob",
    "train.seed",
    "train.global_batch_size",
    "optim.optimizer",
)
"""What must stay when a run goes on: the weights, the optimizer's state and the data order depend on it."""
