"""Splits English text into sentences by rules, in one pass of a regular expression. Standard library only.

A *candidate* is a run of ``. ! ? …`` with the quotes and brackets that close after it, then white space, then
a character that a sentence can begin with. A candidate is rejected if the next word is in lower case, or if
the full stop belongs to a title (``Dr.``), an initial (``J. S. Bach``), a numbered item (``No. 5``, ``1.
Introduction``) or another short form whose next word rarely begins a sentence (``U.S. Army`` against ``the
U.S. The``).
"""

from __future__ import annotations

import re


def word_set(text: str) -> frozenset[str]:
    """Return the words of ``text``."""
    return frozenset(text.split())


_JOINING = word_set(
    "mr mrs ms messrs mme mlle dr prof rev hon st ste mt ft gen col lt maj capt cmdr adm sgt cpl pvt gov sen"
    " rep supt insp vs cf viz e.g i.e eg ie fig figs eq eqs approx resp ca"
)
"""Abbreviations after which the sentence always continues."""

_JOINING_NUMBERS = word_set("no nos p pp ch chap vol vols op art arts sec secs ver v c b d")
"""Abbreviations before a number; before a word they are words (``The answer is no.``)."""

_NEXT_DECIDES = word_set(
    "inc ltd co corp bros llc plc jr sr esq al dept univ assn ave blvd"
    " jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri"
)
"""Abbreviations that may end a sentence, as dotted ones do (``U.S``, ``a.m``, ``Ph.D``)."""

_FIRST_WORDS = word_set(
    "a an the this that these those it its he she they we you his her their our my your there here in on at"
    " by for from with as if when while after before during since until although though however but and or so"
    " then thus hence therefore also note see use to what who why how where which some many most all each"
    " both one two three no not despite because moreover furthermore instead once only other"
)
"""Words that begin sentences and rarely names; they decide after such abbreviations."""

# possessive quantifiers and the look-behind keep "......" linear in its length
_CANDIDATE = re.compile(
    r"""(?<![.!?…])[.!?…]++
        (?P<close>[\"'”’»)\]}]*+)
        (?P<apart>(?:[ ]\")?)               # text in pieces: `on cooking . " Mating occurs`
        [ ]
        (?=[\"'“‘«(\[{¿¡`]*+[ ]?(?P<next>[^\W_]))""",
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"[^\s(\[{\"“‘«`]*$")
_NEXT_WORD = re.compile(r"[^\W\d_]+")
_DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}$")
_LONGEST_SHORT_FORM = 16


def normalise(text: str) -> str:
    """Return ``text`` with each run of white space replaced by one blank, and none at either end."""
    return " ".join(text.split())


def split_sentences(text: str) -> list[str]:
    """Split English prose into sentences.

    Only white space is lost: ``" ".join(split_sentences(text)) == normalise(text)``. Text without a sentence
    end is one sentence; white space gives an empty list. Text with detached punctuation (``on cooking .
    Mating occurs``, as in WikiText) is split at the same places.

        >>> split_sentences("Dr. Smith came. He left at 5 p.m. on Monday.")
        ['Dr. Smith came.', 'He left at 5 p.m. on Monday.']
    """
    text = normalise(text)
    sentences: list[str] = []
    start = 0
    for match in _CANDIDATE.finditer(text):
        if _ends_sentence(text, start, match):
            end = match.end("close")
            if match["apart"] and text.count('"', start, end) % 2 == 1:  # the quote closes
                end = match.end("apart")
            sentences.append(text[start:end])
            start = end + 1
    if start < len(text):
        sentences.append(text[start:])
    return sentences


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Return whether a candidate ends a sentence; ``start`` is the offset of the sentence."""
    following = match["next"]
    if following.islower():
        return False
    stop = text[match.start() : match.start("close")]
    if stop != ".":  # "!", "?", "...", "?!": a capital, a digit or a script without case begins a sentence
        return True
    last_word = _LAST_WORD.search(text, max(start, match.start() - _LONGEST_SHORT_FORM), match.start())
    word = last_word.group() if last_word else ""
    if match["close"] and len(word) != 1:
        return True
    form = word.lower()
    if form in _JOINING:
        return False
    if following.isdigit():
        return not (form in _JOINING_NUMBERS or form in _NEXT_DECIDES or _DOTTED.match(word))
    if word.isdigit():  # "1. Introduction", but "It began in 1990. They"
        return match.start() - len(word) != start
    if (len(word) == 1 and word.isupper()) or form in _NEXT_DECIDES or _DOTTED.match(word):
        next_word = _NEXT_WORD.match(text, match.start("next"))
        return next_word is not None and next_word.group().lower() in _FIRST_WORDS
    return True
