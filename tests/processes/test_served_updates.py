"""Tests updates by the servers: weights and state of unserved training to the last bit; refusals."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from comm_group import SECRET as HELPERS_SECRET
from comm_group import Group, HelperProcess, Member
from shoal_workers import run_group
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from engine_group import SECRET
from shoal import native
from shoal.comm.engine import CommError, lost_helpers
from shoal.env.worker import WorkerRanks
from shoal.errors import UsageError
from shoal.optim.adafactor import Adafactor
from shoal.optim.adamw import AdamW
from shoal.optim.lamb import Lamb
from shoal.optim.lans import Lans
from shoal.optim.lars import Lars
from shoal.optim.moments import clip_factor, norm_of, parameters_of, scale_all
from shoal.optim.novograd import Novograd
from shoal.optim.sgd import SGD
from shoal.train.config import DistributedConfig, ServersConfig
from shoal.train.gradients import Precision, Update
from shoal.train.model_setup import wrap_model
from shoal.train.servers.update import ServedUpdate, update_on_servers
from shoal.train.world import World

Factory = Callable[[list[dict[str, Any]]], Optimizer]
STEPS = 6

OPTIMIZERS: dict[str, tuple[Factory, Factory]] = {
    "adamw": (lambda groups: AdamW(groups, lr=0.01), lambda groups: AdamW(groups, lr=0.01)),
    "sgd": (lambda groups: SGD(groups, lr=0.1), lambda groups: SGD(groups, lr=0.1)),
    "momentum": (
        lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "lamb": (lambda groups: Lamb(groups, lr=0.01), lambda groups: Lamb(groups, lr=0.01)),
    "lamb with its own clip": (
        lambda groups: Lamb(groups, lr=0.01, bias_correction=False, max_grad_norm=0.3),
        lambda groups: Lamb(groups, lr=0.01, bias_correction=False, max_grad_norm=0.3),
    ),
    "lans": (lambda groups: Lans(groups, lr=0.01), lambda groups: Lans(groups, lr=0.01)),
    "lars": (lambda groups: Lars(groups, lr=0.5, eta=0.02), lambda groups: Lars(groups, lr=0.5, eta=0.02)),
    "larc": (
        lambda groups: Lars(groups, lr=0.5, eta=0.02, form="larc", nesterov=True),
        lambda groups: Lars(groups, lr=0.5, eta=0.02, form="larc", nesterov=True),
    ),
    "novograd": (
        lambda groups: Novograd(groups, lr=0.01, bias_correction=True, grad_averaging=True),
        lambda groups: Novograd(groups, lr=0.01, bias_correction=True, grad_averaging=True),
    ),
    "adafactor": (
        lambda groups: Adafactor(groups, lr=0.01, min_factored_size=16),
        lambda groups: Adafactor(groups, lr=0.01, min_factored_size=16),
    ),
}
"""By name: what workers step with, and what servers are given."""


@dataclass
class Clipping:
    """Clips the gradients of each step, as a :class:`shoal.train.run.Run` does."""

    optimizer: Optimizer
    max_norm: float

    def step(self) -> None:
        gradients = [p.grad for p in parameters_of(self.optimizer) if p.grad is not None]
        scale_all(gradients, clip_factor(norm_of(gradients), self.max_norm))
        self.optimizer.step()


class Net(nn.Module):
    """Tensors of several pieces, of odd sizes and another memory format; one is frozen, one is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1031, 33)
        self.conv = nn.Conv2d(3, 33, 3, padding=1)
        self.head = nn.Linear(33, 1031)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(33), requires_grad=False)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # [batch, 12, 33]
        images = x.flatten(1).view(-1, 3, 12, 11)
        x = x + self.conv(images).mean((2, 3))[:, None] * self.frozen
        logits: Tensor = self.head(x)
        return logits


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(3)
    return DistributedDataParallel(Net(), bucket_cap_mb=0.05)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def train(
    model: DistributedDataParallel,
    stepper: Optimizer | Clipping | Rounding | OfRecipe,
    rank: int,
    steps: range,
) -> None:
    """Take steps of two micro-batches with a rate of its own each."""
    optimizer = stepper if isinstance(stepper, Optimizer) else stepper.optimizer
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
        for micro in range(2):
            draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            tokens, wanted = torch.randint(0, 1031, (2, 3, 12), generator=draw)
            if micro == 0:
                with model.no_sync():
                    nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten()).backward()
            else:
                nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten()).backward()
        stepper.step()
        optimizer.zero_grad()


