"""Uses trained models on any number of workers: ``shoal predict`` and ``shoal evaluate`` of every recipe.

A recipe defines how its inputs are read and its outputs formatted (:class:`shoal.recipes.Use`). Inputs are
cut into the same micro-batches however many workers share them, by the functions with which training
evaluates. So outputs are the same bits on any number of workers, and those of training's own scores.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

import codecs
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from cyclopts import Parameter

from shoal.errors import UsageError, require_positive
from shoal.recipes import RECIPES, Row, Use, command_use
from shoal.recipes.model_source import (
    TRANSFORMERS,
    ModelSource,
    check_length,
    find_model,
)
from shoal.recipes.source_tokenizer import read_source_tokenizer
from shoal.train.config import REQUIRED, required
from shoal.train.run_dir import require_writable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor, nn

    from shoal.data.loader import Batch
    from shoal.data.text.sequences import Sequences
    from shoal.models.tasks import QuestionAnswering, SequenceClassification
    from shoal.train.gradients import Precision
    from shoal.train.world import Float32Array, World

    FloatArray = npt.NDArray[np.float64]
    Task = TypeVar("Task", QuestionAnswering, SequenceClassification)
    Model = TypeVar("Model", bound=nn.Module)
else:
    Task = Model = TypeVar("Task")

# ------------------------------------------------------------------------------------------------- settings

PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Settings of a model's computation; of a run, the default of most is the run's own."""

    batch_size: int = 32
    """Inputs per worker and batch; independent of the number of workers, as are the outputs."""
    refuses_fp16: ClassVar[str] = ""
    """Name of the recipe, if it cannot take fp16."""

    precision: PrecisionName = "auto"
    """Autocast type; auto: fp32 on CPUs; on GPUs that of the model's run, else bf16, or fp16 where there is
    none. It is in the output."""
    trained_precision: Annotated[str, Parameter(show=False)] = "auto"
    """That of the model's run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: one GPU per worker if there are enough, else the CPU."""

    def __post_init__(self) -> None:
        require_positive("", self, "batch_size")

    def precision_on(self, device_type: str) -> str:
        """Return the name of the precision: the one that was given, or on GPUs that of the model's run."""
        use_trained = self.precision == "auto" and device_type == "cuda"
        return self.trained_precision if use_trained else self.precision


@dataclass(frozen=True, kw_only=True)
class UseConfig(ComputeConfig):
    """The model, and how it computes."""

    model: Annotated[Path, Parameter(group=REQUIRED)]
    """Run directory of shoal, one of its checkpoints, a transformers directory with its tokenizer, or
    hub:NAME."""


@dataclass(frozen=True, kw_only=True)
class PredictConfig(UseConfig):
    """The model, how it computes, and where its outputs go."""

    out: Path | None = None
    """File for the output, one JSON object per line, in the order of the inputs; default: standard output."""

    @property
    def has_one_input(self) -> bool:
        """Return whether an input is given by options instead of files."""
        return False

    def check_out(self) -> None:
        """Raise a :class:`UsageError` unless the output can be written."""
        if self.out is not None and not self.out.resolve().parent.is_dir():
            raise UsageError(
                f"--out {self.out}: there is no folder {self.out.resolve().parent}; make it first"
            )

    def write(self, rows: Iterable[Row]) -> None:
        """Write a JSON object per line to the file, whole or not at all, or to standard output.

        Raises:
            ShoalError: the file cannot be written.
        """
        from shoal.atomic_io import write_atomically

        encoding = "utf-8" if self.out is not None else sys.stdout.encoding or "utf-8"
        has_all = codecs.lookup(encoding).name == "utf-8"  # for others JSON has escapes
        text = "".join(f"{json.dumps(row, ensure_ascii=not has_all)}\n" for row in rows)
        if self.out is not None:
            write_atomically(self.out, text.encode())
        else:
            sys.stdout.write(text)
            sys.stdout.flush()


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(UseConfig):
    """The model, how it computes, and where its predictions and scores go."""

    out: Path | None = None
    """Folder for predictions and scores; default: only print the scores."""


SETTINGS = {
    "run.evaluation_batch_size": "batch_size",
    "validation.batch_size": "batch_size",
    "validation.mirror": "mirror",
    "train.channels_last": "channels_last",
    "train.precision": "trained_precision",
}
"""Settings of a run, and the options here that mean the same; all others have the same name."""


