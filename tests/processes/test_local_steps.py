"""Tests local steps with exchanges by the servers: the bits of a replay in one process; refusals."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
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
from shoal.decide.fragments import FragmentSchedule
from shoal.errors import UsageError
from shoal.optim.adamw import AdamW
from shoal.optim.lamb import Lamb
from shoal.optim.sgd import SGD
from shoal.train.servers import log as logs
from shoal.train.servers.local import LocalSteps, local_steps
from shoal.train.servers.tensors import checksum
from shoal.train.weight_averaging import statistics_of

HOSTS = ("a", "a", "b")
STEPS, EVERY = 8, 3
ROUNDS, PAUSE_S, FOREVER_S = 8, 0.02, 60.0


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(1031, 33), nn.Flatten(), nn.BatchNorm1d(99), nn.Linear(99, 7))


def backward(model: nn.Module, rank: int, step: int) -> None:
    tokens = torch.randint(0, 1031, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))
    nn.functional.cross_entropy(model(tokens), tokens.sum(1) % 7).backward()


def tokens_of(rank: int, step: int) -> int:
    return (7 * rank + 3 * step) % 5 + 1


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
        sums["bytes"] = sum(each.nbytes for each in whole.parameters())
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
    with local_steps(model, inner, outer, every=EVERY, log=folder / "log.jsonl") as steps:
        for step in steps.batches(range(STEPS)):
            backward(model, rank, step)
            inner.step()
            inner.zero_grad()
    assert model.require_backward_grad_sync and not inner._optimizer_step_post_hooks
    want, reference, log = replay(dist.get_world_size())
    for found, wanted in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(found, wanted)
        assert torch.equal(outer.state[found]["momentum_buffer"], reference.state[wanted]["momentum_buffer"])
    if rank == 0:
        assert [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] == log


@pytest.mark.parametrize(
    "hosts",
    [HOSTS, *(pytest.param(hosts, marks=pytest.mark.slow) for hosts in ("ab", "abc", "abcde", "aabcde"))],
)
def test_a_replay_in_one_process_has_the_same_bits(tmp_path: Path, hosts: Sequence[str]) -> None:
    """Two workers share a host, and the last exchange comes before its time."""
    run_group(compare, len(hosts), tmp_path / "group", tmp_path, hosts=hosts)


class FragmentReplay:
    """Makes the steps of all workers in one process, with exchanges of fragments, which it names itself."""

    def __init__(self, num_workers: int, layers: list[list[int]], delay: int, mix: float) -> None:
        self.whole, self.locals = net(), [net() for _ in range(num_workers)]
        self.outer, self.inners = outer_of(self.whole), [inner_of(model) for model in self.locals]
        self.layers, self.delay, self.mix = layers, delay, mix
        self.sent, self.log = [0] * len(layers), list[dict[str, int]]()
        self.tokens = [[0] * len(layers) for _ in range(num_workers)]

    def parameters(self, model: nn.Module, number: int) -> list[nn.Parameter]:
        """Return the parameters of one fragment."""
        of_layers = [list(model[layer].parameters()) for layer in self.layers[number]]  # type: ignore[index]
        return [parameter for layer in of_layers for parameter in layer]

    @torch.no_grad()
    def send(self, numbers: list[int], step: int) -> dict[str, int]:
        """Step with the mean of the moves of these fragments, by tokens."""
        self.outer.zero_grad()
        parts = []
        for number in numbers:
            tokens = [of_worker[number] for of_worker in self.tokens]
            for of_worker in self.tokens:
                of_worker[number] = 0
            part = self.parameters(self.whole, number)
            for own in zip(part, *(self.parameters(model, number) for model in self.locals), strict=True):
                pairs = zip(own[1:], tokens, strict=True)
                moves = [(own[0] - each) * (count / sum(tokens)) for each, count in pairs]
                own[0].grad = sum(moves[1:], moves[0])
            parts += part
        self.outer.step()
        return {"exchange": len(self.log) + 1, "step": step, "bytes": sum(each.nbytes for each in parts)}

    @torch.no_grad()
    def merge(self, number: int, row: dict[str, int], step: int) -> None:
        theirs = self.parameters(self.whole, number)
        for model in self.locals:
            for own, whole in zip(self.parameters(model, number), theirs, strict=True):
                own.copy_(torch.lerp(own, whole, 1 - self.mix) if self.delay else whole)
        since, self.sent[number] = row["step"] - self.sent[number], row["step"]
        more = {"local_steps": since, "fragment": number, "merged": step, "weights": checksum(theirs)}
        self.log.append(row | more)

    @torch.no_grad()
    def finish(self) -> None:
        left = [number for number in range(len(self.layers)) if self.sent[number] < STEPS]
        row = self.send(left, STEPS) if left else {"exchange": len(self.log) + 1, "step": STEPS, "bytes": 0}
        unite_norms(self.locals)
        row |= {"local_steps": STEPS, "weights": checksum(list(self.whole.parameters()))}
        self.log.append(row | {"norms": checksum(statistics_of(self.locals[0]))})

    def run(self, sends: dict[int, int]) -> None:
        """Take all steps; ``sends`` has the fragments by the step after which their exchange begins."""
        waiting: list[tuple[int, dict[str, int]]] = []
        for step in range(1, STEPS + 1):
            for rank, (model, inner) in enumerate(zip(self.locals, self.inners, strict=True)):
                backward(model, rank, step - 1)
                inner.step()
                inner.zero_grad()
                of_step = tokens_of(rank, step - 1)
                self.tokens[rank] = [each + of_step for each in self.tokens[rank]]
            if waiting and step == waiting[0][1]["step"] + self.delay:
                self.merge(*waiting.pop(), step)
            if step in sends:
                waiting.append((sends[step], self.send([sends[step]], step)))
                if not self.delay:
                    self.merge(*waiting.pop(), step)
        if waiting:
            self.merge(*waiting.pop(), STEPS)
        self.finish()


def compare_fragments(rank: int, folder: Path, options: Any, layers: Any, sends: Any) -> None:
    model = DistributedDataParallel(net(), broadcast_buffers=False)
    outer, inner = outer_of(model), inner_of(model)
    with local_steps(model, inner, outer, log=folder / "log.jsonl", **options) as steps:
        for step in steps.batches(range(STEPS), tokens_of=lambda step: tokens_of(rank, step)):
            backward(model, rank, step)
            inner.step()
            inner.zero_grad()
    want = FragmentReplay(dist.get_world_size(), layers, options.get("delay", 0), options.get("mix", 0.5))
    want.run(sends)
    for found, wanted in zip(model.parameters(), want.whole.parameters(), strict=True):
        assert torch.equal(found, wanted)
        momentum = want.outer.state[wanted]["momentum_buffer"]
        assert torch.equal(outer.state[found]["momentum_buffer"], momentum)
    for key, value in want.inners[rank].state[next(want.locals[rank].parameters())].items():
        assert torch.equal(inner.state[next(model.parameters())][key], value), key
    if rank == 0:
        assert [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] == want.log
    elif rank == 1 and len(layers) > 1:
        largest = max(row["bytes"] for row in want.log if "fragment" in row)
        assert largest == sum(each.nbytes for each in model.module[0].parameters())


@pytest.mark.parametrize(
    ("options", "layers", "sends"),
    [
        (
            {"every": 3, "fragments": 2, "delay": 1, "mix": 0.25},
            [[0], [2, 3]],
            {1: 0, 3: 1, 4: 0, 6: 1, 7: 0},
        ),
        ({"every": 4, "fragments": 3}, [[0], [2], [3]], {1: 0, 2: 1, 4: 2, 5: 0, 6: 1, 8: 2}),
        ({"every": 4, "delay": 4}, [[0, 2, 3]], {4: 0, 8: 0}),
    ],
    ids=("overlapping", "one after the other", "all weights late"),
)
def test_exchanges_of_fragments_are_replayed_to_the_bit(
    tmp_path: Path, options: dict[str, Any], layers: list[list[int]], sends: dict[int, int]
) -> None:
    group = tmp_path / "group"
    run_group(compare_fragments, len(HOSTS), group, tmp_path, options, layers, sends, hosts=HOSTS)


def exchanged(log: Path) -> list[list[int]]:
    """Return the shares in a log, used or dropped."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [each for row in rows for each in (*row.get("used", ()), *row.get("dropped", ()))]


