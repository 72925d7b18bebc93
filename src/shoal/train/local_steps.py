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

With ``fragments=K`` a part of the model is exchanged after every H / K steps, and with ``delay`` the worker
takes more steps while that goes on. Weights are then ``mix * own + (1 - mix) * servers'``.

Sources: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
(arXiv 2311.08105), algorithm 1; Douillard et al., "Streaming DiLoCo with overlapping communication"
(arXiv 2501.18512), algorithm 2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.comm.native_group import python_group
from shoal.decide.bounded_waiting import Late, WaitingRule
from shoal.errors import UsageError
from shoal.train.bounded_waiting import BoundedWaiting
from shoal.train.fragments import AT_ONCE, Streaming, fragments_of
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
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.5,
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
        fragments: number of parts of the model, of whole layers and about equal size. Each is exchanged at
            its own time within the H steps, so that one exchange has about 1/``fragments`` of the bytes.
        delay: local steps that a worker takes while a fragment is exchanged; at most ``every // fragments``.
        mix: part of the worker's own weights in those after a delayed exchange; the rest are the servers'.
        quorum: number of workers with which an exchange is made; the mean is over these. A late worker
            continues with the steps of the next round: ``for inputs in training.batches(loader)``.
        late: ``"drop"`` drops the changes of late workers, ``"next"`` adds them to the next exchange.
        grace_s: with ``quorum``, seconds that an exchange with enough workers waits for the others.
        replicas: as in :func:`shoal.train.served_update.update_on_servers`.
        log: file to which rank 0 appends a line of JSON for each exchange: its number, the number of local
            steps since the last one and in all, its bytes, and a checksum (CRC-32C) of the weights after it;
            of a fragment also its number and the step of the merge. With ``quorum``, the log of
            :func:`shoal.train.bounded_waiting.bound_waiting`, with rounds for steps.

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
    streaming = Streaming(fragments, delay, mix)
    streaming.check(every)
    if quorum is not None and streaming.is_on:
        raise UsageError(
            f"quorum={quorum} with fragments={fragments}, delay={delay}: fragments are exchanged by all "
            "workers; leave one of them out"
        )
    if quorum is None and (late != "drop" or grace_s):
        raise UsageError(f"grace_s={grace_s} and late={late!r} are for exchanges with a quorum; give one")
    if quorum is None:
        return LocalSteps(model, inner, outer, every, log, streaming=streaming, replicas=replicas)
    size = dist.get_world_size(model.process_group)
    rule = WaitingRule(size, quorum, late, int(late == "next"), grace_s)
    return QuorumSteps(model, inner, outer, every, rule, log, replicas=replicas)