# ------------------------------------------------------------------------------------------------- commands


def check_prediction(use: Use, inputs: tuple[Path, ...]) -> list[str]:
    """Check model, inputs and output before torch is imported; return the lines of a dry run.

    Raises:
        UsageError: one of them cannot be used.
    """
    use.find(use.settings.model)
    if use.one_input:
        if use.settings.has_one_input == bool(inputs):
            both = "both are given" if inputs else "neither is"
            raise UsageError(f"name files, or give one input with {use.one_input}: {both}")
        check_files(inputs)
    use.settings.check_out()
    return [use.describe(data) for data in use.read(inputs)]


def predict(use: Use, inputs: tuple[Path, ...], world: "World", precision: "Precision") -> None:
    """Compute the outputs of inputs and write them on the first worker; all workers call it.

    Raises:
        UsageError: the model or an input cannot be used.
        ShoalError: files are damaged or cannot be written.
    """
    use.open(world, precision)
    rows: list[Row] = []
    for data in use.read(inputs):
        _say(use, data, world)
        outputs = use.outputs(data)
        if outputs is not None:
            rows += use.rows(data, outputs)
    if world.is_main:
        use.settings.write({**row, "precision": precision.name} for row in rows)


def check_evaluation(use: Use, inputs: tuple[Path, ...]) -> list[str]:
    """Check model, labelled data and output before torch is imported; return the lines of a dry run.

    Raises:
        UsageError: one of them cannot be used.
    """
    use.find(use.settings.model)
    lines = use.check_evaluation(inputs)
    if use.settings.out is not None:
        require_writable(use.settings.out)
    return lines


def evaluate(use: Use, inputs: tuple[Path, ...], world: "World", precision: "Precision") -> None:
    """Score a model on labelled data and print the scores on the first worker; all workers call it.

    Raises:
        UsageError: the model or the data cannot be used.
        ShoalError: files are damaged or cannot be written.
    """
    if use.settings.out is not None and world.is_main:
        require_writable(use.settings.out)  # workers may have been started without a check
    use.open(world, precision)
    for data in use.labelled(inputs):
        _say(use, data, world)
        scores = use.score(data)
        if scores is not None:
            print(scores)


def samples_command(recipe: str) -> str:
    """Return the command of ``shoal predict`` that takes checkpoints of a recipe before its run ends.

    Raises:
        UsageError: there is none.
    """
    if recipe not in RECIPES or not RECIPES[recipe].samples:
        able = ", ".join(name for name, each in RECIPES.items() if each.samples)
        raise UsageError(
            f"run.samples: `shoal predict` takes no checkpoint of {recipe} before the run ends, but those of "
            f"{able}: leave it out"
        )
    return RECIPES[recipe].samples


def check_samples(recipe: str, config: Any) -> None:
    """Check the inputs of ``run.samples`` before torch is imported.

    Raises:
        UsageError: the recipe has no samples, or a file cannot be read.
    """
    name = samples_command(recipe)
    owner, command = next(
        (owner, each.predict) for owner, each in RECIPES.items() if each.predict and each.predict.name == name
    )
    use = command_use(owner, command)
    settings = use.Predict(model=config.run.dir)
    use(replace(settings, **_shared_sections(settings, config))).read(config.run.samples)


def _shared_sections(settings: Any, config: Any) -> dict[str, Any]:
    """Return the sections of ``settings`` with the values of the same names in a run's ``config``."""
    sections: dict[str, Any] = {}
    for section in fields(settings):
        own, theirs = getattr(settings, section.name), getattr(config, section.name, None)
        if is_dataclass(own) and not isinstance(own, type) and is_dataclass(theirs):
            names = {each.name for each in fields(own)} & {each.name for each in fields(theirs)}
            sections[section.name] = replace(own, **{name: getattr(theirs, name) for name in names})
    return sections


def _say(use: Use, data: Any, world: "World") -> None:
    """Print, on the first worker's stderr, which entries are left out of a file."""
    for line in use.remarks(data) if world.is_main else ():
        print(f"shoal: {line}", file=sys.stderr)


def check_files(inputs: tuple[Path, ...]) -> None:
    """Raise a :class:`UsageError` unless each of ``inputs`` is a file."""
    for path in inputs:
        if not path.is_file():
            raise UsageError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}: name files")


