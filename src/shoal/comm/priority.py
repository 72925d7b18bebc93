"""Overlaps DDP's gradient averaging with the next forward pass.

    ddp = DistributedDataParallel(model)
    training = prioritize(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-4))
    for inputs in loader:
        loss_of(ddp(inputs)).backward()
        training.step()  # replaces optimizer.step(); returns at once
    training.finish()

1.  The backward pass fills buckets from the last layers to the first. The all_reduce of each bucket starts
    with a priority that grows with the bucket's number: a later bucket holds layers
    that the next forward pass needs earlier, and overtakes queued ones. ``backward()`` waits for none of
    them.
2.  ``step()`` records the learning rates and other options of this step and returns.
3.  In the next forward pass, each module first waits for the buckets that hold its parameters. The optimizer
    steps once for the parameters of each bucket, when the bucket arrives.
4.  Buckets that the forward pass did not use are awaited at its end, before the backward pass needs them.

The weights are those of plain DDP to the last bit, for optimizers that update each parameter from its own
gradient and state (SGD, Adam, AdamW, LARS, LAMB, LANS, NovoGrad, Adafactor). Optimizers and clipping that
need all gradients at once would have to wait for the last bucket, and are refused.

Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (arXiv
1905.03960), and the layer-wise steps of Peng et al., "A Generic Communication Scheduler for Distributed DNN
Training Acceleration" (SOSP 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer, SparseAdam

from shoal.comm.native_group import python_group
from shoal.errors import UsageError


def prioritize(model: DistributedDataParallel, optimizer: Optimizer) -> Prioritized:
    """Average DDP's gradients in the order of the next forward pass, and step layer by layer.

    Call it on all ranks, before the first backward pass. It works on any backend; only ``"shoal"`` sends by
    priority.

    Args:
        model: without a communication hook.
        optimizer: over parameters of ``model``. Do not call its ``step()`` afterwards; save and load its
            state as usual.

    Returns:
        An object whose ``step()`` replaces the optimizer's.

    Raises:
        UsageError: the optimizer needs all gradients at once, or the model has a hook or sparse gradients.

    Example (one process; under torchrun every rank does the same):

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(nn.Linear(4, 2))
        >>> optimizer = prioritize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(f"prioritize takes a DistributedDataParallel, not a {type(model).__name__}")
    if model._comm_hooks:
        name = getattr(model._comm_hooks[0][0], "__qualname__", "?")
        raise UsageError(f"prioritize: the model has the communication hook {name} already; register none")
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(f"prioritize takes no sparse gradients, as {module} makes; give it sparse=False")
    return Prioritized(model, optimizer)


@dataclass(eq=False)
class _Bucket:
    """A bucket in flight: by parameter, the view of its gradient and that view's version."""

    work: Any
    gradients: dict[Tensor, Tensor]
    versions: dict[Tensor, int] = field(default_factory=dict)


