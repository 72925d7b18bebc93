"""Finetunes on sentences or pairs with labels, or with scores: MNLI, STS-B, or any file like these.

    python -m shoal.recipes.classify --model bert/ --data train.tsv --eval dev_matched.tsv dev_mismatched.tsv
    torchrun --nproc-per-node 8 -m shoal.recipes.classify --preset albert --model runs/first ...
    shoal finetune classify --preset tiny --model runs/first --workers 2 ...

The loss of a sequence is the cross-entropy of its label, summed and divided by the sequences of the whole
global batch. Each evaluation file has its own scores: accuracy, confusion table, and a file of predictions.
With ``--data.scores`` labels are numbers: the loss is the squared error, and the measures are correlations.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.data.bad_entries import BadEntries, BadEntriesConfig
from shoal.env.worker import WorkerEnv
from shoal.errors import UsageError
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import DryRun, Row, Sample, Use, finetuning, run_script, using
from shoal.recipes.finetuning import FinetuneConfig
from shoal.recipes.model_source import ModelSource, check_length
from shoal.recipes.source_tokenizer import read_source_tokenizer
from shoal.recipes.using import EvaluateConfig, PredictConfig
from shoal.train.config import required

if TYPE_CHECKING:
    from shoal.data.text.classify import (
        ClassifyData,
        ClassifyScores,
        Columns,
        Correlations,
        PairFeatures,
    )
    from shoal.models.tasks import SequenceClassification
    from shoal.train.gradients import Precision
    from shoal.train.run import Run
    from shoal.train.world import Float32Array, World

# ------------------------------------------------------------------------------------------------- config

PRESETS = ("bert", "albert", "tiny")


@dataclass(frozen=True, kw_only=True)
class TextColumnsConfig(BadEntriesConfig):
    """Columns of texts, and their length; the defaults are MNLI's."""

    first: str = "sentence1"
    """Column of the text, or of the first text of a pair."""
    second: str = "sentence2"
    """Column of the second text of a pair; empty (--data.second "") for single texts."""
    max_seq_length: int = 128
    """Maximum tokens of a sequence, special tokens included; the longer text of a pair is truncated first."""

    def counter(self, path: Path) -> BadEntries:
        """Return the counter of the rows of a file that cannot be used."""
        return self.bad_entries(path, "--data.")


@dataclass(frozen=True, kw_only=True)
class LabelledColumnsConfig(TextColumnsConfig):
    """Columns of texts and labels."""

    label: tuple[str, ...] = ("gold_label", "label")
    """Column of the label: the first of these names that a file has."""
    unlabelled: str = "-"
    """Label of examples without agreement among annotators, which are left out, as are null and -1 beside
    numbers from 0."""

    def columns(self) -> "Columns":
        """Return the names as the readers take them."""
        from shoal.data.text.classify import Columns

        return Columns(
            first=self.first, second=self.second or None, label=self.label, unlabelled=self.unlabelled
        )


@dataclass(frozen=True, kw_only=True)
class ClassifyDataConfig(LabelledColumnsConfig):
    """The files of examples and the names of their columns."""

    path: Path | None = None
    """Training examples, .tsv (column names first), .jsonl or .parquet."""
    eval: tuple[Path, ...] = ()
    """Files to evaluate on, each separately, such as MNLI's matched and mismatched."""
    labels: tuple[str, ...] = ()
    """The set of labels, in the order of the model's outputs; default: those of the training file, sorted."""

    def known_labels(self) -> tuple[str, ...] | None:
        """Return the labels if they are known before the training file is read."""
        return self.labels or None


@dataclass(frozen=True, kw_only=True)
class ScoredDataConfig(ClassifyDataConfig):
    """The files of examples, whose labels may be numbers."""

    scores: bool = False
    """Learn the labels as numbers (regression), such as STS-B's similarities, by their squared error; scores
    of an evaluation are Pearson's and Spearman's correlation."""

    def known_labels(self) -> tuple[str, ...] | None:
        """Return the labels if they are known before the training file is read; of scores, their name."""
        from shoal.data.text.classify import SCORE

        return SCORE if self.scores else super().known_labels()


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(FinetuneConfig):
    """All settings of finetuning on labels; presets are TOML files in ``presets/classify``."""

    data: ScoredDataConfig = field(default_factory=ScoredDataConfig)

    @property
    def scores(self) -> dict[str, tuple[str, ...]]:
        """The names of the scores in the record, by split."""
        names = ("pearson", "spearman") if self.data.scores else ("accuracy",)
        return {path.stem: names for path in self.data.eval}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.scores and self.data.labels:
            raise UsageError("data.labels lists classes, and data.scores learns numbers: give one of them")


