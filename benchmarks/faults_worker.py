"""Workers of ``faults``: a small language model, on hosts that are slow and killed by a given trace."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.optim.adamw import AdamW
from shoal.optim.sgd import SGD
from shoal.train.servers.local import local_steps

CONTEXT, BATCH, HELD_OUT = 16, 32, 20_000
"""Bytes that predict the next one; samples of a step of a worker; samples that the loss is measured on."""

Spec = dict[str, Any]
Result = dict[str, float]


@dataclass(frozen=True)
class Trace:
    """The faults of all hosts, by seconds since training began.

    Attributes:
        step_s: seconds that a step takes an accelerator.
        slow_s: seconds for which one host takes twice as long, before the next one does; 0: none does.
        order: of the slow hosts.
        kills: of a rank at a time, by time.
        restart_s: seconds until a killed worker continues.
    """

    step_s: float
    slow_s: float
    order: list[int]
    kills: list[tuple[float, int]]
    restart_s: float

    def seconds_of(self, rank: int, at_s: float) -> float:
        """Return the seconds of a step that begins at a time."""
        slow = self.slow_s and self.order[int(at_s / self.slow_s) % len(self.order)] == rank
        return self.step_s * (2 if slow else 1)


class Clock:
    """The seconds since all workers began."""

    def __init__(self) -> None:
        dist.barrier()
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    def sleep_until(self, end_s: float) -> None:
        with suppress(ValueError):  # it is over
            time.sleep(end_s - self.now_s())


class Task:
    """The bytes of a text, and of one that is held out; the model from which training begins."""

    def __init__(self, spec: Spec) -> None:
        self._text, self._held_out = (
            torch.frombuffer(bytearray(Path(spec[name]).read_bytes()), dtype=torch.uint8).long()
            for name in ("text", "held_out")
        )
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(
            nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.Tanh(), nn.Linear(128, 256)
        )

    def batch(self, seed: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """Return the samples of a worker's step."""
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step * 64 + rank)
        return _samples(self._text, torch.randint(len(self._text) - CONTEXT, (BATCH,), generator=draw))

    def held_out_loss(self, model: nn.Module) -> float:
        inputs, targets = _samples(self._held_out, torch.arange(HELD_OUT) * 7)
        with torch.no_grad():
            return float(F.cross_entropy(model(inputs), targets))


