"""Tests prioritized DDP: the weights of plain DDP to the last bit, and the order of sending."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import group_counters, run_group, shoal_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.comm.engine import EngineOptions
from shoal.comm.priority import Prioritized, prioritize
from shoal.errors import UsageError
from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.lars import Lars

HOSTS = ("a", "b", "c")
CHUNK = 8 << 10
MAX_STEPS = 10
Factory = Callable[[nn.Module], Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda model: torch.optim.AdamW(parameter_groups_of(model), lr=0.01),
    "lamb": lambda model: Lamb(parameter_groups(model.named_parameters(), 0.01), lr=0.01),
    "lars": lambda model: Lars(parameter_groups(model.named_parameters(), 0.01), lr=0.1, momentum=0.9),
}


def parameter_groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "trust_ratio"}
        for group in parameter_groups(model.named_parameters(), 0.01)
    ]


class Net(nn.Module):
    """A model that hides when a parameter is needed: ties, an uncalled child, a layout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)  # does not call its out_proj
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 30)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(4, 4)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # [batch, 16, 16]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.conv(x.transpose(1, 2).unflatten(2, (4, 4))).flatten(2).transpose(1, 2)
        y: Tensor = self.head(self.norm((x * self.scale).flatten(0, 1)))
        return y


def wrapped(**settings: Any) -> DistributedDataParallel:
    torch.manual_seed(3)
    return DistributedDataParallel(Net(), bucket_cap_mb=4e-3, find_unused_parameters=True, **settings)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    tokens, wanted = torch.randint(0, 30, (2, 3, 16), generator=draw)
    return nn.functional.cross_entropy(model(tokens), wanted.flatten())


