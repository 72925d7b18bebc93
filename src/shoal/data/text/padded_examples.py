"""Makes masked-LM examples of one shape, as the stages of a pipeline take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.steps import Arrays, Reader
from shoal.data.text.examples import ExampleReader


class PaddedExamples(Reader):
    """The examples of a reader as micro-batches that are padded to its longest.

    Args:
        examples: with T = ``max_seq_length`` and P = ``max_predictions_per_seq``.
    """

    def __init__(self, examples: ExampleReader) -> None:
        self.examples = examples
        self.seed, self.example_tokens = examples.seed, examples.example_tokens

    @property
    def num_examples(self) -> int:
        return self.examples.num_examples

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        return self.examples.batch(epochs, indices)

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Return the inputs of :class:`shoal.models.padded_pretraining.PaddedPretraining`.

        - ``input_ids``, ``token_type_ids`` int64 [B, T], ``lengths`` int64 [B];
        - ``wanted`` int64 [B, 1 + P]: [CLS], the masked positions, then others, none twice;
        - ``masked_ids`` int64 [B, P], ``masked_weights`` float32 [B, P]: 0 behind the predictions;
        - ``weights`` float32 [B]: 1 for each example;
        - ``labels``, ``dropout_keys`` int64 [B].
        """
        attended, weights = arrays["attention_mask"], arrays["masked_weights"]
        rows, slots = np.nonzero(weights)
        is_read = np.zeros(attended.shape, dtype=bool)
        is_read[:, 0] = True
        is_read[rows, arrays["masked_positions"][rows, slots]] = True
        return {
            **{name: arrays[name] for name in ("input_ids", "token_type_ids", "masked_ids", "labels")},
            "lengths": attended.sum(axis=1),
            "wanted": np.argsort(~is_read, axis=1, kind="stable")[:, : 1 + weights.shape[1]],
            "masked_weights": weights,
            "weights": np.ones(len(attended), dtype=np.float32),
            "dropout_keys": arrays["dropout_keys"],
        }
