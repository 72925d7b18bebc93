"""DDP whose next forward pass begins while gradients still travel.

    ddp = DistributedDataParallel(model)
    training = prioritize(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-4))
    for inputs in loader:
        loss_of(ddp(inputs)).backward()
        training.step()  # in the place of optimizer.step(); returns at once
    training.finish()

1.  The backward pass fills buckets from the last layers to the first. Each bucket's sum begins with a
    priority that grows with its number (:func:`priority_of`): a later bucket holds layers that the next
    forward pass needs sooner, and overtakes what waits to be sent. ``backward()`` waits for none of them.
2.  ``step()`` notes the learning rates and other options of this step and returns.
3.  In the next forward pass each module, before it runs, waits for the buckets that hold its parameters; the
    optimizer takes its step for the parameters of each bucket, once, as it arrives.
4.  What the forward pass has not used is waited for at its end, before the backward pass needs the bucket.

The weights are those of plain DDP to the last bit, for optimizers that update each parameter from its own
gradient and state (SGD, Adam, AdamW, LARS, LAMB, LANS, NovoGrad, Adafactor). What needs all gradients at
once, such as clipping by their global norm, would have to wait for the last bucket and is refused.

Source of the idea: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training"
(arXiv 1905.03960), and the layer-wise steps of Peng et al., "A Generic Communication Scheduler for
Distributed DNN Training Acceleration" (SOSP 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer, SparseAdam

from shoal.errors import UsageError

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def priority_of(bucket: int) -> int:
    """Return the priority of DDP's bucket of this number: the same on all ranks, higher for later buckets."""
    return 1 + bucket