IMMUTABLE = (
    *finetuning.IMMUTABLE,
    *(
        f"data.{name}"
        for name in ("labels", "scores", "first", "second", "label", "unlabelled", "max_seq_length")
    ),
)


def main(config: ClassifyConfig, worker: WorkerEnv | None = None) -> int:
    """Train until the last step or a signal, evaluate and write the model; return the exit code."""
    import torch

    from shoal.data.text.classify import make_pairs
    from shoal.data.text.task_batches import TaskSource
    from shoal.models.encoder import packed_inputs
    from shoal.models.tasks import SequenceClassification, label_loss, load_task_model, score_loss
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run

    finetuning.require_paths(config, config.data, "examples")
    with Run.open(config=config, recipe="classify", immutable=IMMUTABLE, worker=worker) as run:
        # ----------------------------------------------------------------------------------------- data
        source, length = finetuning.open_source(config.model, run), config.data.max_seq_length
        check_length(source, "data.max_seq_length", length)
        tokenizer = read_source_tokenizer(source)
        files = [make_pairs(data, tokenizer, max_seq_length=length) for data in read_files(config.data)]
        training, *held_out = files
        plan = finetuning.make_plan(config, num_sequences=len(training), num_workers=run.world.num_workers)

        # ----------------------------------------------------------------------------------------- model
        torch.manual_seed(run.seed)
        labels = training.data.labels
        model = load_task_model(SequenceClassification, source, labels=labels, **config.model.options)
        ddp = run.data_parallel(model, average=config.optim.clip == "global")
        run.compile(model, dynamic=True)
        optimizer = build_optimizer(model.named_parameters(), config.optim)
        loss_of = score_loss if config.data.scores else label_loss
        run.keep(model=model, optimizer=optimizer)
        finetuning.keep_sizes(run, model, tokenizer)

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> None:
            evaluate(model, held_out, config, run)

        # ----------------------------------------------------------------------------------------- loop
        steps = run.steps(
            TaskSource(data=training, seed=run.seed),
            plan.batch,
            until=plan.total_steps,
            notes=[
                *(counts(file.data, len(file), file.num_cut, length) for file in files),
                *finetuning.new_parts(model),
            ],
        )
        for step in steps:
            with step:
                set_learning_rate(optimizer, learning_rate(plan.schedule, step.number - 1))
                for batch in step:
                    loss = loss_of(ddp(**packed_inputs(batch)), batch["labels"])
                    step.backward(loss / step.num_samples)
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if run.due(config.run.validation_frequency, evaluation=True):
                run.workers.together(score)
        if run.lacks_scores():
            run.workers.together(score)

        # ----------------------------------------------------------------------------------------- export
        return finetuning.finish(run, model, source)


# ------------------------------------------------------------------------------------------------- data


def read_files(data: ClassifyDataConfig) -> "list[ClassifyData]":
    """Return the training examples, then those of each evaluation file.

    Raises:
        UsageError: a file is not of the form that its name says, holds a label outside the set, or two
            evaluation files have the same name, which their scores are named after.
    """
    require_names(data.eval)
    train = read_file(required(data.path), data, data.known_labels())
    return [train, *(read_file(path, data, train.labels) for path in data.eval)]


def read_file(path: Path, data: LabelledColumnsConfig, labels: tuple[str, ...] | None) -> "ClassifyData":
    """Return the examples of a file, with scores if the only label is the name of a score.

    Raises:
        UsageError: as for :func:`read_files`.
    """
    from shoal.data.text.classify import SCORE, read_classify, read_scores

    columns, bad = data.columns(), data.counter(path)
    if labels is not None and len(labels) == len(SCORE):
        return read_scores(path, columns, labels=labels, bad=bad)
    return read_classify(path, columns, labels=labels, bad=bad)


def require_names(files: tuple[Path, ...]) -> None:
    """Raise a :class:`UsageError` if two evaluation files have one name, after which scores are named."""
    names = [path.stem for path in files]
    if len(set(names)) != len(names):
        raise UsageError(f"data.eval has two files of the same name ({', '.join(names)}); rename one")


