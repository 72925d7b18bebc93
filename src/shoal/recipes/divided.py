"""Trains a language model divided over workers: pipeline stages, layers in parts, and shards of replicas.

It trains instead of a recipe's own script where ``parallel.pipeline``, ``parallel.tensor`` or
``parallel.shard`` divides the model. Losses, weights and dropout are those of a run whose workers have the
whole model, and a run continues in any layout. A recipe has a function ``divide``, which returns what is its
own (:class:`Divided`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shoal.data.loader import as_tensors
from shoal.data.sources import ReaderSource
from shoal.data.steps import Reader, evenly_spread
from shoal.decide.batch import BatchPlan, BatchSizes, StagesConfig
from shoal.env.worker import WorkerEnv
from shoal.optim.lr_schedules import AnySchedule, learning_rate, set_learning_rate
from shoal.pipelining.runtime import Pipeline
from shoal.recipes import script
from shoal.recipes.shard_cache import Counting, record_reads
from shoal.recipes.stages import open_stages
from shoal.record import Evaluation
from shoal.train.optimizers import build_optimizers
from shoal.train.run import Run

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Divided:
    """The parts of a run that depend on the recipe."""

    network: nn.Module
    """Returns ``loss``, the mean over a micro-batch, and ``sums`` over it, for the scores."""
    train: Reader
    """Makes micro-batches of one shape, the inputs of the network."""
    held_out: Mapping[str, Reader]
    """By the split of their scores."""
    sizes: BatchSizes
    total_steps: int
    schedule: AnySchedule
    export: Callable[[Path], None]
    """Writes the model of the last checkpoint: no worker has all weights."""
    verdict: Callable[[Mapping[str, Evaluation]], str]
    num_sums: int
    """Of the network and of ``count`` together."""
    score: Callable[[Sequence[float], int], dict[str, float]]
    """Returns scores from these sums over the held-out examples, and the number of examples."""
    blank: Callable[[dict[str, npt.NDArray[Any]], npt.NDArray[np.bool_]], None]
    """Takes the targets from the rows of a held-out batch that only fill it up, those that are not true."""
    count: Callable[[Arrays], Sequence[float]]
    """Returns counts of a held-out batch, which scores divide by."""
    check: Callable[[Pipeline, dict[str, Tensor]], None] = lambda stage, example: None
    """Checks the stages before they train, by evaluations of batches like the example."""
    blocks: Sequence[nn.Module] = ()
    """Modules of the network that shards gather one at a time where nothing else divides it."""
    fill: Callable[[nn.Module], object] | None = None
    """Loads the weights of a part of a network on meta; default: those of the network, or drawn ones."""
    targets: Callable[[Any], int] | None = None
    """Counts the targets of a batch for ``inputs``."""
    inputs: Callable[[float], dict[str, float]] = lambda samples_per_target: {}
    """Returns the inputs that all samples share, from the ratio of samples to targets of a global batch."""
    matrices: Collection[str] = ()
    """Names of the parameters that Muon updates."""
    section: str = "train"
    """Section of the settings with ``sizes``."""
    limit: int | None = None
    """Most held-out examples of a split that are scored; default: all."""
    num_samples: Mapping[str, int] = field(default_factory=dict)
    """Samples of held-out examples, by split, where an example is not one."""
    processes: int = 0
    """Processes that make training examples."""
    shards: Counting | None = None
    """Of the data, whose reads are recorded; default: none are."""
    references: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()


def main(config: Any, worker: WorkerEnv | None = None) -> int:
    """Train until the last step, a signal, or a loss that stays not finite; return the exit code."""
    recipe: Any = script(config.recipe)
    with (
        Run.open(config=config, recipe=config.recipe, immutable=recipe.IMMUTABLE, worker=worker) as run,
        ExitStack() as stack,
    ):
        own: Divided = recipe.divide(config, run)
        batch = config.parallel.plan(own.sizes, run.world.num_workers, section=own.section)
        replica_size = config.parallel.replica_size

        # ----------------------------------------------------------------------------------------- model
        example = _example(own, batch.worker_batch_size)
        run.num_parameters = sum(parameter.numel() for parameter in own.network.parameters())
        stage = open_stages(
            own.network, example, run, config.parallel, batch,
            blocks=own.blocks, fill=own.fill, distributed=config.distributed, servers=config.servers,
        )  # fmt: skip
        stack.callback(stage.close)
        own.check(stage, example)
        optimizers = build_optimizers(stage.module.named_parameters(), config.optim, own.matrices)
        run.keep(**stage.kept(), **optimizers)
        stage.step_number = run.step

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> None:
            for split, reader in own.held_out.items():
                scores, num_examples = evaluate(stage, reader, own, run, batch, config.parallel)
                run.evaluation(split, scores, num_samples=own.num_samples.get(split, num_examples))

        # ----------------------------------------------------------------------------------------- loop
        steps = run.steps(
            ReaderSource(reader=own.train, processes=own.processes, whole=True),
            batch,
            until=own.total_steps,
            targets=own.targets,
            replica=(run.world.rank // replica_size, batch.num_workers),
            section=own.section,
            references=own.references,
            notes=own.notes,
        )
        for step in steps:
            with step:
                for optimizer in optimizers.values():
                    set_learning_rate(optimizer, learning_rate(own.schedule, step.number - 1))
                num_targets = step.num_targets / replica_size  # each worker has counted its replica's
                for inputs in step:  # one batch: the stage cuts it into micro-batches
                    stage.loss_scale = step.loss_scale
                    shared = _tensors(own.inputs(step.num_samples / num_targets))
                    step.observe(stage.step(**inputs, **shared), "pipeline")
                step.update(*optimizers.values(), max_norm=config.optim.max_grad_norm)
            if run.due(config.run.validation_frequency, evaluation=True) and own.held_out:
                score()
        if own.held_out and run.lacks_scores():
            score()
        record_reads(run, own.shards)

        return run.finish(own.export, own.verdict)


def evaluate(
    stage: Pipeline, reader: Reader, own: Divided, run: Run, batch: BatchPlan, parallel: StagesConfig
) -> tuple[dict[str, float], int]:
    """Return the scores of the held-out examples, and their number. A collective.

    The examples are those of a run without stages; rows that fill the last batch count for nothing.
    """
    chosen = evenly_spread(reader.num_examples, own.limit)
    totals = np.zeros(own.num_sums)
    replica, of_tensor = run.world.rank // parallel.replica_size, run.world.rank % parallel.tensor
    for first in range(0, len(chosen), batch.global_batch_size):
        numbers = first + replica * batch.worker_batch_size + np.arange(batch.worker_batch_size)
        is_there = numbers < len(chosen)
        arrays = dict(reader.micro_batch(reader.batch(0, chosen[np.where(is_there, numbers, 0)])))
        own.blank(arrays, is_there)
        evaluation = stage.evaluate(**as_tensors(arrays, pin_memory=False), **_tensors(own.inputs(1.0)))
        if evaluation.outputs is not None and not of_tensor:  # on one worker of a replica's last stage
            sums = sum(output["sums"].double().cpu().numpy() for output in evaluation.outputs)
            totals += np.concatenate([sums, own.count(arrays)])
    return own.score(run.sum(totals.tolist()), len(chosen)), len(chosen)


def _example(own: Divided, size: int) -> dict[str, Tensor]:
    """Return a replica's first batch of ``size`` rows on the CPU, by which the network is traced.

    Fewer training examples than that are repeated.
    """
    rows = np.arange(size) % own.train.num_examples
    batch = as_tensors(own.train.micro_batch(own.train.batch(0, rows)), pin_memory=False)
    return {**batch, **_tensors(own.inputs(1.0))}


def _tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
