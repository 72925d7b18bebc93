"""Copies of micro-batches on a stream of their own, to a device whose streams are late at random."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.memory_device import MemoryDevice

from shoal.data.loader import DeviceCopies, copies_to, to_device


def batch(number: int) -> dict[str, Any]:
    tensors = {
        "images": torch.full((2, 3, 4, 4), number, dtype=torch.uint8),
        "parts": (torch.arange(6.0) + number, [torch.tensor([number])]),
    }
    return {**tensors, "max_seqlen": number}


@pytest.mark.parametrize("seed", range(3))
def test_kernels_see_what_was_copied_before_them(seed: int) -> None:
    """Both streams are late, and the host drops each batch at once."""
    device = MemoryDevice(seed=seed)
    copies, compute = DeviceCopies(device), device.new_stream()
    sums = torch.zeros(8, dtype=torch.float64)
    kept = []
    with device.on(compute):
        for number in range(8):
            moved = copies(batch(number))
            assert moved["max_seqlen"] == number
            assert type(moved["parts"]) is tuple and type(moved["parts"][1]) is list
            images = moved["images"]
            compute.run(partial(sums[number].copy_, images.view(-1)[7]))
            kept.append(moved)  # on a GPU its allocator keeps memory for the streams that use it
    compute.record_event().synchronize()
    assert sums.tolist() == list(range(8))
    device.close()


def test_sources_are_kept_until_they_are_copied_and_no_longer() -> None:
    device = MemoryDevice()
    copies = DeviceCopies(device)
    for number in range(50):
        moved = copies(batch(number))  # the caller's own stream: it waits
        assert moved["parts"][0].tolist() == (torch.arange(6.0) + number).tolist()
    assert len(copies._sources) <= 1
    device.close()


def test_without_a_gpu_tensors_stay_where_they_are() -> None:
    given = batch(1)
    moved = copies_to(torch.device("cpu"))(given)
    assert moved["images"] is given["images"]
    assert to_device(given, torch.device("cpu"))["parts"][0] is given["parts"][0]
