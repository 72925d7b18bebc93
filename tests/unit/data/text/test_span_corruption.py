"""Span corruption: nothing is lost, counts are T5's, and only seed, epoch and index decide."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import chain, combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from shoal.data.loader import LoaderConfig, training_steps
from shoal.data.steps import DataShard, StepReader
from shoal.data.text.shards import TextShards
from shoal.data.text.span_config import MAX_SENTINELS, SpanConfig, sentinel_id
from shoal.data.text.span_corruption import SpanReader, corrupt, span_lengths
from shoal.decide.rng import Stream, random_keys
from shoal.errors import ShoalError, UsageError
from synthetic_text import SEP, assert_binomial, prepare

VOCAB = 30_000


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TextShards:
    """Two shards of 1,500 and 1,300 tokens, no token twice: a token tells where it stands."""
    directory = tmp_path_factory.mktemp("prepared")
    tokens = np.random.default_rng(3).permutation(np.arange(5, VOCAB))[:2_800].tolist()
    documents = [[tokens[:700]], [tokens[700:1_500]], [tokens[1_500:2_200]], [tokens[2_200:]]]
    prepare(directory, {"train": documents}, vocab_size=VOCAB, num_shards=2)
    return TextShards(directory, "train")


@pytest.fixture(scope="module")
def reader(shards: TextShards) -> SpanReader:
    return SpanReader(shards, SpanConfig(input_length=64))


def restored(inputs: list[int], targets: list[int], *, vocab_size: int = VOCAB) -> list[int]:
    """Put the spans of a target back where their sentinels stand in the input."""
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token >= vocab_size:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    return [t for token in inputs[:-1] for t in (spans.pop(token) if token >= vocab_size else [token])]


# ------------------------------------------------------------------------------------------------- counts


def test_counts_are_those_of_t5() -> None:
    config = SpanConfig()
    found = (config.num_tokens, config.num_noise, config.num_spans, config.input_length, config.target_length)
    assert found == (568, 85, 28, 512, 114)


@pytest.mark.parametrize(
    ("length", "density", "mean"), [(512, 0.15, 3.0), (64, 0.15, 3.0), (128, 0.5, 8.0), (20, 0.3, 1.0)]
)
def test_a_run_fills_the_input_and_no_more_would_fit(length: int, density: float, mean: float) -> None:
    config = SpanConfig(input_length=length, noise_density=density, mean_span_length=mean)

    def needed(num_tokens: int) -> int:
        noise = round(num_tokens * density)
        return num_tokens - noise + round(noise / mean) + 1

    assert needed(config.num_tokens) <= length < needed(config.num_tokens + 1)
    assert abs(config.num_noise / config.num_tokens - density) <= 0.5 / config.num_tokens + 1e-9
    assert abs(config.num_noise / config.num_spans - mean) <= mean / 2 / config.num_spans + 1e-9


# ---------------------------------------------------------------------------------------------- examples


def test_inputs_and_targets_hold_the_text_exactly(reader: SpanReader, shards: TextShards) -> None:
    config = reader.config
    batch = reader.batch(4, range(reader.num_examples))
    assert batch["input_ids"].shape == (reader.num_examples, config.input_length)
    assert batch["labels"].shape == (reader.num_examples, config.target_length)
    sentinels = [sentinel_id(VOCAB, number) for number in range(config.num_spans)]
    texts = [shard.tokens.tolist() for shard in shards.shards]
    for inputs, targets in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert [t for t in inputs if t >= VOCAB] == [t for t in targets if t >= VOCAB] == sentinels
        assert inputs[0] < VOCAB and inputs[-1] == targets[-1] == SEP
        assert sum(token < VOCAB for token in targets[:-1]) == config.num_noise
        run = restored(inputs, targets)
        (text,) = [text for text in texts if run[0] in text]
        start = text.index(run[0])
        assert run == (text + text)[start : start + config.num_tokens]


def test_an_epoch_has_each_token_once_and_leaves_out_less_than_a_run(
    reader: SpanReader, shards: TextShards
) -> None:
    begins = set()
    for epoch in range(3):
        batch = reader.batch(epoch, range(reader.num_examples))
        pairs = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        runs = [restored(*pair) for pair in pairs]
        counts = Counter(token for run in runs for token in run)
        assert set(counts.values()) == {1}
        for shard in shards.shards:
            left_out = len(shard.tokens) - sum(token in counts for token in shard.tokens.tolist())
            assert left_out == len(shard.tokens) % reader.config.num_tokens
        begins.add(runs[0][0])
    assert len(begins) == 3, "each epoch begins elsewhere"


def test_each_sentinel_is_that_of_t5() -> None:
    assert [sentinel_id(32_000, number) for number in (0, 1, 99)] == [32_099, 32_098, 32_000]


def test_corrupt_by_hand() -> None:
    ids = np.array([[10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26]])
    lengths = np.array([[2, 1, 1, 3], [1, 3, 2, 1]])
    inputs, targets = corrupt(ids, lengths, first_sentinel=99, end=1)
    assert inputs.tolist() == [[10, 11, 99, 13, 98, 1], [20, 99, 24, 25, 98, 1]]
    assert targets.tolist() == [[99, 12, 98, 14, 15, 16, 1], [99, 21, 22, 23, 98, 26, 1]]


def test_all_ways_to_cut_are_equally_likely() -> None:
    keys = random_keys(7, Stream.EXAMPLE, np.arange(20_000))
    lengths = span_lengths(keys, 6, 5, 3)
    assert lengths.min() == 1
    for part, total in ((lengths[:, 0::2], 6), (lengths[:, 1::2], 5)):
        assert (part.sum(axis=1) == total).all()
        counts = Counter(map(tuple, part.tolist()))
        cuts = [tuple(b - a for a, b in pairwise((0, *c, total))) for c in combinations(range(1, total), 2)]
        assert set(counts) == set(cuts)
        for cut in cuts:
            assert_binomial(counts[cut], len(keys), 1 / len(cuts))
    both = Counter((a, b) for a, b in lengths[:, :2].tolist())
    expected = Counter(lengths[:, 0].tolist())[4] * Counter(lengths[:, 1].tolist())[3] / len(keys)
    assert abs(both[4, 3] - expected) < 6 * expected**0.5, "text and noise are cut independently"


# -------------------------------------------------------------------------------------- a pure function


def test_an_example_depends_on_seed_epoch_and_index_alone(reader: SpanReader, shards: TextShards) -> None:
    whole = reader.batch(2, range(reader.num_examples))
    some = pickle.loads(pickle.dumps(reader)).batch([2, 2, 2], [5, 0, 5])
    for name in ("input_ids", "labels"):
        assert np.array_equal(some[name], whole[name][[5, 0, 5]])
    other_epoch = reader.batch(3, 5)["input_ids"][0]
    other_seed = SpanReader(shards, SpanConfig(input_length=64, seed=1)).batch(2, 5)["input_ids"][0]
    assert not np.array_equal(other_epoch, whole["input_ids"][5])
    assert not np.array_equal(other_seed, whole["input_ids"][5])


@pytest.mark.parametrize("num_workers", [2, 4])
def test_global_batches_do_not_depend_on_replicas(reader: SpanReader, num_workers: int) -> None:
    def stream(rank: int, of: int) -> list[list[int]]:
        share = DataShard(global_batch_size=24, micro_batch_size=24 // of, rank=rank, num_workers=of)
        steps = training_steps(
            StepReader(reader=reader, share=share, samples_consumed=17), LoaderConfig(), num_steps=4
        )
        return [batch["labels"].tolist() for (batch,) in steps]

    parts = [stream(rank, num_workers) for rank in range(num_workers)]
    assert [[*chain.from_iterable(step)] for step in zip(*parts, strict=True)] == stream(0, 1)


# --------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input_length": 3}, "input_length 3 must be at least 4"),
        ({"noise_density": 1.0}, "noise_density 1.0 must lie between 0 and 1"),
        ({"mean_span_length": 0.5}, "mean_span_length 0.5 must be at least 1"),
        ({"input_length": 2_048}, "makes 114 spans of 3.0 tokens on average, more than there are sentinels"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SpanConfig(**settings)  # type: ignore[arg-type]


def test_shards_that_are_too_short(shards: TextShards) -> None:
    config = SpanConfig(input_length=1_600)
    assert config.num_spans <= MAX_SENTINELS
    with pytest.raises(UsageError, match="none of its shards has the 1777 tokens of one"):
        SpanReader(shards, config)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    prepare(tmp_path, {"train": [[list(range(5, 205))]]}, vocab_size=300)
    path = tmp_path / "train-00000.tokens"
    data = bytearray(path.read_bytes())
    data[80:82] = (60_000).to_bytes(2, "little")
    path.write_bytes(data)
    reader = SpanReader(TextShards(tmp_path, "train"), SpanConfig(input_length=64))
    with pytest.raises(ShoalError, match=r"train-00000.tokens: token id 60000 in a vocabulary of 300"):
        reader.batch(np.arange(40) // 2, np.arange(40) % 2)
