"""What a prepared directory says about itself: ``manifest.json``.

It is written last, so a directory with a manifest is complete. It holds what a reader must know to use the
shards without loading the tokenizer: vocabulary size, the ids of the special tokens, and for each token id
whether it continues the word before it (whole-word masking). Counts, sizes and checksums of every shard
are here too, so a shard that was cut short or swapped is noticed by name.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shoal.data.atomic_io import sha256_of, write_atomically
from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.json_text import parse_json

MANIFEST = "manifest.json"
FORMAT = "shoal-text"
VERSION = 1

_FILE_NAME = re.compile(r"[\w-][\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Shard = TypeVar("Shard")


def read_manifest(path: Path, *, format: str, version: int) -> dict[str, Any]:
    """Return the JSON object of a manifest whose format is ``shoal-KIND`` ("shoal-text", "shoal-images").

    Raises:
        UsageError: the directory has none.
        ShoalError: it is damaged, of other data, or a newer version wrote it.
    """
    kind = format.removeprefix("shoal-")
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{path.parent} has no {path.name}, so it holds no prepared {kind}, or its preparation did not "
            f"finish; run `shoal prepare {kind} SOURCE... --out {path.parent}`"
        ) from None
    return parse_manifest(data, str(path), format=format, version=version)


def parse_manifest(data: bytes, where: str, *, format: str, version: int) -> dict[str, Any]:
    """Return the JSON object of a manifest that was read from ``where``.

    Raises:
        ShoalError: it is damaged, of other data, or a newer version wrote it.
    """
    kind = format.removeprefix("shoal-")
    value = parse_json(data, where, remedy=f"prepare the {kind} again")
    if not isinstance(value, dict) or value.get("format") != format:
        raise ShoalError(f"{where}: its format is not {format!r}; is this the folder of other data?")
    found = value.get("version")
    if not isinstance(found, int) or found > version:
        raise ShoalError(
            f"{where} has version {found}; this shoal reads version {version}: "
            f"update shoal, or prepare the {kind} again"
        )
    return {key: field for key, field in value.items() if key not in ("format", "version")}


def shards_of(splits: Mapping[str, tuple[Shard, ...]], split: str) -> tuple[Shard, ...]:
    """Return the shards of a split.

    Raises:
        UsageError: there is no such split.
    """
    if split not in splits:
        raise UsageError(
            f"there is no split {split!r}; this data has {', '.join(sorted(splits)) or 'none'}."
            + did_you_mean(split, splits)
        )
    return splits[split]


def check_file_name(name: object) -> None:
    """Check that a name which stands in a manifest is that of a file in the manifest's own folder.

    Others may have written the manifest, and names are joined to folders for reading and writing.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ValueError(
            f"the file name {name!r} must be of letters, digits, '_', '-' and '.', and not begin with '.'"
        )


