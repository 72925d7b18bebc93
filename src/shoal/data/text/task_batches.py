"""Makes micro-batches for finetuning and evaluation, with sequences of similar length together.

As in pretraining, sample numbers run over an endless stream of shuffled epochs (``shoal.decide.order``), a
global batch is the next ``global_batch_size`` of them, and the state of the data is the number consumed.
Inside a global batch, sequences are sorted by length and assigned to workers round-robin: workers get about
equally many tokens, and the sequences of a micro-batch have about the same length. Losses are normalised over
the whole global batch, so this changes gradients only by rounding.

An evaluation cuts all sequences into the same micro-batches for any number of workers, so that logits are
bitwise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from shoal.data.loader import Batch, BatchStream, as_tensors, in_thread
from shoal.data.steps import DataShard
from shoal.data.text.sequences import Sequences
from shoal.data.text.special_tokens import Int64Array
from shoal.decide.order import ShuffledOrder, micro_batches
from shoal.decide.rng import dropout_keys


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    """Training batches of sequences, as :meth:`shoal.train.run.Run.steps` takes them.

    Args:
        data: the sequences of one epoch.
        seed: of their order and of the dropout keys.
        name: names a sequence by its index, for messages.
    """

    data: Sequences
    seed: int
    name: Callable[[int], str] = lambda index: f"example {index + 1}"
    whole: bool = False
    """Give the worker's part of a global batch in one piece, for a pipeline that cuts it up itself."""

    def open(self, shard: DataShard, steps: range, *, pin_memory: bool = False) -> BatchStream[list[Batch]]:
        """Return a stream with, per step (from 0), this worker's micro-batches, prefetched by a thread."""
        if self.whole:
            shard = replace(shard, micro_batch_size=shard.global_batch_size // shard.num_workers)

        def make(step: int) -> list[Batch]:
            return [
                as_tensors(
                    {**self.data.batch(indices), "dropout_keys": dropout_keys(self.seed, epochs, indices)},
                    pin_memory,
                )
                for epochs, indices in self.micro_batches(shard, step)
            ]

        return in_thread(make, steps)

    def names(self, shard: DataShard, step: int) -> list[str]:
        """Return names of the sequences of global batch ``step`` (from 0)."""
        return [self.name(int(index)) for index in self.global_batch(shard, step)[1]]

    def micro_batches(self, shard: DataShard, step: int) -> list[tuple[Int64Array, Int64Array]]:
        """Return (epochs, sequences) of each of this worker's micro-batches, the longest sequences first."""
        epochs, indices = self.global_batch(shard, step)
        own = _longest_first(self.data, indices)[dealt_to(shard)]
        cuts = micro_batches(range(len(own)), shard.micro_batch_size)
        return [(epochs[own[cut.start : cut.stop]], indices[own[cut.start : cut.stop]]) for cut in cuts]

    def global_batch(self, shard: DataShard, step: int) -> tuple[Int64Array, Int64Array]:
        """Return (epochs, sequences) of the global batch after ``step`` completed steps, in their order."""
        size = shard.global_batch_size
        order = ShuffledOrder(num_examples=len(self.data), seed=self.seed)
        return order.examples_of(np.arange(step * size, (step + 1) * size))


def dealt_to(shard: DataShard) -> Int64Array:
    """Return the places that a worker gets when those of a global batch are dealt out in turn.

    A worker that has as many as its part has samples gets none any more.

    Example:
        >>> dealt_to(DataShard(global_batch_size=5, micro_batch_size=1, rank=0, num_workers=2)).tolist()
        [0, 2]
    """
    sizes = np.array([len(replace(shard, rank=rank).part) for rank in range(shard.num_workers)])
    rounds = np.arange(sizes[shard.rank])[:, None]
    before = np.minimum(sizes, rounds).sum(axis=1) + (sizes[: shard.rank] > rounds).sum(axis=1)
    places: Int64Array = before.astype(np.int64)
    return places


def evaluation_batches(
    data: Sequences, *, batch_size: int, rank: int = 0, num_workers: int = 1
) -> Iterator[tuple[Int64Array, Batch]]:
    """Yield this worker's micro-batches of all sequences, each with the indices of its sequences."""
    for indices in evaluation_parts(data, batch_size=batch_size, rank=rank, num_workers=num_workers):
        yield indices, as_tensors(data.batch(indices), pin_memory=False)


def evaluation_parts(data: Sequences, *, batch_size: int, rank: int, num_workers: int) -> list[Int64Array]:
    """Return the sequences of each micro-batch of a worker; any worker can compute those of another."""
    order = _longest_first(data, np.arange(len(data)))
    cuts = micro_batches(range(len(data)), batch_size)[rank::num_workers]
    return [order[cut.start : cut.stop] for cut in cuts]


def _longest_first(data: Sequences, indices: Int64Array) -> Int64Array:
    """Return the order ``[N]`` that sorts sequences by descending length."""
    return np.argsort(-data.lengths[indices], kind="stable")
