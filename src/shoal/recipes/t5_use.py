"""Labels texts with a finetuned T5, or lets a T5 write: ``shoal predict t5``, ``shoal evaluate t5``."""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import UsageError
from shoal.recipes import classify, classify_use, t5_classify, using
from shoal.recipes.classify import LabelledColumnsConfig
from shoal.recipes.classify_use import EvaluateLabelsConfig, TextsConfig
from shoal.recipes.t5_classify import T5WordingConfig
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

    max_new_tokens: int = 32
    """Tokens to write at most, by a model that was not finetuned on labels."""
    data: T5TextsConfig = field(default_factory=T5TextsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens} must be at least 1")


check_prediction = classify_use.check_prediction


def predict(what: Predict, inputs: tuple[Path, ...], world: "World", precision: "Precision") -> Iterator[Row]:
    """Yield a row for each text, on the first worker; all workers call it.

    Raises:
        UsageError: the model is no T5.
        ShoalError: its files are damaged.
    """
    model, tokenizer = _read_model(what.model, what.data, world)
    labels, _ = form_of(model)
    columns = what.data if labels else replace(what.data, second="")
    for data in classify_use.read_texts(what, columns, inputs, labels):
        texts = _worded(what.data, data, model, tokenizer)
        num_tokens = texts.longest_word if labels else what.max_new_tokens
        tokens = t5_classify.written(model, texts, num_tokens, world, precision, batch_size=what.batch_size)
        if tokens is not None:
            yield from _rows(texts, tokens, tokenizer, model.weights.config.eos_token_id)


def _read_model(source: Path, columns: T5TextsConfig, world: "World") -> "tuple[T5, Tokenizer]":
    from shoal.models.t5 import read_t5

    model, directory = using.read_trained(source, read_t5)
    tokenizer = using.read_tokenizer(directory, "data.max_seq_length", columns.max_seq_length)
    return model.to(world.device), tokenizer


def _worded(
    columns: T5TextsConfig, data: "ClassifyData", model: "T5", tokenizer: "Tokenizer"
) -> "TextToText":
    from shoal.data.text.text_to_text import make_text_to_text

    sizes, (_, template) = model.weights.config, form_of(model)
    if columns.template or columns.task:
        template = t5_classify.wording(columns, data)
    return make_text_to_text(
        data,
        tokenizer,
        template=template,
        max_seq_length=columns.max_seq_length,
        end_id=sizes.eos_token_id,
        pad_id=sizes.pad_token_id,
    )


def require_labels(source: Path, model: "T5") -> tuple[str, ...]:
    """Return the labels on which a T5 was finetuned; raise a :class:`UsageError` if it was on none."""
    labels, _ = form_of(model)
    if not labels:
        raise UsageError(f"--model {source} was not finetuned on labels: use `shoal finetune t5` first")
    return labels


def form_of(model: "T5") -> tuple[tuple[str, ...], str]:
    """Return the labels on which a T5 was finetuned, and the wording of its inputs; of others none, and the
    text itself."""
    config = model.weights.config
    for task in (getattr(config, "task_specific_params", None) or {}).values():
        if "template" in task:
            names: dict[int, str] = config.id2label
            return tuple(names[number] for number in sorted(names)), str(task["template"])
    return (), "{first}"


def _rows(texts: "TextToText", tokens: Any, tokenizer: Any, end_id: int) -> Iterator[Row]:
    for number, row in enumerate(tokens.astype("int64"), start=1):
        if texts.words:
            label = texts.label_of(row)
            yield {"id": number, "label": (*texts.data.labels, None)[label]}
        else:
            ids = row.tolist()
            ids = ids[: ids.index(end_id)] if end_id in ids else ids
            yield {"id": number, "text": tokenizer.decode(ids, skip_special_tokens=True)}


# ------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True, kw_only=True)
class T5LabelledConfig(T5TextsConfig, LabelledColumnsConfig):
    """Columns of texts and labels, their wording and length."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(EvaluateLabelsConfig):
    """The form in which texts and labels are read."""

    data: T5LabelledConfig = field(default_factory=T5LabelledConfig)


check_evaluation = classify_use.check_evaluation


def evaluate(
    what: Evaluate, inputs: tuple[Path, ...], world: "World", precision: "Precision"
) -> Iterator[str]:
    """Yield the table of each file, on the first worker; all workers call it.

    Raises:
        UsageError: the model was not finetuned on labels, or a file has a label that it does not know.
        ShoalError: its files are damaged, or a file cannot be written.
    """
    from shoal.data.text.classify import read_classify

    using.make_folder(what.out, world)
    model, tokenizer = _read_model(what.model, what.data, world)
    labels = require_labels(what.model, model)
    for path in inputs:
        data = read_classify(path, what.data.columns(), labels=labels)
        texts = _worded(what.data, data, model, tokenizer)
        predicted = t5_classify.predicted_labels(model, texts, world, precision, batch_size=what.batch_size)
        if predicted is not None:
            names = (*labels, t5_classify.NO_LABEL)
            yield classify_use.told(data, classify.write_scores(what.out, data, names, predicted))
