"""Finetunes on SQuAD 1.1 or 2.0 and answers the questions of an evaluation file.

    python -m shoal.recipes.squad --preset albert --model runs/first --data train.json --eval dev.json
    torchrun --nproc-per-node 8 -m shoal.recipes.squad --preset bert --model bert/ ...
    shoal finetune squad --preset tiny --model runs/first --workers 2 ...

Paragraphs are cut into windows. The loss of a window is that of the positions of the answer's first and last
token (CLS where the answer is not inside), summed and divided by the windows of the whole global batch. The
logits of an evaluation are gathered on the first worker, which chooses answers, writes them in the official
formats and scores them.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from shoal.data.bad_entries import BadEntries, BadEntriesConfig
from shoal.data.squad.config import AnswerConfig, WindowConfig
from shoal.env.worker import WorkerEnv
from shoal.errors import UsageError
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import DryRun, Row, Sample, Use, finetuning, run_script, using
from shoal.recipes.finetuning import FinetuneConfig, FinetuneOptimConfig, FinetuneTrainConfig
from shoal.recipes.model_source import (
    ModelSource,
    check_length,
    find_model,
    positions_of,
)
from shoal.recipes.source_tokenizer import read_source_tokenizer
from shoal.recipes.using import ComputeConfig, PredictConfig
from shoal.train.config import REQUIRED, DistributedConfig, LoopConfig, ServersConfig, required

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shoal.data.squad.answers import Answers
    from shoal.data.squad.dataset import SquadData
    from shoal.data.squad.features import SquadFeatures
    from shoal.data.squad.score import Scores
    from shoal.models.tasks import QuestionAnswering
    from shoal.train.gradients import Precision
    from shoal.train.run import Run
    from shoal.train.world import Float32Array, World

    Logits = tuple[SquadFeatures, Float32Array]

PREDICTIONS, NBEST, NULL_ODDS, SCORES = "predictions.json", "nbest.json", "null_odds.json", "scores.json"
"""Files of the run directory with the answers of the last evaluation, and their scores."""
SQUAD_SCORES = ("exact_match", "f1")
"""Scores of SQuAD, in percent; in 2.0 the first is called exact."""
SQUAD_SPLIT = "squad"
"""Split of the record with the scores of a model that is being pretrained."""

# ------------------------------------------------------------------------------------------------- config

PRESETS = ("bert", "albert", "tiny")


@dataclass(frozen=True, kw_only=True)
class SquadDataConfig(BadEntriesConfig):
    """The files of questions."""

    path: Path | None = None
    """Training questions, the official JSON of SQuAD 1.1 or 2.0, or rows with the same fields: .jsonl, .json
    or .parquet."""
    eval: Path | None = None
    """Questions to evaluate on at the end."""

    def counter(self, path: Path) -> BadEntries:
        """Return the counter of the entries of a file that cannot be used."""
        return self.bad_entries(path, "--data.")


@dataclass(frozen=True, kw_only=True)
class SquadConfig(FinetuneConfig):
    """All settings of finetuning on SQuAD; presets are TOML files in ``presets/squad``."""

    data: SquadDataConfig = field(default_factory=SquadDataConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    answers: AnswerConfig = field(default_factory=AnswerConfig)

    @property
    def scores(self) -> dict[str, tuple[str, ...]]:
        """The names of the scores in the record, by split."""
        return {self.data.eval.stem: SQUAD_SCORES} if self.data.eval else {}


IMMUTABLE = (*finetuning.IMMUTABLE, "window")


def main(config: SquadConfig, worker: WorkerEnv | None = None) -> int:
    """Train until the last step or a signal, evaluate and write the model; return the exit code."""
    from shoal.train.run import Run

    finetuning.require_paths(config, config.data, "questions")
    config = fitted(config)
    with Run.open(config=config, recipe="squad", immutable=IMMUTABLE, worker=worker) as run:
        source = finetuning.open_source(config.model, run)
        model, _ = train(config, source, run)
        return finetuning.finish(run, model, source)


def fitted(config: SquadConfig) -> SquadConfig:
    """Return the settings with a length of windows that the model has positions for, unless one is given.

    Raises:
        UsageError: there is no such model.
    """
    positions = positions_of(required(config.model.path))
    return replace(config, window=config.window.fitted(positions))


def train(config: SquadConfig, source: Path, run: "Run") -> "tuple[QuestionAnswering, dict[str, float]]":
    """Finetune the model in ``source``; return it and its last scores, if this process made any."""
    import torch

    from shoal.data.squad.features import make_features
    from shoal.data.text.task_batches import TaskSource
    from shoal.models.encoder import packed_inputs
    from shoal.models.tasks import QuestionAnswering, load_task_model, span_loss
    from shoal.train.optimizers import build_optimizer

    # --------------------------------------------------------------------------------------------- data
    check_length(source, "window.max_seq_length", config.window.length)
    tokenizer = read_source_tokenizer(source)
    training, held_out = (make_features(data, tokenizer, config.window) for data in read_files(config.data))
    plan = finetuning.make_plan(config, num_sequences=len(training), num_workers=run.world.num_workers)

    # --------------------------------------------------------------------------------------------- model
    torch.manual_seed(run.seed)
    model = load_task_model(QuestionAnswering, source, **config.model.options)
    ddp = run.data_parallel(model, average=config.optim.clip == "global")
    run.compile(model, dynamic=True)
    optimizer = build_optimizer(model.named_parameters(), config.optim)
    run.keep(model=model, optimizer=optimizer)
    finetuning.keep_sizes(run, model, tokenizer)

    # --------------------------------------------------------------------------------------------- evaluation
    def score() -> dict[str, float]:
        return evaluate(model, held_out, config, run)

    # --------------------------------------------------------------------------------------------- loop
    scores: dict[str, float] = {}
    steps = run.steps(
        TaskSource(
            data=training,
            seed=run.seed,
            name=lambda index: training.data.questions[int(training.question[index])].id,
        ),
        plan.batch,
        until=plan.total_steps,
        notes=[
            f"training: {_counts(training)}",
            f"evaluation: {_counts(held_out)}",
            *(line for file in (training, held_out) for line in file.data.remarks()),
            *finetuning.new_parts(model),
        ],
    )
    for step in steps:
        with step:
            set_learning_rate(optimizer, learning_rate(plan.schedule, step.number - 1))
            for batch in step:
                start_logits, end_logits = ddp(**packed_inputs(batch))
                loss = span_loss(start_logits, end_logits, batch, batch["start"], batch["end"])
                step.backward(loss / step.num_samples)
            step.update(optimizer, max_norm=config.optim.max_grad_norm)
        if run.due(config.run.validation_frequency, evaluation=True):
            scores = run.workers.together(score)
    if run.lacks_scores():
        scores = run.workers.together(score)
    return model, scores


# ------------------------------------------------------------------------------------------------- data


def read_files(data: SquadDataConfig) -> "tuple[SquadData, SquadData]":
    """Return the training and the evaluation questions.

    Raises:
        UsageError: a file is not SQuAD, or has too many entries that cannot be used.
    """
    from shoal.data.squad.dataset import read_squad

    path, held_out = required(data.path), required(data.eval)
    train = read_squad(path, purpose="train", bad=data.counter(path))
    return train, read_squad(held_out, purpose="evaluate", bad=data.counter(held_out))


def _counts(file: "SquadFeatures") -> str:
    return f"{len(file.data.questions):,} questions of SQuAD {file.data.version} in {len(file):,} windows"


# ------------------------------------------------------------------------------------------------- evaluation


def evaluate(
    model: "QuestionAnswering", features: "SquadFeatures", config: SquadConfig, run: "Run"
) -> dict[str, float]:
    """Answer the questions with all workers and record the scores; return them, on all workers the same.

    The first worker writes the files of the run directory, if there is one.
    """
    from shoal.train.world import all_gather_json

    logits = span_logits(
        model, features, run.world, run.precision, batch_size=config.run.evaluation_batch_size
    )
    metrics: dict[str, float] = {}
    if logits is not None:
        answers, scores = answer(features, logits, config.answers)
        if (out := run.directory) is not None:
            write_answers(out, answers, scores)
        metrics = {k: float(v) for k, v in scores.official.items() if not k.endswith("total")}
    metrics = all_gather_json(run.world.control, metrics)[0]
    data = features.data
    run.evaluation(data.path.stem, metrics, num_samples=len(data.questions))
    return metrics


def span_logits(
    model: "QuestionAnswering",
    features: "SquadFeatures",
    world: "World",
    precision: "Precision",
    *,
    batch_size: int,
) -> "Float32Array | None":
    """Return the logits ``[T, 2]`` of the answer's first and last token; ``None`` beside the first worker."""
    import torch

    from shoal.models.encoder import packed_inputs

    return using.outputs_of(
        model,
        features,
        lambda batch: torch.stack(model(**packed_inputs(batch)), dim=1),
        world,
        precision,
        batch_size=batch_size,
        per_token=True,
    )


