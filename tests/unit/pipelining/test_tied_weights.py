"""Messages in which gradients of tied weights travel; their sums are tested by ``test_pipeline_training``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.pipelining.tied_weights import messages


def test_messages_hold_all_rows_in_order_and_no_more_than_allowed() -> None:
    gradients = [
        torch.arange(30.0).view(10, 3),
        torch.arange(12.0).view(3, 4).T,  # not contiguous
        torch.tensor(7.0),
        torch.arange(40.0).view(2, 20),  # a row is larger than a message
        torch.arange(5.0),
    ]
    found = list(messages(gradients, 60))
    sizes = [sum(piece.nbytes for piece in message) for message in found]
    assert sizes == [60, 60, 48 + 4, 80, 80, 20]
    assert torch.equal(flat(piece for message in found for piece in message), flat(gradients))
    for message in found:
        for piece in message:
            piece.zero_()
    assert not flat(gradients).any(), "pieces are views"


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in tensors])
