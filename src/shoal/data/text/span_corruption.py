"""Makes batches for span corruption, T5's pretraining task, a pure function of (seed, epoch, index).

An example is a run of ``num_tokens`` tokens of the concatenated articles. In the input, its spans of noise,
15 % of it and 3 tokens long on average, are each replaced by a sentinel. The target has the replaced spans,
each after its sentinel; both end with the end token. How many tokens are noise and in how many spans is the
same for all examples, so nothing is padded: with the defaults 568 tokens become inputs of 512 and targets of
114. (Raffel et al., "Exploring the limits of transfer learning", 2020, section 3.1.4; the counts are those of
``random_spans_helper`` and ``random_spans_noise_mask`` in google-research's text-to-text code.)

Only tokens are stored: the runs of an epoch begin at an offset that is drawn per epoch, so that each epoch
cuts the text elsewhere, and wrap around the end of a shard; less than a run per shard is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from shoal.data.steps import Reader, example_names
from shoal.data.text.segments import gather
from shoal.data.text.shards import TextShards
from shoal.data.text.span_config import MAX_SENTINELS, SpanConfig, sentinel_id
from shoal.decide.rng import Int64Array, Stream, UInt64Array, below, draw, dropout_keys, random_keys
from shoal.errors import UsageError

_OTHER, _NOISE = range(2)  # streams of one example


class SpanReader(Reader):
    """Makes T5's span-corruption examples from the shards of a split.

    Spans are pure functions of (seed, epoch, index), so every worker can make every example. It is also an
    indexable dataset. Only paths and numbers are pickled.

    Args:
        shards: of one split.
        config: lengths of inputs and spans, and the seed.

    Raises:
        UsageError: no shard of the split is long enough for an example.

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 3.1.4.

    Example (``runs/text`` was written by ``shoal prepare text``):

        >>> from pathlib import Path
        >>> reader = SpanReader(TextShards(Path("runs/text"), "train"), SpanConfig(input_length=64))
        >>> batch = reader.batch(0, [0, 1])
        >>> batch["input_ids"].shape, batch["labels"].shape[0]
        ((2, 64), 2)
    """

    def __init__(self, shards: TextShards, config: SpanConfig) -> None:
        """Number the examples."""
        self.shards, self.config = shards, config
        self.seed, self.example_tokens = config.seed, config.num_tokens
        self._sizes: Int64Array = np.array([len(shard.tokens) for shard in shards.shards], dtype=np.int64)
        self._first_examples = np.concatenate([[0], np.cumsum(self._sizes // config.num_tokens)])
        if not self.num_examples:
            raise UsageError(
                f"{shards.location}: the split {shards.split!r} gives no examples: none of its shards has "
                f"the {config.num_tokens} tokens of one; prepare more text or shorten the input"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return (SpanReader, (self.shards, self.config), {"epoch": self.epoch})

    @property
    def num_examples(self) -> int:
        return int(self._first_examples[-1])

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the examples ``indices`` (``[B]``, below ``num_examples``) as they are in ``epochs``.

        - ``input_ids`` int64 ``[B, input length]``: text with a sentinel for each span, then the end token;
        - ``labels`` int64 ``[B, target_length]``: each span after its sentinel, then the end token;
        - ``epoch``, ``index`` int64 ``[B]``: of the examples;
        - ``dropout_keys`` int64 ``[B]``: random key of each example's dropout masks.

        Raises:
            ShoalError: a shard holds a token id beyond the vocabulary.
        """
        epochs_, indices_ = example_names(epochs, indices)
        config, manifest = self.config, self.shards.manifest
        keys = random_keys(config.seed, Stream.SPANS, epochs_, indices_)
        lengths = span_lengths(keys, config.num_tokens - config.num_noise, config.num_noise, config.num_spans)
        inputs, targets = corrupt(
            self._runs(epochs_, indices_),
            lengths,
            first_sentinel=sentinel_id(manifest.vocab_size, 0),
            end=manifest.sep_id,
        )
        return {
            "input_ids": inputs,
            "labels": targets,
            "epoch": epochs_,
            "index": indices_,
            "dropout_keys": dropout_keys(config.seed, epochs_, indices_),
        }

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the examples unchanged: all have the same length."""
        return dict(arrays)

    def _runs(self, epochs: Int64Array, indices: Int64Array) -> Int64Array:
        """Return the uncorrupted tokens of each example, ``[B, num_tokens]``."""
        length = self.config.num_tokens
        shard = self._first_examples.searchsorted(indices, side="right") - 1
        sizes = self._sizes[shard]
        phase = below(random_keys(self.config.seed, Stream.SPAN_PHASE, epochs, shard), sizes)
        starts = (indices - self._first_examples[shard]) * length + phase
        return gather(self.shards, shard, (starts[:, None] + np.arange(length)) % sizes[:, None])


def span_lengths(keys: UInt64Array, num_other: int, num_noise: int, num_spans: int) -> Int64Array:
    """Return the alternating lengths of text and noise, text first, int64 ``[B, 2 * num_spans]``.

    Both are divided into ``num_spans`` parts of at least one token, uniformly over all ways to do so.

    Args:
        keys: uint64 ``[B]``, one for each example.
    """
    streams = draw(keys[:, None], np.arange(2))
    lengths = np.empty((len(keys), 2 * num_spans), dtype=np.int64)
    lengths[:, 0::2] = _compositions(streams[:, _OTHER], num_other, num_spans)
    lengths[:, 1::2] = _compositions(streams[:, _NOISE], num_noise, num_spans)
    return lengths


def _compositions(keys: UInt64Array, total: int, num_parts: int) -> Int64Array:
    """Cut ``total`` into parts at those of its ``total - 1`` inner borders with the smallest draws."""
    borders = np.empty((len(keys), num_parts + 1), dtype=np.int64)
    borders[:, 0], borders[:, -1] = 0, total
    if num_parts > 1:
        draws = draw(keys[:, None], np.arange(total - 1))
        borders[:, 1:-1] = draws.argpartition(num_parts - 2, axis=1)[:, : num_parts - 1] + 1
        borders.sort(axis=1)
    return np.diff(borders, axis=1)


def corrupt(
    ids: Int64Array, lengths: Int64Array, *, first_sentinel: int, end: int
) -> tuple[Int64Array, Int64Array]:
    """Return inputs and targets of runs of tokens ``ids`` ``[B, num_tokens]``.

    Args:
        lengths: alternating, of text and noise, ``[B, 2 * num_spans]``; each row sums to ``num_tokens``.
        first_sentinel: the sentinel of the first span; each further one is one less.
        end: the end token of both.
    """
    starts = np.cumsum(lengths, axis=1) - lengths
    begins = np.zeros(ids.shape, dtype=bool)
    np.put_along_axis(begins, starts, True, axis=1)
    part = np.cumsum(begins, axis=1) - 1  # text is even, noise is odd
    noise = (part & 1).astype(bool)
    sentinels = first_sentinel - (part >> 1)

    def replaced(gone: npt.NDArray[np.bool_]) -> Int64Array:
        """Replace each part of ``gone`` by its sentinel and append the end token."""
        first = begins & gone
        rows = np.where(first, sentinels, ids)[first | ~gone].reshape(len(ids), -1)
        return np.concatenate([rows, np.full((len(ids), 1), end)], axis=1)

    return replaced(noise), replaced(~noise)


def text_to_text_tokenizer(file: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of prepared text with T5's sentinels.

    Args:
        vocab_size: tokens of the text, as its manifest has them.
    """
    tokenizer = Tokenizer.from_file(str(file))
    if tokenizer.get_vocab_size(with_added_tokens=True) == vocab_size:  # else ids would not be those
        names = [f"<extra_id_{number}>" for number in reversed(range(MAX_SENTINELS))]
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        assert tokenizer.token_to_id("<extra_id_0>") == sentinel_id(vocab_size, 0)
    return tokenizer
