"""Reads labelled texts and pairs (MNLI, any tab-separated, JSONL or Parquet file), tokenises and scores them.

MNLI's matched and mismatched sets are two files, read and scored one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from shoal.atomic_io import read_text
from shoal.data.text.rows import field_names, field_rows
from shoal.data.text.sequences import TaskData
from shoal.data.text.special_tokens import Int32Array, Int64Array, SequenceTemplate, encode_texts, plain
from shoal.errors import UsageError, did_you_mean
from shoal.formatting import table
from shoal.json_text import parse_json

MNLI_LABELS = ("entailment", "neutral", "contradiction")
"""In the order of GLUE."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of the columns (or keys) of a file; the defaults are those of MNLI."""

    first: str = "sentence1"
    second: str | None = "sentence2"
    """The other text of a pair; ``None`` for single texts."""
    label: tuple[str, ...] = ("gold_label", "label")
    """The first of these names that the file has is used; empty: the file has no labels."""
    unlabelled: str = "-"
    """The label of examples without a consensus; they are skipped, as MNLI's authors ask."""


@dataclass(frozen=True, slots=True)
class Example:
    """One text or pair, and the index of its label."""

    first: str
    second: str | None
    label: int


@dataclass(frozen=True, kw_only=True)
class ClassifyData:
    """The examples of a file, in its order."""

    path: Path
    labels: tuple[str, ...]
    examples: tuple[Example, ...]
    num_unlabelled: int
    """Examples that were skipped because they have no label."""


def read_classify(path: Path, columns: Columns, *, labels: Sequence[str] | None) -> ClassifyData:
    """Read a file whose name ends in ``.tsv`` (with a line of column names), ``.jsonl`` or ``.parquet``.

    Quotes in a tab-separated file are ordinary characters, as in MNLI's.

    Args:
        labels: the set of labels, in the order of the model's outputs; ``None`` takes those of the file,
        sorted:
            for training data only, since an evaluation needs the labels of the training.

    Raises:
        UsageError: the file cannot be read, a column is not there, a line is damaged, a label is not in the
            set (with its line), or there is no example.
    """
    found = list(read_rows(path, columns))
    labelled = [row for row in found if row[3] != columns.unlabelled]
    if not labelled:
        raise UsageError(f"{path}: holds no example with a label")
    if labels is None:
        labels = sorted({label for *_, label in labelled})
    index = {label: k for k, label in enumerate(labels)}
    if len(index) != len(labels) or len(index) < 2:
        raise UsageError(f"{path}: the labels {', '.join(labels)} must be two or more different ones")
    wrong = [(where, label) for where, _, _, label in labelled if label not in index]
    if wrong:
        where, label = wrong[0]
        more = f" ({len(wrong)} lines have such labels)" if len(wrong) > 1 else ""
        raise UsageError(
            f"{where}: the label {label!r} is not one of {', '.join(labels)}{more}."
            f"{did_you_mean(label, labels)}"
        )
    return ClassifyData(
        path=path,
        labels=tuple(labels),
        examples=tuple(Example(first, second, index[label]) for _, first, second, label in labelled),
        num_unlabelled=len(found) - len(labelled),
    )


def read_texts(path: Path, columns: Columns, *, labels: Sequence[str]) -> ClassifyData:
    """Read the texts of a file as :func:`read_classify` does, without labels: all examples get the first.

    Args:
        columns: ``label`` and ``unlabelled`` are not read.
        labels: those of the model.

    Raises:
        UsageError: the file cannot be read, a column is not there, a line is damaged, or there is no text.
    """
    examples = tuple(
        Example(first, second, 0) for _, first, second, _ in read_rows(path, replace(columns, label=()))
    )
    if not examples:
        raise UsageError(f"{path}: holds no text")
    return ClassifyData(path=path, labels=tuple(labels), examples=examples, num_unlabelled=0)


