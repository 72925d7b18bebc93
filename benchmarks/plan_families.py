"""Predicts each published row from the smallest scale of its family, as ``plan_published`` scores it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.plan_predict import Predicted, achieved_of, in_samples, predict_row
from benchmarks.plan_rows import (
    PER_GPU_METRICS,
    TIME,
    Row,
    contradicts,
    generation_of,
    machines_of,
    possible,
    speeds,
    splits,
    with_batch,
)
from shoal.errors import UsageError
from shoal.planner.hardware import Catalog, Machines
from shoal.planner.intervals import doubts_of


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row with what three models say of it."""

    family: tuple[str, ...]
    kind: str
    line: int
    system: str
    nodes: int
    gpus: int
    times_the_gpus: float
    """Of the given row's."""
    published: float
    planned: float
    linear: float
    training: bool
    """Constants of the planner were settled on the row."""
    publisher: str
    generation: str
    doubts: tuple[float, ...]
    """As :mod:`shoal.planner.intervals` has them."""

    @property
    def log_ratio(self) -> float:
        """Logarithm of the published time over the planned one; of a rate, the inverse."""
        return math.log(self.published / self.planned) * (1 if self.kind == TIME else -1)

    @property
    def linear_log_ratio(self) -> float:
        return math.log(self.published / self.linear) * (1 if self.kind == TIME else -1)

    @property
    def error(self) -> float:
        return abs(self.planned / self.published - 1)

    @property
    def linear_error(self) -> float:
        return abs(self.linear / self.published - 1)

    def amdahl_error(self, serial: float) -> float:
        """Of Amdahl's law: time is serial + (1 - serial) / x."""
        slower = (serial + (1 - serial) / self.times_the_gpus) * self.times_the_gpus
        value = self.linear * slower if self.kind == TIME else self.linear / slower
        return abs(value / self.published - 1)


@dataclass(frozen=True)
class Given:
    """The smallest scale of a family."""

    row: Row
    value: float
    machines: Machines
    achieved: float
    """FLOP/s of an accelerator."""


@dataclass
class Predictions:
    """Holds the scored predictions and the rows that calibrate them."""

    scored: list[Prediction]
    given: list[Given]
    """The smallest scale of each family, also of those with one scale."""
    left_out: list[tuple[Row, str]]
    """Rows that are not predicted, with the reason."""


def predictions_of(rows: Sequence[Row], catalog: Catalog) -> Predictions:
    """Predict each row from the smallest scale of its family."""
    families: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    found = Predictions([], [], [])
    for row in rows:
        if row.kind is None:
            found.left_out.append((row, f"{row.metric} compares two systems; it is no figure of one"))
        elif not row.recipe:
            found.left_out.append((row, f"the planner knows no recipe for {row.model}"))
        elif machines_of(row, catalog) is None:
            found.left_out.append((row, f"no catalog has {row.hardware}"))
        else:
            families[row.family].append(row)
    for members in families.values():
        _predict_family(members, catalog, found)
    return found


def _predict_family(members: list[Row], catalog: Catalog, found: Predictions) -> None:
    fewest = min(row.gpus for row in members)
    at_fewest = [row for row in members if row.gpus == fewest]
    try:
        given = _given(at_fewest, catalog)
    except UsageError as error:
        found.left_out += [(row, str(error)) for row in members]
        return
    found.given.append(given)
    is_alone = len(at_fewest) == len(members)
    reason = "its family has one scale" if is_alone else "the family's smallest scale: given"
    found.left_out += [(row, reason) for row in at_fewest]
    for row in members:
        if row.gpus == fewest:
            continue
        if contradicts(row, at_fewest):
            reason = "its log contradicts itself: above twice the throughput per device of the smallest scale"
            found.left_out.append((row, reason))
            continue
        try:
            found.scored.append(_predict(row, given, catalog))
        except UsageError as error:
            found.left_out.append((row, str(error)))


