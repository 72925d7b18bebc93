"""Reads and writes ``manifest.json``, the description of a prepared directory.

The manifest is written last, so a directory with a manifest is complete. It has a format, a version, and the
counts, sizes and SHA-256 of every shard; a shard that was truncated or replaced is reported by name.

A manifest of text (:class:`Manifest`) also has what a reader needs to use the shards without loading the
tokenizer: vocabulary size, the ids of special tokens, and for each token id whether it continues the word
before it (whole-word masking). ``images.manifest`` has that of images.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import mmap
import os
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
_COMMANDS = {
    "text": "shoal prepare text SOURCE...",
    "images": "shoal prepare images SOURCE",
    "coco": "shoal prepare coco --images FOLDER --annotations FILE",
}

Shard = TypeVar("Shard")


def prepare_command(kind: str, directory: Path | str) -> str:
    """Return the command that prepares "text", "images" or "coco" into ``directory``, for error messages."""
    return f"`{_COMMANDS[kind]} --out {directory}`"


def check_version(found: object, version: int, where: str, kind: str) -> None:
    """Check the format version that the file ``where`` of a prepared directory has.

    Raises:
        ShoalError: an older or a newer version of shoal wrote it; names the command that prepares it again.
    """
    if found == version and type(found) is int:
        return
    is_newer = isinstance(found, int) and found > version
    command = prepare_command(kind, where.rpartition("/")[0] or ".").removesuffix("`")
    raise ShoalError(
        f"{where} has format version {found}; this shoal reads version {version} only: "
        f"{'update shoal, or ' if is_newer else ''}run {command} --overwrite`"
    )


def write_manifest(directory: Path, value: Mapping[str, Any], *, format: str, version: int) -> None:
    """Write ``manifest.json`` atomically. It must be the last file to be written.

    Raises:
        ShoalError: the disk is full or the folder cannot be written.
    """
    text = json.dumps({"format": format, "version": version, **value}, indent=1, ensure_ascii=False)
    write_atomically(directory / MANIFEST, f"{text}\n".encode())


def read_manifest(directory: Path, *, format: str, version: int) -> dict[str, Any]:
    """Return the fields of a manifest of format ``shoal-KIND`` ("shoal-text", "shoal-images").

    Raises:
        UsageError: the directory has none.
        ShoalError: it is damaged, of another kind of data, or of another format version.
    """
    kind, path = format.removeprefix("shoal-"), directory / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{directory} has no {MANIFEST}, so it holds no prepared {kind}, or its preparation did not "
            f"finish; run {prepare_command(kind, directory)}"
        ) from None
    return parse_manifest(data, str(path), format=format, version=version)


def parse_manifest(data: bytes, where: str, *, format: str, version: int) -> dict[str, Any]:
    """Return the fields of a manifest that was read from ``where``.

    Raises:
        ShoalError: it is damaged, of another kind of data, or of another format version.
    """
    kind = format.removeprefix("shoal-")
    value = parse_json(data, where, remedy=f"prepare the {kind} again")
    if not isinstance(value, dict) or value.get("format") != format:
        raise ShoalError(f"{where}: its format is not {format!r}; is this the folder of other data?")
    check_version(value.get("version"), version, where, kind)
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
    """Check that a name from a manifest is that of a file in the manifest's own folder.

    A manifest may come from elsewhere, and its names are joined to folders for reading and writing.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ValueError(
            f"the file name {name!r} must be of letters, digits, '_', '-' and '.', and not begin with '.'"
        )


def check_shard(name: object, counts: Sequence[object], files: object, suffixes: Sequence[str]) -> None:
    """Check the fields that every kind of shard has in a manifest.

    Raises:
        ValueError: the name, a count, or the size or SHA-256 of a file is not valid.
    """
    check_file_name(name)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(f"the counts of the shard {name!r} must be whole numbers of at least 0")
    if not isinstance(files, dict) or set(files) != set(suffixes):
        raise ValueError(f"the shard {name!r} must have the files {', '.join(suffixes)}")
    for suffix, facts in files.items():
        num_bytes, digest = (facts.get("bytes"), facts.get("sha256")) if isinstance(facts, dict) else (-1, "")
        if not isinstance(num_bytes, int) or num_bytes < 0 or not _SHA256.fullmatch(str(digest)):
            raise ValueError(f"{name}.{suffix} must have a number of bytes and a SHA-256 of 64 digits")


