"""LAMB against the written formula in float64, two other libraries, and itself in other forms."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import timm.optim
import torch
from moments_formula import (
    after_steps,
    assert_close,
    groups_of,
    make_parameters,
    set_gradients,
    trust_ratio,
)
from torch import Tensor, nn

from shoal import native
from shoal.errors import UsageError
from shoal.optim.lamb import Lamb, parameter_groups

IMPLEMENTATIONS = ("native", "foreach")


def formula(
    weights: list[Tensor],
    grads_of_step: list[list[Tensor]],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    bias_correction: bool = True,
    max_grad_norm: float | None = None,
    grad_scale: float = 1.0,
) -> list[Tensor]:
    """Algorithm 2 of the paper; one-dimensional tensors have neither decay nor ratio."""

    def clipped(grads: list[Tensor]) -> list[Tensor]:
        grads = [g * grad_scale for g in grads]
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
        too_long = max_grad_norm is not None and norm > max_grad_norm
        return [g * (max_grad_norm / norm) for g in grads] if too_long else grads

    def change(w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> Tensor:
        m_hat = m / (1 - betas[0] ** step) if bias_correction else m
        v_hat = v / (1 - betas[1] ** step) if bias_correction else v
        excluded = w.ndim <= 1
        u = m_hat / (v_hat.sqrt() + eps) + (0.0 if excluded else weight_decay) * w
        return lr * (1.0 if excluded else trust_ratio(w, u)) * u

    return after_steps(weights, grads_of_step, change, betas=betas, prepared=clipped)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_grad_norm", [None, 0.7, 1e6])
@pytest.mark.parametrize("grad_scale", [1.0, 1 / 128])
def test_formula(
    implementation: str, bias_correction: bool, max_grad_norm: float | None, grad_scale: float
) -> None:
    params = make_parameters()
    begin = [p.detach().clone() for p in params]
    optimizer = Lamb(
        groups_of(params, 0.05),
        lr=0.02,
        bias_correction=bias_correction,
        max_grad_norm=max_grad_norm,
        implementation=implementation,
    )
    grads_of_step = []
    for step in range(5):
        set_gradients(params, step, scale=10.0 ** (step - 2))
        grads_of_step.append([p.grad.clone() for p in params])
        optimizer.step(grad_scale=grad_scale)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads_of_step[-1], strict=True))
    expected = formula(
        begin,
        grads_of_step,
        lr=0.02,
        weight_decay=0.05,
        bias_correction=bias_correction,
        max_grad_norm=max_grad_norm,
        grad_scale=grad_scale,
    )
    assert_close(params, expected, 1e-6)
    moved = [float((p.detach() - b).abs().max()) for p, b in zip(params, begin, strict=True)]
    assert min(moved) > 1e-3


def run(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], scale: float = 1.0
) -> list[nn.Parameter]:
    params = make_parameters()
    optimizer = make(params)
    for step in range(6):
        set_gradients(params, step, scale)
        optimizer.step()
    return params


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_timm_is_the_apex_variant(implementation: str) -> None:
    ours = run(
        lambda p: Lamb(groups_of(p), lr=0.01, max_grad_norm=1.0, implementation=implementation), scale=3.0
    )
    theirs = run(lambda p: timm.optim.Lamb(groups_of(p), lr=0.01, max_grad_norm=1.0), scale=3.0)
    assert_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pytorch_optimizer_is_the_variant_without_bias_correction(implementation: str) -> None:
    def ours(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Lamb(params, lr=0.01, bias_correction=False, implementation=implementation)

    def theirs(params: list[nn.Parameter]) -> torch.optim.Optimizer:  # its weight norms stop at 10
        assert max(float(p.detach().norm()) for p in params) < 10
        return pytorch_optimizer.Lamb(
            params, lr=0.01, weight_decay=0.01, weight_decouple=False, foreach=False,
            adam_debias=True,  # else it divides the learning rate by 1 - beta1^t
        )  # fmt: skip

    small = slice(0, 4)
    assert_close(run(lambda p: ours(p[small]))[small], run(lambda p: theirs(p[small]))[small], 2e-6)


@pytest.mark.parametrize("level", native.simd_levels())
def test_bits_depend_on_neither_threads_nor_level(level: native.Level) -> None:
    def run_native(num_threads: int, level: native.Level | None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        shapes = [(100_003,), (16_384,), (40, 41), (600_000,), (7,), (150_000,), (16_385,)]
        w, g, m = ([torch.randn(s, generator=generator) for s in shapes] for _ in range(3))
        v = [torch.rand(s, generator=generator) for s in shapes]
        norms = native.lamb_step(
            w, g, m, v, [3.0] * len(w), learning_rate=0.01, betas=(0.9, 0.999), eps=1e-6,
            weight_decay=0.01, grad_scale=0.3, bias_correction=True, trust_ratio=True,
            num_threads=num_threads, level=level,
        )  # fmt: skip
        norm = native.l2_norm(g, num_threads=num_threads, level=level)
        return [*w, *m, *v, torch.tensor([*norms, norm], dtype=torch.float64)]

    expected = run_native(1, None)
    for num_threads in (1, 2, 5):
        assert all(torch.equal(a, b) for a, b in zip(run_native(num_threads, level), expected, strict=True))


def test_native_and_foreach_agree_over_many_blocks_and_waves() -> None:
    shapes = [(16_384,), (900, 1000), (16_385,), (700, 700), (3,), (3, 5), (99, 1001)]
    results = []
    for implementation in IMPLEMENTATIONS:
        generator = torch.Generator().manual_seed(2)
        params = [nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for shape in shapes]
        optimizer = Lamb(groups_of(params), lr=0.01, max_grad_norm=1.0, implementation=implementation)
        for _ in range(2):
            for parameter in params:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        results.append(params)
    assert_close(results[0], results[1], 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_norms_are_of_scaled_gradients_before_clipping(implementation: str) -> None:
    params = make_parameters()
    optimizer = Lamb(groups_of(params), lr=0.01, max_grad_norm=0.5, implementation=implementation)
    set_gradients(params, 0)
    grad_norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in params)) * 0.25
    weight_norm = math.sqrt(sum(float((p.detach().double() ** 2).sum()) for p in params))
    optimizer.step(grad_scale=0.25)
    assert optimizer.norms() == pytest.approx((grad_norm, weight_norm), rel=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_norms_without_clipping(implementation: str) -> None:
    params = make_parameters()
    optimizer = Lamb(groups_of(params), lr=0.01, implementation=implementation)
    set_gradients(params, 0)
    expected = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in params)) * 3
    optimizer.step(grad_scale=3.0)
    assert optimizer.norms()[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_zero_weights_and_zero_updates_have_the_ratio_1(implementation: str) -> None:
    zero, still = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4, 4))
    zero.grad, still.grad = torch.ones(4, 4), torch.zeros(4, 4)
    Lamb([zero, still], lr=0.1, weight_decay=0.0, implementation=implementation).step()
    torch.testing.assert_close(zero.detach(), torch.full((4, 4), -0.1), rtol=1e-5, atol=0)
    assert torch.equal(still, torch.ones(4, 4))


def test_closure_and_added_group() -> None:
    params = make_parameters()
    optimizer = Lamb(params[:2], lr=0.01)
    optimizer.add_param_group({"params": params[2:3], "lr": 0.0})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params[:3])
        loss.backward()
        return loss

    before = [p.detach().clone() for p in params]
    loss = optimizer.step(closure)
    assert float(loss.detach()) == pytest.approx(float(sum((b**2).sum() for b in before[:3])))
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[2], before[2])


def test_other_types_and_layouts_take_foreach_under_auto() -> None:
    half = [nn.Parameter(p.detach().to(torch.bfloat16)) for p in make_parameters()]
    strided = nn.Parameter(torch.randn(6, 8).t())
    double = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
    params = [*half, strided, double, *make_parameters(1)]
    expected = formula([double], [[torch.ones(3, 3)]], lr=0.01, weight_decay=0.01)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer = Lamb(params, lr=0.01)
    optimizer.step()
    assert torch.equal(double, expected[0]) or torch.allclose(double, expected[0], rtol=1e-7)
    total = sum(float((p.grad.double() ** 2).sum()) for p in params)
    assert optimizer.norms()[0] == pytest.approx(math.sqrt(total), rel=1e-6)
    with pytest.raises(UsageError, match="'native' takes contiguous float32"):
        Lamb([strided], lr=0.01, implementation="native").step()


def test_strided_gradients_are_taken_in_the_weights_order() -> None:
    base = torch.randn(6, 8)
    results = []
    for grad in (base.t(), base.t().contiguous()):
        parameter = nn.Parameter(torch.full((8, 6), 0.5))
        parameter.grad = grad
        Lamb([parameter], lr=0.01, implementation="native").step()
        results.append(parameter)
    assert torch.equal(results[0], results[1])


def test_parameter_groups_follow_the_rule() -> None:
    model = nn.ModuleDict(
        {"dense": nn.Linear(3, 3), "norm": nn.LayerNorm(3), "embedding": nn.Embedding(5, 3)}
    )
    model["embedding"].weight.requires_grad_(False)
    bilinear = nn.Parameter(torch.zeros(2, 2))
    decayed, plain = parameter_groups([*model.named_parameters(), ("attention.bias", bilinear)], 0.1)
    assert [p is model["dense"].weight for p in decayed["params"]] == [True]
    assert (decayed["weight_decay"], decayed["trust_ratio"]) == (0.1, True)
    assert len(plain["params"]) == 4
    assert (plain["weight_decay"], plain["trust_ratio"]) == (0.0, False)
    assert [len(g["params"]) for g in parameter_groups(model["norm"].named_parameters(), 0.1)] == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 must be"),
        ({"lr": math.nan}, "lr=nan must be"),
        ({"lr": 0.1, "betas": (0.9, 1.0)}, "betas="),
        ({"lr": 0.1, "eps": -1e-6}, "eps="),
        ({"lr": 0.1, "weight_decay": -0.1}, "weight_decay="),
        ({"lr": 0.1, "max_grad_norm": 0.0}, "max_grad_norm=0.0 must be above 0"),
        ({"lr": 0.1, "implementation": "fused"}, "'fused' must be one of auto, foreach, native"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Lamb(make_parameters(), **options)


def test_a_model_without_parameters_has_an_optimizer() -> None:
    optimizer = Lamb(parameter_groups([], 0.01), lr=0.1)
    optimizer.step()
    assert optimizer.norms() == (0.0, 0.0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_parameter_begins_with_its_first_gradient(implementation: str) -> None:
    """Tensors without a gradient, without elements and without dimensions are among the others."""
    torch.manual_seed(0)
    begin = torch.randn(4, 3)
    late, always = nn.Parameter(begin.clone()), nn.Parameter(torch.randn(4, 3))
    scalar, empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
    optimizer = Lamb([late, always, scalar, empty], lr=0.1, weight_decay=0.01, implementation=implementation)
    for step in range(2):
        for parameter in (always, scalar, empty):
            parameter.grad = torch.ones_like(parameter)
        late.grad = torch.randn(4, 3) if step else None
        optimizer.step()
        assert step or torch.equal(late, begin)
    (expected,) = formula([begin], [[late.grad]], lr=0.1, weight_decay=0.01)
    assert_close([late], [expected], 1e-6)
    assert all(torch.isfinite(parameter).all() for parameter in (always, scalar, empty))