def prioritize(model: DistributedDataParallel, optimizer: Optimizer | OptimizerFactory) -> Prioritized:
    """Let DDP's gradients travel in the order of need, and the optimizer step layer by layer.

    Call it on all ranks, before the first backward pass. Any backend will do; only ``"shoal"`` sends by
    priority.

    Args:
        model: without a communication hook of its own.
        optimizer: over parameters of ``model``, or a function that makes one of them. Its ``step()`` is not
            to be called any more; its state stays one, and is saved and loaded as ever.

    Raises:
        UsageError: the optimizer needs all gradients at once, or the model cannot be taken over.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(f"prioritize takes a DistributedDataParallel, not a {type(model).__name__}")
    if model._comm_hooks:
        name = getattr(model._comm_hooks[0][0], "__qualname__", "?")
        raise UsageError(f"prioritize: the model has the communication hook {name} already; register none")
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(f"prioritize takes no sparse gradients, as {module} makes; give it sparse=False")
    return Prioritized(
        model, optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
    )


@dataclass(eq=False)
class _Bucket:
    """A bucket whose sum is under way, and where the gradients lie in it."""

    work: Any
    parameters: list[Tensor]
    gradients: list[Tensor]
    versions: list[int]


class Prioritized:
    """What :func:`prioritize` returns: takes the place of the optimizer's ``step()``.

    Attributes:
        optimizer: the optimizer; schedulers set its learning rates as ever, after :meth:`step`.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._steps = PartialSteps(optimizer, model)
        self._model = model
        self._fresh: list[_Bucket] = []  # of the last backward pass, without a step yet
        self._due: dict[Tensor, _Bucket] = {}  # by parameter: the step has been asked for
        self._in_backward = False
        self._called: set[nn.Module] | None = set()  # in the first forward pass; None once looked at
        self._needs: dict[nn.Module, list[Tensor]] = {}
        self._register()

    # ---- what the training loop calls ---------------------------------------------------------------------

    def step(self) -> None:
        """Ask for the optimizer's step with the gradients of the last backward pass; does not wait for them.

        Raises:
            UsageError: there has been no backward pass with sums since the last step, or somebody has changed
                the gradients, as clipping does.
        """
        self._take_due(list(self._due))
        if not self._fresh:
            raise UsageError(
                "step() without gradients: it belongs after a backward pass outside of no_sync()"
            )
        for bucket in self._fresh:
            self._check_unchanged(bucket)
        for bucket in self._fresh:
            self._due.update(dict.fromkeys(bucket.parameters, bucket))
            for parameter in bucket.parameters:
                parameter.grad = None
        self._fresh = []
        self._steps.ask()

    def finish(self) -> None:
        """Wait for all gradients and take the steps that are due: before weights are read or saved.

        Saving the model's or the optimizer's ``state_dict`` and a forward pass for evaluation call it.
        """
        self._take_due(list(self._due))
        for bucket in self._fresh:
            bucket.work.wait()

    # ---- the backward pass --------------------------------------------------------------------------------

    def _begin_sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin a bucket's average; DDP is told that it is there, so that it does not wait."""
        if self._due:
            raise UsageError(
                "a backward pass while steps are due: its forward pass was not that of the model"
            )
        if self._model._join_config.enable:
            raise UsageError("prioritize does not go together with join(): give all ranks as many batches")
        if not self._in_backward:
            self._fresh = []  # gradients of an earlier pass have been added to these
            self._in_backward = True
            after = torch.autograd.Variable._execution_engine.queue_callback
            # behind DDP's own callback, which is queued with the last bucket
            after(lambda: after(self._end_of_backward))
        group = self._model.process_group
        buffer = bucket.buffer()
        buffer.mul_(1.0 / dist.get_world_size(group))  # as DDP does without a hook: dividing gives other bits
        parameters = bucket.parameters()
        begin = getattr(group, "all_reduce_with_priority", None)
        work = (
            dist.all_reduce(buffer, group=group, async_op=True)
            if begin is None
            else begin(buffer, priority_of(bucket.index()))
        )
        places = zip(parameters, bucket.gradients(), strict=True)
        self._fresh.append(_Bucket(work, parameters, [_laid_out(p, buffer, g) for p, g in places], []))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _end_of_backward(self) -> None:
        """Let the gradients be those in the buckets, where they are going to be right."""
        self._in_backward = False
        for bucket in self._fresh:
            # no rank has used a parameter that DDP has left without a gradient
            used = [p.grad is not None for p in bucket.parameters]
            bucket.parameters = [p for p, use in zip(bucket.parameters, used, strict=True) if use]
            bucket.gradients = [g for g, use in zip(bucket.gradients, used, strict=True) if use]
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                parameter.grad = gradient
            bucket.versions = [gradient._version for gradient in bucket.gradients]

    def _check_unchanged(self, bucket: _Bucket) -> None:
        given = zip(bucket.parameters, bucket.gradients, bucket.versions, strict=True)
        for parameter, gradient, version in given:
            if parameter.grad is not gradient or gradient._version != version:
                raise UsageError(
                    "the gradients were changed between backward() and step(), when they had not arrived: "
                    "clipping by the global norm, unscaling and zero_grad() there need plain DDP"
                )

    def _detach_fresh(self) -> None:
        """Take gradients without a step out of their buckets: another backward pass is going to add to them.

        DDP would copy them from their bucket to themselves, while the next sums are written there.
        """
        for bucket in self._fresh:
            bucket.work.wait()
            for place, parameter in enumerate(bucket.parameters):
                if parameter.grad is bucket.gradients[place]:
                    parameter.grad = bucket.gradients[place] = bucket.gradients[place].clone()
                    bucket.versions[place] = bucket.gradients[place]._version

    # ---- the forward pass ---------------------------------------------------------------------------------

    def _register(self) -> None:
        model, optimizer = self._model, self.optimizer

        model.register_comm_hook(None, lambda state, bucket: self._begin_sum(bucket))
        root = model.module
        for module in root.modules():
            self._needs[module] = trained(module.parameters(recurse=False))
            # before the module's own, which may compute a weight from parameters (weight_norm)
            module.register_forward_pre_hook(self._before, prepend=True)
        root.register_forward_hook(self._after)
        for owner in (model, root):
            owner.register_state_dict_pre_hook(lambda *_: self.finish())
            owner.register_load_state_dict_pre_hook(lambda *_: self.finish())
        optimizer.register_state_dict_pre_hook(lambda _: self.finish())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish())

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if module is self._model.module:
            self._in_backward = False  # also where the last pass has failed
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
        """Let modules that were not called leave their parameters to the one around them that was.

        That one uses them itself, as ``nn.MultiheadAttention`` does with its ``out_proj``, or not at all.
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
        """Wait for the buckets of these parameters, and take the step for all parameters in them."""
        for parameter in parameters:
            bucket = self._due.get(parameter)
            if bucket is not None:
                bucket.work.wait()
                self._steps.take(bucket.parameters, bucket.gradients)
                for each in bucket.parameters:
                    del self._due[each]


def _laid_out(parameter: Tensor, buffer: Tensor, gradient: Tensor) -> Tensor:
    """Return where a gradient lies in its bucket; DDP keeps the order in memory of a dense parameter."""
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return gradient
    return buffer.as_strided(parameter.size(), parameter.stride(), gradient.storage_offset())


_CLIPPING = ("max_grad_norm", "max_norm", "clip_grad_norm", "grad_clip_norm", "gradient_clipping")
"""Names of options that optimizers have for the largest global norm."""

Options = dict[str, Any]


class PartialSteps:
    """Takes an optimizer's step in parts, all with the options that the groups had when it was asked for.

    That is one step to the last bit for optimizers that update each parameter from its own gradient and
    state. Others are refused: at once where that can be seen, or with the first part where they change
    options that all parameters share. From now on the optimizer's own ``step()`` is refused as well.

    Args:
        optimizer: over parameters of ``model``.
        model: whose gradients it gets.

    Raises:
        UsageError: the optimizer needs all gradients at once, or has parameters that are not the model's.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        _check(optimizer, model)
        self._optimizer = optimizer
        self._options: list[Options] = []  # of the step that was asked for, a dict for each parameter group
        self._stepping = False
        optimizer.register_step_pre_hook(self._refuse_other_steps)

    def ask(self) -> None:
        """A step begins: keep the learning rates and other options as they are now."""
        self._options = [_options_of(group) for group in self._optimizer.param_groups]
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look at

    @torch.no_grad()
    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update these parameters; afterwards they have no gradient."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._stepping = True
        try:
            with self._groups_of(set(parameters)):
                self._optimizer.step()
        finally:
            self._stepping = False
        for parameter in parameters:
            parameter.grad = None
            # an optimizer's own kernels may not say that they have changed it: autograd must know, should the
            # forward pass have used it already
            torch.autograd.graph.increment_version(parameter)

    @contextmanager
    def _groups_of(self, chosen: set[Tensor]) -> Iterator[None]:
        """Leave the optimizer only these parameters, and the options of the step that was asked for."""
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        for group, options in zip(groups, self._options, strict=True):
            group.update(options, params=[p for p in group["params"] if p in chosen])
        try:
            yield
            for group, options in zip(groups, self._options, strict=True):
                _check_same_options(self._optimizer, group, options)
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
    """Return those that get gradients."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def _options_of(group: Options) -> Options:
    """Return the options of a parameter group as they are now; schedulers change tensors in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _check_same_options(optimizer: Optimizer, group: Options, options: Options) -> None:
    for name, value in group.items():
        if name != "params" and (name not in options or value is not options[name]):
            raise UsageError(
                f"prioritize: {type(optimizer).__name__} keeps {name!r} in its parameter groups and changes "
                "it in each step; it cannot step for some parameters at a time; use plain DDP"
            )


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
