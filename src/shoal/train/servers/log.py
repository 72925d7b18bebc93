"""Reads the log of steps that did not wait for all workers: counts them, and repeats them in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal import record
from shoal.atomic_io import write_atomically
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.optim.moments import norm_of
from shoal.train.gradients import clip_factor, scale_all
from shoal.train.servers.tensors import checksum
from shoal.train.weight_averaging import statistics_of


@dataclass(frozen=True)
class Summary:
    """Holds the counts of a log for each worker.

    Attributes:
        num_steps: steps taken.
        used: gradients that steps have taken, by rank.
        dropped: gradients that none has taken, by rank.
        staleness: how many of those taken had which staleness.
        skipped: steps whose gradient was not finite.
    """

    num_steps: int
    used: list[int]
    dropped: list[int]
    staleness: dict[int, int]
    skipped: int


class Counts:
    """Counts the gradients in steps.

    Args:
        num_workers: of the group.

    Attributes:
        used: gradients that steps have taken, by rank.
        dropped: gradients that none has taken, by rank.
        staleness: how many of those taken had which staleness.
    """

    def __init__(self, num_workers: int) -> None:
        self.used, self.dropped = [0] * num_workers, [0] * num_workers
        self.staleness: Counter[int] = Counter()

    def add(self, row: dict[str, Any]) -> None:
        """Count a row of the log."""
        for rank, _, version in row["used"]:
            self.used[rank] += 1
            self.staleness[row["step"] - 1 - version] += 1
        for rank, _, _ in row["dropped"]:
            self.dropped[rank] += 1

    def row(self, step: int) -> record.Contributions:
        """Return the record's row of these counts, after ``step``."""
        most = max(self.staleness, default=0)
        return record.Contributions(
            step=step, used=self.used, dropped=self.dropped,
            staleness=[self.staleness.get(each, 0) for each in range(most + 1)],
        )  # fmt: skip


def summary(log: Path) -> Summary:
    """Count the steps of a log and the gradients of each worker.

    Raises:
        ShoalError: the log is damaged.

    Example::

        counts = summary(Path("steps.jsonl"))
        assert max(counts.staleness) <= 2
    """
    rows = _read(log)
    counts = Counts(max(len(row.get("hosts", ())) for row in rows))
    steps = [row for row in rows if "step" in row]
    for row in steps:
        counts.add(row)
    return Summary(
        num_steps=sum(bool(row["used"]) for row in steps),
        used=counts.used,
        dropped=counts.dropped,
        staleness=dict(sorted(counts.staleness.items())),
        skipped=sum("skipped" in row for row in steps),
    )


def _read(log: Path) -> list[dict[str, Any]]:
    """Return the lines: the host of each rank, whenever workers begin, and their steps."""
    rows = [
        parse_json(line, f"{log}, line {number}")
        for number, line in enumerate(log.read_text(encoding="utf-8").splitlines(), start=1)
    ]
    if not rows or "hosts" not in rows[0]:
        raise ShoalError(f"{log} does not begin with a line that names the hosts; it is no log of steps")
    return rows


def go_back(log: Path, step: int) -> None:
    """Drop the lines about steps after ``step``, from which a run continues."""
    if not log.exists():
        return
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if step else []
    whole = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one
    rows = [parse_json(line, f"{log}, line {number}") for number, line in enumerate(whole, start=1)]
    steps = [row.get("step", row.get("after", 0)) for row in rows]
    kept = [line for line, of in zip(whole, steps, strict=True) if of <= step]
    write_atomically(log, "".join(kept).encode())


def require_workers(log: Path, num_workers: int) -> None:
    """Check that a log, if there is one, is of as many workers: their gradients are its steps.

    Raises:
        UsageError: it is of another number.
    """
    if not log.exists():
        return
    (*_, found) = (row["workers"] for row in _read(log) if "workers" in row)
    if found != num_workers:
        raise UsageError(
            f"asynchronous steps of {num_workers} workers after those of {found}: a step is a gradient of "
            f"each, and {log} counts them; continue with {found} workers"
        )


