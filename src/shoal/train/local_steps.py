"""Takes optimizer steps locally on each worker, and averages the weight changes every H steps (DiLoCo).

    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    inner = AdamW(ddp.parameters(), lr=4e-4)  # of each worker
    outer = SGD(ddp.parameters(), lr=0.7, momentum=0.9, nesterov=True)  # its state is on the servers
    training = take_local_steps(ddp, inner, outer, every=50)
    for inputs in loader:
        loss_of(ddp(inputs)).backward()
        training.step()  # replaces inner.step(); schedulers work as usual
    training.finish()

1.  A backward pass sends nothing, and ``step()`` is the worker's own ``inner.step()``.
2.  After every H steps each worker sends the change of its weights since the last exchange.
3.  The servers use the mean over the workers as a gradient, step with ``outer``, and answer with the new
    weights, from which all workers continue. The inner state stays on its worker.

The result is bit-identical to that of one process which takes the workers' local steps one after the other,
adds the changes in rank order, and steps with :class:`shoal.optim.sgd.SGD`. The log has a checksum of the
weights after each exchange, which such a replay can compare.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
(arXiv 2311.08105), algorithm 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.comm.native_group import python_group
from shoal.decide.bounded_waiting import Late, WaitingRule
from shoal.errors import UsageError
from shoal.train.bounded_waiting import BoundedWaiting
from shoal.train.served_checks import check_model, check_outer, forbid_hook
from shoal.train.served_tensors import ServedTensors, checksum
from shoal.train.weight_averaging import statistics_of, unite

_Batch = TypeVar("_Batch")


def take_local_steps(
    model: DistributedDataParallel,
    inner: Optimizer,
    outer: Optimizer,
    *,
    every: int,
    quorum: int | None = None,
    late: Late = "drop",
    grace_s: float = 0.0,
    replicas: int = 1,
    log: Path | None = None,
) -> LocalSteps | QuorumSteps:
    """Update each worker's weights locally, and average them with an outer optimizer every few steps.

    Call it on all ranks, before the first backward pass. The workers' copies of the weights become rank 0's.

    Args:
        model: of float32 parameters on the CPU, without a communication hook, on at least two hosts of
            backend ``"shoal"``; with buffers it needs ``broadcast_buffers=False``.
        inner: any optimizer over the model's parameters; each worker has its own state.
        outer: ``shoal.optim``'s SGD or AdamW, or torch's, over the same parameters. DiLoCo's is SGD with
            ``lr=0.7, momentum=0.9, nesterov=True``; SGD with ``lr=1.0`` averages the weights.
        every: local steps between exchanges, H.
        quorum: number of workers with which an exchange is made; the mean is over these. A late worker
            continues with the steps of the next round: ``for inputs in training.batches(loader)``.
        late: ``"drop"`` drops the changes of late workers, ``"next"`` adds them to the next exchange.
        grace_s: with ``quorum``, seconds that an exchange with enough workers waits for the others.
        replicas: as in :func:`shoal.train.served_update.update_on_servers`.
        log: file to which rank 0 appends a line of JSON for each exchange: its number, the number of local
            steps since the last one and in all, and a checksum (CRC-32C) of the weights after it. With
            ``quorum``, the log of :func:`shoal.train.bounded_waiting.bound_waiting`, with rounds for steps.

    Returns:
        An object whose ``step()`` replaces ``inner.step()``.

    Raises:
        UsageError: the model or the outer optimizer is not supported; the message says why.
        CommError: the ranks pass different options, or the servers lack memory.

    Example (needs two hosts)::

        model = DistributedDataParallel(nn.Linear(4, 2))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        training = take_local_steps(model, inner, SGD(model.parameters(), lr=1.0), every=2)
        for _ in range(4):
            model(torch.ones(3, 4)).sum().backward()
            training.step()
            inner.zero_grad()
    """
    forbid_hook(model)
    check_model(model)
    check_outer(outer, model)
    if every < 1:
        raise UsageError(f"every={every} local steps must be at least 1")
    if model.broadcast_buffers and any(True for _ in model.buffers()):
        raise UsageError(
            "take_local_steps: the model has buffers, which DDP broadcasts in each forward pass; give it "
            "broadcast_buffers=False"
        )
    if quorum is None and (late != "drop" or grace_s):
        raise UsageError(f"grace_s={grace_s} and late={late!r} are for exchanges with a quorum; give one")
    if quorum is None:
        return LocalSteps(model, inner, outer, every, log, replicas=replicas)
    size = dist.get_world_size(model.process_group)
    rule = WaitingRule(size, quorum, late, int(late == "next"), grace_s)
    return QuorumSteps(model, inner, outer, every, rule, log, replicas=replicas)


class LocalSteps:
    """Replaces the inner optimizer's ``step()``; made by :func:`take_local_steps`.

    Attributes:
        num_exchanges: exchanges so far.
        num_local: local steps since the last one.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        inner: Optimizer,
        outer: Optimizer,
        every: int,
        log: Path | None,
        *,
        after: int = 0,
        replicas: int = 1,
        own: Sequence[Tensor] = (),
    ) -> None:
        """Load the weights to the servers.

        Args:
            model: as in :func:`take_local_steps`.
            inner: as there.
            outer: as there.
            every: as there.
            log: as there.
            after: local steps that the weights have seen.
            replicas: as there.
            own: tensors that each worker changes by itself, besides the statistics of batch norms: averaged,
                as those, in each exchange.
        """
        self._statistics, self._own, self._model_group = statistics_of(model), own, model.process_group
        self._inner, self._outer, self._every, self._log = inner, outer, every, log
        self._group = python_group(model.process_group)
        self._servers = ServedTensors(self._group, outer, replicas=replicas)
        self.num_exchanges = self.num_local = 0
        self._step = after
        try:
            self._configure()
        except ValueError as problem:  # such as all ranks on one host
            raise UsageError(f"take_local_steps: {problem}") from None
        self._servers.load(outer)
        outer.state.clear()
        # the weights after the last exchange; while one is under way, the moves
        self._begin = [table.parameter.detach().clone() for table in self._servers.tables]
        model.require_backward_grad_sync = False  # DDP then neither sends nor waits

    def step(self) -> None:
        """Take the worker's own step, and after every H of them exchange the moves.

        Raises:
            CommError: a rank or a server was lost.
        """
        self._inner.step()
        self.end_step()

    def end_step(self) -> None:
        """Count a step that the worker has taken, or skipped, by itself; as :meth:`step`."""
        self.num_local += 1
        if self.num_local == self._every:
            self.exchange()

    def finish(self) -> None:
        """Exchange what local steps are left, and bring the outer optimizer's state back; on all ranks.

        The weights of all workers are then equal. A run that is to continue saves ``inner.state_dict()`` of
        each worker.
        """
        self.exchange()
        self._servers.dump(self._outer)

    @torch.no_grad()
    def exchange(self) -> None:
        """Step with the mean of the workers' moves, if they have made steps since the last time; all call it.

        Raises:
            CommError: a rank or a server was lost.
        """
        if not self.num_local:
            return
        servers, parameters = self._servers, [table.parameter for table in self._servers.tables]
        self._configure()
        torch._foreach_sub_(self._begin, parameters)
        torch._foreach_mul_(self._begin, 1.0 / self._group.size())
        works = [servers.update(*each) for each in zip(servers.tables, self._begin, strict=True)]
        for work in works:
            work.wait()
        torch._foreach_copy_(parameters, self._begin)
        unite([*self._statistics, *self._own], self._model_group)
        for table in servers.tables:
            table.step, table.has_state = table.step + 1, True
        self.num_exchanges += 1
        self._step += self.num_local
        self._write()
        self.num_local = 0

    def _configure(self) -> None:
        self._servers.configure(self._outer, f", after {self._every} local steps")

    def _write(self) -> None:
        if self._log is None or self._group.rank() != 0:
            return
        row = {
            "exchange": self.num_exchanges,
            "step": self._step,
            "local_steps": self.num_local,
            "weights": checksum(self._begin),
            **({"norms": checksum(self._statistics)} if self._statistics else {}),
        }
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class QuorumSteps:
    """Replaces the inner optimizer's ``step()``; made by :func:`take_local_steps` with a quorum.

    A round of local steps is what a batch is in :mod:`shoal.train.bounded_waiting`, and how far they have
    moved the weights is its gradient.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        inner: Optimizer,
        outer: Optimizer,
        every: int,
        rule: WaitingRule,
        log: Path | None,
        *,
        replicas: int = 1,
    ) -> None:
        self._inner, self._every = inner, every
        self._waiting = BoundedWaiting(model, outer, rule, max_norm=None, log=log, replicas=replicas)
        self._parameters = [p for group in outer.param_groups for p in group["params"] if p.requires_grad]
        self._begin = [parameter.detach().clone() for parameter in self._parameters]
        self._passed = self._num_local = 0

    @property
    def num_dropped(self) -> int:
        """Rounds of this worker that no exchange has taken."""
        return self._waiting.num_dropped

    def batches(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the loader's batches, without those of rounds that were exchanged while this worker was late.

        All workers' loaders have as many batches.
        """
        for batch in loader:
            number, self._passed = self._passed // self._every + 1, self._passed + 1
            if number == self._waiting.next_step:
                yield batch

    def step(self) -> None:
        """Take the worker's own step, and after every H of them exchange.

        Raises:
            CommError: a rank or a server was lost.
        """
        self._inner.step()
        self._num_local += 1
        if self._num_local == self._every:
            self._exchange()

    def finish(self) -> None:
        """Exchange what local steps are left, and bring the outer optimizer's state back; on all ranks."""
        if self._num_local:
            self._exchange()
        self._waiting.finish()

    def _exchange(self) -> None:
        set_moves(self._parameters, self._begin)
        self._waiting.hand_over(None)
        self._waiting.take_newest()
        torch._foreach_copy_(self._begin, [parameter.detach() for parameter in self._parameters])
        self._num_local = 0


@torch.no_grad()
def set_moves(parameters: list[Tensor], begin: list[Tensor]) -> None:
    """Set the gradient of each parameter to how far it has moved from ``begin``, against the move."""
    for parameter, before in zip(parameters, begin, strict=True):
        parameter.grad = before - parameter.detach()
