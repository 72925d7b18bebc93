"""Divides global batches by the speed of the workers, for hosts that are not equally fast.

A worker's part of a global batch is contiguous, and a loss is divided by counts over the whole batch.
Therefore unequal parts change neither the samples of a step nor, except for rounding, its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Sampler

from shoal import record
from shoal.data.sources import IterableSource, StepSource
from shoal.decide.batch import BatchPlan, WorkerShares
from shoal.decide.order import ShuffledOrder, worker_part
from shoal.decide.shares import FIRST_WINDOW, SETTLING, ReplayedShares, SharesBySpeed
from shoal.errors import UsageError
from shoal.train.gradients import DataParallel
from shoal.train.reporting import StepTimer
from shoal.train.world import World, run_on_all

BY_SPEED = "by-speed"
_FEW_MICRO_BATCHES = 4
"""With fewer micro-batches per step, one more for a faster worker is a large change of its share."""


def open_shares(
    setting: str,
    *,
    directory: Path,
    world: World,
    step: int,
    batch: BatchPlan,
    source: StepSource,
    models: Sequence[DataParallel],
) -> WorkerShares:
    """Return the shares of a run that begins or continues after ``step``. A collective.

    Args:
        setting: ``by-speed``; or the directory of a run whose shares are to be repeated.
        directory: of this run, whose record has the shares that it had so far.
        world: the workers.
        step: steps done, counted over the whole run.
        batch: the equal division.
        source: the data.
        models: that backward averages.

    Raises:
        UsageError: workers cannot be given unequal parts, or the recorded run had others.
    """
    _check_divisible(source, models, batch, setting)
    by_speed = setting == BY_SPEED
    equal = [batch.worker_batch_size] * batch.num_workers
    replayed = (directory if step else None) if by_speed else Path(setting)
    changes, batch_sizes = run_on_all(
        world.control, lambda: _recorded(replayed) if world.is_main and replayed else ([], [])
    )[0]
    if not by_speed and (
        batch.global_batch_size not in batch_sizes
        or any(len(shares) != batch.num_workers for _, shares in changes)
    ):
        counts = {len(shares) for _, shares in changes} or {batch.num_workers}
        raise UsageError(
            f"distributed.shares {setting}: that run divided batches of {_listed(batch_sizes)} samples among "
            f"{_listed(sorted(counts))} workers, and this one has batches of {batch.global_batch_size} and "
            f"{batch.num_workers} workers; shares can be repeated with the same batches and workers"
        )
    fitting = [
        (first, shares)
        for first, shares in changes
        if sum(shares) == batch.global_batch_size and len(shares) == batch.num_workers
    ]
    if not by_speed:
        return ReplayedShares(fitting, equal, step)
    last = next((shares for first, shares in reversed(fitting) if first <= step), equal)
    return SharesBySpeed(last, unit=_unit(models, batch))


def advice_on_shares(setting: str, batch: BatchPlan, section: str) -> list[str]:
    """Return a line to print if the micro-batches are too large for unequal shares."""
    if batch.accumulation_steps >= _FEW_MICRO_BATCHES:
        return []
    return [
        f"shares {setting}: a part that grows takes one more micro-batch, and a step has "
        f"{batch.accumulation_steps}: with --{section}.micro-batch-size of at most "
        f"{max(1, batch.worker_batch_size // _FEW_MICRO_BATCHES)} it costs less"
    ]


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def _recorded(run_dir: Path) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Return (first step, samples of each worker) of each change in a run's record, and its batch sizes."""
    if not (run_dir / record.FILE_NAME).is_file():
        raise UsageError(
            f"distributed.shares {run_dir} is neither equal nor by-speed nor the directory of a run: give "
            "one of them"
        )
    rows = record.read_record(run_dir)
    changes = [(row.step, row.samples) for row in rows if isinstance(row, record.Shares)]
    sizes = {row.global_batch_size for row in rows if isinstance(row, record.Start | record.Phase)}
    return changes, sorted(sizes)


def _check_divisible(
    source: StepSource, models: Sequence[DataParallel], batch: BatchPlan, setting: str
) -> None:
    if isinstance(source, IterableSource):
        raise UsageError(
            f"distributed.shares {setting} needs data whose order the run decides, not a DataLoader or "
            "another iterable of micro-batches: give run.steps the dataset itself, or one of shoal's readers"
        )
    if batch.replicas:
        raise UsageError(
            f"distributed.shares {setting} is for models of run.data_parallel, not for pipelines, whose "
            "micro-batches are fixed when they are built: leave it out"
        )
    if any(not ddp.average for ddp in models):
        raise UsageError(
            f"distributed.shares {setting} with optim.clip worker: a gradient that is clipped per worker "
            "depends on the worker's share; use --optim.clip global"
        )


def _unit(models: Sequence[DataParallel], batch: BatchPlan) -> int:
    """Return the number of samples that divides every share.

    Batch normalization computes over a micro-batch; whole micro-batches keep its statistics.
    """
    normalized = (isinstance(m, nn.modules.batchnorm._BatchNorm) for ddp in models for m in ddp.modules())
    return batch.micro_batch_size if any(normalized) else 1


