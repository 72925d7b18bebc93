"""Prepared directories of made-up text for the tests of the reading side."""

import hashlib
import math
from pathlib import Path

import numpy as np

from shoal.data.manifest import Manifest, ShardInfo, TokenizerInfo
from shoal.data.text.shards import ShardWriter

CLS, SEP, MASK, PAD, UNK = 2, 3, 4, 0, 1
TOKENIZER = b'{"made": "up"}'

Document = list[list[int]]


def random_documents(lengths, *, vocab_size=30_000, sentence_tokens=20, unknown_share=0.0, seed=0):
    """Documents of exactly these lengths, of random ordinary tokens, in sentences of random lengths."""
    rng = np.random.default_rng(seed)
    documents: list[Document] = []
    for length in lengths:
        tokens = rng.integers(5, vocab_size, length)
        tokens[rng.random(length) < unknown_share] = UNK
        ends = np.flatnonzero(rng.random(max(length - 1, 0)) < 1 / sentence_tokens) + 1
        documents.append([part.tolist() for part in np.split(tokens, ends) if len(part)])
    return documents


def write_shards(
    directory: Path, split: str, documents, *, vocab_size, num_shards=1
) -> tuple[ShardInfo, ...]:
    infos = []
    for number in range(num_shards):
        part = documents[len(documents) * number // num_shards : len(documents) * (number + 1) // num_shards]
        with ShardWriter(directory, f"{split}-{number:05d}", vocab_size) as writer:
            for document in part:
                writer.add_document(document)
            infos.append(writer.finish())
    return tuple(infos)


def prepare(directory: Path, splits, *, vocab_size=30_000, num_shards=1, continues=0.3) -> Manifest:
    """Write a prepared directory; ``splits`` maps names to documents. Returns its manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_bytes(TOKENIZER)
    flags = np.random.default_rng(1).random(vocab_size) < continues
    flags[:5] = False
    manifest = Manifest(
        vocab_size=vocab_size,
        cls_id=CLS,
        sep_id=SEP,
        mask_id=MASK,
        pad_id=PAD,
        unk_id=UNK,
        continues_word=flags.tobytes(),
        tokenizer=TokenizerInfo(
            file="tokenizer.json", sha256=hashlib.sha256(TOKENIZER).hexdigest(), kind="made up"
        ),
        source="made up",
        splits={
            split: write_shards(directory, split, documents, vocab_size=vocab_size, num_shards=num_shards)
            for split, documents in splits.items()
        },
    )
    manifest.save(directory)
    return manifest


def assert_binomial(successes: int, trials: int, probability: float) -> None:
    """Check a count against the exact binomial distribution: either tail is at least one in a million."""
    k = np.arange(trials + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    log_pmf = (
        log_factorial[-1]
        - log_factorial
        - log_factorial[::-1]
        + k * math.log(probability)
        + (trials - k) * math.log1p(-probability)
    )
    pmf = np.exp(log_pmf)
    lower, upper = pmf[: successes + 1].sum(), pmf[successes:].sum()
    assert min(lower, upper) > 1e-6, f"{successes} of {trials} = {successes / trials:.4f}, not {probability}"
