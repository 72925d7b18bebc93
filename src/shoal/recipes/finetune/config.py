"""All settings of finetuning; presets are the TOML files beside this one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.data.squad.config import AnswerConfig, WindowConfig
from shoal.errors import UsageError
from shoal.train.config import DistributedConfig, LoopConfig, OptimConfig, check_wire, require_positive

PRESETS = ("bert", "albert", "tiny")
T5_PRESETS = ("t5", "tiny")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Which model to start from."""

    path: Path | None = None
    """Run directory of shoal, or a transformers directory with its tokenizer, or hub:NAME; also --model."""
    from_scratch: bool = False
    """Take only its sizes and its tokenizer and begin with random weights: what is pretraining worth?"""
    dropout: float | None = None
    """Dropout of hidden states and of attention; default: what the model's own config.json says."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, a third more time."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """The loop: how long, how large a batch, in what precision."""

    epochs: float = 2.0
    """Times that the data is seen."""
    total_steps: int | None = None
    """Optimizer steps of the whole run; default: as train.epochs says."""
    global_batch_size: int = 32
    """Sequences in one optimizer step, over all workers."""
    micro_batch_size: int | None = None
    """Sequences a worker computes at once; default: the largest divisor of its share up to 64."""
    seed: int = 42
    """Seed of the new layers' weights, the data order and dropout."""
    compile: bool | None = None
    """torch.compile the model; default: no, since lengths vary from batch to batch and runs are short."""


