"""Adapts readers, datasets and DataLoaders to :meth:`shoal.train.run.Run.steps`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from shoal.data.loader import BatchStream, LoaderConfig, in_thread, streamed_steps, training_steps
from shoal.data.steps import DataShard, Reader, SizedReader, StepReader
from shoal.decide.order import Order, ShuffledOrder, micro_batches
from shoal.errors import UsageError


class StepSource(Protocol):
    """Makes the micro-batches of optimizer steps; a step's batches depend on its number alone."""

    def open(self, shard: DataShard, steps: range, *, pin_memory: bool = False) -> BatchStream[Any]:
        """Return a stream with, per step (from 0), this worker's micro-batches: a list or an iterator."""

    def names(self, shard: DataShard, step: int) -> list[str]:
        """Return names of the samples of global batch ``step`` (from 0), for messages."""


@dataclass(frozen=True, kw_only=True)
class ReaderSource:
    """Batches of a reader: a step's micro-batches are made together, or one by one if examples are large."""

    reader: Reader
    processes: int = 0
    """Loader processes; without any, threads of the worker make the batches."""
    order: Order | None = None
    """Instead of the full shuffle by the reader's seed."""
    whole: bool = False
    """Give the worker's part of a global batch in one piece, for a pipeline that cuts it up itself."""

    def open(self, shard: DataShard, steps: range, *, pin_memory: bool = False) -> BatchStream[Any]:
        if self.whole:
            shard = replace(shard, micro_batch_size=shard.global_batch_size // shard.num_workers)
        make: Any = streamed_steps if isinstance(self.reader, SizedReader) else training_steps
        consumed = steps.start * shard.global_batch_size
        reader = StepReader(reader=self.reader, share=shard, samples_consumed=consumed, order=self.order)
        self.reader.prefetch(map(reader.indices, range(len(steps))))
        config = LoaderConfig(num_loader_processes=self.processes)
        stream: BatchStream[Any] = make(reader, config, num_steps=len(steps), pin_memory=pin_memory)
        return stream

    def names(self, shard: DataShard, step: int) -> list[str]:
        return _names(self.order or self.reader.full_shuffle, shard, step)


@dataclass(frozen=True, kw_only=True)
class DatasetSource:
    """Batches of an indexable dataset, collated as a DataLoader does, in an order of its own per epoch.

    The same global batches at any number of workers: a run that continues with another number sees the same
    samples in the same steps.
    """

    dataset: Any
    seed: int

    def __post_init__(self) -> None:
        if len(self.dataset) < 1:
            raise UsageError("the dataset to train on is empty")

    def open(self, shard: DataShard, steps: range, *, pin_memory: bool = False) -> BatchStream[Any]:
        def make(step: int) -> list[Any]:
            cuts = micro_batches(shard.part, shard.micro_batch_size)
            return [self._batch(step * shard.global_batch_size + np.asarray(cut)) for cut in cuts]

        return in_thread(make, steps)

    def names(self, shard: DataShard, step: int) -> list[str]:
        return _names(self._order, shard, step)

    @property
    def _order(self) -> Order:
        return ShuffledOrder(num_examples=len(self.dataset), seed=self.seed)

    def _batch(self, numbers: Any) -> Any:
        indices = [int(index) for index in self._order.examples_of(numbers)[1]]
        if hasattr(self.dataset, "__getitems__"):
            return default_collate(self.dataset.__getitems__(indices))
        return default_collate([self.dataset[index] for index in indices])


@dataclass(frozen=True, kw_only=True)
class IterableSource:
    """Micro-batches of a DataLoader or another iterable, which each worker has for itself.

    The order is the sampler's: each epoch calls ``set_epoch`` of the sampler, or of the iterable, where there
    is one, and a run that continues skips to its place. So the place is exact at the same number of workers.
    """

    batches: Iterable[Any]
    checked: bool = True
    """Refuse a first micro-batch of another size than the run's, and the same rows on all workers."""

    def open(self, shard: DataShard, steps: range, *, pin_memory: bool = False) -> BatchStream[Any]:
        per_step = shard.num_micro_batches
        endless = self._epochs()
        for _ in islice(endless, steps.start * per_step):
            pass
        return BatchStream((list(islice(endless, per_step)) for _ in steps), [])

    def names(self, shard: DataShard, step: int) -> list[str]:
        return [f"those of step {step + 1:,}"]

    def _epochs(self) -> Iterator[Any]:
        epoch = 0
        while True:
            owners: list[Any] = [getattr(self.batches, "sampler", None), self.batches]
            for owner in owners:
                if hasattr(owner, "set_epoch"):
                    owner.set_epoch(epoch)
            count = 0
            for batch in self.batches:
                count += 1
                yield batch
            if not count:
                raise UsageError(f"the data to train on gave no batch in epoch {epoch}")
            epoch += 1


@dataclass(frozen=True, kw_only=True)
class FirstSteps:
    """Repeats the micro-batches of the first steps of another source, which it keeps in memory."""

    source: StepSource
    num_steps: int

    def open(self, shard: DataShard, steps: range, *, pin_memory: bool = False) -> BatchStream[Any]:
        with closing(self.source.open(shard, range(self.num_steps), pin_memory=pin_memory)) as first:
            kept = [list(micro_batches) for micro_batches in first]
        return BatchStream((kept[step % self.num_steps] for step in steps), [])

    def names(self, shard: DataShard, step: int) -> list[str]:
        return self.source.names(shard, step % self.num_steps)


def digest_of_rows(batches: Iterable[Any], size: int | None) -> int:
    """Return a checksum of micro-batches; 0 for what says nothing, such as tensors of one value.

    Args:
        batches: micro-batches of any form.
        size: samples that the first should have; ``None``: any number.

    Raises:
        UsageError: the first has another number.
    """
    digest = 0
    for number, batch in enumerate(batches):
        values = list(_values(batch))
        if number == 0 and size is not None:
            _require_size(values, size)
        for value in values:
            if isinstance(value, Tensor) and _is_plain(value) and value.numel():
                flat = value.detach().cpu().flatten()
                if (flat != flat[0]).any():
                    digest = zlib.crc32(flat.view(torch.uint8).numpy().data, digest)
            elif isinstance(value, str):
                digest = zlib.crc32(value.encode(errors="surrogatepass"), digest)
    return digest


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _values(batch: Any) -> Iterator[Any]:
    """Yield what a micro-batch consists of: tensors, texts, numbers, lists and other objects."""
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biuf":
        yield torch.from_numpy(np.ascontiguousarray(batch))
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _values(value)
    else:
        yield batch
        if isinstance(batch, list | tuple):
            for value in batch:
                yield from _values(value)


def _require_size(values: list[Any], size: int) -> None:
    """Check that a micro-batch of these values may have ``size`` samples: tensors' rows, lists' members."""
    rows = {value.size(0) for value in values if isinstance(value, Tensor) and value.ndim}
    members = {len(value) for value in values if isinstance(value, list | tuple)}
    plain = all(isinstance(value, Tensor | list | tuple | str | int | float | None) for value in values)
    if size in rows | members or not plain:
        return
    sizes = f"{' or '.join(map(str, sorted(rows)))} rows" if rows else "no rows"
    raise UsageError(
        f"the first micro-batch of the data has {sizes}, and the run's micro_batch_size is {size}: give "
        f"batches of it, as DataLoader(..., batch_size={size}) does, or set Sizes(micro_batch_size=...); "
        "batches that have no such rows: IterableSource(batches=..., checked=False) of shoal.data.sources"
    )


def as_source(data: Any, *, seed: int) -> StepSource:
    """Return ``data`` as a source of steps.

    Raises:
        UsageError: it is none of a source, an indexable dataset and an iterable of micro-batches.
    """
    if hasattr(data, "open") and hasattr(data, "names"):
        source: StepSource = data
        return source
    if isinstance(data, Reader):
        return ReaderSource(reader=data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, DataLoader):
        return DatasetSource(dataset=data, seed=seed)
    if isinstance(data, Iterable) and not isinstance(data, Iterator):
        return IterableSource(batches=data)
    raise UsageError(
        f"a {type(data).__name__} is no training data: give an indexable dataset, a DataLoader or another "
        "iterable of micro-batches that can be gone through more than once"
    )


def _names(order: Order, shard: DataShard, step: int) -> list[str]:
    """Return the samples of a global batch as epoch:index."""
    size = shard.global_batch_size
    epochs, indices = order.examples_of(np.arange(step * size, (step + 1) * size))
    return [f"{epoch}:{index}" for epoch, index in zip(epochs, indices, strict=True)]
