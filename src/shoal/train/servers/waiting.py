"""Updates on servers without waiting for all workers: backup workers, bounded staleness, asynchronous steps.

    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = AdamW(ddp.parameters(), lr=1e-4)
    with bound_waiting(ddp, optimizer, wait_for=7) as steps:  # of 8; or staleness=2
        for inputs in steps.batches(loader):
            loss_of(ddp(inputs)).backward()
            optimizer.step()  # schedulers follow steps.next_step
            optimizer.zero_grad()

1.  Weights and the optimizer's state are on the servers (:mod:`shoal.train.servers.update`). A backward pass
    sends nothing; ``optimizer.step()`` reports to rank 0 that this worker has a gradient.
2.  Rank 0 decides which gradients the next step takes (:mod:`shoal.decide.bounded_waiting`), and broadcasts
    it.
3.  A thread of each worker then sends its gradient, or zeros if it is not in the step, and receives the new
    weights. It does so while the worker still computes: only its computation is late, its zeros are not.
4.  ``optimizer.step()`` returns when the worker may continue, with the newest weights.

Rank 0 writes a log of the gradients in each step, from which :func:`shoal.train.servers.log.replay` repeats
the training in one process, bit for bit.

Sources: Chen et al., "Revisiting Distributed Synchronous SGD" (arXiv 1604.00981) for ``wait_for``; Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (NIPS 2013) for
``staleness``, here with steps that always take the gradients of a whole batch. Asynchronous steps are
experimental: they usually train worse than the other modes.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal import record
from shoal.comm.native_group import python_group
from shoal.decide.bounded_waiting import Late, Share, WaitingRule
from shoal.decide.fragments import FragmentSchedule, weights_of
from shoal.errors import ShoalError, UsageError
from shoal.optim.moments import norm_of, parameters_of, scale_all
from shoal.train.config import ServersConfig
from shoal.train.gradients import ManyWorkers, require_same
from shoal.train.servers.messages import (
    Coordinator,
    CoordinatorConnection,
    Mail,
    Message,
    Then,
    gather,
    hosts_of,
    max_bytes_of,
    weight_of,
)
from shoal.train.servers.rules import (
    check_buffers,
    check_gradient_hooks,
    check_max_norm,
    check_model,
    check_momentum,
    check_optimizer,
)
from shoal.train.servers.tensors import (
    ServedTensors,
    checksum,
    factor_of,
    kernel_of,
    set_values,
    values_of,
)
from shoal.train.servers.update import RowLog, ServersUpdate
from shoal.train.weight_averaging import statistics_of, unite

LOG = "contributions.jsonl"
"""Name of the log of steps in a run's directory; :func:`shoal.train.servers.log.replay` reads it."""
_Batch = TypeVar("_Batch")
_POLL_S = 1.0


def update_of_run(
    model: ManyWorkers,
    optimizer: Optimizer,
    config: ServersConfig,
    *,
    directory: Path,
    own: Sequence[Tensor],
) -> BoundedSteps:
    """Return the update of a run in modes ``bounded`` and ``async``.

    Args:
        model: that of the run.
        optimizer: that of the run.
        config: the mode and its options.
        directory: of the run, for the log.
        own: tensors of the run's state that no servers have.
    """
    return BoundedSteps(model, optimizer, config, max_norm=math.inf, log=directory / LOG, own=own)


