"""Measures a step: begin and end of each action, on one clock for all ranks."""

from __future__ import annotations

import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.decide.pipeline_simulator import Action, Schedule, TimedAction, Timeline, recorded
from shoal.pipelining.process_groups import exchange
from shoal.record import PipelineStep

_NUM_PINGS = 5


class Tracer:
    """Records begin and end of every computation while it is on.

    Args:
        inside: called as (kind, stage, micro-batch); returns a context to run the computation in.
    """

    def __init__(
        self,
        device: torch.device,
        inside: Callable[[str, int, int], AbstractContextManager[None]],
    ) -> None:
        self.on = False
        self._on_gpu = device.type == "cuda"
        self._inside = inside
        self._marks: list[tuple[Action, object, object]] = []
        self._begin: tuple[float, object] = (0.0, 0.0)

    def start(self) -> None:
        """Clear the record and synchronise the clock of the device with that of the host."""
        self._marks.clear()
        if self._on_gpu:
            torch.cuda.synchronize()
        self._begin = (time.perf_counter(), self._now())

    @contextmanager
    def around(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Run one computation."""
        with self._inside(kind, stage, micro_batch):
            if not self.on:
                yield
                return
            begin = self._now()
            yield
            self._marks.append((Action(kind, stage, micro_batch), begin, self._now()))

    def boxes(self) -> list[tuple[Action, float, float]]:
        """Return every action with its begin and end in seconds of this host's clock."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [(action, self._seconds(begin), self._seconds(end)) for action, begin, end in self._marks]

    def _now(self) -> object:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, mark: object) -> float:
        if isinstance(mark, float):
            return mark
        host_s, event = self._begin
        assert isinstance(event, torch.cuda.Event) and isinstance(mark, torch.cuda.Event)
        return host_s + float(event.elapsed_time(mark)) / 1_000


def clock_offset(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds to add to this host's clock to get that of the first rank of ``group``.

    Processes on one running kernel share their clock. A rank elsewhere requests the time from the first one;
    the answer with the shortest round trip counts, taken as given in its middle (Cristian's algorithm).
    """
    rank = dist.get_rank(group)
    mine = torch.tensor([_kernel()], device=device)
    kernels = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(kernels, mine, group=group)
    best = (float("inf"), 0.0)
    for asking, kernel in enumerate(kernels):
        for _ in range(_NUM_PINGS if int(kernel) != int(kernels[0]) else 0):
            if rank == 0:
                exchange(group, (dist.irecv, torch.zeros(1, dtype=torch.float64, device=device), asking))
                now = torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)
                exchange(group, (dist.isend, now, asking))
            elif rank == asking:
                begin = time.perf_counter()
                answer = torch.zeros(1, dtype=torch.float64, device=device)
                exchange(group, (dist.isend, torch.zeros_like(answer), 0))
                exchange(group, (dist.irecv, answer, 0))
                end = time.perf_counter()
                best = min(best, (end - begin, float(answer) - (begin + end) / 2))
    return best[1]


def _kernel() -> int:
    """Return an id of the running kernel, new at each boot; if it has none, an id of this process."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        name = f"{uuid.getnode()} {os.getpid()}"
    return zlib.crc32(name.encode())


def gather(
    boxes: Sequence[tuple[Action, float, float]],
    schedule: Schedule,
    offset_s: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[TimedAction, ...]:
    """Return the boxes of all ranks, rank by rank, in seconds since the first one began."""
    longest = max(len(actions) for actions in schedule.actions)
    mine = torch.zeros(longest, 2, dtype=torch.float64)
    done = {action: (begin, end) for action, begin, end in boxes}
    for index, action in enumerate(schedule.actions[dist.get_rank(group)]):
        mine[index] = torch.tensor(done[action], dtype=torch.float64) + offset_s
    mine = mine.to(device)
    everyones = [torch.empty_like(mine) for _ in schedule.actions]
    dist.all_gather(everyones, mine, group=group)
    gathered = [
        TimedAction(rank, action, begin, end)
        for rank, (actions, times) in enumerate(zip(schedule.actions, everyones, strict=True))
        for action, (begin, end) in zip(actions, times.tolist(), strict=False)
    ]
    start = min(box.begin_s for box in gathered)
    return tuple(box._replace(begin_s=box.begin_s - start, end_s=box.end_s - start) for box in gathered)


def timeline_of(boxes: Sequence[TimedAction], predicted: Timeline, num_ranks: int) -> Timeline:
    """Return the measured timeline; its memory is the predicted one."""
    makespan = max(box.end_s for box in boxes)
    busy = sum(box.end_s - box.begin_s for box in boxes)
    return replace(
        predicted, boxes=tuple(boxes), makespan_s=makespan, bubble=1 - busy / (num_ranks * makespan)
    )


def step_row(
    schedule: Schedule, predicted: Timeline, traced: Timeline | None = None, *, step: int = 0
) -> PipelineStep:
    """Return a step as a row of the record; without ``traced`` it is a prediction only, of step 0."""
    return PipelineStep(
        step=step,
        schedule=schedule.name,
        placement=list(schedule.placement),
        num_micro_batches=schedule.num_micro_batches,
        predicted=recorded(predicted),
        traced=recorded(traced) if traced else [],
        predicted_peak_bytes=list(predicted.peak_saved_bytes),
        traced_peak_bytes=[],
    )
