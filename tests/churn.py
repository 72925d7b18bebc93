"""A training whose members come and go at random, compared with a replay: ``python -m churn --seconds 600``.

Every 0.5 to 2 s a process is killed (``kill -9``) or a new one started, so that 3 to 8 are there. Each member
writes how many there were in each step. One process then takes the same steps with the same parts of each
batch, and adds their gradients in the order of the ranks: the final weights have its bits.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal.comm
from forked import fork_process, wait_for
from shoal.comm.folder_store import FolderStore
from shoal.errors import ShoalError
from shoal.train.crew import Crew

LEAST, MOST = 3, 8
BETWEEN_EVENTS_S = (0.5, 2.0)
SAMPLES, WIDTH = 24, 16
STEP_S = 0.01
"""Least time of a step, so that a run has not too many to replay."""
HANG_S = 10.0
_END_S = 180.0
_POLL_S = 0.02


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> Tensor:
    """Return a member's part of the loss, times the number of members."""
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
    first, last = (SAMPLES * each // size for each in (rank, rank + 1))
    outputs: Tensor = model(inputs[first:last])
    return outputs.square().mean(dim=1).sum() * size / SAMPLES


def digest(model: nn.Module) -> str:
    flat = torch.cat([each.detach().flatten() for each in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


# ---- a member -------------------------------------------------------------------------------------------


def train(folder: Path, number: int, rank: int, size: int) -> None:
    """Train until the file ``end`` is there; write the members' number of each step, and the weights' hash.

    Args:
        number: of the process.
        rank: in the group with which the training starts, or any other.
        size: of that group.
    """
    shoal.comm.register()
    torch.set_num_threads(1)
    dist.init_process_group(
        "shoal",
        store=FolderStore(folder / "store", timedelta(minutes=5)),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        enable_reconfigure=True,
    )
    model, optimizer = make_model()
    crew = Crew({"model": model}, optimizer, patience_s=30)
    ddp = crew.data_parallel(model, bucket_cap_mb=0.001)
    with (folder / f"{number}.steps").open("w", buffering=1) as file:
        for step in crew.steps(until=1_000_000):
            ends = torch.tensor(float((folder / "end").exists()))
            with step:
                time.sleep(STEP_S)
                dist.all_reduce(ends)
                loss_of(ddp, step.number, crew.rank, crew.size).backward()
            if step.is_done and crew.history[-1][0] == step.number:  # not given by others
                file.write(f"{step.number} {crew.size}\n")
                if ends:
                    break
    (folder / f"{number}.end").write_text(f"{crew.step} {digest(model)}")
    dist.barrier()
    dist.destroy_process_group()


# ---- the whole ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Result:
    """Counts, sizes and digests of a churn."""

    num_steps: int
    num_kills: int
    num_starts: int
    longest_s: float
    """Longest time without a step."""
    sizes: dict[int, int]
    """Members by step."""
    digests: set[str]
    """Of the weights of those that were there at the end."""
    replayed: str
    """That of the replay."""


def replay(sizes: dict[int, int]) -> str:
    """Return the hash of the weights after the same steps in one process."""
    torch.set_num_threads(1)
    model, optimizer = make_model()
    for step in range(1, len(sizes) + 1):
        size = sizes[step]
        total = [torch.zeros_like(each) for each in model.parameters()]
        for rank in range(size):
            loss_of(model, step, rank, size).backward()
            for total_, parameter in zip(total, model.parameters(), strict=True):
                assert parameter.grad is not None
                total_ += parameter.grad * (1.0 / size)
                parameter.grad = None
        for total_, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = total_
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def sizes_of(folder: Path) -> dict[int, int]:
    """Return the number of members by step, which all that have taken it must agree on.

    Raises:
        ShoalError: two members have taken a step with others, or none has taken one.
    """
    sizes: dict[int, int] = {}
    for path in folder.glob("*.steps"):
        for line in path.read_text().splitlines():
            step, size = map(int, line.split())
            if sizes.setdefault(step, size) != size:
                raise ShoalError(f"step {step} was taken by {sizes[step]} members and by {size}")
    if missing := set(range(1, max(sizes) + 1)) - set(sizes):
        raise ShoalError(f"nobody says that step {min(missing)} was taken")
    return sizes


def churn(folder: Path, *, seconds: float, seed: int) -> Result:
    """Let members come and go, and return what came of it.

    Raises:
        ShoalError: a member failed, or no step was taken for long.
    """
    draw = random.Random(seed)
    members = {number: fork_process(train, folder, number, number, LEAST) for number in range(LEAST)}
    num_kills, num_starts, watch = 0, 0, Watch(folder)
    watch.until(lambda: watch.num_bytes > 0, members, _END_S)
    watch.longest_s, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        next_event = time.monotonic() + draw.uniform(*BETWEEN_EVENTS_S)
        watch.until(lambda: time.monotonic() > next_event, members, _END_S)  # noqa: B023  # called at once
        if len(members) < MOST and (len(members) == LEAST or draw.random() < 0.55):
            number = LEAST + num_starts
            members[number] = fork_process(train, folder, number, 0, LEAST)
            num_starts += 1
        else:
            number = draw.choice(sorted(members))
            process = members.pop(number)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            num_kills += 1
    watch.until(lambda: all(has_trained(folder, number) for number in members), members, _END_S)
    (folder / "end").touch()
    codes = wait_for([*members.values()], 2 * _END_S)
    if any(codes):
        raise ShoalError(f"members ended with exit codes {codes}")
    sizes = sizes_of(folder)
    ends = [path.read_text().split() for path in folder.glob("*.end")]
    return Result(
        num_steps=len(sizes),
        num_kills=num_kills,
        num_starts=num_starts,
        longest_s=watch.longest_s,
        sizes=sizes,
        digests={each for _, each in ends},
        replayed=replay(sizes),
    )


def has_trained(folder: Path, number: int) -> bool:
    """Return whether a process has taken a step."""
    path = folder / f"{number}.steps"
    return path.exists() and path.stat().st_size > 0


class Watch:
    """Looks how the steps go on.

    Attributes:
        num_bytes: of what members have written.
        longest_s: longest time in which they wrote nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_bytes, self.longest_s, self._last = 0, 0.0, time.monotonic()

    def until(
        self, condition: Callable[[], bool], members: dict[int, BaseProcess], deadline_s: float
    ) -> None:
        """Return when the condition holds.

        Raises:
            ShoalError: a member has ended, or no step was taken for so long.
        """
        while not condition():
            now = time.monotonic()
            num_bytes = sum(path.stat().st_size for path in self._folder.glob("*.steps"))
            if num_bytes > self.num_bytes:
                self.num_bytes, self._last = num_bytes, now
            self.longest_s = max(self.longest_s, now - self._last)
            if ended := [number for number, each in members.items() if not each.is_alive()]:
                raise ShoalError(f"member {ended[0]} ended with exit code {members[ended[0]].exitcode}")
            if now - self._last > deadline_s:
                raise ShoalError(f"no step was taken for {deadline_s:g} s")
            time.sleep(_POLL_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="0: from the clock, printed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seed = options.seed or int(time.time())
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = churn(Path(folder), seconds=options.seconds, seed=seed)
    is_equal = result.digests == {result.replayed}
    text = (
        f"# Members that come and go, {date.today()}\n\n`python -m churn --seconds {options.seconds:g} "
        f"--seed {seed}`: {result.num_steps:,} steps of {min(result.sizes.values())} to "
        f"{max(result.sizes.values())} members, {result.num_kills} kills, {result.num_starts} newcomers. "
        f"Longest time without a step: {result.longest_s:.2f} s (at most {HANG_S:g} s). Final weights and "
        f"replay: {'the same bits' if is_equal else 'DIFFERENT'}.\n"
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    return int(not is_equal or result.longest_s > HANG_S)


if __name__ == "__main__":
    sys.exit(main())