def scheduled(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def train(
    model: DistributedDataParallel, stepper: Optimizer | Prioritized, rank: int, steps: range, *, pattern: str
) -> None:
    """Take steps of three micro-batches, two of them without sums in the way of ``pattern``."""
    optimizer = stepper.optimizer if isinstance(stepper, Prioritized) else stepper
    scheduler = scheduled(optimizer)
    for step in steps:
        for micro in range({"each": 1, "no_sync": 3, "twice": 2}[pattern]):
            if pattern == "no_sync" and micro < 2:
                with model.no_sync():
                    loss_of(model, rank, 10 * step + micro).backward()
            else:
                loss_of(model, rank, 10 * step + micro).backward()
        stepper.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scheduler.step()


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Name every tensor of both."""
    found = dict(model.state_dict())
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"state {number} {key}": torch.as_tensor(value) for key, value in entries.items()}
    return copy.deepcopy(found)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    assert not different, different


# ---- the same weights -----------------------------------------------------------------------------------


def same_weights(rank: int) -> None:
    for name, make in OPTIMIZERS.items():
        for pattern in ("each", "no_sync", "twice") if name == "adamw" else ("each",):
            plain = wrapped()
            optimizer = make(plain)
            train(plain, optimizer, rank, range(4), pattern=pattern)
            model = wrapped()
            training = prioritize(model, make(model))
            train(model, training, rank, range(4), pattern=pattern)
            assert_same(state_of(model, training.optimizer), state_of(plain, optimizer))
            assert model.module.unused.weight.grad is None


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_weights_are_those_of_plain_ddp(tmp_path: Path, size: int) -> None:
    run_group(same_weights, size, tmp_path, hosts=HOSTS)


@pytest.mark.slow
def test_other_backends_will_do(tmp_path: Path) -> None:
    run_group(same_weights, 2, tmp_path, backend="gloo")


def views_of_buckets(rank: int) -> None:
    found = []
    for taken_over in (False, True):
        model = wrapped(gradient_as_bucket_view=True)
        optimizer = OPTIMIZERS["adamw"](model)
        train(
            model, prioritize(model, optimizer) if taken_over else optimizer, rank, range(3), pattern="each"
        )
        found.append(state_of(model, optimizer))
    assert_same(*found)


def test_gradients_as_views_of_buckets(tmp_path: Path) -> None:
    run_group(views_of_buckets, 2, tmp_path, hosts=HOSTS)


def resumed(rank: int) -> None:
    plain = wrapped()
    optimizer = OPTIMIZERS["lamb"](plain)
    train(plain, optimizer, rank, range(5), pattern="each")
    first = wrapped()
    training = prioritize(first, OPTIMIZERS["lamb"](first))
    train(first, training, rank, range(3), pattern="each")
    saved = copy.deepcopy((first.state_dict(), training.optimizer.state_dict()))  # with a step still due
    second = wrapped()
    training = prioritize(second, OPTIMIZERS["lamb"](second))
    second.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    for step in range(3, 5):
        loss_of(second, rank, 10 * step).backward()
        for group in training.optimizer.param_groups:
            group["lr"] = group["initial_lr"] / (1 + step)
        training.step()
        training.optimizer.param_groups[0]["lr"] = 1e9  # the step that is due has its own
    training.finish()
    assert_same(state_of(second, training.optimizer), state_of(plain, optimizer))


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    run_group(resumed, 2, tmp_path, hosts=HOSTS)


def evaluated(rank: int) -> None:
    outputs = []
    for taken_over in (False, True):
        model = wrapped()
        optimizer = OPTIMIZERS["sgd"](model)
        train(
            model, prioritize(model, optimizer) if taken_over else optimizer, rank, range(2), pattern="each"
        )
        model.eval()
        outputs.append(model.module(torch.arange(16)[None]).detach())
    assert torch.equal(*outputs)


def test_evaluation_sees_the_stepped_weights(tmp_path: Path) -> None:
    run_group(evaluated, 2, tmp_path, hosts=HOSTS)


# ---- who goes first -------------------------------------------------------------------------------------


def layers(width: int = 64) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))


def tell_when_all_are_under_way(group: Any, file: Path) -> None:
    """Create ``file`` once this rank has begun the all-reduces of the five buckets of a step."""
    wanted = group_counters(group)["ops_all_reduce"] + 5

    def tell() -> None:
        while group_counters(group)["ops_all_reduce"] < wanted:
            time.sleep(0.001)
        file.touch()

    Thread(target=tell, daemon=True).start()


def pushes(rank: int, group: Any, folder: Path, *, taken_over: bool) -> Iterator[list[int]]:
    """Yield the operations of this rank's messages in steps, one for each bucket.

    Rank 1 begins a step once rank 0 has begun all operations of it and waits for results.
    """
    model = DistributedDataParallel(layers(1024), process_group=group, bucket_cap_mb=4.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = prioritize(model, optimizer) if taken_over else optimizer
    for step in range(MAX_STEPS):
        group.barrier().wait()
        shoal_group(group).engine.take_trace()
        file = folder / f"step {step} {taken_over}"
        rebuilt = step >= 2  # in the second step, DDP rebuilds its buckets
        if rebuilt and rank == 0:
            tell_when_all_are_under_way(group, file)
        while rebuilt and rank == 1 and not file.exists():
            time.sleep(0.001)
        optimizer.zero_grad()
        model(torch.ones(2, 1024) * (1 + rank)).square().mean().backward()
        stepper.step()
        if isinstance(stepper, Prioritized):
            stepper.finish()
        order = [seq for what, _, _, seq, _ in shoal_group(group).engine.take_trace() if what == "push"]
        if rebuilt:
            yield [seq - min(order) for seq in order]


def messages(rank: int, folder: Path) -> None:
    options = EngineOptions(chunk_bytes=CHUNK, min_window_bytes=CHUNK, window_bytes=CHUNK)
    group: Any = dist.new_group(backend="shoal", pg_options=options)
    shoal_group(group).engine.set_pattern([1])
    shoal_group(group).engine.trace(True)
    plain = next(pushes(rank, group, folder, taken_over=False))
    assert plain == sorted(plain) and set(plain) == set(range(5))
    seen = folder / "overtaken"
    for ours in pushes(rank, group, folder, taken_over=True):
        assert Counter(ours) == Counter(plain)
        first = ours.index(4)
        assert ours[first : first + plain.count(4)] == [4] * plain.count(4), "from then on it goes alone"
        behind = Counter(ours[first:])
        if rank == 0 and behind[1] + behind[2] + behind[3] > 2 * plain.count(1):
            seen.touch()
        group.barrier().wait()
        if seen.exists():
            return
    raise AssertionError("no step sent the bucket of the first layer before most of the others")


def test_the_first_layers_gradients_travel_first(tmp_path: Path) -> None:
    run_group(messages, 2, tmp_path, tmp_path, hosts=HOSTS)


def layer_by_layer(rank: int) -> None:
    model = DistributedDataParallel(layers(), bucket_cap_mb=0.0158)
    training = prioritize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.ones(2, 64) * (1 + rank)).square().mean().backward()
        training.step()
    before = [layer.weight.detach().clone() for layer in model.module]
    stepped: list[list[bool]] = []

    def note(*_: Any) -> None:
        now = [layer.weight.detach() for layer in model.module]
        stepped.append([not torch.equal(a, b) for a, b in zip(before, now, strict=True)])

    for layer in model.module:
        layer.register_forward_pre_hook(note)
    model(torch.ones(2, 64))
    assert stepped == [[k <= layer for k in range(5)] for layer in range(5)]


def test_each_layer_waits_for_its_own_step_only(tmp_path: Path) -> None:
    run_group(layer_by_layer, 2, tmp_path, hosts=HOSTS)


# ---- what is refused ------------------------------------------------------------------------------------


def refused(rank: int) -> None:
    model = wrapped()
    for make, words in (
        (lambda p: Lamb(p, lr=0.1, max_grad_norm=1.0), "max_grad_norm=1.0"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot step"),
        (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], lr=0.1), "not the model's"),
    ):
        with pytest.raises(UsageError, match=words):
            prioritize(model, make(model.parameters()))
    training = prioritize(model, OPTIMIZERS["sgd"](model))
    with pytest.raises(UsageError, match="communication hook"):
        prioritize(model, training.optimizer)
    with pytest.raises(UsageError, match="step\\(\\) without gradients"):
        training.step()
    loss_of(model, rank, 0).backward()
    with pytest.raises(UsageError, match="step\\(\\) of what prioritize"):
        training.optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # changes no value
    with pytest.raises(UsageError, match="clipping"):
        training.step()
    training.finish()


def test_what_needs_all_gradients_is_refused(tmp_path: Path) -> None:
    run_group(refused, 2, tmp_path, hosts=HOSTS)


class CountsInGroup(torch.optim.SGD):
    """Counts its steps where all parameters share the count, as apex does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def counted(rank: int) -> None:
    model = wrapped()
    training = prioritize(model, CountsInGroup(model.parameters(), lr=0.1))
    loss_of(model, rank, 0).backward()
    training.step()
    with pytest.raises(UsageError, match="keeps 'step' in its parameter groups"):
        training.finish()


def test_state_that_all_parameters_share_is_refused(tmp_path: Path) -> None:
    run_group(counted, 2, tmp_path, hosts=HOSTS)
