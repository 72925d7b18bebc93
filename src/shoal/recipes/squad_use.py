"""Answers questions with a finetuned model: ``shoal predict squad``, ``shoal evaluate squad``."""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from shoal.data.squad.config import AnswerConfig, WindowConfig
from shoal.errors import UsageError
from shoal.recipes import finetuning, squad, using
from shoal.recipes.model_source import find_model
from shoal.recipes.using import ComputeConfig, PredictConfig, Row
from shoal.train.config import REQUIRED, required
from shoal.train.run_dir import require_writable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shoal.data.squad.answers import Answers
    from shoal.data.squad.dataset import SquadData
    from shoal.models.tasks import QuestionAnswering
    from shoal.train.gradients import Precision
    from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class Predict(PredictConfig):
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


def check_prediction(what: Predict, inputs: tuple[Path, ...]) -> list[str]:
    """Check what can be checked without torch; return the lines of a dry run.

    Raises:
        UsageError: no model, no question, or a file that cannot be read.
    """
    using.check_inputs(what, inputs, single=what.question is not None, option="--question and --context")
    return [f"{data.path}: {len(data.questions):,} questions" for data in _read(what, inputs)]


def predict(what: Predict, inputs: tuple[Path, ...], world: "World", precision: "Precision") -> Iterator[Row]:
    """Yield a row for each question, on the first worker; all workers call it.

    Raises:
        UsageError: the model is for another task, or too small for the windows.
        ShoalError: its files are damaged, or its logits are not finite.
    """
    from shoal.data.squad.answers import choose_answers
    from shoal.data.squad.features import make_features

    model, tokenizer, window = _read_model(what.model, what.window, world)
    for data in _read(what, inputs):
        features = make_features(data, tokenizer, window)
        logits = squad.span_logits(model, features, world, precision, batch_size=what.batch_size)
        if logits is not None:
            yield from _rows(
                data, choose_answers(features, logits[:, 0], logits[:, 1], what.answers), what.top
            )


def _read_model(
    source: Path, window: WindowConfig, world: "World"
) -> "tuple[QuestionAnswering, Tokenizer, WindowConfig]":
    from shoal.models.tasks import QuestionAnswering

    model, directory = using.read_task_model(QuestionAnswering, source)
    window = window.fitted(finetuning.positions_of(directory))
    tokenizer = using.read_tokenizer(directory, "window.max_seq_length", window.length)
    return model.to(world.device), tokenizer, window


def _read(what: Predict, inputs: tuple[Path, ...]) -> "list[SquadData]":
    from shoal.data.squad.questions import questions_of, read_questions

    if what.question is not None and what.context is not None:
        files = [questions_of(Path("--question"), [("1", what.question, what.context)])]
    else:
        files = [read_questions(path) for path in inputs]
    return [replace(data, version=_version(what, data)) for data in files]


def _version(what: Predict, data: "SquadData") -> Literal["1.1", "2.0"]:
    if what.rules != "auto":
        return what.rules
    run_dir, has_answers = find_model(what.model).run, any(question.answers for question in data.questions)
    scored_with_null = run_dir is not None and (run_dir / squad.NULL_ODDS).is_file()
    return "2.0" if scored_with_null and not has_answers else data.version


def _rows(data: "SquadData", answers: "Answers", top: int) -> Iterator[Row]:
    for question in data.questions:
        text, nbest = answers.predictions[question.id], answers.nbest[question.id]
        chosen = next((entry for entry in nbest if entry["text"] == text), {"probability": 0.0})
        row: dict[str, Any] = {"id": question.id, "question": question.text, "answer": text}
        row |= {"probability": chosen["probability"]}
        if question.id in answers.null_odds:
            row |= {"null_odds": answers.null_odds[question.id]}
        yield row | ({"nbest": nbest[:top]} if top > 1 else {})


# ------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True, kw_only=True)
class Evaluate(ComputeConfig):
    """Questions with answers, and what is scored on them: a file of predictions, or a model."""

    data: Annotated[Path, Parameter(group=REQUIRED)]
    """The official JSON file of questions and answers."""
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


def score_file(what: Evaluate) -> str:
    """Return the scores of a file of predictions.

    Raises:
        UsageError: a file is not what it should be, or the files do not belong together.
        ShoalError: the scores cannot be written.
    """
    from shoal.data.squad import score

    return score.evaluate(
        what.data,
        required(what.predictions),
        null_odds=what.null_odds,
        null_threshold=what.null_threshold,
        version=None if what.rules == "auto" else what.rules,
        out=what.json,
    )


def check_evaluation(what: Evaluate, inputs: tuple[Path, ...]) -> list[str]:
    """Check what can be checked without torch; return the lines of a dry run.

    Raises:
        UsageError: no model, no questions, or a folder that cannot be written.
    """
    using.find_trained(required(what.model))
    data = _labelled(what)
    if what.out is not None:
        require_writable(what.out)
    return [f"{data.path}: {len(data.questions):,} questions of SQuAD {data.version}"]


def evaluate(
    what: Evaluate, inputs: tuple[Path, ...], world: "World", precision: "Precision"
) -> Iterator[str]:
    """Yield the scores as the official script prints them, on the first worker; all workers call it.

    Raises:
        UsageError: the model is for another task, or too small for the windows.
        ShoalError: its files are damaged, its logits are not finite, or a file cannot be written.
    """
    import json

    from shoal.atomic_io import write_json
    from shoal.data.squad.features import make_features

    using.make_folder(what.out, world)
    model, tokenizer, window = _read_model(required(what.model), what.window, world)
    features = make_features(_labelled(what), tokenizer, window)
    logits = squad.span_logits(model, features, world, precision, batch_size=what.batch_size)
    if logits is None:
        return
    answers, scores = squad.answer(features, logits, what.answers)
    if what.out is not None:
        squad.write_answers(what.out, answers, scores)
    figures = {**scores.official, "precision": precision.name}
    if what.json is not None:
        write_json(what.json, figures)
    yield json.dumps(figures, indent=2)


def _labelled(what: Evaluate) -> "SquadData":
    from shoal.data.squad.dataset import read_squad

    data = read_squad(what.data, misplaced="keep")
    return data if what.rules == "auto" else replace(data, version=what.rules)
