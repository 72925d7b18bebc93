"""Images that a thread decodes ahead, on streams that are late at random."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.memory_device import MemoryDevice
from torch import Tensor

from shoal.data.images.gpu import DecodedAhead
from shoal.data.loader import BatchStream
from shoal.data.steps import DataShard
from shoal.errors import ShoalError

SHARD = DataShard(global_batch_size=4, micro_batch_size=2)
STEPS = range(3, 8)


class Encoded:
    """Two micro-batches a step, of the numbers 6, 7, ... for step 3."""

    reader = None

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    def names(self, shard: DataShard, step: int) -> list[str]:
        return [f"step {step}"]

    def open(self, shard: DataShard, steps: range, *, pin_memory: bool = False) -> BatchStream[Any]:
        made = (iter([self.batch(2 * step), self.batch(2 * step + 1)]) for step in steps)
        return BatchStream(made, [self.pool])

    def batch(self, number: int) -> dict[str, Any]:
        return {"encoded": torch.full((3,), number), "lengths": torch.ones(3), "labels": number}


class Device(MemoryDevice):
    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.threads: set[int] = set()
        self.lent: list[Tensor] = []
        self.kept: list[Tensor] = []

    def lend(self, tensor: Tensor, stream: Any) -> None:
        self.lent.append(tensor)  # as the allocator of a GPU does until the stream is done

    def decode(self, batch: dict[str, Any]) -> Tensor:
        """Queue a copy on the current stream; its tensors live as long as the device."""
        self.threads.add(threading.get_ident())
        images = torch.full((3,), torch.nan)
        self.kept += [images, batch["encoded"]]
        self.current_stream().run(partial(images.copy_, batch["encoded"]))
        return images


@pytest.mark.parametrize("seed", range(3))
def test_kernels_wait_for_the_images_that_they_use(seed: int) -> None:
    device = Device(seed)
    source = DecodedAhead(Encoded(), device.decode, device)  # type: ignore[arg-type]
    assert source.names(SHARD, 4) == ["step 4"]
    sums, compute = torch.zeros(10), device.new_stream()
    with device.on(compute), closing(source.open(SHARD, STEPS)) as steps:
        for step, batches in zip(STEPS, steps, strict=True):
            for number, batch in enumerate(batches):
                assert batch["labels"] == 2 * step + number and "encoded" not in batch
                images = source.images_of(batch)
                compute.run(partial(sums[batch["labels"] - 6].copy_, images[2]))
    compute.record_event().synchronize()
    assert sums.tolist() == list(range(6, 16))
    assert len(device.lent) == 10 and threading.get_ident() not in device.threads
    device.close()


def test_steps_that_are_not_taken_are_left_out_and_the_threads_end() -> None:
    encoded = Encoded()
    source = DecodedAhead(encoded, lambda batch: batch["encoded"], None)  # type: ignore[arg-type]
    with closing(source.open(SHARD, STEPS)) as steps:
        taken = next(steps), next(steps)  # the first is not taken, the second in part
        assert next(taken[1])["labels"] == 8
        assert [batch["images"].tolist() for batch in next(steps)] == [[10] * 3, [11] * 3]
    with pytest.raises(RuntimeError, match="shutdown"):
        encoded.pool.submit(print)
    assert source.images_of({"encoded": torch.ones(1)}).tolist() == [1]


def test_images_that_cannot_be_decoded_end_the_step_that_has_them() -> None:
    def decode(batch: dict[str, Any]) -> Tensor:
        if batch["labels"] == 9:
            raise ShoalError("image 9 of the split: not an image")
        return torch.ones(1)

    def labels() -> Iterator[int]:
        with closing(DecodedAhead(Encoded(), decode, None).open(SHARD, STEPS)) as steps:  # type: ignore[arg-type]
            for batches in steps:
                yield from (batch["labels"] for batch in batches)

    found = labels()
    assert [next(found) for _ in range(3)] == [6, 7, 8]
    with pytest.raises(ShoalError, match="image 9"):
        next(found)
