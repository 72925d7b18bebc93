"""A bounded sample of the source: what trains the tokenizer and where the validation split begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.data.corpus import Errors, Piece, read_articles
from shoal.data.pieces import article_rank
from shoal.data.sentences import split_sentences
from shoal.errors import UsageError

_SAMPLE_CHARACTERS = 10 << 20
"""Enough for tens of thousands of subwords; sentencepiece takes about 8 s of processor time for it."""
_PART_CHARACTERS = 64 << 10
"""At least this much is read at each place, so the number of places is bounded too."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Articles from evenly spread pieces; ``is_whole`` if these are all that the source has."""

    articles: list[str]
    is_whole: bool


def read_sample(parts: Sequence[Piece], errors: Errors) -> Sample:
    """Read the beginnings of evenly spread pieces, about 10 million characters in all.

    Raises:
        UsageError: there is no article, or a piece cannot be read (see ``read_articles``).
    """
    num_places = min(len(parts), _SAMPLE_CHARACTERS // _PART_CHARACTERS)
    articles: list[str] = []
    is_whole = num_places == len(parts)
    room = 0
    for place in range(num_places):
        room += _SAMPLE_CHARACTERS // num_places
        for article in read_articles(parts[place * len(parts) // num_places], errors):
            if room <= 0:
                is_whole = False
                break
            articles.append(article)
            room -= len(article)
    if not articles:
        first = parts[0][0].path
        raise UsageError(
            f"{first}: there is no article in the source, only white space; is it the one meant?"
        )
    return Sample(articles=articles, is_whole=is_whole)


def held_out_rank(sample: Sample, validation: float, seed: int) -> float:
    """Return the greatest ``article_rank`` of the validation split; -1 if nothing is held out.

    Of a source that was sampled whole, the share is exact and never empty.

    Raises:
        UsageError: there is only one article.
    """
    if validation == 0:
        return -1.0
    if not sample.is_whole:
        return validation
    ranks = sorted({article_rank(article, seed) for article in sample.articles})
    if len(ranks) < 2:
        raise UsageError(
            "the source has only one article (or copies of one), so none can be held out for validation; "
            "add articles, choose another --format, or pass --validation 0"
        )
    num_held_out = min(max(1, round(validation * len(ranks))), len(ranks) - 1)
    return ranks[num_held_out - 1]


def training_sentences(sample: Sample, unknown_word: str | None) -> Iterator[str]:
    """Yield the sample's sentences for a trainer; words that stand for unknown ones are left out."""
    for article in sample.articles:
        if unknown_word is not None:
            article = article.replace(unknown_word, "")
        for paragraph in article.split("\n"):
            yield from split_sentences(paragraph)
