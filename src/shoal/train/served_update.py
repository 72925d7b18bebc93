"""Has the servers update DDP's weights: they keep the optimizer's state, and no worker takes a step.

    ddp = DistributedDataParallel(model)
    training = update_on_servers(ddp, shoal.optim.adamw.AdamW(ddp.parameters(), lr=1e-4))
    for inputs in loader:
        loss_of(ddp(inputs)).backward()
        training.step()  # replaces optimizer.step(); schedulers follow it as ever
    training.finish()  # brings the optimizer's state back, as before each checkpoint

1.  Servers are the helper hosts (``shoal serve``) and, as for sums, a part of each worker. Every tensor is
    cut into pieces of at most 32 KiB, and each piece has one server for the group's life, in the proportions
    that sums use. Rank 0 loads the weights, and the optimizer's state if it has any.
2.  The backward pass sends each bucket's gradients, divided by the number of workers, as plain DDP does. The
    learning rates and other options of the step go first.
3.  A server that has all contributions to a piece adds them in the order of the hosts, takes the optimizer's
    step with the kernel that workers use, and answers with the new weights instead of the sum.
4.  ``step()`` waits for the last answer and copies the weights into the model.

The weights are those of DDP on backend ``"shoal"`` with :class:`shoal.optim.adamw.AdamW` or
:class:`shoal.optim.sgd.SGD`, to the last bit, for any number of servers.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014); the state on
servers is also that of ZeRO's first stage (Rajbhandari et al., arXiv 1910.02054), on other hosts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.comm.engine import Operation
from shoal.comm.native_group import python_group
from shoal.comm.priority import trained
from shoal.errors import UsageError
from shoal.optim.adamw import AdamW
from shoal.optim.sgd import SGD

_BLOCK = 16384
"""Elements that one server keeps together, as in csrc/engine/topology.cc."""
_SGD, _ADAMW = 0, 1
"""Numbers of the optimizers, as in csrc/engine/served_weights.h."""


def update_on_servers(model: DistributedDataParallel, optimizer: Optimizer) -> Served:
    """Have the servers of backend ``"shoal"`` keep the optimizer's state and update the weights.

    Call it on all ranks, before the first backward pass. The workers' copies of the weights become rank 0's.

    Args:
        model: of float32 parameters on the CPU, without a communication hook, on at least two hosts.
        optimizer: ``shoal.optim``'s AdamW or SGD, or torch's, over all parameters of ``model`` that are
            trained. Its state is loaded to the servers and dropped here. torch's SGD gives the same weights;
            torch's AdamW gives those of shoal's, an ulp from its own here and there.

    Returns:
        An object whose ``step()`` replaces the optimizer's.

    Raises:
        UsageError: the optimizer, the model or the process group cannot be served; the message says why.
        CommError: the ranks give different optimizers or options, or the servers lack memory.

    Example (needs two hosts; under torchrun every rank does the same)::

        model = DistributedDataParallel(nn.Linear(4, 2))
        training = update_on_servers(model, AdamW(model.parameters(), lr=0.1))
        model(torch.ones(3, 4)).sum().backward()
        training.step()
    """
    _check_model(model)
    _check_optimizer(optimizer, model)
    group = python_group(model.process_group)
    if group in _serving:
        raise UsageError(
            "update_on_servers: this process group serves another model already; give each model a group of "
            "its own, by DistributedDataParallel(..., process_group=dist.new_group())"
        )
    _serving.add(group)
    return Served(model, optimizer)


_serving: WeakSet[Any] = WeakSet()
"""Groups whose servers keep weights."""


@dataclass(eq=False)
class _Table:
    """A tensor that the servers keep.

    Attributes:
        number: of the tensor, in the order of the optimizer's groups.
        group: index of its parameter group.
        place: of its first block among those of all tensors.
        step: updates taken.
    """

    parameter: Tensor
    number: int
    group: int
    place: int
    step: int = 0


@dataclass(eq=False)
class _Update:
    """An update in flight: where the gradient was and the weights come, and that view's version."""

    table: _Table
    memory: Tensor
    work: Any
    version: int = 0


