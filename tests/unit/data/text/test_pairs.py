"""Pairs with labels against the tokenizer's own encoding and the plain rule for what is too long."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shoal.data.text.classify import Columns, cut_longer, make_pairs, read_classify
from shoal.errors import UsageError

LABELS = ("no", "yes")
ROWS = [
    ("a b c", "d e", "yes"),
    ("a", "b c d e f g", "no"),
    ("c c c c c", "d d d d d", "yes"),
    ("[SEP]", "", "no"),
]


@pytest.fixture
def tokenizer() -> Tokenizer:
    vocabulary = {token: k for k, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefg"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[CLS]", "[SEP]"])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def examples(folder: Path) -> Path:
    path = folder / "rows.tsv"
    path.write_text("sentence1\tsentence2\tlabel\n" + "".join("\t".join(row) + "\n" for row in ROWS))
    return path


def columns(*, pairs: bool) -> Columns:
    return Columns() if pairs else Columns(second=None)


@pytest.mark.parametrize("pairs", [True, False])
def test_sequences_are_those_of_the_tokenizer(tokenizer: Tokenizer, tmp_path: Path, pairs: bool) -> None:
    data = read_classify(examples(tmp_path), columns(pairs=pairs), labels=LABELS)
    features = make_pairs(data, tokenizer, max_seq_length=64)
    tokenizer.encode_special_tokens = True
    for k, example in enumerate(data.examples):
        wanted = tokenizer.encode(example.first, example.second)
        inside = slice(features.bounds[k], features.bounds[k + 1])
        assert features.tokens[inside].tolist() == wanted.ids
        assert features.types[inside].tolist() == wanted.type_ids
    assert features.labels.tolist() == [1, 0, 1, 0]
    assert features.num_cut == 0 and len(features) == 4


def test_what_is_too_long_is_cut(tokenizer: Tokenizer, tmp_path: Path) -> None:
    features = make_pairs(
        read_classify(examples(tmp_path), Columns(), labels=LABELS), tokenizer, max_seq_length=8
    )
    a, b, c, d = (tokenizer.token_to_id(token) for token in "abcd")
    rows = [features.tokens[i:j].tolist() for i, j in itertools.pairwise(features.bounds)]
    assert rows[0] == [2, a, b, c, 3, d, tokenizer.token_to_id("e"), 3]  # as long as may be
    assert rows[1] == [2, a, 3, b, c, d, tokenizer.token_to_id("e"), 3]
    assert rows[2] == [2, c, c, c, 3, d, d, 3]
    assert features.num_cut == 2


def test_cutting_is_taking_tokens_off_the_longer_text_one_by_one() -> None:
    for first, second, room in itertools.product(range(9), range(9), range(2, 10)):
        a, b = first, second
        while a + b > room:
            a, b = (a - 1, b) if a > b else (a, b - 1)
        found = cut_longer(np.array([first]), np.array([second]), room)
        assert (int(found[0][0]), int(found[1][0])) == (a, b), (first, second, room)


def test_no_room_and_no_special_tokens_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = read_classify(examples(tmp_path), Columns(), labels=LABELS)
    with pytest.raises(UsageError, match="max_seq_length 4 has no room beside 3 special tokens"):
        make_pairs(data, tokenizer, max_seq_length=4)
    bare = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UsageError, match="no special tokens before, between and after a pair"):
        make_pairs(data, bare, max_seq_length=64)
