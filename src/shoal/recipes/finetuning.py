"""Finds the model to start from and plans steps for the finetuning scripts.

The scripts are ``squad.py``, ``classify.py`` and ``t5_classify.py``.
"""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from shoal.decide.batch import BatchPlan, MicroBatch, known_size, plan_batch
from shoal.decide.epochs import covering_steps
from shoal.errors import UsageError, require_positive
from shoal.recipes import DryRun, Sample
from shoal.recipes.model_source import (
    MODEL_CONFIG,
    TRANSFORMERS,
    ModelSource,
    check_length,
    find_model,
    read_model_config,
)
from shoal.recipes.prepared_text import tokenizer_files
from shoal.recipes.source_tokenizer import read_source_tokenizer
from shoal.train.config import (
    DistributedConfig,
    LoopConfig,
    RunOutputConfig,
    ServersConfig,
    check_combination,
    required,
    settings_lines,
)
from shoal.train.optim_config import OptimConfig, check_served, check_warmup
from shoal.train.run_dir import keep_description

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shoal.data.loader import Batch
    from shoal.data.text.sequences import Sequences
    from shoal.models.directory import HasWeights
    from shoal.models.tasks import TaskModel
    from shoal.optim.lr_schedules import LRSchedule
    from shoal.train.run import Run

START = "start"
"""Folder of the run directory with the weights of a pretraining run, exported once."""

# ------------------------------------------------------------------------------------------------- config


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """The model to start from."""

    path: Path | None = None
    """Run directory of shoal, a checkpoint in one, a transformers directory with its tokenizer, or
    hub:NAME."""
    from_scratch: bool = False
    """Use only the model's sizes and tokenizer, and start from random weights."""
    dropout: float | None = None
    """Dropout of hidden states and of attention; default: as in the model's config.json."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of :func:`shoal.models.tasks.load_task_model`."""
        return {name: value for name, value in vars(self).items() if name != "path"}


@dataclass(frozen=True, kw_only=True)
class FinetuneTrainConfig(LoopConfig):
    """The loop: how long, how large a batch, in what precision."""

    epochs: float = 2.0
    """Passes over the training data."""
    total_steps: int | None = None
    """Optimizer steps of the whole run; default: from train.epochs."""
    global_batch_size: int = 32
    """Sequences in one optimizer step, over all workers."""
    micro_batch_size: MicroBatch | None = None
    """Sequences per worker and forward pass; default: the largest divisor of its share up to 64; auto: the
    largest that fits into memory."""
    compile: bool | None = None
    """Compile the model with torch.compile; default: on GPUs, if there is a C compiler. The layers share the
    compiled code, for all lengths."""


@dataclass(frozen=True, kw_only=True)
class FinetuneOptimConfig(OptimConfig):
    """The optimizer and its schedule, in optimizer steps."""

    optimizer: Literal["lamb", "lans", "adamw", "adafactor"] = "adamw"
    """torch's AdamW, LAMB or LANS for large batches, or T5's Adafactor."""
    learning_rate: float = 3e-5
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0; 0: from optim.warmup_share."""
    warmup_share: float = 0.1
    """Fraction of all steps used for warm-up."""


@dataclass(frozen=True, kw_only=True)
class FinetuneRunConfig(RunOutputConfig):
    """Run directory, and frequencies of evaluations and checkpoints."""

    validation_frequency: int | None = None
    """Steps between evaluations; default: only at the end."""
    evaluation_batch_size: int = 32
    """Sequences per worker and evaluation batch; independent of the number of workers, as are the logits."""
    checkpoint_frequency: int = 1_000
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Number of most recent checkpoints to keep."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Settings of all finetuning recipes, without those of their data."""

    unit: ClassVar[str] = "sequences"
    memory_remedy: ClassVar[str] = "--model.activation-checkpointing"
    longer: ClassVar[str] = "--train.epochs"

    model: SourceConfig = field(default_factory=SourceConfig)
    train: FinetuneTrainConfig = field(default_factory=FinetuneTrainConfig)
    optim: FinetuneOptimConfig = field(default_factory=FinetuneOptimConfig)
    run: FinetuneRunConfig = field(default_factory=FinetuneRunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)

    def batch(self, num_workers: int) -> BatchPlan:
        """Return the division of a global batch over this number of workers.

        Raises:
            UsageError: the sizes do not divide.
        """
        return plan_batch(self.train, num_workers, unit=self.unit)

    def __post_init__(self) -> None:
        check_combination(self.train, self.distributed, self.servers, clip=self.optim.clip)
        check_served(self.optim, self.servers)
        if not self.train.epochs > 0:
            raise UsageError(f"train.epochs {self.train.epochs} must be above 0")
        require_positive("optim", self.optim, "warmup_share", least=0, most=1)
        require_positive("model", self.model, "dropout", least=0, below=1)


FinetuneConfigT = TypeVar("FinetuneConfigT", bound=FinetuneConfig)