def replay(
    log: Path,
    model: nn.Module,
    optimizer: Optimizer,
    backward: Callable[[int, int], None],
    *,
    schedule: Callable[[int], None] | None = None,
    max_norm: float | None = None,
    dropped: bool = False,
    compensation: float = 0.0,
    extrapolation: float = 0.0,
) -> int:
    """Repeat the steps of :func:`shoal.train.servers.waiting.bound_waiting`, and return their number.

    The weights, and the optimizer's state, are those of the workers to the last bit. Averages of weights over
    steps (:class:`~shoal.train.weight_averaging.WeightAverage`) are not repeated.

    Args:
        log: that rank 0 has written.
        model: with the weights that rank 0 had at the beginning; not wrapped. At the end its batch norms have
            the statistics of the workers, too.
        optimizer: of :mod:`shoal.optim`, over the model's parameters.
        backward: computes the gradient of a rank's batch, as its worker has; gets the rank and the number of
            the batch among those of its loader, from 1.
        schedule: sets the optimizer's options for a step, given its number; of asynchronous steps, what
            ``next_step`` was when the worker set them.
        max_norm: as it was there.
        dropped: also compute the gradients that no step has taken, in the order of each worker's batches:
            for local steps with ``wait_for``, where ``backward`` takes the local steps of a round. They are
            computed in any case for a model with batch normalization.
        compensation: as it was there.
        extrapolation: as it was there.

    Raises:
        ShoalError: the log is damaged, or has other weights, or statistics of batch norms, where the workers
            have noted theirs.

    Example::

        replay(
            Path("steps.jsonl"), model, AdamW(model.parameters(), lr=1e-4),
            lambda rank, batch: loss_of(model(batches_of[rank][batch - 1])).backward(),
        )
    """
    rows = _read(log)
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    workers = _Workers(model, parameters, backward)
    dropped = dropped or bool(workers.statistics)
    kinds = ("dropped", "used") if dropped else ("used",)
    last_use = {
        version: index
        for index, row in enumerate(rows)
        for kind in kinds
        for _, _, version in row.get(kind, ())
    }
    versions = {0: [each.detach().clone() for each in parameters]}
    moves: dict[int, list[Tensor]] = {}
    newest, asynchronous = 0, False
    for index, row in enumerate(rows):
        if "hosts" in row:  # workers begin, and know no step yet
            workers.begin(row["hosts"])
            asynchronous = row.get("asynchronous", False)
            moves = {newest: [torch.zeros_like(each) for each in versions[newest]]}
        for rank, batch, version in row.get("dropped", ()) if dropped else ():
            workers.compute(versions[version], rank, batch)
        if row.get("used"):
            newest = row["step"]
            if schedule is not None:
                schedule(row["used"][0][2] + 1 if asynchronous else newest)
            begins = dict(versions)
            for version in {version for _, _, version in row["used"]} if extrapolation else ():
                begins[version] = [each.clone() for each in versions[version]]
                extrapolate(begins[version], moves[version], extrapolation * (newest - 1 - version))
            gradients = _mean_of(row, workers, begins, compensation)
            _set(parameters, versions[newest - 1])
            if not row.get("skipped"):
                _step(parameters, optimizer, gradients, max_norm)
            versions[newest] = [each.detach().clone() for each in parameters]
            if extrapolation:
                moves[newest] = [a - b for a, b in zip(versions[newest], versions[newest - 1], strict=True)]
                moves = {v: each for v, each in moves.items() if v == newest or last_use.get(v, 0) > index}
            versions = {v: each for v, each in versions.items() if v == newest or last_use.get(v, 0) > index}
        if "norms" in row:
            workers.unite_statistics()
        for name, found in (("weights", versions[newest]), ("norms", workers.statistics)):
            if name in row and checksum(found) != row[name]:
                raise ShoalError(
                    f"{log}: the {name} after step {newest} are not those of the workers; other data, "
                    "initial weights or options"
                )
    _set(parameters, versions[newest])
    return newest


