"""Numbers of a stream depend on seed, step, micro-batch and operation, and on nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from shoal.pipelining.random_streams import draw, draws, named_arguments, own_stream, streams

RAND = torch.ops.aten.rand.default
DROPOUT = torch.ops.aten.dropout.default


def numbers(words: tuple[int, int, int], key: int) -> Tensor:
    with streams(*words):
        return draw(RAND, key, [64])


def test_every_word_and_the_key_matter() -> None:
    base = numbers((1, 2, 3), 4)
    assert torch.equal(numbers((1, 2, 3), 4), base)
    others = [numbers((2, 2, 3), 4), numbers((1, 3, 3), 4), numbers((1, 2, 4), 4), numbers((1, 2, 3), 5)]
    assert all((other != base).all() for other in others)


def test_order_and_what_others_draw_do_not_matter() -> None:
    with streams(1, 2, 3):
        second = draw(RAND, 5, [64])
        torch.rand(7)
        first = draw(RAND, 4, [64])
    assert torch.equal(first, numbers((1, 2, 3), 4)) and torch.equal(second, numbers((1, 2, 3), 5))


def test_generator_is_as_before_and_used_without_context() -> None:
    state = torch.get_rng_state()
    with streams(1, 2, 3), own_stream(9, torch.device("cpu")):
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
    attention = torch.ops.aten.scaled_dot_product_attention.default
    assert not draws(graph.call_function(attention, (x, x, x)))
    with_dropout = graph.call_function(attention, (x, x, x), {"dropout_p": 0.1})
    assert draws(with_dropout) and named_arguments(with_dropout)["is_causal"] is False
    assert not draws(graph.call_function(torch.ops.aten.relu.default, (x,)))