IMMUTABLE = (
    "model.path",
    "model.from_scratch",
    "data.path",
    "train.seed",
    "train.global_batch_size",
    "optim.optimizer",
)
"""Settings that must stay when a run continues: weights, optimizer state or data order depend on them."""


def require_paths(config: FinetuneConfig, data: Any, samples: str, *, evaluates: bool = True) -> None:
    """Check that the model and the files are named.

    Args:
        data: the section with ``path``, the training file, and ``eval``, the evaluation files.
        samples: what the files hold, such as ``questions``.
        evaluates: there must be evaluation files.

    Raises:
        UsageError: one is not.
    """
    for name, option, value, purpose in (
        ("model.path", "--model", config.model.path, "a run of shoal or a transformers directory"),
        ("data.path", "--data", data.path, f"a file of training {samples}"),
        ("data.eval", "--eval", data.eval or (None if evaluates else ()), f"{samples} to evaluate on"),
    ):
        if value is None:
            raise UsageError(f"{name} is not set: name {purpose} with {option}")


# ------------------------------------------------------------------------------------------------- model


def open_source(config: SourceConfig, run: "Run") -> Path:
    """Return the transformers directory to start from; the first worker exports a pretraining run."""
    from shoal.models.directory import resolve
    from shoal.train.world import run_on_all

    path, world = required(config.path), run.world
    if find_source(path).kind == "hub":  # each host has a cache of its own
        return Path(run_on_all(world.control, lambda: str(resolve(path)))[world.rank])
    folder, is_first = required(run.directory), world.is_main or world.is_late
    return Path(run_on_all(world.control, lambda: str(prepare_source(path, folder)) if is_first else "")[0])


def prepare_source(path: Path, run_dir: Path) -> Path:
    """Return the transformers directory of the model in ``path``.

    Of a pretraining run, the best or newest checkpoint (or the named one) is exported into ``run_dir``, once.

    Raises:
        UsageError: ``path`` names no model, or a checkpoint of a finetuning.
        ShoalError: the run has no checkpoint, or it is damaged.
    """
    from shoal.models.directory import resolve
    from shoal.recipes.export import export_model

    source, start = find_source(path), run_dir / START
    if source.checkpoint is None:
        return resolve(required(source.directory))
    return start if (start / MODEL_CONFIG).is_file() else export_model(path, start, folders=(TRANSFORMERS,))


def find_source(path: Path) -> ModelSource:
    """Return the files of the model to start from."""
    return find_model(path, "model.path")


def new_parts(model: "TaskModel") -> list[str]:
    """Return a line about the weights that the source did not have, if there are any."""
    total = sum(1 for _ in model.parameters())
    if not model.new_parts:
        return []
    names = "all of them" if len(model.new_parts) == total else ", ".join(model.new_parts)
    return [f"weights drawn from the seed: {names}"]


# ------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The steps of a finetuning, the arithmetic of its batch and its schedule."""

    total_steps: int
    batch: BatchPlan
    schedule: "LRSchedule"


def make_plan(config: FinetuneConfig, *, num_sequences: int, num_workers: int) -> RunPlan:
    """Return the steps that the settings mean for so much data.

    Raises:
        UsageError: the warm-up is longer than the run, or the batch does not divide.
    """
    from shoal.train.optim_config import schedule_of

    train, optim = config.train, config.optim
    total = train.total_steps or covering_steps(
        train.epochs, num_examples=num_sequences, global_batch_size=train.global_batch_size
    )
    warmup = optim.warmup_steps or round(optim.warmup_share * total)
    check_warmup("optim", warmup, "train", total)
    batch = config.batch(num_workers)
    rates = replace(optim, warmup_steps=warmup)
    return RunPlan(total_steps=total, batch=batch, schedule=schedule_of(rates, optim, total))


# ------------------------------------------------------------------------------------------------- files


def keep_sizes(
    run: "Run", model: "HasWeights", tokenizer: "Tokenizer", max_length: int | None = None
) -> None:
    """Write the model's sizes, labels and tokenizer into the run directory: checkpoints are used with them.

    Args:
        max_length: as for :func:`tokenizer_files`.
    """
    if run.directory is None or not run.world.is_main:
        return
    config = model.weights.config.to_json_string().encode()
    files = {MODEL_CONFIG: config, **tokenizer_files(tokenizer, model, max_length)}
    keep_description(run.directory, files.__getitem__, *files)


def finish(run: "Run", model: "HasWeights", source: Path, max_length: int | None = None) -> int:
    """End the run with the finetuned model and its tokenizer in its directory; return the exit code.

    Args:
        max_length: as for :func:`tokenizer_files`.
    """
    from shoal.models.directory import save

    def export(directory: Path) -> None:
        tokenizer = tokenizer_files(read_source_tokenizer(source), model, max_length)
        save(model, directory / TRANSFORMERS, tokenizer=tokenizer)

    return run.finish(export, lambda _: f"the finetuned model is in {required(run.directory) / TRANSFORMERS}")


# ------------------------------------------------------------------------------------------------- sample

_NUM_EXAMPLES = 256