class _Workers:
    """Computes the gradients of all workers in one process, each with its own statistics of batch norms.

    Args:
        model: of all workers.
        parameters: those that are trained.
        backward: as for :func:`replay`.
    """

    def __init__(
        self, model: nn.Module, parameters: list[Tensor], backward: Callable[[int, int], None]
    ) -> None:
        self.parameters, self._backward = parameters, backward
        self.statistics = statistics_of(model)
        self.hosts: list[int] = []
        self._own: list[list[Tensor]] = []

    def begin(self, hosts: list[int]) -> None:
        """Begin with a worker on each of these hosts, all alike."""
        self.hosts, self._own = hosts, [_copies(self.statistics) for _ in hosts]

    def compute(self, weights: list[Tensor], rank: int, batch: int) -> None:
        """Compute a gradient of these weights."""
        _set(self.parameters, weights)
        for parameter in self.parameters:
            parameter.grad = None
        _set(self.statistics, self._own[rank])
        self._backward(rank, batch)
        self._own[rank] = _copies(self.statistics)

    def unite_statistics(self) -> None:
        """Give all workers the same statistics, as :func:`shoal.train.weight_averaging.unite` does."""
        shares = [
            [each / len(self.hosts) if each.is_floating_point() else each for each in own]
            for own in self._own
        ]
        total = _sum_over(self.hosts, shares)
        for number, each in enumerate(self.statistics):
            largest = torch.stack([own[number] for own in self._own]).amax(0)
            each.copy_(total[number] if each.is_floating_point() else largest)
        self.begin(self.hosts)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]


def _mean_of(
    row: dict[str, Any], workers: _Workers, versions: dict[int, list[Tensor]], compensation: float
) -> list[Tensor]:
    """Return the mean of the gradients of a step."""
    parts = [[torch.zeros_like(each) for each in workers.parameters] for _ in workers.hosts]
    used, newest = row["used"], versions[row["step"] - 1]
    for rank, batch, version in used:
        workers.compute(versions[version], rank, batch)
        gradients = [_gradient_of(each) for each in workers.parameters]
        if compensation:
            gradients = compensate(gradients, newest, versions[version], compensation)
        parts[rank] = [gradient * (1.0 / len(used)) for gradient in gradients]
    return _sum_over(workers.hosts, parts)


def _sum_over(hosts: list[int], parts: list[list[Tensor]]) -> list[Tensor]:
    """Return the sums of the workers' tensors, added as the servers do: within hosts first."""
    sums: dict[int, list[Tensor]] = {}
    for host, part in zip(hosts, parts, strict=True):
        sums[host] = [a + b for a, b in zip(sums[host], part, strict=True)] if host in sums else part
    total, *others = sums.values()
    for other in others:
        total = [a + b for a, b in zip(total, other, strict=True)]
    return total


@torch.no_grad()
def compensate(
    gradients: list[Tensor], newest: list[Tensor], own: list[Tensor], strength: float
) -> list[Tensor]:
    """Return gradients of weights ``own``, corrected for weights ``newest`` (DC-ASGD, arXiv 1609.08326).

    To each is added ``strength`` · gradient² · (newest - own), element by element.
    """
    return [
        g + strength * (g * g) * (now - then) for g, now, then in zip(gradients, newest, own, strict=True)
    ]


@torch.no_grad()
def extrapolate(weights: list[Tensor], move: list[Tensor], factor: float) -> None:
    """Move weights on in place by so many times the move of their last step.

    Pipelines with stale weights do so (SpecTrain, arXiv 1809.02839), with the momentum for the move.
    """
    torch._foreach_add_(weights, move, alpha=factor)


def _gradient_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise ShoalError(f"replay: a parameter of shape {list(parameter.shape)} has no gradient")
    return parameter.grad


@torch.no_grad()
def _set(parameters: list[Tensor], weights: list[Tensor]) -> None:
    for parameter, value in zip(parameters, weights, strict=True):
        parameter.copy_(value)


def _step(
    parameters: list[Tensor], optimizer: Optimizer, gradients: list[Any], max_norm: float | None
) -> None:
    if max_norm is not None:
        scale_all(gradients, clip_factor(norm_of(gradients), max_norm))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
