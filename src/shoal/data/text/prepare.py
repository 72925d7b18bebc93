"""Prepares text as token shards with a manifest: ``shoal prepare text``.

1. Lists the files of the source (``corpus``), unpacks compressed ones (``unpack``), and cuts all of them into
   chunks by size alone.
2. Reads a bounded sample, which trains the tokenizer and decides where the validation split begins.
3. Writes the shards of each chunk in a pool of processes, in any order (``chunk_worker``), and records each.
4. Writes the manifest.

Every step writes whole files, so the same command continues after a kill at any moment. The result depends on
source and configuration only, not on the number of processes or on interruptions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import Tokenizer

from shoal.atomic_io import sha256_of, write_atomically
from shoal.data.bad_entries import MOST_BAD, BadEntries, OnBad
from shoal.data.manifest import TFRECORD, VERSION, Manifest, TokenizerInfo
from shoal.data.prepare_dir import RECORDS, preparing, read_record
from shoal.data.process_pool import run_unfinished
from shoal.data.progress import PreparationProgress
from shoal.data.text import chunk_worker, tokenizer, tokenizer_files
from shoal.data.text.chunk_worker import article_rank
from shoal.data.text.corpus import (
    FORMATS,
    TEXT_FORMATS,
    Chunk,
    Errors,
    Format,
    SourceFile,
    cut_chunks,
    find_files,
    read_articles,
)
from shoal.data.text.python_docs_corpus import write_snapshot
from shoal.data.text.sentences import split_sentences
from shoal.data.text.unpack import unpack_files
from shoal.env.machine import num_cores
from shoal.errors import UsageError, did_you_mean

BUILTIN = "builtin"
SNAPSHOT = "builtin.txt"
"""The text of the installation as it was when the preparation began: a source like any other."""
TOKENIZER = "tokenizer.json"

_OWN_FILE = re.compile(
    rf"(?:{'|'.join(chunk_worker.SPLITS)})-\d{{5}}\.(?:tokens|index|{TFRECORD})|{SNAPSHOT}|{TOKENIZER}"
)

_SAMPLE = "sample.json"
_SAMPLE_CHARACTERS = 10 << 20
_MORE_THAN_SAMPLE = 1.1
"""Estimated characters of a source that is no sample as a whole, relative to those of a sample."""
_SURELY_MORE = 4
"""Bytes of such a source, relative to the characters of a sample, with markup or without."""
"""Enough for tens of thousands of subwords; sentencepiece takes about 8 s of processor time for it."""
_PART_CHARACTERS = 64 << 10
"""At least this much is read per place, which bounds the number of places."""
_MIN_CHUNK_BYTES = 1 << 20
_NUM_CHUNKS = 16
"""Small sources are cut into about this many chunks, so that several processes share them evenly."""
_WIKITEXT_UNKNOWN = "<unk>"
_FEW_SENTENCES = 2.0
"""Sentences per article below which ``too_short`` warns."""
_NOT_IN_PLAN = ("out", "processes", "overwrite", "on_bad", "most_bad")
"""Fields that do not change the result of a finished chunk."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Tokenizer, held-out part and shards of a preparation of text."""

    format: Format | Literal["auto"] = "auto"
    """One article per line, one per file, WikiText's headings, a JSON object per line, rows of Parquet, or a
    dump of MediaWiki; auto looks at each file."""
    tokenizer: str = "unigram"
    """``unigram`` or ``wordpiece`` to train one on the corpus; else the path of a sentencepiece .model, a
    BERT vocab.txt or a tokenizer.json."""
    vocab_size: int = 8192
    """Maximum vocabulary of a trained tokenizer, special tokens included."""
    lowercase: bool = True
    """Lower-case the text and remove accents; a tokenizer.json has its own rules."""
    end_token: str | None = None
    """For causal language models: the special token of the tokenizer that ends a document, such as
    ``<|endoftext|>``. Articles are tokenized whole, with their line ends, and the tokenizer needs no other
    special token; BERT, ALBERT and T5 refuse such text."""
    validation: float = 0.05
    """Fraction of articles held out, chosen by a hash of their text; 0 for none."""
    shard_bytes: int = 64 << 20
    """Maximum bytes of source text per shard."""
    container: Literal["tokens", "tfrecord"] = "tokens"
    """``tfrecord`` writes each shard also as TFRecord, for TensorFlow."""
    errors: Errors = "strict"
    """``replace`` replaces bytes that are not UTF-8 by U+FFFD; ``strict`` treats their articles as on_bad
    says."""
    on_bad: OnBad = "skip"
    """Leave out and count articles, rows and pages that cannot be used, or stop at the first."""
    most_bad: float = MOST_BAD
    """Largest share that may be left out, beside flaws that standard sets are known for."""
    seed: int = 0
    """Seed of the choice of held-out articles."""
    processes: int = 0
    """Worker processes; 0: one per core. The result does not depend on it."""
    overwrite: bool = False
    """Remove the output of an earlier preparation, and start from the beginning."""

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            UsageError: a value is out of its range.
        """
        if not 0 <= self.validation < 1:
            raise UsageError(f"validation={self.validation} must be at least 0 and below 1")
        if not 0 <= self.most_bad <= 1:
            raise UsageError(f"most_bad={self.most_bad} must be a share from 0 to 1")
        for name, least in (("vocab_size", 16), ("shard_bytes", 1 << 16), ("processes", 0), ("seed", 0)):
            if not least <= getattr(self, name) < 1 << 63:
                raise UsageError(f"{name}={getattr(self, name)} must be at least {least}")
        if not (self.trains_tokenizer or Path(self.tokenizer).exists()):
            kinds = get_args(tokenizer.Kind)
            raise UsageError(
                f"tokenizer {self.tokenizer!r} is neither a file nor one of {', '.join(kinds)}."
                + did_you_mean(self.tokenizer, kinds)
            )

    @property
    def trains_tokenizer(self) -> bool:
        """True if the tokenizer is trained on the corpus."""
        return self.tokenizer in get_args(tokenizer.Kind)

    @property
    def needs(self) -> tuple[str, ...]:
        """The special tokens that the tokenizer needs, by their roles, besides the end token."""
        return () if self.end_token is not None else tuple(tokenizer_files.SPECIAL_TOKENS)


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(PrepareOptions):
    """Sources and output of a preparation of text, and its options."""

    sources: tuple[str, ...]
    """Files, directories or globs of text, JSON lines, Parquet or MediaWiki's dumps, also compressed (.gz,
    .bz2, .xz, .zst); rows are read from the field ``text``, or from that of ``FILE:FIELD``;
    ``hf:NAME[:CONFIG][:SPLIT][:FIELD]`` through ``datasets``. ``builtin`` is the English of this Python
    installation."""
    out: Path
    """Directory for tokenizer, shards and manifest; created if it does not exist."""


def prepare_text(config: PrepareConfig, *, progress: bool = True) -> Manifest:
    """Prepare ``config.sources`` into ``config.out`` and return the manifest; return it if it is there
    already.

    After an interruption, the same call continues with the chunks that are not finished. ``progress`` reports
    on standard error. Processes are spawned: a script that calls this needs the usual
    ``if __name__ == "__main__":``.

    Raises:
        UsageError: a source, a tokenizer or the configuration cannot be used, or differs from that of the
            directory.
        ShoalError: the disk is full, a file cannot be written, a worker process was killed.
    """
    processes = config.processes or num_cores()
    others = tuple(source for source in config.sources if source != BUILTIN)
    files = find_files(others, config.format) if others or not config.sources else []
    plan = _plan(config, files)
    begun = preparing(config.out, plan, _OWN_FILE, overwrite=config.overwrite, progress=progress)
    with begun as (shown, is_prepared):
        if is_prepared:
            return Manifest.load(config.out)
        for line in described(files):
            shown.say(line)
        if len(others) < len(config.sources):
            snapshot = config.out / SNAPSHOT
            if not snapshot.is_file():
                write_snapshot(snapshot, processes=processes, progress=shown)
            files = find_files([str(snapshot)], "lines") + files
        files = unpack_files(files, config.out / RECORDS, shown, processes=processes, errors=config.errors)
        chunk_bytes = max(sum(file.num_bytes for file in files) // _NUM_CHUNKS, _MIN_CHUNK_BYTES)
        chunks = cut_chunks(files, min(chunk_bytes, config.shard_bytes))
        job = _make_job(config, files, chunks, shown)
        results = run_unfinished(
            chunk_worker.prepare_chunk,
            list(enumerate(chunks)),
            lambda task: chunk_worker.finished_chunk(job.out, task[0]),
            shown,
            outputs="token shards",
            num_bytes=lambda task: sum(span.end - span.start for span in task[1]),
            processes=processes,
            initializer=chunk_worker.start_worker,
            initargs=(job,),
        )
        return _finish(config, job, results, shown)


def _plan(config: PrepareConfig, files: Sequence[SourceFile]) -> dict[str, Any]:
    """Return everything that the result depends on, as JSON; of files the name, size and mtime.

    ``builtin`` is left out: its snapshot is taken once, when the preparation begins.
    """
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_IN_PLAN}
    digest = hashlib.sha256()
    for file in files:
        facts = (file.path, file.format, file.field, file.num_bytes, file.changed_ns)
        digest.update(("\0".join(map(str, facts)) + "\n").encode("utf-8", "surrogateescape"))
    for name, default in (("end_token", None), ("errors", "strict")):
        if fields[name] == default:  # as plans of preparations that began before the option was in them
            del fields[name]
    pretrained = {} if config.trains_tokenizer else {"tokenizer_sha256": sha256_of(Path(config.tokenizer))}
    state = {"source_files": len(files), "source_state": digest.hexdigest()}
    return {"kind": "text", "version": VERSION, **fields, **state, **pretrained}


def _make_job(
    config: PrepareConfig, files: Sequence[SourceFile], chunks: Sequence[Chunk], shown: PreparationProgress
) -> chunk_worker.ChunkJob:
    """Return the settings of all chunks; reuse the tokenizer and the sample of an earlier run."""
    records, path = config.out / RECORDS, config.out / TOKENIZER
    has_unknown = config.end_token is None and any(file.format == "wikitext" for file in files)
    unknown_word = _WIKITEXT_UNKNOWN if has_unknown else None
    if not (records / _SAMPLE).is_file():
        records.mkdir(exist_ok=True)
        trains = config.trains_tokenizer
        shown.start(f"Training a tokenizer ({config.tokenizer})" if trains else "Reading a sample", 0)
        pretrained = None
        if not trains:
            name, lowercase = Path(config.tokenizer), config.lowercase
            pretrained = tokenizer.read_tokenizer(
                name, lowercase=lowercase, needs=config.needs, on_bad=config.on_bad
            )
            special_ids(config, pretrained, name)
        sample: list[str] = []
        is_whole = False
        bad = BadEntries(", ".join(config.sources))
        if trains or not is_more_than_sample(chunks, config.errors):
            sample, is_whole = read_sample(chunks, config.errors, bad)
        held_out = held_out_rank(sample, is_whole, config.validation, config.seed, bad.summary())
        made = pretrained or tokenizer.train_tokenizer(
            "unigram" if config.tokenizer == "unigram" else "wordpiece",
            training_sentences(sample, unknown_word),
            vocab_size=config.vocab_size,
            lowercase=config.lowercase,
        )
        write_atomically(path, tokenizer_files.tokenizer_json(made))
        write_atomically(records / _SAMPLE, json.dumps({"held_out": held_out}).encode())
    loaded = tokenizer.read_tokenizer(path, lowercase=config.lowercase, needs=config.needs)
    return chunk_worker.ChunkJob(
        out=config.out,
        tokenizer_file=TOKENIZER,
        vocab_size=tokenizer.vocab_size(loaded),
        unknown_id=special_ids(config, loaded, path)["unk"],
        unknown_word=unknown_word,
        whole=config.end_token is not None,
        errors=config.errors,
        seed=config.seed,
        tfrecord=config.container == TFRECORD,
        on_bad=config.on_bad,
        held_out=read_record(records / _SAMPLE, lambda record: float(record["held_out"])),
    )


def _finish(
    config: PrepareConfig,
    job: chunk_worker.ChunkJob,
    results: list[chunk_worker.ChunkResult],
    shown: PreparationProgress,
) -> Manifest:
    """Write the manifest and remove the records."""
    shards = [result.shards for result in results]
    splits = {split: tuple(one[split] for one in shards if split in one) for split in chunk_worker.SPLITS}
    bad = BadEntries(", ".join(config.sources), config.on_bad, config.most_bad)
    for result in results:
        bad.add_counts(result.bad)
    bad.check(sum(shard.num_documents for some in splits.values() for shard in some))
    for line in bad.lines():
        shown.say(line)
    if not splits["train"]:
        raise UsageError(
            f"{', '.join(config.sources)}: no article is left for training; the source needs more different "
            "articles, or --validation 0"
        )
    path = config.out / TOKENIZER
    trained = tokenizer.read_tokenizer(path, lowercase=config.lowercase, needs=config.needs)
    ids = special_ids(config, trained, path)
    python = f"English of Python {platform.python_version()} and its packages"
    manifest = Manifest(
        vocab_size=job.vocab_size,
        **{f"{role}_id": value for role, value in ids.items()},
        continues_word=tokenizer.continues_word(trained),
        tokenizer=TokenizerInfo(file=TOKENIZER, sha256=sha256_of(path), kind=tokenizer.model_kind(trained)),
        source=", ".join(python if source == BUILTIN else source for source in config.sources),
        splits={split: of_split for split, of_split in splits.items() if of_split},
        end_token_only=config.end_token is not None,
    )
    manifest.save(config.out)
    shutil.rmtree(config.out / RECORDS)
    for split, of_split in manifest.splits.items():
        counts = [
            sum(getattr(s, f"num_{unit}") for s in of_split) for unit in ("documents", "sentences", "tokens")
        ]
        shown.say(f"{split}: {counts[0]:,} articles, {counts[1]:,} sentences, {counts[2]:,} tokens")
    if not manifest.end_token_only and (warning := too_short(manifest)):
        shown.say(warning)
    return manifest


def special_ids(config: PrepareConfig, made: Tokenizer, path: Path) -> dict[str, int]:
    """Return the ids of the special tokens by their roles; an end token that is set has all of them.

    Args:
        path: of the tokenizer, for errors.

    Raises:
        UsageError: the tokenizer lacks one.
    """
    if config.end_token is None:
        return tokenizer_files.special_ids(made, str(path))
    end = made.token_to_id(config.end_token)
    if end is None:
        raise UsageError(
            f"end_token {config.end_token!r} is no token of {config.tokenizer}: name the one that ends a "
            "document (eos_token in the model's tokenizer_config.json)"
        )
    return dict.fromkeys(tokenizer_files.SPECIAL_TOKENS, end)


def described(files: Sequence[SourceFile]) -> list[str]:
    """Return a line for each format in which files are read.

    Example:
        >>> described([SourceFile(path=Path("verse.txt"), format="lines", num_bytes=9, changed_ns=0)])
        ['read as lines, one article per line: verse.txt (another: --format files or wikitext)']
    """
    lines = []
    for form, words in FORMATS.items():
        paths = [file.path for file in files if file.format == form]
        if paths:
            names = str(paths[0]) if len(paths) == 1 else f"{len(paths):,} files, {paths[0]} and others"
            others = " or ".join(other for other in TEXT_FORMATS if other != form)
            hint = f" (another: --format {others})" if form in TEXT_FORMATS else ""
            lines.append(f"read as {form}, {words}: {names}{hint}")
    return lines


def too_short(manifest: Manifest) -> str:
    """Return a warning if most articles have one sentence, which teaches no order of sentences."""
    train = manifest.splits["train"]
    per_article = sum(s.num_sentences for s in train) / max(sum(s.num_documents for s in train), 1)
    if per_article >= _FEW_SENTENCES:
        return ""
    return (
        f"warning: {per_article:.2f} sentences per article. ALBERT learns the order of sentences and BERT "
        "the next one, both within articles: there is next to nothing to learn (T5 needs neither). If the "
        "lines belong together, cut the text into a file per chapter or page, and prepare the folder with "
        "--format files --overwrite"
    )


def read_sample(
    chunks: Sequence[Chunk], errors: Errors, bad: BadEntries | None = None
) -> tuple[list[str], bool]:
    """Read the first articles of evenly spaced chunks, about 10 million characters in all.

    The second value is true if the source has no others. ``bad`` counts what cannot be used.

    Raises:
        UsageError: there is no article, or a chunk cannot be read (see ``read_articles``).
    """
    num_places = min(len(chunks), _SAMPLE_CHARACTERS // _PART_CHARACTERS)
    articles: list[str] = []
    bad = bad or BadEntries(chunks[0][0].file.name)
    is_whole = num_places == len(chunks)
    room = 0
    for part in range(num_places):
        room += _SAMPLE_CHARACTERS // num_places
        for article in read_articles(chunks[part * len(chunks) // num_places], errors, bad):
            if room <= 0:
                is_whole = False
                break
            articles.append(article)
            room -= len(article)
    if not articles:
        bad.check(0)
        file = chunks[0][0].file
        rule = " (a page begins with a line <page>)" if file.format == "mediawiki" else ""
        raise UsageError(
            f"{file.name}: there is no article in the source, read as --format {file.format}{rule}: is it "
            "the one meant?"
        )
    return articles, is_whole


def is_more_than_sample(chunks: Sequence[Chunk], errors: Errors) -> bool:
    """Estimate whether the articles have more characters than a sample.

    Where the tokenizer is given, a sample would tell no more than that, and the main process would read it
    alone. Of a source of some ten megabytes two chunks are read, of a smaller one all.

    Raises:
        UsageError: a chunk cannot be read (see ``read_articles``).
    """

    def size(chunk: Chunk) -> int:
        return sum(span.end - span.start for span in chunk)

    num_bytes = sum(map(size, chunks))
    if num_bytes < _SAMPLE_CHARACTERS:
        return False
    if num_bytes > _SURELY_MORE * _SAMPLE_CHARACTERS:
        return True
    some = [chunks[number] for number in sorted({0, len(chunks) // 2})]
    characters = sum(len(article) for chunk in some for article in read_articles(chunk, errors))
    return characters * num_bytes > _MORE_THAN_SAMPLE * _SAMPLE_CHARACTERS * sum(map(size, some))


def held_out_rank(
    articles: Sequence[str], is_whole: bool, validation: float, seed: int, left_out: str = ""
) -> float:
    """Return the greatest ``article_rank`` of the validation split; -1 if nothing is held out.

    If ``articles`` are the whole source, the fraction is exact and the split never empty.

    Raises:
        UsageError: there is only one article, beside what was ``left_out``.
    """
    if validation == 0:
        return -1.0
    if not is_whole:
        return validation
    ranks = sorted({article_rank(article, seed) for article in articles})
    if len(ranks) < 2:
        raise UsageError(
            "the source has only one article (or copies of one), so none can be held out for validation; "
            f"{left_out and f'{left_out}; '}add articles, choose another --format, or pass --validation 0"
        )
    num_held_out = min(max(1, round(validation * len(ranks))), len(ranks) - 1)
    return ranks[num_held_out - 1]


def training_sentences(articles: Sequence[str], unknown_word: str | None) -> Iterator[str]:
    """Yield the sentences of ``articles`` without ``unknown_word``."""
    for article in articles:
        text = article if unknown_word is None else article.replace(unknown_word, "")
        for paragraph in text.split("\n"):
            yield from split_sentences(paragraph)