def leave(rounds: LocalSteps, num_steps: int) -> None:
    """Leave for some exchanges; and, with another step, for none, without what was done."""
    if num_steps == 5:
        with rounds.away():
            with pytest.raises(UsageError, match=r"away\(\) within away\(\)"), rounds.away():
                pass
            time.sleep(0.3)
    elif num_steps == 6:
        with rounds.away(keep=False):
            pass


def take_rounds(rank: int, folder: Path, options: dict[str, Any]) -> None:
    """Workers are late by turns; the state of their own optimizers is that of all their steps."""
    model = DistributedDataParallel(net(), broadcast_buffers=False)
    outer, inner, log = outer_of(model), inner_of(model), folder / "log.jsonl"
    shape = {name: options[name] for name in ("fragments", "delay", "mix") if name in options}
    num_exchanges = ROUNDS * options.get("fragments", 1) + (options.get("fragments", 1) > 1)
    pauses, num_steps = random.Random(rank), 0
    leaves = options.get("grace_s") == FOREVER_S
    with local_steps(model, inner, outer, every=EVERY, log=log, **options) as rounds:
        every_step = range(ROUNDS * EVERY + 1)  # what is left, all exchange at the end
        for step in rounds.batches(every_step, tokens_of=lambda step: tokens_of(rank, step)):
            backward(model, rank, step)
            time.sleep(PAUSE_S * (pauses.random() < 0.3))
            inner.step()
            inner.zero_grad()
            num_steps += 1
            if leaves and rank == 1:
                leave(rounds, num_steps)
    dist.barrier()  # rank 0 has written its last line
    counts = logs.summary(log)
    assert counts.num_steps == num_exchanges
    assert max(counts.staleness) <= (1 if options.get("late") == "next" else 0)
    partial = options.get("late") == "partial"
    assert partial or leaves or sum(counts.dropped) or max(counts.staleness), "no worker was late"

    want = net()
    reference = outer_of(want)
    inners = [inner_of(want) for _ in range(dist.get_world_size())]
    taken = Counter[int]()

    def take_step(rank: int, number: int) -> None:
        backward(want, rank, number - 1)
        inners[rank].step()
        inners[rank].zero_grad()
        taken[rank] += 1

    assert logs.replay_local(log, want, reference, take_step, every=EVERY, **shape) == num_exchanges
    assert taken[rank] == num_steps
    schedule = FragmentSchedule(EVERY, options.get("fragments", 1))
    assert (partial or leaves) == any(
        step < schedule.end_of(exchange) for _, exchange, _, step, _ in exchanged(log)
    )
    if leaves:
        absent = [row for row in map(json.loads, log.read_text().splitlines()) if row.get("used")]
        assert any(1 not in [each[0] for each in row["used"]] for row in absent)
        assert max(counts.used) == counts.used[0] == num_exchanges
    elif not shape:  # a share is of the steps of its round that it names
        for of_rank, exchange, _, last, tokens in exchanged(log):
            assert last == exchange * EVERY or (partial and 0 < last - (exchange - 1) * EVERY < EVERY)
            steps = range((exchange - 1) * EVERY, last)
            assert tokens == sum(tokens_of(of_rank, step) for step in steps)
    for have, wanted in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(have, wanted)
        assert torch.equal(outer.state[have]["momentum_buffer"], reference.state[wanted]["momentum_buffer"])
        for key, value in inners[rank].state[wanted].items():
            assert torch.equal(inner.state[have][key], value), key