def write_answers(out: Path, answers: "Answers", scores: "Scores") -> None:
    """Write predictions, n-best lists, null odds and scores in the official formats."""
    from shoal.atomic_io import write_json

    write_json(out / PREDICTIONS, answers.predictions)
    write_json(out / NBEST, answers.nbest)
    if answers.null_odds:
        write_json(out / NULL_ODDS, answers.null_odds)
    write_json(out / SCORES, scores.official)


def answer(
    features: "SquadFeatures", logits: "Float32Array", config: AnswerConfig
) -> "tuple[Answers, Scores]":
    """Return answers in the official formats, and their scores.

    The best thresholds of 2.0 are searched over every question's best span. (The official script sees the
    predictions alone, in which questions above the threshold have lost theirs.)

    Args:
        logits: of the answer's first and last token, ``[T, 2]``.
    """
    from shoal.data.squad.answers import choose_answers
    from shoal.data.squad.score import score_squad

    spans = choose_answers(features, logits[:, 0], logits[:, 1], replace(config, null_threshold=math.inf))
    if features.data.version == "1.1":
        return spans, score_squad(features.data, spans.predictions)
    scores = score_squad(
        features.data, spans.predictions, null_odds=spans.null_odds, null_threshold=config.null_threshold
    )
    chosen = {
        name: "" if spans.null_odds[name] > config.null_threshold else text
        for name, text in spans.predictions.items()
    }
    return replace(spans, predictions=chosen), scores


