"""Tests the division of a model into fragments of whole layers."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from torch import nn

from shoal.errors import UsageError
from shoal.optim.sgd import SGD
from shoal.train.servers.local import fragments_of
from shoal.train.servers.tensors import tables_of


def test_fragments_are_of_whole_layers_in_the_models_order_and_as_even_as_can_be() -> None:
    """All divisions of 8 layers are tried; the optimizer's groups have the tensors in another order."""
    draw = random.Random(0)
    sizes = [draw.randrange(1, 40) for _ in range(8)]
    model = nn.Sequential(*(nn.Linear(size, 1) for size in sizes))
    weights, biases = [layer.weight for layer in model], [layer.bias for layer in model]
    tables = tables_of(SGD([{"params": biases}, {"params": weights}], lr=1.0))
    for count in range(1, 9):
        cuts = [(0, *chosen, 8) for chosen in combinations(range(1, 8), count - 1)]
        wanted = min(cuts, key=lambda cut: sum(sum(s + 1 for s in sizes[a:b]) ** 2 for a, b in pairwise(cut)))
        found = fragments_of(model, tables, count)
        layers = [{index % 8 for index in fragment} for fragment in found]
        assert layers == [set(range(a, b)) for a, b in pairwise(wanted)]
        assert sorted(index for fragment in found for index in fragment) == list(range(16))
    with pytest.raises(UsageError, match="the model has 8; take at most 8 fragments"):
        fragments_of(model, tables, 9)
