"""Adafactor against the paper's formula and T5's rules in float64; where torch's is the same and is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from moments_formula import assert_close, make_parameters, set_gradients
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.optim import adafactor
from shoal.optim.adafactor import Adafactor, factored_dims, parts_of
from shoal.optim.moments import Batch, Implementation
from shoal.train.optim_config import OptimConfig
from shoal.train.optimizers import build_optimizer


def rms(tensor: Tensor) -> Tensor:
    return tensor.pow(2).mean().sqrt()


def formula(
    weights: list[Tensor],
    grads_of_step: list[list[Tensor]],
    *,
    lr: float,
    eps1: float = 1e-30,
    weight_decay: float = 0.0,
    min_size: int = 128,
    first_step: int = 1,
) -> list[Tensor]:
    """The update rule, one tensor after the other, with sums as the paper writes them (algorithm 4)."""
    after = []
    for index, begin in enumerate(weights):
        w = begin.detach().double().clone()
        rows, columns, v = 0.0, 0.0, torch.zeros_like(w)
        # the tests' tensors that are factored are matrices, or have their two large dims last
        factored = w.ndim >= 2 and min(w.shape[-2:]) >= min_size
        for step, grads in enumerate(grads_of_step, start=first_step):
            g = grads[index].double()
            beta2 = 1 - step**-0.8
            square = g**2 + eps1
            if factored:
                rows = beta2 * rows + (1 - beta2) * square.sum(-1)
                columns = beta2 * columns + (1 - beta2) * square.sum(-2)
                v = rows[..., :, None] * columns[..., None, :] / rows.sum(-1)[..., None, None]
            else:
                v = beta2 * v + (1 - beta2) * square
            u = g / v.sqrt()
            u = u / max(1.0, rms(u))
            w = w - lr * weight_decay * w - lr * max(1e-3, rms(w)) * u
        after.append(w)
    return after


def with_large(seed: int = 0) -> list[nn.Parameter]:
    """Parameters of which some are factored: (130, 129), (2, 128, 140); and one that starts at 0."""
    generator = torch.Generator().manual_seed(seed + 100)
    large = nn.Parameter(torch.randn(2, 128, 140, generator=generator))
    return [*make_parameters(seed), large, nn.Parameter(torch.zeros(9))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"eps1": 1e-4},
        {"min_size": 3},
    ],
    ids=["t5", "decay", "epsilon", "all-factored"],
)
@pytest.mark.parametrize("implementation", ["auto", "foreach"])
def test_formula(options: dict[str, Any], implementation: Implementation) -> None:
    params = with_large() if "min_size" not in options else make_parameters()[:1] + with_large()[-2:]
    begin = [p.detach().clone() for p in params]
    names = {"min_size": "min_factored_size"}
    named = {names.get(name, name): value for name, value in options.items()}
    optimizer = Adafactor(params, lr=0.02, implementation=implementation, **named)
    grads_of_step = []
    for step in range(5):
        set_gradients(params, step, scale=10.0 ** (step - 3))
        grads_of_step.append([p.grad.clone() for p in params])
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads_of_step[-1], strict=True))
    assert_close(params, formula(begin, grads_of_step, lr=0.02, **options), 2e-6)
    assert min(float((p.detach() - b).abs().max()) for p, b in zip(params, begin, strict=True)) > 1e-6


def test_float64_is_the_formula_to_the_last_digits() -> None:
    params = [nn.Parameter(p.detach().double()) for p in with_large()]
    begin = [p.detach().clone() for p in params]
    optimizer = Adafactor(params, lr=0.02)
    grads_of_step = []
    for step in range(4):
        set_gradients(params, step)
        grads_of_step.append([p.grad.clone() for p in params])
        optimizer.step()
    assert_close(params, formula(begin, grads_of_step, lr=0.02), 1e-13)


def test_gradients_are_taken_times_a_scale() -> None:
    ours, theirs = with_large(), with_large()
    for params, scale, options in ((ours, 1024.0, {"grad_scale": 1 / 1024}), (theirs, 1.0, {})):
        optimizer = Adafactor(params, lr=0.1, eps1=1e-2)
        for step in range(2):
            set_gradients(params, step, scale)
            optimizer.step(**options)
    assert_close(ours, theirs, 1e-6)
    assert optimizer.norms()[0] == pytest.approx(
        math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in theirs)), rel=1e-6
    )


def test_the_bits_of_the_native_kernel_do_not_depend_on_threads() -> None:
    """Of rows that are shorter and longer than a part, and of a part that begins within one."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(300, 140), (129, 9001), (40_000,), (128, 8191)]
    begun = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for num_threads in (1, 3):
        params = [nn.Parameter(each.clone()) for each in begun]
        optimizer = Adafactor(params, lr=0.1, implementation="native")
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        for step in range(2):
            set_gradients(params, step)
            optimizer.step(grad_scale=0.5)
        torch.set_num_threads(before)
        results.append([*params, *(each["row_var"] for each in list(optimizer.state.values())[:2])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    exact = [nn.Parameter(each.double()) for each in begun]
    optimizer = Adafactor(exact, lr=0.1, implementation="foreach")
    for step in range(2):
        set_gradients(exact, step)
        optimizer.step(grad_scale=0.5)
    assert_close(results[0][:4], [each.detach() for each in exact], 3e-7)


def test_parts_hold_no_more_than_allowed_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = with_large(), with_large()
    names = list(map(id, parts))
    batch = Batch({}, parts, [{"name": name} for name in names], 1.0)
    most = 2 * max(parameter.nbytes for parameter in parts[:-2])
    found = list(parts_of(batch, most))
    assert [id(parameter) for part in found for parameter in part.params] == names
    assert [state["name"] for part in found for state in part.states] == names
    sums = [sum(parameter.nbytes for parameter in part.params) for part in found]
    assert 1 < len(found) < len(parts)
    assert all(
        num_bytes <= most or len(part.params) == 1 for num_bytes, part in zip(sums, found, strict=True)
    )
    norms = []
    for params, num_bytes in ((whole, 1 << 30), (parts, most)):
        monkeypatch.setattr(adafactor, "_PART_BYTES", num_bytes)
        optimizer = Adafactor(params, lr=0.1, implementation="foreach")
        for step in range(2):
            set_gradients(params, step)
            optimizer.step()
        norms.append(optimizer.norms())
    assert norms[0] == norms[1]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_rows_without_a_gradient_stay_and_small_gradients_are_normalised() -> None:
    weight = nn.Parameter(torch.full((200, 128), 0.5))
    weight.grad = torch.zeros(200, 128)
    weight.grad[7] = 1e-12
    Adafactor([weight], lr=0.01).step()
    moved = 0.5 - weight.detach()
    assert moved[:7].eq(0).all()
    assert moved[8:].eq(0).all()
    # each element of the row is its own root mean square: u = 1, times the weights' root mean square
    assert moved[7] == pytest.approx(torch.full((128,), 0.01 * 0.5), rel=1e-4)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((128, 128), (0, 1)),
        ((127, 4096), None),
        ((32, 12), None),
        ((4096,), None),
        ((), None),
        ((512, 3, 3, 256), (0, 3)),
        ((256, 200, 130), (0, 1)),
    ],
)
def test_what_is_factored(shape: tuple[int, ...], dims: tuple[int, int] | None) -> None:
    assert factored_dims(shape, 128) == dims
    parameter = nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    optimizer = Adafactor([parameter], lr=0.1)
    optimizer.step()
    state = optimizer.state[parameter]
    if dims is None:
        assert state["variance"].shape == shape
    else:
        assert state["row_var"].numel() == parameter.numel() / shape[dims[1]]
        assert state["col_var"].numel() == parameter.numel() / shape[dims[0]]


