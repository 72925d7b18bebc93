"""Finetunes on SQuAD 1.1 or 2.0 and answers the questions of an evaluation file: read from top to bottom.

Paragraphs are cut into windows; the loss of a window is that of the places of the answer's first and last
token (CLS where the answer is not inside), summed and divided by the windows of the whole global batch. The
evaluation's logits come together on the main worker, which chooses answers, writes them in the official
formats and scores them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal import record
from shoal.data.loader import Batch
from shoal.data.squad.answers import Answers, choose_answers
from shoal.data.squad.config import AnswerConfig
from shoal.data.squad.dataset import SquadData, describe_misplaced, read_squad, write_json
from shoal.data.squad.features import SquadFeatures, make_features
from shoal.data.squad.score import Scores, score_squad
from shoal.data.text.task_batches import TaskData
from shoal.env import WorkerEnv
from shoal.models.directory import load_task_model, save
from shoal.models.encoder import packed_inputs
from shoal.models.tasks import QuestionAnswering, span_loss
from shoal.recipes.finetune import loop
from shoal.recipes.finetune.config import SQUAD_FIXED, SquadDataConfig, SquadFinetuneConfig
from shoal.recipes.finetune.evaluation import outputs_of
from shoal.recipes.finetune.job import Job, build
from shoal.recipes.finetune.source import (
    check_length,
    model_settings,
    new_parts,
    read_source_tokenizer,
    start_of,
)
from shoal.train.config import as_tree, required
from shoal.train.exchange import exchange
from shoal.train.gather import Float32Array
from shoal.train.owner import owned
from shoal.train.run_dir import open_run_dir
from shoal.train.signals import StopRequest
from shoal.train.world import World, join_world

PREDICTIONS, NBEST, NULL_ODDS, SCORES = "predictions.json", "nbest.json", "null_odds.json", "scores.json"
"""Files of the run directory with the answers of the last evaluation, and their scores."""


def finetune(config: SquadFinetuneConfig, *, joined: WorkerEnv, command: list[str]) -> int:
    """Train until the last step or a signal, then evaluate and save; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the model, the data or the run that is there.
        ShoalError: damaged files, a lost worker, no memory, a loss that is not finite.
    """
    stop = StopRequest()
    run_dir = required(config.run.dir)
    with join_world(joined, config.distributed) as world, owned(run_dir, world):
        if world.is_main:
            open_run_dir(run_dir, as_tree(config), SQUAD_FIXED)
        source = start_of(config.model, run_dir, world)
        job = build(config, world, make_task(config, source), checkpoints=run_dir)
        return loop.run(job, stop, command)


def finetune_squad_from(
    directory: Path, settings: SquadFinetuneConfig, world: World, *, stop: StopRequest | None = None
) -> dict[str, float]:
    """Finetune a copy of the model in ``directory`` and return its scores, on every worker the same.

    For a score at a checkpoint of a pretraining: all workers of a world that they have joined call it. It
    writes nothing, keeps no checkpoint, and leaves the caller's model and random numbers as they were.

    Args:
        directory: a transformers directory that all workers can read, with its tokenizer.
        settings: ``model.path`` and ``run.dir`` do not count.
        stop: on a signal, return an empty dict after the step under way.
    """
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        job = build(settings, world, make_task(settings, directory), checkpoints=None)
        if loop.run_steps(job, 0, stop, None) < job.plan.total_steps:
            return {}
        job.trained.ddp.eval()
        rows = job.task.evaluate(job, job.plan.total_steps, None)
    scores: dict[str, float] = exchange(world.control, rows[0].metrics if rows else None)[0]
    return scores


# -------------------------------------------------------------------------------------------- the task


def make_task(config: SquadFinetuneConfig, directory: Path) -> SquadTask:
    """Read the questions and the model."""
    check_length(directory, "window.max_seq_length", config.window.max_seq_length)
    tokenizer = read_source_tokenizer(directory)
    train, held_out = read_questions(config.data)
    torch.manual_seed(config.train.seed)
    return SquadTask(
        config=config,
        train=make_features(train, tokenizer, config.window),
        held_out=make_features(held_out, tokenizer, config.window),
        model=load_task_model(QuestionAnswering, directory, **model_settings(config.model)),
        directory=directory,
    )


def read_questions(data: SquadDataConfig) -> tuple[SquadData, SquadData]:
    """Return the training and the evaluation questions.

    Raises:
        UsageError: a file is not SQuAD, or holds a misplaced answer that is refused.
    """
    train = read_squad(required(data.path), misplaced=data.misplaced)
    return train, read_squad(required(data.eval), misplaced="keep")


def task_data(features: SquadFeatures) -> TaskData:
    """Return the windows with the places to predict."""
    return TaskData(
        tokens=features.tokens,
        types=features.types,
        bounds=features.bounds,
        targets={"start": features.start, "end": features.end},
    )


@dataclass(frozen=True, kw_only=True)
class SquadTask:
    """The windows, the model, and what is done with both; see ``job.Task``."""

    config: SquadFinetuneConfig
    train: SquadFeatures
    held_out: SquadFeatures
    model: QuestionAnswering
    directory: Path
    """Where the model came from; the tokenizer's files are there."""
    name: str = "squad"

    @property
    def data(self) -> TaskData:
        return task_data(self.train)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        start_logits, end_logits = model(**packed_inputs(batch))
        return span_loss(start_logits, end_logits, batch, batch["start"], batch["end"])

    def sample_name(self, index: int) -> str:
        """Return the id of a window's question."""
        question = self.train.data.questions[int(self.train.question[index])]
        return question.id

    def evaluate(self, job: Job, step: int, out: Path | None) -> list[record.Evaluation]:
        began = time.monotonic()

        def compute(batch: Batch) -> Tensor:
            return torch.stack(self.model(**packed_inputs(batch)), dim=1)

        logits = outputs_of(job, task_data(self.held_out), compute, per_token=True)
        if logits is None:
            return []
        answers, scores = answer(self.held_out, logits, self.config.answers)
        if out is not None:
            write_answers(out, answers, scores)
        metrics = {k: float(v) for k, v in scores.official().items() if not k.endswith("total")}
        return [
            record.Evaluation(
                step=step,
                split=self.held_out.data.path.stem,
                num_samples=len(self.held_out.data.questions),
                metrics=metrics,
                seconds=time.monotonic() - began,
            )
        ]

    def notes(self) -> list[str]:
        lines = [
            f"{kind}: {len(f.data.questions):,} questions of SQuAD {f.data.version} in {len(f):,} windows"
            for kind, f in (("training", self.train), ("evaluation", self.held_out))
        ]
        lines += [line for f in (self.train, self.held_out) if (line := describe_misplaced(f.data))]
        return lines + new_parts(self.model)

    def save(self, directory: Path) -> None:
        save(self.model, directory, tokenizer_from=self.directory)


def answer(features: SquadFeatures, logits: Float32Array, config: AnswerConfig) -> tuple[Answers, Scores]:
    """Return answers in the official formats, and their scores.

    The best thresholds of 2.0 are looked for over every question's best span. (The official script sees the
    predictions alone, in which questions above the threshold have lost theirs.)

    Args:
        logits: of the answer's first and last token, ``[T, 2]``.
    """
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


def write_answers(out: Path, answers: Answers, scores: Scores) -> None:
    """Write predictions, n-best lists, null odds (2.0) and scores."""
    write_json(out / PREDICTIONS, answers.predictions)
    write_json(out / NBEST, answers.nbest)
    if answers.null_odds:
        write_json(out / NULL_ODDS, answers.null_odds)
    write_json(out / SCORES, scores.official())
