"""Dropout by the keys of samples: its numbers, its statistics, and independence of the other samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.decide.rng import draw, dropout_keys
from shoal.dropout import (
    SampleDropout,
    attention,
    before_site,
    compile_blocks,
    dropout,
    fold_in,
    row_keys,
)


def sample_keys(count: int, *, epoch: int = 0, seed: int = 3) -> Tensor:
    return torch.from_numpy(dropout_keys(seed, epoch, np.arange(count)))


def test_keys_are_those_of_the_package_s_generator() -> None:
    keys = sample_keys(7)
    expected = draw(keys.numpy().view(np.uint64)[:, None], np.arange(5))
    assert np.array_equal(fold_in(keys[:, None], torch.arange(5)).numpy().view(np.uint64), expected)
    assert torch.equal(fold_in(keys, 1 << 40), fold_in(keys, torch.tensor(1 << 40)))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_elements_are_dropped_independently_and_with_their_probability(p: float) -> None:
    """Rates of all, of columns and of rows, and products of neighbours, are as chance has them."""
    width, num_rows = 64, 40_000
    keys = row_keys(sample_keys(400), (400, 100)).flatten()
    kept = dropout(torch.ones(num_rows, width, dtype=torch.float64), keys, p) > 0
    drawn = round(p * 65_536) / 65_536
    z = (kept.double() - (1 - drawn)) / (drawn * (1 - drawn)) ** 0.5
    assert abs(z.mean()) * z.numel() ** 0.5 < 4.5
    assert z.mean(0).abs().max() * num_rows**0.5 < 4.5
    assert 0.98 < z.mean(1).std() * width**0.5 < 1.02
    between_columns = (z.T @ z / num_rows).fill_diagonal_(0)
    assert between_columns.abs().max() * num_rows**0.5 < 5.5
    assert abs((z[1:] * z[:-1]).mean()) * z[1:].numel() ** 0.5 < 4.5


def test_kept_elements_are_scaled_and_gradients_go_through_them_alone() -> None:
    x = torch.randn(50, 37, dtype=torch.float64, requires_grad=True)
    out = dropout(x, sample_keys(50), 0.25)
    kept = out != 0
    torch.testing.assert_close(out, torch.where(kept, x / 0.75, 0.0))
    assert 0.6 < kept.double().mean() < 0.9
    out.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, kept.double() / 0.75)


def test_the_ends_of_the_range() -> None:
    x = torch.randn(20, 33)
    assert torch.equal(dropout(x, sample_keys(20), 1.0), torch.zeros(20, 33))
    assert dropout(x, sample_keys(20), 0.0) is x


@pytest.mark.parametrize("width", [1, 6, 8, 33])
def test_a_compiled_mask_has_the_bits_of_an_eager_one(width: int) -> None:
    keys = torch.cat([sample_keys(40), torch.tensor([0, -1, 1 << 62, -(1 << 63)])])
    compiled = torch.compile(torch.ops.shoal.keep_mask, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(keys, width, 6_554), torch.ops.shoal.keep_mask(keys, width, 6_554))


def test_types_stay() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = torch.ones(8, 12, dtype=dtype)
        assert dropout(x, sample_keys(8), 0.5).dtype == dtype
        assert torch.equal(dropout(x, sample_keys(8), 0.5) > 0, dropout(x.double(), sample_keys(8), 0.5) > 0)


def test_padding_moves_no_element() -> None:
    keys = sample_keys(3)
    small, large = torch.ones(3, 4, 10, 10), torch.ones(3, 4, 13, 15)
    found = dropout(large, row_keys(keys, large.shape[:-1]), 0.3)[:, :, :10, :10]
    assert torch.equal(found, dropout(small, row_keys(keys, small.shape[:-1]), 0.3))


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
def test_attention_is_torchs_where_nothing_is_dropped(mask: str) -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    options: dict[str, object] = {"is_causal": mask == "causal"}
    if mask == "bool":
        options["attn_mask"] = (torch.arange(6) < 4).expand(6, 6)
    if mask == "float":
        options["attn_mask"] = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, **options)  # type: ignore[arg-type]
    found = attention(q, k, v, row_keys(sample_keys(2), (2, 4, 6)), 0.0, scale=0.3, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)


class Block(nn.Module):
    """Dropout of all kinds that a model has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        p = 0.3 if self.training else 0.0
        context = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p)
        hidden = x + self.dropout(context.transpose(1, 2).flatten(2))
        flat = F.dropout(hidden.flatten(0, 1), 0.1, self.training)
        return F.dropout(self.linear(flat).view_as(x), 0.4, self.training, inplace=True)


