"""Updates DDP's weights on the servers: they keep the optimizer's state, and no worker takes a step.

    ddp = DistributedDataParallel(model)
    optimizer = shoal.optim.adamw.AdamW(ddp.parameters(), lr=1e-4)
    with update_on_servers(ddp, optimizer) as updates:
        for inputs in loader:
            loss_of(ddp(inputs)).backward()
            optimizer.step()  # the servers'; schedulers work as usual
            optimizer.zero_grad()
        updates.bring_state()  # before a checkpoint; leaving the block does it, too

1.  Servers are the helper hosts (``shoal serve``) and, as for sums, a part of each worker. Every tensor is
    cut into pieces of at most 32 KiB, and each piece has one server for the group's life, in the proportions
    that sums use. Rank 0 loads the weights, and the optimizer's state if it has any.
2.  The backward pass sends each bucket's gradients, multiplied by 1 / workers, as plain DDP does. The
    learning rates and other options of the step go first.
3.  A server that has all contributions to a piece adds them in the order of the hosts, takes the optimizer's
    step with the kernel that workers use, and answers with the new weights instead of the sum.
4.  ``optimizer.step()`` waits for the last answer and copies the weights into the model.

LAMB, LANS, LARS, NovoGrad, Adafactor and clipping need norms before any weight moves. The servers then keep
the sums of step 3 (``collect``) and answer with sums of squares, 24 bytes for 2,048 numbers.
``optimizer.step()`` adds these up on every worker, in the order of the kernels for whole tensors, requests
the optimizer's own norms from the servers (``measure``), and sends the factors that every worker has computed
from them (``apply``); the answer is the weights. Adafactor's matrices need the sums of their rows and columns
too (``factor``, ``normalise``).

The weights are those of DDP on backend ``"shoal"`` with the optimizers of :mod:`shoal.optim`, to the last
bit, for any number of servers.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014); the state on
servers is also that of ZeRO's first stage (Rajbhandari et al., arXiv 1910.02054), on other hosts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.atomic_io import write_atomically
from shoal.comm.native_group import python_group
from shoal.errors import UsageError
from shoal.json_text import parse_json
from shoal.train.config import ServersConfig
from shoal.train.gradients import ManyWorkers, Update, mean_of_workers, require_same
from shoal.train.servers.rules import (
    check_gradient_hooks,
    check_hooks,
    check_max_norm,
    check_model,
    check_optimizer,
)
from shoal.train.servers.tensors import ServedTensors, Table, factor_of, kernel_of, options_of, tables_of

Weights = Literal["fp32", "bf16"]


class ServersUpdate(Update):
    """Base of updates that servers take part in: of a :class:`~shoal.train.run.Run`, or as a context.

    In a run, :meth:`open` begins it. As a context, it takes the steps of ``optimizer.step()``; leaving the
    context brings the optimizer's state back and ends it.

    Args:
        model: that is trained.
        optimizer: whose ``step()`` is replaced or followed.
        max_norm: clip the norm of a step's mean gradient to this; of a context.

    Attributes:
        grad_norm: norm of the last step's gradient before clipping, where it is measured; else NaN.
        num_skipped: steps not taken because the norm of their gradient was not finite.
    """

    on_servers = True

    def __init__(
        self, model: DistributedDataParallel, optimizer: Optimizer, *, max_norm: float | None = None
    ) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.grad_norm, self.num_skipped = math.nan, 0
        self._max_norm = max_norm
        self._in_context = False
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        check_hooks(self.model)
        self._in_context = True
        self._begin(0)
        self._hook_steps()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._end()
        finally:
            self._remove_hooks()
            self.model.require_backward_grad_sync = True
            self._in_context = False

    def open(self, step: int) -> None:
        self._begin(step)
        self._hook_steps()

    def _begin(self, step: int) -> None:
        """Load weights and state to the servers after step ``step``."""
        raise NotImplementedError

    def _end(self) -> None:
        """Bring the state back for good."""
        self.bring_state()

    def _take_step(self) -> None:
        """Take the step of a context."""
        raise NotImplementedError

    def _hook_steps(self) -> None:
        """Replace ``optimizer.step()``, which finds no gradient after its hook and so does nothing."""
        self._hooks.append(self.optimizer.register_step_pre_hook(self._on_step))

    def _on_step(self, *_: Any) -> None:
        if not self._in_context:
            raise UsageError(
                "optimizer.step() in a run whose steps are on servers: call step.update(optimizer)"
            )
        with torch.no_grad():
            self._take_step()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class RowLog:
    """A log in a run's directory: rank 0 writes a line of JSON for each step or exchange.

    Args:
        path: of the file; ``None``: nothing is written, as on other ranks.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def go_back(self, step: int) -> None:
        """Drop the rows about steps after ``step``, from which a run continues."""
        if self.path is None or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if step else []
        whole = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one
        rows = self._parse(whole)
        steps = [row.get("step", row.get("after", 0)) for row in rows]
        kept = [line for line, of in zip(whole, steps, strict=True) if of <= step]
        write_atomically(self.path, "".join(kept).encode())

    def _parse(self, lines: Sequence[str]) -> list[dict[str, Any]]:
        return [parse_json(line, f"{self.path}, line {number}") for number, line in enumerate(lines, start=1)]