# ------------------------------------------------------------------------------------------------ pretraining


@dataclass(frozen=True, kw_only=True)
class ShortFinetuneConfig:
    """Scores during pretraining: a copy of the model is finetuned on SQuAD at chosen steps."""

    at: tuple[int, ...] = ()
    """Steps after which the model is finetuned and scored, such as --finetune.at 5000 10000."""
    data: Path | None = None
    """Training questions, the official JSON of SQuAD 1.1 or 2.0."""
    eval: Path | None = None
    """Questions to score on."""
    total_steps: int = 8_144
    """Optimizer steps of each finetuning."""
    global_batch_size: int = 48
    """Windows in one finetuning step, over all workers."""
    micro_batch_size: int | None = None
    """Windows per worker and forward pass; default: the largest divisor of its share up to 64."""
    learning_rate: float = 3e-5
    """Learning rate of finetuning, after warm-up in a tenth of its steps."""
    max_seq_length: int = 384
    """Maximum tokens of a window of a paragraph, special tokens included."""
    doc_stride: int = 128
    """Stride between windows, in tokens."""
    max_question_length: int = 64
    """Maximum tokens of a question; longer questions are truncated."""


def finetune_copy(source: Path, config: SquadConfig, run: "Run") -> dict[str, float] | None:
    """Finetune the model in ``source`` on the workers of ``run``, for a score in the middle of a pretraining.

    It writes nothing, and leaves models and random numbers of ``run`` as they were. All workers call it.

    Args:
        source: a transformers directory that all workers can read, with its tokenizer.
        config: its model and run directory are not read.

    Returns:
        The scores, the same on all workers, or ``None`` if a signal asked to stop.
    """
    import torch

    from shoal.train.run import inner_run

    devices = [run.world.device] if run.world.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        inner = inner_run(run, config)
        _, scores = train(config, source, inner)
    return None if inner.stopped else scores


