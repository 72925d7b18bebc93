"""Promises of all optimizers: their state, restarts, parameters left out."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moments_formula import groups_of, make_parameters, set_gradients
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import distribute_tensor

from shoal.errors import UsageError
from shoal.optim.adafactor import Adafactor
from shoal.optim.adamw import AdamW
from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.lans import Lans
from shoal.optim.lars import Lars
from shoal.optim.moments import MomentsOptimizer, fused_adam_updates, scale_all
from shoal.optim.novograd import Novograd
from shoal.optim.sgd import SGD

Groups = list[dict[str, Any]]


def lans(groups: Groups, lr: float) -> Lans:
    """Make it of LAMB's groups: it knows none without a ratio."""
    return Lans([{key: group[key] for key in group if key != "trust_ratio"} for group in groups], lr=lr)


MAKERS: dict[str, Callable[..., MomentsOptimizer]] = {
    "AdamW": AdamW,
    "AdamW foreach": partial(AdamW, implementation="foreach"),
    "SGD": partial(SGD, momentum=0.9, nesterov=True),
    "SGD foreach": partial(SGD, momentum=0.9, implementation="foreach"),
    "LAMB": Lamb,
    "LAMB native": partial(Lamb, implementation="native"),
    "LAMB foreach": partial(Lamb, implementation="foreach"),
    "LANS": lans,
    "LARS": Lars,
    "LARC": partial(Lars, form="larc", nesterov=True),
    "NovoGrad": partial(Novograd, bias_correction=True),
    "Adafactor": Adafactor,
    "Adafactor factored": partial(Adafactor, min_factored_size=2),
}
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
STATES = {
    "SGD": {"momentum_buffer"},
    "SGD foreach": {"momentum_buffer"},
    "LARS": {"momentum_buffer"},
    "LARC": {"momentum_buffer"},
    "Adafactor": {"step", "variance"},
    "Adafactor factored": {"step", "row_var", "col_var"},
}
each_optimizer = pytest.mark.parametrize("name", MAKERS)


@each_optimizer
def test_parameters_without_gradient_stay_and_count_no_steps(name: str) -> None:
    params = make_parameters()
    optimizer = MAKERS[name]([{"params": params}], lr=0.01)
    optimizer.step()
    assert not optimizer.state
    set_gradients(params, 0)
    params[2].grad = None
    before = params[2].detach().clone()
    optimizer.step()
    assert torch.equal(params[2], before)
    assert params[2] not in optimizer.state
    set_gradients(params, 1)
    lone = nn.Parameter(before.clone())
    lone.grad = params[2].grad.clone()
    optimizer.step()  # the first step of one parameter is the second of the others
    if "step" in STATES.get(name, MOMENTS):
        assert [float(optimizer.state[p]["step"]) for p in params] == [2, 2, 1, 2, 2, 2]
    MAKERS[name]([{"params": [lone]}], lr=0.01).step()
    assert torch.equal(params[2], lone)


@each_optimizer
def test_state_dict_continues_bit_for_bit(name: str) -> None:
    params = make_parameters()
    optimizer = MAKERS[name](groups_of(params), lr=0.01)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": params}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = [nn.Parameter(p.detach().clone()) for p in saved["params"]]
    resumed = MAKERS[name](groups_of(again, 0.5), lr=0.5)
    resumed.load_state_dict(saved["optimizer"])
    for both, stepped in ((params, optimizer), (again, resumed)):
        set_gradients(both, 7)
        stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    assert set(optimizer.state[params[0]]) == STATES.get(name, MOMENTS)


@each_optimizer
def test_distributed_checkpoint_state_dict(name: str) -> None:
    def make() -> tuple[nn.Module, MomentsOptimizer]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2))
        return model, MAKERS[name](parameter_groups(model.named_parameters(), 0.01), lr=0.02)

    def train(model: nn.Module, optimizer: MomentsOptimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        model(torch.randn(8, 6, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    for seed in range(3):
        train(model, optimizer, seed)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    fresh, fresh_optimizer = make()
    fresh.load_state_dict(model.state_dict())
    before = [p.detach().clone() for p in fresh.parameters()]
    set_optimizer_state_dict(fresh, fresh_optimizer, state)  # steps once with lr 0 to make the state
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), before, strict=True))
    train(model, optimizer, 9)
    train(fresh, fresh_optimizer, 9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@each_optimizer
def test_sparse_gradients_are_refused(name: str) -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match="takes neither sparse gradients nor complex"):
        MAKERS[name]([{"params": embedding.parameters()}], lr=0.1).step()


@pytest.mark.parametrize("steps", [[1.0, 7.0], [3.0, 3.0], []])
def test_torchs_fused_adam_gives_the_update_alone(steps: list[float]) -> None:
    """It is what a GPU uses; here its kernel for CPUs."""
    generator = torch.Generator().manual_seed(1)

    def several() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in ((5, 7), (3,))]

    grads, exp_avgs, exp_avg_sqs = several(), several(), [each.square() for each in several()]
    before = [each.clone() for each in grads]
    wanted_first = [0.9 * m + 0.1 * g for m, g in zip(exp_avgs, grads, strict=True)]
    wanted_second = [0.99 * v + 0.01 * g.square() for v, g in zip(exp_avg_sqs, grads, strict=True)]
    group = {"betas": (0.9, 0.99), "eps": 1e-3}
    updates = fused_adam_updates(grads, exp_avgs, exp_avg_sqs, group, steps)
    for k, update in enumerate(updates):
        first, second = (1 - 0.9 ** steps[k], 1 - 0.99 ** steps[k]) if steps else (1.0, 1.0)
        wanted = wanted_first[k] / first / ((wanted_second[k] / second).sqrt() + 1e-3)
        torch.testing.assert_close(update, wanted, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(exp_avgs[k], wanted_first[k])
        torch.testing.assert_close(exp_avg_sqs[k], wanted_second[k])
        assert torch.equal(grads[k], before[k])


def test_shards_and_whole_tensors_are_scaled_together(group: dist.ProcessGroup) -> None:
    """As in a stage whose tied weights are not sharded."""
    shard, whole = distribute_tensor(torch.ones(4), dist.init_device_mesh("cpu", (1,))), torch.ones(3)
    for factor in (2.0, torch.tensor(3.0)):
        scale_all([shard, whole], factor)
    assert shard.full_tensor().tolist() == [6.0] * 4
    assert whole.tolist() == [6.0] * 3
