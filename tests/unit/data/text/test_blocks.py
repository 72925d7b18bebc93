"""Blocks of text: all tokens once an epoch, documents with end tokens, no target across documents."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from shoal.data.text.blocks import NO_TARGET, BlockConfig, BlockReader, num_bytes, num_targets
from shoal.data.text.shards import TextShards
from shoal.errors import UsageError
from synthetic_text import SEP, prepare

VOCAB = 1_000
LENGTHS = (7, 1, 30, 12, 64, 5, 40, 19)
LENGTH = 16


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TextShards:
    """Two shards of documents of several sentences, no token twice."""
    directory = tmp_path_factory.mktemp("prepared")
    tokens = iter(range(5, VOCAB))
    documents = [[[next(tokens)] for _ in range(length)] for length in LENGTHS]
    prepare(directory, {"train": documents}, vocab_size=VOCAB, num_shards=2)
    return TextShards(directory, "train")


def streams(shards: TextShards) -> list[list[int]]:
    """Return the tokens of each shard, with an end token behind each document."""
    firsts = shards.first_documents.tolist()
    return [
        [t for number in range(a, b) for t in (*np.concatenate(shards.document(number)).tolist(), SEP)]
        for a, b in pairwise(firsts)
    ]


def expected(stream: list[int], start: int, *, across: bool) -> tuple[list[int], list[int], list[int]]:
    """Return inputs, positions and labels of the block that begins at a place of a stream, token by token."""
    ids = [stream[(start + i) % len(stream)] for i in range(LENGTH + 1)]
    positions, labels = [], []
    for i in range(LENGTH):
        begins = i == 0 or (ids[i - 1] == SEP and not across)
        positions.append(0 if begins else positions[-1] + 1)
        labels.append(NO_TARGET if ids[i] == SEP and not across else ids[i + 1])
    return ids[:-1], positions, labels


@pytest.mark.parametrize("across", [False, True], ids=["within", "across"])
def test_blocks_are_those_of_a_walk_through_the_text(shards: TextShards, across: bool) -> None:
    reader = BlockReader(shards, BlockConfig(block_length=LENGTH, across_documents=across, seed=3))
    texts = streams(shards)
    assert len(reader) == sum(len(text) // LENGTH for text in texts)
    for epoch in (0, 1, 2):
        batch = reader.batch(np.full(len(reader), epoch), np.arange(len(reader)))
        row = 0
        for text in texts:
            # where the first block begins is drawn: the one place that gives it
            first = batch["input_ids"][row].tolist()
            (start,) = [s for s in range(len(text)) if expected(text, s, across=across)[0] == first]
            for number in range(len(text) // LENGTH):
                ids, positions, labels = expected(text, start + number * LENGTH, across=across)
                assert batch["input_ids"][row].tolist() == ids
                assert batch["position_ids"][row].tolist() == positions
                assert batch["labels"][row].tolist() == labels
                row += 1
        assert row == len(reader)


def test_epochs_differ_and_a_pickled_reader_has_the_same_blocks(shards: TextShards) -> None:
    reader = BlockReader(shards, BlockConfig(block_length=LENGTH))
    every = np.arange(len(reader))
    first, second = (reader.batch(np.full(len(every), epoch), every)["input_ids"] for epoch in (0, 1))
    assert (first != second).any()
    again = pickle.loads(pickle.dumps(reader)).batch(np.zeros(len(every), np.int64), every)
    assert (again["input_ids"] == first).all()


def test_text_that_is_too_short_is_refused(shards: TextShards, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gives no blocks.*shorten the blocks"):
        BlockReader(shards, BlockConfig(block_length=500))
    with pytest.raises(UsageError, match="block_length"):
        BlockConfig(block_length=0)


def test_bytes_are_those_of_the_text_of_targets() -> None:
    words = {"[UNK]": 0, "[SEP]": 3, "moon": 5, "größe": 6, "a": 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    labels = np.array([[5, 6, 3, NO_TARGET, 7, 5], [NO_TARGET, 3, 7, NO_TARGET, 3, 3]])
    assert num_bytes(tokenizer, labels, 3) == len("moon größe".encode()) + len("a moon") + 1
    assert num_targets({"labels": labels}) == 9


@pytest.mark.parametrize("across", [False, True], ids=["within", "across"])
@pytest.mark.parametrize("length", [LENGTH, 200], ids=["short", "longer than a shard"])
def test_every_token_is_a_target_once(shards: TextShards, across: bool, length: int) -> None:
    config = BlockConfig(block_length=length, across_documents=across, every_token=True)
    reader = BlockReader(shards, config)
    texts = streams(shards)
    assert len(reader) == sum(-(-len(text) // length) for text in texts)
    batch = reader.batch(0, np.arange(len(reader)))
    found = batch["labels"][batch["labels"] != NO_TARGET].tolist()
    pairs = [(a, b) for text in texts for a, b in pairwise(text) if across or a != SEP]
    assert found == [b for _, b in pairs]
    inputs = batch["input_ids"][batch["labels"] != NO_TARGET].tolist()
    assert inputs == [a for a, _ in pairs]
