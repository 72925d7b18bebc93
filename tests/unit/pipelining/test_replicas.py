"""Sums of gradients over replicas, in the format in which they are sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.pipelining.replicas import ReplicaSum


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_only_fp32_gradients_are_rounded_to_the_wire(
    group: dist.ProcessGroup, wire: torch.dtype | None
) -> None:
    parameters = [nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    gradients = [torch.rand_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    replicas = ReplicaSum(group, wire=wire)
    replicas.start(parameters)
    replicas.finish()
    assert parameters[0].grad is not None and parameters[1].grad is not None
    assert torch.equal(parameters[0].grad, gradients[0].to(wire or torch.float32).float())
    assert torch.equal(parameters[1].grad, gradients[1])
