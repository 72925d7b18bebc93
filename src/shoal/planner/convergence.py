"""Estimates the epochs that a model needs as a function of the global batch, from published runs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from shoal.errors import UsageError, did_you_mean
from shoal.planner.hardware import shipped


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A published data set that a preset is for, as plans count it."""

    name: str
    num_examples: int
    """For training."""
    mean_tokens: float = 0.0
    """Of an example with special tokens; 0: examples are no texts, or fill their length."""
    token_spread: float = 0.0
    """Standard deviation of the tokens over their mean."""
    num_evaluated: int = 0
    """Examples for validation."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a recipe's training, as its settings have it."""

    batch: int
    steps: int | None = None
    """None: the settings name epochs, or the data decides."""
    epochs: float | None = None
    covers: bool = False
    """The last step completes the epochs; else the nearest step ends them."""
    sequence_length: int | None = None
    """Tokens of a sample; None: the model's own, or samples are no sequences."""
    micro_batch: int | None = None
    """None: as :func:`shoal.decide.batch.plan_batch` divides a worker's share."""
    section: str = "train"
    """Section of the settings that has the batch."""
    evaluate_every_steps: int = 0
    """0: by epochs."""
    evaluate_every_epochs: float = 0.0
    """0, without steps too: at the end alone."""


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Samples to the target, and the evaluations on the way."""

    name: str
    source: str
    target: str = ""
    """The scores to reach, in the form of ``--run.until``; empty for a training of fixed length."""
    points: tuple[tuple[int, float], ...] = ()
    """(global batch, epochs), by ascending batch."""
    samples_per_epoch: int = 1
    evaluate_every_epochs: float = math.inf
    evaluation_samples: int = 0
    evaluation_pause_s: float = 0.0
    """Pause per evaluation on any number of hosts: the input pipeline changes over, the host scores."""
    largest_batch: int = 0
    """Largest batch that is published to reach the target."""

    @property
    def depends_on_batch(self) -> bool:
        """Return whether the epochs depend on the batch: those to a score do, a fixed length does not."""
        return len({epochs for _, epochs in self.points}) > 1

    def epochs(self, batch: int) -> float:
        """Return the epochs to the target at a global batch.

        Interpolates linearly in the logarithm of the batch; below the first point its epochs hold. Above the
        last point the slope continues, at least as the square root of the batch: a guess.
        """
        points = self.points
        if batch <= points[0][0]:
            return points[0][1]
        for (low, few), (high, many) in itertools.pairwise(points):
            if batch <= high:
                share = math.log(batch / low) / math.log(high / low)
                return few + share * (many - few)
        (low, few), (high, many) = points[max(len(points) - 3, 0)], points[-1]
        slope = math.log(many / few) / math.log(high / low) if high > low else 0.5
        return float(many * (batch / high) ** max(slope, 0.5))

    def samples(self, batch: int) -> float:
        return self.epochs(batch) * self.samples_per_epoch


def data_set_of(recipe: str, preset: str) -> DataSet | None:
    """Return the published data set that a preset is for, or ``None`` if it is for none that is known."""
    entry = shipped("data_sets.toml").get(f"{recipe}-{preset}")
    return DataSet(**entry) if entry else None


def at_any_batch(amount: float) -> tuple[tuple[int, float], ...]:
    """Return the points of a training that takes the same epochs (or samples) at any batch."""
    return ((1, amount), (1 << 40, amount))


def convergence_of(name: str) -> Convergence:
    """Return the table of a recipe. One that takes the epochs of another reaches no target of its own.

    Raises:
        UsageError: the catalog has none.
    """
    tables = shipped("convergence.toml")
    if name not in tables:
        raise UsageError(
            f"the convergence of {name!r} is not in the catalog.{did_you_mean(name, tables)} "
            f"Known: {', '.join(sorted(tables))}"
        )
    entry = dict(tables[name])
    if other := entry.get("epochs_of"):
        return replace(convergence_of(other), target="")
    points = tuple((int(batch), float(epochs)) for batch, epochs in entry.pop("points", ()))
    largest = entry.pop("largest_batch", points[-1][0] if points else 0)
    return Convergence(name=name, points=points, largest_batch=largest, **entry)
