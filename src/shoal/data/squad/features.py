"""Cuts questions and paragraphs into windows that fit a model, with the answer as token positions.

A paragraph is tokenised once, not once per question, and everything after the tokenizer is arithmetic on
whole arrays. Windows are concatenated without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from shoal.data.squad.config import WindowConfig
from shoal.data.squad.dataset import SquadData, stands_at
from shoal.data.text.sequences import TaskData
from shoal.data.text.special_tokens import (
    Int32Array,
    Int64Array,
    SequenceTemplate,
    encodable,
    encode_texts,
    plain,
    ranges,
)
from shoal.errors import UsageError

_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])  # the last one is for all beyond


@dataclass(frozen=True, kw_only=True)
class SquadFeatures(TaskData):
    """Windows ``[num_windows]``, one question's after the other's, and the paragraphs' tokens.

    Tokens of window ``w`` are ``bounds[w]`` to ``bounds[w + 1]`` of ``tokens`` and ``types``; of these the
    paragraph's begin at ``context_begin[w]`` and are ``context_length[w]``.
    """

    TARGETS = ("start", "end")
    data: SquadData
    question: Int32Array
    """Index of the window's question in ``data.questions``."""
    context_begin: Int32Array
    """Position in the window of its first token of the paragraph."""
    context_length: Int32Array
    context_first: Int32Array
    """Index of that token in the paragraph."""
    start: Int32Array
    """Position in the window of the answer's first token; 0 (CLS) if the answer is not entirely inside."""
    end: Int32Array
    """Position of its last token."""
    paragraph_bounds: Int64Array
    """Offsets of the paragraphs' tokens in ``offsets``: ``[num_paragraphs + 1]``."""
    offsets: Int32Array
    """First and last character + 1 of each token of each paragraph, without blanks: ``[tokens, 2]``."""


def make_features(data: SquadData, tokenizer: Tokenizer, config: WindowConfig) -> SquadFeatures:
    """Cut every question's paragraph into windows.

    The first of several answers gives the positions. An answer that is not at ``answer_start``, or consists
    of blanks, is in no window.

    Args:
        tokenizer: with a post-processor for pairs; its padding and truncation are ignored. Names of special
            tokens in a text are ordinary characters.

    Raises:
        UsageError: the tokenizer puts no special tokens around pairs, or paragraphs have no room.
    """
    template = SequenceTemplate(tokenizer, num_texts=2)
    with plain(tokenizer):
        questions = [q.text.strip() for q in data.questions]
        question_ids, question_bounds, _ = encode_texts(tokenizer, questions, with_offsets=False)
        context_ids, context_bounds, offsets = encode_texts(tokenizer, data.paragraphs, with_offsets=True)
    characters = _Characters(data.paragraphs)
    offsets = characters.without_blanks(offsets, context_bounds)
    # windows of each question: how much of the paragraph fits, and how far the next one is
    question_lengths = np.minimum(np.diff(question_bounds), config.max_question_length)
    room = config.length - template.num_special - question_lengths
    step = np.minimum(room, config.doc_stride) if config.overlap is None else room - config.overlap
    if step.min() < 1:
        shared = "" if config.overlap is None else f", {config.overlap} tokens of overlap"
        raise UsageError(
            f"max_seq_length {config.length} has no room for the paragraph beside "
            f"{template.num_special} special tokens, a question of {question_lengths.max()}{shared} and one "
            "new token; raise it or lower the others"
        )
    paragraph = np.array([q.paragraph for q in data.questions], dtype=np.int64)
    lengths = np.diff(context_bounds)[paragraph]
    num_windows = 1 + np.maximum(0, -(-(lengths - room) // step))

    question = np.repeat(np.arange(len(data.questions)), num_windows)
    number = ranges(np.zeros_like(num_windows), num_windows)
    first = number * step[question]
    count = np.minimum(room[question], lengths[question] - first)
    tokens, types, bounds, (_, begin) = template.fill(
        (question_ids, question_bounds[question], question_lengths[question]),
        (context_ids, context_bounds[paragraph[question]] + first, count),
    )
    answer_first, answer_last = _answer_tokens(data, characters, offsets, context_bounds)
    answer_first, answer_last = answer_first[question], answer_last[question]
    inside = (answer_first >= first) & (answer_last < first + count)
    return SquadFeatures(
        data=data,
        tokens=tokens,
        types=types,
        bounds=bounds,
        question=question.astype(np.int32),
        context_begin=begin.astype(np.int32),
        context_length=count.astype(np.int32),
        context_first=first.astype(np.int32),
        start=np.where(inside, begin + answer_first - first, 0).astype(np.int32),
        end=np.where(inside, begin + answer_last - first, 0).astype(np.int32),
        paragraph_bounds=context_bounds,
        offsets=offsets,
    )


class _Characters:
    """All paragraphs as one array of characters, with the offset of each and the positions of blanks."""

    def __init__(self, paragraphs: Sequence[str]) -> None:
        lengths = np.array([len(text) for text in paragraphs], dtype=np.int64)
        self.bounds = np.concatenate([[0], np.cumsum(lengths)])
        codes = np.frombuffer("".join(map(encodable, paragraphs)).encode("utf-32-le"), dtype=np.uint32)
        blank = np.append(_SPACE[np.minimum(codes, len(_SPACE) - 1)], False)
        # for each character: the first at or after it that is not blank, and the end of the last before it
        here = np.arange(len(blank))
        self._next = np.minimum.accumulate(np.where(blank, len(blank), here)[::-1])[::-1]
        self._last_end = np.maximum.accumulate(np.where(np.append(True, blank[:-1]), 0, here))

    def without_blanks(self, offsets: Int32Array, bounds: Int64Array) -> Int32Array:
        """Return the offsets of tokens without blanks at both ends; a token of blanks is empty.

        Sentencepiece's tokens include the blank before a word.
        """
        base = np.repeat(self.bounds[:-1], np.diff(bounds))
        begin, end = offsets[:, 0] + base, offsets[:, 1] + base
        new_begin = np.minimum(self._next[begin], end)
        new_end = np.maximum(self._last_end[end], new_begin)
        return np.stack([new_begin - base, new_end - base], axis=1).astype(np.int32)


def _answer_tokens(
    data: SquadData, characters: _Characters, offsets: Int32Array, bounds: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return the first and the last token of the paragraph that each question's answer touches.

    The first is -1 without an answer, or if the tokenizer dropped all characters of the answer.
    """
    begins, ends = (np.full(len(data.questions), -1, dtype=np.int64) for _ in range(2))
    for k, question in enumerate(data.questions):
        if question.answers and not question.is_impossible:
            text, start = question.answers[0].text, question.answers[0].start
            if text.strip() and stands_at(data.paragraphs[question.paragraph], text, start):
                begins[k] = start + len(text) - len(text.lstrip())
                ends[k] = start + len(text.rstrip())
    paragraph = np.array([q.paragraph for q in data.questions], dtype=np.int64)
    base = characters.bounds[paragraph]
    token_base = np.repeat(characters.bounds[:-1], np.diff(bounds))
    first = np.searchsorted(offsets[:, 1] + token_base, begins + base, side="right") - bounds[paragraph]
    last = np.searchsorted(offsets[:, 0] + token_base, ends + base, side="left") - 1 - bounds[paragraph]
    return np.where((begins < 0) | (last < first), -1, first), last
