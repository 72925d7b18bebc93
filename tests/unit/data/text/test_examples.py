"""Examples: equal to the plain rules, true to the documents, with the statistics that the rules promise."""

import math
import pickle

import numpy as np
import plain_examples as plain
import pytest

from shoal.data.steps import evenly_spread
from shoal.data.text.examples import ExampleConfig, ExampleReader, unigram_entropy
from shoal.data.text.shards import TextShards
from shoal.errors import ShoalError, UsageError
from synthetic_text import CLS, MASK, PAD, SEP, UNK, assert_binomial, prepare, random_documents

MIXED = [5, 8, 30, 61, 62, 63, 200, 3, 1000, 500, 7, 64, 122, 123, 45]


def reader_of(directory, documents, *, num_shards=1, vocab_size=30_000, **config):
    prepare(directory, {"train": documents}, num_shards=num_shards, vocab_size=vocab_size)
    return ExampleReader(TextShards(directory, "train"), ExampleConfig(**config))


def flat(document):
    return [token for sentence in document for token in sentence]


def original_text(batch, row):
    """Undo masks and swap: (tokens of A, tokens of B) as they stand in the document."""
    ids = batch["input_ids"][row].copy()
    real = batch["masked_weights"][row] == 1
    ids[batch["masked_positions"][row][real]] = batch["masked_ids"][row][real]
    ids = ids[batch["attention_mask"][row] == 1].tolist()
    border = batch["token_type_ids"][row].tolist().index(1)
    first, second = ids[1 : border - 1], ids[border:-1]
    assert (ids[0], ids[border - 1], ids[-1]) == (CLS, SEP, SEP)
    return (second, first) if batch["labels"][row] else (first, second)


def whole_text(batch, row):
    a, b = original_text(batch, row)
    return a + b


def all_batches(reader, epochs=(0,), size=64):
    for epoch in epochs:
        for first in range(0, reader.num_examples, size):
            yield reader.batch(epoch, np.arange(first, min(first + size, reader.num_examples)))


# The oracle


@pytest.mark.parametrize("sentence_tokens", [4, 20, 10_000])
@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("pairs", ["order", "next", "none"])
def test_examples_are_those_of_the_plain_rules(tmp_path, sentence_tokens, num_shards, pairs):
    documents = random_documents(MIXED, vocab_size=300, sentence_tokens=sentence_tokens, unknown_share=0.02)
    reader = reader_of(
        tmp_path,
        documents,
        num_shards=num_shards,
        vocab_size=300,
        max_seq_length=64,
        max_predictions_per_seq=8,
        short_seq_prob=0.3,
        pairs=pairs,
        seed=5,
    )
    manifest = reader.shards.manifest
    for batch in all_batches(reader, epochs=(0, 1, 7), size=17):
        for row in range(len(batch["index"])):
            epoch, index = int(batch["epoch"][row]), int(batch["index"][row])
            expected = plain.example(documents, manifest, reader.config, epoch, index)
            for name, value in expected.items():
                assert batch[name][row].tolist() == value, (name, epoch, index)


@pytest.mark.parametrize(("max_ngram", "whole_words"), [(1, True), (1, False), (2, True), (5, True)])
def test_other_settings_follow_the_plain_rules(tmp_path, max_ngram, whole_words):
    documents = random_documents([150, 90], vocab_size=300)
    reader = reader_of(
        tmp_path,
        documents,
        vocab_size=300,
        max_seq_length=40,
        max_predictions_per_seq=39,
        max_ngram=max_ngram,
        whole_words=whole_words,
        mask_prob=0.6,
        seed=-3,
    )
    for batch in all_batches(reader, epochs=(3,)):
        for row, index in enumerate(batch["index"].tolist()):
            expected = plain.example(documents, reader.shards.manifest, reader.config, 3, index)
            for name, value in expected.items():
                assert batch[name][row].tolist() == value, (name, index)


def test_an_example_does_not_depend_on_its_company(tmp_path):
    reader = reader_of(tmp_path, random_documents(MIXED), num_shards=3, max_seq_length=64)
    whole = reader.batch(2, np.arange(reader.num_examples))
    order = np.random.default_rng(0).permutation(reader.num_examples)
    mixed = reader.batch(np.where(order % 2, 2, 3), order)
    again = pickle.loads(pickle.dumps(reader))
    for name, array in whole.items():
        odd = order % 2 == 1
        assert (mixed[name][odd] == array[order[odd]]).all(), name
        for index in (0, 5, reader.num_examples - 1):
            assert (again.batch(2, index)[name][0] == array[index]).all(), name


