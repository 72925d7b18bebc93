"""Finetunes on sentences or pairs with labels, MNLI or any file like it: read from top to bottom.

The loss of a sequence is the cross-entropy of its label, summed and divided by the sequences of the whole
global batch. Each evaluation file is scored by itself: accuracy, confusion table, and a file of predictions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal import record
from shoal.data.atomic_io import write_atomically
from shoal.data.loader import Batch
from shoal.data.squad.dataset import write_json
from shoal.data.text.classify import (
    ClassifyData,
    ClassifyScores,
    Columns,
    PairFeatures,
    make_pairs,
    read_classify,
    score_classify,
)
from shoal.data.text.task_batches import TaskData
from shoal.env import WorkerEnv
from shoal.errors import UsageError
from shoal.models.directory import load_task_model, save
from shoal.models.encoder import packed_inputs
from shoal.models.tasks import SequenceClassification, label_loss
from shoal.recipes.finetune import loop
from shoal.recipes.finetune.config import CLASSIFY_FIXED, ClassifyDataConfig, ClassifyFinetuneConfig
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
from shoal.train.owner import owned
from shoal.train.run_dir import open_run_dir
from shoal.train.signals import StopRequest
from shoal.train.world import join_world


def finetune(config: ClassifyFinetuneConfig, *, joined: WorkerEnv, command: list[str]) -> int:
    """Train until the last step or a signal, then evaluate and save; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the model, the data or the run that is there.
        ShoalError: damaged files, a lost worker, no memory, a loss that is not finite.
    """
    stop = StopRequest()
    run_dir = required(config.run.dir)
    with join_world(joined, config.distributed) as world, owned(run_dir, world):
        if world.is_main:
            open_run_dir(run_dir, as_tree(config), CLASSIFY_FIXED)
        source = start_of(config.model, run_dir, world)
        job = build(config, world, make_task(config, source), checkpoints=run_dir)
        return loop.run(job, stop, command)


# -------------------------------------------------------------------------------------------- the task


def make_task(config: ClassifyFinetuneConfig, directory: Path) -> ClassifyTask:
    """Read the examples and the model."""
    length = config.data.max_seq_length
    check_length(directory, "data.max_seq_length", length)
    tokenizer = read_source_tokenizer(directory)
    train, held_out = read_examples(config.data)
    torch.manual_seed(config.train.seed)
    return ClassifyTask(
        config=config,
        train=make_pairs(train, tokenizer, max_seq_length=length),
        held_out=tuple(make_pairs(data, tokenizer, max_seq_length=length) for data in held_out),
        model=load_task_model(
            SequenceClassification, directory, labels=train.labels, **model_settings(config.model)
        ),
        directory=directory,
    )


def read_examples(data: ClassifyDataConfig) -> tuple[ClassifyData, list[ClassifyData]]:
    """Return the training examples and those of each evaluation file.

    Raises:
        UsageError: a file is not what it should be, holds a label outside the set, or two evaluation files
            have the same name, by which their scores are told apart.
    """
    names = [path.stem for path in data.eval]
    if len(set(names)) != len(names):
        raise UsageError(f"data.eval names two files alike ({', '.join(names)}); rename one")
    columns = Columns(
        first=data.first, second=data.second or None, label=data.label, unlabelled=data.unlabelled
    )
    train = read_classify(required(data.path), columns, labels=data.labels or None)
    return train, [read_classify(path, columns, labels=train.labels) for path in data.eval]


def task_data(features: PairFeatures) -> TaskData:
    """Return the sequences with their labels."""
    return TaskData(
        tokens=features.tokens,
        types=features.types,
        bounds=features.bounds,
        targets={"labels": features.labels},
    )


@dataclass(frozen=True, kw_only=True)
class ClassifyTask:
    """The sequences, the model, and what is done with both; see ``job.Task``."""

    config: ClassifyFinetuneConfig
    train: PairFeatures
    held_out: tuple[PairFeatures, ...]
    model: SequenceClassification
    directory: Path
    """Where the model came from; the tokenizer's files are there."""
    name: str = "classify"

    @property
    def data(self) -> TaskData:
        return task_data(self.train)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return label_loss(model(**packed_inputs(batch)), batch["labels"])

    def sample_name(self, index: int) -> str:
        return f"example {index + 1}"

    def evaluate(self, job: Job, step: int, out: Path | None) -> list[record.Evaluation]:
        rows = [self._evaluate_file(job, features, step, out) for features in self.held_out]
        return [row for row in rows if row is not None]

    def _evaluate_file(
        self, job: Job, features: PairFeatures, step: int, out: Path | None
    ) -> record.Evaluation | None:
        began = time.monotonic()

        def compute(batch: Batch) -> Tensor:
            logits: Tensor = self.model(**packed_inputs(batch))
            return logits

        logits = outputs_of(job, task_data(features), compute, per_token=False)
        if logits is None:
            return None
        predicted = [int(label) for label in logits.argmax(axis=1)]
        scores = score_classify(features.data.labels, features.labels.tolist(), predicted)
        if out is not None:
            write_predictions(out, features.data, predicted, scores)
            print(f"{features.data.path.name}\n{scores.table()}", flush=True)
        return record.Evaluation(
            step=step,
            split=features.data.path.stem,
            num_samples=len(features),
            metrics={"accuracy": scores.accuracy / 100},
            seconds=time.monotonic() - began,
        )

    def notes(self) -> list[str]:
        lines = [
            f"{f.data.path.name}: {len(f):,} examples, {f.num_cut:,} cut to "
            f"{self.config.data.max_seq_length} tokens, {f.data.num_unlabelled:,} without a label left out"
            for f in (self.train, *self.held_out)
        ]
        return lines + new_parts(self.model)

    def save(self, directory: Path) -> None:
        save(self.model, directory, tokenizer_from=self.directory)


def write_predictions(out: Path, data: ClassifyData, predicted: list[int], scores: ClassifyScores) -> None:
    """Write a label a line, in the order of the examples with labels, and the confusion table as JSON."""
    name = data.path.stem
    lines = [f"{scores.labels[label]}\n" for label in predicted]
    write_atomically(out / f"predictions-{name}.txt", "".join(lines).encode())
    tree = {"accuracy": scores.accuracy, "labels": list(scores.labels), "counts": [*map(list, scores.counts)]}
    write_json(out / f"scores-{name}.json", tree)
