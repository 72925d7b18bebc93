"""Micro-batches, their weights in the loss, and how values travel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.pipelining.loss import default_count, loss_of, micro_batches, weighted
from shoal.pipelining.stage_runner import carrier, decode, encode


def test_micro_batches_are_views_in_order_and_scalars_go_to_all() -> None:
    batch = {"x": torch.arange(12).view(6, 2), "y": torch.arange(6), "scale": torch.tensor(2.0)}
    parts = micro_batches(batch, 3)
    assert [part["y"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(part["scale"] is batch["scale"] for part in parts)
    assert parts[1]["x"].data_ptr() == batch["x"][2:].data_ptr()


@pytest.mark.parametrize(
    ("batch", "number", "said"),
    [
        ({"x": torch.zeros(6), "y": torch.zeros(5)}, 3, "input 'y' has 5 rows and 'x' has 6"),
        ({"x": torch.zeros(6)}, 4, "6 rows does not divide into 4 micro-batches"),
        ({"x": torch.zeros(0)}, 1, "0 rows does not divide"),
        ({"x": torch.tensor(1.0)}, 1, "no tensor with a dimension"),
    ],
)
def test_batches_that_do_not_divide_are_refused(batch: dict[str, Tensor], number: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        micro_batches(batch, number)


def test_targets_are_labels_that_count_else_rows() -> None:
    labels = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert int(default_count({"labels": labels})) == 3
    assert default_count({"labels": torch.zeros(4), "x": torch.zeros(4, 2)}) == 4
    assert default_count({"x": torch.zeros(5, 2)}) == 5


@pytest.mark.parametrize(
    "output",
    [torch.tensor(3.0), {"loss": torch.tensor([3.0])}, (torch.tensor(3.0), torch.zeros(2))],
)
def test_the_loss_is_found(output: object) -> None:
    loss = loss_of(output)
    assert loss.shape == () and float(loss) == 3.0


@pytest.mark.parametrize("output", [torch.zeros(2), {"logits": torch.zeros(2)}, (), torch.tensor(1)])
def test_a_model_without_a_loss_is_refused(output: object) -> None:
    with pytest.raises(UsageError, match="without a loss"):
        loss_of(output)


def test_a_micro_batch_without_targets_adds_nothing() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.full((2,), -100))
    assert loss.isnan()
    part = weighted((loss,), torch.tensor(0.0, dtype=torch.float64))
    part.backward()  # type: ignore[no-untyped-call]
    assert float(part.detach()) == 0.0 and logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([2**62 + 1, -1, -(2**63)]),
        torch.tensor([2**31 - 1, -7], dtype=torch.int32),
        torch.tensor([-(2**15), 12345], dtype=torch.int16),
        torch.tensor([255, 0, 17], dtype=torch.uint8),
        torch.tensor([-128, 127], dtype=torch.int8),
        torch.tensor([True, False]),
        torch.tensor(2**40 + 3),
        torch.randn(3, 4)[:, ::2],
        torch.randn(3).bfloat16(),
    ],
)
def test_every_value_arrives_as_it_was_sent(value: Tensor) -> None:
    sent = encode(value)
    assert sent.dtype == carrier(value.dtype) and (sent.is_floating_point() or sent.is_complex())
    arrived = decode(sent.clone().requires_grad_(), value.dtype)
    assert arrived.dtype == value.dtype and arrived.shape == value.shape
    assert torch.equal(arrived.detach(), value)