def require_same(model: nn.Module, optimizer: Optimizer, other: nn.Module, reference: Optimizer) -> None:
    for (name, have), want in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(have, want), name
        assert optimizer.state[have].keys() == reference.state[want].keys(), name
        for key, value in reference.state[want].items():
            assert torch.equal(optimizer.state[have][key], value), (name, key)


@dataclass
class Rounding:
    """Steps float32 weights apart from the model's, which are these rounded to bfloat16."""

    optimizer: Optimizer
    masters: dict[nn.Parameter, nn.Parameter]
    """By parameter of the model."""

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in self.masters.items():
            master.grad, parameter.grad = parameter.grad, None
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for parameter, master in self.masters.items():
            parameter.copy_(master.bfloat16())


@contextmanager
def helpers(count: int, **limits: Any) -> Iterator[tuple[dict[str, str], list[Any]]]:
    """Run helper servers; yield the environment of the workers, and the servers."""
    servers = [native.core().HelperServer("127.0.0.1", 0, SECRET, 0, **limits) for _ in range(count)]
    for server in servers:
        server.start()
    places = ",".join(f"127.0.0.1:{server.port}*1.0" for server in servers)
    try:
        yield {"SHOAL_SECRET": SECRET.decode(), "SHOAL_HELPERS": places}, servers
    finally:
        for server in servers:
            server.stop()


# ---- bits -----------------------------------------------------------------------------------------------


