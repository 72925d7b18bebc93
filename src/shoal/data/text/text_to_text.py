"""Turns classification into text-to-text examples for T5: a text as input, the words of the label as target.

"mnli hypothesis: … premise: …" becomes "entailment" (Raffel et al. 2020, section 2.4 and appendix D). Inputs
and targets end with the end token; long inputs are truncated at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shoal.data.text.classify import ClassifyData, Example
from shoal.data.text.sequences import Sequences
from shoal.data.text.special_tokens import Int64Array, encode_texts, plain, ranges
from shoal.errors import UsageError

TEMPLATES: Mapping[str, str] = {
    "mnli": "mnli hypothesis: {second} premise: {first}",
    "qnli": "qnli question: {first} sentence: {second}",
    "qqp": "qqp question1: {first} question2: {second}",
}
"""T5's templates of GLUE tasks; all others name their texts sentence1 and sentence2, or sentence."""

IGNORED = -100
"""The label of positions without a target."""


@dataclass(frozen=True, kw_only=True)
class TextToText(Sequences):
    """Inputs, and their targets."""

    data: ClassifyData
    words: tuple[tuple[int, ...], ...]
    """The tokens of each label, the end token included; without labels there are only inputs."""
    pad_id: int
    num_cut: int
    """Inputs that were truncated."""
    width: int = 0
    """Columns to which inputs are padded, for models of fixed shapes; 0: those of the longest in a batch."""

    @property
    def longest_word(self) -> int:
        """Tokens of the longest label; 0 without labels."""
        return max(map(len, self.words), default=0)

    def batch(self, indices: Int64Array) -> dict[str, npt.NDArray[Any]]:
        """Return the sequences ``indices`` padded to their longest, or to ``width``.

        - ``input_ids``, ``attention_mask`` int64 ``[B, S]``: the mask is 0 in the padding;
        - ``labels`` int64 ``[B, longest_word]``: -100 behind the end token.
        """
        own = [self.data.examples[index].label for index in indices] if self.words else []
        return self.batch_with(indices, own)

    def batch_with(self, indices: Int64Array, labels: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Return :meth:`batch` with other labels, given by their numbers."""
        lengths = self.lengths[indices]
        there = np.arange(self.width or int(lengths.max())) < lengths[:, None]
        ids = np.full(there.shape, self.pad_id, dtype=np.int64)
        ids[there] = self.tokens[ranges(self.bounds[indices], lengths)]
        targets = np.full((len(indices), self.longest_word), IGNORED, dtype=np.int64)
        for row, label in enumerate(labels):
            targets[row, : len(self.words[label])] = self.words[label]
        return {"input_ids": ids, "attention_mask": there.astype(np.int64), "labels": targets}

    def label_of(self, written: npt.NDArray[np.integer[Any]]) -> int:
        """Return the index of the label that the tokens spell up to the end token; ``len(words)`` for
        none."""
        text = tuple(int(token) for token in written)
        found = (k for k, word in enumerate(self.words) if text[: len(word)] == word)
        return next(found, len(self.words))


def make_text_to_text(
    data: ClassifyData, tokenizer: Tokenizer, *, template: str, max_seq_length: int, end_id: int, pad_id: int
) -> TextToText:
    """Fill the template with all examples and tokenise them; special tokens in a text are plain characters.

    Args:
        template: the input, with ``{first}`` and ``{second}`` in place of the texts.
        max_seq_length: most tokens of an input, the end token included.

    Raises:
        UsageError: two labels are the same to the tokenizer, or no room is left for a text.
    """
    if max_seq_length < 2:
        raise UsageError(f"max_seq_length {max_seq_length} has no room for a text and its end; raise it")
    with plain(tokenizer):
        ids, begins, _ = encode_texts(
            tokenizer, [worded(template, example) for example in data.examples], with_offsets=False
        )
        names, at, _ = encode_texts(tokenizer, data.labels, with_offsets=False)
    words = tuple((*names[at[k] : at[k + 1]].tolist(), end_id) for k in range(len(data.labels)))
    if len(set(words)) != len(words):
        raise UsageError(
            f"{data.path}: the tokenizer gives two of the labels {', '.join(data.labels)} the same tokens; "
            "rename one"
        )
    lengths = np.diff(begins)
    kept = np.minimum(lengths, max_seq_length - 1)
    bounds = np.concatenate([[0], np.cumsum(kept + 1)])
    tokens = np.full(bounds[-1], end_id, dtype=np.int32)
    tokens[ranges(bounds[:-1], kept)] = ids[ranges(begins[:-1], kept)]
    return TextToText(
        data=data,
        tokens=tokens,
        bounds=bounds,
        words=words,
        pad_id=pad_id,
        num_cut=int((lengths > kept).sum()),
    )


def template_of(task: str, *, has_pairs: bool) -> str:
    """Return T5's template of a task."""
    texts = "sentence1: {first} sentence2: {second}" if has_pairs else "sentence: {first}"
    return TEMPLATES.get(task, f"{task} {texts}")


def worded(template: str, example: Example) -> str:
    """Return the input text of an example."""
    before, _, behind = template.partition("{first}")
    second = example.second or ""
    return before.replace("{second}", second) + example.first + behind.replace("{second}", second)


def text_to_text_tokenizer(data: Path) -> Any:
    """Return the tokenizer of prepared text as T5 uses it: with an end token and the sentinels."""
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    from shoal.data.manifest import Manifest
    from shoal.data.text.span_config import MAX_SENTINELS, sentinel_id

    manifest = Manifest.load(data)
    tokenizer = Tokenizer.from_file(str(data / manifest.tokenizer.file))
    end = tokenizer.id_to_token(manifest.sep_id)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, manifest.sep_id)]
    )
    if tokenizer.get_vocab_size(with_added_tokens=True) == manifest.vocab_size:  # else ids would not be those
        names = [f"<extra_id_{number}>" for number in reversed(range(MAX_SENTINELS))]
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        assert tokenizer.token_to_id("<extra_id_0>") == sentinel_id(manifest.vocab_size, 0)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=tokenizer.id_to_token(manifest.pad_id),
        unk_token=tokenizer.id_to_token(manifest.unk_id),
    )
