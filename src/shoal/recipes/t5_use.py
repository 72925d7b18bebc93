"""Labels texts with a finetuned T5, or lets a T5 write: ``shoal predict t5``, ``shoal evaluate t5``."""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.data.text.text_scores import require_packages
from shoal.errors import UsageError
from shoal.recipes import classify, classify_use, t5_written, using
from shoal.recipes.classify import LabelledColumnsConfig
from shoal.recipes.classify_use import EvaluateLabelsConfig, TextsConfig
from shoal.recipes.t5_written import Form, GenerationConfig, SearchConfig, T5WordingConfig
from shoal.recipes.using import Row

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shoal.data.text.classify import ClassifyData
    from shoal.data.text.text_to_text import TextToText
    from shoal.models.t5 import T5
    from shoal.train.gradients import Precision
    from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class T5TextsConfig(T5WordingConfig):
    """Columns of texts, their wording and length; by default those with which the model was finetuned."""

    task: str = ""
    """The task's name, with which inputs begin, in T5's wording; default: the model's."""


@dataclass(frozen=True, kw_only=True)
class Predict(TextsConfig):
    """Texts, and the form in which they are read."""

    refuses_fp16: ClassVar[str] = "T5"

    data: T5TextsConfig = field(default_factory=T5TextsConfig)
    generation: SearchConfig = field(default_factory=SearchConfig)


def check_prediction(what: Predict, inputs: tuple[Path, ...]) -> list[str]:
    """Check what can be checked without torch; return the lines of a dry run.

    Raises:
        UsageError: no model, no text, or a file that cannot be read.
    """
    using.check_inputs(what, inputs, single=what.text is not None, option="--text")
    files = classify_use.read_texts(what, _columns(what.data), inputs, ())
    return [f"{file.path}: {len(file.examples):,} texts" for file in files]


def predict(what: Predict, inputs: tuple[Path, ...], world: "World", precision: "Precision") -> Iterator[Row]:
    """Yield a row for each text, on the first worker; all workers call it.

    Raises:
        UsageError: the model is no T5.
        ShoalError: its files are damaged.
    """
    model, tokenizer = _read_model(what.model, what.data, world)
    form, how, size = t5_written.form_of(model), (world, precision), what.batch_size
    columns = _columns(what.data) if form.labels else replace(_columns(what.data), second="")
    for data in classify_use.read_texts(what, columns, inputs, form.labels):
        file = _examples(what.data, data, model, tokenizer, form)
        if form.labels and what.data.labels_by == "likelihood":
            losses = t5_written.label_losses(model, file, *how, batch_size=size)
            yield from () if losses is None else classify_use.rows_of(form.labels, -losses)
            continue
        if form.labels:
            found = t5_written.predicted_labels(model, file, "generation", *how, batch_size=size)
            names = (*form.labels, None)
            rows = [{"generated_label": names[label]} for label in found or ()]
        else:
            search = form.searched(what.generation)
            texts = t5_written.written_texts(model, file, tokenizer, search, *how, batch_size=size)
            rows = [{"text": text} for text in texts or ()]
        yield from ({"id": number} | row for number, row in enumerate(rows, start=1))


def _columns(columns: T5TextsConfig) -> T5TextsConfig:
    """Return the names under which the texts to read are found: those of a task from text to text too."""
    return replace(columns, first=columns.source_column, second="") if columns.is_text else columns


def _read_model(source: Path, columns: T5TextsConfig, world: "World") -> "tuple[T5, Tokenizer]":
    from shoal.models.t5 import read_t5

    model, directory = using.read_trained(source, read_t5)
    tokenizer = using.read_tokenizer(directory, "data.max_seq_length", columns.max_seq_length)
    return model.to(world.device), tokenizer


def _examples(
    columns: T5TextsConfig, data: "ClassifyData", model: "T5", tokenizer: "Tokenizer", form: Form
) -> "TextToText":
    asked = columns.template or columns.task
    template = t5_written.wording(columns, data) if asked else form.template
    return t5_written.examples_of(columns, data, model, tokenizer, template=template)


# ------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True, kw_only=True)
class T5LabelledConfig(T5TextsConfig, LabelledColumnsConfig):
    """Columns of texts and labels, their wording and length."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(EvaluateLabelsConfig):
    """The form in which texts and labels are read."""

    refuses_fp16: ClassVar[str] = "T5"

    data: T5LabelledConfig = field(default_factory=T5LabelledConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)


def check_evaluation(what: Evaluate, inputs: tuple[Path, ...]) -> list[str]:
    """Check what can be checked without torch; return the lines of a dry run.

    Raises:
        UsageError: no model, no file, two files of one name, a folder that cannot be written, a column that
            is not named, or a package of the scores that is not installed.
    """
    if what.data.is_text != bool(what.data.target_column):
        raise UsageError("scores of texts need --data.source-column and --data.target-column: give both")
    if what.data.is_text:
        require_packages(what.generation.metrics)
    return classify_use.check_evaluation(what, inputs)


def evaluate(
    what: Evaluate, inputs: tuple[Path, ...], world: "World", precision: "Precision"
) -> Iterator[str]:
    """Yield the scores of each file, on the first worker; all workers call it.

    Raises:
        UsageError: the model was not finetuned on labels and no columns of texts are named, or a file has a
            label that it does not know.
        ShoalError: its files are damaged, or a file cannot be written.
    """
    using.make_folder(what.out, world)
    model, tokenizer = _read_model(what.model, what.data, world)
    score = _score_texts if what.data.is_text else _score_labels
    for path in inputs:
        yield from score(what, path, model, tokenizer, world, precision)


def _score_labels(
    what: Evaluate, path: Path, model: "T5", tokenizer: "Tokenizer", world: "World", precision: "Precision"
) -> Iterator[str]:
    from shoal.data.text.classify import read_classify

    labels = t5_written.require_labels(what.model, model)
    data = read_classify(path, what.data.columns(), labels=labels)
    file = _examples(what.data, data, model, tokenizer, t5_written.form_of(model))
    how = what.data
    predicted = t5_written.predicted_labels(
        model, file, how.labels_by, world, precision, batch_size=what.batch_size
    )
    if predicted is not None:
        scores = classify.write_scores(what.out, data, how.names(labels), predicted, how.accuracy)
        yield classify_use.told(data, scores, precision, how.accuracy)


def _score_texts(
    what: Evaluate, path: Path, model: "T5", tokenizer: "Tokenizer", world: "World", precision: "Precision"
) -> Iterator[str]:
    from shoal.data.text.text_to_text import read_text_pairs

    data = read_text_pairs(path, source=what.data.source_column, target=what.data.target_column)
    form, size = t5_written.form_of(model), what.batch_size
    file = _examples(what.data, data, model, tokenizer, form)
    search = form.searched(what.generation)
    texts = t5_written.written_texts(model, file, tokenizer, search, world, precision, batch_size=size)
    if texts is not None:
        scores = t5_written.write_text_scores(what.out, data, texts, what.generation.metrics)
        listed = ", ".join(f"{name} {score:.2f}" for name, score in scores.items())
        yield f"{data.path}: {listed} of {len(texts):,} examples, in {precision.name}"