class LocalSteps:
    """Replaces the inner optimizer's ``step()``; made by :func:`take_local_steps`.

    Attributes:
        num_exchanges: exchanges so far; with fragments, each of a fragment counts.
        num_local: local steps since the last exchange of all weights.
        has_met: whether this worker has waited for all others since its last step.
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
        streaming: Streaming = AT_ONCE,
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
            streaming: as there.
            replicas: as there.
            own: tensors that each worker changes by itself, besides the statistics of batch norms: averaged,
                as those, in each exchange of all weights.
        """
        self._statistics, self._own, self._model_group = statistics_of(model), own, model.process_group
        self._inner, self._outer, self._every, self._log = inner, outer, every, log
        self._streaming = streaming
        self._group = python_group(model.process_group)
        self._servers = ServedTensors(self._group, outer, replicas=replicas)
        self._fragments = fragments_of(model.module, self._servers.tables, streaming.fragments)
        self._ends = [every * (k + 1) // streaming.fragments for k in range(streaming.fragments)]
        self.num_exchanges = self.num_local = 0
        self.has_met = True
        self._met_at = after
        try:
            self._configure()
        except ValueError as problem:  # such as all ranks on one host
            raise UsageError(f"take_local_steps: {problem}") from None
        self._servers.load(outer)
        outer.state.clear()
        # the weights after the last exchange; while one is under way, the moves
        self._begin = [table.parameter.detach().clone() for table in self._servers.tables]
        self._sent_at = [0] * streaming.fragments  # local steps, as num_local
        self._under_way: _UnderWay | None = None
        model.require_backward_grad_sync = False  # DDP then neither sends nor waits

    def step(self) -> None:
        """Take the worker's own step, and exchange what is due after it.

        Raises:
            CommError: a rank or a server was lost.
        """
        self._inner.step()
        self.end_step()

    def end_step(self) -> None:
        """Count a step that the worker has taken, or skipped, by itself; as :meth:`step`."""
        self.num_local, self.has_met = self.num_local + 1, False
        if not self._streaming.is_on:
            if self.num_local == self._every:
                self.exchange()
            return
        self._merge_due()
        place = (self.num_local - 1) % self._every + 1
        if place in self._ends:
            self._send(self._ends.index(place))
            self._merge_due()

    def finish(self) -> None:
        """Exchange what local steps are left, and bring the outer optimizer's state back; on all ranks.

        The weights of all workers are then equal. A run that is to continue saves ``inner.state_dict()`` of
        each worker.
        """
        self.exchange()
        self._servers.dump(self._outer)

    def exchange(self) -> None:
        """Exchange all weights, if there were local steps since the last time; all ranks call it.

        With fragments, the one that is under way is merged first.

        Raises:
            CommError: a rank or a server was lost.
        """
        if not self.num_local:
            return
        self._merge()
        left = [k for k, sent_at in enumerate(self._sent_at) if sent_at < self.num_local]
        places = [place for k in left for place in self._fragments[k]]
        self._configure()
        for work in self._take_moves(places):
            work.wait()
        torch._foreach_copy_([table.parameter.data for table in self._servers.tables], self._begin)
        unite([*self._statistics, *self._own], self._model_group)
        self._met_at, local_steps = self._met_at + self.num_local, self.num_local
        self.num_local, self.has_met, self._sent_at = 0, True, [0] * len(self._fragments)
        self._write(self._met_at, local_steps, places)

    # ---- fragments ----------------------------------------------------------------------------------------

    def _send(self, number: int) -> None:
        """Begin the exchange of a fragment's moves."""
        self._configure()
        works = self._take_moves(self._fragments[number])
        self._under_way = _UnderWay(number, self.num_local, works)

    def _merge_due(self) -> None:
        """Merge the fragment under way, if its delay is over."""
        found = self._under_way
        if found is not None and self.num_local - found.sent_at == self._streaming.delay:
            self._merge()

    @torch.no_grad()
    def _merge(self) -> None:
        """Wait for the fragment under way, if there is one, and mix its weights with this worker's own."""
        found, self._under_way = self._under_way, None
        if found is None:
            return
        for work in found.works:
            work.wait()
        self.has_met = True
        places = self._fragments[found.number]
        begin = [self._begin[place] for place in places]
        own = [self._servers.tables[place].parameter.data for place in places]
        if self._streaming.kept:
            torch._foreach_lerp_(own, begin, 1.0 - self._streaming.kept)
        else:
            torch._foreach_copy_(own, begin)
        since, self._sent_at[found.number] = found.sent_at - self._sent_at[found.number], found.sent_at
        self._write(self._met_at + found.sent_at, since, places, fragment=found.number)

    # ---- both ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _take_moves(self, places: Iterable[int]) -> list[Any]:
        """Send the moves of these tensors since they were last sent; return works for the weights."""
        tables = [self._servers.tables[place] for place in places]
        if not tables:
            return []
        begin = [self._begin[table.index] for table in tables]
        torch._foreach_sub_(begin, [table.parameter.data for table in tables])
        torch._foreach_mul_(begin, 1.0 / self._group.size())
        works = [self._servers.update(*each) for each in zip(tables, begin, strict=True)]
        for table in tables:
            table.step, table.has_state = table.step + 1, True
        return works

    def _configure(self) -> None:
        self._servers.configure(self._outer, f", after {self._every} local steps{self._streaming.text}")

    def _write(
        self, step: int, local_steps: int, places: Sequence[int], *, fragment: int | None = None
    ) -> None:
        """Write a line about an exchange of these tensors, after ``step``."""
        self.num_exchanges += 1
        if self._log is None or self._group.rank() != 0:
            return
        sent = [self._begin[place] for place in places]
        row = {"exchange": self.num_exchanges, "step": step, "local_steps": local_steps}
        row["bytes"] = sum(tensor.nbytes for tensor in sent)
        if fragment is None:
            row["weights"] = checksum(self._begin)
            if self._statistics:
                row["norms"] = checksum(self._statistics)
        else:
            row |= {"fragment": fragment, "merged": self._met_at + self.num_local, "weights": checksum(sent)}
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


@dataclass
class _UnderWay:
    """A fragment's exchange that has begun: its number, after how many local steps, and works to wait for."""

    number: int
    sent_at: int
    works: list[Any]


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