def update_of_run(
    model: ManyWorkers,
    optimizer: Optimizer,
    config: ServersConfig,
    *,
    directory: Path | None,
    own: Sequence[Tensor],
) -> ServedUpdate:
    """Return the update of a run in mode ``sync``; the model's communication hook begins it.

    The record of the run has what such steps do, and servers have no copy of other tensors: ``directory`` is
    that of the modes in which workers do not wait for all.

    Args:
        own: averages of weights, which each worker makes of those that it has.

    Raises:
        UsageError: see :class:`ServedUpdate`; or weights that are averaged would be rounded ones.
    """
    if own and config.weights == "bf16":
        raise UsageError(
            "servers.weights bf16 with an average of weights (train.average_decay): workers have rounded "
            "weights to average; leave one of them out"
        )
    update = model.served = ServedUpdate(model, optimizer, config, max_norm=math.inf)
    return update


def update_on_servers(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    weights: Weights = "fp32",
    replicas: Literal[1, 2] = 1,
) -> ServedUpdate:
    """Update the weights on the servers of backend ``"shoal"``, which keep the optimizer's state.

    All ranks enter the context before the first backward pass. The workers' copies of the weights become
    rank 0's.

    Args:
        model: of float32 parameters on the CPU or on a GPU, where they stay, without a communication hook, on
            at least two hosts.
        optimizer: ``shoal.optim``'s AdamW, SGD, Lamb, Lans, Lars, Novograd or Adafactor, or torch's AdamW or
            SGD, over all trained parameters of ``model``. Its state is moved to the servers. torch's SGD
            gives the same weights; torch's AdamW is replaced by shoal's, whose weights may differ by an ulp.
        max_norm: measure the norm of the whole gradient in each step and clip it to this; ``math.inf`` only
            measures. A norm that is not finite skips the step.
        weights: format in which servers return weights. ``"bf16"`` halves these bytes: forward passes use
            weights rounded to nearest even, and the servers keep float32, which
            :meth:`ServedUpdate.bring_state` copies into the model.
        replicas: with 2, each worker keeps a copy of an equal part of the helper hosts' weights and state and
            updates it with the same sums; the loss of a helper then does not change the result.

    Returns:
        A context in which ``optimizer.step()`` is the servers'.

    Raises:
        UsageError: the optimizer, the model or the process group is not supported; the message says why.
        CommError: the ranks pass different optimizers or options, or the servers lack memory.

    Example (needs two hosts; under torchrun every rank does the same)::

        model = DistributedDataParallel(nn.Linear(4, 2))
        optimizer = AdamW(model.parameters(), lr=0.1)
        with update_on_servers(model, optimizer, max_norm=1.0):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    """
    config = ServersConfig(mode="sync", replicas=replicas, weights=weights)
    return ServedUpdate(model, optimizer, config, max_norm=max_norm)


@dataclass(eq=False)
class _InFlight:
    """An update of a tensor: where the gradient was and the weights come, and that view's version."""

    table: Table
    memory: Tensor
    work: Any
    version: int = 0


