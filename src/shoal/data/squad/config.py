"""Configures windows and answers. Standard library only, so that ``--help`` is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shoal.errors import UsageError, require_positive

_LENGTH = 384


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """Windows of paragraphs.

    Raises:
        UsageError: no room is left for the paragraph, or windows would not advance.
    """

    max_seq_length: int | None = None
    """Most tokens of a window, special ones included; default: 384, or the positions of the model if they are
    fewer."""
    doc_stride: int = 128
    """Tokens from the start of a window to that of the next, as in Google's BERT."""
    overlap: int | None = None
    """Instead of ``doc_stride``: tokens that two windows share. It is what transformers' ``run_qa`` calls
    ``doc_stride``."""
    max_question_length: int = 64
    """Most tokens of a question; a longer one is truncated at the end."""

    def __post_init__(self) -> None:
        require_positive("", self, "max_seq_length", "doc_stride", "max_question_length")
        require_positive("", self, "overlap", least=0)

    @property
    def length(self) -> int:
        """Most tokens of a window."""
        return _LENGTH if self.max_seq_length is None else self.max_seq_length

    def fitted(self, positions: int | None) -> WindowConfig:
        """Return windows of a length, by default for a model of so many positions, if that is known."""
        length = self.max_seq_length or min(_LENGTH, positions or _LENGTH)
        return replace(self, max_seq_length=length)


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """Choice of answers.

    Raises:
        UsageError: a value is out of its range.
    """

    n_best: int = 20
    """Starts and ends considered per window, and answers listed per question."""
    max_answer_length: int = 30
    """Most tokens of an answer."""
    null_threshold: float = 0.0
    """SQuAD 2.0: no answer if its score exceeds that of the best answer by more than this."""

    def __post_init__(self) -> None:
        require_positive("", self, "n_best", "max_answer_length")
        if math.isnan(self.null_threshold):
            raise UsageError("null_threshold must be a number")
