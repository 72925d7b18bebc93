"""All settings of ALBERT pretraining; presets are the TOML files beside this one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shoal.models.albert_config import AlbertModelConfig, num_parameters
from shoal.optim.lr_schedules import Schedule
from shoal.recipes.masked_lm.config import (
    Phase,
    PretrainConfig,
    ShortFinetuneConfig,
    TextConfig,
    check_warmup,
)
from shoal.train.config import DistributedConfig, OptimConfig, RunConfig, TrainConfig, require_positive

PRESETS = ("tiny", "base", "large", "xlarge")


@dataclass(frozen=True, kw_only=True)
class DataConfig(TextConfig):
    """Which text, and how examples are made of it."""

    max_seq_length: int = 512
    """Tokens in an example, the special ones included."""
    max_predictions_per_seq: int = 20
    """Masked tokens in an example at most."""


@dataclass(frozen=True, kw_only=True)
class AlbertPretrainConfig(PretrainConfig):
    """Masked-LM and sentence-order pretraining of ALBERT."""

    recipe: ClassVar[str] = "albert"
    sentence_task: ClassVar[Literal["sop", "nsp"]] = "sop"
    fixed: ClassVar[tuple[str, ...]] = (
        "model",
        "data.max_seq_length",
        "data.max_predictions_per_seq",
        "data.mask_prob",
        "data.max_ngram",
        "data.whole_words",
        "data.short_seq_prob",
        "train.seed",
        "train.global_batch_size",
        "optim.optimizer",
    )

    model: AlbertModelConfig = field(default_factory=AlbertModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    finetune: ShortFinetuneConfig = field(default_factory=ShortFinetuneConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        require_positive("train", self.train, "total_steps", "global_batch_size", "micro_batch_size")
        check_warmup("optim", self.optim.warmup_steps, "train", self.train.total_steps)
        self.check()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The one phase."""
        data, train, optim = self.data, self.train, self.optim
        schedule = Schedule(
            base=optim.learning_rate,
            end=optim.end_learning_rate,
            warmup_steps=optim.warmup_steps,
            constant_steps=optim.constant_steps,
            total_steps=train.total_steps,
            power=optim.power,
            decay_from=optim.decay_from,
        )
        return (
            Phase(
                section="train",
                steps_before=0,
                samples_before=0,
                max_seq_length=data.max_seq_length,
                max_predictions_per_seq=data.max_predictions_per_seq,
                global_batch_size=train.global_batch_size,
                micro_batch_size=train.micro_batch_size,
                schedule=schedule,
            ),
        )

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.model)
