"""Has the servers update DDP's weights: they keep the optimizer's state, and no worker takes a step.

    ddp = DistributedDataParallel(model)
    training = update_on_servers(ddp, shoal.optim.adamw.AdamW(ddp.parameters(), lr=1e-4))
    for inputs in loader:
        loss_of(ddp(inputs)).backward()
        training.step()  # replaces optimizer.step(); schedulers work as usual
    training.finish()  # copies the optimizer's state back; call it before each checkpoint too

1.  Servers are the helper hosts (``shoal serve``) and, as for sums, a part of each worker. Every tensor is
    cut into pieces of at most 32 KiB, and each piece has one server for the group's life, in the proportions
    that sums use. Rank 0 loads the weights, and the optimizer's state if it has any.
2.  The backward pass sends each bucket's gradients, multiplied by 1 / workers, as plain DDP does. The
    learning rates and other options of the step go first.
3.  A server that has all contributions to a piece adds them in the order of the hosts, takes the optimizer's
    step with the kernel that workers use, and answers with the new weights instead of the sum.
4.  ``step()`` waits for the last answer and copies the weights into the model.

LAMB, LARS, NovoGrad and clipping need norms before any weight moves. The servers then keep the sums of step 3
(``collect``) and answer with sums of squares, 24 bytes for 2,048 numbers. ``step()`` adds these up on every
worker, in the order of the kernels for whole tensors, requests the optimizer's own norms from the servers
(``measure``), and sends the factors that every worker has computed from them (``apply``); the answer is the
weights.

The weights are those of DDP on backend ``"shoal"`` with the optimizers of :mod:`shoal.optim`, to the last
bit, for any number of servers.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014); the state on
servers is also that of ZeRO's first stage (Rajbhandari et al., arXiv 1910.02054), on other hosts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.comm.native_group import python_group
from shoal.errors import UsageError
from shoal.train.served_checks import (
    check_max_norm,
    check_model,
    check_optimizer,
    forbid_gradient_hooks,
    forbid_hook,
)
from shoal.train.served_optimizers import factor_of, kernel_of, options_of
from shoal.train.served_tensors import ServedTensors, Table, tables_of

Weights = Literal["fp32", "bf16"]


def update_on_servers(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    weights: Weights = "fp32",
    replicas: int = 1,
) -> Served:
    """Have the servers of backend ``"shoal"`` keep the optimizer's state and update the weights.

    Call it on all ranks, before the first backward pass. The workers' copies of the weights become rank 0's.

    Args:
        model: of float32 parameters on the CPU, without a communication hook, on at least two hosts.
        optimizer: ``shoal.optim``'s AdamW, SGD, Lamb, Lars or Novograd, or torch's AdamW or SGD, over all
            trained parameters of ``model``. Its state is moved to the servers. torch's SGD gives the same
            weights; torch's AdamW is replaced by shoal's, whose weights may differ by an ulp.
        max_norm: measure the norm of the whole gradient in each step and clip it to this; ``math.inf`` only
            measures. A norm that is not finite skips the step.
        weights: format in which servers return weights. ``"bf16"`` halves these bytes: forward passes use
            weights rounded to nearest even, and the servers keep float32, which :meth:`Served.finish` copies
            into the model.
        replicas: with 2, each worker keeps a copy of an equal part of the helper hosts' weights and state and
            updates it with the same sums; the loss of a helper then does not change the result.

    Returns:
        An object whose ``step()`` replaces the optimizer's.

    Raises:
        UsageError: the optimizer, the model or the process group is not supported; the message says why.
        CommError: the ranks pass different optimizers or options, or the servers lack memory.

    Example (needs two hosts; under torchrun every rank does the same)::

        model = DistributedDataParallel(nn.Linear(4, 2))
        training = update_on_servers(model, AdamW(model.parameters(), lr=0.1), max_norm=1.0)
        model(torch.ones(3, 4)).sum().backward()
        training.step()
    """
    forbid_hook(model)
    served = Served(model, optimizer, max_norm=max_norm, weights=weights, replicas=replicas)
    model.register_comm_hook(None, lambda state, bucket: served.begin_updates(bucket))
    return served


@dataclass(eq=False)
class _Update:
    """An update in flight: where the gradient was and the weights come, and that view's version."""

    table: Table
    memory: Tensor
    work: Any
    version: int = 0


