"""What one worker does with one piece of the source: articles to sentences to ids to shards.

A piece becomes at most one shard of each split, and a small record ``records/NNNNN.json`` that is written
after them. A piece with a record is finished: nobody touches its shards again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shoal.data.atomic_io import write_atomically
from shoal.data.manifest import ShardInfo
from shoal.data.prepare_dir import OVERWRITE, RECORDS, read_record
from shoal.data.process_pool import advance
from shoal.data.text.corpus import Chunk, Errors, read_articles
from shoal.data.text.sentences import split_sentences
from shoal.data.text.shards import ShardWriter
from shoal.errors import ShoalError
from shoal.json_text import parse_json

_LOCAL_NORMALIZERS = frozenset(
    ("Replace", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Lowercase", "Precompiled", "BertNormalizer")
)
_LOCAL_PRE_TOKENIZERS = frozenset(("BertPreTokenizer", "WhitespaceSplit", "Punctuation", "Digits", "Split"))
_WORDS_A_TEXT = 128
_MAX_WORDS = 400_000
"""The dictionary starts anew beyond this: about 100 MB, since large corpora never run out of new words."""


class SentenceEncoder:
    """Turns sentences into token ids exactly as ``tokenizer`` does, without special tokens around them.

    Names of special tokens in the text ("[MASK]") are ordinary characters. ``unknown_word``, if given,
    stands for the unknown token wherever it is in a sentence (WikiText writes ``<unk>``).
    """

    def __init__(self, tokenizer: Tokenizer, *, unknown_id: int, unknown_word: str | None = None) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._unknown_id = unknown_id
        self._unknown_word = unknown_word
        self._by_word = words_stand_alone(tokenizer)
        self._ids_of: dict[str, bytes] = {}

    def encode(self, sentences: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Return the ids of each sentence (single blanks between words), uint32 ``[num_tokens]``."""
        word = self._unknown_word
        if word is None or not any(word in sentence for sentence in sentences):
            return self._encode(sentences)
        parts = [sentence.split(word) for sentence in sentences]
        encoded = iter(self._encode([part.strip() for part in chain.from_iterable(parts)]))
        unknown = np.array([self._unknown_id], dtype=np.uint32)
        joined = []
        for sentence_parts in parts:
            pieces = [next(encoded)]
            for _ in sentence_parts[1:]:
                pieces += [unknown, next(encoded)]
            joined.append(np.concatenate(pieces))
        return joined

    def _encode(self, sentences: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        plain = [self._by_word and s.isascii() and s.isprintable() for s in sentences]
        words = [
            sentence.split(" ") if is_plain else None
            for sentence, is_plain in zip(sentences, plain, strict=True)
        ]
        self._learn(set(chain.from_iterable(some for some in words if some is not None)))
        others = [sentence for sentence, is_plain in zip(sentences, plain, strict=True) if not is_plain]
        rest = iter(self._tokenizer.encode_batch_fast(others, add_special_tokens=False) if others else [])
        # joining bytes takes half the time of chaining lists of numbers
        ids_of = self._ids_of.__getitem__
        return [
            np.array(next(rest).ids, dtype=np.uint32)
            if some is None
            else np.frombuffer(b"".join(map(ids_of, some)), dtype=np.uint32)
            for some in words
        ]

    def _learn(self, words: set[str]) -> None:
        """Encode the words that are new, many in one text: alone each costs 15 µs, together 2 µs."""
        if len(self._ids_of) > _MAX_WORDS:
            self._ids_of.clear()
        new = sorted(words.difference(self._ids_of))
        groups = [new[start : start + _WORDS_A_TEXT] for start in range(0, len(new), _WORDS_A_TEXT)]
        encodings = self._tokenizer.encode_batch(
            [" ".join(group) for group in groups], add_special_tokens=False
        )
        for group, encoding in zip(groups, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.uint32)
            word_starts = np.cumsum([0] + [len(word) + 1 for word in group])
            # a token is of the word that it ends in; one that is a blank alone ("▁") is of the next word
            token_ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
            edges = np.searchsorted(token_ends, word_starts, side="left").tolist()
            for word, begin, end in zip(group, edges[:-1], edges[1:], strict=True):
                self._ids_of[word] = ids[begin:end].tobytes()


def words_stand_alone(tokenizer: Tokenizer) -> bool:
    """Tell whether the ids of an ASCII sentence are those of its words, one after the other.

    True where every part of the tokenizer is known to look at one word only; in doubt False.
    """
    parts = parse_json(tokenizer.to_str(), "the tokenizer")
    if any(not token["special"] for token in parts["added_tokens"]):
        return False
    normalizers = _flat(parts["normalizer"], "normalizers")
    pre_tokenizers = _flat(parts["pre_tokenizer"], "pretokenizers")
    splits = any(_splits_at_blanks(part) for part in pre_tokenizers)
    return (
        splits
        and all(
            (part["type"] in _LOCAL_NORMALIZERS and " " not in part.get("pattern", {}).get("String", ""))
            for part in normalizers
        )
        and all(_splits_at_blanks(part) or part["type"] in _LOCAL_PRE_TOKENIZERS for part in pre_tokenizers)
    )


def _splits_at_blanks(part: dict[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return bool(part["prepend_scheme"] == "always" and part["split"])
    return part["type"] in ("BertPreTokenizer", "WhitespaceSplit")


def _flat(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


SPLITS = ("train", "validation")

_BATCH_CHARACTERS = 1 << 18
"""Articles are encoded together up to this length: bounds memory, and spares calls into the tokenizer."""

Shards = dict[str, ShardInfo]


@dataclass(frozen=True, kw_only=True)
class ChunkJob:
    """What is the same for all pieces. ``held_out`` is the greatest ``article_rank`` of the validation split,
    below 0 if nothing is held out."""

    out: Path
    tokenizer_file: str
    vocab_size: int
    unknown_id: int
    unknown_word: str | None
    errors: Errors
    seed: int
    held_out: float


def article_rank(article: str, seed: int) -> float:
    """Return a number in [0, 1) that depends on the text and the seed alone, so that copies share a split."""
    digest = blake2b(article.encode(), digest_size=8, salt=seed.to_bytes(8, "little")).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def start_worker(job: ChunkJob) -> None:
    """Load the tokenizer once a process."""
    global _job, _encoder
    _job = job
    tokenizer = Tokenizer.from_file(str(job.out / job.tokenizer_file))
    _encoder = SentenceEncoder(tokenizer, unknown_id=job.unknown_id, unknown_word=job.unknown_word)


def prepare_chunk(numbered: tuple[int, Chunk]) -> Shards:
    """Write the shards and the record of a piece; return the shards by split.

    Raises:
        UsageError: bytes that are not UTF-8, an article that is too long.
        ShoalError: a source can no longer be read, the disk is full.
    """
    number, piece = numbered
    shards: Shards = {}
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(_job.out, f"{split}-{number:05d}", _job.vocab_size))
            for split in SPLITS
        }
        for batch in _batches(read_articles(piece, _job.errors)):
            _write_batch(batch, writers)
            advance(sum(map(len, batch)))
        for split, writer in writers.items():
            if writer.num_tokens:
                shards[split] = writer.finish()
    record = {split: shard.to_json() for split, shard in shards.items()}
    write_atomically(_record_path(_job.out, number), json.dumps(record).encode())
    return shards


def finished_chunk(out: Path, number: int) -> Shards | None:
    """Return the shards of a piece that an earlier run has finished, or ``None``.

    Raises:
        ShoalError: one of its files is missing or has another size.
    """
    path = _record_path(out, number)
    if not path.is_file():
        return None
    shards = read_record(path, lambda record: {split: ShardInfo(**value) for split, value in record.items()})
    for shard in shards.values():
        for suffix, facts in shard.files.items():
            file = out / f"{shard.name}.{suffix}"
            if not file.is_file() or file.stat().st_size != facts["bytes"]:
                raise ShoalError(
                    f"{file}: an earlier run finished this file, now it is missing or has another size than "
                    f"{facts['bytes']} bytes; {OVERWRITE}"
                )
    return shards


def _record_path(out: Path, number: int) -> Path:
    return out / RECORDS / f"{number:05d}.json"


def _write_batch(articles: list[str], writers: dict[str, ShardWriter]) -> None:
    sentences: list[str] = []
    ends = []
    for article in articles:
        for paragraph in article.split("\n"):
            sentences += split_sentences(paragraph)
        ends.append(len(sentences))
    encoded = _encoder.encode(sentences)
    start = 0
    for article, end in zip(articles, ends, strict=True):
        held_out = article_rank(article, _job.seed) <= _job.held_out
        writers[SPLITS[held_out]].add_document(encoded[start:end])
        start = end


def _batches(articles: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    length = 0
    for article in articles:
        batch.append(article)
        length += len(article)
        if length >= _BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


_job: ChunkJob
_encoder: SentenceEncoder