def score_pretraining(config: SquadConfig, write: Callable[[Path], None], run: "Run") -> bool:
    """Finetune a copy of a model that is being pretrained, and record its scores.

    The pretraining is not affected: its weights, optimizer and random numbers stay as they are.

    Args:
        config: from :func:`short_config`.
        write: writes the model into a transformers directory; called on the first worker.

    Returns:
        Whether the scores were made; ``False`` if a signal came before.

    Raises:
        UsageError: the questions are not there, or do not go with the model.
    """
    from shoal.data.squad.dataset import read_squad
    from shoal.train.world import run_on_all

    directory = required(run.directory) / "finetune" / f"step-{run.step:08}"

    def export() -> None:
        if run.world.is_main:
            directory.parent.mkdir(exist_ok=True)
            write(directory)

    run_on_all(run.world.control, export)
    scores = finetune_copy(directory, config, run)
    run.world.barrier()
    if run.world.is_main:
        shutil.rmtree(directory)
    if scores is None:
        return False
    path = required(config.data.eval)
    held_out = read_squad(path, purpose="evaluate", bad=config.data.counter(path))
    run.evaluation(SQUAD_SPLIT, scores, num_samples=len(held_out.questions))
    return True


def short_config(
    short: ShortFinetuneConfig, train: LoopConfig, distributed: DistributedConfig, servers: ServersConfig
) -> SquadConfig:
    """Return the settings of a short finetuning inside a pretraining.

    Args:
        train: of the pretraining, whose seed and precision it takes.
        distributed, servers: of the pretraining.
    """
    return SquadConfig(
        data=SquadDataConfig(path=short.data, eval=short.eval),
        window=WindowConfig(
            max_seq_length=short.max_seq_length,
            doc_stride=short.doc_stride,
            max_question_length=short.max_question_length,
        ),
        train=FinetuneTrainConfig(
            total_steps=short.total_steps,
            global_batch_size=short.global_batch_size,
            micro_batch_size=short.micro_batch_size,
            seed=train.seed,
            precision=train.precision,
        ),
        optim=FinetuneOptimConfig(learning_rate=short.learning_rate),
        distributed=replace(distributed, wire="fp32"),  # 8-bit gradients make a group each time
        servers=servers,
    )


# ------------------------------------------------------------------------------------------------- use


