"""Reads the log of steps that did not wait for all workers: counts them, and repeats them in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.decide.fragments import FragmentSchedule, weights_of
from shoal.errors import ShoalError
from shoal.optim.moments import clip_factor, norm_of, scale_all
from shoal.train.servers.local import fragments_of, mix_into
from shoal.train.servers.tensors import checksum, tables_of
from shoal.train.servers.waiting import Counts, StepLog, compensate, extrapolate
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


def summary(log: Path) -> Summary:
    """Count the steps of a log and the gradients of each worker.

    Raises:
        ShoalError: the log is damaged.

    Example::

        counts = summary(Path("steps.jsonl"))
        assert max(counts.staleness) <= 2
    """
    rows = StepLog(log).rows()
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


def replay(
    log: Path,
    model: nn.Module,
    optimizer: Optimizer,
    backward: Callable[[int, int], None],
    *,
    schedule: Callable[[int], None] | None = None,
    max_norm: float | None = None,
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
    rows = StepLog(log).rows()
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    workers = _Workers(model, parameters, backward)
    dropped = bool(workers.statistics)  # a gradient that no step has taken changes them too
    weights = _Weights(parameters, rows, ("dropped", "used") if dropped else ("used",), extrapolation)
    asynchronous = False
    for index, row in enumerate(rows):
        if "hosts" in row:  # workers begin, and know no step yet
            workers.begin(row["hosts"])
            asynchronous = row.get("asynchronous", False)
            weights.forget_moves()
        for rank, batch, version in row.get("dropped", ()) if dropped else ():
            workers.compute(weights.after[version], rank, batch)
        if used := row.get("used"):
            if schedule is not None:
                schedule(used[0][2] + 1 if asynchronous else row["step"])
            begins = weights.extrapolated({version for _, _, version in used})
            gradients = _mean_of(row, workers, begins, compensation)
            _set(parameters, weights.after[row["step"] - 1])
            if not row.get("skipped"):
                _step(parameters, optimizer, gradients, max_norm)
            weights.add(row["step"], index)
        if "norms" in row:
            workers.unite_statistics()
        _compare(log, row, weights.newest, weights.after[weights.newest], workers.statistics)
    _set(parameters, weights.after[weights.newest])
    return weights.newest


def _compare(
    log: Path, row: dict[str, Any], step: int, weights: list[Tensor], statistics: list[Tensor]
) -> None:
    """Check the checksums in a row, if there are any."""
    for name, tensors in (("weights", weights), ("norms", statistics)):
        if name in row and checksum(tensors) != row[name]:
            raise ShoalError(
                f"{log}: the {name} after step {step} are not those of the workers; other data, initial "
                "weights or options"
            )


def replay_local(
    log: Path,
    model: nn.Module,
    outer: Optimizer,
    take_step: Callable[[int, int], None],
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.5,
) -> int:
    """Repeat local steps with ``wait_for``, and return the number of exchanges.

    The weights and the outer optimizer's state are those of the workers to the last bit. All local steps are
    taken again, in the order of each worker, those that no exchange has too.

    Args:
        log: that rank 0 has written.
        model: with the weights that rank 0 had at the beginning; not wrapped. At the end its batch norms have
            the statistics of the workers, too.
        outer: of :mod:`shoal.optim`, over the model's parameters.
        take_step: takes a local step of a rank on the model's parameters, with the optimizer of that rank;
            gets the rank and the number of the batch in its loader, from 1.
        every: as in :func:`shoal.train.servers.local.local_steps`.
        fragments: as there.
        delay: as there.
        mix: as there.

    Raises:
        ShoalError: the log is damaged, or has other weights, or statistics of batch norms, where the workers
            have noted theirs.

    Example::

        inners = [AdamW(model.parameters(), lr=4e-4) for _ in range(num_workers)]

        def take_step(rank, number):
            loss_of(model(batches_of[rank][number - 1])).backward()
            inners[rank].step()
            inners[rank].zero_grad()

        replay_local(Path("rounds.jsonl"), model, SGD(model.parameters(), lr=0.7), take_step, every=50)
    """
    parameters = [table.parameter for table in tables_of(outer)]
    fragment_indices = fragments_of(model, tables_of(outer), fragments)
    workers = _Workers(model, parameters, take_step)
    rounds = _LocalRounds(
        outer, workers, FragmentSchedule(every, fragments), fragment_indices, delay, mix if delay else 0.0
    )
    for row in StepLog(log).rows():
        if "hosts" in row:
            rounds.begin(row["hosts"])
        for rank, exchange, version, step, _ in row.get("dropped", ()):
            rounds.moves_of(rank, exchange, version, step)
        if row.get("used"):
            rounds.exchange(row["step"], row["used"])
        if "returned" in row:
            rounds.note_return(*row["returned"])
        if "left" in row:
            rounds.exchange_left(row["left"], row["tokens"])
        if "norms" in row:
            workers.unite_statistics()
        _compare(log, row, rounds.num_exchanges, rounds.newest, workers.statistics)
    _set(parameters, rounds.newest)
    return rounds.num_exchanges


@dataclass
class _LocalWorker:
    """A worker's weights, those of the exchanges that it has merged, and where it is.

    Attributes:
        own: its weights.
        begun: the servers' weights, from which its moves count.
        merged: the last exchange that it has merged.
        step: number of its last batch.
        waits: whether it has moves in an exchange that it has not merged.
        left_at: the step after which it had left, until it takes the newest weights.
    """

    own: list[Tensor]
    begun: list[Tensor]
    merged: int
    step: int
    waits: bool = False
    left_at: int | None = None


class _LocalRounds:
    """Makes the local steps and exchanges of all workers in one process.

    Args:
        outer: the outer optimizer.
        workers: that take the steps.
        schedule: of the exchanges.
        fragments: indices of the parameters of each fragment.
        delay: steps before a merge.
        kept: part of a worker's own weights that a merge keeps.

    Attributes:
        num_exchanges: so far.
        newest: the servers' weights.
    """

    def __init__(
        self,
        outer: Optimizer,
        workers: _Workers,
        schedule: FragmentSchedule,
        fragments: list[list[int]],
        delay: int,
        kept: float,
    ) -> None:
        self._outer, self._workers, self._schedule, self._fragments = outer, workers, schedule, fragments
        self._delay, self._kept = delay, kept
        self.num_exchanges, self.newest = 0, _copies(workers.parameters)
        self._after: dict[int, list[Tensor]] = {}  # by exchange: the weights of its fragment
        self._each: list[_LocalWorker] = []

    def begin(self, hosts: list[int]) -> None:
        """Begin with a worker on each of these hosts, all alike."""
        self._workers.begin(hosts)
        self._restart(self._schedule.end_of(self.num_exchanges))

    def moves_of(self, rank: int, exchange: int, version: int, step: int) -> list[Tensor]:
        """Take a worker's steps up to its share in an exchange; return its moves of the fragment.

        Args:
            rank: of the worker.
            exchange: for which the moves are meant.
            version: the last exchange that the worker has merged by then.
            step: after which they are handed over.
        """
        worker = self._each[rank]
        self._merge(rank, version, worker.step + self._delay)
        self._take_steps(rank, step)
        worker.waits = True
        return self._moves(worker, self._fragments[self._schedule.fragment_of(exchange)])

    def exchange(self, number: int, used: list[list[int]]) -> None:
        """Step with the mean of these moves."""
        indices = self._fragments[self._schedule.fragment_of(number)]
        weights = weights_of([tokens for *_, tokens in used])
        moves = {
            rank: _weighed(self.moves_of(rank, *more), weight)
            for (rank, *more, _), weight in zip(used, weights, strict=True)
        }
        self._step(indices, moves)
        self.num_exchanges = number
        self._after[number] = [self.newest[index] for index in indices]
        oldest = min(worker.merged for worker in self._each)
        self._after = {each: weights for each, weights in self._after.items() if each > oldest}

    def exchange_left(self, step: int, tokens: list[list[int]]) -> None:
        """Step with what all workers have left after this step; its tokens, of each fragment, by rank."""
        left = self._schedule.left_at(self.num_exchanges, step)
        indices = [index for number in left for index in self._fragments[number]]
        moves = {}
        for rank, worker in enumerate(self._each):
            self._merge(rank, self.num_exchanges, min(worker.step + self._delay, step))
            self._take_steps(rank, step)
            moves[rank] = [
                move
                for number, of_workers in zip(left, zip(*tokens, strict=True), strict=True)
                for move in _weighed(
                    self._moves(worker, self._fragments[number]), weights_of(of_workers)[rank]
                )
            ]
        self._step(indices, moves)
        self._restart(step)

    def _merge(self, rank: int, version: int, step: int) -> None:
        """Take the steps of the delay, up to ``step``, and merge the exchanges up to ``version``."""
        worker = self._each[rank]
        if not worker.waits and worker.left_at is None:
            return
        if worker.left_at is None:
            self._take_steps(rank, step)
        merged = []
        for exchange in self._schedule.changed(worker.merged, version):
            indices = self._fragments[self._schedule.fragment_of(exchange)]
            for index, weights in zip(indices, self._after[exchange], strict=True):
                worker.begun[index] = weights
            merged += indices
        if worker.left_at is None:
            mix_into(worker.own, worker.begun, merged, self._kept)
        else:
            worker.own = _copies(worker.begun)
        worker.merged, worker.waits, worker.left_at = version, False, None
        worker.step = max(worker.step, self._schedule.end_of(version))

    def note_return(self, rank: int, step: int, version: int) -> None:
        """Note that a worker has come back, which had left after this step, with these weights."""
        worker = self._each[rank]
        if worker.left_at is not None or version > worker.merged:
            self._merge(rank, version, worker.step + self._delay)
        self._take_steps(rank, step)
        worker.left_at = step

    def _take_steps(self, rank: int, until: int) -> None:
        worker = self._each[rank]
        while worker.step < until:
            worker.step += 1
            self._workers.compute(worker.own, rank, worker.step)
            worker.own = _copies(self._workers.parameters)

    @staticmethod
    def _moves(worker: _LocalWorker, indices: list[int]) -> list[Tensor]:
        return [worker.begun[index] - worker.own[index] for index in indices]

    def _step(self, indices: list[int], moves: dict[int, list[Tensor]]) -> None:
        """Step on these parameters with the sum of moves that have their weights, by rank."""
        parameters = self._workers.parameters
        zeros = [torch.zeros_like(parameters[index]) for index in indices]
        parts = [moves.get(rank, zeros) for rank in range(len(self._each))]
        total = _sum_over(self._workers.hosts, parts)
        _set(parameters, self.newest)
        self._outer.zero_grad()
        _step([parameters[index] for index in indices], self._outer, total, None)
        for index in indices:
            self.newest[index] = parameters[index].detach().clone()

    def _restart(self, step: int) -> None:
        """Continue all workers from the newest weights, after ``step``."""
        self._each = [
            _LocalWorker(_copies(self.newest), list(self.newest), self.num_exchanges, step)
            for _ in self._workers.hosts
        ]


class _Weights:
    """The weights after each step, as long as a later row of the log has a gradient of them.

    Args:
        parameters: the model's, which have the weights before the first step.
        rows: of the log.
        kinds: of the gradients in them that are computed, used and dropped.
        extrapolation: as for :func:`replay`.

    Attributes:
        after: by step, 0 for those at the beginning.
        newest: the last step.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        rows: list[dict[str, Any]],
        kinds: tuple[str, ...],
        extrapolation: float,
    ) -> None:
        self.after, self.newest = {0: _copies(parameters)}, 0
        self._parameters, self._extrapolation = parameters, extrapolation
        self._moves: dict[int, list[Tensor]] = {}
        self._last_use = {
            version: index
            for index, row in enumerate(rows)
            for kind in kinds
            for _, _, version in row.get(kind, ())
        }

    def forget_moves(self) -> None:
        """Take the newest weights for those of workers that know no step before."""
        self._moves = {self.newest: [torch.zeros_like(each) for each in self.after[self.newest]]}

    def extrapolated(self, versions: set[int]) -> dict[int, list[Tensor]]:
        """Return the weights with which the workers have computed gradients of these."""
        begins = dict(self.after)
        for version in versions if self._extrapolation else ():
            begins[version] = _copies(self.after[version])
            extrapolate(begins[version], self._moves[version], self._extrapolation * (self.newest - version))
        return begins

    def add(self, step: int, index: int) -> None:
        """Note the weights after a step, and forget those that no row after ``index`` needs."""
        before, self.newest, self.after[step] = self.newest, step, _copies(self._parameters)
        if self._extrapolation:
            pairs = zip(self.after[step], self.after[before], strict=True)
            self._moves[step] = [now - then for now, then in pairs]
        for tensors in (self.after, self._moves):
            for version in [v for v in tensors if v != step and self._last_use.get(v, 0) <= index]:
                del tensors[version]


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


def _weighed(tensors: list[Tensor], weight: float) -> list[Tensor]:
    return [tensor * weight for tensor in tensors]


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