def test_torch_is_the_same_for_matrices_with_large_gradients_and_lr_below_its_bound() -> None:
    ours, theirs = ([nn.Parameter(torch.randn(140, 130, generator=seeded()))] for _ in range(2))
    for params, optimizer in ((ours, Adafactor(ours, lr=0.01)), (theirs, torch.optim.Adafactor(theirs))):
        for step in range(4):
            set_gradients(params, step)
            optimizer.step()
    assert_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("case", ["small gradients", "a small matrix", "a rate above 1 / sqrt(t)"])
def test_torch_is_not_t5_elsewhere(case: str) -> None:
    """Torch's Adafactor differs as the module says, and shoal's follows the formula there."""
    shape = (32, 12) if case == "a small matrix" else (140, 130)
    scale = 1e-9 if case == "small gradients" else 1.0
    lr = 0.9 if case == "a rate above 1 / sqrt(t)" else 0.01
    ours, theirs = ([nn.Parameter(torch.randn(shape, generator=seeded()))] for _ in range(2))
    begin = [ours[0].detach().clone()]
    our_optimizer, other = Adafactor(ours, lr=lr), torch.optim.Adafactor(theirs, lr=lr)
    grads_of_step = []
    for step in range(3):
        for params, optimizer in ((ours, our_optimizer), (theirs, other)):
            set_gradients(params, step, scale)
            optimizer.step()
        grads_of_step.append([ours[0].grad])
    assert_close(ours, formula(begin, grads_of_step, lr=lr), 2e-6)
    assert float((ours[0] - theirs[0]).detach().abs().max()) > 1e-3 * lr


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def test_torch_cannot_be_given_the_papers_epsilon() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.ones(4, 3)
    weight.grad[2] = 0.0
    torch.optim.Adafactor([weight], eps=(1e-30, 1e-3)).step()
    assert not weight.detach().isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 must be a number of at least 0"),
        ({"lr": 0.1, "eps1": math.inf}, "eps1=inf must be a number of at least 0"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Adafactor(make_parameters(), **options)


def test_settings_choose_it() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    config = OptimConfig(optimizer="adafactor", weight_decay=0.07)
    optimizer = build_optimizer(model.named_parameters(), config, learning_rate=0.3)
    assert isinstance(optimizer, Adafactor)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.3, 0.07), (0.3, 0.0)]
    with pytest.raises(UsageError, match=r"optim\.beta1 0\.8 is not an option of adafactor"):
        OptimConfig(optimizer="adafactor", beta1=0.8)