# ---- loops without Run -----------------------------------------------------------------------------------


class SpeedSampler(Sampler[list[int]]):
    """Yields this worker's indices of each global batch, for a DataLoader in a loop without ``Run``.

        sampler = SpeedSampler(len(dataset), global_batch_size=512, model=ddp)
        for inputs, labels in DataLoader(dataset, batch_sampler=sampler):
            loss = F.cross_entropy(ddp(inputs), labels, reduction="sum")
            (loss * sampler.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            sampler.step()

    A pass is ``num_examples // global_batch_size`` batches; the next pass goes on where it ended. A worker is
    busy from the end of a step until the gradient of the model's first parameter, which backward computes
    last. Every 8 steps the workers exchange their times.

    Args:
        num_examples: length of the dataset.
        global_batch_size: samples of a step over all workers.
        model: whose gradients are timed; wrapped or not.
        seed: of the order; the same on all workers.
        ahead: batches that the DataLoader draws ahead: ``num_workers`` times ``prefetch_factor``. Shares
            change that many steps after they were decided.
        group: a process group of CPU tensors; default: gloo over all workers.

    Attributes:
        weight: factor of a sum of losses, with which DDP's average over the workers is the mean over the
            global batch.
        changes: (first step, samples of each worker) of each change, steps counted from 1.

    Raises:
        UsageError: there are fewer examples than a batch has, or fewer samples than workers.
    """

    def __init__(
        self,
        num_examples: int,
        *,
        global_batch_size: int,
        model: nn.Module,
        seed: int = 0,
        ahead: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        several = dist.is_initialized()
        self._rank, self._num_workers = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        if not self._num_workers <= global_batch_size <= num_examples:
            raise UsageError(
                f"global_batch_size {global_batch_size} must lie between the number of workers, "
                f"{self._num_workers}, and the number of examples, {num_examples}"
            )
        self._order = ShuffledOrder(num_examples=num_examples, seed=seed)
        self._batch_size, self._ahead = global_batch_size, ahead
        self._group: Any = dist.new_group(backend="gloo") if several and group is None else group
        parts = (worker_part(global_batch_size, rank, self._num_workers) for rank in range(self._num_workers))
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._timer = StepTimer(first.device)
        timer = self._timer  # not self: the model would keep the sampler
        first.register_post_accumulate_grad_hook(lambda _: timer.lap("backward"))  # type: ignore[no-untyped-call]
        self._steps = self._drawn = 0
        self._times: list[float] = []
        self.weight = self._num_workers / global_batch_size
        self.changes: list[tuple[int, tuple[int, ...]]] = []
        self._policy = SharesBySpeed([len(part) for part in parts], settling=SETTLING + ahead)
        self._equal = self._policy.current

    def __len__(self) -> int:
        return self._order.num_examples // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        self._drawn = self._steps  # batches that were drawn ahead and not used come again
        for _ in range(len(self)):
            part = worker_part(self._batch_size, self._rank, self._num_workers, self._shares(self._drawn + 1))
            numbers = self._drawn * self._batch_size + np.asarray(part)
            self._drawn += 1
            yield [int(index) for index in self._order.examples_of(numbers)[1]]

    def step(self) -> None:
        """End a step; call it after the optimizer's. Every 8 steps it is a collective.

        Raises:
            UsageError: the DataLoader draws more than ``ahead`` batches ahead.
        """
        self._timer.lap("other")
        self._timer.end_step()
        self._steps += 1
        if self._drawn > self._steps + self._ahead:
            raise UsageError(
                f"the DataLoader has drawn {self._drawn - self._steps} batches ahead: give the sampler "
                "ahead=num_workers * prefetch_factor of the DataLoader"
            )
        self._times.append(self._timer.busy_s)
        if self._num_workers > 1 and len(self._times) == FIRST_WINDOW:
            self._exchange()
        self._timer.begin_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps done and the changes of shares."""
        return {"steps": self._steps, "changes": [[first, *shares] for first, shares in self.changes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the steps of ``state``, with its shares."""
        self._steps = self._drawn = state["steps"]
        self.changes = [(first, tuple(shares)) for first, *shares in state["changes"]]
        self._times.clear()
        self._policy = SharesBySpeed(self._shares(math.inf), settling=SETTLING + self._ahead)

    def _shares(self, step: float) -> tuple[int, ...]:
        """Return the shares of a step, counted from 1."""
        return next((shares for first, shares in reversed(self.changes) if first <= step), self._equal)

    def _exchange(self) -> None:
        times = torch.zeros(len(self._times), self._num_workers, dtype=torch.float64)
        times[:, self._rank] = torch.tensor(self._times)
        dist.all_reduce(times, group=self._group)
        self._times.clear()
        for number, row in enumerate(times.tolist()):
            if self._policy.observe(self._steps + number, row):
                self.changes.append((self._steps + self._ahead + 1, self._policy.current))
                break  # the rest are steps before the change