def map_file(path: Path, facts: Mapping[str, Any], kind: str) -> mmap.mmap | bytes:
    """Map a file of a shard for reading; return ``b""`` if it is empty.

    Args:
        facts: its entry in the manifest, with its size in ``bytes``.
        kind: what to prepare again if it is damaged ("text", "images"), for messages.

    Raises:
        ShoalError: it is missing, cannot be read or has another size.
    """
    expected, remedy = int(facts["bytes"]), f"copy it again or prepare the {kind} again"
    try:
        with path.open("rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != expected:
                what = "was cut short" if actual < expected else "is too long"
                raise ShoalError(
                    f"{path} {what}: it has {actual:,} bytes, the manifest says {expected:,}; {remedy}"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if actual else b""
    except FileNotFoundError:
        raise ShoalError(f"{path} is missing, though the manifest names it; {remedy}") from None
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """Counts of one shard of text, and the size and SHA-256 of each of its files.

    ``files`` maps the suffix ("tokens", "index") to ``{"bytes": int, "sha256": str}``; the file of a suffix
    is ``NAME.SUFFIX``.
    """

    name: str
    num_documents: int
    num_sentences: int
    num_tokens: int
    files: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        counts = (self.num_documents, self.num_sentences, self.num_tokens)
        check_shard(self.name, counts, self.files, ("tokens", "index"))


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
    """The manifest of a directory of token shards.

    ``continues_word`` has one byte per token id: 1 if the token continues the word of the token before it
    ("##ing" of WordPiece; a sentencepiece piece without "▁" that is not punctuation), else 0. ``source``
    describes the text. ``splits`` maps "train" and "validation" to their shards, in the order in which
    documents are numbered.
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
        flags = np.packbits(np.frombuffer(self.continues_word, dtype=np.uint8), bitorder="little")
        packed = base64.b64encode(flags.tobytes()).decode()
        value = {**dataclasses.asdict(self), "continues_word": packed}
        write_manifest(directory, value, format=FORMAT, version=VERSION)

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read ``manifest.json``.

        Raises:
            UsageError: the directory has none.
            ShoalError: it is damaged, of other data, or of another format version.
        """
        value = read_manifest(directory, format=FORMAT, version=VERSION)
        try:
            vocab_size = int(value["vocab_size"])
            packed = np.frombuffer(base64.b64decode(value["continues_word"]), dtype=np.uint8)
            flags = np.unpackbits(packed, bitorder="little")
            if len(flags) - vocab_size in range(8):  # the bits are padded to whole bytes
                flags = flags[:vocab_size]
            value["continues_word"] = flags.tobytes()
            value["tokenizer"] = TokenizerInfo(**value["tokenizer"])
            value["splits"] = {
                split: tuple(ShardInfo(**shard) for shard in shards)
                for split, shards in value["splits"].items()
            }
            return cls(**value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ShoalError(
                f"{directory / MANIFEST}: a field is missing or wrong ({error}); prepare the text again"
            ) from None

    def check_tokenizer(self, path: Path) -> None:
        """Check that ``path`` is the tokenizer that made the shards.

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

    def check_vocabulary(self, model_vocab_size: int, *, sentinels: int = 0) -> None:
        """Check that a model has an embedding for each token id, and for the sentinels behind them.

        Raises:
            UsageError: the model's vocabulary is smaller.
        """
        needed = self.vocab_size + sentinels
        if model_vocab_size < needed:
            also = f" and {sentinels} sentinels" if sentinels else ""
            raise UsageError(
                f"the shards have a vocabulary of {self.vocab_size} tokens{also}, the model one of "
                f"{model_vocab_size}; set model.vocab_size to at least {needed}"
            )
