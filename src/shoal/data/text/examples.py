"""Makes batches of masked-LM examples of one or two segments, a pure function of (seed, epoch, index).

Only tokens are stored; the segments, masks and label of an example are drawn while reading, from a generator
keyed by seed, epoch and index. Reading an example again, in another batch, worker or process, gives the same
arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.packing import Packed, pack_padded
from shoal.data.steps import Reader, example_names
from shoal.data.text.masking import (
    MAX_SEQ_LENGTH,
    choose_tokens,
    prediction_budgets,
    replace_tokens,
    split_ngrams,
)
from shoal.data.text.segments import MIN_TOKENS, PairTask, Segments, Windows, gather
from shoal.data.text.shards import TextShards
from shoal.decide.rng import Int64Array, Stream, UInt64Array, draw, dropout_keys, random_keys
from shoal.errors import UsageError, require_positive

NUM_SPECIAL = 3
"""Special tokens of [CLS] A [SEP] B [SEP]; [CLS] A [SEP] has one less."""

_SEGMENTS, _NGRAMS, _CHOICE, _REPLACEMENT = range(4)  # streams of one example


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """Length, masking and pairing of examples.

    Attributes:
        max_seq_length: tokens of an example at most, special tokens included.
        max_predictions_per_seq: masked tokens of an example at most.
        mask_prob: fraction of the tokens that is predicted.
        max_ngram: longest run of words that is masked together.
        whole_words: mask all tokens of a word or none.
        pairs: task on two segments: ``"order"`` (ALBERT), ``"next"`` (BERT) or ``"none"``.
        short_seq_prob: fraction of the examples that is shorter than possible.
        seed: of the order, the segments and the masks.

    Raises:
        UsageError: a value is out of its range.
    """

    max_seq_length: int = 512
    max_predictions_per_seq: int = 20
    mask_prob: float = 0.15
    max_ngram: int = 3
    whole_words: bool = True
    pairs: PairTask = "order"
    short_seq_prob: float = 0.1
    seed: int = 42

    @property
    def num_special(self) -> int:
        """Special tokens of an example."""
        return NUM_SPECIAL - (self.pairs == "none")

    def __post_init__(self) -> None:
        shortest = 2 * MIN_TOKENS + NUM_SPECIAL
        if not shortest <= self.max_seq_length <= MAX_SEQ_LENGTH:
            raise UsageError(
                f"max_seq_length {self.max_seq_length} must be from {shortest} to {MAX_SEQ_LENGTH}"
            )
        if not 1 <= self.max_predictions_per_seq < self.max_seq_length:
            raise UsageError(
                f"max_predictions_per_seq {self.max_predictions_per_seq} must be at least 1 and less than "
                f"max_seq_length {self.max_seq_length}"
            )
        require_positive("", self, "max_ngram")
        for name in ("mask_prob", "short_seq_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} {getattr(self, name)} must be a probability, from 0 to 1")


class ExampleReader(Reader):
    """Makes masked-LM examples from the shards of a split: packed micro-batches of any epoch.

    Masks, segments and pairs are pure functions of (seed, epoch, index), so every worker can make every
    example. It is also an indexable dataset for a ``torch.utils.data.DataLoader``. Only paths and numbers are
    pickled.

    Args:
        shards: of one split.
        config: length, masking and pairing of the examples.

    Raises:
        UsageError: the split has no document long enough for an example.

    Source: Devlin et al. 2018 (arXiv 1810.04805) and Lan et al. 2019 (arXiv 1909.11942), sections 3.1.

    Example (``runs/text`` was written by ``shoal prepare text``):

        >>> from pathlib import Path
        >>> reader = ExampleReader(TextShards(Path("runs/text"), "train"), ExampleConfig(max_seq_length=32))
        >>> batch = reader.micro_batch(reader.batch(0, [0, 1, 2]))
        >>> batch["cu_seqlens"].shape, batch["max_seqlen"] <= 32
        ((4,), True)
    """

    def __init__(self, shards: TextShards, config: ExampleConfig) -> None:
        """Number the examples."""
        self.shards, self.config = shards, config
        self.seed, self.example_tokens = config.seed, config.max_seq_length
        self._windows = Windows(
            shards,
            num_text_tokens=config.max_seq_length - config.num_special,
            short_seq_prob=config.short_seq_prob,
            seed=config.seed,
            pairs=config.pairs,
        )
        if not self.num_examples:
            raise UsageError(
                f"{shards.location}: the split {shards.split!r} gives no examples: of its "
                f"{shards.num_documents} documents none has the {MIN_TOKENS} tokens that a pair of segments "
                "needs; prepare more or longer text"
            )
        manifest = shards.manifest
        self._is_special = np.zeros(manifest.vocab_size, dtype=bool)
        self._is_special[list(manifest.special_ids)] = True
        self._ordinary_ids = np.flatnonzero(~self._is_special)
        self._continues_word = np.frombuffer(manifest.continues_word, dtype=np.bool_)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ExampleReader, (self.shards, self.config), {"epoch": self.epoch})

    @property
    def num_examples(self) -> int:
        return self._windows.num_examples

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Packed:
        """Return the examples as models take them (``packed``)."""
        return packed(arrays)

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the examples ``indices`` (``[B]``, below ``num_examples``) as they are in ``epochs``.

        With T = max_seq_length and P = max_predictions_per_seq:

        - ``input_ids`` int64 [B, T]: [CLS] first segment [SEP] second segment [SEP], then padding; without a
          task of two segments, [CLS] text [SEP];
        - ``token_type_ids`` int64 [B, T]: 1 in the second segment and its [SEP];
        - ``attention_mask`` int64 [B, T]: 0 in the padding;
        - ``masked_positions`` int64 [B, P]: ascending, then 0;
        - ``masked_ids`` int64 [B, P]: the original tokens, then 0;
        - ``masked_weights`` float32 [B, P]: 1 for each prediction, then 0;
        - ``labels`` int64 [B]: 1 if the segments are swapped, or the second is of another document;
        - ``epoch``, ``index`` int64 [B]: of the examples;
        - ``dropout_keys`` int64 [B]: random key of each example's dropout masks.

        Raises:
            ShoalError: a shard holds a token id beyond the vocabulary.
        """
        epochs_, indices_ = example_names(epochs, indices)
        streams = self._streams(epochs_, indices_)
        segments = self._windows.segments(epochs_, indices_, streams[:, _SEGMENTS])
        layout = _PairLayout(segments, self.config.max_seq_length, self.config.num_special)
        ids = self._lay_out(segments, layout)
        return {
            "input_ids": ids,
            "token_type_ids": layout.second.astype(np.int64),
            "attention_mask": layout.attended.astype(np.int64),
            **self._mask(ids, layout, streams),
            "labels": segments.labels.astype(np.int64),
            "epoch": epochs_,
            "index": indices_,
            "dropout_keys": dropout_keys(self.config.seed, epochs_, indices_),
        }

    def _streams(self, epochs: Int64Array, indices: Int64Array) -> UInt64Array:
        keys = random_keys(self.config.seed, Stream.EXAMPLE, epochs, indices)
        return draw(keys[:, None], np.arange(4))

    def _lay_out(self, segments: Segments, layout: _PairLayout) -> Int64Array:
        manifest = self.shards.manifest
        ids = self._gather(segments, layout)
        ids[~layout.text] = manifest.pad_id
        ids[:, 0] = manifest.cls_id
        ids[layout.separators] = manifest.sep_id
        return ids

    def _gather(self, segments: Segments, layout: _PairLayout) -> Int64Array:
        """Read the text of both segments; a second read is needed only for those in two shards."""
        apart = segments.first.shard != segments.second.shard
        rows = np.flatnonzero(apart)
        if not rows.size:
            return gather(self.shards, segments.first.shard, layout.source)
        elsewhere = layout.second & apart[:, None]
        ids = gather(
            self.shards,
            segments.first.shard,
            np.where(elsewhere, segments.first.start[:, None], layout.source),
        )
        own, start = elsewhere[rows], segments.second.start[rows, None]
        second = gather(self.shards, segments.second.shard[rows], np.where(own, layout.source[rows], start))
        ids[rows] = np.where(own, second, ids[rows])
        return ids

    def _mask(
        self, ids: Int64Array, layout: _PairLayout, streams: UInt64Array
    ) -> dict[str, npt.NDArray[Any]]:
        """Mask tokens in ``ids``, in place; return their positions and originals."""
        config = self.config
        num_rows = len(ids)
        continues_word = self._continues_word[ids] & config.whole_words
        word_starts = layout.text & ~continues_word | layout.segment_starts
        ngrams = split_ngrams(streams[:, _NGRAMS], word_starts, layout.segment_starts, config.max_ngram)
        budgets = prediction_budgets(
            layout.num_tokens, mask_prob=config.mask_prob, max_predictions=config.max_predictions_per_seq
        )
        maskable = layout.text & ~self._is_special[ids]
        chosen = choose_tokens(streams[:, _CHOICE], ngrams, maskable, layout.text, budgets)

        rows, columns = np.nonzero(chosen)
        counts = np.bincount(rows, minlength=num_rows)
        slots = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        hidden = ids[rows, columns]
        shape = (num_rows, config.max_predictions_per_seq)
        positions, targets = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        weights = np.zeros(shape, dtype=np.float32)
        positions[rows, slots], targets[rows, slots], weights[rows, slots] = columns, hidden, 1
        keys = draw(streams[rows, _REPLACEMENT], columns)
        ids[rows, columns] = replace_tokens(keys, hidden, self.shards.manifest.mask_id, self._ordinary_ids)
        return {"masked_positions": positions, "masked_ids": targets, "masked_weights": weights}


