"""Numbers of a stream depend on seed, step, samples and operation, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from shoal.pipelining.random_streams import draw, draws, named_arguments, own_stream, streams

RAND = torch.ops.aten.rand.default
DROPOUT = torch.ops.aten.dropout.default
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def numbers(words: tuple[int, int, int], key: int) -> Tensor:
    seed, step, first = words
    with streams(seed, step, range(first, first + 2)):
        return draw(RAND, key, [64])


def test_every_word_and_the_key_matter() -> None:
    base = numbers((1, 2, 3), 4)
    assert torch.equal(numbers((1, 2, 3), 4), base)
    others = [numbers((2, 2, 3), 4), numbers((1, 3, 3), 4), numbers((1, 2, 4), 4), numbers((1, 2, 3), 5)]
    assert all((other != base).all() for other in others)


def test_order_and_what_others_draw_do_not_matter() -> None:
    with streams(1, 2, range(3, 5)):
        second = draw(RAND, 5, [64])
        torch.rand(7)
        first = draw(RAND, 4, [64])
    assert torch.equal(first, numbers((1, 2, 3), 4)) and torch.equal(second, numbers((1, 2, 3), 5))


@pytest.mark.parametrize("operation", [DROPOUT, ATTENTION])
def test_dropout_does_not_depend_on_micro_batches(operation: torch._ops.OpOverload) -> None:
    x = torch.randn(6, 2, 5, 8, dtype=torch.float64)
    args = (0.4, True) if operation is DROPOUT else (x, x, None, 0.4)

    def computed(samples: range) -> Tensor:
        own = [arg[samples] if isinstance(arg, Tensor) else arg for arg in args]
        with streams(1, 2, samples):
            return draw(operation, 4, x[samples], *own)

    whole, parts = computed(range(6)), [computed(range(i, i + 2)) for i in (0, 2, 4)]
    assert not torch.equal(whole, x)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


def test_generator_is_as_before_and_used_without_context() -> None:
    state = torch.get_rng_state()
    with streams(1, 2, range(3, 5)), own_stream(9, torch.device("cpu")):
        torch.rand(5)
    assert torch.equal(torch.get_rng_state(), state)
    expected = torch.rand(6)
    torch.set_rng_state(state)
    assert torch.equal(draw(RAND, 4, [6]), expected)


def test_dropout_draws_only_when_it_drops() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for p, train, expected in ((0.5, True, True), (0.5, False, False), (0.0, True, False)):
        assert draws(graph.call_function(DROPOUT, (x, p, train))) is expected
    assert not draws(graph.call_function(ATTENTION, (x, x, x)))
    with_dropout = graph.call_function(ATTENTION, (x, x, x), {"dropout_p": 0.1})
    assert draws(with_dropout) and named_arguments(with_dropout)["is_causal"] is False
    assert not draws(graph.call_function(torch.ops.aten.relu.default, (x,)))
