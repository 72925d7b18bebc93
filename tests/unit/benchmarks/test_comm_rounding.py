"""The error bound and the simulated ring of the bf16 rows, on sums that can be checked by hand."""

import pytest
import torch
from benchmarks.comm_rounding import NUM_RANKS, cancelling_inputs, errors_over_bound, ring_sum


def test_errors_are_measured_in_the_bound() -> None:
    inputs = [torch.tensor([1.0], dtype=torch.bfloat16) for _ in range(NUM_RANKS)]  # 64; an ulp is 0.5
    bound = 0.25 + NUM_RANKS * 2.0**-24 * NUM_RANKS
    assert errors_over_bound(torch.tensor([64.0]), inputs) == 0.0
    assert errors_over_bound(torch.tensor([64.25]), inputs) == pytest.approx(0.25 / bound)
    assert errors_over_bound(torch.tensor([63.0]), inputs) == pytest.approx(1.0 / bound)


def test_the_ring_rounds_at_every_hop() -> None:
    inputs = [torch.full((NUM_RANKS,), 256.0 if rank == 0 else 1.0).bfloat16() for rank in range(NUM_RANKS)]
    total = ring_sum(inputs)
    assert total[0] == 256.0  # begins on rank 0; 256 + 1 is rounded back to even, 63 times
    assert total[1] == 320.0  # begins with the ones: 63 + 256 is rounded once, to the even neighbour


def test_cancelling_inputs_cancel() -> None:
    values = torch.stack(cancelling_inputs(1, cancelling=True)).double()
    assert (values.sum(0).abs() < 0.05 * values.abs().sum(0)).all()
