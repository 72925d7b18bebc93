"""Batches that are inferred by several threads: in order, and with the bits of one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from shoal.train.world import infer

CPU = torch.device("cpu")
NUM_BATCHES = 12


@pytest.fixture
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, 3, 32, 32, generator=generator) for _ in range(NUM_BATCHES)]


def network() -> nn.Module:
    """Return layers whose sums depend, in some libraries, on how many threads share them."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.GELU(), nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(576, 1248))
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(1248, 312)).eval()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 12], indirect=True)
def test_results_have_the_order_of_the_batches_and_the_bits_of_one_thread(num_threads: int) -> None:
    model, batches, seen = network(), images(), set[int]()

    def compute(batch: Tensor) -> Tensor:
        assert torch.get_num_threads() == 1 and torch.is_inference_mode_enabled()
        seen.add(threading.get_ident())
        out: Tensor = model(batch)
        return out

    found = list(infer(compute, batches, CPU))
    assert torch.get_num_threads() == num_threads
    assert len(seen) <= min(num_threads, 8) and threading.get_ident() not in seen
    torch.set_num_threads(1)
    with torch.no_grad():
        assert all(torch.equal(one, model(batch)) for one, batch in zip(found, batches, strict=True))


@pytest.mark.parametrize("num_threads", [2], indirect=True)
def test_an_error_is_raised_and_the_number_of_threads_restored(num_threads: int) -> None:
    def compute(batch: Tensor) -> Tensor:
        if batch[0, 0, 0, 0] == 7:
            raise ValueError("this batch")
        return batch

    batches = images()
    batches[4][0, 0, 0, 0] = 7
    found = infer(compute, batches, CPU)
    assert all(torch.equal(next(found), batch) for batch in batches[:4])
    with pytest.raises(ValueError, match="this batch"):
        next(found)
    assert torch.get_num_threads() == num_threads
