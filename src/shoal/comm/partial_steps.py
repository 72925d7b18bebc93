"""An optimizer that steps for some parameters at a time, as if for all at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import LBFGS, Optimizer, SparseAdam

from shoal.errors import UsageError

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