def counts(data: "ClassifyData", num_examples: int, num_cut: int, length: int) -> str:
    """Return a line about a file, for a dry run and the beginning of a run."""
    return f"{data.path}: {num_examples:,} examples, {num_cut:,} cut to {length} tokens{left_out(data)}"


def left_out(data: "ClassifyData") -> str:
    """Return the end of a line about a file: the rows of it that are not used."""
    summary = data.bad.summary() if data.bad else ""
    return f"; {summary}" if summary else ""


# ------------------------------------------------------------------------------------------------- evaluation


def evaluate(
    model: "SequenceClassification", files: "list[PairFeatures]", config: ClassifyConfig, run: "Run"
) -> None:
    """Predict the labels or scores of each file with all workers and record how right they are."""
    for file in files:
        logits = label_logits(
            model, file, run.world, run.precision, batch_size=config.run.evaluation_batch_size
        )
        if file.data.has_scores:
            record_correlations(run, file.data, logits)
            continue
        predicted = None if logits is None else [int(label) for label in logits.argmax(axis=1)]
        record_scores(run, file.data, file.data.labels, predicted)


def label_logits(
    model: "SequenceClassification",
    file: "PairFeatures",
    world: "World",
    precision: "Precision",
    *,
    batch_size: int,
) -> "Float32Array | None":
    """Return the logits ``[num_examples, num_labels]``; ``None`` beside the first worker."""
    from shoal.models.encoder import packed_inputs

    return using.outputs_of(
        model, file, lambda batch: model(**packed_inputs(batch)), world, precision, batch_size=batch_size
    )


def record_scores(
    run: "Run",
    data: "ClassifyData",
    labels: tuple[str, ...],
    predicted: list[int] | None,
    name: str = "accuracy",
) -> None:
    """Write predictions and scores into the run directory; only the first worker has predictions.

    Args:
        name: of the score.
    """
    accuracy = 0.0
    if predicted is not None:
        scores = write_scores(required(run.directory), data, labels, predicted, name)
        if run.log:
            run.log.progress.say(f"{data.path.name}\n{scores.table()}")
        accuracy = scores.accuracy / 100
    run.evaluation(data.path.stem, {name: accuracy}, num_samples=len(data.examples))


def write_scores(
    out: Path | None,
    data: "ClassifyData",
    labels: tuple[str, ...],
    predicted: list[int],
    name: str = "accuracy",
) -> "ClassifyScores":
    """Return the scores of a file's predictions, and write both, if there is a folder for them.

    Files: ``predictions-NAME.txt`` with one label per line, in the order of the labelled examples, and
    ``scores-NAME.json`` with accuracy, under its ``name``, and confusion table.
    """
    from shoal.atomic_io import write_atomically, write_json
    from shoal.data.text.classify import score_classify

    scores = score_classify(labels, [example.label for example in data.examples], predicted)
    if out is not None:
        lines = "".join(f"{labels[label]}\n" for label in predicted)
        write_atomically(out / f"predictions-{data.path.stem}.txt", lines.encode())
        tree = {name: scores.accuracy, "labels": list(labels), "counts": [*map(list, scores.counts)]}
        write_json(out / f"scores-{data.path.stem}.json", tree)
    return scores


def record_correlations(run: "Run", data: "ClassifyData", outputs: "Float32Array | None") -> None:
    """Write predicted scores and correlations into the run directory; only the first worker has outputs."""
    pearson = spearman = 0.0
    if outputs is not None:
        correlations = write_correlations(required(run.directory), data, outputs)
        pearson, spearman = correlations.pearson, correlations.spearman
        if run.log:
            run.log.progress.say(f"{data.path.name}: {correlation_text(correlations)}")
    metrics = {"pearson": pearson, "spearman": spearman}
    run.evaluation(data.path.stem, metrics, num_samples=len(data.examples))


def correlation_text(correlations: "Correlations") -> str:
    """Return both correlations as text."""
    return f"Pearson {correlations.pearson:.4f}, Spearman {correlations.spearman:.4f}"