@dataclass(frozen=True, kw_only=True)
class FinetuneOptimConfig(OptimConfig):
    """The optimizer and its schedule, in optimizer steps."""

    optimizer: Literal["lamb", "lans", "adamw", "adafactor"] = "adamw"
    """torch's AdamW, LAMB or LANS for large batches, or T5's Adafactor."""
    learning_rate: float = 3e-5
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0; 0: as optim.warmup_share says."""
    warmup_share: float = 0.1
    """Part of all steps that warms up."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run lives and what it writes when."""

    name: str | None = None
    """Name in reports; default: the name of the run directory."""
    dir: Path | None = None
    """Run directory; default: runs/TASK-PRESET. The same directory continues the run."""
    log_frequency: int = 50
    """Steps between lines of the record."""
    evaluation_frequency: int | None = None
    """Steps between evaluations; default: one, at the end."""
    evaluation_batch_size: int = 32
    """Sequences a worker evaluates at once. It does not follow the number of workers, so logits do not."""
    checkpoint_frequency: int = 1_000
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """How many checkpoints stay on disk."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What both tasks have."""

    model: SourceConfig = field(default_factory=SourceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: FinetuneOptimConfig = field(default_factory=FinetuneOptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        require_positive("train", self.train, "total_steps", "global_batch_size", "micro_batch_size")
        require_positive("train", self.train, "max_nonfinite_steps")
        require_positive("run", self.run, "log_frequency", "evaluation_frequency", "evaluation_batch_size")
        require_positive("run", self.run, "checkpoint_frequency", "keep_checkpoints")
        check_wire(self.distributed, precision=self.train.precision, clip=self.optim.clip)
        if not self.train.epochs > 0:
            raise UsageError(f"train.epochs {self.train.epochs} must be above 0")
        if not 0 <= self.optim.warmup_share <= 1:
            raise UsageError(f"optim.warmup_share {self.optim.warmup_share} must lie between 0 and 1")
        if self.model.dropout is not None and not 0 <= self.model.dropout < 1:
            raise UsageError(f"model.dropout {self.model.dropout} must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class SquadDataConfig:
    """Which questions."""

    path: Path | None = None
    """Training questions, the official JSON of SQuAD 1.1 or 2.0; also --data."""
    eval: Path | None = None
    """Questions to evaluate on; also --eval."""
    misplaced: Literal["skip", "refuse"] = "skip"
    """Training answers whose text does not stand at answer_start: count and leave out, or refuse the file."""


@dataclass(frozen=True, kw_only=True)
class SquadFinetuneConfig(FinetuneConfig):
    """Finetuning on SQuAD."""

    data: SquadDataConfig = field(default_factory=SquadDataConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    answers: AnswerConfig = field(default_factory=AnswerConfig)


@dataclass(frozen=True, kw_only=True)
class ClassifyDataConfig:
    """Which examples, and what the columns of the files are called; the defaults are MNLI's."""

    path: Path | None = None
    """Training examples, .tsv (column names first) or .jsonl; also --data."""
    eval: tuple[Path, ...] = ()
    """Files to evaluate on, each by itself, such as MNLI's matched and mismatched; also --eval."""
    labels: tuple[str, ...] = ()
    """The set of labels, in the order of the model's outputs; default: those of the training file, sorted.
    Also --labels."""
    first: str = "sentence1"
    """Column of the text, or of the first of a pair."""
    second: str = "sentence2"
    """Column of the second text of a pair; empty (--data.second "") for single texts."""
    label: tuple[str, ...] = ("gold_label", "label")
    """Column of the label: the first of these that a file has."""
    unlabelled: str = "-"
    """Label of examples on which people did not agree; they are left out."""
    max_seq_length: int = 128
    """Tokens in a sequence at most, the special ones included; the longer text of a pair is cut first."""


@dataclass(frozen=True, kw_only=True)
class ClassifyFinetuneConfig(FinetuneConfig):
    """Finetuning on sentences or pairs with labels."""

    data: ClassifyDataConfig = field(default_factory=ClassifyDataConfig)


@dataclass(frozen=True, kw_only=True)
class T5DataConfig(ClassifyDataConfig):
    """Which examples, how they are worded, and what the columns of the files are called."""

    task: str = "mnli"
    """The task's name, with which the input begins: mnli, qnli, qqp … in T5's wording; also --task."""
    template: str | None = None
    """Another wording, such as "topic of: {first}", with {first} and {second} in place of the texts."""
    max_seq_length: int = 512
    """Tokens of an input at most, the end token included; what is longer is cut at the end."""

    def __post_init__(self) -> None:
        if self.template is not None and self.template.count("{first}") != 1:
            raise UsageError(f'data.template {self.template!r} must have "{{first}}" in it, once')


@dataclass(frozen=True, kw_only=True)
class T5OptimConfig(FinetuneOptimConfig):
    """The optimizer and its schedule: by default T5's, a constant rate."""

    optimizer: Literal["lamb", "lans", "adamw", "adafactor"] = "adafactor"
    """Adafactor, whose rate is relative to a weight's size, or one of the others."""
    learning_rate: float = 1e-3
    """Learning rate at the end of the warm-up."""
    warmup_share: float = 0.0
    """Part of all steps that warms up."""
    power: float = 0.0
    """Power of the polynomial decay; 0: a constant rate."""
    weight_decay: float = 0.0
    """Decay of weights, not of biases and norms."""
    max_grad_norm: float | None = None
    """Clip gradients to this norm; Adafactor clips its updates instead."""


@dataclass(frozen=True, kw_only=True)
class T5FinetuneConfig(FinetuneConfig):
    """Finetuning T5 on sentences or pairs with labels, which it writes as words."""

    data: T5DataConfig = field(default_factory=T5DataConfig)
    optim: T5OptimConfig = field(default_factory=T5OptimConfig)


_ALWAYS_FIXED = (
    "model.path",
    "model.from_scratch",
    "train.seed",
    "train.global_batch_size",
    "optim.optimizer",
)
SQUAD_FIXED = (*_ALWAYS_FIXED, "data.path", "data.misplaced", "window")
CLASSIFY_FIXED = (
    *_ALWAYS_FIXED,
    *(f"data.{name}" for name in ("path", "labels", "first", "second", "label", "unlabelled")),
    "data.max_seq_length",
)
T5_FIXED = (*CLASSIFY_FIXED, "data.task", "data.template")
"""What must stay when a run goes on: the weights, the optimizer's state and the data order depend on it."""
