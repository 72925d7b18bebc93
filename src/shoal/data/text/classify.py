"""Reads labelled texts and pairs (MNLI, any tab-separated, JSONL or Parquet file), tokenises and scores them.

MNLI's matched and mismatched sets are two files, read and scored one by one.
"""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shoal.atomic_io import read_text
from shoal.data.bad_entries import NO_LABEL, NO_TEXT, OTHER_WIDTH, BadEntries, BadEntry, wrong_byte
from shoal.data.text.rows import field_names, field_rows, json_rows, lines_of
from shoal.data.text.sequences import TaskData
from shoal.data.text.special_tokens import Int32Array, Int64Array, SequenceTemplate, encode_texts, plain
from shoal.errors import UsageError, did_you_mean
from shoal.formatting import table, without_unseen

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

_NO_LABEL = ("", "nan", "NaN")
"""Texts without a label, as spreadsheets and pandas write them."""
_NO_CELL = frozenset(
    {
        *("#N/A", "#N/A N/A", "#NA", "<NA>", "N/A", "NA", "NULL", "None", "n/a", "null"),
        *("-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    }
)
"""Cells of tables without a label: those that pandas, and datasets with it, read as missing by default."""
_TABLES = (".csv", ".tsv")
_SCORE = re.compile(r"-?\d*[.,]\d*[1-9]\d*|-?[\d.]+[eE][+-]?\d+|-?[\d.,]+ ?%")
"""Numbers with a fraction or an exponent, and shares."""
_AS_NUMBER = {"true": "1", "false": "0"}
_MOST_UNIQUE = 20
"""Rows of which each may have a label of its own."""
_DELIMITERS = ",;\t"
"""Characters that may end cells of ``.csv``: spreadsheets of many countries write semicolons."""
_MOST_CELL = 1 << 28
_MOST_SCORE = float(np.finfo(np.float32).max)
_FIRST_LINE = (
    " The first line must name the columns; cells of .tsv end in tabs, those of .csv in commas, semicolons "
    "or tabs."
)

SCORE = ("score",)
"""The labels of a model that computes a score."""

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
    """One text or pair, and the index of its label, or its score."""

    first: str
    second: str | None
    label: int
    score: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ClassifyData:
    """The examples of a file, in its order."""

    path: Path
    labels: tuple[str, ...]
    """The names of the model's outputs; one alone is the name of a score."""
    examples: tuple[Example, ...]
    bad: BadEntries | None = None
    """Counts of the rows that were left out."""
    numbers: tuple[int, ...] = ()
    """Of texts without labels: the number of each row in the file, from 1."""

    @property
    def has_scores(self) -> bool:
        """Return whether the examples have scores instead of labels."""
        return len(self.labels) == 1


def read_classify(
    path: Path,
    columns: Columns,
    *,
    labels: Sequence[str] | None,
    bad: BadEntries | None = None,
) -> ClassifyData:
    """Read a file: ``.tsv``, ``.csv`` (column names first), ``.jsonl``, ``.json`` or ``.parquet``.

    Quotes in a tab-separated file are ordinary characters, as in MNLI's. An example has no label if its cell
    is ``columns.unlabelled``, empty, null or NaN, or -1 beside numbers from 0, as in SNLI on the hub. In
    tables NA, None and the like are no labels either, unless they are listed in ``labels``.

    Args:
        labels: the set of labels, in the order of the model's outputs; ``None`` takes those of the file,
            sorted: for training data only, since an evaluation needs the labels of the training.
        bad: counts invalid rows; default: they are left out.

    Raises:
        UsageError: the file cannot be read, a column is not there, too many rows are invalid, a label is not
            in the set (with its line), labels are scores (:func:`read_scores`), or there is no example.
    """
    bad = bad or BadEntries(path)
    rows = list(read_rows(path, columns, bad))
    present = {row[3] for row in rows} - {columns.unlabelled}
    unlabelled = {columns.unlabelled, *_missing_number(present, labels), *_missing_words(path, labels)}
    labelled = []
    for row in rows:
        if row[3] in unlabelled:
            bad.add(BadEntry(NO_LABEL, repr(row[3])), row[0])
        else:
            labelled.append(row)
    bad.check(len(labelled))
    if not labelled:
        raise UsageError(f"{path}: holds no example with a label")
    if labels is None:
        labels = sorted({label for *_, label in labelled})
        _refuse_no_classes(path, labels, len(labelled))
        _refuse_likes(path, labels)
    index = {label: k for k, label in enumerate(labels)}
    if len(index) != len(labels) or len(index) < 2:
        raise UsageError(f"{path}: the labels {', '.join(labels)} must be two or more different ones")
    wrong = [(location, label) for location, _, _, label in labelled if label not in index]
    if wrong:
        location, label = wrong[0]
        more = f" ({len(wrong)} lines have such labels)" if len(wrong) > 1 else ""
        raise UsageError(
            f"{path}, {location}: the label {label!r} is not one of {', '.join(labels)}{more}."
            f"{did_you_mean(label, labels)}"
        )
    examples = tuple(Example(first, second, index[label]) for _, first, second, label in labelled)
    return ClassifyData(path=path, labels=tuple(labels), examples=examples, bad=bad)


def _missing_number(present: Collection[str], labels: Collection[str] | None) -> Collection[str]:
    """Return -1 if it is no class but marks examples without one: beside numbers from 0 only."""
    missing = {"-1", "-1.0"}
    others = set(present) - missing if labels is None else set(labels)
    return missing if others and all(re.fullmatch(r"\d+(\.0)?", label) for label in others) else []


def _missing_words(path: Path, labels: Collection[str] | None) -> Collection[str]:
    """Return the words that mark rows of a table without a label, but for those that are listed as labels."""
    return _NO_CELL - set(labels or ()) if path.suffix.lower() in _TABLES else []


def _refuse_no_classes(path: Path, labels: Sequence[str], num_rows: int) -> None:
    """Raise if the labels of a file are likely no classes.

    That is, numbers with fractions, as STS-B's scores are (2.5, or 2,5), lists of labels, or as many
    different ones as there are rows, as in a column of ids.
    """
    scores = [label for label in labels if _SCORE.fullmatch(label)]
    if scores:
        raise UsageError(
            f"{path}: labels such as {scores[0]} are scores, which `shoal finetune classify --data.scores` "
            "learns as numbers; if they are classes, list them with --labels"
        )
    lists = [label for label in labels if re.fullmatch(r"\s*\[.*\]\s*", label, re.DOTALL)]
    if lists:
        raise UsageError(
            f"{path}: labels such as {lists[0]:.60} are lists, but a row has one label: write a row for "
            "each, or if they are classes, list them with --labels"
        )
    if len(labels) == num_rows > _MOST_UNIQUE:
        raise UsageError(
            f"{path}: each of the {num_rows:,} rows has a label of its own, such as {labels[0]:.60}; name "
            "the column of the classes (--data.label), or list them with --labels"
        )


def _refuse_likes(path: Path, labels: Sequence[str]) -> None:
    """Raise if two labels of a file are likely one class, written in two ways."""

    def plain_form(label: str) -> str | Decimal:
        text = unicodedata.normalize("NFKC", without_unseen(label)).casefold()
        text = _AS_NUMBER.get(text, text)
        return Decimal(text) if re.fullmatch(r"[+-]?[0-9]+(\.[0-9]*)?", text) else text

    first_of = {plain_form(label): label for label in reversed(labels)}
    for label in labels:
        if (other := first_of[plain_form(label)]) != label:
            raise UsageError(
                f"{path}: the labels {other!a} and {label!a} differ in blanks, in capitals, or in the form "
                "of a letter, a number or true and false; correct them, or if they are two classes, list "
                "them with --labels"
            )


def read_scores(
    path: Path, columns: Columns, *, labels: Sequence[str] = SCORE, bad: BadEntries | None = None
) -> ClassifyData:
    """Read a file as :func:`read_classify` does, whose labels are numbers to learn, such as STS-B's.

    Args:
        labels: the one name of the model's output.
        bad: counts invalid rows; default: they are left out.

    Raises:
        UsageError: the file cannot be read, a column is not there, too many rows are invalid, or there is no
            example with a score.
    """
    bad = bad or BadEntries(path)
    examples: list[Example] = []
    missing = _missing_words(path, None)
    for location, first, second, label in read_rows(path, columns, bad):
        score = _number(label)
        if label == columns.unlabelled or label in missing:
            bad.add(BadEntry(NO_LABEL, repr(label)), location)
        elif score is None:
            bad.add(BadEntry("a row whose score is no number", repr(label)), location)
        else:
            examples.append(Example(first, second, 0, score))
    bad.check(len(examples))
    if not examples:
        raise UsageError(f"{path}: holds no example with a score")
    if len(examples) > 1 and len({example.score for example in examples}) == 1:
        raise UsageError(
            f"{path}: each of the {len(examples):,} scores is {examples[0].score:g}, which marks texts "
            "without one in many sets; name the column of the scores (--data.label), or another file"
        )
    return ClassifyData(path=path, labels=tuple(labels), examples=tuple(examples), bad=bad)


def _number(text: str) -> float | None:
    """Return the number of 32 bits that a text is, ``None`` if it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) <= _MOST_SCORE else None


def read_texts(
    path: Path, columns: Columns, *, labels: Sequence[str], bad: BadEntries | None = None
) -> ClassifyData:
    """Read the texts of a file as :func:`read_classify` does, without labels: all examples get the first.

    Args:
        columns: ``label`` and ``unlabelled`` are not read.
        labels: those of the model.
        bad: counts invalid rows; default: they are left out.

    Raises:
        UsageError: the file cannot be read, a column is not there, too many rows are invalid, or there is no
            text.
    """
    bad = bad or BadEntries(path)
    examples: list[Example] = []
    numbers: list[int] = []
    for _, first, second, _ in read_rows(path, replace(columns, label=()), bad):
        examples.append(Example(first, second, 0))
        numbers.append(len(examples) + bad.total)  # rows come one by one
    bad.check(len(examples))
    if not examples:
        raise UsageError(f"{path}: holds no text")
    return ClassifyData(
        path=path, labels=tuple(labels), examples=tuple(examples), bad=bad, numbers=tuple(numbers)
    )


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


@dataclass(frozen=True, kw_only=True)
class Correlations:
    """Agreement of predicted scores with those of the data, from -1 to 1: GLUE's measures of STS-B.

    They are 0 where all predictions, or all scores of the data, are equal.
    """

    pearson: float
    spearman: float


def correlate(gold: Sequence[float], predicted: Sequence[float]) -> Correlations:
    """Return the correlations of two lists of scores; equal scores share the mean of their ranks."""
    pairs = (np.asarray(gold, dtype=np.float64), np.asarray(predicted, dtype=np.float64))
    return Correlations(pearson=_pearson(*pairs), spearman=_pearson(*map(_ranks, pairs)))


def _pearson(first: Float64Array, second: Float64Array) -> float:
    first, second = first - first.mean(), second - second.mean()
    norm = math.sqrt(first @ first) * math.sqrt(second @ second)
    return float(first @ second / norm) if norm else 0.0


def _ranks(values: Float64Array) -> Float64Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Float64Array = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def read_rows(path: Path, columns: Columns, bad: BadEntries) -> Iterator[tuple[str, str, str | None, str]]:
    """Yield location (for messages), texts and label of each valid row; the label is empty if none is wanted.

    A label may be a text, a whole number, true or false. It is ``columns.unlabelled`` for null.

    Raises:
        UsageError: the file cannot be read, a column is not there, or has no text in any row, or ``bad``
            refuses a row.
    """
    blank: list[str] = []
    num_rows = 0
    for location, names, entry in _entries(path, columns, bad):
        cells = [entry[name] for name in names]
        texts, label = (cells[:-1], _label_of(cells[-1], columns)) if columns.label else (cells, "")
        if label is None:
            bad.add(
                BadEntry("a row whose label is neither a text nor a whole number", f"{cells[-1]!r:.60}"),
                location,
            )
        elif not all(isinstance(text, str) for text in texts):
            value = next(text for text in texts if not isinstance(text, str))
            is_null = value is None or value != value  # pandas writes NaN for what is missing
            kind = NO_TEXT if is_null else "a row whose text is no string"
            bad.add(BadEntry(kind, "" if is_null else f"{value!r:.60}"), location)
        else:
            num_rows += 1
            if blank or num_rows == 1:
                cells = [name for name, text in zip(names, texts, strict=False) if not text.strip()]
                blank = cells if num_rows == 1 else [name for name in blank if name in cells]
            yield location, texts[0], texts[1] if len(texts) > 1 else None, label
    if num_rows > 1 and blank:
        raise UsageError(
            f"{path}: the column {blank[0]!r} is empty in each of the {num_rows:,} rows; name another "
            "column, or of single texts no second one"
        )


def _label_of(value: Any, columns: Columns) -> str | None:
    """Return a cell as a label, ``None`` if it is none."""
    if value is None or value != value or (isinstance(value, str) and value.strip() in _NO_LABEL):
        return columns.unlabelled
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value == int(value) else str(value)
    return str(value) if isinstance(value, str | int) else None


def _entries(
    path: Path, columns: Columns, bad: BadEntries
) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yield location, names of the wanted columns and cells of each row that is not empty."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        names = _chosen(str(path), columns, field_names(path, str(path)))
        for number, entry in enumerate(field_rows(path, names, str(path)), start=1):
            yield f"row {number}", names, entry
    elif suffix in (".jsonl", ".json"):
        yield from _json_rows(path, columns, bad)
    elif suffix in _TABLES:
        yield from _table_rows(path, columns, bad)
    elif path.is_dir():
        raise UsageError(
            f"{path}: is a folder; name a file in it. A set that datasets has saved is written as one by "
            "datasets.load_from_disk(...).to_parquet(FILE)"
        )
    else:
        raise UsageError(
            f"{path}: is known by the end of its name: .tsv (tab-separated) or .csv, column names first, "
            ".jsonl (an object a line), .json (an array of objects) or .parquet; unpack compressed files"
        )


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows with the numbers of their last lines.

    Cells end at what a line ``sep=;`` before all others names, for Excel, or at what the first has most of.

    Raises:
        UsageError: it is not CSV, or a quote is not closed, which would make one cell of all lines behind it.
    """
    text = read_text(path, keep_wrong=True)
    named = re.match(r"\s*sep=(.)\r?\n", text)
    delimiter = named[1] if named else max(_DELIMITERS, key=text.lstrip().splitlines()[0].count)
    csv.field_size_limit(_MOST_CELL)
    lines = io.StringIO(text, newline="")
    lines.seek(named.end() if named else 0)
    reader = csv.reader(lines, delimiter=delimiter)
    first = last = 0
    try:
        for row in reader:
            first, last = last + 1, reader.line_num + bool(named)
            if row:
                yield last, row
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: is not CSV: {error}") from None
    if last > first and text.count('"') % 2:
        raise UsageError(
            f"{path}: a quote in line {first} is not closed; double it inside a cell, or close it"
        )


def _json_rows(
    path: Path, columns: Columns, bad: BadEntries
) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    names: list[str] = []
    for _, location, entry in json_rows(path, bad):
        if not names:
            _refuse_columns(f"{path}, {location}", entry, columns)
        try:
            names = _chosen(f"{path}, {location}", columns, entry)
        except UsageError:
            if not names:  # the first line tells whether the columns are those of the file
                raise
            missing = [name for name in names if name not in entry]
            bad.add(BadEntry("a line without a column that others have", ", ".join(missing)), location)
        else:
            yield location, names, entry


def _refuse_columns(source: str, entry: dict[str, Any], columns: Columns) -> None:
    """Raise if an object is no row but holds all of them: columns, as of pandas, or a list under a key."""
    holders = [name for name, value in entry.items() if isinstance(value, dict | list)]
    lists = [entry[name] for name in holders if isinstance(entry[name], list)]
    has_rows = columns.first not in entry and any(rows and isinstance(rows[0], dict) for rows in lists)
    if entry and (has_rows or len(holders) == len(entry)):
        raise UsageError(
            f"{source}: the object has all rows in {', '.join(map(repr, holders[:5]))}; write an object "
            'on each line, as DataFrame.to_json(..., orient="records", lines=True), or one array of objects'
        )


def _table_rows(
    path: Path, columns: Columns, bad: BadEntries
) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yield the rows of a table. Quotes enclose cells in ``.csv``, and are plain characters in ``.tsv``."""
    if path.suffix.lower() == ".csv":
        numbered = _csv_rows(path)
    else:
        numbered = ((number, line.split("\t")) for number, line in lines_of(read_text(path, keep_wrong=True)))
    header = next(numbered, (1, [""]))[1]
    if any("\r" in cell for cell in header):
        raise UsageError(f"{path}: its lines end in CR alone; convert them, as by `tr '\\r' '\\n'`")
    if wrong := wrong_byte(header):
        raise UsageError(f"{path}, line 1: a name of a column is {wrong.args[0]}: {wrong.args[1]}")
    names = _chosen(f"{path}, line 1", columns, header, remedy=_FIRST_LINE)
    num_quoted = num_rows = 0
    for number, parts in numbered:
        num_rows += 1
        num_quoted += any(map(_is_quoted, parts))
        if parts == header:  # files that were put together
            bad.add(BadEntry("a line that repeats the names of the columns", ""), f"line {number}")
            continue
        if len(parts) != len(header):
            bad.add(BadEntry(OTHER_WIDTH, f"{len(parts)} for {len(header)}"), f"line {number}")
            continue
        row = dict(zip(header, parts, strict=True))
        if wrong := wrong_byte(row[name] for name in names):
            bad.add(wrong, f"line {number}")
        else:
            yield f"line {number}", names, row
    if OTHER_WIDTH in bad.counts and 2 * num_quoted > num_rows:
        raise UsageError(
            f"{path}: cells are in quotes, which are ordinary characters in .tsv, and some have line ends in "
            'them; write it as .csv, or as .jsonl: DataFrame.to_json(..., orient="records", lines=True)'
        )


def _is_quoted(cell: str) -> bool:
    """Return whether a cell is in quotes, or a part of one that is."""
    return cell.count('"') % 2 == 1 or (len(cell) > 1 and cell[0] == cell[-1] == '"')


def _chosen(source: str, columns: Columns, present: Collection[str], *, remedy: str = "") -> list[str]:
    """Return the column names of the texts and of the label, if any, after checking that they exist."""
    present = list(present)
    label = next((name for name in columns.label if name in present), next(iter(columns.label), None))
    names = [name for name in (columns.first, columns.second, label) if name is not None]
    for name in names:
        if name not in present:
            raise UsageError(
                f"{source}: there is no column {name!r}, only {', '.join(map(repr, present))}; name one that "
                f"is there.{did_you_mean(name, present)}{remedy}"
            )
        if present.count(name) > 1:
            raise UsageError(f"{source}: there are several columns {name!r}; rename all but one")
    return names


@dataclass(frozen=True, kw_only=True)
class PairFeatures(TaskData):
    """Sequences of ``data.examples``."""

    TARGETS = ("labels",)
    data: ClassifyData
    labels: Int32Array | Float32Array
    """Index of each sequence's label in ``data.labels``, or its score."""
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
        labels=(
            np.array([example.score for example in data.examples], dtype=np.float32)
            if data.has_scores
            else np.array([example.label for example in data.examples], dtype=np.int32)
        ),
        num_cut=int((np.sum(lengths, axis=0) > room).sum()),
    )


def cut_longer(first: Int64Array, second: Int64Array, room: int) -> tuple[Int64Array, Int64Array]:
    """Return how many tokens of each text stay if the longer one, of equal ones the second, loses its last
    until both fit: the rule of Google's BERT (``_truncate_seq_pair``)."""
    kept_first = np.minimum(first, np.maximum(room - second, (room + 1) // 2))
    return kept_first, np.minimum(second, room - kept_first)