@pytest.mark.parametrize(
    "options",
    [
        {"wait_for": 2},
        {"wait_for": 2, "late": "next", "grace_s": 0.005},
        {"wait_for": 2, "fragments": 3},
        {"wait_for": 2, "fragments": 2, "delay": 1, "mix": 0.25, "grace_s": 0.005},
        {"wait_for": 1, "late": "next", "delay": 3},
        {"wait_for": 2, "grace_s": FOREVER_S},
        {"wait_for": 1, "grace_s": FOREVER_S, "late": "next"},
        {"wait_for": 1, "grace_s": FOREVER_S, "late": "partial"},
        {"wait_for": 2, "grace_s": FOREVER_S, "fragments": 2, "delay": 1, "mix": 0.25},
        {"wait_for": 1, "late": "partial", "grace_s": 0.5},
        {"wait_for": 1, "late": "partial", "grace_s": 0.5, "fragments": 2, "delay": 1},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_exchanges_with_a_quorum_are_replayed_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    run_group(take_rounds, len(HOSTS), tmp_path / "group", tmp_path, options, hosts=HOSTS)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["ab", "abcde", "aabcde"])
def test_exchanges_of_other_numbers_of_workers_are_replayed_to_the_bit(tmp_path: Path, hosts: str) -> None:
    fragments, layers = {"every": 3, "fragments": 2, "delay": 1, "mix": 0.25}, [[0], [2, 3]]
    for name, function, arguments in (
        ("fragments", compare_fragments, (fragments, layers, {1: 0, 3: 1, 4: 0, 6: 1, 7: 0})),
        ("wait_for", take_rounds, ({"wait_for": len(hosts) - 1, "fragments": 2, "delay": 1},)),
    ):
        (tmp_path / name).mkdir()
        group = tmp_path / name / "group"
        run_group(function, len(hosts), group, tmp_path / name, *arguments, hosts=hosts)


def refuse(rank: int) -> None:
    def refused(match: str, model: Any, outer: Any = SGD, error: Any = UsageError, **options: Any) -> None:
        with (
            pytest.raises(error, match=match),
            local_steps(model, inner_of(model), outer(model.parameters(), lr=0.7), **{"every": 6, **options}),
        ):
            raise AssertionError("it was not refused")

    model = DistributedDataParallel(net(), broadcast_buffers=False)
    refused("4 fragments: a fragment has whole layers, and the model has 3", model, fragments=4)
    for options, match in (
        ({"grace_s": 1.0}, "late drop and grace_s 1: no gradient is late .* set --servers.wait-for"),
        ({"fragments": 7}, "fragments 7 in every 6 local steps"),
        ({"fragments": 3, "delay": 3}, "one is sent 2 steps after the other; give 0 to 2"),
        ({"delay": 1, "mix": 1.0}, "mix 1.0 must be at least 0 and below 1"),
        ({"fragments": 2, "wait_for": 1, "late": "next"}, "the next exchange is of another fragment"),
        ({"wait_for": 1, "late": "partial"}, "at the end of a local step; set --servers.grace-s to more"),
        ({"every": 0}, "local_steps 0 must be at least 1"),
    ):
        refused(match, model, **options)
    refused("Lamb needs norms", model, Lamb)
    refused("broadcast_buffers=False", DistributedDataParallel(nn.Sequential(net(), nn.BatchNorm1d(7))))
    with (
        pytest.raises(UsageError, match=r"tokens_of\(batch\) has returned -1; give 0 to"),
        local_steps(model, inner_of(model), outer_of(model), every=2) as steps,
    ):
        next(steps.batches([1], tokens_of=lambda _: -1))
    with (
        pytest.raises(UsageError, match=r"away\(\): all workers wait for each other; give .* wait_for"),
        local_steps(model, inner_of(model), outer_of(model), every=2) as steps,
        steps.away(),
    ):
        raise AssertionError("it was not refused")
    with (
        pytest.raises(UsageError, match=r"away\(\) with a batch under way: it belongs after inner.step"),
        local_steps(model, inner_of(model), outer_of(model), every=2, wait_for=1) as steps,
    ):
        for _ in steps.batches([1]):
            with steps.away():
                raise AssertionError("it was not refused")
    refused(r"after 2 local steps.*after 3 local steps", model, error=CommError, every=2 + rank)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run_group(refuse, 2, tmp_path, hosts=("a", "b"))