class Prioritized:
    """Replaces the optimizer's ``step()``; made by :func:`prioritize`.

    Attributes:
        optimizer: the optimizer; schedulers set its learning rates as usual, after :meth:`step`.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._steps = PartialSteps(optimizer, model)
        self._model = model
        self._fresh: list[_Bucket] = []  # of the last backward pass, before step()
        self._due: dict[Tensor, _Bucket] = {}  # by parameter, after step()
        self._in_backward = False
        self._called: set[nn.Module] | None = set()  # by the first forward pass; then None
        self._needs: dict[nn.Module, list[Tensor]] = {}
        model.register_comm_hook(None, lambda state, bucket: self._begin_sum(bucket))
        for module in model.module.modules():
            self._needs[module] = trained(module.parameters(recurse=False))
            # before the module's own hooks, which may compute a weight from parameters (weight_norm)
            module.register_forward_pre_hook(self._before, prepend=True)
        model.module.register_forward_hook(self._after)
        for owner in (model, model.module, optimizer):
            owner.register_state_dict_pre_hook(lambda *_: self.finish())
            owner.register_load_state_dict_pre_hook(lambda *_: self.finish())

    # ---- called by the training loop ----------------------------------------------------------------------

    def step(self) -> None:
        """Request the optimizer's step with the gradients of the last backward pass, without waiting.

        Raises:
            UsageError: there was no backward pass with averaging since the last step, or the gradients were
                changed, as clipping does.
        """
        self._take_due(list(self._due))
        if not self._fresh:
            raise UsageError(
                "step() without gradients: it belongs after a backward pass outside of no_sync()"
            )
        for bucket in self._fresh:
            for parameter, gradient in bucket.gradients.items():
                if parameter.grad is not gradient or gradient._version != bucket.versions[parameter]:
                    raise UsageError(
                        "the gradients were changed between backward() and step(), when they had not "
                        "arrived: clipping by the global norm, unscaling and zero_grad() there need plain DDP"
                    )
        for bucket in self._fresh:
            self._due.update(dict.fromkeys(bucket.gradients, bucket))
            for parameter in bucket.gradients:
                parameter.grad = None
        self._fresh = []
        self._steps.request()

    def finish(self) -> None:
        """Wait for all gradients and take pending steps. Call it before weights are read or saved.

        Taking the ``state_dict`` of the model or the optimizer calls it, and so does a forward pass in
        evaluation.
        """
        self._take_due(list(self._due))
        for bucket in self._fresh:
            bucket.work.wait()

    # ---- the backward pass --------------------------------------------------------------------------------

    def _begin_sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start a bucket's average and return a completed future, so that DDP does not wait for it."""
        if self._due:
            raise UsageError(
                "a backward pass while steps are due: its forward pass was not that of the model"
            )
        if self._model._join_config.enable:
            raise UsageError("prioritize does not go together with join(): give all ranks as many batches")
        if not self._in_backward:
            self._fresh = []  # gradients of an earlier pass are accumulated in these
            self._in_backward = True
            after = torch.autograd.Variable._execution_engine.queue_callback
            # runs after DDP's own callback, which is queued with the last bucket
            after(lambda: after(self._end_of_backward))
        group = self._model.process_group
        buffer = bucket.buffer()
        buffer.mul_(1.0 / dist.get_world_size(group))  # as DDP without a hook; a division gives other bits
        begin = getattr(python_group(group), "all_reduce_with_priority", None)
        work = (
            dist.all_reduce(buffer, group=group, async_op=True)
            if begin is None
            else begin(buffer, 1 + bucket.index())
        )
        gradients = zip(bucket.parameters(), bucket.gradients(), strict=True)
        self._fresh.append(_Bucket(work, {p: _laid_out(p, buffer, g) for p, g in gradients}))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _end_of_backward(self) -> None:
        """Make ``grad`` of each parameter the view of its bucket, which will hold the average."""
        self._in_backward = False
        for bucket in self._fresh:
            # DDP leaves parameters without a gradient that no rank has used
            bucket.gradients = {p: g for p, g in bucket.gradients.items() if p.grad is not None}
            for parameter, gradient in bucket.gradients.items():
                parameter.grad = gradient
                bucket.versions[parameter] = gradient._version

    def _detach_fresh(self) -> None:
        """Copy gradients that had no step out of their buckets, because another backward pass accumulates.

        DDP would copy them from the bucket to itself, while the next averages are written there.
        """
        for bucket in self._fresh:
            bucket.work.wait()
            for parameter, gradient in bucket.gradients.items():
                if parameter.grad is gradient:
                    parameter.grad = bucket.gradients[parameter] = gradient.clone()
                    bucket.versions[parameter] = parameter.grad._version

    # ---- the forward pass ---------------------------------------------------------------------------------

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if module is self._model.module:
            self._in_backward = False  # even if the last pass has failed
            self._detach_fresh()
            if self._called is not None:
                self._called = set()
            if not (module.training and torch.is_grad_enabled()):
                self._take_due(list(self._due))
        if self._called is not None:
            self._called.add(module)
        if self._due:
            self._take_due(self._needs[module])

    def _after(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._take_due(list(self._due))
        if self._called is not None and module.training:
            self._adopt(module, module)
            self._called = None

    def _adopt(self, module: nn.Module, caller: nn.Module) -> None:
        """Assign the parameters of modules that were not called to the innermost enclosing module that was.

        That module uses them directly, as ``nn.MultiheadAttention`` does with its ``out_proj``, or not at
        all.
        """
        assert self._called is not None
        if module in self._called:
            caller = module
        else:
            self._needs[caller] = [*self._needs[caller], *self._needs[module]]
        for child in module.children():
            self._adopt(child, caller)

    # ---- the steps ----------------------------------------------------------------------------------------

    def _take_due(self, parameters: Iterable[Tensor]) -> None:
        """Wait for the buckets of these parameters, and step for all parameters in them."""
        for parameter in parameters:
            bucket = self._due.get(parameter)
            if bucket is not None:
                bucket.work.wait()
                self._steps.take(bucket.gradients)
                for each in bucket.gradients:
                    del self._due[each]


def _laid_out(parameter: Tensor, buffer: Tensor, gradient: Tensor) -> Tensor:
    """Return the view of a gradient in its bucket. DDP keeps the memory format of a dense parameter."""
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return gradient
    return buffer.as_strided(parameter.size(), parameter.stride(), gradient.storage_offset())


_CLIPPING = ("max_grad_norm", "max_norm", "clip_grad_norm", "grad_clip_norm", "gradient_clipping")
"""Option names of optimizers for the maximum global norm."""

Options = dict[str, Any]


class PartialSteps:
    """Splits an optimizer's step into steps for some parameters each, with the options of one point in time.

    The result is that of one step to the last bit, for optimizers that update each parameter from its own
    gradient and state. Others are refused: on construction if possible, else on the first partial step, if it
    changes options that all parameters share. The optimizer's own ``step()`` is refused from now on.

    Args:
        optimizer: over parameters of ``model``.
        model: the module whose gradients it uses.

    Raises:
        UsageError: the optimizer needs all gradients at once, or has parameters that are not the model's.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        _check(optimizer, model)
        self._optimizer = optimizer
        self._options: list[Options] = []  # of the requested step, one dict per parameter group
        self._stepping = False
        optimizer.register_step_pre_hook(self._refuse_other_steps)

    def request(self) -> None:
        """Record the learning rates and other options for the next step."""
        self._options = [_options_of(group) for group in self._optimizer.param_groups]
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # checked by torch's schedulers

    @torch.no_grad()
    def take(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Update the parameters with these gradients, and clear those of the parameters."""
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        self._stepping = True
        try:
            with self._groups_of(gradients.keys()):
                self._optimizer.step()
        finally:
            self._stepping = False
        for parameter in gradients:
            parameter.grad = None
            # An optimizer's own kernels may not increment the version, by which autograd detects that the
            # forward pass has already used the parameter.
            torch.autograd.graph.increment_version(parameter)

    @contextmanager
    def _groups_of(self, chosen: Set[Tensor]) -> Iterator[None]:
        """Restrict the optimizer to these parameters, with the options of the requested step."""
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        for group, options in zip(groups, self._options, strict=True):
            group.update(options, params=[p for p in group["params"] if p in chosen])
        try:
            yield
            for group, options in zip(groups, self._options, strict=True):
                for name, value in group.items():
                    if name != "params" and (name not in options or value is not options[name]):
                        raise UsageError(
                            f"prioritize: {type(self._optimizer).__name__} keeps {name!r} in its parameter "
                            "groups and changes it in each step; it cannot step for some parameters at a "
                            "time; use plain DDP"
                        )
        finally:
            for group, before in zip(groups, now, strict=True):
                group.clear()
                group.update(before)

    def _refuse_other_steps(self, *_: Any) -> None:
        if not self._stepping:
            raise UsageError(
                "optimizer.step() was called after prioritize(): call step() of what prioritize() returned"
            )


def trained(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def _options_of(group: Options) -> Options:
    """Copy the options of a parameter group. Tensors are cloned, since schedulers change them in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _check(optimizer: Optimizer, model: nn.Module) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS | SparseAdam | ZeroRedundancyOptimizer):
        raise UsageError(f"prioritize: {name} cannot step for some parameters at a time; use plain DDP")
    for options in (vars(optimizer), *optimizer.param_groups):
        for key in _CLIPPING:
            if options.get(key):
                raise UsageError(
                    f"prioritize: {name} clips by the global norm ({key}={options[key]}), which is "
                    "known only when all gradients have arrived; switch that off, or use plain DDP"
                )
    ours = set(trained(model.parameters()))
    for group in optimizer.param_groups:
        if not ours.issuperset(p for p in group["params"] if p.requires_grad):
            raise UsageError(
                f"prioritize: {name} has parameters that are not the model's; give it only those"
            )
