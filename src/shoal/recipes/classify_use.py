"""Labels texts and pairs with a finetuned model: ``shoal predict classify``."""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import UsageError
from shoal.recipes import classify, using
from shoal.recipes.classify import TextColumnsConfig
from shoal.recipes.using import PredictConfig, Row

if TYPE_CHECKING:
    from shoal.data.text.classify import ClassifyData
    from shoal.train.gradients import Precision
    from shoal.train.world import Float32Array, World


@dataclass(frozen=True, kw_only=True)
class TextsConfig(PredictConfig):
    """Texts on the command line instead of files."""

    text: str | None = None
    """One text, or the first of a pair, instead of files."""
    second_text: str | None = None
    """The second text of the pair."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.second_text is not None and self.text is None:
            raise UsageError("--second-text is the second of a pair: give the first with --text")


@dataclass(frozen=True, kw_only=True)
class Predict(TextsConfig):
    """Texts, and the form in which they are read."""

    data: TextColumnsConfig = field(default_factory=TextColumnsConfig)


def check_prediction(what: Predict, inputs: tuple[Path, ...]) -> list[str]:
    """Check what can be checked without torch; return the lines of a dry run.

    Raises:
        UsageError: no model, no text, or a file that cannot be read.
    """
    using.check_inputs(what, inputs, single=what.text is not None, option="--text")
    return [f"{file.path}: {len(file.examples):,} texts" for file in read_texts(what, what.data, inputs, ())]


def predict(what: Predict, inputs: tuple[Path, ...], world: "World", precision: "Precision") -> Iterator[Row]:
    """Yield a row for each text, on the first worker; all workers call it.

    Raises:
        UsageError: the model is for another task, or too small for the texts.
        ShoalError: its files are damaged.
    """
    from shoal.data.text.classify import make_pairs
    from shoal.models.tasks import SequenceClassification

    length = what.data.max_seq_length
    model, directory = using.read_task_model(SequenceClassification, what.model)
    tokenizer = using.read_tokenizer(directory, "data.max_seq_length", length)
    model.to(world.device)
    names: dict[int, str] = model.weights.config.id2label
    labels = tuple(names[number] for number in sorted(names))
    for data in read_texts(what, what.data, inputs, labels):
        pairs = make_pairs(data, tokenizer, max_seq_length=length)
        logits = classify.label_logits(model, pairs, world, precision, batch_size=what.batch_size)
        if logits is not None:
            yield from _rows(labels, logits)


def read_texts(
    what: TextsConfig, columns: TextColumnsConfig, inputs: tuple[Path, ...], labels: tuple[str, ...]
) -> "list[ClassifyData]":
    """Return the texts of the files, or the one of the command line.

    Raises:
        UsageError: a file cannot be read or is damaged.
    """
    from shoal.data.text import classify as data

    if what.text is not None:
        example = data.Example(what.text, what.second_text, 0)
        return [data.ClassifyData(path=Path("--text"), labels=labels, examples=(example,), num_unlabelled=0)]
    names = data.Columns(first=columns.first, second=columns.second or None, label=())
    return [data.read_texts(path, names, labels=labels) for path in inputs]


def _rows(labels: tuple[str, ...], logits: "Float32Array") -> Iterator[Row]:
    import numpy as np

    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    probabilities: Any = weights / weights.sum(axis=1, keepdims=True)
    for number, (row, chances) in enumerate(zip(logits, probabilities, strict=True), start=1):
        yield {
            "id": number,
            "label": labels[int(row.argmax())],
            "probabilities": dict(zip(labels, chances.tolist(), strict=True)),
        }