def check_shard(name: object, counts: Sequence[object], files: object, suffixes: Sequence[str]) -> None:
    """Check the fields that all kinds of shards have in a manifest.

    Raises:
        ValueError: one cannot be: the name, a count, or size or SHA-256 of a file.
    """
    check_file_name(name)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(f"the counts of the shard {name!r} must be whole numbers of at least 0")
    if not isinstance(files, dict) or set(files) != set(suffixes):
        raise ValueError(f"the shard {name!r} must have the files {', '.join(suffixes)}")
    for suffix, facts in files.items():
        is_right = (
            isinstance(facts, dict)
            and isinstance(facts.get("bytes"), int)
            and facts["bytes"] >= 0
            and isinstance(facts.get("sha256"), str)
            and _SHA256.fullmatch(facts["sha256"])
        )
        if not is_right:
            raise ValueError(f"{name}.{suffix} must have a number of bytes and a SHA-256 of 64 digits")


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """Counts of one shard, and size and SHA-256 of each of its files.

    ``files`` maps the suffix ("tokens", "index") to ``{"bytes": int, "sha256": str}``; the file of a
    suffix is ``NAME.SUFFIX``.
    """

    name: str
    num_documents: int
    num_sentences: int
    num_tokens: int
    files: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        counts = (self.num_documents, self.num_sentences, self.num_tokens)
        check_shard(self.name, counts, self.files, ("tokens", "index"))

    def to_json(self) -> dict[str, Any]:
        """Return this as plain JSON values; ``ShardInfo(**value)`` is the way back."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer's file in the directory, its SHA-256, and its kind ("unigram", "wordpiece", …)."""

    file: str
    sha256: str
    kind: str

    def __post_init__(self) -> None:
        check_file_name(self.file)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``.

    ``continues_word`` has one byte for each token id: 1 where the token continues the word of the token
    before it ("##ing" of WordPiece; a sentencepiece piece without "▁" that is not punctuation), else 0.
    ``source`` says in words what the text is. ``splits`` maps "train" and "validation" to their shards,
    in the order in which documents are numbered.
    """

    vocab_size: int
    cls_id: int
    sep_id: int
    mask_id: int
    pad_id: int
    unk_id: int
    continues_word: bytes = field(repr=False)
    tokenizer: TokenizerInfo
    source: str
    splits: dict[str, tuple[ShardInfo, ...]]

    def __post_init__(self) -> None:
        if len(self.continues_word) != self.vocab_size:
            raise ValueError(
                f"continues_word has {len(self.continues_word)} flags "
                f"for a vocabulary of {self.vocab_size}; there must be one for each token id"
            )
        for name in ("cls_id", "sep_id", "mask_id", "pad_id", "unk_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not a token id of a vocabulary of {self.vocab_size}"
                )

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids that are never masked, never predicted and never drawn as a random replacement."""
        return (self.cls_id, self.sep_id, self.mask_id, self.pad_id, self.unk_id)

    def shards(self, split: str) -> tuple[ShardInfo, ...]:
        """Return the shards of a split.

        Raises:
            UsageError: there is no such split.
        """
        return shards_of(self.splits, split)

    def save(self, directory: Path) -> None:
        """Write ``manifest.json``, atomically and last of all files.

        Raises:
            ShoalError: the disk is full or the folder cannot be written.
        """
        value = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        flags = np.frombuffer(self.continues_word, dtype=np.uint8)
        value["continues_word"] = base64.b64encode(np.packbits(flags, bitorder="little").tobytes()).decode()
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        write_atomically(directory / MANIFEST, text.encode())

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read ``manifest.json``.

        Raises:
            UsageError: the directory has none.
            ShoalError: it is damaged, or a newer version wrote it.
        """
        path = directory / MANIFEST
        value = read_manifest(path, format=FORMAT, version=VERSION)
        try:
            vocab_size = int(value["vocab_size"])
            packed = np.frombuffer(base64.b64decode(value["continues_word"]), dtype=np.uint8)
            flags = np.unpackbits(packed, bitorder="little")
            if len(flags) - vocab_size in range(8):  # what rounds the bits up to bytes
                flags = flags[:vocab_size]
            splits = {
                split: tuple(ShardInfo(**shard) for shard in shards)
                for split, shards in value["splits"].items()
            }
            tokenizer = TokenizerInfo(**value["tokenizer"])
            made = {"continues_word": flags.tobytes(), "splits": splits, "tokenizer": tokenizer}
            return cls(**{**value, **made})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ShoalError(
                f"{path}: a field is missing or wrong ({error}); prepare the text again"
            ) from None

    def check_tokenizer(self, path: Path) -> None:
        """Check that the tokenizer in ``path`` is the one that made the shards.

        Raises:
            ShoalError: the file is missing.
            UsageError: it is another tokenizer.
        """
        try:
            found = sha256_of(path)
        except OSError as error:
            raise ShoalError(
                f"{path}: the tokenizer of the shards cannot be read: {error.strerror}"
            ) from error
        if found != self.tokenizer.sha256:
            raise UsageError(
                f"{path}: this tokenizer (SHA-256 {found[:12]}…) is not the one that made the shards "
                f"({self.tokenizer.sha256[:12]}…), so token ids would mean other words; "
                "use the tokenizer beside the shards, or prepare the text with this one"
            )

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Check that a model has a row for each token id.

        Raises:
            UsageError: the model's vocabulary is smaller than that of the shards.
        """
        if model_vocab_size < self.vocab_size:
            raise UsageError(
                f"the shards have a vocabulary of {self.vocab_size} tokens, the model one of "
                f"{model_vocab_size}; set the model's vocabulary to at least {self.vocab_size}"
            )
