"""Examples as texts to read and words to write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from shoal.data.text.classify import Columns, Example, read_classify
from shoal.data.text.text_to_text import (
    TextToText,
    make_text_to_text,
    read_text_pairs,
    template_of,
    worded,
)
from shoal.data.text.tokenizer import train_tokenizer
from shoal.errors import UsageError

PAIR = Example("A man sings.", "A {first} sings.", 0)
END, PAD = 3, 0


def made(tmp_path: Path, lines: list[str], **settings: int) -> TextToText:
    path = tmp_path / "some.tsv"
    path.write_text("\n".join(["sentence1\tsentence2\tgold_label", *lines]) + "\n")
    tokenizer = train_tokenizer(
        "wordpiece", ["mnli hypothesis premise : a b yes no"] * 5, vocab_size=90, lowercase=True
    )
    return make_text_to_text(
        read_classify(path, Columns(), labels=None),
        tokenizer,
        template=template_of("mnli", has_pairs=True),
        end_id=END,
        pad_id=PAD,
        **{"max_seq_length": 64, **settings},
    )


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("mnli", "mnli hypothesis: A {first} sings. premise: A man sings."),
        ("qqp", "qqp question1: A man sings. question2: A {first} sings."),
        ("rte", "rte sentence1: A man sings. sentence2: A {first} sings."),
    ],
)
def test_wording_of_pairs(task: str, expected: str) -> None:
    assert worded(template_of(task, has_pairs=True), PAIR) == expected


def test_wording_of_single_texts() -> None:
    single = Example("Good.", None, 1)
    assert worded(template_of("sst2", has_pairs=False), single) == "sst2 sentence: Good."
    assert worded("{second}{first}!", single) == "Good.!"


def test_batches_hold_words_ends_and_padding(tmp_path: Path) -> None:
    texts = made(tmp_path, ["a\tb b b\tyes", "b\ta\tno"])
    batch = texts.batch(np.array([1, 0]))
    lengths = batch["attention_mask"].sum(axis=1).tolist()
    assert lengths == texts.lengths[[1, 0]].tolist() and lengths[0] + 2 == lengths[1]
    assert batch["input_ids"][0, lengths[0] - 1] == batch["input_ids"][1, -1] == END
    assert batch["input_ids"][0, lengths[0] :].tolist() == [PAD, PAD]
    for row, label in ((0, "no"), (1, "yes")):
        word = texts.words[texts.data.labels.index(label)]
        assert word[-1] == END
        assert batch["labels"][row].tolist() == [*word, *[-100] * (texts.longest_word - len(word))]


def test_long_inputs_are_cut_and_still_end(tmp_path: Path) -> None:
    whole, cut = (made(tmp_path, ["a\tb b b b b\tyes", "a\ta\tno"], max_seq_length=n) for n in (64, 9))
    assert (whole.num_cut, cut.num_cut) == (0, 1)
    assert cut.tokens[:9].tolist() == [*whole.tokens[:8].tolist(), END]


def test_what_spells_no_label_is_none(tmp_path: Path) -> None:
    texts = made(tmp_path, ["a\tb\tyes", "b\ta\tno"])
    no, yes = texts.words
    assert texts.label_of(np.array([*no, 7, 7])) == 0
    assert texts.label_of(np.array(yes)) == 1
    assert texts.label_of(np.array([*no[:-1], 7])) == 2, "without an end it is another word"
    assert texts.label_of(np.array([END])) == 2


def test_labels_with_the_same_tokens(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gives two of the labels no, nó the same tokens"):
        made(tmp_path, ["a\tb\tnó", "b\ta\tno"])
    with pytest.raises(UsageError, match="max_seq_length 1 has no room"):
        made(tmp_path, ["a\tb\tyes", "b\ta\tno"], max_seq_length=1)


SOURCES, TARGETS = ["a b a", "b", "a"], ["b b b b", "a", "b"]


def text_pairs(folder: Path) -> list[Path]:
    """Write the same texts in each format."""
    paths = [folder / f"texts.{end}" for end in ("tsv", "jsonl", "parquet")]
    pairs = list(zip(SOURCES, TARGETS, strict=True))
    paths[0].write_text("".join(f"{a}\t{b}\n" for a, b in [("from", "to"), *pairs]))
    paths[1].write_text("".join(json.dumps({"to": b, "other": 1, "from": a}) + "\n" for a, b in pairs))
    table = pa.table({"to": TARGETS, "number": [1, 2, 3], "from": SOURCES})
    pyarrow.parquet.write_table(table, paths[2], row_group_size=2)
    return paths


def test_texts_and_their_targets_in_each_format(tmp_path: Path) -> None:
    for path in text_pairs(tmp_path):
        data = read_text_pairs(path, source="from", target="to")
        assert [example.first for example in data.examples] == SOURCES
        assert [data.labels[example.label] for example in data.examples] == TARGETS
        with pytest.raises(UsageError, match=r"there is no column 'form'.*Did you mean 'from'"):
            read_text_pairs(path, source="form", target="to")
    labels = {path: read_classify(path, Columns(first="from", second=None, label=("to",)), labels=None)
              for path in text_pairs(tmp_path)}  # fmt: skip
    assert len({data.labels for data in labels.values()}) == 1
    missing = pa.table({"from": ["a", None], "to": ["b", "b"]})
    pyarrow.parquet.write_table(missing, tmp_path / "some.parquet")
    some = read_text_pairs(tmp_path / "some.parquet", source="from", target="to")
    assert len(some.examples) == 1 and some.bad is not None
    assert some.bad.counts == {"a row whose text is null": 1}


def test_targets_are_cut_and_padded_to_those_of_the_batch(tmp_path: Path) -> None:
    data = read_text_pairs(text_pairs(tmp_path)[0], source="from", target="to")
    tokenizer = train_tokenizer("wordpiece", ["task : a b"] * 5, vocab_size=90, lowercase=True)
    a, b = (tokenizer.token_to_id(word) for word in "ab")
    texts = make_text_to_text(
        data, tokenizer, template="task: {first}", max_seq_length=64, end_id=END, pad_id=PAD,
        max_target_length=4,
    )  # fmt: skip
    assert (texts.num_cut, texts.num_targets_cut, texts.longest_word) == (0, 1, 4)
    assert texts.batch(np.array([0, 1]))["labels"].tolist() == [[b, b, b, END], [a, END, -100, -100]]
    assert texts.batch(np.array([2, 1]))["labels"].tolist() == [[b, END], [a, END]]
    wide = replace(texts, width=9, target_width=5).batch(np.array([2]))
    assert wide["labels"].tolist() == [[b, END, -100, -100, -100]] and wide["input_ids"].shape == (1, 9)
    with pytest.raises(UsageError, match="max_target_length 1 has no room"):
        make_text_to_text(
            data, tokenizer, template="{first}", max_seq_length=64, end_id=END, pad_id=PAD,
            max_target_length=1,
        )  # fmt: skip
