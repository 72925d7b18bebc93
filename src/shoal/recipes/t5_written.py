"""Defines the inputs of a finetuned T5, and computes its outputs: generated labels and texts, or likelihoods.

A T5 on one worker generates labels greedily and texts by beam search. A T5 in stages cannot generate; it
computes the likelihood of given targets.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.text.text_scores import METRICS, Metric, score_texts
from shoal.errors import UsageError, require_positive
from shoal.recipes import finetuning
from shoal.recipes.classify import TextColumnsConfig
from shoal.train.config import required

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer
    from torch import Tensor

    from shoal.data.loader import Batch
    from shoal.data.steps import Arrays
    from shoal.data.text.classify import ClassifyData
    from shoal.data.text.text_to_text import TextToText
    from shoal.decide.rng import Int64Array
    from shoal.models.t5 import T5
    from shoal.pipelining.runtime import Pipeline
    from shoal.train.gradients import Precision
    from shoal.train.run import Run
    from shoal.train.world import Float32Array, World

LOSS = "loss"
"""The score of texts in stages: cross-entropy per token of the targets, the end tokens included."""

# ------------------------------------------------------------------------------------------------- settings


@dataclass(frozen=True, kw_only=True)
class T5WordingConfig(TextColumnsConfig):
    """Columns of texts, the wording of inputs and their length."""

    task: str = "mnli"
    """Name of the task, the begin of each input; mnli, qnli and qqp have T5's form, others use sentence1 and
    sentence2, or sentence."""
    template: str | None = None
    """Template of inputs, such as "topic of: {first}"; {first} and {second} stand for the texts."""
    source_column: str = ""
    """Column of the source texts in a text-to-text task; an input is "TASK: text"."""
    target_column: str = ""
    """Column of the target texts in a text-to-text task."""
    max_seq_length: int = 512
    """Maximum tokens of an input, end token included; longer inputs are truncated."""
    max_target_length: int = 128
    """Maximum tokens of a target text, end token included; longer ones are truncated."""

    @property
    def is_text(self) -> bool:
        """Return true where targets are texts, not labels."""
        return bool(self.source_column)

    def __post_init__(self) -> None:
        if self.template is not None and self.template.count("{first}") != 1:
            raise UsageError(f'data.template {self.template!r} must have "{{first}}" in it, once')


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Options of the beam search that generates texts."""

    num_beams: int | None = None
    """Beams of the search; 1: greedy. Default: as in finetuning, where the default is 4."""
    length_penalty: float | None = None
    """Power of the length by which a beam's log-probability is divided; above 0 favours longer texts.
    Default: as in finetuning, where the default is T5's 0.6."""
    max_new_tokens: int | None = None
    """Maximum number of generated tokens. Default: the maximum target length of the finetuning; 32 for a
    model that was not finetuned."""

    def __post_init__(self) -> None:
        require_positive("generation", self, "num_beams", "max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(SearchConfig):
    """Options of the beam search that generates texts, and the scores of texts."""

    metrics: tuple[Metric, ...] = METRICS
    """Scores of texts; ROUGE and BLEU need the extra ``scores``."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Parameters of a beam search."""

    num_tokens: int
    num_beams: int = 1
    length_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of inputs and outputs with which a T5 was finetuned, as its config.json holds it."""

    template: str = "{first}"
    labels: tuple[str, ...] = ()
    """Empty for a model that writes texts."""
    search: Search = Search(num_tokens=32)
    """By which it writes texts."""

    def searched(self, settings: SearchConfig) -> Search:
        """Return the search that the settings ask for; what they leave open is the model's."""
        given: dict[str, Any] = {
            "num_tokens": settings.max_new_tokens,
            "num_beams": settings.num_beams,
            "length_penalty": settings.length_penalty,
        }
        return replace(self.search, **{name: value for name, value in given.items() if value is not None})


def set_form(model: "T5", task: str, form: Form) -> None:
    """Write the form into the model's configuration, which is saved with it."""
    config = model.weights.config
    tree: dict[str, Any] = {"template": form.template}
    if form.labels:
        config.id2label = dict(enumerate(form.labels))
    else:  # under the names of transformers
        tree |= {
            "num_beams": form.search.num_beams,
            "length_penalty": form.search.length_penalty,
            "max_length": form.search.num_tokens,
        }
    config.task_specific_params = {task: tree}


def form_of(model: "T5") -> Form:
    """Return the form with which a T5 was finetuned; of one that was not, the text as it stands."""
    config = model.weights.config
    for task in (getattr(config, "task_specific_params", None) or {}).values():
        if "template" not in task:
            continue
        template = str(task["template"])
        if "num_beams" not in task:
            names: dict[int, str] = config.id2label
            return Form(template=template, labels=tuple(names[number] for number in sorted(names)))
        search = Search(
            num_tokens=int(task["max_length"]),
            num_beams=int(task["num_beams"]),
            length_penalty=float(task["length_penalty"]),
        )
        return Form(template=template, search=search)
    return Form()


def examples_of(
    settings: T5WordingConfig, data: "ClassifyData", model: "T5", tokenizer: "Tokenizer", *, template: str
) -> "TextToText":
    """Return the examples of a file as the model reads them.

    Raises:
        UsageError: the tokenizer cannot be used for them.
    """
    from shoal.data.text.text_to_text import make_text_to_text

    sizes = model.weights.config
    return make_text_to_text(
        data,
        tokenizer,
        template=template,
        max_seq_length=settings.max_seq_length,
        end_id=sizes.eos_token_id,
        pad_id=sizes.pad_token_id,
        max_target_length=settings.max_target_length if settings.is_text else None,
    )


def wording(settings: T5WordingConfig, data: "ClassifyData") -> str:
    """Return the template of a file's inputs."""
    from shoal.data.text.text_to_text import template_of

    if settings.template:
        return settings.template
    if settings.is_text:
        return f"{settings.task}: {{first}}" if settings.task else "{first}"
    return template_of(settings.task, has_pairs=data.examples[0].second is not None)


# ------------------------------------------------------------------------------------------------- generation


def written_labels(
    model: "T5", file: "TextToText", world: "World", precision: "Precision", *, batch_size: int
) -> list[int] | None:
    """Return the label that the model writes for each example; one more than the last: none of them.

    Only the first worker has them; all workers call it.
    """
    search = Search(num_tokens=file.longest_word)
    tokens = written(model, file, search, world, precision, batch_size=batch_size)
    return None if tokens is None else [file.label_of(row) for row in tokens.astype("int64")]


def written_texts(
    model: "T5",
    file: "TextToText",
    tokenizer: "Tokenizer",
    search: Search,
    world: "World",
    precision: "Precision",
    *,
    batch_size: int,
) -> list[str] | None:
    """Return the text that the model writes for each example, without special tokens.

    Only the first worker has them; all workers call it.
    """
    tokens = written(model, file, search, world, precision, batch_size=batch_size)
    if tokens is None:
        return None
    end_id, texts = model.weights.config.eos_token_id, []
    for row in tokens.astype("int64"):
        ids = row.tolist()
        ids = ids[: ids.index(end_id)] if end_id in ids else ids
        texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    return texts


def written(
    model: "T5",
    file: "TextToText",
    search: Search,
    world: "World",
    precision: "Precision",
    *,
    batch_size: int,
) -> "Float32Array | None":
    """Return the tokens that the model writes, ``[num_examples, num_tokens]``, on the first worker."""
    return finetuning.outputs_of(  # float32 holds ids below 2^24 exactly
        model, file, partial(_generated, model, search), world, precision, batch_size=batch_size
    )


def _generated(model: "T5", search: Search, batch: "Batch") -> "Tensor":
    from shoal.models.t5 import generate

    return generate(
        model,
        batch["input_ids"],
        batch["attention_mask"],
        num_tokens=search.num_tokens,
        num_beams=search.num_beams,
        length_penalty=search.length_penalty,
    )


# ------------------------------------------------------------------------------------------------- likelihood


def likeliest_labels(stage: "Pipeline", file: "TextToText", run: "Run", pipeline: int) -> list[int] | None:
    """Return the label of each example whose tokens, the end token included, are likeliest behind its input.

    Each example is computed once a label. Only the first worker has the labels; all workers call it.

    Args:
        pipeline: workers that hold a part of the model each.
    """
    import numpy as np

    num_labels = len(file.words)
    rows, labels = np.divmod(np.arange(len(file) * num_labels), num_labels)
    table = np.reshape(_losses(stage, file, run, pipeline, rows, labels), (-1, num_labels))
    return [int(label) for label in table.argmin(axis=1)] if run.world.is_main else None


def mean_loss(stage: "Pipeline", file: "TextToText", run: "Run", pipeline: int) -> float:
    """Return the cross-entropy per token of all targets; all workers call it."""
    import numpy as np

    rows = np.arange(len(file))
    num_tokens = sum(map(len, file.words))
    return float(_losses(stage, file, run, pipeline, rows, rows).sum()) / num_tokens


def _losses(
    stage: "Pipeline",
    file: "TextToText",
    run: "Run",
    pipeline: int,
    rows: "Int64Array",
    targets: "Int64Array",
) -> "npt.NDArray[np.float64]":
    """Return the cross-entropy of pairs of an example and a target, summed over its tokens."""
    import numpy as np
    import torch

    size, replica = run.batch.worker_batch_size, run.world.place.rank // pipeline
    losses = torch.zeros(len(rows), dtype=torch.float64)
    for first in range(0, len(losses), run.batch.num_workers * size):
        own = np.arange(first + replica * size, first + (replica + 1) * size)
        pairs = np.minimum(own, len(losses) - 1)  # batches have one shape: the last pair again
        arrays = file.batch_with(rows[pairs], targets[pairs].tolist())
        found = stage.evaluate(**with_keys(arrays, run.seed, pairs))
        if found.outputs is not None:  # on the workers of the last stage
            own_losses = torch.cat([output.sequence_loss for output in found.outputs]).double().cpu()
            there = own < len(losses)
            losses[own[there]] = own_losses[there]
    return np.array(run.sum(losses))


def with_keys(arrays: "Arrays", seed: int, rows: "Int64Array") -> "Batch":
    """Return a batch outside of the training's order as stages take it: with dropout keys."""
    from shoal.data.loader import as_tensors
    from shoal.decide.rng import dropout_keys

    return as_tensors({**arrays, "dropout_keys": dropout_keys(seed, 0, rows)}, False)


# ------------------------------------------------------------------------------------------------- scores


def record_texts(
    run: "Run", data: "ClassifyData", texts: list[str] | None, metrics: tuple[Metric, ...]
) -> None:
    """Write texts and scores into the run directory; only the first worker has texts."""
    scores: dict[str, float] = {}
    if texts is not None:
        scores = write_text_scores(required(run.directory), data, texts, metrics)
    run.evaluation(data.path.stem, scores, num_samples=len(data.examples))


def write_text_scores(
    out: Path | None, data: "ClassifyData", texts: list[str], metrics: tuple[Metric, ...]
) -> dict[str, float]:
    """Return the scores of a file's texts, and write both, if there is a folder for them.

    Files: ``predictions-NAME.jsonl`` with an object of ``prediction`` and ``target`` per line, in the order
    of the examples, and ``scores-NAME.json``.

    Raises:
        UsageError: a package is not installed.
    """
    import json

    from shoal.atomic_io import write_atomically, write_json

    wanted = [data.labels[example.label] for example in data.examples]
    scores = score_texts(texts, wanted, metrics)
    if out is not None:
        rows = [{"prediction": text, "target": target} for text, target in zip(texts, wanted, strict=True)]
        lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        write_atomically(out / f"predictions-{data.path.stem}.jsonl", lines.encode())
        write_json(out / f"scores-{data.path.stem}.json", scores)
    return scores


def require_labels(source: Path, model: "T5") -> tuple[str, ...]:
    """Return the labels on which a T5 was finetuned; raise a :class:`UsageError` if it was on none."""
    labels = form_of(model).labels
    if not labels:
        raise UsageError(
            f"--model {source} was not finetuned on labels: use `shoal finetune t5` first, or score texts by "
            "--data.source-column and --data.target-column"
        )
    return labels