def _given(at_fewest: list[Row], catalog: Catalog) -> Given:
    """Return the smallest scale; of several rows there (variants of a host) the mean."""
    value = statistics.fmean(row.value for row in at_fewest)
    row = with_batch(replace(at_fewest[0], value=value), at_fewest[0])
    machines = machines_of(row, catalog)
    assert machines
    return Given(row, value, machines, achieved_of(in_samples(row, machines), machines))


def _predict(row: Row, given: Given, catalog: Catalog) -> Prediction:
    assert row.kind
    full = with_batch(row, given.row)
    predicted = _predictions(full, given, catalog)
    middle = _median(predicted)
    machines = machines_of(full, catalog)
    assert machines
    times = row.gpus / given.row.gpus
    if row.kind == TIME:
        linear = given.value / times
    else:
        # Iterations a second do not grow with the hosts: each brings a batch of its own.
        constant = row.metric in PER_GPU_METRICS or row.metric == "iterations_per_s"
        linear = given.value * (1.0 if constant else times)
    return Prediction(
        family=row.family,
        kind=row.kind,
        line=row.number,
        system=row.system,
        nodes=row.nodes,
        gpus=row.gpus,
        times_the_gpus=times,
        training=row.training,
        published=row.value,
        planned=middle.value * row.value / in_samples(full, machines).value,
        publisher=row.publisher,
        generation=generation_of(machines),
        doubts=doubts_of(
            middle.seconds_by_cause,
            rate="measured",
            times_the_hosts=times,
            several=row.nodes > 1 and given.row.nodes == 1,
            split=middle.split / predict_row(given.row, given.machines, given.achieved).split,
            unstated=_spread(predicted),
            to_target=middle.to_target,
        ),
        linear=linear,
    )


def _predictions(full: Row, given: Given, catalog: Catalog) -> list[tuple[float, Predicted]]:
    """Return the predictions of all that may be, without what the given figure rules out.

    Raises:
        UsageError: it rules out everything.
    """
    found, ruled_out = [], UsageError("nothing is possible")
    rates, divided = speeds(full, given.row), splits(full, given.row)
    for row, rate in itertools.product(divided, rates):
        for weight, each in possible(row):
            try:
                found.append((weight / len(rates) / len(divided), _as_given(each, given, catalog, rate)))
            except UsageError as error:  # no rate of computation gives the figure
                ruled_out = error
    if not found:
        raise ruled_out
    total = sum(weight for weight, _ in found)
    return [(weight / total, each) for weight, each in found]


def _as_given(row: Row, given: Given, catalog: Catalog, rate: float) -> Predicted:
    """Predict a row of which all is stated; the same holds for the smallest scale, where it has a network.

    Args:
        rate: of computation, over that of the smallest scale.
    """
    machines = machines_of(row, catalog)
    assert machines
    if given.row.nodes == 1:
        return predict_row(row, machines, rate * given.achieved)
    per_gpu = None if row.nic_gbps is None else row.nic_gbps * row.nodes / row.gpus
    nic_gbps = given.row.nic_gbps or (per_gpu and per_gpu * given.row.gpus / given.row.nodes)
    same = replace(given.row, overlap=row.overlap, nic_gbps=nic_gbps)
    same_machines = machines_of(same, catalog)
    assert same_machines
    return predict_row(row, machines, rate * achieved_of(in_samples(same, same_machines), same_machines))


def _median(predicted: Sequence[tuple[float, Predicted]]) -> Predicted:
    """Return the prediction in the middle of their weights."""
    ordered = sorted(predicted, key=lambda each: each[1].value)
    upto = 0.0
    for weight, each in ordered:
        upto += weight
        if upto >= 0.5:
            return each
    return ordered[-1][1]


def _spread(predicted: Sequence[tuple[float, Predicted]]) -> float:
    """Return the standard deviation of the logarithms."""
    mean = sum(weight * math.log(each.value) for weight, each in predicted)
    return math.sqrt(sum(weight * (math.log(each.value) - mean) ** 2 for weight, each in predicted))
