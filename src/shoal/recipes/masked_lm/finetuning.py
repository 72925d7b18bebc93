"""Scores during pretraining: at chosen steps a copy of the model is finetuned on SQuAD and scored.

The pretraining itself does not notice: its weights, optimizer and random numbers stay what they were.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

from shoal import record
from shoal.data.squad.config import WindowConfig
from shoal.data.squad.dataset import read_squad
from shoal.recipes.finetune.config import (
    FinetuneOptimConfig,
    SourceConfig,
    SquadDataConfig,
    SquadFinetuneConfig,
    TrainConfig,
)
from shoal.recipes.finetune.squad import finetune_squad_from
from shoal.recipes.masked_lm.config import PretrainConfig
from shoal.recipes.masked_lm.export import write_export
from shoal.recipes.masked_lm.job import Job
from shoal.train.config import required
from shoal.train.exchange import together
from shoal.train.run_log import RunLog
from shoal.train.signals import StopRequest

SPLIT = "squad"
"""What these scores are called in the record."""


def finetune_if_due(job: Job, step: int, stop: StopRequest, log: RunLog | None) -> None:
    """Finetune a copy of the model as it is after ``step``, if that was asked for and was not done yet.

    A run that was stopped in between and continues from the checkpoint of ``step`` does it then.

    Raises:
        UsageError: the questions are not there, or do not go with the model.
    """
    config = job.config
    if step not in config.finetune.at or _is_done(job, step):
        return
    began = time.monotonic()
    directory = required(config.run.dir) / "finetune" / f"step-{step:08}"

    def export() -> None:
        if job.world.is_main:
            directory.parent.mkdir(exist_ok=True)
            write_export(job.model, job.train_reader.shards.directory, directory)

    together(job.world.control, export)
    scores = finetune_squad_from(directory, finetune_settings(config), job.world, stop=stop)
    job.world.barrier()
    if job.world.is_main:
        shutil.rmtree(directory)
    if log and scores:  # none: a signal came in between
        num_questions = len(read_squad(required(config.finetune.eval), misplaced="keep").questions)
        log.evaluation(
            record.Evaluation(
                step=step,
                split=SPLIT,
                num_samples=num_questions,
                metrics=scores,
                seconds=time.monotonic() - began,
            )
        )
    job.clock.begin_step()


def finetune_settings(config: PretrainConfig) -> SquadFinetuneConfig:
    """Return what the settings of the pretraining mean for a finetuning.

    Raises:
        UsageError: numbers out of their range.
    """
    short = config.finetune
    return SquadFinetuneConfig(
        model=SourceConfig(),
        data=SquadDataConfig(path=short.data, eval=short.eval),
        window=WindowConfig(
            max_seq_length=short.max_seq_length,
            doc_stride=short.doc_stride,
            max_question_length=short.max_question_length,
        ),
        train=TrainConfig(
            total_steps=short.total_steps,
            global_batch_size=short.global_batch_size,
            micro_batch_size=short.micro_batch_size,
            seed=config.train.seed,
            precision=config.train.precision,
        ),
        optim=FinetuneOptimConfig(learning_rate=short.learning_rate),
        distributed=replace(config.distributed, wire="fp32"),  # a wire with state makes a group each time
    )


def _is_done(job: Job, step: int) -> bool:
    """Whether the record has the score already; the main worker looks."""
    done = job.world.is_main and any(
        isinstance(row, record.Evaluation) and (row.step, row.split) == (step, SPLIT)
        for row in record.read_record(required(job.config.run.dir))
    )
    return job.world.sum_counts(done) == [1]