# ------------------------------------------------------------------------------------------------- models


def find_trained(path: Path) -> ModelSource:
    """Return the files of the language model in ``path``, with its sizes, labels and tokenizer.

    Raises:
        UsageError: there is none, or it is of a run of pretraining that has not ended.
    """
    source = find_model(path)
    if source.directory is None and source.description is None:
        raise UsageError(
            f"--model {path}: the run {source.run} has no folder {TRANSFORMERS}, and is not of a finetuning "
            "that has begun to train: finetune the pretrained model with `shoal finetune`"
        )
    return source


def read_trained(source: Path, read: "Callable[[Path, bool], Model]") -> "tuple[Model, Path]":
    """Return the model of ``source``, and the directory of its tokenizer; on each worker.

    Args:
        read: reads a transformers directory, with its weights or, if that is true, of its sizes alone.

    Raises:
        UsageError: no such model is there.
        ShoalError: its files are damaged.
    """
    from shoal.models.directory import resolve
    from shoal.train.checkpoint import load_model

    trained = find_trained(source)
    directory = resolve(required(trained.directory or trained.description))
    model = read(directory, trained.directory is None)
    if trained.checkpoint is not None:
        load_model(trained.checkpoint, model)
    return model, directory


def read_task_model(kind: "type[Task]", source: Path) -> "tuple[Task, Path]":
    """Return the model of ``source`` for a task, as :func:`read_trained` does.

    Raises:
        UsageError: no such model is there, or it was not trained for this task.
        ShoalError: its files are damaged.
    """
    from shoal.models.tasks import load_task_model

    model, directory = read_trained(
        source, lambda path, sizes_only: load_task_model(kind, path, from_scratch=sizes_only)
    )
    if model.new_parts and find_trained(source).directory is not None:
        raise UsageError(
            f"--model {source} was not trained for this task (it has no {model.new_parts[0]}): finetune it "
            "first"
        )
    return model, directory


def outputs_of(
    model: "nn.Module",
    data: "Sequences",
    compute: "Callable[[Batch], Tensor]",
    world: "World",
    precision: "Precision",
    *,
    batch_size: int,
    per_token: bool = False,
) -> "Float32Array | None":
    """Return the model's outputs in the order of ``data`` on the first worker, ``None`` on the others.

    Micro-batches are the same for any number of workers and threads, and so is each output, bit for bit.

    Args:
        compute: runs the model on a micro-batch; returns ``[T, columns]``, one row per token, or
            ``[B, columns]``, one row per sequence.
        batch_size: sequences of a micro-batch.
        per_token: which of the two.
    """
    import numpy as np
    import torch

    from shoal.data.loader import to_device
    from shoal.data.text.special_tokens import Int64Array, ranges
    from shoal.data.text.task_batches import evaluation_batches, evaluation_parts
    from shoal.train.world import gather_rows, infer

    def rows_of(rank: int) -> Int64Array:
        parts = evaluation_parts(data, batch_size=batch_size, rank=rank, num_workers=num_workers)
        sequences = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        if not per_token or not len(sequences):
            return sequences
        return ranges(data.bounds[sequences], data.lengths[sequences])

    def computed(batch: "Batch") -> "Tensor":
        with precision.autocast():
            return compute(to_device(batch, world.device)).float().cpu()

    rank, num_workers = world.rank, world.num_workers
    model.eval()
    batches = evaluation_batches(data, batch_size=batch_size, rank=rank, num_workers=num_workers)
    own = list(infer(computed, (batch for _, batch in batches), world.device))
    model.train()
    rows = [rows_of(worker) for worker in range(num_workers)]
    return gather_rows(world, torch.cat(own) if own else torch.empty(0, 1), rows)


def probabilities(logits: "Float32Array") -> "FloatArray":
    """Return the softmax of each row, float64 ``[N, classes]``."""
    import numpy as np

    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    chances: FloatArray = weights / weights.sum(axis=1, keepdims=True)
    return chances


def read_tokenizer(directory: Path, setting: str, max_seq_length: int) -> Any:
    """Return the tokenizer of a transformers directory whose model has positions for so many tokens.

    Raises:
        UsageError: it has none of its own, or too few positions.
    """
    check_length(directory, setting, max_seq_length)
    return read_source_tokenizer(directory)
