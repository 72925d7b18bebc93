"""The sentence splitter on cases written down by hand, and its one invariant on anything."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.text.sentences import normalise, split_sentences
from shoal.env.settings import test_data_dir as data_dir

# "|" marks where a sentence ends; everything else is the text
CASES = [
    "It rained. | We left.",
    "Dr. Smith met Mrs. Jones at St. Mary's. | They talked.",
    "J. S. Bach was born in 1685. | He died in 1750.",
    "The U.S. Army landed at 5 a.m. on Monday. | It was cold.",
    "He lives in the U.S. | The house is old.",
    "It costs 3.50 dollars. | That is 0.5 less than v. 2 did.",
    "See Fig. 3 and Eq. 4, e.g. The first one, i.e. Newton's.",
    "Is it so? | Yes! | It is.",
    '"Why?" he asked. | "Because," she said.',
    'He said "stop." | Then he left. | (It was late.) | Nobody spoke.',
    "Wait... | What was that? | It went on... and on.",
    "Well … | That is all.",
    "He works at Acme Inc. | The firm is old.",
    "He works at Acme Inc. Chicago.",
    "Smith et al. (2010) showed this. | So did Jones et al. | The rest agreed.",
    "The answer is no. | Nobody came. | But No. 5 is alive.",
    "1. Introduction to the matter. | 2. Methods and so on.",
    "It began in 1990. | They ended it in 1995. | 25 people came.",
    "Call numpy.linalg.norm(x) first. | Version 2.0.1 is out.",
    "What?! | Never. | He has a Ph.D. in law. | She has a Ph.D. | They met there.",
    "Use vitamin C. | It helps. | Use vitamin C. Linus did.",
    "They met on Jan. 5 in Paris. | It was in Dec. | The end.",
    "The lobsters turn red on cooking . | Mating occurs only in the summer .",
    'The lobsters become " lobster red " on cooking . | Mating occurs in the summer .',
    'He said " It is red . " | Mating occurs . | " Come back , " she said .',
    "L'été est fini. | Élodie est partie. | Über allem.",
    "He wrote “It is over.” | Then he slept.",
    "No end here",
    "   \n\t ",
    "One line\nand another. | A\u00a0non-breaking space.",
]


@pytest.mark.parametrize("case", CASES)
def test_written_cases(case: str) -> None:
    expected = [normalise(part) for part in case.split("|")]
    assert split_sentences(case.replace("|", "")) == [part for part in expected if part]


PIECES = st.sampled_from(
    [".", "...", "!", "?", "…", '"', "'", ")", "(", " ", "\n", "Dr", "U.S", "a", "The", "7"]
)


@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)))
def test_only_white_space_is_lost(text: str) -> None:
    sentences = split_sentences(text)
    assert " ".join(sentences) == normalise(text)
    assert all(sentence and sentence == normalise(sentence) for sentence in sentences)


@pytest.mark.parametrize("unit", [".", '."', ". ", "?!) ", "A. ", '. " '])
def test_time_grows_with_the_length_alone(unit: str) -> None:
    """Half a million characters of nothing but punctuation: quadratic rules would take minutes."""
    start = time.monotonic()
    split_sentences(unit * (500_000 // len(unit)))
    assert time.monotonic() - start < 20


def test_real_text_gives_sentences_of_a_usual_length() -> None:
    path = data_dir() / "wikitext2" / "valid.txt"
    if not path.is_file():
        pytest.skip(f"no WikiText-2 in {data_dir()}; set SHOAL_TEST_DATA")
    sentences = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if re.match(r"\s*=", line):
            continue
        parts = split_sentences(line)
        assert " ".join(parts) == normalise(line)
        sentences += parts
    num_words = sum(len(sentence.split()) for sentence in sentences)
    assert 20 < num_words / len(sentences) < 32  # WikiText's articles have 25 pieces a sentence
    assert sum(sentence[-1] in '.!?"' for sentence in sentences) / len(sentences) > 0.95
    starts = sum(not sentence.lstrip("\"'( ")[:1].islower() for sentence in sentences)
    assert starts / len(sentences) > 0.98
