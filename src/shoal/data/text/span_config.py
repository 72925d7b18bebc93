"""Configures span corruption. Standard library only, so that ``--help`` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shoal.errors import UsageError, require_positive

MAX_SENTINELS = 100
"""Number of sentinels in T5's vocabulary."""


@dataclass(frozen=True, kw_only=True)
class SpanConfig:
    """Length and noise of examples. The seed also decides their order (``loader``).

    Raises:
        UsageError: a value out of its range, or more spans than there are sentinels.
    """

    input_length: int = 512
    """Most tokens of an input, sentinels and end token included."""
    noise_density: float = 0.15
    mean_span_length: float = 3.0
    seed: int = 42

    def __post_init__(self) -> None:
        require_positive("", self, "input_length", least=4)
        if not 0 < self.noise_density < 1:
            raise UsageError(f"noise_density {self.noise_density} must lie between 0 and 1")
        if not self.mean_span_length >= 1:
            raise UsageError(f"mean_span_length {self.mean_span_length} must be at least 1")
        if self.num_spans > MAX_SENTINELS:
            raise UsageError(
                f"input_length {self.input_length} makes {self.num_spans} spans of {self.mean_span_length} "
                f"tokens on average, more than there are sentinels ({MAX_SENTINELS}): shorten the input or "
                "lengthen the spans"
            )

    @cached_property
    def num_tokens(self) -> int:
        """Number of text tokens per example: as many as fit into the input."""
        count = 2
        while self._input_length(count + 1) <= self.input_length:
            count += 1
        return count

    @property
    def num_noise(self) -> int:
        """Number of those tokens that are noise."""
        return self._num_noise(self.num_tokens)

    @property
    def num_spans(self) -> int:
        """Number of spans of noise."""
        return self._num_spans(self.num_tokens)

    @property
    def target_length(self) -> int:
        """Tokens of a target."""
        return self.num_noise + self.num_spans + 1

    def _num_noise(self, num_tokens: int) -> int:
        return min(max(round(num_tokens * self.noise_density), 1), num_tokens - 1)

    def _num_spans(self, num_tokens: int) -> int:
        num_noise = self._num_noise(num_tokens)
        return min(max(round(num_noise / self.mean_span_length), 1), num_tokens - num_noise)

    def _input_length(self, num_tokens: int) -> int:
        return num_tokens - self._num_noise(num_tokens) + self._num_spans(num_tokens) + 1


def sentinel_id(vocab_size: int, number: int) -> int:
    """Return the id of sentinel ``number``: after a vocabulary of ``vocab_size`` tokens, in descending order.

    The text's own vocabulary has no sentinels, so that the same shards serve all recipes; a model's
    embedding has ``MAX_SENTINELS`` more rows. That is T5's layout, too: ``<extra_id_0>`` is 32,099 after
    32,000 tokens.
    """
    return vocab_size + MAX_SENTINELS - 1 - number