@dataclass(frozen=True, kw_only=True)
class ClassifyScores:
    """Counts of predictions per label."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """``counts[label][predicted]``."""

    @property
    def accuracy(self) -> float:
        """Return the percentage of right predictions."""
        return 100.0 * sum(row[k] for k, row in enumerate(self.counts)) / sum(map(sum, self.counts))

    def table(self) -> str:
        """Return the confusion table as text: one row per label, one column per prediction."""
        recalls = [f"{100 * row[k] / sum(row):.1f}" if sum(row) else "-" for k, row in enumerate(self.counts)]
        lines = [["", *self.labels, "recall %"]]
        for label, row, recall in zip(self.labels, self.counts, recalls, strict=True):
            lines.append([label, *map(str, row), recall])
        return table(lines)


def score_classify(labels: Sequence[str], gold: Iterable[int], predicted: Iterable[int]) -> ClassifyScores:
    """Compare predictions with the labels of the data, both as indices into ``labels``."""
    pairs = Counter(zip(gold, predicted, strict=True))
    indices = range(len(labels))
    return ClassifyScores(
        labels=tuple(labels), counts=tuple(tuple(pairs[g, p] for p in indices) for g in indices)
    )


def read_rows(path: Path, columns: Columns) -> Iterator[tuple[str, str, str | None, str]]:
    """Yield place (for messages), texts and label of each row; the label is empty if none is asked for.

    Raises:
        UsageError: the file cannot be read, a column is not there, or a row is damaged.
    """
    for where, names, entry in _entries(path, columns):
        cells = [entry[name] for name in names]
        texts, label = (cells[:-1], cells[-1]) if columns.label else (cells, "")
        is_label = isinstance(label, str | int) and not isinstance(label, bool)
        if not is_label or not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{where}: texts must be strings, labels strings or whole numbers")
        yield where, texts[0], texts[1] if len(texts) > 1 else None, str(label)


def _entries(path: Path, columns: Columns) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yield place, names of the wanted columns and cells of each row that is not empty.

    Only \\n and \\r\\n end a line.
    """
    if path.suffix == ".parquet":
        names = _chosen(str(path), columns, field_names(path, str(path)))
        for number, entry in enumerate(field_rows(path, names, str(path)), start=1):
            yield f"{path}, row {number}", names, entry
        return
    if path.suffix not in (".tsv", ".jsonl"):
        raise UsageError(
            f"{path}: is known by the end of its name: .tsv (tab-separated, column names first), .jsonl or "
            ".parquet"
        )
    numbered = enumerate(read_text(path).split("\n"), start=1)
    lines = ((number, line.removesuffix("\r")) for number, line in numbered if line.strip("\r"))
    header: list[str] = []
    if path.suffix == ".tsv":
        header = next(lines)[1].split("\t")
        names = _chosen(f"{path}, line 1", columns, header)
    for number, line in lines:
        where = f"{path}, line {number}"
        if header:
            parts = line.split("\t")
            if len(parts) != len(header):
                raise UsageError(f"{where}: has {len(parts)} columns, but the first line names {len(header)}")
            entry = dict(zip(header, parts, strict=True))
        else:
            entry = parse_json(line, where, error=UsageError)
            if not isinstance(entry, dict):
                raise UsageError(f"{where}: must be a JSON object with a key for each column")
            names = _chosen(where, columns, entry)
        yield where, names, entry


def _chosen(where: str, columns: Columns, present: Collection[str]) -> list[str]:
    """Return the column names of the texts and of the label, if any, after checking that they exist."""
    label = next((name for name in columns.label if name in present), next(iter(columns.label), None))
    names = [name for name in (columns.first, columns.second, label) if name is not None]
    for name in names:
        if name not in present:
            raise UsageError(
                f"{where}: there is no column {name!r}, only {', '.join(map(repr, present))}."
                f"{did_you_mean(name, present)}"
            )
    return names


@dataclass(frozen=True, kw_only=True)
class PairFeatures(TaskData):
    """Sequences of ``data.examples``."""

    TARGETS = ("labels",)
    data: ClassifyData
    labels: Int32Array
    """Index of each sequence's label in ``data.labels``."""
    num_cut: int
    """Sequences that were truncated."""


def make_pairs(data: ClassifyData, tokenizer: Tokenizer, *, max_seq_length: int) -> PairFeatures:
    """Tokenise all examples and truncate long ones, at the end of the longer text first.

    Args:
        tokenizer: its padding and truncation are ignored. Names of special tokens in a text are ordinary
            characters.
        max_seq_length: most tokens of a sequence, special ones included.

    Raises:
        UsageError: the tokenizer puts no special tokens around texts, or no room is left for these.
    """
    columns = [[example.first for example in data.examples]]
    if data.examples[0].second is not None:
        columns.append([example.second or "" for example in data.examples])
    template = SequenceTemplate(tokenizer, num_texts=len(columns))
    room = max_seq_length - template.num_special
    if room < len(columns):
        raise UsageError(
            f"max_seq_length {max_seq_length} has no room beside {template.num_special} special tokens; "
            "raise it"
        )
    with plain(tokenizer):
        encoded = [encode_texts(tokenizer, texts, with_offsets=False)[:2] for texts in columns]
    lengths = [np.diff(bounds) for _, bounds in encoded]
    kept = cut_longer(lengths[0], lengths[1] if len(columns) > 1 else np.zeros_like(lengths[0]), room)
    tokens, types, bounds, _ = template.fill(
        *((ids, bounds[:-1], count) for (ids, bounds), count in zip(encoded, kept, strict=False))
    )
    return PairFeatures(
        data=data,
        tokens=tokens,
        types=types,
        bounds=bounds,
        labels=np.array([example.label for example in data.examples], dtype=np.int32),
        num_cut=int((np.sum(lengths, axis=0) > room).sum()),
    )


def cut_longer(first: Int64Array, second: Int64Array, room: int) -> tuple[Int64Array, Int64Array]:
    """Return how many tokens of each text stay if the longer one, of equal ones the second, loses its last
    until both fit: the rule of Google's BERT (``_truncate_seq_pair``)."""
    kept_first = np.minimum(first, np.maximum(room - second, (room + 1) // 2))
    return kept_first, np.minimum(second, room - kept_first)
