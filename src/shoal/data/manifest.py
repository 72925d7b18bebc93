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
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from shoal.atomic_io import sha256_of, write_atomically
from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.json_text import json_bytes, parse_json

MANIFEST = "manifest.json"
VERSION = 1
"""Version of the manifests and shards of all kinds."""

TFRECORD = "tfrecord"
"""Suffix of the documents of a shard as TFRecord."""

_FILE_NAME = re.compile(r"[\w-][\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMANDS = {
    "text": "shoal prepare text SOURCE...",
    "images": "shoal prepare images SOURCE",
    "coco": "shoal prepare coco --images FOLDER --annotations FILE",
}


def prepare_command(kind: str, directory: Path | str) -> str:
    """Return the command that prepares "text", "images" or "coco" into ``directory``, for error messages."""
    return f"`{_COMMANDS[kind]} --out {directory}`"


def check_version(stored: object, version: int, source: str, kind: str) -> None:
    """Check the format version that the file ``source`` of a prepared directory has.

    Raises:
        ShoalError: an older or a newer version of shoal wrote it; names the command that prepares it again.
    """
    if stored == version and type(stored) is int:
        return
    is_newer = isinstance(stored, int) and stored > version
    command = prepare_command(kind, source.rpartition("/")[0] or ".").removesuffix("`")
    raise ShoalError(
        f"{source} has format version {stored}; this shoal reads version {version} only: "
        f"{'update shoal, or ' if is_newer else ''}run {command} --overwrite`"
    )


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


