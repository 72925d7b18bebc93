"""Makes text-to-text examples for T5: a text as input, the words of the label or another text as target.

"mnli hypothesis: … premise: …" becomes "entailment", "translate English to German: …" its translation (Raffel
et al. 2020, section 2.4 and appendix D). Inputs and targets end with the end token; long ones are truncated
at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shoal.data.bad_entries import BadEntries
from shoal.data.text.classify import ClassifyData, Columns, Example, read_rows
from shoal.data.text.sequences import Sequences
from shoal.data.text.special_tokens import Int32Array, Int64Array, encode_texts, plain, ranges
from shoal.errors import UsageError

TEMPLATES: Mapping[str, str] = {
    "mnli": "mnli hypothesis: {second} premise: {first}",
    "qnli": "qnli question: {first} sentence: {second}",
    "qqp": "qqp question1: {first} question2: {second}",
}
"""T5's templates of GLUE tasks; all others name their texts sentence1 and sentence2, or sentence."""

IGNORED = -100
"""The label of positions without a target."""


@dataclass(frozen=True, kw_only=True)
class TextToText(Sequences):
    """Inputs, and their targets."""

    data: ClassifyData
    words: tuple[Int32Array, ...]
    """The tokens of each of ``data.labels``, the end token included; without labels there are only inputs."""
    pad_id: int
    num_cut: int
    """Inputs that were truncated."""
    num_targets_cut: int = 0
    """Targets that were truncated."""
    width: int = 0
    """Columns to which inputs are padded, for models of fixed shapes; 0: those of the longest in a batch."""
    target_width: int = 0
    """The same of targets."""

    @property
    def longest_word(self) -> int:
        """Tokens of the longest target; 0 without targets."""
        return max(map(len, self.words), default=0)

    def batch(self, indices: Int64Array) -> dict[str, npt.NDArray[Any]]:
        """Return the sequences ``indices`` padded to their longest, or to ``width`` and ``target_width``.

        - ``input_ids``, ``attention_mask`` int64 ``[B, S]``: the mask is 0 in the padding;
        - ``labels`` int64 ``[B, T]``: -100 behind the end token.
        """
        own = [self.data.examples[index].label for index in indices] if self.words else []
        return self.batch_with(indices, own)

    def batch_with(self, indices: Int64Array, labels: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Return :meth:`batch` with other labels, given by their numbers."""
        lengths = self.lengths[indices]
        there = np.arange(self.width or int(lengths.max())) < lengths[:, None]
        ids = np.full(there.shape, self.pad_id, dtype=np.int64)
        ids[there] = self.tokens[ranges(self.bounds[indices], lengths)]
        words = [self.words[label] for label in labels]
        columns = self.target_width or max(map(len, words), default=0)
        targets = np.full((len(indices), columns), IGNORED, dtype=np.int64)
        for row, word in enumerate(words):
            targets[row, : len(word)] = word
        return {"input_ids": ids, "attention_mask": there.astype(np.int64), "labels": targets}

    def label_of(self, written: npt.NDArray[np.integer[Any]]) -> int:
        """Return the index of the label that the tokens spell up to the end token; ``len(words)`` for
        none."""
        matches = (k for k, word in enumerate(self.words) if np.array_equal(written[: len(word)], word))
        return next(matches, len(self.words))


def read_text_pairs(path: Path, *, source: str, target: str, bad: BadEntries | None = None) -> ClassifyData:
    """Read sources and targets: each example has a label of its own, which is its target.

    Args:
        path: its name ends in ``.tsv``, ``.csv`` (column names first), ``.jsonl`` or ``.parquet``.
        source: the column (or key) of inputs.
        target: that of targets.
        bad: counts invalid rows; default: they are left out.

    Raises:
        UsageError: the file cannot be read, a column is not there, too many rows are invalid, or there is
            none.
    """
    bad = bad or BadEntries(path)
    rows = list(read_rows(path, Columns(first=source, second=target, label=()), bad))
    bad.check(len(rows))
    if not rows:
        raise UsageError(f"{path}: holds no example")
    return ClassifyData(
        path=path,
        labels=tuple(text or "" for _, _, text, _ in rows),
        examples=tuple(Example(text, None, number) for number, (_, text, _, _) in enumerate(rows)),
        bad=bad,
    )


def make_text_to_text(
    data: ClassifyData,
    tokenizer: Tokenizer,
    *,
    template: str,
    max_seq_length: int,
    end_id: int,
    pad_id: int,
    max_target_length: int | None = None,
) -> TextToText:
    """Fill the template with all examples and tokenise them; special tokens in a text are plain characters.

    Args:
        template: the input, with ``{first}`` and ``{second}`` in place of the texts.
        max_seq_length: most tokens of an input, the end token included.
        max_target_length: most tokens of a target, the end token included. Default: targets are labels,
            which stay whole, and each of which has other tokens.

    Raises:
        UsageError: two labels are the same to the tokenizer, or no room is left for a text.
    """
    lengths_of = {"max_seq_length": max_seq_length, "max_target_length": max_target_length}
    for name, most in lengths_of.items():
        if most is not None and most < 2:
            raise UsageError(f"{name} {most} has no room for a text and its end; raise it")
    with plain(tokenizer):
        texts = [worded(template, example) for example in data.examples]
        inputs = encode_texts(tokenizer, texts, with_offsets=False)[:2]
        targets = encode_texts(tokenizer, data.labels, with_offsets=False)[:2]
    tokens, bounds, num_cut = _ended(*inputs, most=max_seq_length, end_id=end_id)
    ids, at, num_targets_cut = _ended(*targets, most=max_target_length, end_id=end_id)
    words = tuple(np.split(ids, at[1:-1])) if data.labels else ()
    if max_target_length is None and len({tuple(word.tolist()) for word in words}) != len(words):
        raise UsageError(
            f"{data.path}: the tokenizer gives two of the labels {', '.join(data.labels)} the same tokens; "
            "rename one"
        )
    return TextToText(
        data=data,
        tokens=tokens,
        bounds=bounds,
        words=words,
        pad_id=pad_id,
        num_cut=num_cut,
        num_targets_cut=num_targets_cut,
    )


def _ended(
    ids: Int32Array, begins: Int64Array, *, most: int | None, end_id: int
) -> tuple[Int32Array, Int64Array, int]:
    """Return the tokens and bounds of texts with an end token each, and how many were cut to ``most``."""
    lengths = np.diff(begins)
    kept = lengths if most is None else np.minimum(lengths, most - 1)
    bounds = np.concatenate([[0], np.cumsum(kept + 1)])
    tokens = np.full(bounds[-1], end_id, dtype=np.int32)
    if len(kept):
        tokens[ranges(bounds[:-1], kept)] = ids[ranges(begins[:-1], kept)]
    return tokens, bounds, int((lengths > kept).sum())


def template_of(task: str, *, has_pairs: bool) -> str:
    """Return T5's template of a task."""
    texts = "sentence1: {first} sentence2: {second}" if has_pairs else "sentence: {first}"
    return TEMPLATES.get(task, f"{task} {texts}")


def worded(template: str, example: Example) -> str:
    """Return the input text of an example."""
    before, _, behind = template.partition("{first}")
    second = example.second or ""
    return before.replace("{second}", second) + example.first + behind.replace("{second}", second)