def test_shapes_and_types(tmp_path):
    reader = reader_of(tmp_path, random_documents(MIXED), max_seq_length=64, max_predictions_per_seq=9)
    batch = reader.batch(0, [3, 1, 2])
    shapes = {name: (array.shape, array.dtype.name) for name, array in batch.items()}
    assert shapes == {
        "input_ids": ((3, 64), "int64"),
        "token_type_ids": ((3, 64), "int64"),
        "attention_mask": ((3, 64), "int64"),
        "masked_positions": ((3, 9), "int64"),
        "masked_ids": ((3, 9), "int64"),
        "masked_weights": ((3, 9), "float32"),
        "labels": ((3,), "int64"),
        "epoch": ((3,), "int64"),
        "index": ((3,), "int64"),
        "dropout_keys": ((3,), "int64"),
    }
    assert all(array.flags.writeable for array in batch.values())


# Text


@pytest.mark.parametrize("sentence_tokens", [6, 25, 10_000])
def test_unmasked_and_swapped_back_it_is_the_document(tmp_path, sentence_tokens):
    documents = random_documents([900, 70, 130, 8], sentence_tokens=sentence_tokens)
    reader = reader_of(tmp_path, documents, max_seq_length=64)
    texts = [flat(document) for document in documents]
    place = {tuple(t[i : i + 4]): (d, i) for d, t in enumerate(texts) for i in range(len(t) - 3)}
    for batch in all_batches(reader, epochs=(0, 1)):
        for row in range(len(batch["index"])):
            a, b = original_text(batch, row)
            document, first = place[tuple((a + b)[:4])]
            assert a + b == texts[document][first : first + len(a + b)]
            assert len(a) and len(b)
            sentence_starts = set(np.cumsum([0] + [len(s) for s in documents[document]]).tolist())
            inside = sentence_starts & set(range(first + 1, first + len(a + b)))
            if inside:
                assert first + len(a) in inside
            else:
                assert len(a) == len(a + b) // 2


def test_windows_begin_at_sentences_and_are_full(tmp_path):
    documents = random_documents([5000] * 4, sentence_tokens=10)
    reader = reader_of(tmp_path, documents, max_seq_length=64, short_seq_prob=0)
    texts = [flat(document) for document in documents]
    place = {tuple(t[i : i + 4]): (d, i) for d, t in enumerate(texts) for i in range(len(t) - 3)}
    num_full = num_end = 0
    for batch in all_batches(reader, epochs=(0, 1)):
        for row in range(len(batch["index"])):
            text = whole_text(batch, row)
            document, first = place[tuple(text[:4])]
            starts = np.cumsum([0] + [len(s) for s in documents[document]]).tolist()
            # A sentence of more than 30 tokens may be entered in its middle.
            longest = max(len(s) for s in documents[document])
            assert first in starts or longest > 30
            at_end = first + len(text) == 5000
            assert len(text) == 61 or (at_end and len(text) >= 31)
            num_full += len(text) == 61
            num_end += at_end
    assert num_full >= 0.99 * 2 * reader.num_examples
    assert num_end >= 1


def test_no_token_stays_unread(tmp_path):
    """Over some epochs every token is seen, the first and the last of each document among them."""
    documents = random_documents([8, 61, 62, 100, 400, 1000], sentence_tokens=7, vocab_size=60_000)
    reader = reader_of(tmp_path, documents, vocab_size=60_000, max_seq_length=64, short_seq_prob=0)
    seen = set()
    for batch in all_batches(reader, epochs=range(25)):
        for row in range(len(batch["index"])):
            seen.update(whole_text(batch, row))
    assert seen == {token for document in documents for token in flat(document)}


def test_epochs_move_the_windows(tmp_path):
    """Window 8 of 17 lies around the middle; each epoch moves it by up to half a distance of 58.7."""
    documents = random_documents([1000], sentence_tokens=3)
    reader = reader_of(tmp_path, documents, max_seq_length=64)
    text = flat(documents[0])
    starts = [text.index(whole_text(reader.batch(epoch, 8), 0)[0]) for epoch in range(100)]
    assert 430 < min(starts) < 450
    assert 489 < max(starts) <= 499


def test_the_number_of_examples_follows_from_lengths(tmp_path):
    reader = reader_of(tmp_path, random_documents(MIXED), num_shards=3, max_seq_length=64)
    assert reader.num_examples == sum(math.ceil(length / 61) for length in MIXED if length >= 8)


# Next sentence


