"""All settings of BERT pretraining; presets are the TOML files beside this one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shoal.errors import UsageError
from shoal.models.bert_config import BertModelConfig, num_parameters
from shoal.optim.lr_schedules import Schedule
from shoal.recipes.masked_lm.config import (
    Phase,
    PretrainConfig,
    ShortFinetuneConfig,
    TextConfig,
    check_warmup,
)
from shoal.train.config import DistributedConfig, LoopConfig, OptimizerConfig, RunConfig, require_positive

PRESETS = ("tiny", "base", "large", "large-lans")


@dataclass(frozen=True, kw_only=True)
class DataConfig(TextConfig):
    """Which text, and how examples are made of it."""

    max_ngram: int = 1
    """Longest run of words masked together; the paper hides single tokens."""
    whole_words: bool = False
    """Mask all tokens of a word or none (the authors' later "whole word masking" models)."""


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """One phase: its examples, its batch and its schedule."""

    total_steps: int = 7_038
    """Optimizer steps of this phase; 0 leaves it out."""
    max_seq_length: int = 128
    """Tokens in an example, the special ones included."""
    max_predictions_per_seq: int = 20
    """Masked tokens in an example at most."""
    global_batch_size: int = 65_536
    """Sequences in one optimizer step, over all workers."""
    micro_batch_size: int | None = None
    """Sequences a worker computes at once; default: the largest divisor of its share up to 64."""
    learning_rate: float = 6e-3
    """Learning rate at the end of the warm-up."""
    end_learning_rate: float = 0.0
    """Learning rate after the last step of this phase."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    constant_steps: int = 0
    """Steps at the learning rate between warm-up and decay."""


@dataclass(frozen=True, kw_only=True)
class BertPretrainConfig(PretrainConfig):
    """Masked-LM and next-sentence pretraining of BERT."""

    recipe: ClassVar[str] = "bert"
    sentence_task: ClassVar[Literal["sop", "nsp"]] = "nsp"
    fixed: ClassVar[tuple[str, ...]] = (
        "model",
        "data.mask_prob",
        "data.max_ngram",
        "data.whole_words",
        "data.short_seq_prob",
        "train.seed",
        "optim.optimizer",
        "phase1.total_steps",
        *(
            f"{phase}.{name}"
            for phase in ("phase1", "phase2")
            for name in ("max_seq_length", "max_predictions_per_seq", "global_batch_size")
        ),
    )

    model: BertModelConfig = field(default_factory=BertModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    phase1: PhaseConfig = field(default_factory=PhaseConfig)
    phase2: PhaseConfig = field(default_factory=PhaseConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    finetune: ShortFinetuneConfig = field(default_factory=ShortFinetuneConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        for section, phase in self._sections():
            require_positive(section, phase, "global_batch_size", "micro_batch_size")
            if phase.total_steps < 0:
                raise UsageError(f"{section}.total_steps {phase.total_steps} must be at least 0")
            if phase.total_steps:
                check_warmup(section, phase.warmup_steps, section, phase.total_steps)
        if not self.phases:
            raise UsageError("phase1.total_steps and phase2.total_steps are both 0: nothing to train")
        self.check()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phase 1 and phase 2, without one that has no steps."""
        phases: list[Phase] = []
        for section, settings in self._sections():
            before = phases[-1] if phases else None
            if settings.total_steps:
                phases.append(
                    Phase(
                        section=section,
                        steps_before=before.last_step if before else 0,
                        samples_before=before.samples(before.last_step) if before else 0,
                        max_seq_length=settings.max_seq_length,
                        max_predictions_per_seq=settings.max_predictions_per_seq,
                        global_batch_size=settings.global_batch_size,
                        micro_batch_size=settings.micro_batch_size,
                        schedule=self._schedule(settings),
                    )
                )
        return tuple(phases)

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.model)

    def _sections(self) -> tuple[tuple[str, PhaseConfig], ...]:
        return (("phase1", self.phase1), ("phase2", self.phase2))

    def _schedule(self, phase: PhaseConfig) -> Schedule:
        return Schedule(
            base=phase.learning_rate,
            end=phase.end_learning_rate,
            warmup_steps=phase.warmup_steps,
            constant_steps=phase.constant_steps,
            total_steps=phase.total_steps,
            power=self.optim.power,
            decay_from=self.optim.decay_from,
        )
