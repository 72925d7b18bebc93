"""Labels texts and pairs with a finetuned model: ``shoal predict classify``, ``shoal evaluate classify``."""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.recipes import classify, using
from shoal.recipes.classify import LabelledColumnsConfig, TextColumnsConfig
from shoal.recipes.using import PredictConfig, Row, UseConfig
from shoal.train.run_dir import require_writable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shoal.data.text.classify import ClassifyData, ClassifyScores
    from shoal.models.tasks import SequenceClassification
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

    length = what.data.max_seq_length
    model, tokenizer, labels = _read_model(what.model, length, world)
    for data in read_texts(what, what.data, inputs, labels):
        pairs = make_pairs(data, tokenizer, max_seq_length=length)
        logits = classify.label_logits(model, pairs, world, precision, batch_size=what.batch_size)
        if logits is not None:
            yield from rows_of(labels, logits)


def _read_model(
    source: Path, length: int, world: "World"
) -> "tuple[SequenceClassification, Tokenizer, tuple[str, ...]]":
    from shoal.models.tasks import SequenceClassification

    model, directory = using.read_task_model(SequenceClassification, source)
    tokenizer = using.read_tokenizer(directory, "data.max_seq_length", length)
    names: dict[int, str] = model.weights.config.id2label
    return model.to(world.device), tokenizer, tuple(names[number] for number in sorted(names))


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
        return [data.ClassifyData(path=Path("--text"), labels=labels, examples=(example,))]
    names = data.Columns(first=columns.first, second=columns.second or None)
    return [data.read_texts(path, names, labels=labels) for path in inputs]


def rows_of(labels: tuple[str, ...], logits: "Float32Array") -> Iterator[Row]:
    """Yield the label of each row of logits, and the probabilities of all."""
    chances_of = using.probabilities(logits)
    for number, (row, chances) in enumerate(zip(logits, chances_of, strict=True), start=1):
        yield {
            "id": number,
            "label": labels[int(row.argmax())],
            "probabilities": dict(zip(labels, chances.tolist(), strict=True)),
        }


# ------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True, kw_only=True)
class EvaluateLabelsConfig(UseConfig):
    """The model, and where its predictions and scores go."""

    out: Path | None = None
    """Folder for predictions-NAME.txt and scores-NAME.json of each file; default: only print the tables."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(EvaluateLabelsConfig):
    """The form in which texts and labels are read."""

    data: LabelledColumnsConfig = field(default_factory=LabelledColumnsConfig)


def check_evaluation(what: EvaluateLabelsConfig, inputs: tuple[Path, ...]) -> list[str]:
    """Check what can be checked without torch; return the lines of a dry run.

    Raises:
        UsageError: no model, no file, two files of one name, or a folder that cannot be written.
    """
    using.find_trained(what.model)
    using.check_files(inputs)
    names = [path.stem for path in inputs]
    if not inputs or len(set(names)) != len(names):
        raise UsageError(
            f"name files of texts and labels, each of another name ({', '.join(names) or 'none is named'})"
        )
    if what.out is not None:
        require_writable(what.out)
    return [f"files        {', '.join(map(str, inputs))}"]


def evaluate(
    what: Evaluate, inputs: tuple[Path, ...], world: "World", precision: "Precision"
) -> Iterator[str]:
    """Yield the table of each file, on the first worker; all workers call it.

    Raises:
        UsageError: the model is for another task, or a file has a label that it does not know.
        ShoalError: its files are damaged, or a file cannot be written.
    """
    from shoal.data.text.classify import make_pairs, read_classify

    using.make_folder(what.out, world)
    length = what.data.max_seq_length
    model, tokenizer, labels = _read_model(what.model, length, world)
    for path in inputs:
        data = read_classify(path, what.data.columns(), labels=labels)
        pairs = make_pairs(data, tokenizer, max_seq_length=length)
        logits = classify.label_logits(model, pairs, world, precision, batch_size=what.batch_size)
        if logits is not None:
            predicted = [int(label) for label in logits.argmax(axis=1)]
            yield told(data, classify.write_scores(what.out, data, labels, predicted), precision)


def told(
    data: "ClassifyData", scores: "ClassifyScores", precision: "Precision", name: str = "accuracy"
) -> str:
    """Return the printed summary of the predictions of a file."""
    score = f"{name.replace('_', ' ')} {scores.accuracy:.2f} %"
    summary = f"{data.path}: {score} of {len(data.examples):,} examples, in {precision.name}"
    return f"{summary}\n{scores.table()}"