def bound_waiting(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    *,
    wait_for: int | None = None,
    late: Late = "drop",
    staleness: int | None = None,
    grace_s: float = 0.0,
    asynchronous: bool = False,
    compensation: float = 0.0,
    extrapolation: float = 0.0,
    max_norm: float | None = None,
    replicas: Literal[1, 2] = 1,
    log: Path | None = None,
) -> BoundedSteps:
    """Update on servers as soon as enough workers have gradients, or with workers that run ahead.

    All ranks enter the context before the first backward pass. The workers' copies of the weights become
    rank 0's. The options are those of :class:`shoal.train.config.ServersConfig`.

    Args:
        model: of float32 parameters on the CPU or on a GPU, where they stay, without a communication hook, on
            at least two hosts of backend ``"shoal"``; with buffers it needs ``broadcast_buffers=False``.
        optimizer: one that :func:`shoal.train.servers.update.update_on_servers` takes; its state goes to the
            servers.
        wait_for: a step is taken when this number of workers have their gradients, with their mean. A worker
            that is late continues with the batch of the next step, so it sees fewer batches.
        late: ``"drop"`` drops late gradients, ``"next"`` adds them to the next step.
        staleness: without ``wait_for``, a step takes the gradients of all workers, and a worker begins with
            weights that lack at most this number of steps. With ``late="next"``, the largest staleness of a
            late gradient, 1 by default: steps then wait for the worker that would exceed it.
        grace_s: with ``wait_for``, seconds for which a step that has enough gradients waits for the others: a
            tenth of a step's time, so that workers as fast as others are not late by chance.
        asynchronous: experimental; instead of ``wait_for`` or ``staleness``: each gradient is a step of its
            own on arrival, with any staleness. The optimizer must have no momentum.
        compensation: with ``asynchronous``, the strength λ of the correction for weights that have changed
            meanwhile (DC-ASGD): g + λ g² (w - w of the gradient); 0.04 in MXNet. 4 bytes a parameter more.
        extrapolation: with ``staleness`` alone: compute a gradient that lacks s steps with weights that are s
            times this many of the last step further on; 1 assumes equal steps. 4 bytes a parameter more.
        max_norm: clip the norm of a step's mean gradient to this. A norm that is not finite skips the step.
        replicas: as in :func:`shoal.train.servers.update.update_on_servers`.
        log: file to which rank 0 appends a line of JSON for each step.

    Returns:
        A context in which ``optimizer.step()`` takes part in these steps.

    Raises:
        UsageError: the options do not go together, or the model or optimizer cannot be served.
        CommError: the ranks give different options, or the servers lack memory.

    Example (needs three hosts)::

        model = DistributedDataParallel(nn.Linear(4, 2))
        optimizer = AdamW(model.parameters(), lr=0.1)
        with bound_waiting(model, optimizer, wait_for=2, log=Path("steps.jsonl")) as steps:
            for inputs in steps.batches(torch.randn(10, 3, 4)):
                model(inputs).square().mean().backward()
                optimizer.step()
    """
    config = ServersConfig(
        mode="async" if asynchronous else "bounded", wait_for=wait_for, late=late, staleness=staleness,
        grace_s=grace_s, compensation=compensation, extrapolation=extrapolation, replicas=replicas,
    )  # fmt: skip
    return BoundedSteps(model, optimizer, config, max_norm=max_norm, log=log)


@dataclass(eq=False)
class _Gradient:
    """A gradient that this worker has handed over.

    Attributes:
        batch: number of the step for which it is meant; of asynchronous steps, of this worker's batches.
        tensors: one for each parameter.
        weights: those that it is the gradient of, for compensation.
        ready: after the device's work on both.
        step: the step that has taken or dropped it.
    """

    batch: int
    tensors: list[Tensor]
    weights: list[Tensor]
    ready: torch.cuda.Event | None
    step: int | None = None


@dataclass(frozen=True)
class LeftMoves:
    """Moves of fragments since their last exchanges, where all workers synchronize.

    Attributes:
        step: the local step, the same on all workers.
        fragments: their numbers.
        moves: of the parameters of one fragment after the other.
        tokens: this worker's, of each fragment.
    """

    step: int
    fragments: list[int]
    moves: list[Tensor]
    tokens: list[int]