class Served:
    """Replaces the optimizer's ``step()``; made by :func:`update_on_servers`.

    Attributes:
        optimizer: holds the options; schedulers set them as usual, after :meth:`step`. Its state is on the
            servers until :meth:`finish`.
        grad_norm: norm of the last step's gradient before clipping, where it is measured; else NaN.
        num_skipped: steps that were not taken because that norm was not finite.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        weights: Weights = "fp32",
        replicas: int = 1,
        replaces: bool = False,
    ) -> None:
        """Load the weights to the servers.

        Args:
            model: as in :func:`update_on_servers`; its communication hook calls :meth:`begin_updates`.
            optimizer: as there.
            max_norm: as there.
            weights: as there.
            replicas: as there.
            replaces: whether a backward pass without a step may follow another, whose gradients are dropped.
        """
        check_model(model)
        check_optimizer(optimizer, model)
        check_max_norm(optimizer, max_norm)
        if weights not in ("fp32", "bf16"):
            raise UsageError(f"weights={weights!r} must be 'fp32' or 'bf16'")
        self.optimizer = optimizer
        self.grad_norm, self.num_skipped = math.nan, 0
        self._kernel = kernel_of(optimizer)
        self._max_norm = max_norm
        self._phased = self._kernel.decide is not None or max_norm is not None
        self._replaces = replaces
        self._model = model
        self._group = python_group(model.process_group)
        self._rounds = weights == "bf16"
        self._has_masters = True  # whether the parameters are the servers' float32 weights
        self._servers = ServedTensors(self._group, optimizer, half=self._rounds, replicas=replicas)
        self._table_of = {table.parameter: table for table in self._servers.tables}
        self._updates: list[_Update] = []  # of the last backward pass, before step()
        self._in_backward = False
        self._is_loaded = self._is_fetched = False
        try:
            self._servers.configure(optimizer)
        except ValueError as problem:  # such as all ranks on one host
            raise UsageError(f"update_on_servers: {problem}") from None
        self._load()
        self._watch(optimizer)
        for owner in (model, model.module):
            owner.register_load_state_dict_post_hook(self._reload)
        if self._rounds:
            model.register_forward_pre_hook(self._round)

    def _watch(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(self._refuse_step)
        optimizer.register_state_dict_pre_hook(self._require_state)
        optimizer.register_load_state_dict_post_hook(self._reload_state)

    # ---- called by the training loop ----------------------------------------------------------------------

    @torch.no_grad()
    def step(self, *, grad_scale: float = 1.0) -> None:
        """Wait for the weights after the step with the last backward pass's gradients.

        Args:
            grad_scale: gradients are multiplied by it first, as 1 / loss scale; needs ``max_norm``.

        Raises:
            UsageError: there was no backward pass with averaging since the last step; the options were
                changed since it began; or the gradients were changed, as clipping does.
            CommError: a rank or a server was lost.
        """
        if grad_scale != 1.0 and self._max_norm is None:
            raise UsageError(
                f"step(grad_scale={grad_scale}): the servers step before they know it; give "
                "update_on_servers max_norm, math.inf if nothing is to be clipped"
            )
        self._require_updates()
        if not self._phased:
            return self._finish_step()
        self.grad_norm = self.measure() * grad_scale
        if math.isfinite(self.grad_norm):
            return self.apply(factor_of(self.optimizer, self.grad_norm, self._max_norm) * grad_scale)
        self.num_skipped += 1
        self.abandon()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # checked by torch's schedulers
        return None

    def measure(self) -> float:
        """Wait until the servers have all gradients, and return the norm of their mean over the workers."""
        self._require_updates()
        self._wait()
        return self._servers.totals()[1]

    @torch.no_grad()
    def apply(self, factor: float) -> None:
        """Have the servers take the step with ``factor`` times the gradients of :meth:`measure`."""
        updates = [(update.table, update.memory) for update in self._updates]
        works = self._servers.finish_updates(self.optimizer, updates, factor)
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
                "step() without gradients: it belongs after a backward pass outside of no_sync()"
            )
        if not self._phased and options_of(self.optimizer) != self._servers.options:
            raise UsageError(
                "the optimizer's options were changed between backward() and step(), when the servers had "
                "them: change them after step(), as schedulers do"
            )
        for update in self._updates:
            gradient = update.table.parameter.grad
            if gradient is not update.memory or gradient._version != update.version:
                raise UsageError(
                    "the gradients were changed between backward() and step(), when the servers had them: "
                    "clip with max_norm of update_on_servers, unscale with grad_scale of step(), and call "
                    "zero_grad() after it"
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
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # checked by torch's schedulers

    def renew(self, optimizer: Optimizer) -> None:
        """Train on with another optimizer of the same kind over the same parameters, from its state.

        Raises:
            UsageError: the optimizer cannot be served, or has other parameters or another kind.
        """
        check_optimizer(optimizer, self._model)
        now = [(table.parameter, table.group) for table in self._servers.tables]
        new = [(table.parameter, table.group) for table in tables_of(optimizer)]
        same = all(a is c and b == d for (a, b), (c, d) in zip(now, new, strict=False))
        if type(optimizer) is not type(self.optimizer) or len(now) != len(new) or not same:
            raise UsageError(
                "the servers keep the state of another optimizer for these parameters: give the new one the "
                "same class and groups"
            )
        self.abandon()
        self.optimizer = optimizer
        self._watch(optimizer)
        self._is_loaded = self._is_fetched = False

    @torch.no_grad()
    def finish(self) -> None:
        """Bring the optimizer's state back from the servers, which go on keeping it.

        All ranks call it, before ``optimizer.state_dict()`` and at the end. The state has the form of a run
        without servers, which can continue with it, and the reverse. The next step drops it again. Where
        weights come in bf16, the parameters become the servers' float32 ones, until the next forward pass.

        Raises:
            UsageError: a backward pass has had no step.
            CommError: a rank or a server was lost.
        """
        if self._updates:
            raise UsageError("finish() between backward() and step(): call step() first")
        if not self._has_masters:
            self._servers.dump_weights()
            self._has_masters = True
        if self._is_fetched or not self._is_loaded:
            return
        self._servers.dump(self.optimizer)
        self._is_fetched = True

    def _load(self) -> None:
        """Load rank 0's weights and optimizer state to the servers, and wait until they have them."""
        self._servers.load(self.optimizer)
        self.optimizer.state.clear()
        self._is_loaded = True
        self._is_fetched = not any(table.has_state for table in self._servers.tables)

    # ---- the backward pass --------------------------------------------------------------------------------

    def begin_updates(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send a bucket's gradients and return a completed future, so that DDP does not wait for them."""
        if self._model._join_config.enable:
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
            work = begin(table, memory)
            self._updates.append(_Update(table, memory, work))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _begin_step(self) -> None:
        if self._updates and self._replaces:
            self.abandon()
        if self._updates:
            raise UsageError(
                "a second backward pass before step(): the servers have updated with the first one's "
                "gradients; do all but the last backward pass of a step in no_sync()"
            )
        forbid_gradient_hooks(self._table_of, "update_on_servers")
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

    # ---- what is refused, and what is loaded again --------------------------------------------------------

    def _refuse_step(self, *_: Any) -> None:
        raise UsageError(
            "optimizer.step() was called after update_on_servers(): call step() of what it returned"
        )

    def _require_state(self, *_: Any) -> None:
        if not self._is_fetched:
            raise UsageError(
                "optimizer.state_dict(): the servers have the state; call finish() of what "
                "update_on_servers() returned before it, on all ranks"
            )

    def _reload(self, *_: Any) -> None:
        self._is_loaded = False
        self._has_masters = True

    def _reload_state(self, *_: Any) -> None:
        if not self._has_masters:
            raise UsageError(
                "optimizer.load_state_dict(): the parameters are rounded to bf16; call finish() before "
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
