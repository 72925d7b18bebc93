"""Tests updates by the servers: weights and state of unserved training to the last bit; refusals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import run_group
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from engine_group import SECRET
from shoal import native
from shoal.comm.engine import CommError
from shoal.errors import UsageError
from shoal.optim.adamw import AdamW
from shoal.optim.sgd import SGD
from shoal.train.served_update import Served, update_on_servers

Factory = Callable[[list[dict[str, Any]]], Optimizer]
STEPS = 6

OPTIMIZERS: dict[str, tuple[Factory, Factory]] = {
    "adamw": (lambda groups: AdamW(groups, lr=0.01), lambda groups: AdamW(groups, lr=0.01)),
    "sgd": (lambda groups: SGD(groups, lr=0.1), lambda groups: SGD(groups, lr=0.1)),
    "momentum": (
        lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    ),
}
"""By name: what workers step with, and what servers are given."""


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


def train(model: DistributedDataParallel, stepper: Optimizer | Served, rank: int, steps: range) -> None:
    """Take steps of two micro-batches with a rate of its own each."""
    optimizer = stepper.optimizer if isinstance(stepper, Served) else stepper
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


def compare(rank: int, name: str) -> None:
    unserved, served = OPTIMIZERS[name]
    want, have = wrapped(), wrapped()
    reference, optimizer = unserved(groups_of(want)), served(groups_of(have))
    train(want, reference, rank, range(STEPS))
    training = update_on_servers(have, optimizer)
    train(have, training, rank, range(STEPS))
    assert not optimizer.state, "a worker keeps no state"
    training.finish()
    require_same(have, optimizer, want, reference)


@pytest.mark.parametrize(
    ("name", "hosts", "num_helpers"),
    [
        ("adamw", ("a", "b", "c"), 0),
        ("adamw", ("a", "b", "c"), 3),
        ("momentum", ("a", "a", "b"), 1),
        ("sgd", ("a", "b"), 1),
    ],
)
def test_the_bits_are_those_of_workers_that_step(
    tmp_path: Path, name: str, hosts: tuple[str, ...], num_helpers: int
) -> None:
    with helpers(num_helpers) as (environment, _):
        run_group(compare, len(hosts), tmp_path, name, hosts=hosts, environment=environment)


# ---- checkpoints ----------------------------------------------------------------------------------------


def exchange(rank: int, folder: Path) -> None:
    """Steps 0 and 1 unserved, 2 and 3 served, 4 and 5 unserved: the weights of six unserved steps."""
    want = wrapped()
    reference = AdamW(groups_of(want), lr=0.01)
    train(want, reference, rank, range(6))
    saved: dict[str, Any] = {}
    for part in range(3):
        model = wrapped()
        optimizer = AdamW(groups_of(model), lr=0.01)
        stepper: Optimizer | Served = update_on_servers(model, optimizer) if part == 1 else optimizer
        if saved:
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        train(model, stepper, rank, range(2 * part, 2 * part + 2))
        if isinstance(stepper, Served):
            stepper.finish()
        if rank == 0:  # only one rank takes the state, as checkpoints are written
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "x"
            )
        dist.barrier()
        saved = torch.load(folder / "x", weights_only=True)
        dist.barrier()
    require_same(model, optimizer, want, reference)


def test_served_and_unserved_training_go_on_from_each_other(tmp_path: Path) -> None:
    run_group(exchange, 2, tmp_path / "group", tmp_path, hosts=("a", "b"))


# ---- servers that fail ----------------------------------------------------------------------------------


def lose(rank: int, meeting: Path) -> None:
    model = wrapped()
    training = update_on_servers(model, AdamW(groups_of(model), lr=0.01))
    train(model, training, rank, range(2))
    dist.barrier()
    (meeting / str(rank)).touch()
    with pytest.raises(CommError, match=r"helper .* was lost .* with it the weights .* last checkpoint"):
        for step in range(2, 2000):
            train(model, training, rank, range(step, step + 1))


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


def need_memory(rank: int) -> None:
    model = wrapped()
    with pytest.raises(CommError, match="more than the 65536 bytes that this server keeps; use more helpers"):
        update_on_servers(model, SGD(groups_of(model), lr=0.01))


def test_a_server_without_memory_is_named(tmp_path: Path) -> None:
    with helpers(2, max_weight_bytes=1 << 16) as (environment, servers):
        run_group(need_memory, 2, tmp_path, hosts=("a", "b"), environment=environment)
        assert all(server.counters()["weight_bytes"] == 0 for server in servers)


# ---- what is refused ------------------------------------------------------------------------------------


def backward(model: nn.Module) -> None:
    model(torch.zeros(2, 12, dtype=torch.long)).sum().backward()


def refuse(rank: int) -> None:
    def refused(match: str, make: Callable[[DistributedDataParallel], Optimizer], model: Any = None) -> None:
        model = model or wrapped()
        with pytest.raises(UsageError, match=match):
            update_on_servers(model, make(model))

    refused("no kernel for torch.optim.adamax.Adamax", lambda m: torch.optim.Adamax(groups_of(m)))
    refused("no amsgrad=True", lambda m: torch.optim.AdamW(groups_of(m), amsgrad=True))
    refused("no dampening=0.5", lambda m: torch.optim.SGD(groups_of(m), momentum=0.9, dampening=0.5))
    refused("lacks 2 that are trained", lambda m: SGD(groups_of(m)[:1]))
    refused("takes dense float32 .*head.bias is torch.float64",
            lambda m: SGD(groups_of(m)), _with_double_bias())  # fmt: skip
    hooked = wrapped()
    hooked.register_comm_hook(None, allreduce_hook)
    refused("has the communication hook allreduce_hook", lambda m: SGD(groups_of(m)), hooked)
    refused("find_unused_parameters", lambda m: SGD(groups_of(m)),
            DistributedDataParallel(Net(), find_unused_parameters=True))  # fmt: skip

    model = wrapped()
    training = update_on_servers(model, SGD(groups_of(model), lr=0.1))
    refused("serves another model", lambda m: SGD(groups_of(m)))
    with pytest.raises(UsageError, match="step\\(\\) without gradients"):
        training.step()
    with pytest.raises(UsageError, match="call step\\(\\) of what it returned"):
        training.optimizer.step()
    backward(model)
    with pytest.raises(UsageError, match="call step\\(\\) first"):
        training.finish()
    for group in training.optimizer.param_groups:
        group["lr"] *= 2
    with pytest.raises(UsageError, match="options were changed between"):
        training.step()
    for group in training.optimizer.param_groups:
        group["lr"] /= 2
    with pytest.raises(UsageError, match="a second backward pass before step"):
        backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(UsageError, match="gradients were changed"):
        training.step()


def _with_double_bias() -> DistributedDataParallel:
    net = Net()
    net.head.bias = nn.Parameter(net.head.bias.detach().double())
    return DistributedDataParallel(net)


def refuse_hooks(rank: int) -> None:
    model = wrapped()
    training = update_on_servers(model, SGD(groups_of(model), lr=0.1))
    model.module.head.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UsageError, match="register_post_accumulate_grad_hook"):
        backward(model)
    with pytest.raises(UsageError, match="without gradients"):
        training.step()


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    run_group(refuse, 2, tmp_path, hosts=("a", "b"))
    run_group(refuse_hooks, 2, tmp_path / "hooks", hosts=("a", "b"))


def one_host(rank: int) -> None:
    model = wrapped()
    with pytest.raises(UsageError, match="share a host"):
        update_on_servers(model, SGD(groups_of(model), lr=0.1))


def test_one_host_is_refused(tmp_path: Path) -> None:
    run_group(one_host, 2, tmp_path, hosts=("a", "a"))


def differ(rank: int) -> None:
    model = wrapped()
    with pytest.raises(CommError, match=r"rank 0 .*an update on servers by SGD\(lr=0.1.*rank 1 .*lr=0.2"):
        update_on_servers(model, SGD(groups_of(model), lr=0.1 * (1 + rank)))


def test_ranks_with_other_options_are_named(tmp_path: Path) -> None:
    run_group(differ, 2, tmp_path, hosts=("a", "b"))
