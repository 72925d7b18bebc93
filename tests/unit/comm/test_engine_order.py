"""Tests that the bits of a sum depend on the placement only, and that 16-bit tensors are rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine_group import (
    PLACEMENTS,
    Array,
    engine_group,
    expected,
    narrow,
    random_values,
    same_bits,
    widen,
)
from shoal import native

COUNT = 40_009


def all_reduced(
    hosts: list[str], inputs: list[Array], *, dtype: str = "float32", num_helpers: int = 0, **options: Any
) -> Array:
    """The sum, after a look that all ranks have the same."""
    with engine_group(hosts, num_helpers, **options) as group:
        outputs = [np.zeros_like(x) for x in inputs]
        group.run("all_reduce", inputs, outputs, dtype=dtype)
    assert all(same_bits(x, outputs[0]) for x in outputs)
    return outputs[0]


# ---- the order of addition ------------------------------------------------------------------------------


@pytest.mark.parametrize(("hosts", "num_helpers"), PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hosts_by_lowest_rank_and_ranks_in_order_within(
    hosts: list[str], num_helpers: int, dtype: str
) -> None:
    inputs = [random_values(COUNT, dtype, rank, spread=20) for rank in range(len(hosts))]
    want = expected(hosts, inputs, dtype)
    assert same_bits(all_reduced(hosts, inputs, dtype=dtype, num_helpers=num_helpers), want)
    if len(hosts) > 2:  # the values do tell the orders apart
        one_each = [str(rank) for rank in range(len(hosts))]
        assert not same_bits(expected(one_each, [*inputs[1:], inputs[0]], dtype), want)


def test_another_placement_has_another_order() -> None:
    inputs = [random_values(COUNT, "float32", rank, spread=20) for rank in range(4)]
    sums = [
        all_reduced(hosts, inputs)
        for hosts in (["a", "b", "c", "d"], ["a", "a", "b", "b"], ["a", "b", "b", "a"])
    ]
    assert len({x.tobytes() for x in sums}) == 3
    in_rank_order = inputs[0] + inputs[1] + inputs[2] + inputs[3]
    assert same_bits(sums[0], in_rank_order)
    assert same_bits(all_reduced(["a"] * 4, inputs), in_rank_order)


VARIANTS: dict[str, dict[str, Any]] = {
    "small chunks": {"chunk_bytes": 8 << 10, "shared_chunk_bytes": 16 << 10},
    "large chunks": {"chunk_bytes": 1 << 20, "shared_chunk_bytes": 1 << 20},
    "three connections": {"connections_per_peer": 3},
    "three threads": {"network_threads": 3},
    "two slots": {"num_slots": 2},
    "tight windows": {"min_window_bytes": 8 << 10, "window_bytes": 8 << 10, "unexpected_bytes": 8 << 10},
    "one server": {"pattern": [1]},
    "servers backwards": {"pattern": [3, 2, 1, 0]},
    "one helper": {"num_helpers": 1},
    "helpers only": {"num_helpers": 3, "pattern": [4, 5, 6]},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("hosts", [["a", "b", "c", "d"], ["a", "a", "b", "b"]], ids="".join)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_depend_on_nothing_else(hosts: list[str], dtype: str, variant: dict[str, Any]) -> None:
    inputs = [random_values(COUNT, dtype, rank, spread=20) for rank in range(4)]
    assert same_bits(all_reduced(hosts, inputs, dtype=dtype, **variant), expected(hosts, inputs, dtype))


# ---- 16 bits on the wire, one rounding ------------------------------------------------------------------


def half_ulp_bfloat16(values: Array) -> Array:
    """Half a unit in the last of the 8 places, of the power of two below each value."""
    exponent = np.frexp(np.maximum(np.abs(values), np.finfo(np.float32).smallest_normal))[1]
    return np.ldexp(0.5, exponent - 8)


def ring_in_bfloat16(inputs: list[Array]) -> Array:
    """Return the sum of a ring, which rounds after every addition."""
    total = widen(inputs[0], "bfloat16")
    for values in inputs[1:]:
        total = widen(narrow(total + widen(values, "bfloat16"), "bfloat16"), "bfloat16")
    return total


def gradients(num_ranks: int, *, cancelling: bool) -> list[Array]:
    """bfloat16 contributions; cancelling ones sum up to a thousandth of what each holds."""
    rng = np.random.default_rng(num_ranks + cancelling)
    values = rng.standard_normal((num_ranks, COUNT)).astype(np.float32)
    if cancelling:
        values[1::2] = -values[::2] + 1e-3 * rng.standard_normal((num_ranks // 2, COUNT)).astype(np.float32)
    return [narrow(x, "bfloat16") for x in values]


def within_bound(total: Array, inputs: list[Array]) -> Array:
    """|error| <= 1/2 ulp_bf16(sum) + n 2^-24 sum |x_i|, element by element, against fp64."""
    exact = np.stack([widen(x, "bfloat16") for x in inputs]).astype(np.float64)
    sums = exact.sum(axis=0)
    bound = half_ulp_bfloat16(sums) + len(inputs) * 2.0**-24 * np.abs(exact).sum(axis=0)
    within: Array = np.abs(total.astype(np.float64) - sums) <= bound
    return within


@pytest.mark.parametrize("cancelling", [False, True], ids=["plain", "cancelling"])
@pytest.mark.parametrize(
    "hosts", [[f"h{r}" for r in range(8)], [f"h{r // 4}" for r in range(16)]], ids=["8 hosts", "4 hosts of 4"]
)
def test_bfloat16_sums_keep_the_bound(hosts: list[str], cancelling: bool) -> None:
    inputs = gradients(len(hosts), cancelling=cancelling)
    total = widen(all_reduced(hosts, inputs, dtype="bfloat16"), "bfloat16")
    assert within_bound(total, inputs).all()
    assert not within_bound(ring_in_bfloat16(inputs), inputs).all()


@pytest.mark.parametrize("cancelling", [False, True], ids=["plain", "cancelling"])
def test_bfloat16_sums_over_64_hosts_keep_the_bound(cancelling: bool) -> None:
    inputs = gradients(64, cancelling=cancelling)
    out = torch.empty(COUNT, dtype=torch.bfloat16)
    tensors = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in inputs]
    native.sum_in_rank_order(out, tensors)  # what a server does with the contributions of 64 hosts
    total = out.float().numpy()
    assert within_bound(total, inputs).all()
    ring = ring_in_bfloat16(inputs)
    assert not within_bound(ring, inputs).all()
    exact = np.stack([widen(x, "bfloat16") for x in inputs]).astype(np.float64).sum(axis=0)
    assert np.abs(ring - exact).max() > 4 * np.abs(total - exact).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "max"])
def test_partial_sums_in_16_bits_are_rounded_once_more(dtype: str, op: str) -> None:
    hosts = ["a", "a", "b", "c", "c", "c"]
    inputs = [random_values(COUNT, dtype, rank, spread=1) for rank in range(len(hosts))]
    results = {}
    for partial_dtype in ("float32", "input"):
        with engine_group(hosts, 1, partial_dtype=partial_dtype) as group:
            outputs = [np.zeros_like(x) for x in inputs]
            group.run("all_reduce", inputs, outputs, dtype=dtype, op=op)
        results[partial_dtype] = outputs[0]
        want = expected(hosts, inputs, dtype, op, partial_dtype=partial_dtype)
        assert all(same_bits(x, want) for x in outputs)
    assert same_bits(results["float32"], results["input"]) == (op == "max")


@pytest.mark.parametrize("hosts", [["a", "b", "c"], ["a", "a", "a"]], ids="".join)
def test_without_partial_sums_both_settings_are_one(hosts: list[str]) -> None:
    inputs = [random_values(COUNT, "bfloat16", rank) for rank in range(3)]
    want = expected(hosts, inputs, "bfloat16")
    assert same_bits(all_reduced(hosts, inputs, dtype="bfloat16", partial_dtype="input"), want)
    assert same_bits(all_reduced(hosts, inputs, dtype="bfloat16", partial_dtype="float32"), want)
