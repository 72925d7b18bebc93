"""Divides batches of arrays among all ranks, so that ``model.fit`` has the gradients of one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from shoal.errors import UsageError, require_positive
from shoal.keras import process


class Shards(PyDatasetAdapter):  # type: ignore[misc,unused-ignore]
    """This rank's rows of each batch of a dataset that all ranks can read.

    A batch of ``batch_size`` rows is divided into equal parts, the first for rank 0. All ranks have the same
    number of steps, and parts of the same shape: where rows are missing, in the last batch or because
    ``batch_size`` is no multiple of the number of ranks, a part is filled up with rows of weight 0, and the
    weights of the others make the average over ranks the average over the rows of the batch. Gradients,
    losses and metrics with weights are then those of one process; normalisation over the batch sees the rows
    of its rank, with those that fill it.

    Args:
        x: an array, or a structure of arrays, of the same length; sliced by NumPy, so it may be mapped from a
            file.
        y: labels, likewise.
        batch_size: rows of a batch over all ranks.
        sample_weight: weights of the rows.
        shuffle: whether each epoch has an order of its own, the same on all ranks.
        seed: of the orders.
        drop_remainder: whether to leave out the last rows that do not fill a batch.
        **options: of ``keras.utils.PyDataset``.

    Raises:
        UsageError: lengths differ, or there is no whole batch.

    Example:
        >>> import numpy as np, shoal.keras as sk
        >>> sk.init()
        >>> data = sk.Shards(np.zeros((10, 3)), np.zeros(10), batch_size=4)
        >>> len(data), [part.shape for part in data[0]]
        (3, [(4, 3), (4,), (4,)])
        >>> sk.shutdown()
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        *,
        batch_size: int,
        sample_weight: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_remainder: bool = False,
        **options: Any,
    ) -> None:
        self._rows = _Rows(x, y, sample_weight, batch_size, shuffle, seed, drop_remainder, options)
        super().__init__(self._rows, shuffle=False)  # in another order on each rank

    def __len__(self) -> int:
        return self._rows.num_batches

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return this rank's part of batch ``index``: inputs, labels and, where there are any, weights."""
        return self._rows[index]

    def follow_epochs(self) -> Any:
        """Return a callback that gives each epoch of ``fit`` its own order.

        Without it the orders follow each other by the number of times that Keras has begun to read, which
        includes looks at the first batch, and a run that continues begins at the first one.
        """
        rows = self._rows

        class FollowEpochs(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                rows.next_epoch = epoch

        return FollowEpochs()


class _Rows(keras.utils.PyDataset):  # type: ignore[misc,unused-ignore]
    """The batches of :class:`Shards`."""

    def __init__(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_remainder: bool,
        options: dict[str, Any],
    ) -> None:
        super().__init__(**options)
        self.x, self.y, self.sample_weight, self.batch_size = x, y, sample_weight, batch_size
        self.shuffle, self.seed, self.epoch, self.next_epoch = shuffle, seed, 0, 0
        require_positive("", self, "batch_size")
        leaves = keras.tree.flatten((x, y) if sample_weight is None else (x, y, sample_weight))
        lengths = {len(leaf) for leaf in leaves}
        if len(lengths) != 1:
            raise UsageError(f"arrays of Shards have {sorted(lengths)} rows; they must have the same number")
        self.num_rows = lengths.pop()
        if drop_remainder:
            self.num_rows -= self.num_rows % batch_size
        if not self.num_rows:
            raise UsageError(f"Shards has no batch of {batch_size} rows; use a smaller batch_size")
        self._rank, self._size = process.rank(), process.size()
        self._per_rank = -(-batch_size // self._size)
        self._weighted = (
            sample_weight is not None or self.num_rows % batch_size > 0 or batch_size % self._size > 0
        )
        self._order_of = (-1, np.arange(self.num_rows))

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch."""
        return -(-self.num_rows // self.batch_size)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        whole = self._order()[index * self.batch_size : (index + 1) * self.batch_size]
        own = whole[self._rank * self._per_rank : (self._rank + 1) * self._per_rank]
        missing = self._per_rank - len(own)
        rows = np.concatenate([own, np.repeat(whole[:1], missing)])
        x, y = (
            keras.tree.map_structure(lambda leaf: np.asarray(leaf[rows]), each) for each in (self.x, self.y)
        )
        if not self._weighted:
            return x, y
        weights = np.full(self._per_rank, self._size * self._per_rank / len(whole), np.float32)
        weights[len(own) :] = 0
        if self.sample_weight is not None:
            weights *= np.asarray(self.sample_weight[rows])
        return x, y, weights

    def on_epoch_begin(self) -> None:
        """Go to the order of the next epoch, which is that of ``fit`` with ``follow_epochs``."""
        self.epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1

    def _order(self) -> np.ndarray[Any, Any]:
        epoch, (of_epoch, order) = self.epoch, self._order_of
        if self.shuffle and of_epoch != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)
            self._order_of = (epoch, order)
        return order