def _samples(text: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    windows = text[begins[:, None] + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]


def set_rate(optimizer: torch.optim.Optimizer, rate: float, part: float) -> None:
    """Set the learning rate after a part of the training: a cosine down to a twentieth."""
    for group in optimizer.param_groups:
        group["lr"] = rate * (0.05 + 0.95 * (1 + math.cos(math.pi * min(1.0, part))) / 2)


def take_local_steps(spec: Spec, task: Task, seed: int, trace: Trace, steps: int) -> Result:
    """Take local steps with a quorum; a killed worker loses its steps and its optimizer's state.

    Returns:
        The seconds, the samples of the changes that exchanges have used, the number of exchanges and the
        held-out loss.
    """
    rank = dist.get_rank()
    model = DistributedDataParallel(deepcopy(task.model))
    inner = AdamW(model.parameters(), lr=spec["rate"])
    momentum = spec["outer_momentum"]
    outer = SGD(model.parameters(), lr=spec["outer_rate"], momentum=momentum, nesterov=momentum > 0)
    log = Path(spec["folder"]) / f"rounds-{seed}.jsonl"
    kills = [at_s for at_s, killed in trace.kills if killed == rank]
    clock = Clock()
    with local_steps(model, inner, outer, **spec["options"], log=log) as rounds:
        for step in rounds.batches(range(steps), tokens_of=lambda _: BATCH):
            end_s = clock.now_s() + trace.seconds_of(rank, clock.now_s())
            set_rate(inner, spec["rate"], step / steps)
            inputs, targets = task.batch(seed, rank, step)
            F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            inner.step()
            inner.zero_grad()
            clock.sleep_until(end_s)
            if kills and clock.now_s() >= kills[0]:
                with rounds.away(keep=False):
                    inner.state.clear()
                    clock.sleep_until(kills.pop(0) + trace.restart_s)
    seconds = clock.now_s()
    dist.barrier()  # rank 0 has written its last line
    used = [row["used"] for row in map(json.loads, log.read_text().splitlines()) if row.get("used")]
    return {
        "seconds": seconds, "samples": sum(share[4] for shares in used for share in shares),
        "exchanges": len(used), "loss": task.held_out_loss(model.module),
    }  # fmt: skip


class PlainSteps:
    """Plain DDP, of which all workers continue from the last checkpoint after a kill."""

    def __init__(self, spec: Spec, task: Task, seed: int, trace: Trace) -> None:
        self._spec, self._task, self._seed, self._trace = spec, task, seed, trace
        self._model = DistributedDataParallel(deepcopy(task.model))
        self._optimizer = AdamW(self._model.parameters(), lr=spec["rate"])
        self._step, self._num_kills, self._clock = 0, 0, Clock()

    def run(self, seconds: float) -> Result:
        """Train for so many seconds; return them, the steps that were taken, and those that have remained."""
        saved, num_taken = self._saved(), 0
        while not self._is_over(seconds):
            if (kills := self._kills_so_far()) > self._num_kills:
                self._num_kills = kills
                self._restore(saved)
            self._take_step()
            num_taken += 1
            if self._step % self._spec["save_every"] == 0:
                saved = self._saved()
        return {"seconds": self._clock.now_s(), "taken": num_taken, "steps": self._step}

    def _is_over(self, seconds: float) -> bool:
        return bool(_of_first(int(self._clock.now_s() >= seconds)))

    def _kills_so_far(self) -> int:
        return _of_first(sum(at_s <= self._clock.now_s() for at_s, _ in self._trace.kills))

    def _take_step(self) -> None:
        rank = dist.get_rank()
        end_s = self._clock.now_s() + self._trace.seconds_of(rank, self._clock.now_s())
        inputs, targets = self._task.batch(self._seed, rank, self._step)
        loss = F.cross_entropy(self._model(inputs), targets)
        self._clock.sleep_until(end_s)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1

    def _saved(self) -> tuple[Spec, Spec, int]:
        return deepcopy((self._model.state_dict(), self._optimizer.state_dict(), self._step))

    def _restore(self, saved: tuple[Spec, Spec, int]) -> None:
        model, optimizer, self._step = deepcopy(saved)
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        self._clock.sleep_until(self._trace.kills[self._num_kills - 1][0] + self._trace.restart_s)


def train_alone(task: Task, seed: int, rate: float, steps: int, *, of_steps: int) -> nn.Module:
    """Take plain steps of all workers' batches in one process; return the model.

    Args:
        task: with the model from which it begins.
        seed: of the batches.
        rate: of learning, at the beginning.
        steps: that are taken.
        of_steps: the length of the schedule of the rate.
    """
    model = deepcopy(task.model)
    optimizer = AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        set_rate(optimizer, rate, step / of_steps)
        batches = [task.batch(seed, rank, step) for rank in range(dist.get_world_size())]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model


def measure(spec: Spec) -> list[dict[str, Any]]:
    """Train without faults, and with those of each trace, by local steps and plainly.

    The spec: ``{"text": FILE, "held_out": FILE, "rate": 0.004, "steps": 800, "free": {"step_s": 0.05, ...},
    "free_steps": 200, "traces": {"1": {...}}, "options": {...}, "outer_rate": 1.0, "outer_momentum": 0.6,
    "save_every": 200, "first_steps": 2500, "first_rate": 0.008}``; traces by seed, the options of
    ``local_steps``, and the plain steps before all. Returns the results, that without faults first.
    """
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    task, results = Task(spec), list[dict[str, Any]]()
    if dist.get_rank() == 0:  # whose weights all get
        first = spec["first_steps"]
        task.model = train_alone(task, 0, spec["first_rate"], first, of_steps=2 * first)
        print(f"loss at the beginning: {task.held_out_loss(task.model):.4f}")
    for name, given in {"0": spec["free"], **spec["traces"]}.items():
        seed, trace = int(name), Trace(**given)
        local = take_local_steps(spec, task, seed, trace, spec["steps"] if seed else spec["free_steps"])
        seconds = float(_of_first(round(local["seconds"])))
        plain = PlainSteps(spec, task, seed, trace).run(seconds)
        as_many = round(local["samples"] / (BATCH * dist.get_world_size()))
        if seed and dist.get_rank() == 0:
            alone = train_alone(task, seed, spec["rate"], as_many, of_steps=as_many)
            plain["loss"] = task.held_out_loss(alone)
        results.append({"seed": seed, "local": local, "plain": plain, "as_many_steps": as_many})
    dist.barrier()
    dist.destroy_process_group()
    return results


def _of_first(number: int) -> int:
    """Return the number of rank 0."""
    tensor = torch.tensor([number])
    dist.broadcast(tensor, 0)
    return int(tensor)