def unmasked(batch, row):
    """Undo masks: (first segment, second segment) as the model sees them."""
    plain_batch = {**batch, "labels": np.zeros_like(batch["labels"])}
    return original_text(plain_batch, row)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The documents, and (first segment, second segment, label) of each example of 60 epochs.

    Every token occurs once, so that a segment's document and place are known from its tokens.
    """
    documents = random_documents([900, 61, 8, 300, 5, 130, 12], sentence_tokens=9, vocab_size=60_000)
    unused = iter(range(5, 60_000))
    documents = [[[next(unused) for _ in sentence] for sentence in document] for document in documents]
    reader = reader_of(
        tmp_path_factory.mktemp("pairs"),
        documents,
        num_shards=3,
        vocab_size=60_000,
        max_seq_length=64,
        pairs="next",
    )
    found = [
        (*unmasked(batch, row), int(batch["labels"][row]))
        for batch in all_batches(reader, epochs=range(60))
        for row in range(len(batch["index"]))
    ]
    return documents, found


def test_a_second_segment_follows_or_is_of_another_document(pairs):
    documents, found = pairs
    texts = [flat(document) for document in documents]
    place = {token: (number, i) for number, text in enumerate(texts) for i, token in enumerate(text)}
    for first, second, label in found:
        (a, start), (b, begin) = place[first[0]], place[second[0]]
        assert first == texts[a][start : start + len(first)]
        assert second == texts[b][begin : begin + len(second)]
        assert (a != b) == bool(label)
        if not label:
            assert begin == start + len(first)
        else:
            sentence_starts = np.cumsum([0] + [len(s) for s in documents[b]]).tolist()
            longest = max(len(s) for s in documents[b])
            assert begin in sentence_starts or longest > 30


def test_half_of_the_second_segments_are_of_another_document(pairs):
    _, found = pairs
    assert_binomial(sum(label for _, _, label in found), len(found), 0.5)


def test_other_documents_come_with_equal_chance_and_short_ones_never(pairs):
    documents, found = pairs
    of_token = {token: i for i, document in enumerate(documents) for token in flat(document)}
    others = [of_token[second[0]] for first, second, label in found if label and of_token[first[0]] == 0]
    for number, document in enumerate(documents):
        if number and len(flat(document)) >= 8:
            assert_binomial(others.count(number), len(others), 1 / 5)
        else:
            assert number not in others


def test_lengths_do_not_tell_the_label(many_pairs):
    """All documents have 125 tokens: the second segment is as long as the one that it replaces."""
    batch = many_pairs
    lengths = batch["attention_mask"].sum(axis=1)
    full = lengths == 128
    assert_binomial(int(full[batch["labels"] == 1].sum()), int(batch["labels"].sum()), full.mean())
    assert full.mean() > 0.85


@pytest.fixture(scope="module")
def many_pairs(tmp_path_factory):
    documents = random_documents([125] * 2000, sentence_tokens=25, seed=3)
    reader = reader_of(tmp_path_factory.mktemp("many"), documents, max_seq_length=128, pairs="next")
    batches = list(all_batches(reader, size=500))
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def test_one_document_gives_no_next_sentences(tmp_path):
    with pytest.raises(UsageError, match=r"'train' has one document of at least 8 tokens, .*prepare more"):
        reader_of(tmp_path, random_documents([200, 7]), pairs="next")


# Statistics


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """4,000 documents of exactly one full window each, so that no other rule shortens a segment."""
    documents = random_documents([125] * 4000, sentence_tokens=25, seed=3)
    reader = reader_of(tmp_path_factory.mktemp("many"), documents, max_seq_length=128)
    batches = list(all_batches(reader, size=500))
    return reader, {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def test_half_of_the_pairs_are_swapped(many):
    _, batch = many
    assert_binomial(int(batch["labels"].sum()), len(batch["labels"]), 0.5)


def test_a_tenth_of_the_segments_is_short(many):
    _, batch = many
    lengths = batch["attention_mask"].sum(axis=1) - 3
    shorter = lengths[lengths < 125]
    # A short length is uniform over 8..125, and 125 itself cannot be told from the others.
    assert_binomial(len(shorter), len(lengths), 0.1 * (1 - 1 / 118))
    assert shorter.min() >= 8
    assert_binomial(int((shorter < 66).sum()), len(shorter), 58 / 117)


def test_15_percent_are_predicted(many):
    _, batch = many
    num_tokens = batch["attention_mask"].sum(axis=1)
    num_predictions = batch["masked_weights"].sum(axis=1)
    budgets = np.rint(num_tokens * 0.15)
    assert (num_predictions <= budgets).all()
    # Few n-grams may all be too long for what is left of the budget, but not many.
    assert (num_predictions == budgets)[num_tokens >= 40].all()
    assert abs(num_predictions.sum() / num_tokens.sum() - 0.15) < 0.002


def test_predictions_are_replaced_80_10_10(many):
    reader, batch = many
    real = batch["masked_weights"] == 1
    seen = np.take_along_axis(batch["input_ids"], batch["masked_positions"], axis=1)[real]
    targets = batch["masked_ids"][real]
    trials, num_ordinary = len(seen), reader.shards.manifest.vocab_size - 5
    assert_binomial(int((seen == MASK).sum()), trials, 0.8)
    assert_binomial(int((seen == targets).sum()), trials, 0.1 + 0.1 / num_ordinary)
    others = seen[(seen != MASK) & (seen != targets)]
    assert others.min() >= 5
    assert_binomial(int((others < 5 + num_ordinary // 2).sum()), len(others), 0.5)


def test_positions_ascend_and_point_at_text(many):
    _, batch = many
    for row in range(0, len(batch["index"]), 7):
        count = int(batch["masked_weights"][row].sum())
        positions = batch["masked_positions"][row]
        assert (np.diff(positions[:count]) > 0).all()
        assert (batch["masked_weights"][row] == np.repeat([1, 0], [count, len(positions) - count])).all()
        assert (positions[count:] == 0).all() and (batch["masked_ids"][row][count:] == 0).all()
        length = int(batch["attention_mask"][row].sum())
        border = int(batch["token_type_ids"][row].argmax())
        assert not set(positions[:count].tolist()) & {0, border - 1, length - 1}
        assert (positions[:count] < length).all()
        assert (batch["input_ids"][row][length:] == PAD).all()


def test_words_are_never_split(many):
    reader, batch = many
    continues = np.frombuffer(reader.shards.manifest.continues_word, dtype=bool)
    num_long_words = 0
    for row in range(0, len(batch["index"]), 3):
        a, b = original_text(batch, row)
        first, second = (b, a) if batch["labels"][row] else (a, b)
        real = batch["masked_weights"][row] == 1
        masked = set(batch["masked_positions"][row][real].tolist())
        for offset, segment in ((1, first), (len(first) + 2, second)):
            starts = [i for i, token in enumerate(segment) if not i or not continues[token]]
            for i, j in zip(starts, starts[1:] + [len(segment)], strict=True):
                word = set(range(offset + i, offset + j))
                assert masked >= word or not masked & word
                num_long_words += len(word) > 1 and masked >= word
    assert num_long_words > 100


def test_unknown_tokens_are_neither_predicted_nor_drawn(tmp_path):
    documents = random_documents([2000], unknown_share=0.3, vocab_size=40)
    reader = reader_of(tmp_path, documents, vocab_size=40, max_seq_length=64, mask_prob=0.5)
    for batch in all_batches(reader):
        real = batch["masked_weights"] == 1
        assert batch["masked_ids"][real].min() >= 5
        seen = np.take_along_axis(batch["input_ids"], batch["masked_positions"], axis=1)[real]
        assert set(seen[seen < 5].tolist()) == {MASK}
        assert (batch["input_ids"] == UNK).any()


# Lines of reference and errors


def test_unigram_entropy():
    assert unigram_entropy([7] * 5) == 0
    assert unigram_entropy([[1, 2], [3, 4]]) == pytest.approx(math.log(4), abs=1e-12)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_entropy([1, 1, 2, 1]) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="no tokens"):
        unigram_entropy([])


def test_evenly_spread():
    assert evenly_spread(10, None).tolist() == list(range(10))
    assert evenly_spread(10, 20).tolist() == list(range(10))
    assert evenly_spread(10, 4).tolist() == [0, 2, 5, 7]


def test_no_examples(tmp_path):
    with pytest.raises(UsageError, match=r"'train' gives no examples: of its 2 documents none has the 8"):
        reader_of(tmp_path, random_documents([7, 3]))


def test_a_damaged_token_is_named(tmp_path):
    reader = reader_of(tmp_path, random_documents([50]), vocab_size=30_000, max_seq_length=64)
    path = tmp_path / "train-00000.tokens"
    path.write_bytes((40_000).to_bytes(2, "little") * 50)
    with pytest.raises(ShoalError, match=r"train-00000.tokens: token id 40000 in a vocabulary of 30000"):
        reader.batch(0, 0)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"max_seq_length": 18}, "max_seq_length 18 must be from 19 to 65535"),
        ({"max_seq_length": 70_000}, "max_seq_length 70000"),
        ({"max_predictions_per_seq": 0}, "max_predictions_per_seq 0"),
        ({"max_predictions_per_seq": 512}, "max_predictions_per_seq 512"),
        ({"max_ngram": 0}, "max_ngram 0"),
        ({"mask_prob": 1.5}, "mask_prob 1.5"),
        ({"short_seq_prob": -0.1}, "short_seq_prob -0.1"),
    ],
)
def test_wrong_settings(setting, said):
    with pytest.raises(UsageError, match=said):
        ExampleConfig(**setting)
