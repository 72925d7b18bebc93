"""Writes the shards of one chunk of the source: splits articles into sentences and encodes these.

A chunk becomes at most one shard per split, and a record ``records/NNNNN.json`` that is written after them. A
chunk with a record is finished; its shards are not touched again.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from shoal.atomic_io import write_atomically
from shoal.data.bad_entries import BadEntries, OnBad
from shoal.data.manifest import ShardInfo
from shoal.data.prepare_dir import RECORDS, check_finished, read_record
from shoal.data.process_pool import advance
from shoal.data.text.corpus import Chunk, Errors, read_articles
from shoal.data.text.sentences import split_sentences
from shoal.data.text.shards import ShardWriter
from shoal.data.tfrecord import document_record
from shoal.json_text import parse_json

_LOCAL_NORMALIZERS = frozenset(
    ("Replace", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Lowercase", "Precompiled", "BertNormalizer")
)
_LOCAL_PRE_TOKENIZERS = frozenset(("BertPreTokenizer", "WhitespaceSplit", "Punctuation", "Digits", "Split"))
_WORDS_PER_TEXT = 128
_MAX_WORDS = 400_000
"""The cache of words is cleared beyond this (about 100 MB); large corpora never run out of new words."""

SPLITS = ("train", "validation")

_BATCH_CHARACTERS = 1 << 18
"""Articles are encoded together up to this length: bounds memory, and reduces calls into the tokenizer."""


@dataclass(frozen=True)
class ChunkResult:
    """The shards of a chunk by split, and the counts of left-out entries (:meth:`BadEntries.as_counts`)."""

    shards: dict[str, ShardInfo]
    bad: dict[str, tuple[int, Sequence[str]]]


class SentenceEncoder:
    """Encodes sentences exactly as ``tokenizer`` does, without special tokens, from a cache of words.

    Running text repeats its words: the 9 MB of ``builtin`` have 1.4 million words, of which 60 thousand
    differ. If every part of the tokenizer looks at one word at a time, joining cached ids of words gives the
    ids of the sentence many times faster. Only sentences of printable ASCII take this path, since no
    normaliser merges those across a blank.

    Names of special tokens in the text ("[MASK]") are ordinary characters. ``unknown_word``, if given, stands
    for the unknown token wherever it is in a sentence (WikiText writes ``<unk>``).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        unknown_id: int,
        unknown_word: str | None = None,
        by_words: bool = True,
    ) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._unknown_id = unknown_id
        self._unknown_word = unknown_word
        self._by_word = by_words and words_stand_alone(tokenizer)
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
            ids = [next(encoded)]
            for _ in sentence_parts[1:]:
                ids += [unknown, next(encoded)]
            joined.append(np.concatenate(ids))
        return joined

    def _encode(self, sentences: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        words = [
            s.split(" ") if self._by_word and s.isascii() and s.isprintable() else None for s in sentences
        ]
        self._learn(set(chain.from_iterable(some for some in words if some is not None)))
        others = [sentence for sentence, some in zip(sentences, words, strict=True) if some is None]
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
        """Encode new words, many in one text: alone each costs 15 µs, together 2 µs."""
        if len(self._ids_of) > _MAX_WORDS:
            self._ids_of.clear()
        new = sorted(words.difference(self._ids_of))
        groups = [new[start : start + _WORDS_PER_TEXT] for start in range(0, len(new), _WORDS_PER_TEXT)]
        encodings = self._tokenizer.encode_batch(
            [" ".join(group) for group in groups], add_special_tokens=False
        )
        for group, encoding in zip(groups, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.uint32)
            word_starts = np.cumsum([0] + [len(word) + 1 for word in group])
            # a token belongs to the word that it ends in; one that is a blank alone ("▁") to the next word
            token_ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
            edges = np.searchsorted(token_ends, word_starts, side="left").tolist()
            for word, begin, end in zip(group, edges[:-1], edges[1:], strict=True):
                self._ids_of[word] = ids[begin:end].tobytes()


def words_stand_alone(tokenizer: Tokenizer) -> bool:
    """Return whether the ids of an ASCII sentence are those of its words, one after the other.

    True if every part of the tokenizer is known to look at one word only; in doubt False.
    """
    parts = parse_json(tokenizer.to_str(), "the tokenizer")
    normalizers = _flat(parts["normalizer"], "normalizers")
    pre_tokenizers = _flat(parts["pre_tokenizer"], "pretokenizers")
    return (
        all(token["special"] for token in parts["added_tokens"])
        and any(map(_splits_at_blanks, pre_tokenizers))
        and all(_splits_at_blanks(part) or part["type"] in _LOCAL_PRE_TOKENIZERS for part in pre_tokenizers)
        and all(
            part["type"] in _LOCAL_NORMALIZERS and " " not in part.get("pattern", {}).get("String", "")
            for part in normalizers
        )
    )


def _splits_at_blanks(part: dict[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return bool(part["prepend_scheme"] == "always" and part["split"])
    return part["type"] in ("BertPreTokenizer", "WhitespaceSplit")


def _flat(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


@dataclass(frozen=True, kw_only=True)
class ChunkJob:
    """Settings that all chunks of a preparation share.

    ``whole``: an article is tokenized as one text, not by its sentences.
    ``held_out`` is the greatest ``article_rank`` of the validation split, below 0 if nothing is held out.
    """

    out: Path
    tokenizer_file: str
    vocab_size: int
    unknown_id: int
    unknown_word: str | None
    whole: bool
    errors: Errors
    seed: int
    held_out: float
    tfrecord: bool
    on_bad: OnBad


def article_rank(article: str, seed: int) -> float:
    """Return a hash of the text and the seed in [0, 1), so that copies of an article share a split."""
    digest = blake2b(article.encode(), digest_size=8, salt=seed.to_bytes(8, "little")).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def start_worker(job: ChunkJob) -> None:
    """Load the tokenizer, once per process."""
    global _job, _encoder
    _job = job
    tokenizer = Tokenizer.from_file(str(job.out / job.tokenizer_file))
    _encoder = SentenceEncoder(
        tokenizer, unknown_id=job.unknown_id, unknown_word=job.unknown_word, by_words=not job.whole
    )


def prepare_chunk(numbered: tuple[int, Chunk]) -> ChunkResult:
    """Write the shards and the record of a chunk, and return its result.

    Raises:
        UsageError: an article is too long, invalid entries are refused.
        ShoalError: a source can no longer be read, the disk is full.
    """
    number, chunk = numbered
    shards: dict[str, ShardInfo] = {}
    bad = BadEntries("the source", _job.on_bad)
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                ShardWriter(
                    _job.out,
                    f"{split}-{number:05d}",
                    _job.vocab_size,
                    as_record=document_record if _job.tfrecord else None,
                )
            )
            for split in SPLITS
        }
        for batch in _batches(read_articles(chunk, _job.errors, bad)):
            _write_batch(batch, writers)
            advance(sum(map(len, batch)))
        for split, writer in writers.items():
            if writer.num_tokens:
                shards[split] = writer.finish()
    result = ChunkResult(shards, bad.as_counts())
    write_atomically(_record_path(_job.out, number), json.dumps(dataclasses.asdict(result)).encode())
    return result


def finished_chunk(out: Path, number: int) -> ChunkResult | None:
    """Return the result of a chunk that an earlier run finished, or ``None``.

    Raises:
        ShoalError: one of its files is missing or has another size.
    """
    path = _record_path(out, number)
    if not path.is_file():
        return None

    def make(record: dict[str, Any]) -> ChunkResult:
        shards = {split: ShardInfo(**value) for split, value in record["shards"].items()}
        return ChunkResult(
            shards, {kind: (count, locations) for kind, (count, locations) in record["bad"].items()}
        )

    result = read_record(path, make)
    for shard in result.shards.values():
        check_finished(out, shard.name, shard.files)
    return result


def _record_path(out: Path, number: int) -> Path:
    return out / RECORDS / f"{number:05d}.json"


def _write_batch(articles: list[str], writers: dict[str, ShardWriter]) -> None:
    sentences: list[str] = []
    ends = []
    for article in articles:
        if _job.whole:
            sentences.append(article)
        else:
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
