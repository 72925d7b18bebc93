"""Steps without waiting for all workers: when most have their gradients, or with workers that run ahead.

    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = AdamW(ddp.parameters(), lr=1e-4)
    training = bound_waiting(ddp, optimizer, wait_for=7)  # of 8; or staleness=2
    for inputs in training.batches(loader):
        loss_of(ddp(inputs)).backward()
        training.step()  # replaces optimizer.step(); schedulers follow training.next_step
    training.finish()

1.  Weights and the optimizer's state are on the servers (:mod:`shoal.train.served_update`). A backward pass
    sends nothing; ``step()`` tells rank 0 that this worker has a gradient.
2.  Rank 0 decides which gradients the next step takes (:mod:`shoal.decide.bounded_waiting`) and tells all.
3.  A thread of each worker then sends its gradient, or zeros if it is not in the step, and receives the new
    weights. It does so while the worker still computes: only its computation is late, its zeros are not.
4.  ``step()`` returns when the worker may go on, with the newest weights.

Rank 0 writes which gradients of which weights each step has taken; from this log
:func:`shoal.train.bounded_replay.replay` makes the same bits in one process.

Sources: Chen et al., "Revisiting Distributed Synchronous SGD" (arXiv 1604.00981) for ``wait_for``; Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (NIPS 2013) for
``staleness``, here with steps that always take the gradients of a whole batch.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.decide.bounded_waiting import Late, WaitingRule
from shoal.errors import UsageError
from shoal.train.bounded_messages import (
    Coordinator,
    Line,
    Mail,
    Message,
    Then,
    group_beside,
    hosts_of,
    max_bytes_of,
)
from shoal.train.bounded_replay import Counts, compensate, extrapolate
from shoal.train.served_checks import (
    check_max_norm,
    check_model,
    check_no_momentum,
    check_optimizer,
    forbid_gradient_hooks,
    forbid_hook,
)
from shoal.train.served_optimizers import factor_of, kernel_of, set_values, values_of
from shoal.train.served_tensors import ServedTensors, checksum
from shoal.train.weight_averaging import statistics_of, unite

_Batch = TypeVar("_Batch")
_POLL_S = 1.0


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
    replicas: int = 1,
    log: Path | None = None,
) -> BoundedWaiting:
    """Step with servers as soon as enough workers have gradients, or let workers run ahead of the steps.

    Call it on all ranks, before the first backward pass. The workers' copies of the weights become rank 0's.

    Args:
        model: of float32 parameters on the CPU, without a communication hook, on at least two hosts of
            backend ``"shoal"``; with buffers it needs ``broadcast_buffers=False``.
        optimizer: one that :func:`shoal.train.served_update.update_on_servers` takes; its state goes to the
            servers.
        wait_for: a step is taken when so many workers have their gradients; its gradient is their mean. A
            worker that is late goes on with the batch of the next step, so it sees fewer batches.
        late: ``"drop"`` drops late gradients, ``"next"`` adds them to the next step.
        staleness: without ``wait_for``, a step takes the gradients of all workers, and a worker begins with
            weights that lack at most so many steps. With ``late="next"``, the largest staleness of a late
            gradient, 1 by default: steps then wait for the worker that would exceed it.
        grace_s: with ``wait_for``, seconds for which a step that has enough gradients goes on waiting for the
            others: a tenth of a step's time, so that workers as fast as others are not late by chance.
        asynchronous: instead of ``wait_for`` or ``staleness``: each gradient is a step of its own, when it
            comes, whatever its staleness. The optimizer must have no momentum.
        compensation: with ``asynchronous``, the strength λ of the correction for weights that have changed
            meanwhile (DC-ASGD): g + λ g² (w - w of the gradient); 0.04 in MXNet. 4 bytes a parameter more.
        extrapolation: with ``staleness`` alone: compute a gradient that lacks s steps with weights that are s
            times this many of the last step further on; 1 takes steps for alike. 4 bytes a parameter more.
        max_norm: clip the norm of a step's mean gradient to this. A norm that is not finite skips the step.
        replicas: as in :func:`shoal.train.served_update.update_on_servers`.
        log: file to which rank 0 appends a line of JSON for each step.

    Returns:
        An object whose ``step()`` replaces the optimizer's.

    Raises:
        UsageError: the options do not go together, or the model or optimizer cannot be served.
        CommError: the ranks give different options, or the servers lack memory.

    Example (needs three hosts)::

        model = DistributedDataParallel(nn.Linear(4, 2))
        optimizer = AdamW(model.parameters(), lr=0.1)
        training = bound_waiting(model, optimizer, wait_for=2, log=Path("steps.jsonl"))
        for inputs in training.batches(torch.randn(10, 3, 4)):
            model(inputs).square().mean().backward()
            training.step()
        training.finish()
    """
    forbid_hook(model)
    check_model(model)
    check_optimizer(optimizer, model)
    check_max_norm(optimizer, max_norm)
    size = dist.get_world_size(model.process_group)
    rule = _waiting_rule(size, wait_for, late, staleness, grace_s, asynchronous)
    if asynchronous:
        check_no_momentum(optimizer)
    _check_corrections(compensation, extrapolation, wait_for, staleness, asynchronous)
    if model.broadcast_buffers and any(True for _ in model.buffers()):
        raise UsageError(
            "bound_waiting: the model has buffers, which DDP broadcasts in each forward pass; give it "
            "broadcast_buffers=False"
        )
    return BoundedWaiting(
        model, optimizer, rule, max_norm=max_norm, log=log, compensation=compensation,
        extrapolation=extrapolation, replicas=replicas,
    )  # fmt: skip


def _check_corrections(
    compensation: float,
    extrapolation: float,
    wait_for: int | None,
    staleness: int | None,
    asynchronous: bool,
) -> None:
    """Check the two corrections for stale weights against the mode that they are for."""
    if not 0 <= compensation < math.inf or (compensation and not asynchronous):
        raise UsageError(
            f"bound_waiting: compensation={compensation} must be at least 0, and is for asynchronous steps"
        )
    if not 0 <= extrapolation < math.inf or (extrapolation and not (wait_for is None and staleness)):
        raise UsageError(
            f"bound_waiting: extrapolation={extrapolation} must be at least 0, and is for staleness of at "
            "least 1 without wait_for, where a gradient's is known before it is computed"
        )


def _waiting_rule(
    size: int,
    wait_for: int | None,
    late: Late,
    staleness: int | None,
    grace_s: float,
    asynchronous: bool,
) -> WaitingRule:
    """Return the rule of one mode, with the defaults that the others leave open."""
    if asynchronous:
        if wait_for is not None or staleness is not None or late != "drop" or grace_s:
            raise UsageError(
                "bound_waiting: asynchronous steps wait for nobody; leave wait_for, staleness, late and "
                "grace_s out"
            )
        return WaitingRule(size, 1, "next", 0, grace_s, True)
    if wait_for is None and staleness is None:
        raise UsageError("bound_waiting: give wait_for or staleness; update_on_servers waits for all")
    if staleness == 0:
        raise UsageError(
            "bound_waiting: staleness=0 waits for all; give at least 1, or use update_on_servers"
        )
    if staleness is None:
        staleness = 1 if late == "next" else 0
    return WaitingRule(size, size if wait_for is None else wait_for, late, staleness, grace_s, False)


@dataclass(eq=False)
class _Gradient:
    """A gradient that this worker has handed over; ``step`` is the one that has taken or dropped it.

    ``batch`` is the number of the step for which it is meant; of asynchronous steps, this worker's number of
    batches. ``weights`` are those that it is the gradient of, where it is to be compensated.
    """

    batch: int
    tensors: list[Tensor]
    weights: list[Tensor]
    step: int | None = None


class BoundedWaiting:
    """Replaces the optimizer's ``step()``; made by :func:`bound_waiting`.

    Attributes:
        optimizer: holds the options. Its state is on the servers until :meth:`finish`.
        num_dropped: gradients of this worker that no step has taken.
        num_skipped: steps not taken because the norm of their gradient was not finite.
        grad_norm: norm of the last step's gradient before clipping, where it is measured; else NaN.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        rule: WaitingRule,
        *,
        max_norm: float | None,
        log: Path | None,
        after: int = 0,
        compensation: float = 0.0,
        extrapolation: float = 0.0,
        replicas: int = 1,
        own: Sequence[Tensor] = (),
    ) -> None:
        """Load the weights to the servers, and begin to follow rank 0.

        Args:
            model: as in :func:`bound_waiting`.
            optimizer: as there.
            rule: for whom steps wait.
            max_norm: as there; ``math.inf`` only measures.
            log: as there.
            after: steps that the weights have seen.
            compensation: as there.
            extrapolation: as there.
            replicas: as there.
            own: tensors that each worker changes by itself, besides the statistics of batch norms: averaged,
                as those, where all workers meet.
        """
        self._statistics, self._own, self._model_group = statistics_of(model), own, model.process_group
        self._compensation = compensation
        self._num_handed = after // rule.num_workers  # of asynchronous steps, all have had as many
        self._extrapolation = extrapolation
        self.optimizer = optimizer
        self.num_dropped = self.num_skipped = 0
        self.grad_norm = math.nan
        self._rule, self._max_norm, self._log = rule, max_norm, log
        self._phased = kernel_of(optimizer).decide is not None or max_norm is not None
        self._group = group_beside(model)
        self._stepper = _copy_of(optimizer)  # with the options of the step that the servers take
        self._servers = ServedTensors(self._group, self._stepper, replicas=replicas)
        self._parameters = [table.parameter for table in self._servers.tables]
        try:
            more = f", with {rule.text}, max_norm={max_norm}, compensation={compensation}"
            self._servers.configure(self._stepper, f"{more}, extrapolation={extrapolation}")
        except ValueError as problem:  # such as all ranks on one host
            raise UsageError(f"bound_waiting: {problem}") from None
        self._servers.load(optimizer)
        optimizer.state.clear()
        optimizer.register_step_pre_hook(_refuse_step)
        model.require_backward_grad_sync = False  # DDP then neither sends nor waits
        self._newest = [parameter.detach().clone() for parameter in self._parameters]
        self._spare = [torch.empty_like(each) for each in self._newest]
        self._batch = after + 1  # that comes next, on this worker
        self._passed = after  # batches of the loader
        self._own_version = after  # of the parameters
        self._united = after  # the step after which all had the same statistics
        self._changed = threading.Condition()
        # what follows is shared by this worker's two threads, under that lock
        self._move = [torch.zeros_like(each) for each in self._newest if extrapolation]  # the last step's
        self._version = after  # of self._newest
        self._until: int | None = None
        self._counts = Counts(rule.num_workers)
        self._handed: list[_Gradient] = []
        self._num_synchronized = 0
        self._problem: Exception | None = None
        self._line = self._begin_threads()

    # ---- called by the training loop ----------------------------------------------------------------------

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
                    raise UsageError("bound_waiting: a batch without step(), which all of batches() need")

    @torch.no_grad()
    def step(self) -> None:
        """Hand the gradients over, and wait until this worker may go on; it then has the newest weights.

        Raises:
            UsageError: a parameter has no gradient, or the batch is not one of :meth:`batches`.
            CommError: a rank or a server was lost, or the ranks disagree.
        """
        if self._passed != self._batch:
            raise UsageError(
                "bound_waiting: step() belongs after each batch of `for ... in training.batches(loader)`"
            )
        self.hand_over(self._max_norm)
        self.take_newest()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # checked by torch's schedulers

    def hand_over(self, max_norm: float | None, *, asks: bool = False) -> None:
        """Hand the gradients over, and wait until this worker may go on.

        Args:
            max_norm: to which the step clips; the same on all workers.
            asks: ask all workers to synchronize soon, after step :attr:`until`.
        """
        gradient = self._collect()
        self.optimizer.state.clear()  # what finish() has brought
        limit = max_norm if max_norm is not None and math.isfinite(max_norm) else None
        options = {"groups": values_of(self.optimizer), "max_norm": limit}
        self._line.tell(
            {
                "kind": "ready", "batch": gradient.batch, "version": self._own_version, "asks": asks,
                "options": options,
            }
        )  # fmt: skip
        self._wait_until(lambda: self._may_go_on(gradient))

    def take_newest(self) -> None:
        """Copy the newest weights into the model, and begin the next batch."""
        ahead = self._batch + 1 if self._rule.waits_for_all else None
        self._copy_newest(ahead)
        self._batch = ahead or self._own_version + 1

    @property
    def until(self) -> int | None:
        """The batch after which all workers are to synchronize, because one has asked for it.

        Of asynchronous steps, the number of batches of each worker.
        """
        with self._changed:
            return self._until

    def take_counts(self) -> Counts:
        """Return counts of the gradients that steps have taken or dropped since the last call."""
        with self._changed:
            counts, self._counts = self._counts, Counts(self._rule.num_workers)
        return counts

    def finish(self, *, ends: bool = True) -> None:
        """Wait for all workers; all then have the same weights, and the optimizer its state.

        All ranks call it after as many batches.

        Args:
            ends: ``False`` goes on afterwards, as at a checkpoint.

        Raises:
            CommError: a rank or a server was lost, or the ranks have different numbers of batches.
        """
        self.synchronize("dump", ends=ends)
        self.optimizer.state.clear()
        self.optimizer.state.update(self._stepper.state)
        self._stepper.state.clear()

    def synchronize(self, then: Then = "nothing", *, ends: bool = False) -> None:
        """Wait for all workers, which then have the same weights; all call it after as many batches.

        Args:
            then: what the servers do with the optimizer's state: nothing, dump it, or load it.
            ends: whether no batch follows.
        """
        before = self._num_synchronized
        last = self._num_handed if self._rule.asynchronous else self._batch - 1
        self._line.tell({"kind": "synchronize", "batch": last, "then": then, "ends": ends})
        self._wait_until(lambda: self._num_synchronized > before)
        self._copy_newest()
        self._passed, self._batch = self._own_version, self._own_version + 1

    def renew(self, optimizer: Optimizer) -> None:
        """Train on with another optimizer of the same kind and groups, from its state, on all ranks."""
        optimizer.register_step_pre_hook(_refuse_step)
        self.optimizer, self._stepper = optimizer, _copy_of(optimizer)
        self._stepper.state.update(optimizer.state)
        self.synchronize("load")
        self._stepper.state.clear()
        optimizer.state.clear()

    def _collect(self) -> _Gradient:
        forbid_gradient_hooks(self._parameters, "bound_waiting")
        for parameter in self._parameters:
            if parameter.grad is None:
                raise UsageError(
                    f"bound_waiting: a parameter of shape {list(parameter.shape)} has no gradient; all have "
                    "to be used in each step, or frozen"
                )
        tensors = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        weights = [each.detach().clone() for each in self._parameters] if self._compensation else []
        self._num_handed += 1
        batch = self._num_handed if self._rule.asynchronous else self._batch
        gradient = _Gradient(batch, tensors, weights)  # type: ignore[arg-type]
        with self._changed:
            self._handed.append(gradient)
        return gradient

    def _may_go_on(self, gradient: _Gradient) -> bool:
        if self._rule.waits_for_all:
            return self._version >= gradient.batch - self._rule.staleness
        if self._rule.late == "drop" and not self._rule.grace_s:
            return self._version >= gradient.batch  # a step that takes it has this number
        return gradient.step is not None and self._version >= gradient.step

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            while not holds():
                if self._problem is not None:
                    raise self._problem
                self._changed.wait(_POLL_S)  # in short waits, so that Python handles signals

    @torch.no_grad()
    def _copy_newest(self, batch: int | None = None) -> None:
        """Copy the newest weights, for a batch further on by the steps that they lack then."""
        with self._changed:
            if self._version != self._own_version or self._extrapolation:
                torch._foreach_copy_(self._parameters, self._newest)
                self._own_version = self._version
            if self._extrapolation and batch is not None:
                num_lacking = batch - 1 - self._version
                extrapolate(self._parameters, self._move, self._extrapolation * num_lacking)

    # ---- the thread that follows rank 0 -------------------------------------------------------------------

    def _begin_threads(self) -> Line:
        mail = Mail(self._group, max_bytes_of(self._rule.num_workers, len(self.optimizer.param_groups)))
        is_first = self._group.rank() == 0
        coordinator = Coordinator(mail, self._rule, after=self._version) if is_first else None
        hosts = hosts_of(self._group)
        if coordinator is not None:
            self._write(
                {
                    "workers": self._rule.num_workers, "hosts": hosts, "after": self._version,
                    "asynchronous": self._rule.asynchronous,
                }
            )  # fmt: skip
            self._begin(coordinator.listen, "shoal-coordinator")
        line = Line(mail, coordinator)
        self._begin(lambda: self._follow(line), "shoal-steps")
        return line

    def _begin(self, run: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                run()
            except Exception as problem:  # noqa: BLE001  # raised at the next step
                with self._changed:
                    self._problem = self._problem or problem
                    self._changed.notify_all()

        threading.Thread(target=guarded, name=name, daemon=True).start()

    @torch.no_grad()
    def _follow(self, line: Line) -> None:
        has_ended = False
        while not has_ended:
            order = line.next_order()
            kind = order["kind"]
            if kind == "step":
                self._take_step(order)
            elif kind == "synchronize":
                self._synchronize(order)
                has_ended = order["ends"]
            elif kind == "late":
                row = {"step": self._version, "used": [], "dropped": order["dropped"]}
                self._drop(order["dropped"], self._version)
                with self._changed:
                    self._counts.add(row)
                self._write(row)
            else:
                raise UsageError(f"bound_waiting: {order.get('reason')}")

    def _take_step(self, order: Message) -> None:
        """Send this worker's part of a step, or zeros, and receive the weights after it."""
        step, used, servers = order["step"], order["used"], self._servers
        own = self._settle(used, step)
        self._drop(order["dropped"], step)
        set_values(self._stepper, order["options"]["groups"])
        share = 1.0 / len(used)
        if own and self._compensation:
            taken = own[0]
            taken.tensors = compensate(taken.tensors, self._newest, taken.weights, self._compensation)
        for number, memory in enumerate(self._spare):
            if own:
                torch.mul(own[0].tensors[number], share, out=memory)
            else:
                memory.zero_()
        is_taken = self._update(order["options"]["max_norm"])
        if is_taken:
            for table in servers.tables:
                table.step, table.has_state = table.step + 1, True
        with self._changed:
            if is_taken:
                self._newest, self._spare = self._spare, self._newest
            if self._extrapolation:
                torch._foreach_copy_(self._move, self._newest)
                torch._foreach_sub_(self._move, self._spare if is_taken else self._newest)
            self.num_skipped += not is_taken
            self._version, self._until = step, order["until"]
            self._counts.add(order)
            self._changed.notify_all()
        self._write(
            {
                "step": step,
                "used": used,
                "dropped": order["dropped"],
                **({} if is_taken else {"skipped": True}),
            }
        )

    def _update(self, max_norm: float | None) -> bool:
        """Have the servers step with what is in the spare memory; return whether they did."""
        servers = self._servers
        updates = list(zip(servers.tables, self._spare, strict=True))
        if not self._phased:
            servers.configure(self._stepper)
            _wait_for_all([servers.update(*each) for each in updates])
            return True
        _wait_for_all([servers.collect(*each) for each in updates])
        self.grad_norm = servers.totals()[1]
        if not math.isfinite(self.grad_norm):
            return False
        factor = factor_of(self._stepper, self.grad_norm, max_norm)
        _wait_for_all(servers.finish_updates(self._stepper, updates, factor))
        return True

    def _settle(self, gradients: list[list[int]], step: int) -> list[_Gradient]:
        """Note that these are taken or dropped once ``step`` is done; return this worker's ones."""
        batches = {batch for rank, batch, _ in gradients if rank == self._group.rank()}
        with self._changed:
            own = [each for each in self._handed if each.batch in batches]
            self._handed = [each for each in self._handed if each.batch not in batches]
            for each in own:
                each.step = step
            self._changed.notify_all()
        return own

    def _drop(self, gradients: list[list[int]], step: int) -> None:
        self.num_dropped += len(self._settle(gradients, step))

    def _synchronize(self, order: Message) -> None:
        sums = {}
        if order["step"] != self._united:  # once: means of means have other last bits
            self._united = order["step"]
            unite([*self._statistics, *self._own], self._model_group)
            if self._statistics:
                sums["norms"] = checksum(self._statistics)
        if order["then"] == "dump":
            self._servers.dump(self._stepper)
            if self._log is not None and self._group.rank() == 0:
                sums["weights"] = checksum(self._newest)
        elif order["then"] == "load":
            self._servers.load(self._stepper)
        if sums:
            self._write({"step": order["step"], "used": [], "dropped": [], **sums})
        with self._changed:
            self._num_synchronized += 1
            self._until = None
            self._changed.notify_all()

    # ---- the log ------------------------------------------------------------------------------------------

    def _write(self, row: dict[str, Any]) -> None:
        if self._log is None or self._group.rank() != 0:
            return
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


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


def _refuse_step(*_: Any) -> None:
    raise UsageError("optimizer.step() was called after bound_waiting(): call step() of what it returned")