def map_file(path: Path, described: ShardFile) -> mmap.mmap | bytes:
    """Map a file of a shard for reading; return ``b""`` if it is empty.

    Raises:
        ShoalError: it is missing, cannot be read or has another size than the manifest says.
    """
    expected, remedy = described.num_bytes, described.remedy
    try:
        with path.open("rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != expected:
                problem = "was cut short" if actual < expected else "is too long"
                raise ShoalError(
                    f"{path} {problem}: it has {actual:,} bytes, the manifest says {expected:,}; {remedy}"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if actual else b""
    except FileNotFoundError:
        raise ShoalError(f"{path} is missing, though the manifest names it; {remedy}") from None
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard, as the manifest describes it."""

    shard: ShardFiles
    suffix: str

    @property
    def name(self) -> str:
        """Its name in the prepared directory."""
        return f"{self.shard.name}.{self.suffix}"

    @property
    def num_bytes(self) -> int:
        return int(self.shard.files[self.suffix]["bytes"])

    @property
    def copy_name(self) -> str:
        """Name of a copy of it: that of no other file."""
        return f"{self.shard.name}-{self.shard.files[self.suffix]['sha256'][:16]}.{self.suffix}"

    @property
    def remedy(self) -> str:
        """Return the remedy for a damaged file."""
        return f"copy it again or prepare the {self.shard.KIND} again"

    def check(self, path: Path | str, num_bytes: int, sha256: str) -> None:
        """Check the size and the SHA-256 of what is at ``path``.

        Raises:
            ShoalError: they are not the manifest's.
        """
        self.shard.check_facts(path, num_bytes, sha256, self.shard.files[self.suffix])


@dataclass(frozen=True, kw_only=True)
class ShardFiles:
    """Name of a shard in a manifest, and the size and SHA-256 of each of its files.

    ``files`` maps each of ``SUFFIXES``, and any of ``OPTIONAL``, to ``{"bytes": int, "sha256": str}``; the
    file of a suffix is ``NAME.SUFFIX``. Kinds of shards add their counts, ``num_…``.
    """

    KIND: ClassVar[str]
    SUFFIXES: ClassVar[tuple[str, ...]]
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    name: str
    files: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        """Check the fields, which may come from a damaged manifest.

        Raises:
            ValueError: the name, a count, or the size or SHA-256 of a file is not valid.
        """
        check_file_name(self.name)
        counts = [value for field, value in vars(self).items() if field.startswith("num_")]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError(f"the counts of the shard {self.name!r} must be whole numbers of at least 0")
        if not isinstance(self.files, dict) or set(self.files) - set(self.OPTIONAL) != set(self.SUFFIXES):
            raise ValueError(f"the shard {self.name!r} must have the files {', '.join(self.SUFFIXES)}")
        for suffix, facts in self.files.items():
            size, digest = (facts.get("bytes"), facts.get("sha256")) if isinstance(facts, dict) else (-1, "")
            if not isinstance(size, int) or size < 0 or not _SHA256.fullmatch(str(digest)):
                raise ValueError(
                    f"{self.name}.{suffix} must have a number of bytes and a SHA-256 of 64 digits"
                )

    def file(self, suffix: str) -> ShardFile:
        """Return one of the shard's files."""
        return ShardFile(self, suffix)

    def file_list(self) -> list[ShardFile]:
        """Return the files of which hosts keep copies."""
        return [self.file(suffix) for suffix in self.SUFFIXES]

    def check(self, directory: Path) -> None:
        """Check size and SHA-256 of the shard's files, reading every byte.

        Raises:
            ShoalError: a file is missing, cannot be read, or differs from the manifest.
        """
        for suffix, expected in self.files.items():
            path = directory / f"{self.name}.{suffix}"
            try:
                num_bytes, digest = path.stat().st_size, sha256_of(path)
            except OSError as error:
                raise ShoalError(
                    f"{path}, which the manifest names, cannot be read: {error.strerror}"
                ) from error
            self.check_facts(path, num_bytes, digest, expected)

    def check_facts(self, path: Path | str, num_bytes: int, sha256: str, expected: Mapping[str, Any]) -> None:
        """Check the size and the SHA-256 of a file against its entry in the manifest.

        Raises:
            ShoalError: they differ.
        """
        if (num_bytes, sha256) != (expected["bytes"], expected["sha256"]):
            raise ShoalError(
                f"{path} has the wrong checksum: {num_bytes:,} bytes, SHA-256 {sha256[:16]}…, the manifest "
                f"says {expected['bytes']:,} bytes, {expected['sha256'][:16]}…; it was changed, damaged or "
                f"comes from another preparation: copy it again or prepare the {self.KIND} again"
            )


Shard = TypeVar("Shard", bound=ShardFiles)


@dataclass(frozen=True, kw_only=True)
class PreparedManifest(Generic[Shard]):
    """The contents of ``manifest.json`` that every kind of data has.

    ``source`` describes where the data come from. ``splits`` maps "train" and "validation" to their shards,
    in the order in which documents or images are numbered.
    """

    KIND: ClassVar[str]
    SHARD: ClassVar[type[ShardFiles]]
    source: str
    splits: dict[str, tuple[Shard, ...]]

    def shards(self, split: str) -> tuple[Shard, ...]:
        """Return the shards of a split.

        Raises:
            UsageError: there is no such split.
        """
        if split not in self.splits:
            raise UsageError(
                f"there is no split {split!r}; this data has {', '.join(sorted(self.splits)) or 'none'}."
                + did_you_mean(split, self.splits)
            )
        return self.splits[split]

    def files(self) -> list[ShardFile]:
        """Return the files of all splits' shards of which hosts keep copies."""
        return [file for split in self.splits.values() for shard in split for file in shard.file_list()]

    def save(self, directory: Path) -> None:
        """Write ``manifest.json``, atomically; it must be the last file to be written.

        Raises:
            ShoalError: the disk is full or the folder cannot be written.
        """
        value = {"format": f"shoal-{self.KIND}", "version": VERSION, **self._to_json()}
        write_atomically(directory / MANIFEST, json_bytes(value))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read ``manifest.json``.

        Raises:
            UsageError: the directory has none.
            ShoalError: it is damaged, of other data, or of another format version.
        """
        path = directory / MANIFEST
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            remedy = f"run {prepare_command(cls.KIND, directory)}"
            if cls.KIND == "images":
                remedy += f", or for detection {prepare_command('coco', directory)}"
            raise UsageError(
                f"{directory} has no {MANIFEST}, so it holds no prepared {cls.KIND}, or its preparation did "
                f"not finish; {remedy}"
            ) from None
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes, source: str) -> Self:
        """Return the manifest in the bytes that were read from ``source``.

        Raises:
            ShoalError: as for ``load``.
        """
        remedy = f"prepare the {cls.KIND} again"
        value = parse_json(data, source, remedy=remedy)
        if not isinstance(value, dict) or value.pop("format", None) != f"shoal-{cls.KIND}":
            raise ShoalError(
                f"{source}: its format is not 'shoal-{cls.KIND}'; is this the folder of other data?"
            )
        check_version(value.pop("version", None), VERSION, source, cls.KIND)
        try:
            splits = {
                split: tuple(cls.SHARD(**shard) for shard in shards)
                for split, shards in value["splits"].items()
            }
            return cls._from_json({**value, "splits": splits})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ShoalError(f"{source}: a field is missing or wrong ({error}); {remedy}") from None

    def _to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Self:
        """Return the manifest of these fields; its ``splits`` are shards already."""
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class ShardInfo(ShardFiles):
    """Counts and files of one shard of text."""

    KIND = "text"
    SUFFIXES = ("tokens", "index")
    OPTIONAL = (TFRECORD,)
    num_documents: int
    num_sentences: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer's file in the directory, its SHA-256, and its kind ("unigram", "wordpiece", …)."""

    file: str
    sha256: str
    kind: str

    def __post_init__(self) -> None:
        check_file_name(self.file)


@dataclass(frozen=True, kw_only=True)
class Manifest(PreparedManifest[ShardInfo]):
    """The manifest of a directory of token shards.

    ``continues_word`` has one byte per token id: 1 if the token continues the word of the token before it
    ("##ing" of WordPiece; a sentencepiece piece without "▁" that is not punctuation), else 0.
    """

    KIND = "text"
    SHARD = ShardInfo
    vocab_size: int
    cls_id: int
    sep_id: int
    mask_id: int
    pad_id: int
    unk_id: int
    continues_word: bytes = field(repr=False)
    tokenizer: TokenizerInfo
    end_token_only: bool = False
    """Documents are whole texts for causal models: all special ids are the end token's."""

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

    def _to_json(self) -> dict[str, Any]:
        flags = np.packbits(np.frombuffer(self.continues_word, dtype=np.uint8), bitorder="little")
        tree = dataclasses.asdict(self)
        if not self.end_token_only:  # which older readers do not know
            del tree["end_token_only"]
        return {**tree, "continues_word": base64.b64encode(flags.tobytes()).decode()}

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Self:
        vocab_size = int(value["vocab_size"])
        packed = np.frombuffer(base64.b64decode(value["continues_word"]), dtype=np.uint8)
        flags = np.unpackbits(packed, bitorder="little")
        if len(flags) - vocab_size in range(8):  # the bits are padded to whole bytes
            flags = flags[:vocab_size]
        tokenizer = TokenizerInfo(**value["tokenizer"])
        return cls(**{**value, "continues_word": flags.tobytes(), "tokenizer": tokenizer})

    def check_tokenizer(self, path: Path) -> None:
        """Check that ``path`` is the tokenizer that made the shards.

        Raises:
            ShoalError: the file is missing.
            UsageError: it is another tokenizer.
        """
        try:
            digest = sha256_of(path)
        except OSError as error:
            raise ShoalError(
                f"{path}: the tokenizer of the shards cannot be read: {error.strerror}"
            ) from error
        if digest != self.tokenizer.sha256:
            raise UsageError(
                f"{path}: this tokenizer (SHA-256 {digest[:12]}…) is not the one that made the shards "
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
