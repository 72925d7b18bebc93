"""Finds the masks of texts, for models that fill them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from shoal.atomic_io import read_text
from shoal.data.text.sequences import TaskData
from shoal.data.text.special_tokens import Int32Array
from shoal.data.text.tokenizer_files import special_ids
from shoal.errors import UsageError


def read_lines(path: Path) -> list[str]:
    """Return the texts of a file whose name ends in ``.txt``, one a line.

    Raises:
        UsageError: the file has another name, cannot be read, or has no text.
    """
    if path.suffix != ".txt":
        raise UsageError(f"{path}: is known by the end of its name: .txt, with a text in each line")
    lines = [line.strip() for line in read_text(path).split("\n") if line.strip()]
    if not lines:
        raise UsageError(f"{path}: holds no text")
    return lines


@dataclass(frozen=True, kw_only=True)
class MaskedTexts(TaskData):
    """A sequence for each mask: the text that it stands in."""

    TARGETS = ("masked",)
    texts: tuple[str, ...]
    text_of: Int32Array
    """Index of each sequence's text."""
    masked: Int32Array
    """Position of its mask in the sequence."""


def make_masked_texts(texts: Sequence[str], tokenizer: Tokenizer, *, max_seq_length: int) -> MaskedTexts:
    """Tokenise texts, in which the names of special tokens stand for these.

    Args:
        max_seq_length: most tokens of a text, the special ones around it included.

    Raises:
        UsageError: a text has no mask, or too many tokens.
    """
    mask_id = special_ids(tokenizer, "the tokenizer", ("mask",))["mask"]
    tokens, types, text_of, masked = [], [], [], []
    for number, encoding in enumerate(tokenizer.encode_batch(list(texts))):
        ids = np.array(encoding.ids, dtype=np.int32)
        positions, shown = np.flatnonzero(ids == mask_id), texts[number][:60]
        if not len(positions):
            name = tokenizer.id_to_token(mask_id)
            raise UsageError(
                f"text {number + 1}, {shown!r}, has no mask: put {name} where a token is missing"
            )
        if len(ids) > max_seq_length:
            raise UsageError(
                f"text {number + 1}, {shown!r}, has {len(ids)} tokens, more than max_seq_length "
                f"{max_seq_length}: shorten it"
            )
        tokens += [ids] * len(positions)
        types += [np.array(encoding.type_ids, dtype=np.uint8)] * len(positions)
        text_of += [number] * len(positions)
        masked += positions.tolist()
    return MaskedTexts(
        tokens=np.concatenate(tokens),
        types=np.concatenate(types),
        bounds=np.cumsum([0, *map(len, tokens)], dtype=np.int64),
        texts=tuple(texts),
        text_of=np.array(text_of, dtype=np.int32),
        masked=np.array(masked, dtype=np.int32),
    )
