"""Counts of a step on the meta device, against numbers by hand."""

from __future__ import annotations

import torch
from torch import nn

from shoal.models.profile import profile_step


def test_layers_of_two_products() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
        inputs = torch.empty(32, 8)
    profile = profile_step(model, lambda: model(inputs).sum(), num_samples=32)
    assert profile.layers == (("0", 8 * 16, 2 * 32 * 8 * 16), ("2", 16 * 4, 2 * 32 * 16 * 4))
    assert profile.num_samples == 32


def test_a_shared_parameter_counts_for_its_first_user() -> None:
    with torch.device("meta"):
        first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        second.weight = first.weight
        model, inputs = nn.Sequential(first, second), torch.empty(2, 8)
    profile = profile_step(model, lambda: model(inputs).sum(), num_samples=2)
    assert profile.layers == (("0", 64, 2 * 2 * 64), ("1", 0, 2 * 2 * 64))
