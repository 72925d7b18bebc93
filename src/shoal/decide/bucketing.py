"""Orders samples by aspect-ratio buckets: every run of ``run_size`` samples comes from one group.

Images of one shape share a batch without much padding. As in :mod:`shoal.decide.order`, samples are numbered
over an endless stream and each is computed independently, so the state is one integer. An epoch permutes each
group, cuts it into runs and permutes the runs. A run that a group cannot fill continues with examples from
the beginning of the group's permutation: at most ``run_size - 1`` samples of a group come twice in an epoch,
none is left out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal.decide.order import shuffled
from shoal.decide.rng import Int64Array, Stream, random_keys
from shoal.errors import UsageError


def aspect_groups(sizes: npt.ArrayLike, edges: tuple[float, ...] = (1.0,)) -> Int64Array:
    """Return the group of each image by width over height, int64 ``[N]``; group 0 is below the first edge.

    Args:
        sizes: width and height, ``[N, 2]``.
        edges: increasing; a ratio that equals an edge belongs above it.
    """
    width, height = np.asarray(sizes, dtype=np.float64).reshape(-1, 2).T
    return np.searchsorted(np.asarray(edges), width / height, side="right").astype(np.int64)


class GroupedOrder:
    """The order of examples of which each belongs to a group; see the module's docstring.

    A global batch that is a multiple of ``num_workers * run_size`` gives every worker whole runs, which are
    its micro-batches.

    Args:
        groups: the group of each example, ``[N]``.
        run_size: samples in a run: the micro-batch.

    Raises:
        UsageError: there are no examples, or runs of none.
    """

    def __init__(self, groups: Int64Array, run_size: int, seed: int) -> None:
        if run_size < 1 or not len(groups):
            raise UsageError(f"an order of {len(groups)} examples in runs of {run_size}: need 1 each")
        self.groups = groups
        self.run_size = run_size
        self.seed = seed
        _, counts = np.unique(groups, return_counts=True)
        self._counts = counts.astype(np.int64)
        self._members = np.argsort(groups, kind="stable").astype(np.int64)
        self._first_members = np.cumsum([0, *counts[:-1]], dtype=np.int64)
        self._first_runs = np.cumsum([0, *-(-counts // run_size)], dtype=np.int64)

    @property
    def samples_an_epoch(self) -> int:
        """Samples in one epoch, the few that come twice included."""
        return int(self._first_runs[-1]) * self.run_size

    def examples_of(self, numbers: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
        """Return (epochs, indices) of samples with any numbers, int64 like ``numbers``."""
        epochs, positions = np.divmod(np.asarray(numbers, dtype=np.int64), self.samples_an_epoch)
        runs, within = np.divmod(positions, self.run_size)
        runs = shuffled(runs, int(self._first_runs[-1]), self._seed_of(0), epochs)
        groups = np.searchsorted(self._first_runs, runs, side="right") - 1
        offsets = ((runs - self._first_runs[groups]) * self.run_size + within) % self._counts[groups]
        indices = np.empty_like(offsets)
        for group, count in enumerate(self._counts.tolist()):
            chosen = groups == group
            members = shuffled(offsets[chosen], count, self._seed_of(1 + group), epochs[chosen])
            indices[chosen] = self._members[self._first_members[group] + members]
        return epochs, indices

    def _seed_of(self, part: int) -> int:
        return int(random_keys(self.seed, Stream.GROUP_ORDER, part)[0])