def write_correlations(out: Path | None, data: "ClassifyData", outputs: "Float32Array") -> "Correlations":
    """Return the correlations of a file's outputs ``[N, 1]``, and write both, if there is a folder for them.

    Files: ``predictions-NAME.txt`` with one score per line, in the order of the examples that have one, and
    ``scores-NAME.json`` with the correlations.
    """
    from shoal.atomic_io import write_atomically, write_json
    from shoal.data.text.classify import correlate

    predicted = outputs[:, 0].tolist()
    correlations = correlate([example.score for example in data.examples], predicted)
    if out is not None:
        lines = "".join(f"{score:.7g}\n" for score in predicted)
        write_atomically(out / f"predictions-{data.path.stem}.txt", lines.encode())
        write_json(out / f"scores-{data.path.stem}.json", vars(correlations))
    return correlations


# ------------------------------------------------------------------------------------------------- use


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

    @property
    def has_one_input(self) -> bool:
        return self.text is not None


@dataclass(frozen=True, kw_only=True)
class ClassifyPredictConfig(TextsConfig):
    """Texts, and the form in which they are read."""

    data: TextColumnsConfig = field(default_factory=TextColumnsConfig)


@dataclass(frozen=True, kw_only=True)
class EvaluateLabelsConfig(EvaluateConfig):
    """The model, and where its predictions and scores go."""

    out: Path | None = None
    """Folder for predictions-NAME.txt and scores-NAME.json of each file; default: only print the tables."""


@dataclass(frozen=True, kw_only=True)
class ClassifyEvaluateConfig(EvaluateLabelsConfig):
    """The form in which texts and labels are read."""

    data: LabelledColumnsConfig = field(default_factory=LabelledColumnsConfig)


class TextUse(Use):
    """Reads and checks the inputs of models that label texts, which BERT and T5 share."""

    one_input = "--text"
    labels: tuple[str, ...] = ()
    """Those of the model, once it is read."""

    @classmethod
    def find(cls, path: Path) -> ModelSource:
        return using.find_trained(path)

    def read_texts(self, inputs: tuple[Path, ...], columns: TextColumnsConfig) -> "list[ClassifyData]":
        """Return the texts of the files, or the one of the command line.

        Raises:
            UsageError: a file cannot be read or is damaged.
        """
        from shoal.data.text.classify import ClassifyData, Columns, Example, read_texts
        from shoal.data.text.fill_mask import read_lines

        text, labels = self.settings.text, self.labels
        if text is not None:
            examples = (Example(text, self.settings.second_text, 0),)
            return [ClassifyData(path=Path("--text"), labels=labels, examples=examples, numbers=(1,))]
        names = Columns(first=columns.first, second=columns.second or None)

        def read(path: Path) -> ClassifyData:
            if path.suffix == ".txt":
                examples = tuple(Example(line, None, 0) for line in read_lines(path))
                numbers = tuple(range(1, len(examples) + 1))
                return ClassifyData(path=path, labels=labels, examples=examples, numbers=numbers)
            return read_texts(path, names, labels=labels, bad=columns.counter(path))

        return [read(path) for path in inputs]

    def describe(self, data: "ClassifyData") -> str:
        return f"{data.path}: {len(data.examples):,} texts{left_out(data)}"

    def remarks(self, data: "ClassifyData") -> list[str]:
        return data.bad.lines() if data.bad else []

    def label_rows(self, data: "ClassifyData", logits: "Float32Array") -> Iterator[Row]:
        """Yield the label of each row of logits, and the probabilities of all."""
        chances_of = using.probabilities(logits)
        for number, row, chances in zip(data.numbers, logits, chances_of, strict=True):
            probabilities = dict(zip(self.labels, chances.tolist(), strict=True))
            yield {"id": number, "label": self.labels[int(row.argmax())], "probabilities": probabilities}

    def check_evaluation(self, inputs: tuple[Path, ...]) -> list[str]:
        using.check_files(inputs)
        names = [path.stem for path in inputs]
        if not inputs or len(set(names)) != len(names):
            raise UsageError(
                "name files of texts and labels, each of another name "
                f"({', '.join(names) or 'none is named'})"
            )
        return [f"files        {', '.join(map(str, inputs))}"]

    def label_scores(
        self, data: "ClassifyData", names: tuple[str, ...], predicted: list[int], score: str = "accuracy"
    ) -> str:
        """Return the summary of the predictions of a file, and write both where they are wanted."""
        scores = write_scores(self.settings.out, data, names, predicted, score)
        accuracy = f"{score.replace('_', ' ')} {scores.accuracy:.2f} %"
        text = f"{data.path}: {accuracy} of {len(data.examples):,} examples, in {self.precision.name}"
        return f"{text}\n{scores.table()}"


