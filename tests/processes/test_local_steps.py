"""Tests local steps with exchanges by the servers: the bits of a replay in one process; refusals."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import run_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.comm.engine import CommError
from shoal.errors import UsageError
from shoal.optim.adamw import AdamW
from shoal.optim.lamb import Lamb
from shoal.optim.sgd import SGD
from shoal.train import bounded_replay
from shoal.train.bounded_replay import summary
from shoal.train.local_steps import set_moves, take_local_steps
from shoal.train.served_tensors import checksum
from shoal.train.weight_averaging import statistics_of

HOSTS = ("a", "a", "b")
STEPS, EVERY = 8, 3
ROUNDS, PAUSE_S = 8, 0.02


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(1031, 33), nn.Flatten(), nn.BatchNorm1d(99), nn.Linear(99, 7))


def backward(model: nn.Module, rank: int, step: int) -> None:
    tokens = torch.randint(0, 1031, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))
    nn.functional.cross_entropy(model(tokens), tokens.sum(1) % 7).backward()


def inner_of(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def outer_of(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def replay(num_workers: int) -> tuple[nn.Module, Optimizer, list[dict[str, Any]]]:
    """Make the steps of all workers in one process; return the model, the outer optimizer and the log."""
    whole = net()
    outer = outer_of(whole)
    locals_ = [net() for _ in range(num_workers)]
    inners = [inner_of(model) for model in locals_]
    log = []
    for begin in range(0, STEPS, EVERY):
        steps = range(begin, min(begin + EVERY, STEPS))
        with torch.no_grad():
            for model in locals_:
                torch._foreach_copy_(list(model.parameters()), list(whole.parameters()))
        for rank, (model, inner) in enumerate(zip(locals_, inners, strict=True)):
            for step in steps:
                backward(model, rank, step)
                inner.step()
                inner.zero_grad()
        with torch.no_grad():
            for parts in zip(whole.parameters(), *(model.parameters() for model in locals_), strict=True):
                moves = [(parts[0] - part) * (1.0 / num_workers) for part in parts[1:]]
                parts[0].grad = sum(moves[1:], moves[0])
        outer.step()
        unite_norms(locals_)
        sums = {
            "weights": checksum(list(whole.parameters())),
            "norms": checksum(statistics_of(locals_[0])),
        }
        log.append({"exchange": len(log) + 1, "step": steps.stop, "local_steps": len(steps), **sums})
    return whole, outer, log


@torch.no_grad()
def unite_norms(models: list[nn.Module]) -> None:
    """Give all the means of their statistics, which are added in the order of the ranks."""
    for (name, first), *others in zip(*(model.named_buffers() for model in models), strict=True):
        if first.is_floating_point():
            first /= len(models)
            for _, other in others:
                first += other / len(models)
        for _, other in others:
            other.copy_(first)
        assert name.startswith("2.")


def compare(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(net(), broadcast_buffers=False)
    outer, inner = outer_of(model), inner_of(model)
    training = take_local_steps(model, inner, outer, every=EVERY, log=folder / "log.jsonl")
    for step in range(STEPS):
        backward(model, rank, step)
        training.step()
        inner.zero_grad()
    training.finish()
    want, reference, log = replay(len(HOSTS))
    for found, wanted in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(found, wanted)
        assert torch.equal(outer.state[found]["momentum_buffer"], reference.state[wanted]["momentum_buffer"])
    if rank == 0:
        assert [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] == log


def test_a_replay_in_one_process_has_the_same_bits(tmp_path: Path) -> None:
    """Two workers share a host, and the last exchange comes before its time."""
    run_group(compare, len(HOSTS), tmp_path / "group", tmp_path, hosts=HOSTS)


def take_rounds(rank: int, folder: Path, options: dict[str, Any]) -> None:
    """Workers are late by turns; the state of their own optimizers is that of all their rounds."""
    model = DistributedDataParallel(net(), broadcast_buffers=False)
    outer, inner, log = outer_of(model), inner_of(model), folder / "log.jsonl"
    training = take_local_steps(model, inner, outer, every=EVERY, log=log, **options)
    pauses, done = random.Random(rank), []
    for step in training.batches(range(ROUNDS * EVERY + 1)):  # the last round has one step
        backward(model, rank, step)
        time.sleep(PAUSE_S * (pauses.random() < 0.3))
        training.step()
        inner.zero_grad()
        done.append(step)
    training.finish()
    dist.barrier()  # rank 0 has written its last line
    counts = summary(log)
    assert counts.num_steps == ROUNDS + 1
    assert counts.used[rank] + counts.dropped[rank] == -(-len(done) // EVERY)
    assert max(counts.staleness) <= (1 if options.get("late") == "next" else 0)
    assert sum(counts.dropped) or max(counts.staleness), "no worker was late"

    want = net()
    reference = outer_of(want)
    inners = [inner_of(want) for _ in HOSTS]

    def round_of(rank: int, number: int) -> None:
        begin = [parameter.detach().clone() for parameter in want.parameters()]
        for step in range((number - 1) * EVERY, min(number * EVERY, ROUNDS * EVERY + 1)):
            backward(want, rank, step)
            inners[rank].step()
            inners[rank].zero_grad()
        set_moves(list(want.parameters()), begin)

    assert bounded_replay.replay(log, want, reference, round_of, dropped=True) == ROUNDS + 1
    for have, wanted in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(have, wanted)
        assert torch.equal(outer.state[have]["momentum_buffer"], reference.state[wanted]["momentum_buffer"])
        for key, value in inners[rank].state[wanted].items():
            assert torch.equal(inner.state[have][key], value), key


@pytest.mark.parametrize("options", [{"quorum": 2}, {"quorum": 2, "late": "next", "grace_s": 0.005}], ids=str)
def test_exchanges_with_a_quorum_are_replayed_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    run_group(take_rounds, len(HOSTS), tmp_path / "group", tmp_path, options, hosts=HOSTS)


def refuse(rank: int) -> None:
    def refused(match: str, model: Any, outer: Any = SGD, every: int = 2) -> None:
        with pytest.raises(UsageError, match=match):
            take_local_steps(model, inner_of(model), outer(model.parameters(), lr=0.7), every=every)

    with pytest.raises(UsageError, match=r"grace_s=1.0 and late='drop' are for exchanges with a quorum"):
        model = DistributedDataParallel(net(), broadcast_buffers=False)
        take_local_steps(model, inner_of(model), outer_of(model), every=2, grace_s=1.0)
    refused("every=0 local steps", DistributedDataParallel(net(), broadcast_buffers=False), every=0)
    refused("Lamb needs norms", DistributedDataParallel(net(), broadcast_buffers=False), Lamb)
    refused("broadcast_buffers=False", DistributedDataParallel(nn.Sequential(net(), nn.BatchNorm1d(7))))
    model = DistributedDataParallel(net(), broadcast_buffers=False)
    with pytest.raises(CommError, match=r"after 2 local steps.*after 3 local steps"):
        take_local_steps(model, inner_of(model), outer_of(model), every=2 + rank)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run_group(refuse, 2, tmp_path, hosts=("a", "b"))