def first_examples(examples: "Sequences", config: FinetuneConfig) -> "Batch":
    """Return the first examples as one micro-batch."""
    import numpy as np

    from shoal.data.loader import as_tensors

    chosen = np.arange(min(known_size(config.train.micro_batch_size) or 1, len(examples)))
    return as_tensors(examples.batch(chosen), pin_memory=False)


def sample(
    config: FinetuneConfig,
    kind: type[Any],
    length: int,
    examples: "Callable[[Tokenizer], Sequences] | None",
    labels: tuple[str, ...] = (),
) -> Sample:
    """Return a sample of an encoder with the head of a task.

    Args:
        kind: ``QuestionAnswering`` or ``SequenceClassification``.
        length: tokens of a sequence.
        examples: makes the training examples, of which the first count; ``None``: full sequences.
        labels: of a classification.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    from shoal.models.encoder import full_sequences, packed_inputs
    from shoal.models.tasks import load_task_model

    options, inputs = config.model.options | {"from_scratch": True}, full_sequences(2, length)
    with tempfile.TemporaryDirectory() as folder:
        source = prepare_source(required(config.model.path), Path(folder))
        with torch.device("meta"):
            model = load_task_model(kind, source, labels=labels, **options)
        if examples is not None:
            inputs = packed_inputs(first_examples(examples(read_source_tokenizer(source)), config))
    return Sample(
        model=model,
        inputs=inputs,
        loss=lambda model, inputs: torch.stack([each.sum() for each in tree_leaves(model(**inputs))]).sum(),
        num_samples=len(inputs["cu_seqlens"]) - 1,
        sequence_length=length,
    )


Words = Callable[[int], str]
"""Returns so many random words."""


def trial(
    config: FinetuneConfigT, folder: Path, suffix: str, write: Callable[[int, Words], str]
) -> FinetuneConfigT:
    """Return the settings of a short run, on synthetic examples where no files are named.

    Args:
        suffix: of the files.
        write: returns the text of a file with so many examples, each as long as a sequence.
    """
    from shoal.models.synthetic import LABELS, num_words, text

    data: Any = config.data  # type: ignore[attr-defined]
    model = required(config.model.path)
    sizes = read_model_config(model) if (model / MODEL_CONFIG).is_file() else {}
    vocabulary = max(num_words(sizes.get("vocab_size", 0)), 1_000)

    def new_file(name: str, num_examples: int) -> Path:
        draw, path = random.Random(1), folder / f"{name}{suffix}"
        words = partial(text, draw, vocabulary=vocabulary)
        path.write_text(write(num_examples, words), encoding="utf-8")
        return path

    held_out = data.eval or new_file("evaluation", len(LABELS))
    if data.eval == ():
        held_out = (held_out,)
    data = replace(data, path=data.path or new_file("training", _NUM_EXAMPLES), eval=held_out)
    return replace(config, data=data)  # type: ignore[call-arg]


# ------------------------------------------------------------------------------------------------- dry run


def check_model(
    config: FinetuneConfig, num_workers: int, *, setting: str, max_seq_length: int, exports: bool = False
) -> "Tokenizer | None":
    """Check the batch and the sizes of the model to start from; return its tokenizer, if any.

    Args:
        setting: name of ``max_seq_length``.
        max_seq_length: tokens in a sequence at most.
        exports: a run of shoal is exported and checked too; otherwise it is left for the main worker.

    Raises:
        UsageError: there is no such model, it has no tokenizer of its own, or too few positions.
        ShoalError: it is a run without a checkpoint.
    """
    make_plan(config, num_sequences=config.train.global_batch_size, num_workers=num_workers)
    path = required(config.model.path)
    check_length(path, setting, max_seq_length)
    if find_source(path).checkpoint is not None and not exports:
        return None
    with tempfile.TemporaryDirectory() as folder:
        directory = prepare_source(path, Path(folder))
        check_length(directory, setting, max_seq_length)
        return read_source_tokenizer(directory)


def describe(config: FinetuneConfig, num_sequences: int, num_workers: int) -> list[str]:
    """Return the lines of a dry run that do not depend on the task: settings and arithmetic."""
    plan = make_plan(config, num_sequences=num_sequences, num_workers=num_workers)
    epochs = plan.total_steps * plan.batch.global_batch_size / num_sequences
    return [
        *settings_lines(config),
        f"batch        {plan.batch}",
        f"run          {plan.total_steps:,} steps, {plan.schedule.warmup_steps:,} of them warm-up: "
        f"{epochs:.2f} times {num_sequences:,} sequences",
    ]


def memory_line(
    config: Any,
    dry_run: DryRun,
    sample_of: "Callable[[Any], Sample]",
    *,
    num_sequences: int,
    num_workers: int,
) -> str:
    """Return the line of a dry run about memory, which is that of full sequences.

    Args:
        sample_of: of the recipe; it returns full sequences where no file is named.
    """
    plan = make_plan(config, num_sequences=num_sequences, num_workers=num_workers)
    full = replace(config, data=replace(config.data, path=None))
    return dry_run.memory_line(config, (sample_of(full), plan.batch))
