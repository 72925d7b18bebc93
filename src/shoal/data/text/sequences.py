"""Defines sequences without padding, which ``task_batches`` makes batches of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shoal.data.packing import pack
from shoal.data.steps import Arrays
from shoal.data.text.special_tokens import Int32Array, Int64Array, ranges


@dataclass(frozen=True, kw_only=True)
class Sequences(ABC):
    """Sequences of tokens; sequence ``k`` is ``tokens[bounds[k] : bounds[k + 1]]``."""

    tokens: Int32Array
    """Token ids of all sequences, flat."""
    bounds: Int64Array
    """Offsets of the sequences, and the end of the last one: ``[num_sequences + 1]``."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> Int64Array:
        """Tokens of each sequence."""
        return np.diff(self.bounds)

    @abstractmethod
    def batch(self, indices: Int64Array) -> Arrays:
        """Return the sequences ``indices`` as a model takes them."""


@dataclass(frozen=True, kw_only=True)
class TaskData(Sequences):
    """Sequences for an encoder, with targets: the fields named in ``TARGETS``, one number per sequence."""

    TARGETS: ClassVar[tuple[str, ...]]
    types: npt.NDArray[np.uint8]
    """Segment ids of all sequences, flat."""

    def batch(self, indices: Int64Array) -> Arrays:
        """Return the sequences ``indices`` packed, with their targets ``[B]``, int64 or fp32."""
        lengths = self.lengths[indices]
        token_indices = ranges(self.bounds[indices], lengths)
        chosen = {name: getattr(self, name)[indices] for name in self.TARGETS}
        targets = {
            name: values if values.dtype == np.float32 else values.astype(np.int64)
            for name, values in chosen.items()
        }
        return {**pack(self.tokens[token_indices], self.types[token_indices], lengths), **targets}