def packed(batch: Mapping[str, npt.NDArray[Any]]) -> Packed:
    """Return a batch of ``ExampleReader.batch`` as packed model inputs (``shoal.data.packing``).

    To the packed tokens come, for M predictions in all:

    - ``masked_rows`` int64 [M]: which of the T tokens are predicted, ascending;
    - ``masked_ids`` int64 [M]: the tokens that were there;
    - ``labels``, ``epoch``, ``index``, ``dropout_keys`` int64 [B], as they are.
    """
    tokens = pack_padded(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
    rows, slots = np.nonzero(batch["masked_weights"])
    return {
        **tokens,
        "masked_rows": tokens["cu_seqlens"][rows] + batch["masked_positions"][rows, slots],
        "masked_ids": batch["masked_ids"][rows, slots],
        **{name: batch[name] for name in ("labels", "epoch", "index", "dropout_keys")},
    }


class _PairLayout:
    """Layout of [CLS] first [SEP] second [SEP] in each row, as boolean arrays ``[B, T]``.

    With two special tokens there is no second segment and no [SEP] behind it.
    """

    def __init__(self, segments: Segments, max_seq_length: int, num_special: int) -> None:
        first, second = segments.first, segments.second
        num_first, num_text = (first.end - first.start)[:, None], segments.num_tokens[:, None]
        column = np.arange(max_seq_length)
        separator = 1 + num_first
        last = num_text + num_special - 1
        self.num_tokens: Int64Array = num_text[:, 0] + num_special
        self.attended = column <= last
        self.second = (column > separator) & self.attended
        self.separators = (column == separator) | (column == last)
        self.text = self.attended & ~self.separators
        self.text[:, 0] = False
        self.segment_starts = (column == 1) | (column == separator + 1) & self.second
        # The shard's token for each column; padding and specials read the first one, which is thrown away.
        first_start, second_start = first.start[:, None], second.start[:, None]
        in_text = np.where(self.second, second_start - separator - 1, first_start - 1) + column
        begin = np.where(self.second, second_start, first_start)
        self.source: Int64Array = np.where(self.text, in_text, begin)


def unigram_entropy(target_ids: npt.ArrayLike) -> float:
    """Return the entropy, in nats, of the distribution of the given token ids.

    It is the loss of a model that knows the frequency of each target but ignores the context; a model that
    uses the context is below it.

    Raises:
        ValueError: there are no ids.
    """
    ids = np.asarray(target_ids).ravel()
    if not ids.size:
        raise ValueError("the entropy of no tokens is not defined")
    shares = np.unique(ids, return_counts=True)[1] / ids.size
    return float(-(shares * np.log(shares)).sum())
