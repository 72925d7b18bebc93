"""Settings that pretraining BERT and ALBERT share, and the phases that a run has. No torch."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from shoal.errors import UsageError
from shoal.models.encoder_config import EncoderConfig
from shoal.optim.lr_schedules import Schedule, learning_rate
from shoal.train.config import (
    DistributedConfig,
    LoopConfig,
    OptimizerConfig,
    RunConfig,
    check_wire,
    require_positive,
)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Which text, and how examples are made of it."""

    path: Path | None = None
    """Directory that `shoal prepare text` wrote."""
    mask_prob: float = 0.15
    """Part of the tokens that is predicted."""
    max_ngram: int = 3
    """Longest run of words masked together."""
    whole_words: bool = True
    """Mask all tokens of a word or none."""
    short_seq_prob: float = 0.1
    """Part of the examples that is shorter than it could be."""
    verify: Literal["sizes", "checksums"] = "checksums"
    """Compare only sizes at the start, or read every byte once (1.5 GB/s, by the main worker)."""
    loader_processes: int = 0
    """Processes that make examples; 0: a thread of the worker, enough for text."""


@dataclass(frozen=True, kw_only=True)
class ShortFinetuneConfig:
    """Scores during pretraining: a copy of the model is finetuned on SQuAD at chosen steps."""

    at: tuple[int, ...] = ()
    """Steps after which to do it, such as --finetune.at 5000 10000."""
    data: Path | None = None
    """Training questions, the official JSON of SQuAD 1.1 or 2.0."""
    eval: Path | None = None
    """Questions to score on."""
    total_steps: int = 8_144
    """Optimizer steps of each finetuning."""
    global_batch_size: int = 48
    """Windows in one of its steps, over all workers."""
    micro_batch_size: int | None = None
    """Windows a worker computes at once; default: the largest divisor of its share up to 64."""
    learning_rate: float = 3e-5
    """Its learning rate, after a tenth of the steps as warm-up."""
    max_seq_length: int = 384
    """Tokens in a window of a paragraph at most, the special ones included."""
    doc_stride: int = 128
    """Tokens from the begin of a window to that of the next."""
    max_question_length: int = 64
    """Tokens of a question; what is longer is cut off at the end."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of a run with examples of one length, one global batch and one schedule.

    Steps are counted over the whole run, from 1; a phase's own first step is ``steps_before + 1``.
    """

    section: str
    """Where its settings stand."""
    steps_before: int
    samples_before: int
    """Steps and samples of the phases before it."""
    max_seq_length: int
    max_predictions_per_seq: int
    global_batch_size: int
    micro_batch_size: int | None
    schedule: Schedule

    @property
    def num_steps(self) -> int:
        return self.schedule.total_steps

    @property
    def last_step(self) -> int:
        return self.steps_before + self.num_steps

    def samples(self, step: int) -> int:
        """Return how many samples the run has consumed after ``step``, a step of this phase."""
        return self.samples_before + (step - self.steps_before) * self.global_batch_size

    def learning_rate(self, step: int) -> float:
        """Return the rate of ``step``, counted over the whole run."""
        return learning_rate(self.schedule, step - self.steps_before - 1)


class PretrainConfig:
    """What the shared functions read of a recipe's settings."""

    recipe: ClassVar[str]
    """Its name in commands and records."""
    sentence_task: ClassVar[Literal["sop", "nsp"]]
    """Sentence order or next sentence: what labels mean, and what metrics are called."""
    fixed: ClassVar[tuple[str, ...]]
    """What must stay when a run goes on: weights, optimizer state and the order of data depend on it."""

    model: EncoderConfig
    data: TextConfig
    train: LoopConfig
    optim: OptimizerConfig
    finetune: ShortFinetuneConfig
    run: RunConfig
    distributed: DistributedConfig

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that have steps, in order; at least one."""
        raise NotImplementedError

    @property
    def num_parameters(self) -> int:
        """Parameters of the pretraining model, both heads included."""
        raise NotImplementedError

    @property
    def total_steps(self) -> int:
        return self.phases[-1].last_step

    def phase_after(self, step: int) -> Phase:
        """Return the phase of the step that follows ``step``; after the last one, the last phase."""
        return next((phase for phase in self.phases if step < phase.last_step), self.phases[-1])

    def check(self) -> None:
        """Check what the settings of both recipes have in common.

        Raises:
            UsageError: a number out of its range, or two that do not go together.
        """
        require_positive("train", self.train, "max_nonfinite_steps")
        require_positive("run", self.run, "log_frequency", "validation_frequency", "validation_samples")
        require_positive("run", self.run, "checkpoint_frequency", "keep_checkpoints")
        check_wire(self.distributed, precision=self.train.precision, clip=self.optim.clip)
        self._check_finetune()
        longest = self.model.max_position_embeddings
        for phase in self.phases:
            if phase.max_seq_length > longest:
                section = "data" if phase.section == "train" else phase.section
                raise UsageError(
                    f"{section}.max_seq_length {phase.max_seq_length} is more than "
                    f"model.max_position_embeddings {longest}: shorten the one or raise the other"
                )

    def _check_finetune(self) -> None:
        short = self.finetune
        require_positive("finetune", short, "total_steps", "global_batch_size", "micro_batch_size")
        if not short.at:
            return
        if short.data is None or short.eval is None:
            raise UsageError(
                "finetune.at needs finetune.data and finetune.eval: SQuAD files to train and to score on"
            )
        longest = self.model.max_position_embeddings
        if short.max_seq_length > longest:
            raise UsageError(
                f"finetune.max_seq_length {short.max_seq_length} is more than model.max_position_embeddings "
                f"{longest}: shorten the one or raise the other"
            )
        beyond = [step for step in short.at if not 1 <= step <= self.total_steps]
        if beyond:
            raise UsageError(f"finetune.at {beyond[0]} is not one of the steps 1 to {self.total_steps}")
        if getattr(self.model, "pre_layer_norm", False):
            raise UsageError(
                "finetune.at does not go with model.pre_layer_norm: such a model has no task heads"
            )


def check_warmup(section: str, warmup_steps: int, steps_section: str, total_steps: int) -> None:
    """Raise a :class:`UsageError` for a warm-up that is longer than its phase."""
    if not 0 <= warmup_steps <= total_steps:
        raise UsageError(
            f"{section}.warmup_steps {warmup_steps} must lie between 0 and {steps_section}.total_steps "
            f"{total_steps}"
        )
