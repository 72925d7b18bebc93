"""Finetunes T5 on sentences or pairs with labels, MNLI or any file like it: read from top to bottom.

The model reads "mnli hypothesis: … premise: …" and writes the label's word. The loss is the cross-entropy
(with z-loss) of the word's tokens, summed and divided by those of the whole global batch. An evaluation lets
the model write, the likeliest token each time; what spells no label counts as wrong.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal import record
from shoal.data.loader import Batch
from shoal.data.text.classify import ClassifyData, score_classify
from shoal.data.text.text_to_text import TextToText, make_text_to_text, template_of
from shoal.env import WorkerEnv
from shoal.models.directory import save
from shoal.models.t5 import IGNORED, T5, generate, read_t5
from shoal.recipes.finetune import loop
from shoal.recipes.finetune.classify import read_examples, write_predictions
from shoal.recipes.finetune.config import T5_FIXED, T5DataConfig, T5FinetuneConfig
from shoal.recipes.finetune.evaluation import outputs_of
from shoal.recipes.finetune.job import Job, build
from shoal.recipes.finetune.source import model_settings, read_source_tokenizer, start_of
from shoal.train.config import as_tree, required
from shoal.train.owner import owned
from shoal.train.run_dir import open_run_dir
from shoal.train.signals import StopRequest
from shoal.train.world import join_world

NO_LABEL = "(no label)"
"""What a text that spells none of the labels is called in tables and predictions."""


def finetune(config: T5FinetuneConfig, *, joined: WorkerEnv, command: list[str]) -> int:
    """Train until the last step or a signal, then evaluate and save; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the model, the data or the run that is there.
        ShoalError: damaged files, a lost worker, no memory, a loss that is not finite.
    """
    stop = StopRequest()
    run_dir = required(config.run.dir)
    with join_world(joined, config.distributed) as world, owned(run_dir, world):
        if world.is_main:
            open_run_dir(run_dir, as_tree(config), T5_FIXED)
        source = start_of(config.model, run_dir, world)
        job = build(config, world, make_task(config, source), checkpoints=run_dir)
        return loop.run(job, stop, command)


# -------------------------------------------------------------------------------------------- the task


def make_task(config: T5FinetuneConfig, directory: Path) -> T5Task:
    """Read the examples and the model."""
    tokenizer = read_source_tokenizer(directory)
    train, held_out = read_examples(config.data)
    torch.manual_seed(config.train.seed)
    model = read_t5(directory, **model_settings(config.model))

    def worded(data: ClassifyData) -> TextToText:
        return make_text_to_text(
            data,
            tokenizer,
            template=wording(config.data, data),
            max_seq_length=config.data.max_seq_length,
            end_id=model.weights.config.eos_token_id,
            pad_id=model.weights.config.pad_token_id,
        )

    return T5Task(
        config=config,
        data=worded(train),
        held_out=tuple(map(worded, held_out)),
        model=model,
        directory=directory,
    )


def wording(settings: T5DataConfig, data: ClassifyData) -> str:
    """Return how the examples of a file are worded."""
    return settings.template or template_of(settings.task, has_pairs=data.examples[0].second is not None)


@dataclass(frozen=True, kw_only=True)
class T5Task:
    """The texts, the model, and what is done with both; see ``job.Task``."""

    config: T5FinetuneConfig
    data: TextToText
    held_out: tuple[TextToText, ...]
    model: T5
    directory: Path
    """Where the model came from; the tokenizer's files are there."""
    name: str = "t5-classify"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(**batch).loss * (batch["labels"] != IGNORED).sum()
        return loss

    def sample_name(self, index: int) -> str:
        return f"example {index + 1}"

    def evaluate(self, job: Job, step: int, out: Path | None) -> list[record.Evaluation]:
        rows = [self._evaluate_file(job, texts, step, out) for texts in self.held_out]
        return [row for row in rows if row is not None]

    def _evaluate_file(
        self, job: Job, texts: TextToText, step: int, out: Path | None
    ) -> record.Evaluation | None:
        began = time.monotonic()

        def write(batch: Batch) -> Tensor:
            return generate(
                self.model, batch["input_ids"], batch["attention_mask"], num_tokens=texts.longest_word
            )

        written = outputs_of(job, texts, write, per_token=False)  # float32 holds ids below 2^24 exactly
        if written is None:
            return None
        data = texts.data
        predicted = [texts.label_of(row) for row in written.astype("int64")]
        scores = score_classify((*data.labels, NO_LABEL), [x.label for x in data.examples], predicted)
        if out is not None:
            write_predictions(out, data, predicted, scores)
            print(f"{data.path.name}\n{scores.table()}", flush=True)
        return record.Evaluation(
            step=step,
            split=data.path.stem,
            num_samples=len(texts),
            metrics={"accuracy": scores.accuracy / 100},
            seconds=time.monotonic() - began,
        )

    def notes(self) -> list[str]:
        first = self.data
        lines = [f"worded as: {wording(self.config.data, first.data)}"]
        return lines + [
            f"{f.data.path.name}: {len(f):,} examples, {f.num_cut:,} cut to "
            f"{self.config.data.max_seq_length} tokens, {f.data.num_unlabelled:,} without a label left out"
            for f in (first, *self.held_out)
        ]

    def save(self, directory: Path) -> None:
        save(self.model, directory, tokenizer_from=self.directory)
