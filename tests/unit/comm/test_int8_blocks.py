"""Tests 8-bit blocks against NumPy, bit by bit: decoded value plus residual is the number, exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import wire_oracle as oracle
from shoal.comm import int8_blocks
from shoal.comm.int8_blocks import BLOCK, BLOCK_BYTES


def some_blocks(count: int, seed: int = 0) -> Tensor:
    """Blocks of very different sizes, with zeros, ties between two levels, and numbers near the least one."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, BLOCK, generator=random)
    numbers *= torch.logspace(-12, 12, count)[:, None]
    numbers[0] = 0.0
    numbers[1] = (torch.arange(BLOCK) - 127.5).clamp(-127, 127)
    numbers[2] *= 1e-30
    numbers[3, 1:] = 0.0
    return numbers


def room(num_blocks: int) -> tuple[Tensor, Tensor]:
    return int8_blocks.values_and_scales(torch.full((num_blocks * BLOCK_BYTES,), 77, dtype=torch.uint8))


def test_values_scales_and_what_is_left_over_are_those_of_numpy() -> None:
    numbers = some_blocks(600)  # more than are worked on at a time
    values, scales = room(600)
    rest = numbers.clone()
    int8_blocks.encode(rest, values, scales)
    out = torch.empty_like(numbers)
    int8_blocks.decode(values, scales, out)
    for index, block in enumerate(numbers.numpy()):
        wanted, scale = oracle.rounded(block)
        np.testing.assert_array_equal(values[index].numpy(), wanted)
        assert scales[index] == scale[0]
        np.testing.assert_array_equal(out[index].numpy(), oracle.sent(block))
    assert values.abs().amax(1)[3:].min() == 127, "the largest number of a block uses the largest level"


def test_sent_and_left_over_are_the_number_exactly() -> None:
    numbers = some_blocks(600, seed=1)
    values, scales = room(600)
    rest, out = numbers.clone(), torch.empty_like(numbers)
    int8_blocks.encode(rest, values, scales)
    int8_blocks.decode(values, scales, out)
    assert torch.equal(out.double() + rest.double(), numbers.double())
    # to half a unit of the largest level's rounding
    assert (rest.abs() <= scales[:, None] * (0.5 + 127 * 2**-23)).logical_or(scales[:, None] == 0).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_that_is_not_finite_travels_as_nan_and_leaves_nothing(bad: float) -> None:
    numbers = some_blocks(9)
    numbers[5, 100] = bad
    values, scales = room(9)
    rest, out = numbers.clone(), torch.empty_like(numbers)
    int8_blocks.encode(rest, values, scales)
    int8_blocks.decode(values, scales, out)
    assert out[5].isnan().all() and (rest[5] == 0).all()
    others = torch.arange(9) != 5
    assert torch.equal((out.double() + rest.double())[others], numbers.double()[others])


@pytest.mark.parametrize("bad", [0.0, math.inf])
def test_what_a_gpu_computes_has_the_bits_of_a_cpu(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = some_blocks(600)
    numbers[5, 100] = bad

    def results() -> list[Tensor]:
        rest, out, total = numbers.clone(), torch.empty_like(numbers), numbers.clone()
        row = torch.zeros(600 * BLOCK_BYTES, dtype=torch.uint8)
        int8_blocks.encode(rest, *int8_blocks.values_and_scales(row))
        int8_blocks.decode(*int8_blocks.values_and_scales(row), out)
        int8_blocks.add_in_order(torch.stack([row] * 3), total, 1)
        return [row, rest, out.view(torch.int32), total.view(torch.int32)]

    on_cpu = results()
    monkeypatch.setattr(int8_blocks, "_is_host", lambda _: False)
    assert all(map(torch.equal, results(), on_cpu))


def test_nothing_asks_a_gpu_for_a_number() -> None:
    numbers, rows = torch.empty(600, BLOCK, device="meta"), torch.empty(3, 600 * BLOCK_BYTES, device="meta")
    rows = rows.to(torch.uint8)
    int8_blocks.encode(numbers, *int8_blocks.values_and_scales(rows[0]))
    int8_blocks.add_in_order(rows, numbers, 1)
    int8_blocks.decode_rows(rows, torch.empty(3 * 600 * BLOCK - 100, device="meta"))


class Divisors(TorchDispatchMode):
    """Collects what tensors are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "div" in func.__name__:
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


def test_no_number_of_the_host_is_divided_by() -> None:
    """A GPU would multiply by its reciprocal, which rounds once more."""
    rows = torch.empty(600 * BLOCK_BYTES, device="meta", dtype=torch.uint8)
    with Divisors() as divisors:
        int8_blocks.encode(torch.empty(600, BLOCK, device="meta"), *int8_blocks.values_and_scales(rows))
    assert [getattr(divisor, "device", None) for divisor in divisors.found] == [torch.device("meta")] * 2


def test_a_row_is_all_values_and_then_all_scales() -> None:
    rows = torch.zeros(2, 3 * BLOCK_BYTES, dtype=torch.uint8)
    values, scales = int8_blocks.values_and_scales(rows)
    assert values.shape == (2, 3, BLOCK) and scales.shape == (2, 3)
    int8_blocks.encode(some_blocks(4)[1:], values[1], scales[1])
    assert (rows[0] == 0).all()
    raw = rows[1].numpy().tobytes()
    assert raw[: 3 * BLOCK] == values[1].numpy().tobytes()
    assert raw[3 * BLOCK :] == scales[1].numpy().tobytes()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_sums_are_in_rank_order_and_a_workers_own_numbers_are_not_rounded(rank: int) -> None:
    numbers = [some_blocks(300, seed=other) for other in range(3)]
    received = torch.full((3, 300 * BLOCK_BYTES), 255, dtype=torch.uint8)  # NaN where it is not filled
    values, scales = int8_blocks.values_and_scales(received)
    for other in range(3):
        if other != rank:
            int8_blocks.encode(numbers[other].clone(), values[other], scales[other])
    own = numbers[rank].clone()
    int8_blocks.add_in_order(received, own, rank)
    terms = [
        n.numpy() if other == rank else oracle.sent(n.flatten().numpy()).reshape(-1, BLOCK)
        for other, n in enumerate(numbers)
    ]
    np.testing.assert_array_equal(own.numpy(), (terms[0] + terms[1]) + terms[2])


@pytest.mark.parametrize(
    "count", [1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 3, 5 * BLOCK + 1, 6 * BLOCK]
)
def test_rows_are_written_one_after_the_other_without_the_padding(count: int) -> None:
    rows = torch.zeros(3, 2 * BLOCK_BYTES, dtype=torch.uint8)
    values, scales = int8_blocks.values_and_scales(rows)
    numbers = some_blocks(600)[-6:].view(3, 2, BLOCK)
    for row in range(3):
        int8_blocks.encode(numbers[row].clone(), values[row], scales[row])
    flat = torch.full((count + 2,), 5.0)
    int8_blocks.decode_rows(rows, flat[:count])
    np.testing.assert_array_equal(flat[:count].numpy(), oracle.sent(numbers.flatten().numpy())[:count])
    assert flat[count:].tolist() == [5.0, 5.0]