class ServedUpdate(ServersUpdate):
    """Servers step with the mean gradient of all workers (mode ``sync``).

    The bits are those of :class:`shoal.train.gradients.Update` with the optimizers of :mod:`shoal.optim`, on
    backend ``"shoal"``. Checkpoints hold what they hold without servers.

    Args:
        model: as in :func:`update_on_servers`; its communication hook calls :meth:`begin_updates`.
        optimizer: as there. It holds the options, which schedulers set as usual, after a step.
        config: the number of replicas, and the format of weights.
        max_norm: as there.

    Attributes:
        loss_scale: of the loss: a context's steps divide gradients by it.

    Raises:
        UsageError: the optimizer or the model is not supported.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        config: ServersConfig,
        *,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(model, optimizer, max_norm=max_norm)
        check_model(model)
        check_optimizer(optimizer, model)
        check_max_norm(optimizer, max_norm)
        self.loss_scale = 1.0
        self.note = f"servers update the weights by {type(optimizer).__name__}, and keep its state"
        self._phased = kernel_of(optimizer).decide is not None or max_norm is not None
        self._group = python_group(model.process_group)
        self._rounds = config.weights == "bf16"
        self._has_masters = True  # whether the parameters are the servers' float32 weights
        self._servers = ServedTensors(self._group, optimizer, half=self._rounds, replicas=config.replicas)
        self._table_of = {table.parameter: table for table in self._servers.tables}
        self._updates: list[_InFlight] = []  # of the last backward pass, before the step
        self._factor = 1.0
        self._in_backward = False
        self._is_loaded = self._is_fetched = False

    def __enter__(self) -> Self:
        super().__enter__()
        self.model.register_comm_hook(None, lambda state, bucket: self._send(bucket))
        return self

    def _send(self, bucket: GradBucket) -> Future[Tensor]:
        """Send gradients to the servers; average them after the context, since DDP keeps its hook."""
        if self._in_context:
            return self.begin_updates(bucket)
        return mean_of_workers(self.model.process_group, bucket)

    def _begin(self, step: int) -> None:
        self._servers.configure(self.optimizer)
        self._load()

    def _hook_steps(self) -> None:
        super()._hook_steps()
        self._hooks += [
            self.optimizer.register_state_dict_pre_hook(self._require_state),
            self.optimizer.register_load_state_dict_post_hook(self._reload_state),
        ]
        for module in (self.model, self.model.module):
            self._hooks.append(module.register_load_state_dict_post_hook(self._reload))
        if self._rounds:
            self._hooks.append(self.model.register_forward_pre_hook(self._round))

    # ---- a step -----------------------------------------------------------------------------------

    def _take_step(self) -> None:
        """Wait for the weights after the step with the last backward pass's gradients.

        Raises:
            UsageError: there was no backward pass with averaging since the last step; the options were
                changed since it began; or the gradients were changed, as clipping does.
            CommError: a rank or a server was lost.
        """
        if self.loss_scale != 1.0 and self._max_norm is None:
            raise UsageError(
                f"loss_scale = {self.loss_scale}: the servers step before they know it; give "
                "update_on_servers max_norm, math.inf if nothing is to be clipped"
            )
        self._require_updates()
        if not self._phased:
            self._finish_step()
            return
        self.grad_norm = self.finish_gradients(
            self.optimizer, max_norm=self._max_norm, per_worker=False, loss_scale=self.loss_scale
        )
        if math.isfinite(self.grad_norm):
            self.apply(self.optimizer)
        else:
            self.num_skipped += 1
            self.abandon()

    def finish_gradients(
        self, *optimizers: Optimizer, max_norm: float | None, per_worker: bool, loss_scale: float
    ) -> float:
        require_same(self.optimizer, optimizers)
        check_max_norm(self.optimizer, max_norm)
        self._require_updates()
        self._wait()
        norm = self._servers.totals()[1] / loss_scale
        self._factor = factor_of(self.optimizer, norm, max_norm) / loss_scale
        return norm

    @torch.no_grad()
    def apply(self, *optimizers: Optimizer) -> None:
        updates = [(update.table, update.memory) for update in self._updates]
        works = self._servers.finish_updates(self.optimizer, updates, self._factor)
        for update, work in zip(self._updates, works, strict=True):
            update.work = work
        self._finish_step()

    def abandon(self) -> None:
        """Drop the gradients of the last backward pass, after which there was no step."""
        self._wait()
        for update in self._updates:
            if update.table.parameter.grad is update.memory:
                update.table.parameter.grad = None
        self._updates = []
        self._in_backward = False

    def _require_updates(self) -> None:
        if not self._updates:
            raise UsageError(
                "optimizer.step() without gradients: it belongs after a backward pass outside of no_sync()"
            )
        if not self._phased and options_of(self.optimizer) != self._servers.options:
            raise UsageError(
                "the optimizer's options were changed between backward() and optimizer.step(), when the "
                "servers had them: change them after the step, as schedulers do"
            )
        for update in self._updates:
            gradient = update.table.parameter.grad
            if gradient is not update.memory or gradient._version != update.version:
                raise UsageError(
                    "the gradients were changed between backward() and optimizer.step(), when the servers "
                    "had them: clip with max_norm of update_on_servers, unscale with its loss_scale, and "
                    "call zero_grad() after the step"
                )

    def _wait(self) -> None:
        for update in self._updates:
            update.work.wait()

    def _finish_step(self) -> None:
        """Wait for the weights and copy them into the model."""
        self._wait()
        halves = [update.table.half for update in self._updates]
        came = [u.memory if half is None else half for u, half in zip(self._updates, halves, strict=True)]
        torch._foreach_copy_([update.table.parameter for update in self._updates], came)
        self._has_masters = not self._rounds
        for update in self._updates:
            update.table.parameter.grad = None
            update.table.step += 1
            update.table.has_state = True
        self._updates = []
        self.optimizer.state.clear()
        self._is_fetched = False

    # ---- the optimizer's state --------------------------------------------------------------------

    def renew(self, optimizer: Optimizer) -> None:
        """Continue with another optimizer of the same kind over the same parameters, from its state.

        Raises:
            UsageError: the optimizer cannot be served, or has other parameters or another kind.
        """
        self._remove_hooks()
        check_optimizer(optimizer, self.model)
        now = [(table.parameter, table.group) for table in self._servers.tables]
        new = [(table.parameter, table.group) for table in tables_of(optimizer)]
        same = all(a is c and b == d for (a, b), (c, d) in zip(now, new, strict=False))
        if type(optimizer) is not type(self.optimizer) or len(now) != len(new) or not same:
            raise UsageError(
                "the servers keep the state of another optimizer for these parameters: give the new one the "
                "same class and groups"
            )
        self.abandon()
        self.bring_weights()
        self.optimizer = optimizer
        self._hook_steps()
        self._is_loaded = self._is_fetched = False

    @torch.no_grad()
    def bring_state(self) -> None:
        """Copy the optimizer's state from the servers, which keep it. All ranks call it.

        The state has the form of a run without servers, which can continue with it, and the reverse. The next
        step drops it again. Where weights come in bf16, the parameters become the servers' float32 ones,
        until the next forward pass.

        Raises:
            UsageError: a backward pass has had no step.
            CommError: a rank or a server was lost.
        """
        if self._updates:
            raise UsageError("bring_state() between backward() and optimizer.step(): take the step first")
        self.bring_weights()
        if self._is_fetched or not self._is_loaded:
            return
        self._servers.dump(self.optimizer)
        self._is_fetched = True

    @torch.no_grad()
    def bring_weights(self) -> None:
        if not self._has_masters:
            self._servers.dump_weights()
            self._has_masters = True

    def _load(self) -> None:
        """Load rank 0's weights and optimizer state to the servers, and wait until they have them."""
        self._servers.load(self.optimizer)
        self.optimizer.state.clear()
        self._is_loaded = True
        self._is_fetched = not any(table.has_state for table in self._servers.tables)

    # ---- the backward pass ------------------------------------------------------------------------

    def begin_updates(self, bucket: GradBucket) -> Future[Tensor]:
        """Send a bucket's gradients and return a completed future, so that DDP does not wait for them."""
        if self.model._join_config.enable:
            raise UsageError(
                "update_on_servers does not go together with join(): give all ranks as many batches"
            )
        if not self._in_backward:
            self._begin_step()
        buffer = bucket.buffer()
        buffer.mul_(1.0 / self._group.size())  # as DDP without a hook; a division gives other bits
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            table = self._table_of[parameter]
            memory = buffer.as_strided(parameter.size(), parameter.stride(), gradient.storage_offset())
            begin = self._servers.collect if self._phased else self._servers.update
            self._updates.append(_InFlight(table, memory, begin(table, memory)))
        done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        done.set_result(buffer)
        return done

    def _begin_step(self) -> None:
        if self._updates and not self._in_context:  # a run repeats a step that has failed
            self.abandon()
        if self._updates:
            raise UsageError(
                "a second backward pass before optimizer.step(): the servers have updated with the first "
                "one's gradients; do all but the last backward pass of a step in no_sync()"
            )
        check_gradient_hooks(self._table_of)
        if not self._is_loaded:
            self._load()
        if not self._phased:
            self._servers.configure(self.optimizer)
        self._in_backward = True
        after = torch.autograd.Variable._execution_engine.queue_callback
        # runs after DDP's own callback, which is queued with the last bucket
        after(lambda: after(self._end_of_backward))

    def _end_of_backward(self) -> None:
        """Make ``grad`` of each parameter the view of its bucket, to notice who changes it."""
        self._in_backward = False
        for update in self._updates:
            update.table.parameter.grad = update.memory
            update.version = update.memory._version

    # ---- what is refused, and what is loaded again ------------------------------------------------

    def _require_state(self, *_: Any) -> None:
        if not self._is_fetched:
            raise UsageError(
                "optimizer.state_dict(): the servers have the state; call bring_state() of the update before "
                "it, on all ranks"
            )

    def _reload(self, *_: Any) -> None:
        self._is_loaded = False
        self._has_masters = True

    def _reload_state(self, *_: Any) -> None:
        if not self._has_masters:
            raise UsageError(
                "optimizer.load_state_dict(): the parameters are rounded to bf16; call bring_state() before "
                "it, on all ranks, or load the model's weights first"
            )
        self._is_loaded = False

    @torch.no_grad()
    def _round(self, *_: Any) -> None:
        """Round the parameters as the servers do, before a forward pass with float32 ones."""
        if not self._has_masters:
            return
        if not self._is_loaded:
            self._load()
        for table in self._servers.tables:
            assert table.half is not None
            table.parameter.copy_(table.half.copy_(table.parameter))
        self._has_masters = False
