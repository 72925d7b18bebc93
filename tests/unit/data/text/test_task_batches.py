"""Micro-batches of tasks: however they are shared, together they are the plain order of the epochs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch

from shoal.data.steps import DataShard
from shoal.data.text.sequences import TaskData
from shoal.data.text.task_batches import (
    TaskSource,
    evaluation_batches,
    evaluation_parts,
)
from shoal.decide.order import ShuffledOrder


@dataclass(frozen=True, kw_only=True)
class Labelled(TaskData):
    TARGETS = ("labels",)
    labels: np.ndarray


@pytest.fixture
def data() -> TaskData:
    """37 sequences of 3 to 40 tokens; every token of sequence ``k`` is ``k``."""
    lengths = np.random.default_rng(3).integers(3, 41, 37)
    numbers = np.repeat(np.arange(37), lengths).astype(np.int32)
    return Labelled(
        tokens=numbers,
        types=(numbers % 2).astype(np.uint8),
        bounds=np.concatenate([[0], np.cumsum(lengths)]),
        labels=np.arange(100, 137, dtype=np.int32),
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3, 6])
def test_workers_share_each_global_batch(data: TaskData, num_workers: int) -> None:
    for step in range(6):  # over the end of the epoch
        shards = [
            DataShard(global_batch_size=12, micro_batch_size=2, rank=rank, num_workers=num_workers)
            for rank in range(num_workers)
        ]
        source = TaskSource(data=data, seed=5)
        parts = [[cut for _, cut in source.micro_batches(shard, step)] for shard in shards]
        dealt = np.concatenate([cut for part in parts for cut in part])
        order = ShuffledOrder(num_examples=37, seed=5)
        assert sorted(dealt) == sorted(order.examples_of(range(12 * step, 12 * step + 12))[1])
        assert {len(part) for part in parts} == {6 // num_workers}
        tokens = [sum(int(data.lengths[cut].sum()) for cut in part) for part in parts]
        assert max(tokens) - min(tokens) <= 40  # one sequence at most
        for part in parts:
            lengths = np.concatenate([data.lengths[cut] for cut in part])
            assert (np.diff(lengths) <= 0).all()


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_dropout_keys_belong_to_samples(data: TaskData, num_workers: int) -> None:
    """A sequence has the same key in whatever micro-batch it is, and another one in the next epoch."""

    def keys_of(step: int, **layout: int) -> dict[int, int]:
        keys = {}
        for rank in range(layout["num_workers"]):
            shard = DataShard(global_batch_size=12, rank=rank, **layout)
            (batches,) = TaskSource(data=data, seed=5).open(shard, range(step, step + 1))
            for batch in batches:
                keys |= dict(zip(batch["labels"].tolist(), batch["dropout_keys"].tolist(), strict=True))
        return keys

    alone = [keys_of(step, num_workers=1, micro_batch_size=12) for step in range(4)]
    shared = [keys_of(step, num_workers=num_workers, micro_batch_size=3) for step in range(4)]
    assert shared == alone
    assert len(set().union(*(keys.values() for keys in alone))) == 4 * 12  # the fourth is of the next epoch


def test_an_epoch_is_every_sequence_once(data: TaskData) -> None:
    shard = DataShard(global_batch_size=37, micro_batch_size=37)
    source = TaskSource(data=data, seed=0, name=lambda index: f"q{index}")
    first, second = (source.global_batch(shard, step)[1] for step in (0, 1))
    assert source.names(shard, 1) == [f"q{index}" for index in second]
    assert sorted(first) == sorted(second) == list(range(37))
    assert first.tolist() != second.tolist()


def test_steps_resume_where_they_stopped(data: TaskData) -> None:
    shard = DataShard(global_batch_size=8, micro_batch_size=4, rank=1, num_workers=2)
    source = TaskSource(data=data, seed=7)
    whole = list(source.open(shard, range(9)))
    rest = list(source.open(shard, range(4, 9)))
    assert len(whole) == 9 and len(rest) == 5
    for ours, theirs in zip(rest, whole[4:], strict=True):
        for batch, wanted in zip(ours, theirs, strict=True):
            assert batch.keys() == wanted.keys()
            assert all(torch.equal(torch.as_tensor(batch[n]), torch.as_tensor(wanted[n])) for n in batch)


def test_a_batch_holds_its_sequences(data: TaskData) -> None:
    batch = data.batch(np.array([5, 30]))
    assert np.diff(batch["cu_seqlens"]).tolist() == data.lengths[[5, 30]].tolist()
    assert batch["input_ids"].tolist() == [5] * data.lengths[5] + [30] * data.lengths[30]
    assert batch["token_type_ids"].tolist() == [1] * data.lengths[5] + [0] * data.lengths[30]
    assert batch["labels"].tolist() == [105, 130] and batch["labels"].dtype == np.int64


def test_an_abandoned_loader_ends_its_thread(data: TaskData) -> None:
    shard = DataShard(global_batch_size=4, micro_batch_size=4)
    steps = TaskSource(data=data, seed=0).open(shard, range(1_000_000))
    before = loader_threads()
    next(steps)
    own = loader_threads() - before
    assert own
    steps.close()
    assert not own & loader_threads()


def loader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("shoal-loader")}


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_evaluation_batches_do_not_depend_on_who_shares_them(data: TaskData, num_workers: int) -> None:
    alone = [part.tolist() for part in evaluation_parts(data, batch_size=4, rank=0, num_workers=1)]
    assert sorted(chain.from_iterable(alone)) == list(range(37))
    shared = [
        [part.tolist() for part in evaluation_parts(data, batch_size=4, rank=rank, num_workers=num_workers)]
        for rank in range(num_workers)
    ]
    assert sorted(chain.from_iterable(shared)) == sorted(alone)
    for indices, batch in evaluation_batches(
        data, batch_size=4, rank=num_workers - 1, num_workers=num_workers
    ):
        assert batch["labels"].tolist() == (indices + 100).tolist()


@pytest.mark.parametrize(("num_workers", "shares"), [(2, (4, 8)), (3, (8, 4, 0)), (5, ()), (7, ())])
def test_unequal_parts_have_the_sizes_of_the_shard(
    data: TaskData, num_workers: int, shares: tuple[int, ...]
) -> None:
    shards = [
        DataShard(global_batch_size=12, micro_batch_size=2, rank=rank, num_workers=num_workers, shares=shares)
        for rank in range(num_workers)
    ]
    source = TaskSource(data=data, seed=3)
    parts = [source.micro_batches(shard, 1) for shard in shards]
    assert [len(part) for part in parts] == [shard.num_micro_batches for shard in shards]
    indices = np.concatenate([indices for part in parts for _, indices in part])
    assert sorted(indices) == sorted(source.global_batch(shards[0], 1)[1])
