"""Sentences to token ids, each distinct word once.

Running text repeats its words: the 9 MB of ``builtin`` have 1.4 million words but 60 thousand different
ones. Where a tokenizer treats each word by itself, a dictionary of words gives the same ids as the tokenizer
at many times its speed. Whether it does is read off its parts; and only sentences of printable ASCII take
this way, since nothing that a normaliser does to those reaches across a blank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shoal.json_text import parse_json

_LOCAL_NORMALIZERS = frozenset(
    ("Replace", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Lowercase", "Precompiled", "BertNormalizer")
)
_LOCAL_PRE_TOKENIZERS = frozenset(("BertPreTokenizer", "WhitespaceSplit", "Punctuation", "Digits", "Split"))
_WORDS_A_TEXT = 128
_MAX_WORDS = 400_000
"""The dictionary starts anew beyond this: about 100 MB, since large corpora never run out of new words."""


class SentenceEncoder:
    """Turns sentences into token ids exactly as ``tokenizer`` does, without special tokens around them.

    Names of special tokens in the text ("[MASK]") are ordinary characters. ``unknown_word``, if given,
    stands for the unknown token wherever it is in a sentence (WikiText writes ``<unk>``).
    """

    def __init__(self, tokenizer: Tokenizer, *, unknown_id: int, unknown_word: str | None = None) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._unknown_id = unknown_id
        self._unknown_word = unknown_word
        self._by_word = words_stand_alone(tokenizer)
        self._ids_of: dict[str, bytes] = {}

    def encode(self, sentences: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Return the ids of each sentence (single blanks between words), uint32 ``[num_tokens]``."""
        word = self._unknown_word
        if word is None or not any(word in sentence for sentence in sentences):
            return self._encode(sentences)
        parts = [sentence.split(word) for sentence in sentences]
        encoded = iter(self._encode([part.strip() for part in chain.from_iterable(parts)]))
        unknown = np.array([self._unknown_id], dtype=np.uint32)
        joined = []
        for sentence_parts in parts:
            pieces = [next(encoded)]
            for _ in sentence_parts[1:]:
                pieces += [unknown, next(encoded)]
            joined.append(np.concatenate(pieces))
        return joined

    def _encode(self, sentences: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        plain = [self._by_word and s.isascii() and s.isprintable() for s in sentences]
        words = [
            sentence.split(" ") if is_plain else None
            for sentence, is_plain in zip(sentences, plain, strict=True)
        ]
        self._learn(set(chain.from_iterable(some for some in words if some is not None)))
        others = [sentence for sentence, is_plain in zip(sentences, plain, strict=True) if not is_plain]
        rest = iter(self._tokenizer.encode_batch_fast(others, add_special_tokens=False) if others else [])
        # joining bytes takes half the time of chaining lists of numbers
        ids_of = self._ids_of.__getitem__
        return [
            np.array(next(rest).ids, dtype=np.uint32)
            if some is None
            else np.frombuffer(b"".join(map(ids_of, some)), dtype=np.uint32)
            for some in words
        ]

    def _learn(self, words: set[str]) -> None:
        """Encode the words that are new, many in one text: alone each costs 15 µs, together 2 µs."""
        if len(self._ids_of) > _MAX_WORDS:
            self._ids_of.clear()
        new = sorted(words.difference(self._ids_of))
        groups = [new[start : start + _WORDS_A_TEXT] for start in range(0, len(new), _WORDS_A_TEXT)]
        encodings = self._tokenizer.encode_batch(
            [" ".join(group) for group in groups], add_special_tokens=False
        )
        for group, encoding in zip(groups, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.uint32)
            word_starts = np.cumsum([0] + [len(word) + 1 for word in group])
            # a token is of the word that it ends in; one that is a blank alone ("▁") is of the next word
            token_ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
            edges = np.searchsorted(token_ends, word_starts, side="left").tolist()
            for word, begin, end in zip(group, edges[:-1], edges[1:], strict=True):
                self._ids_of[word] = ids[begin:end].tobytes()


def words_stand_alone(tokenizer: Tokenizer) -> bool:
    """Tell whether the ids of an ASCII sentence are those of its words, one after the other.

    True where every part of the tokenizer is known to look at one word only; in doubt False.
    """
    parts = parse_json(tokenizer.to_str(), "the tokenizer")
    if any(not token["special"] for token in parts["added_tokens"]):
        return False
    normalizers = _flat(parts["normalizer"], "normalizers")
    pre_tokenizers = _flat(parts["pre_tokenizer"], "pretokenizers")
    splits = any(_splits_at_blanks(part) for part in pre_tokenizers)
    return (
        splits
        and all(
            (part["type"] in _LOCAL_NORMALIZERS and " " not in part.get("pattern", {}).get("String", ""))
            for part in normalizers
        )
        and all(_splits_at_blanks(part) or part["type"] in _LOCAL_PRE_TOKENIZERS for part in pre_tokenizers)
    )


def _splits_at_blanks(part: dict[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return bool(part["prepend_scheme"] == "always" and part["split"])
    return part["type"] in ("BertPreTokenizer", "WhitespaceSplit")


def _flat(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]