class Served:
    """Replaces the optimizer's ``step()``; made by :func:`update_on_servers`.

    Attributes:
        optimizer: holds the options; schedulers set them as usual, after :meth:`step`. Its state is on the
            servers until :meth:`finish`.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._model = model
        self._group = python_group(model.process_group)
        self._tables = _tables_of(optimizer)
        self._table_of = {table.parameter: table for table in self._tables}
        self._slots = _slots_of(optimizer)
        self._rule = 0
        self._options: list[tuple[float, ...]] = []  # of the step that is under way
        self._updates: list[_Update] = []  # of the last backward pass, before step()
        self._in_backward = False
        self._is_loaded = self._was_loaded = self._is_fetched = False
        try:
            self._configure()
        except ValueError as problem:  # such as all ranks on one host
            raise UsageError(f"update_on_servers: {problem}") from None
        self._load()
        model.register_comm_hook(None, lambda state, bucket: self._begin_updates(bucket))
        optimizer.register_step_pre_hook(self._refuse_step)
        optimizer.register_state_dict_pre_hook(self._require_state)
        for owner in (model, model.module):
            owner.register_load_state_dict_post_hook(self._reload)
        optimizer.register_load_state_dict_post_hook(self._reload)

    # ---- called by the training loop ----------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Wait for the weights after the step with the last backward pass's gradients.

        Raises:
            UsageError: there was no backward pass with averaging since the last step; the options were
                changed since it began; or the gradients were changed, as clipping does.
            CommError: a rank or a server was lost.
        """
        if not self._updates:
            raise UsageError(
                "step() without gradients: it belongs after a backward pass outside of no_sync()"
            )
        if _options_of(self.optimizer) != self._options:
            raise UsageError(
                "the optimizer's options were changed between backward() and step(), when the servers had "
                "them: change them after step(), as schedulers do"
            )
        for update in self._updates:
            gradient = update.table.parameter.grad
            if gradient is not update.memory or gradient._version != update.version:
                raise UsageError(
                    "the gradients were changed between backward() and step(), when the servers had them: "
                    "clipping, unscaling and zero_grad() there need plain DDP"
                )
        for update in self._updates:
            update.work.wait()
        torch._foreach_copy_(
            [update.table.parameter for update in self._updates], [update.memory for update in self._updates]
        )
        for update in self._updates:
            update.table.parameter.grad = None
            update.table.step += 1
        self._updates = []
        self.optimizer.state.clear()
        self._is_fetched = False
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # checked by torch's schedulers

    @torch.no_grad()
    def finish(self) -> None:
        """Bring the optimizer's state back from the servers, which go on keeping it.

        All ranks call it, before ``optimizer.state_dict()`` and at the end. The state has the form of a run
        without servers, which can continue with it, and the reverse. The next step drops it again.

        Raises:
            UsageError: a backward pass has had no step.
            CommError: a rank or a server was lost.
        """
        if self._updates:
            raise UsageError("finish() between backward() and step(): call step() first")
        if self._is_fetched or not self._is_loaded:
            return
        works = []
        for table in self._tables:
            state: dict[str, Any] = {}
            for slot, name in enumerate(self._slots_of(table), start=1):
                if table.step:
                    state[name] = torch.zeros_like(table.parameter)
                    works.append(self._move("dump", table, slot, state[name]))
            if table.step and "exp_avg" in state:
                state["step"] = torch.tensor(float(table.step))
            if state:
                self.optimizer.state[table.parameter] = state
        for work in works:
            work.wait()
        self._is_fetched = True

    # ---- operations on the servers ------------------------------------------------------------------------

    def _configure(self) -> None:
        """Send the options of the next step to all servers; ranks whose options differ are named."""
        self._rule += 1
        self._options = _options_of(self.optimizer)
        kind = _ADAMW if isinstance(self.optimizer, AdamW | torch.optim.AdamW) else _SGD
        packed = struct.pack("<4I", self._rule, kind, len(self._options), 0)
        packed += b"".join(struct.pack("<6d", *options) for options in self._options)
        memory = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._submit(
            memory, kind="configure", dtype="uint8", op="bor", served=(0, 0, self._rule, 0),
            text=_description(self.optimizer, len(self._tables)),
        )  # fmt: skip

    @torch.no_grad()
    def _load(self) -> None:
        """Load rank 0's weights and optimizer state to the servers, and wait until they have them."""
        works = []
        for table in self._tables:
            state = self.optimizer.state.get(table.parameter, {})
            slots = self._slots_of(table)
            table.step = int(state.get("step", 0)) if "exp_avg" in slots else 0
            works.append(self._move("load", table, 0, table.parameter.data))
            for slot, name in enumerate(slots, start=1):
                value = state.get(name)
                if value is not None or self._was_loaded:
                    memory = torch.zeros_like(table.parameter)
                    works.append(
                        self._move("load", table, slot, memory if value is None else memory.copy_(value))
                    )
        for work in works:
            work.wait()
        self.optimizer.state.clear()
        self._is_loaded = self._was_loaded = True
        self._is_fetched = all(table.step == 0 for table in self._tables)

    def _move(self, kind: str, table: _Table, slot: int, memory: Tensor) -> Any:
        """Load a slot of a tensor from rank 0's memory or dump it; all ranks' memory then holds it."""
        if kind == "load" and self._group.rank() != 0:
            memory.zero_()
        served = (table.number, table.step, 0, table.place)
        return self._submit(memory, kind=kind, dtype="int32", op="bor", root=slot, served=served)

    def _submit(self, memory: Tensor, **words: Any) -> Any:
        address = memory.data_ptr()
        return self._group.submit(
            Operation(
                input=address, output=address, count=memory.numel(), shape=tuple(memory.shape), memory=memory,
                result=memory, **words,
            )
        )  # fmt: skip

    def _slots_of(self, table: _Table) -> tuple[str, ...]:
        group = self.optimizer.param_groups[table.group]
        return () if "momentum" in group and not group["momentum"] else self._slots

    # ---- the backward pass --------------------------------------------------------------------------------

    def _begin_updates(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
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
            work = self._submit(
                memory, kind="update", dtype="float32", root=table.group,
                served=(table.number, table.step + 1, self._rule, table.place),
            )  # fmt: skip
            self._updates.append(_Update(table, memory, work))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _begin_step(self) -> None:
        if self._updates:
            raise UsageError(
                "a second backward pass before step(): the servers have updated with the first one's "
                "gradients; do all but the last backward pass of a step in no_sync()"
            )
        for parameter in self._table_of:
            if parameter._post_accumulate_grad_hooks:
                raise UsageError(
                    "update_on_servers: a parameter has a hook that reads its gradient after the backward "
                    "pass (register_post_accumulate_grad_hook), where the servers' weights arrive; remove it"
                )
        if not self._is_loaded:
            self._load()
        self._configure()
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


# ---- optimizers -----------------------------------------------------------------------------------------


def _tables_of(optimizer: Optimizer) -> list[_Table]:
    tables: list[_Table] = []
    place = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in trained(group["params"]):
            tables.append(_Table(parameter, len(tables), index, place))
            place += -(-parameter.numel() // _BLOCK)
    return tables


def _slots_of(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of the state's tensors in the slots after the weights."""
    if isinstance(optimizer, AdamW | torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",)


def _options_of(optimizer: Optimizer) -> list[tuple[float, ...]]:
    """Return six numbers for each group, as csrc/engine/served_weights.h describes them."""
    options = []
    for group in optimizer.param_groups:
        if isinstance(optimizer, AdamW | torch.optim.AdamW):
            given = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], 0.0)
        else:
            nesterov = group.get("nesterov", getattr(optimizer, "nesterov", False))
            given = (group["lr"], group["momentum"], group["weight_decay"], nesterov, 0.0, 0.0)
        options.append(tuple(map(float, given)))
    return options


def _description(optimizer: Optimizer, num_tensors: int) -> str:
    names = ("lr", "betas", "eps", "momentum", "nesterov", "weight_decay")
    groups = (
        ", ".join(f"{name}={group[name]}" for name in names if name in group)
        for group in optimizer.param_groups
    )
    return f"{type(optimizer).__name__}({'; '.join(groups)}) of {num_tensors} tensors"


_SERVED = (AdamW, SGD, torch.optim.AdamW, torch.optim.SGD)
_OFF = ("amsgrad", "maximize", "dampening", "differentiable")
"""Options of torch's optimizers that the kernels do not have."""


def _check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    name = type(optimizer).__name__
    if type(optimizer) not in _SERVED:
        raise UsageError(
            f"update_on_servers: the servers have no kernel for {type(optimizer).__module__}.{name}; they "
            "have AdamW and SGD of shoal.optim and torch.optim"
        )
    for group in optimizer.param_groups:
        for option in _OFF:
            if group.get(option):
                raise UsageError(
                    f"update_on_servers: the servers' {name} has no {option}={group[option]}; switch it off"
                )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UsageError(f"update_on_servers: {name} has step hooks, and workers take no step; remove them")
    given, wanted = (
        set(trained(chain.from_iterable(g["params"] for g in optimizer.param_groups))),
        set(trained(model.parameters())),
    )
    if given != wanted:
        raise UsageError(
            f"update_on_servers: {name} has {len(given - wanted)} parameters that are not the model's, and "
            f"lacks {len(wanted - given)} that are trained; give it the model's"
        )


def _check_model(model: DistributedDataParallel) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(f"update_on_servers takes a DistributedDataParallel, not a {type(model).__name__}")
    if model._comm_hooks:
        hook = getattr(model._comm_hooks[0][0], "__qualname__", "?")
        raise UsageError(f"update_on_servers: the model has the communication hook {hook}; register none")
    if model.find_unused_parameters:
        raise UsageError(
            "update_on_servers: with find_unused_parameters=True a gradient that no rank has is known only "
            "after the servers' step; make all parameters used, or freeze those that are not"
        )
    if not hasattr(python_group(model.process_group), "engine"):
        raise UsageError(
            'update_on_servers needs a process group of backend "shoal", not '
            f"{dist.get_backend(model.process_group)!r}"
        )
    if dist.get_world_size(model.process_group) == 1:
        raise UsageError("update_on_servers: a single worker has no servers; use the optimizer itself")
    for name, parameter in _named(model):
        dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
        if not (parameter.is_cpu and parameter.dtype == torch.float32 and dense and parameter.numel()):
            raise UsageError(
                f"update_on_servers takes dense float32 parameters on the CPU, and {name} is "
                f"{parameter.dtype}{list(parameter.shape)} on {parameter.device}"
            )
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"update_on_servers takes no sparse gradients, as {module} makes; give it sparse=False"
            )


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)
