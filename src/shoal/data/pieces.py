"""What one worker does with one piece of the source: articles to sentences to ids to shards.

A piece becomes at most one shard of each split, and a small record ``pieces/NNNNN.json`` that is written
after them. A piece with a record is finished: nobody touches its shards again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer

from shoal.data.corpus import Errors, Piece, read_articles
from shoal.data.encode import SentenceEncoder
from shoal.data.files import write_atomically
from shoal.data.manifest import ShardInfo
from shoal.data.prepare_dir import OVERWRITE, RECORDS, read_record
from shoal.data.sentences import split_sentences
from shoal.data.shard_writer import ShardWriter
from shoal.data.workers import advance
from shoal.errors import ShoalError

SPLITS = ("train", "validation")

_BATCH_CHARACTERS = 1 << 18
"""Articles are encoded together up to this length: bounds memory, and spares calls into the tokenizer."""

Shards = dict[str, ShardInfo]


@dataclass(frozen=True, kw_only=True)
class Job:
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


def start_worker(job: Job) -> None:
    """Load the tokenizer once a process."""
    global _job, _encoder
    _job = job
    tokenizer = Tokenizer.from_file(str(job.out / job.tokenizer_file))
    _encoder = SentenceEncoder(tokenizer, unknown_id=job.unknown_id, unknown_word=job.unknown_word)


def prepare_piece(numbered: tuple[int, Piece]) -> Shards:
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


def finished_piece(out: Path, number: int) -> Shards | None:
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


_job: Job
_encoder: SentenceEncoder