@dataclass(frozen=True, kw_only=True)
class SquadPredictConfig(PredictConfig, BadEntriesConfig):
    """Questions, and how they are answered."""

    question: str | None = None
    """One question, instead of files."""
    context: str | None = None
    """The paragraph with its answer."""
    rules: Literal["auto", "1.1", "2.0"] = "auto"
    """2.0: a question may have no answer; auto: from the file's answers, or else from the run's scores."""
    top: int = 1
    """Number of answers to list for each question."""
    window: WindowConfig = field(default_factory=WindowConfig)
    answers: AnswerConfig = field(default_factory=AnswerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top <= self.answers.n_best:
            raise UsageError(f"--top {self.top} must be from 1 to --answers.n-best {self.answers.n_best}")
        if (self.question is None) != (self.context is None):
            raise UsageError("--question and --context go together: give both, or files")

    @property
    def has_one_input(self) -> bool:
        return self.question is not None


@dataclass(frozen=True, kw_only=True)
class SquadEvaluateConfig(ComputeConfig, BadEntriesConfig):
    """Questions with answers, and what is scored on them: a file of predictions, or a model."""

    data: Annotated[Path, Parameter(group=REQUIRED)]
    """Questions and answers, the official JSON or rows with the same fields: .jsonl, .json or .parquet."""
    predictions: Path | None = None
    """JSON object: question id to answer, empty for "no answer"."""
    model: Path | None = None
    """A finetuned model to evaluate instead of predictions: run directory of shoal, one of its checkpoints, a
    transformers directory with its tokenizer, or hub:NAME."""
    null_odds: Path | None = None
    """With predictions, 2.0 only: JSON object, question id to the odds of no answer; gives the best
    thresholds."""
    null_threshold: float = 1.0
    """With null odds: a question above this threshold counts as unanswered."""
    rules: Literal["auto", "1.1", "2.0"] = "auto"
    """Rules of 1.1 or 2.0; auto: 2.0 if questions are marked as impossible or have no answer."""
    json: Path | None = None
    """File for the scores."""
    out: Path | None = None
    """With a model: folder for predictions.json, nbest.json, null_odds.json and scores.json."""
    window: WindowConfig = field(default_factory=WindowConfig)
    answers: AnswerConfig = field(default_factory=AnswerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model is None) == (self.predictions is None):
            raise UsageError(
                "give one of the two: --predictions, a file of answers, or --model, which answers"
            )


class Answering(Use):
    """Answers questions with a finetuned model."""

    Predict, Evaluate = SquadPredictConfig, SquadEvaluateConfig
    one_input = "--question and --context"

    @classmethod
    def find(cls, path: Path) -> ModelSource:
        return using.find_trained(path)

    def read_model(self) -> None:
        from shoal.models.tasks import QuestionAnswering

        model, directory = using.read_task_model(QuestionAnswering, required(self.settings.model))
        self.model = model.to(self.world.device)
        self.window: WindowConfig = self.settings.window.fitted(positions_of(directory))
        self.tokenizer = using.read_tokenizer(directory, "window.max_seq_length", self.window.length)

    def outputs(self, data: "SquadData") -> "Logits | None":
        from shoal.data.squad.features import make_features

        features, size = make_features(data, self.tokenizer, self.window), self.settings.batch_size
        logits = span_logits(self.model, features, self.world, self.precision, batch_size=size)
        return None if logits is None else (features, logits)

    def read(self, inputs: tuple[Path, ...]) -> "list[SquadData]":
        from shoal.data.squad.questions import one_question, read_questions

        question, context = self.settings.question, self.settings.context
        if question is not None:
            files = [one_question(Path("--question"), question, context)]
        else:
            files = [read_questions(path, self.settings.bad_entries(path)) for path in inputs]
        return [replace(data, version=_version(self.settings, data)) for data in files]

    def describe(self, data: "SquadData") -> str:
        return f"{data.path}: {len(data.questions):,} questions"

    def remarks(self, data: "SquadData") -> list[str]:
        return data.remarks()

    def rows(self, data: "SquadData", outputs: "Logits") -> Iterator[Row]:
        from shoal.data.squad.answers import choose_answers

        (features, logits), top = outputs, self.settings.top
        answers = choose_answers(features, logits[:, 0], logits[:, 1], self.settings.answers)
        for question in data.questions:
            text, nbest = answers.predictions[question.id], answers.nbest[question.id]
            chosen = next((entry for entry in nbest if entry["text"] == text), {"probability": 0.0})
            row: dict[str, Any] = {"id": question.id, "question": question.text, "answer": text}
            row |= {"probability": chosen["probability"]}
            if question.id in answers.null_odds:
                row |= {"null_odds": answers.null_odds[question.id]}
            yield row | ({"nbest": nbest[:top]} if top > 1 else {})

    def score_files(self) -> str | None:
        from shoal.data.squad import score

        settings: SquadEvaluateConfig = self.settings
        if settings.predictions is None:
            return None
        return score.evaluate(
            settings.data,
            settings.predictions,
            null_odds=settings.null_odds,
            null_threshold=settings.null_threshold,
            version=None if settings.rules == "auto" else settings.rules,
            out=settings.json,
            bad=settings.bad_entries(settings.data),
        )

    def check_evaluation(self, inputs: tuple[Path, ...]) -> list[str]:
        (data,) = self.labelled(inputs)
        return [f"{data.path}: {len(data.questions):,} questions of SQuAD {data.version}"]

    def labelled(self, inputs: tuple[Path, ...]) -> "list[SquadData]":
        from shoal.data.squad.dataset import read_squad

        path, rules = self.settings.data, self.settings.rules
        data = read_squad(path, purpose="evaluate", bad=self.settings.bad_entries(path))
        return [data if rules == "auto" else replace(data, version=rules)]

    def scores(self, data: "SquadData", outputs: "Logits") -> str:
        """Return the scores as the official script prints them."""
        from shoal.atomic_io import write_json

        answers, scores = answer(*outputs, self.settings.answers)
        if self.settings.out is not None:
            write_answers(self.settings.out, answers, scores)
        figures = {**scores.official, "precision": self.precision.name}
        if self.settings.json is not None:
            write_json(self.settings.json, figures)
        return json.dumps(figures, indent=2)


def _version(settings: SquadPredictConfig, data: "SquadData") -> Literal["1.1", "2.0"]:
    if settings.rules != "auto":
        return settings.rules
    run = find_model(settings.model).run if settings.model.exists() else None  # samples: it has not begun
    has_answers = any(question.answers for question in data.questions)
    scored_with_null = run is not None and (run / NULL_ODDS).is_file()
    return "2.0" if scored_with_null and not has_answers else data.version


use = Answering


# ------------------------------------------------------------------------------------------------- dry run


def check(config: SquadConfig, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run."""
    from shoal.data.squad.features import make_features

    finetuning.require_paths(config, config.data, "questions")
    config, files = fitted(config), read_files(config.data)
    setting, length = "window.max_seq_length", config.window.length
    tokenizer = finetuning.check_model(
        config, num_workers, setting=setting, max_seq_length=length, exports=dry_run is not None
    )
    if not dry_run:
        return []
    windows = [make_features(data, required(tokenizer), config.window) for data in files]
    return [
        *finetuning.describe(config, len(windows[0]), num_workers),
        finetuning.memory_line(
            config, dry_run, sample, num_sequences=len(windows[0]), num_workers=num_workers
        ),
        *(
            f"{f.data.path}: SQuAD {f.data.version}, {len(f.data.questions):,} questions, {len(f):,} windows"
            for f in windows
        ),
        *(line for data in files for line in data.remarks()),
    ]


# ------------------------------------------------------------------------------------------------- sample


def sample(config: SquadConfig) -> Sample:
    """Return the first windows of the questions and the model; without questions, full windows."""
    from shoal.data.squad.features import make_features
    from shoal.models.tasks import QuestionAnswering

    config = fitted(config)

    def windows(tokenizer: "Tokenizer") -> "SquadFeatures":
        return make_features(read_files(config.data)[0], tokenizer, config.window)

    examples = None if config.data.path is None else windows
    return finetuning.sample(config, QuestionAnswering, config.window.length, examples)


def trial(config: SquadConfig, folder: Path) -> SquadConfig:
    """Return the settings of a short run, on synthetic questions that fill their windows."""
    question_length = 12

    def write(num_questions: int, words: finetuning.Words) -> str:
        paragraphs = []
        for number in range(num_questions):
            context = words(config.window.length - question_length - 3)
            answers = [{"text": context.split(" ", 1)[0], "answer_start": 0}]
            asked = {"id": str(number), "question": words(question_length), "answers": answers}
            paragraphs.append({"context": context, "qas": [asked]})
        return json.dumps({"version": "1.1", "data": [{"title": "synthetic", "paragraphs": paragraphs}]})

    return finetuning.trial(config, folder, ".json", write)


if __name__ == "__main__":
    run_script("squad")
