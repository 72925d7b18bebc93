"""Models with autograd functions of their own: stages have their gradients, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_runs import largest_error, run_eager, run_stages
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.models.bloom.modeling_bloom import GeLUFunction
from transformers.models.phimoe.modeling_phimoe import PhimoeMultiplier

from shoal.errors import UsageError
from shoal.pipelining.export_graph import export_model
from shoal.pipelining.split import split
from shoal.pipelining.units import units_of

EXACT = 1e-6


class Reversed(Function):
    """Gives the layers below it the opposite gradient, as adversarial training does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


class Rounded(Function):
    """Rounds, with the gradient of the identity; its context is set up apart."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class BoundedRoot(Function):
    """A root whose gradient is bounded where the root's is not: at 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs().sqrt()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x.sign() / (2 * x.abs().clamp(min=1e-6).sqrt())


class Squared(Function):
    """Saves its input only, and has the gradient of its forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return 2 * ctx.scale * ctx.saved_tensors[0] * grads[0], None


@torch.library.custom_op("shoal_tests::reversed", mutates_args=())
def operator(x: Tensor) -> Tensor:
    """Return a copy; its gradient is the opposite one, which torch.export keeps."""
    return x.clone()


@operator.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


operator.register_autograd(lambda ctx, grad: -grad)


class Gathered(Function):
    """Reads rows that are distinct, whose gradients are written and not added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return torch.zeros(4, 8).index_copy(0, rows, grads[0]), None


class Layers(nn.Module):
    """Linear layers, each called as ``between`` says."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self._between = between

    def forward(self, x: Tensor) -> ImageClassifierOutput:
        for layer in self.layers:
            x = self._between(layer, x)
        return ImageClassifierOutput(loss=x.square().mean())


BATCH = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(3))}
EQUAL: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "reentrant checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "a function that saves memory": lambda layer, x: Squared.apply(layer(x), 0.5),
    "distinct rows": lambda layer, x: Gathered.apply(layer(x), torch.tensor([2, 0, 3, 1])),
    "a custom operator": lambda layer, x: layer(x) + 2 * operator(layer(x)),
    "Bloom's": lambda layer, x: GeLUFunction.apply(layer(x)),
}
OTHER: dict[str, type[Function]] = {
    "Reversed": Reversed, "Rounded": Rounded, "BoundedRoot": BoundedRoot, "PhimoeMultiplier": PhimoeMultiplier
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_stages_have_the_gradients_of_the_model(name: str) -> None:
    model = Layers(EQUAL[name])
    batch = {"x": BATCH["x"].clone().requires_grad_()}  # for a reentrant checkpoint of the first layer
    expected = run_eager(model, batch)
    assert all(grad is not None and grad.any() for grad in expected.gradients.values())
    exported = export_model(model, BATCH, True)
    units = units_of(exported)
    stages = split(exported, [len(units) // 2], units=units)
    assert largest_error(run_stages(model, stages, exported.unflatten, BATCH), expected) <= EXACT


@pytest.mark.parametrize("name", OTHER)
def test_a_function_with_other_gradients_is_refused(name: str) -> None:
    function = OTHER[name]
    others = (torch.rand(4, 8), torch.zeros(4, 1, dtype=torch.long), torch.rand(4, 8), torch.rand(4, 8))
    more = others if function is PhimoeMultiplier else ()
    model = Layers(lambda layer, x: layer(x) + function.apply(layer(x), *more))
    apply = Function.__dict__["apply"]
    with pytest.raises(UsageError, match=f"would drop the backward pass of {name}") as refused:
        export_model(model, BATCH, True)
    assert __file__ in str(refused.value) and "modules=" in str(refused.value)
    assert Function.__dict__["apply"] is apply
    export_model(model.eval(), BATCH, False)  # an evaluation has no backward pass