class Labelling(TextUse):
    """Labels texts with a finetuned encoder."""

    Predict, Evaluate = ClassifyPredictConfig, ClassifyEvaluateConfig

    def read_model(self) -> None:
        from shoal.models.tasks import SequenceClassification

        model, directory = using.read_task_model(SequenceClassification, self.settings.model)
        self.length: int = self.settings.data.max_seq_length
        self.tokenizer = using.read_tokenizer(directory, "data.max_seq_length", self.length)
        names: dict[int, str] = model.weights.config.id2label
        self.labels = tuple(names[number] for number in sorted(names))
        self.model = model.to(self.world.device)

    def outputs(self, data: "ClassifyData") -> "Float32Array | None":
        from shoal.data.text.classify import make_pairs

        pairs = make_pairs(data, self.tokenizer, max_seq_length=self.length)
        size = self.settings.batch_size
        return label_logits(self.model, pairs, self.world, self.precision, batch_size=size)

    def read(self, inputs: tuple[Path, ...]) -> "list[ClassifyData]":
        return self.read_texts(inputs, self.settings.data)

    def rows(self, data: "ClassifyData", outputs: "Float32Array") -> Iterator[Row]:
        if data.has_scores:
            numbered = zip(data.numbers, outputs[:, 0].tolist(), strict=True)
            return ({"id": number, "score": score} for number, score in numbered)
        return self.label_rows(data, outputs)

    def labelled(self, inputs: tuple[Path, ...]) -> "Iterator[ClassifyData]":
        for path in inputs:
            yield read_file(path, self.settings.data, self.labels)

    def scores(self, data: "ClassifyData", outputs: "Float32Array") -> str:
        if data.has_scores:
            text = correlation_text(write_correlations(self.settings.out, data, outputs))
            return f"{data.path}: {text} of {len(data.examples):,} examples, in {self.precision.name}"
        return self.label_scores(data, self.labels, [int(label) for label in outputs.argmax(axis=1)])


use = Labelling


# ------------------------------------------------------------------------------------------------- dry run


def check(config: ClassifyConfig, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run."""
    from shoal.data.text.classify import make_pairs

    finetuning.require_paths(config, config.data, "examples")
    files, length = read_files(config.data), config.data.max_seq_length
    tokenizer = finetuning.check_model(
        config, num_workers, setting="data.max_seq_length", max_seq_length=length, exports=dry_run is not None
    )
    if not dry_run:
        return []
    pairs = [make_pairs(data, required(tokenizer), max_seq_length=length) for data in files]
    return [
        *finetuning.describe(config, len(pairs[0]), num_workers),
        finetuning.memory_line(config, dry_run, sample, num_sequences=len(pairs[0]), num_workers=num_workers),
        f"labels       {'numbers' if config.data.scores else ', '.join(files[0].labels)}",
        *(counts(f.data, len(f), f.num_cut, length) for f in pairs),
    ]


# ------------------------------------------------------------------------------------------------- sample


def sample(config: ClassifyConfig) -> Sample:
    """Return the first examples and the model; without a file, full sequences of two labels, or a score."""
    from shoal.data.text.classify import SCORE, make_pairs
    from shoal.models.tasks import SequenceClassification

    length = config.data.max_seq_length
    if config.data.path is None:
        labels = SCORE if config.data.scores else ("0", "1")
        return finetuning.sample(config, SequenceClassification, length, None, labels)
    data = read_files(config.data)[0]
    pairs = partial(make_pairs, data, max_seq_length=length)
    return finetuning.sample(config, SequenceClassification, length, pairs, data.labels)


def trial(config: ClassifyConfig, folder: Path) -> ClassifyConfig:
    """Return the settings of a short run, on synthetic pairs with labels where none are named."""
    from shoal.models.synthetic import LABELS

    labels = ("0.5", "1.5", "2.5") if config.data.scores else LABELS
    return finetuning.trial(config, folder, ".tsv", partial(write_pairs, config.data.max_seq_length, labels))


def write_pairs(length: int, labels: tuple[str, ...], num_pairs: int, words: finetuning.Words) -> str:
    """Return pairs of ``length`` words each, with labels, in MNLI's columns."""
    lines = ["sentence1\tsentence2\tgold_label"]
    for number in range(num_pairs):
        label = labels[number % len(labels)]
        lines.append("\t".join((words(length), words(length), label)))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_script("classify")