class BoundedSteps(ServersUpdate):
    """Servers step with the gradients of some workers, or of older weights (modes ``bounded``, ``async``).

    Checkpoints hold what they hold without servers. Of an asynchronous run, a step is a batch of each worker,
    and as many updates of the weights.

    Args:
        model: as in :func:`bound_waiting`.
        optimizer: as there. It holds the options; its state is on the servers until :meth:`bring_state`.
        config: the mode and its options; of mode ``local`` those of its exchanges.
        max_norm: as in :func:`bound_waiting`; ``math.inf`` only measures.
        log: as there.
        own: tensors that each worker changes on its own, besides the statistics of batch norms: averaged, as
            those, where all workers synchronize.
        fragments: indices of the parameters of each fragment of the model; steps are of one after the other.
            By default a step is of all parameters.

    Attributes:
        num_dropped: gradients of this worker that no step has taken.
        step: of a run: the steps that this worker has passed.

    Raises:
        UsageError: the options do not go together, or the model or optimizer cannot be served.
    """

    is_synchronous = False

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        config: ServersConfig,
        *,
        max_norm: float | None = None,
        log: Path | None = None,
        own: Sequence[Tensor] = (),
        fragments: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(model, optimizer, max_norm=max_norm)
        check_model(model)
        check_optimizer(optimizer, model)
        check_max_norm(optimizer, max_norm)
        check_buffers(model)
        self._rule = config.rule(dist.get_world_size(model.process_group))
        check_momentum(optimizer, config)
        self.note = f"servers step with {self._rule.text}; the gradients of each step are in {LOG}"
        is_first = dist.get_rank(model.process_group) == 0
        self._log, self._config = StepLog(log if is_first else None), config
        self._statistics, self._own = statistics_of(model), own
        self._fragments = fragments
        self.num_dropped = 0
        self._first = self.step = 0
        self._is_settled, self._asks = True, False

    def _begin(self, step: int) -> None:
        """Load the weights to the servers, and begin to follow rank 0."""
        rule = self._rule
        after = step * rule.num_workers if rule.asynchronous else step
        self._first = self.step = self._num_handed = step  # of asynchronous steps, all have had as many
        self._follower = Follower(
            self.model.process_group, self.optimizer, self._config, rule, after=after,
            max_norm=self._max_norm, log=self._log, statistics=self._statistics, own=self._own,
            fragments=self._fragments,
        )  # fmt: skip
        self.optimizer.state.clear()
        self.model.require_backward_grad_sync = False  # DDP then neither sends nor waits
        self._batch = after + 1  # that comes next, on this worker
        self._passed = after  # batches of the loader
        self._own_version = after  # of the parameters
        self._follower.start()

    # ---- of a run ---------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        if self._rule.asynchronous:
            self._log.require_workers(self._rule.num_workers)
        self._log.go_back(step * (self._rule.num_workers if self._rule.asynchronous else 1))
        super().open(step)

    def runs_ahead(self, *, asks: bool) -> bool:
        self._asks = asks
        if self.until == self.step:
            self.settle()
        return not self._is_settled

    def settle(self) -> bool:
        if not self._is_settled:
            self.synchronize()
            self._is_settled = True
        return True

    def step_after(self, number: int) -> int:
        return self.step

    def finish_gradients(
        self, *optimizers: Optimizer, max_norm: float | None, per_worker: bool, loss_scale: float
    ) -> Tensor:
        """Hand the gradients over; return the norm of those of the newest step that this worker knows."""
        require_same(self.optimizer, optimizers)
        check_max_norm(self.optimizer, max_norm)
        gradients = [p.grad for p in parameters_of(*optimizers) if p.grad is not None]
        scale_all(gradients, 1.0 / loss_scale)
        own = norm_of(gradients) if self.step == self._first else math.nan
        self._is_settled = False
        self.hand_over(max_norm, asks=self._asks)
        norm = self.grad_norm
        return torch.tensor(own if math.isnan(norm) and self.step == self._first else norm)

    def apply(self, *optimizers: Optimizer) -> None:
        self.take_newest()
        self.step = self.step + 1 if self._rule.asynchronous else self.next_step - 1

    def row(self) -> record.Contributions:
        """Return the counts of gradients since the last such row."""
        return self.take_row(self.step)

    # ---- of a context -----------------------------------------------------------------------------

    def _take_step(self) -> None:
        """Hand the gradients over, and wait until this worker may continue, with the newest weights.

        Raises:
            UsageError: a parameter has no gradient, or the batch is not one of :meth:`batches`.
            CommError: a rank or a server was lost, or the ranks disagree.
        """
        if self._passed != self._batch:
            raise UsageError(
                "bound_waiting: optimizer.step() belongs after each batch of "
                "`for ... in steps.batches(loader)`"
            )
        self.hand_over(self._max_norm)
        self.take_newest()

    def _end(self) -> None:
        self.bring_state(ends=True)

    @property
    def next_step(self) -> int:
        """Number of the step for which the next batch is meant, from 1: schedules depend on it."""
        return self._batch

    def batches(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the loader's batches, without those whose steps were taken while this worker was late.

        All workers' loaders have as many batches. It may be called for epoch after epoch.
        """
        for batch in loader:
            self._passed = self._batch if self._rule.asynchronous else self._passed + 1
            if self._passed == self._batch:
                yield batch
                if self._passed == self._batch:
                    raise UsageError(
                        "bound_waiting: a batch without optimizer.step(), which all of batches() need"
                    )

    # ---- of both ----------------------------------------------------------------------------------

    def hand_over(self, max_norm: float | None, *, asks: bool = False) -> None:
        """Hand the gradients over, and wait until this worker may continue.

        Args:
            max_norm: to which the step clips; the same on all workers.
            asks: ask all workers to synchronize soon, after step :attr:`until`.
        """
        self.send(self._take_gradients(), max_norm, asks=asks)
        self.wait_for_step()

    def send(
        self,
        tensors: list[Tensor],
        max_norm: float | None,
        *,
        asks: bool = False,
        share: Share | None = None,
    ) -> None:
        """Hand gradients over, and do not wait.

        Args:
            tensors: the gradients of the parameters that the step is of, which do not change any more.
            max_norm: as for :meth:`hand_over`.
            asks: as there.
            share: of local steps: those that the tensors are the change of.
        """
        gradient = self._sent = self._keep(tensors)
        self.optimizer.state.clear()  # of bring_state()
        limit = max_norm if max_norm is not None and math.isfinite(max_norm) else None
        options = {"groups": values_of(self.optimizer), "max_norm": limit}
        self._follower.send(
            {
                "kind": "ready", "batch": gradient.batch, "version": self._own_version, "asks": asks,
                "options": options, **({"share": astuple(share)} if share else {}),
            }
        )  # fmt: skip

    def wait_for_step(self) -> None:
        """Wait until this worker may continue after the gradients that it has handed over last."""
        self._wait_until(lambda: self._may_go_on(self._sent))

    def take_newest(self, into: list[Tensor] | None = None) -> None:
        """Copy the newest weights into the model, or ``into`` other memory, and begin the next batch."""
        ahead = self._batch + 1 if self._rule.waits_for_all else None
        self._own_version = self._follower.copy_newest(self._own_version, ahead, into=into)
        self._batch = ahead or self._own_version + 1

    def leave(self) -> None:
        """Exclude this worker from the steps' waiting, until :meth:`come_back`."""
        self._follower.send({"kind": "away"})

    def come_back(self, step: int) -> None:
        """Include this worker in the steps' waiting again; it had left after this local step."""
        before = self._follower.num_returns
        self._follower.send({"kind": "back", "step": step, "version": self._own_version})
        self._wait_until(lambda: self._follower.num_returns > before)

    @property
    def until(self) -> int | None:
        """The batch after which all workers synchronize, because one has asked for it.

        Of asynchronous steps, the number of batches of each worker.
        """
        return self._follower.until

    @property
    def is_closing(self) -> bool:
        """True if the step of the next batch only waits for what workers have done so far."""
        return self._follower.closing >= self._batch

    def take_row(self, step: int) -> record.Contributions:
        """Return counts of the gradients that steps have taken or dropped since the last call."""
        return self._follower.take_counts().row(step)

    def bring_state(self, *, ends: bool = False, left: LeftMoves | None = None) -> None:
        """Wait for all workers; all then have the same weights, and the optimizer its state.

        All ranks call it after as many batches.

        Args:
            ends: whether no batch follows.
            left: as for :meth:`synchronize`.

        Raises:
            CommError: a rank or a server was lost, or the ranks have different numbers of batches.
        """
        self.synchronize("dump", ends=ends, left=left)
        stepper = self._follower.optimizer
        self.optimizer.state.clear()
        self.optimizer.state.update(stepper.state)
        stepper.state.clear()
        self._is_settled = True

    def synchronize(
        self, then: Then = "nothing", *, ends: bool = False, left: LeftMoves | None = None
    ) -> None:
        """Wait for all workers, which then have the same weights; all call it after as many batches.

        Args:
            then: the action of the servers on the optimizer's state: nothing, dump it, or load it.
            ends: whether no batch follows.
            left: moves of which the servers take the mean over all workers first.
        """
        follower = self._follower
        follower.left = left
        follower.note_work()
        before = follower.num_synchronized
        last = self._num_handed if self._rule.asynchronous else self._batch - 1
        follower.send({"kind": "synchronize", "batch": last, "then": then, "ends": ends})
        self._wait_until(lambda: follower.num_synchronized > before)
        self._own_version = follower.copy_newest(self._own_version)
        self._passed, self._batch = self._own_version, self._own_version + 1

    def copy_all(self, into: list[Tensor]) -> None:
        """Copy the newest weights of all fragments into other memory."""
        self._follower.copy_all(into)

    def indices_of(self, step: int) -> Sequence[int]:
        """Return the indices of the parameters that a step is of."""
        return self._follower.indices_of(step)

    def renew(self, optimizer: Optimizer) -> None:
        """Continue with another optimizer of the same kind and groups, from its state. A collective."""
        self.settle()
        self._remove_hooks()
        self.optimizer, stepper = optimizer, _copy_of(optimizer)
        self._follower.optimizer = stepper
        self._hook_steps()
        stepper.state.update(optimizer.state)
        self.synchronize("load")
        stepper.state.clear()
        optimizer.state.clear()

    def _take_gradients(self) -> list[Tensor]:
        parameters = self._follower.parameters
        check_gradient_hooks(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                raise UsageError(
                    f"weights on servers: a parameter of shape {list(parameter.shape)} has no gradient; all "
                    "have to be used in each step, or frozen"
                )
        tensors = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return tensors  # type: ignore[return-value]  # each was checked

    def _keep(self, tensors: list[Tensor]) -> _Gradient:
        parameters = self._follower.parameters
        weights = [each.detach().clone() for each in parameters] if self._config.compensation else []
        self._num_handed += 1
        batch = self._num_handed if self._rule.asynchronous else self._batch
        ready = self._follower.mark()
        gradient = _Gradient(batch, tensors, weights, ready)
        self._follower.add(gradient)
        return gradient

    def _may_go_on(self, gradient: _Gradient) -> bool:
        version = self._follower.version
        if self._rule.waits_for_all:
            return version >= gradient.batch - self._rule.staleness
        if self._rule.late == "drop" and not self._rule.grace_s:
            return version >= gradient.batch  # a step that takes it has this number
        return gradient.step is not None and version >= gradient.step

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        follower = self._follower
        follower.wait_until(holds)
        self.grad_norm, self.num_skipped = follower.grad_norm, follower.num_skipped
        self.num_dropped = follower.num_dropped


class Follower:
    """Takes part in the steps that rank 0 decides, on a thread of its own, and keeps the newest weights.

    Args:
        group: of the workers; a new one of the same ranks is for the steps and their messages.
        optimizer: with the state that the servers get.
        config: the mode and its options.
        rule: for whom steps wait.
        after: steps that the weights have seen.
        max_norm: as in :func:`bound_waiting`.
        log: on rank 0, for a line a step.
        statistics: of this worker's batch norms.
        own: other tensors that are averaged where all workers synchronize.
        fragments: as in :class:`BoundedSteps`.

    Attributes:
        optimizer: a copy over the same parameters, with the options of the step that the servers take.
        parameters: those that are trained.
        version: steps that the newest weights have seen.
        closing: the last step for which workers hand over what they have.
        until: the batch after which all workers synchronize, because one has asked for it.
        num_synchronized: times that all have.
        num_returns: times that this worker has come back.
        grad_norm: norm of the last step's gradient before clipping, where it is measured; else NaN.
        num_skipped: steps not taken because that was not finite.
        num_dropped: gradients of this worker that no step has taken.
        left: moves of which the servers take the mean when all synchronize.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        optimizer: Optimizer,
        config: ServersConfig,
        rule: WaitingRule,
        *,
        after: int,
        max_norm: float | None,
        log: StepLog,
        statistics: list[Tensor],
        own: Sequence[Tensor],
        fragments: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.optimizer = _copy_of(optimizer)
        self._workers, self._group = group, python_group(group).duplicate()
        self._rule, self._log, self._statistics, self._own = rule, log, statistics, own
        self._compensation, self._extrapolation = config.compensation, config.extrapolation
        self._phased = kernel_of(optimizer).decide is not None or max_norm is not None
        self._servers = ServedTensors(self._group, self.optimizer, replicas=config.replicas)
        self.parameters = [table.parameter for table in self._servers.tables]
        self._fragments = fragments or [range(len(self.parameters))]
        self._schedule = FragmentSchedule(len(self._fragments), len(self._fragments))
        self.left: LeftMoves | None = None
        more = f", with {rule.text}, max_norm={max_norm}, compensation={self._compensation}"
        self._servers.configure(self.optimizer, f"{more}, extrapolation={self._extrapolation}")
        self._servers.load(optimizer)
        self._newest = [parameter.detach().clone() for parameter in self.parameters]
        self._spare = [torch.empty_like(each) for each in self._newest]
        device = self.parameters[0].device
        # A GPU's work for steps is not queued behind what this worker computes meanwhile.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._published: torch.cuda.Event | None = None  # after the newest weights have come
        self._read = self.mark()  # after the worker's work on weights and statistics
        self._united = after  # the step after which all had the same statistics
        self._changed = threading.Condition()
        # what follows is shared by this worker's two threads, under that lock
        moved = self._newest if self._extrapolation else []
        self._move = [torch.zeros_like(each) for each in moved]  # of the last step
        self.version = after
        self.closing = after
        self.until: int | None = None
        self.num_synchronized = self.num_skipped = self.num_dropped = self.num_returns = 0
        self.grad_norm = math.nan
        self._counts = Counts(rule.num_workers)
        self._handed: list[_Gradient] = []
        self._problem: Exception | None = None

    # ---- called by the worker ---------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, and on rank 0 that of the coordinator. All ranks call it."""
        mail = Mail(self._group, max_bytes_of(self._rule.num_workers, len(self.optimizer.param_groups)))
        is_first = self._group.rank() == 0
        coordinator = Coordinator(mail, self._rule, after=self.version) if is_first else None
        hosts = hosts_of(self._group)
        if coordinator is not None:
            self._log.write(
                {
                    "workers": self._rule.num_workers, "hosts": hosts, "after": self.version,
                    "asynchronous": self._rule.asynchronous,
                }
            )  # fmt: skip
            self._start(coordinator.listen, "shoal-coordinator")
        self._line = CoordinatorConnection(mail, coordinator)
        self._start(self._follow, "shoal-steps")

    def send(self, message: Message) -> None:
        """Send a message to the coordinator."""
        self._line.send(message)

    def add(self, gradient: _Gradient) -> None:
        """Keep a gradient until a step takes or drops it."""
        with self._changed:
            self._handed.append(gradient)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after what the calling thread has queued on a GPU; ``None`` on a CPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    def note_work(self) -> None:
        """Note what the worker has queued: the thread's work on its tensors comes after it."""
        with self._changed:
            self._read = self.mark()

    def _after(self, event: torch.cuda.Event | None) -> None:
        """Make the calling thread's work on a GPU wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self.parameters[0].device).wait_event(event)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition on the attributes holds; raise the error of a thread that has failed."""
        with self._changed:
            while not holds():
                if self._problem is not None:
                    raise self._problem
                self._changed.wait(_POLL_S)  # in short waits, so that Python handles signals

    def take_counts(self) -> Counts:
        """Return counts of the gradients that steps have taken or dropped since the last call."""
        with self._changed:
            counts, self._counts = self._counts, Counts(self._rule.num_workers)
        return counts

    @torch.no_grad()
    def copy_newest(self, known: int, batch: int | None = None, into: list[Tensor] | None = None) -> int:
        """Copy the newest weights into the parameters, and return the steps that they have seen.

        Args:
            known: steps that the parameters have seen; those of fragments without a step since then stay.
            batch: extrapolate for this batch, by the steps that the weights lack then.
            into: other memory instead of the parameters.
        """
        target = self.parameters if into is None else into
        with self._changed:
            self._after(self._published)
            changed = [
                index
                for step in self._schedule.changed(known, self.version)
                for index in self.indices_of(step)
            ]
            if self._extrapolation:
                changed = list(range(len(self.parameters)))
            if changed:
                torch._foreach_copy_(
                    [target[index] for index in changed], [self._newest[index] for index in changed]
                )
            if self._extrapolation and batch is not None:
                num_lacking = batch - 1 - self.version
                extrapolate(self.parameters, self._move, self._extrapolation * num_lacking)
            self._read = self.mark()
            return self.version

    @torch.no_grad()
    def copy_all(self, into: list[Tensor]) -> None:
        """Copy the newest weights of all fragments."""
        with self._changed:
            self._after(self._published)
            torch._foreach_copy_(into, self._newest)
            self._read = self.mark()

    def indices_of(self, step: int) -> Sequence[int]:
        """Return the indices of the parameters that a step is of."""
        return self._fragments[self._schedule.fragment_of(step)]

    # ---- the thread -------------------------------------------------------------------------------

    def _start(self, run: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                with torch.cuda.stream(self._stream):
                    run()
            except Exception as problem:  # noqa: BLE001  # raised at the next step
                with self._changed:
                    self._problem = self._problem or problem
                    self._changed.notify_all()

        threading.Thread(target=guarded, name=name, daemon=True).start()

    @torch.no_grad()
    def _follow(self) -> None:
        has_ended = False
        while not has_ended:
            order = self._line.next_order()
            kind = order["kind"]
            if kind == "step":
                self._apply_order(order)
            elif kind == "close":
                with self._changed:
                    self.closing = order["step"]
            elif kind == "back":
                self._note_return(order)
            elif kind == "synchronize":
                self._synchronize(order)
                has_ended = order["ends"]
            elif kind == "late":
                row = {"step": self.version, "used": [], "dropped": order["dropped"]}
                self._drop(order["dropped"], self.version)
                with self._changed:
                    self._counts.add(row)
                self._log.write(row)
            else:
                raise UsageError(f"weights on servers: {order.get('reason')}")

    def _apply_order(self, order: Message) -> None:
        """Send this worker's part of a step, or zeros, and receive the weights after it."""
        step, used, indices = order["step"], order["used"], self.indices_of(order["step"])
        own = self._settle(used, step)
        with self._changed:
            self._after(self._read)  # of the memory that is written now
        for each in own:
            self._after(each.ready)
        self._drop(order["dropped"], step)
        set_values(self.optimizer, order["options"]["groups"])
        if own and self._compensation:
            taken = own[0]
            taken.tensors = compensate(taken.tensors, self._newest, taken.weights, self._compensation)
        if own:
            self._fill(indices, own[0].tensors, weight_of(self._group.rank(), used))
        else:
            torch._foreach_zero_([self._spare[index] for index in indices])
        is_taken = self._update(indices, order["options"]["max_norm"])
        with self._changed:
            if is_taken:
                self._swap(indices)
            if self._extrapolation:
                self._after(self._read)
                torch._foreach_copy_(self._move, self._newest)
                torch._foreach_sub_(self._move, self._spare if is_taken else self._newest)
            self._published = self.mark()
            self.num_skipped += not is_taken
            self.version, self.until = step, order["until"]
            self._counts.add(order)
            self._changed.notify_all()
        self._log.write(
            {
                "step": step,
                "used": used,
                "dropped": order["dropped"],
                **({} if is_taken else {"skipped": True}),
            }
        )

    def _fill(self, indices: Sequence[int], tensors: Sequence[Tensor], weight: float) -> None:
        """Write this worker's part of a step to the spare memory: the tensors with their weight."""
        for index, tensor in zip(indices, tensors, strict=True):
            torch.mul(tensor, weight, out=self._spare[index])

    def _update(self, indices: Sequence[int], max_norm: float | None) -> bool:
        """Step on the servers with the gradients in the spare memory; return whether they did."""
        servers = self._servers
        updates = [(servers.tables[index], self._spare[index]) for index in indices]
        if not self._phased:
            servers.configure(self.optimizer)
            _wait_for_all([servers.update(*each) for each in updates])
        else:
            _wait_for_all([servers.collect(*each) for each in updates])
            self.grad_norm = servers.totals()[1]
            if not math.isfinite(self.grad_norm):
                return False
            factor = factor_of(self.optimizer, self.grad_norm, max_norm)
            _wait_for_all(servers.finish_updates(self.optimizer, updates, factor))
        for table, _ in updates:
            table.step, table.has_state = table.step + 1, True
        return True

    def _swap(self, indices: Sequence[int]) -> None:
        """Swap the weights in the spare memory with the newest ones."""
        for index in indices:
            self._newest[index], self._spare[index] = self._spare[index], self._newest[index]

    def _exchange_left(self, step: int) -> bool:
        """Step with the mean of what all workers have left, after ``step``; return whether they have."""
        left, self.left = self.left, None
        if left is None:
            return False
        tokens = gather(self._group, left.tokens)
        moves, indices = iter(left.moves), list[int]()
        for number, of_workers in zip(left.fragments, zip(*tokens, strict=True), strict=True):
            part = self._fragments[number]
            weight = weights_of(of_workers)[self._group.rank()]
            self._fill(part, list(itertools.islice(moves, len(part))), weight)
            indices += part
        self._update(indices, None)
        with self._changed:
            self._swap(indices)
        row = {"step": step, "used": [], "dropped": [], "left": left.step, "tokens": tokens}
        self._log.write(row)
        return True

    def _settle(self, gradients: list[list[int]], step: int) -> list[_Gradient]:
        """Note that these are taken or dropped once ``step`` is done; return this worker's ones."""
        batches = {batch for rank, batch, *_ in gradients if rank == self._group.rank()}
        with self._changed:
            own = [each for each in self._handed if each.batch in batches]
            self._handed = [each for each in self._handed if each.batch not in batches]
            for each in own:
                each.step = step
            self._changed.notify_all()
        return own

    def _drop(self, gradients: list[list[int]], step: int) -> None:
        self.num_dropped += len(self._settle(gradients, step))

    def _note_return(self, order: Message) -> None:
        rank = order["rank"]
        returned = [rank, order["step"], order["version"]]
        self._log.write({"step": self.version, "used": [], "dropped": [], "returned": returned})
        with self._changed:
            self.num_returns += rank == self._group.rank()
            self._changed.notify_all()

    def _synchronize(self, order: Message) -> None:
        sums = {}
        with self._changed:
            self._after(self._read)
        had_left = self._exchange_left(order["step"])
        if had_left or order["step"] != self._united:  # once: means of means have other last bits
            self._united = order["step"]
            unite([*self._statistics, *self._own], self._workers)
            if self._statistics:
                sums["norms"] = checksum(self._statistics)
        if order["then"] == "dump":
            self._servers.dump(self.optimizer)
            if self._log.path is not None:
                sums["weights"] = checksum(self._newest)
        elif order["then"] == "load":
            self._servers.load(self.optimizer)
        if sums:
            self._log.write({"step": order["step"], "used": [], "dropped": [], **sums})
        with self._changed:
            self._published = self.mark()
            self.num_synchronized += 1
            self.until = None
            self._changed.notify_all()


def _wait_for_all(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer over the same parameters, whose options can be set apart."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.param_groups = [dict(group) for group in optimizer.param_groups]
    copy.state = type(optimizer.state)(optimizer.state.default_factory)
    return copy


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


# ---- the log ---------------------------------------------------------------------------------------------


class StepLog(RowLog):
    """The log of steps: the hosts of the ranks whenever workers begin, and the gradients of each step."""

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows.

        Raises:
            ShoalError: the log is damaged.
        """
        assert self.path is not None
        rows = self._parse(self.path.read_text(encoding="utf-8").splitlines())
        if not rows or "hosts" not in rows[0]:
            raise ShoalError(
                f"{self.path} does not begin with a line that names the hosts; it is no log of steps"
            )
        return rows

    def require_workers(self, num_workers: int) -> None:
        """Check that the log, if there is one, is of as many workers: their gradients are its steps.

        Raises:
            UsageError: it is of another number.
        """
        if self.path is None or not self.path.exists():
            return
        (*_, logged) = (row["workers"] for row in self.rows() if "workers" in row)
        if logged != num_workers:
            raise UsageError(
                f"asynchronous steps of {num_workers} workers after those of {logged}: a step is a gradient "
                f"of each, and {self.path} counts them; continue with {logged} workers"
            )


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
        for rank, _, version, *_ in row["used"]:
            self.used[rank] += 1
            self.staleness[row["step"] - 1 - version] += 1
        for rank, *_ in row["dropped"]:
            self.dropped[rank] += 1

    def row(self, step: int) -> record.Contributions:
        """Return the record's row of these counts, after ``step``."""
        most = max(self.staleness, default=0)
        return record.Contributions(
            step=step, used=self.used, dropped=self.dropped,
            staleness=[self.staleness.get(each, 0) for each in range(most + 1)],
        )  # fmt: skip