def compare(rank: int, name: str, max_norm: float | None) -> None:
    unserved, served = OPTIMIZERS[name]
    want, have = wrapped(), wrapped()
    reference, optimizer = unserved(groups_of(want)), served(groups_of(have))
    train(want, reference if max_norm is None else Clipping(reference, max_norm), rank, range(STEPS))
    with update_on_servers(have, optimizer, max_norm=max_norm):
        train(have, optimizer, rank, range(STEPS))
        assert not optimizer.state, "a worker keeps no state"
    require_same(have, optimizer, want, reference)
    for model, stepper in ((want, reference), (have, optimizer)):  # the context has ended
        train(model, stepper, rank, range(1))
    assert all(torch.equal(a, b) for a, b in zip(have.parameters(), want.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "max_norm", "hosts", "num_helpers"),
    [
        ("adamw", None, ("a", "b", "c"), 0),
        ("adamw", 0.3, ("a", "b", "c"), 3),
        ("momentum", None, ("a", "a", "b"), 1),
        ("sgd", 0.3, ("a", "b"), 1),
        ("lamb", 0.3, ("a", "a", "b"), 0),
        ("lamb with its own clip", None, ("a", "b", "c"), 3),
        ("lans", None, ("a", "a", "b"), 1),
        ("lars", 0.3, ("a", "b"), 1),
        ("larc", None, ("a", "b", "c"), 0),
        ("novograd", 0.3, ("a", "a", "b"), 1),
        ("adafactor", 0.3, ("a", "a", "b"), 1),
        ("adafactor", None, ("a", "b", "c"), 0),
        pytest.param("adamw", None, tuple("abcde"), 2, marks=pytest.mark.slow),
        pytest.param("lamb", 0.3, tuple("aabcde"), 0, marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_of_workers_that_step(
    tmp_path: Path, name: str, max_norm: float | None, hosts: tuple[str, ...], num_helpers: int
) -> None:
    with helpers(num_helpers) as (environment, _):
        run_group(compare, len(hosts), tmp_path, name, max_norm, hosts=hosts, environment=environment)


def compare_long_rows(rank: int) -> None:
    """Rows that are longer than a piece, and almost as long, on pieces that begin within one."""
    draw = torch.Generator().manual_seed(7)
    inputs = [torch.randn(2, columns, generator=draw) for columns in (9001, 8191)]
    made = []
    for served in (False, True):
        torch.manual_seed(3)
        net = nn.ModuleList(nn.Linear(each.shape[1], 17) for each in inputs)
        model = DistributedDataParallel(Sum(net))
        optimizer = Adafactor(model.parameters(), lr=0.1, min_factored_size=16)
        with update_on_servers(model, optimizer) if served else nullcontext():
            for step in range(3):
                model([each * (1 + rank + step) for each in inputs]).backward()
                optimizer.step()
                optimizer.zero_grad()
        made.append((model, optimizer))
    require_same(*made[1], *made[0])


class Sum(nn.Module):
    """Returns a loss of several layers."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return torch.stack([layer(x).sin().sum() for layer, x in zip(self.layers, inputs, strict=True)]).sum()


def test_adafactor_of_rows_that_are_longer_than_a_piece(tmp_path: Path) -> None:
    run_group(compare_long_rows, 3, tmp_path, hosts=("a", "a", "b"))


@dataclass
class OfRecipe:
    """Takes steps by the update of a recipe, as :meth:`shoal.train.step.Step.update` does."""

    update: Update
    optimizer: Optimizer
    norms: list[Any] = field(default_factory=list)

    def step(self) -> None:
        self.norms.append(
            self.update.finish_gradients(self.optimizer, max_norm=0.3, per_worker=False, loss_scale=1.0)
        )
        self.update.apply(self.optimizer)


def compare_in_recipe(rank: int, name: str) -> None:
    ranks = WorkerRanks(rank=rank, num_workers=dist.get_world_size(), local_rank=0, num_local_workers=1)
    control = dist.group.WORLD
    assert control is not None
    world = World(ranks=ranks, device=torch.device("cpu"), backend="shoal", control=control)
    precision = Precision(name="fp32", device_type="cpu", dtype=None)
    config = DistributedConfig(backend="shoal", bucket_mb=0.05)
    steppers = []
    for served in (False, True):
        torch.manual_seed(3)
        model = wrap_model(Net(), world, config, precision, lambda _: None)
        optimizer = OPTIMIZERS[name][1](groups_of(model))
        update: Update = Update()
        if served:
            update = model.served = ServedUpdate(
                model, optimizer, ServersConfig(mode="sync"), max_norm=math.inf
            )
        update.open(0)
        if served:
            with pytest.raises(UsageError, match=r"in a run whose steps are on servers: call step\.update"):
                optimizer.step()
        steppers.append((model, OfRecipe(update, optimizer)))
        train(*steppers[-1], rank, range(STEPS))
        update.bring_state()
    (want, reference), (have, stepper) = steppers
    assert stepper.norms == reference.norms
    require_same(have, stepper.optimizer, want, reference.optimizer)


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        pytest.param("lamb", "ab", marks=pytest.mark.slow),
        ("adamw", "abc"),
        pytest.param("lamb", "abcde", marks=pytest.mark.slow),
        pytest.param("sgd", "abcdef", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_has_the_same_bits_with_and_without_served_updates(
    tmp_path: Path, name: str, hosts: str
) -> None:
    run_group(compare_in_recipe, len(hosts), tmp_path, name, hosts=hosts)


def compare_rounded(rank: int, name: str, max_norm: float | None) -> None:
    """Weights that come in bf16: the servers' are those of float32 masters, and finish() brings them."""
    want, have = wrapped(), wrapped()
    masters = {p: nn.Parameter(p.detach().clone()) for p in want.parameters() if p.requires_grad}
    groups = [{**group, "params": [masters[p] for p in group["params"]]} for group in groups_of(want)]
    reference = Rounding(OPTIMIZERS[name][0](groups), masters)
    reference.round()
    train(want, reference, rank, range(STEPS))
    optimizer = OPTIMIZERS[name][1](groups_of(have))
    with update_on_servers(have, optimizer, max_norm=max_norm, weights="bf16") as update:
        train(have, optimizer, rank, range(3))
        update.bring_state()
        assert any(not torch.equal(p, p.bfloat16().float()) for p in have.parameters())
        train(have, optimizer, rank, range(3, STEPS))
        for found, parameter in zip(have.parameters(), want.parameters(), strict=True):
            assert torch.equal(found, parameter)
    for found, parameter in zip(have.parameters(), want.parameters(), strict=True):
        if (master := masters.get(parameter)) is not None:
            assert torch.equal(found, master)
            for key, value in reference.optimizer.state[master].items():
                assert torch.equal(optimizer.state[found][key], value), key


@pytest.mark.parametrize(
    ("name", "max_norm", "hosts"), [("adamw", None, ("a", "a", "b")), ("lamb", math.inf, ("a", "b"))]
)
def test_weights_in_bf16_are_those_of_float32_masters(
    tmp_path: Path, name: str, max_norm: float | None, hosts: tuple[str, ...]
) -> None:
    with helpers(1) as (environment, _):
        run_group(compare_rounded, len(hosts), tmp_path, name, max_norm, hosts=hosts, environment=environment)


def overflow(rank: int) -> None:
    """Takes no step on any rank with a gradient that is infinite on one of them; the next one is as ever."""
    model = wrapped()
    optimizer = AdamW(groups_of(model), lr=0.01)
    with update_on_servers(model, optimizer, max_norm=1.0) as update:
        train(model, optimizer, rank, range(1))
        before = [p.detach().clone() for p in model.parameters()]
        factor = math.inf if rank == 1 else 1.0
        (model(torch.zeros(2, 12, dtype=torch.long)).sum() * factor).backward()
        update.loss_scale = 2.0
        optimizer.step()
        update.loss_scale = 1.0
        assert not math.isfinite(update.grad_norm)
        assert update.num_skipped == 1
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        train(model, optimizer, rank, range(1, 2))
    want = wrapped()
    reference = Clipping(AdamW(groups_of(want), lr=0.01), 1.0)
    train(want, reference, rank, range(2))
    require_same(model, optimizer, want, reference.optimizer)


def two_models(rank: int) -> None:
    """Trains two models in turn on the servers of one group."""
    pairs = []
    for name in ("adamw", "lamb"):
        want, have = wrapped(), wrapped()
        reference, optimizer = OPTIMIZERS[name][0](groups_of(want)), OPTIMIZERS[name][1](groups_of(have))
        train(want, reference, rank, range(3))
        pairs.append((optimizer, have, want, reference))
    with ExitStack() as stack:
        for optimizer, have, _, _ in pairs:
            stack.enter_context(update_on_servers(have, optimizer))
        for step in range(3):
            for optimizer, have, _, _ in pairs:
                train(have, optimizer, rank, range(step, step + 1))
    for optimizer, have, want, reference in pairs:
        require_same(have, optimizer, want, reference)


@pytest.mark.parametrize("check", [overflow, two_models])
def test_steps_that_are_skipped_and_models_that_share_servers(
    tmp_path: Path, check: Callable[[int], None]
) -> None:
    run_group(check, 2, tmp_path, hosts=("a", "b"))


# ---- checkpoints ----------------------------------------------------------------------------------------


def exchange(rank: int, folder: Path, name: str) -> None:
    """Steps 0 and 1 unserved, 2 and 3 served, 4 and 5 unserved: the weights of six unserved steps."""
    want = wrapped()
    make = OPTIMIZERS[name][0]
    reference = make(groups_of(want))
    train(want, reference, rank, range(6))
    saved: dict[str, Any] = {}
    for part in range(3):
        model = wrapped()
        optimizer = make(groups_of(model))
        with update_on_servers(model, optimizer) if part == 1 else nullcontext():
            if saved:
                model.module.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            train(model, optimizer, rank, range(2 * part, 2 * part + 2))
        if rank == 0:  # only one rank takes the state, as checkpoints are written
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "x"
            )
        dist.barrier()
        saved = torch.load(folder / "x", weights_only=True)
        dist.barrier()
    require_same(model, optimizer, want, reference)


@pytest.mark.parametrize("name", ["adamw", "momentum", "novograd", "adafactor"])
def test_served_and_unserved_training_go_on_from_each_other(tmp_path: Path, name: str) -> None:
    run_group(exchange, 2, tmp_path / "group", tmp_path, name, hosts=("a", "b"))


# ---- servers that fail ----------------------------------------------------------------------------------


def lose(rank: int, meeting: Path) -> None:
    model = wrapped()
    optimizer = AdamW(groups_of(model), lr=0.01)
    with (
        pytest.raises(CommError, match=r"helper .* was lost .* with it the weights .* last checkpoint"),
        update_on_servers(model, optimizer),
    ):
        train(model, optimizer, rank, range(2))
        dist.barrier()
        (meeting / str(rank)).touch()
        for step in range(2, 2000):
            train(model, optimizer, rank, range(step, step + 1))


def test_a_lost_helper_is_named(tmp_path: Path) -> None:
    """With the weights that it kept; nothing goes on with others."""
    with helpers(2) as (environment, servers):

        def stop_one() -> None:
            while not all((tmp_path / str(rank)).exists() for rank in range(2)):
                time.sleep(0.02)
            servers[1].stop()

        thread = Thread(target=stop_one)
        thread.start()
        run_group(lose, 2, tmp_path / "group", tmp_path, hosts=("a", "b"), environment=environment)
        thread.join()


def survive(rank: int, name: str, max_norm: float | None, helper_pids: tuple[int, int]) -> None:
    """Kills one helper in the middle of a step, and the other as the state is fetched."""
    unserved, served = OPTIMIZERS[name]
    want, have = wrapped(), wrapped()
    reference, optimizer = unserved(groups_of(want)), served(groups_of(have))
    train(want, reference if max_norm is None else Clipping(reference, max_norm), rank, range(STEPS))
    with update_on_servers(have, optimizer, max_norm=max_norm, replicas=2) as update:
        train(have, optimizer, rank, range(2))
        killers = [Timer(random.uniform(0, 0.03), os.kill, (pid, signal.SIGKILL)) for pid in helper_pids]
        if rank == 0:
            killers[0].start()
        train(have, optimizer, rank, range(2, 4))
        if rank == 0:
            killers[1].start()
        update.bring_state()
        for killer in killers[: 2 if rank == 0 else 0]:
            killer.join()
        train(have, optimizer, rank, range(4, STEPS))
    require_same(have, optimizer, want, reference)
    assert len(lost_helpers()) == 2


@pytest.mark.parametrize(
    ("name", "max_norm", "hosts"),
    [
        ("adamw", None, "abc"),
        ("momentum", 0.3, "aab"),
        ("lamb", 0.3, "ab"),
        ("novograd", None, "aab"),
        ("adafactor", None, "ab"),
    ],
)
def test_killed_helpers_change_no_bit_where_workers_have_copies(
    tmp_path: Path, name: str, max_norm: float | None, hosts: str
) -> None:
    with HelperProcess("h0") as first, HelperProcess("h1", address="127.0.0.101") as second:
        places = ",".join(f"{each.address}:{each.port}*1.0" for each in (first, second))
        environment = {"SHOAL_SECRET": HELPERS_SECRET, "SHOAL_HELPERS": places}
        pids = (first.process.pid, second.process.pid)
        run_group(survive, len(hosts), tmp_path, name, max_norm, pids, hosts=hosts, environment=environment)


def enter(update: ServedUpdate) -> None:
    with update:
        raise AssertionError("it was not refused")


def refuse_copies(rank: int) -> None:
    for replicas, message in ((2, "has none: a worker that is lost"), (3, "replicas 3 must be one of 1, 2")):
        model, options = wrapped(), {"replicas": replicas}
        with pytest.raises(UsageError, match=message):
            enter(update_on_servers(model, SGD(groups_of(model), lr=0.1), **options))


def test_copies_without_helpers_are_refused(tmp_path: Path) -> None:
    run_group(refuse_copies, 2, tmp_path, hosts=("a", "b"))


def need_memory(rank: int) -> None:
    model = wrapped()
    with pytest.raises(
        CommError, match=r"has no memory left: .* more than the 65536 bytes .* use more helpers"
    ):
        enter(update_on_servers(model, SGD(groups_of(model), lr=0.01)))


def test_a_server_without_memory_is_named(tmp_path: Path) -> None:
    with helpers(2, max_weight_bytes=1 << 16) as (environment, servers):
        run_group(need_memory, 2, tmp_path, hosts=("a", "b"), environment=environment)
        assert all(server.counters()["weight_bytes"] == 0 for server in servers)


def keep_weights(member: Member, mib: int) -> None:
    weights = np.ones(mib << 18, np.int32)
    member.end(member.begin("load", weights, op="bor", served=(0, 0, 0, 0)))
    member.report("kept")
    member.told(60)


def resident_mib(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) >> 10


def test_a_helper_gives_the_memory_of_a_group_that_has_ended_back() -> None:
    with HelperProcess("h0") as helper:
        before = resident_mib(helper.process.pid)
        with Group(keep_weights, "ab", 48, helpers=[helper], pattern=[2]) as group:
            for rank in range(2):
                group.expect(rank, "kept")
            assert resident_mib(helper.process.pid) > before + 48
            for rank in range(2):
                group.tell(rank)
            for rank in range(2):
                group.expect(rank, "done")
            until = time.monotonic() + 60
            while (now := resident_mib(helper.process.pid)) > before + 8:
                assert time.monotonic() < until, f"{before} MiB before, {now} MiB afterwards"
                time.sleep(0.1)


# ---- what is refused ------------------------------------------------------------------------------------


def backward(model: nn.Module) -> None:
    model(torch.zeros(2, 12, dtype=torch.long)).sum().backward()


def refuse(rank: int) -> None:
    def refused(match: str, make: Callable[[DistributedDataParallel], Optimizer], model: Any = None) -> None:
        model = model or wrapped()
        with pytest.raises(UsageError, match=match):
            enter(update_on_servers(model, make(model)))

    refused("no kernel for torch.optim.adamax.Adamax", lambda m: torch.optim.Adamax(groups_of(m)))
    refused("no amsgrad=True", lambda m: torch.optim.AdamW(groups_of(m), amsgrad=True))
    refused("servers factor matrices, .*conv.weight of 4 dims",
            lambda m: Adafactor(groups_of(m), lr=0.1, min_factored_size=3))  # fmt: skip
    refused("no dampening=0.5", lambda m: torch.optim.SGD(groups_of(m), momentum=0.9, dampening=0.5))
    refused("lacks 2 that are trained", lambda m: SGD(groups_of(m)[:1]))
    refused("dense float32, .*head.bias is torch.float64",
            lambda m: SGD(groups_of(m)), _with_double_bias())  # fmt: skip
    hooked = wrapped()
    hooked.register_comm_hook(None, allreduce_hook)
    refused("has the communication hook allreduce_hook", lambda m: SGD(groups_of(m)), hooked)
    refused("find_unused_parameters", lambda m: SGD(groups_of(m)),
            DistributedDataParallel(Net(), find_unused_parameters=True))  # fmt: skip

    with pytest.raises(UsageError, match="set one of them"):
        other = wrapped()
        update_on_servers(other, Lamb(groups_of(other), lr=0.1, max_grad_norm=1.0), max_norm=1.0)
    model = wrapped()
    optimizer = SGD(groups_of(model), lr=0.1)
    with (
        pytest.raises(UsageError, match="gradients were changed"),
        update_on_servers(model, optimizer) as update,
    ):
        refused("has the communication hook ServedUpdate", lambda m: SGD(groups_of(m)), model)
        update.loss_scale = 2.0
        with pytest.raises(UsageError, match="give update_on_servers max_norm"):
            optimizer.step()
        update.loss_scale = 1.0
        with pytest.raises(UsageError, match="without gradients: it belongs after"):
            optimizer.step()
        backward(model)
        with pytest.raises(UsageError, match="take the step first"):
            update.bring_state()
        for group in optimizer.param_groups:
            group["lr"] *= 2
        with pytest.raises(UsageError, match="options were changed between"):
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] /= 2
        with pytest.raises(UsageError, match="a second backward pass before"):
            backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def _with_double_bias() -> DistributedDataParallel:
    net = Net()
    net.head.bias = nn.Parameter(net.head.bias.detach().double())
    return DistributedDataParallel(net)


def refuse_hooks(rank: int) -> None:
    model = wrapped()
    optimizer = SGD(groups_of(model), lr=0.1)
    with update_on_servers(model, optimizer):
        model.module.head.bias.register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(UsageError, match="register_post_accumulate_grad_hook"):
            backward(model)
        with pytest.raises(UsageError, match="without gradients"):
            optimizer.step()


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    run_group(refuse, 2, tmp_path, hosts=("a", "b"))
    run_group(refuse_hooks, 2, tmp_path / "hooks", hosts=("a", "b"))


def one_host(rank: int) -> None:
    model = wrapped()
    with pytest.raises(UsageError, match="share a host"):
        enter(update_on_servers(model, SGD(groups_of(model), lr=0.1)))


def test_one_host_is_refused(tmp_path: Path) -> None:
    run_group(one_host, 2, tmp_path, hosts=("a", "a"))


def differ(rank: int) -> None:
    model = wrapped()
    with pytest.raises(CommError, match=r"rank 0 .*an update on servers by SGD\(lr=0.1.*rank 1 .*lr=0.2"):
        enter(update_on_servers(model, SGD(groups_of(model), lr=0.1 * (1 + rank))))


def differ_in_copies(rank: int) -> None:
    model = wrapped()
    with pytest.raises(CommError, match=r"of 4 tensors, rank 1 .* of 4 tensors, replicas=2; under"):
        enter(update_on_servers(model, SGD(groups_of(model), lr=0.1), replicas=2 if rank else 1))


def test_ranks_with_other_options_are_named(tmp_path: Path) -> None:
    run_group(differ, 2, tmp_path, hosts=("a", "b"))
    with helpers(1) as (environment, _):
        run_group(differ_in_copies, 2, tmp_path / "copies", hosts=("a", "b"), environment=environment)
