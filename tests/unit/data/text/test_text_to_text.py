"""Examples as texts to read and words to write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.data.text.classify import Columns, Example, read_classify
from shoal.data.text.text_to_text import TextToText, make_text_to_text, template_of, worded
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
    with pytest.raises(UsageError, match="gives two of the labels NO, no the same tokens"):
        made(tmp_path, ["a\tb\tNO", "b\ta\tno"])
    with pytest.raises(UsageError, match="max_seq_length 1 has no room"):
        made(tmp_path, ["a\tb\tyes", "b\ta\tno"], max_seq_length=1)
