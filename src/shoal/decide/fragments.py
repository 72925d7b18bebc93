"""Decides when each fragment of a model is exchanged by workers that take local steps.

Exchanges are numbered from 1. With K fragments and H local steps in a round, exchange n is of fragment
(n - 1) modulo K, and comes after local step n H / K, rounded down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FragmentSchedule:
    """Assigns each exchange its fragment and the local step after which workers take part in it.

    Attributes:
        every: local steps of a round, in which each fragment is exchanged once.
        fragments: of the model.

    Example:
        >>> schedule = FragmentSchedule(every=10, fragments=3)
        >>> [(schedule.fragment_of(n), schedule.end_of(n)) for n in range(1, 5)]
        [(0, 3), (1, 6), (2, 10), (0, 13)]
        >>> schedule.changed(after=1, until=7)
        [5, 6, 7]
        >>> schedule.left_at(2, step=6), schedule.left_at(2, step=7)
        ([0, 2], [0, 1, 2])
    """

    every: int
    fragments: int = 1

    def fragment_of(self, exchange: int) -> int:
        """Return the fragment of an exchange, from 0."""
        return (exchange - 1) % self.fragments

    def end_of(self, exchange: int) -> int:
        """Return the local step after which a worker takes part in an exchange; 0 for exchange 0."""
        rounds, more = divmod(exchange, self.fragments)
        return rounds * self.every + self.every * more // self.fragments

    def changed(self, after: int, until: int) -> list[int]:
        """Return the last exchange of each fragment among those after one and up to another."""
        return list(range(max(after, until - self.fragments) + 1, until + 1))

    def left_at(self, exchange: int, step: int) -> list[int]:
        """Return the fragments with local steps that no exchange up to this one has, after a local step."""
        sent = self.fragment_of(exchange) if exchange and step == self.end_of(exchange) else None
        return [number for number in range(self.fragments) if number != sent]


def weights_of(tokens: Sequence[int]) -> list[float]:
    """Return the weights of changes in their mean, in proportion to the tokens of each; alike if all are 0.

    Example:
        >>> weights_of([3, 1]), weights_of([0, 0])
        ([0.75, 0.25], [0.5, 0.5])
    """
    total = sum(tokens)
    return [each / total if total else 1.0 / len(tokens) for each in tokens]


class TokenCounts:
    """Counts the tokens that a worker has trained on since its last share of each fragment.

    Args:
        fragments: of the model.
    """

    def __init__(self, fragments: int) -> None:
        self._counted, self._before = 0, [0] * fragments

    def add(self, tokens: int) -> None:
        """Count the tokens of a local step."""
        self._counted += tokens

    def take(self, fragments: Iterable[int]) -> list[int]:
        """Return the tokens counted for the fragments, and reset their counters."""
        tokens = []
        for number in fragments:
            tokens.append(self._counted - self._before[number])
            self._before[number] = self._counted
        return tokens