def test_any_module_computes_each_sample_as_if_it_were_alone() -> None:
    torch.manual_seed(0)
    model, x, keys = Block().double(), torch.randn(6, 5, 8, dtype=torch.float64), sample_keys(6)
    with SampleDropout(keys):
        whole = model(x)
    parts = []
    for rows in ([0], [1, 2, 3], [4, 5]):
        with SampleDropout(keys[rows]):
            parts.append(model(x[rows]))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    with SampleDropout(sample_keys(6, epoch=1)):
        assert not torch.equal(model(x), whole)
    state = torch.get_rng_state()
    with SampleDropout(keys):
        model(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_calls_drop_different_elements() -> None:
    x = torch.ones(4, 64)
    with SampleDropout(sample_keys(4)):
        first, second = F.dropout(x), F.dropout(x)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


def test_evaluation_drops_nothing() -> None:
    model, x = Block().eval(), torch.randn(3, 5, 8)
    expected = model(x)
    with SampleDropout(sample_keys(3)):
        assert torch.equal(model(x), expected)


def test_a_checkpointed_part_drops_the_same_again() -> None:
    model, x = Block().double(), torch.randn(4, 5, 8, dtype=torch.float64)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        context = SampleDropout(sample_keys(4))
        with context:
            hidden = model(x)
            if checkpointing:
                out = torch.utils.checkpoint.checkpoint(
                    model, hidden, use_reentrant=False, context_fn=context.recomputation
                )
            else:
                out = model(hidden)
        out.square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


def test_tensors_without_samples_are_left_to_torch() -> None:
    x = torch.ones(4, 8)
    torch.manual_seed(1)
    expected = F.dropout(x)
    torch.manual_seed(1)
    with SampleDropout(sample_keys(3)):
        assert torch.equal(F.dropout(x), expected)


def test_an_exported_graph_has_a_node_for_keys_and_mask_which_compilers_replace() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor, keys: Tensor) -> Tensor:
            with SampleDropout(keys, site=5):
                return F.dropout(x, 0.25)

    x, keys = torch.randn(3, 7, 10), sample_keys(3)
    exported = torch.export.export(Dropping(), (x, keys), strict=False)
    assert torch.equal(exported.module()(x, keys), Dropping()(x, keys))
    made, traced = (
        [str(node.target) for node in graph.nodes if "shoal" in str(node.target)]
        for graph in (exported.graph, make_fx(Dropping())(x, keys).graph)
    )
    assert (made, traced) == (["shoal.row_keys.default", "shoal.keep_mask.default"], [])


def test_compiled_dropout_has_its_gradient() -> None:
    """Compiled by torch 2.11, a Function that returns what it changed in place has none, without a word."""
    from shoal.models.encoder import _Collect, _spread

    keys, index = torch.arange(5), torch.tensor([0, 2, 3, 5, 7])

    def drop_spread_collect(x: Tensor) -> Tensor:
        collected: Tensor = _Collect.apply(_spread(dropout(x * 3, keys, 0.5), index, 9), index[:4])
        return collected.sin()

    torch._dynamo.reset()
    grads = []
    for form in (drop_spread_collect, torch.compile(drop_spread_collect, backend="eager")):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        form(x).sum().backward()
        grads.append(x.grad)
    assert grads[0].count_nonzero() > 0 and torch.equal(*grads)


@pytest.mark.parametrize("site", [0, 1, 7 << 20, 1 << 40])
def test_keys_before_a_site_begin_there(site: int) -> None:
    keys = sample_keys(9)
    for offset in (0, 1, 1 << 20):
        assert torch.equal(fold_in(before_site(keys, site), offset), fold_in(keys, site + offset))


class Layers(nn.Module):
    """Two dropouts, and as many more as it is told."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        for _ in range(2 + self.more):
            x = F.dropout(x, 0.3) * factor
        return x


@pytest.mark.parametrize("stride", [1, 1 << 20])
def test_compiled_blocks_drop_what_eager_ones_drop_with_one_graph_for_each_kind(stride: int) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    eager, compiled = ([Layers(), Layers(), Layers(1), Layers(1), Layers()] for _ in range(2))
    compile_blocks(compiled, backend=backend, fullgraph=True)
    x = torch.randn(6, 5, 8)
    for step in range(4):
        results = []
        for blocks in (eager, compiled):
            with SampleDropout(sample_keys(6, epoch=step), site=3, stride=stride) as mode:
                y = F.dropout(x, 0.2)
                for block in blocks:
                    y = block(y, factor=1.5)
                results += [F.dropout(y, 0.2), torch.tensor(mode.site)]
        assert torch.equal(results[0], results[2]) and results[1] == results[3] == 3 + 14 * stride
        assert len(graphs) == 2
