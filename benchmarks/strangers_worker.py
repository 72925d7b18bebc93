"""One worker of ``strangers``: ranks 0 and 1 sum, by turns while rank 2 floods their ports and a helper's.

Its spec: ``{"helper": ["10.0.0.4", 7070], "bytes": 8388608, "steps": 6, "turns": 6}``: steps of a turn.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.comm_worker import with_groups
from benchmarks.strangers import greeting_of_a_helper
from shoal.bench.collectives import Groups
from shoal.comm import native_group
from shoal.comm.engine import EngineOptions
from shoal.launch.emulated_network import INTERFACE

STRANGER, THREADS = 2, 16
WARM_UPS = 3
SETTLE_S = 0.5
"""Seconds of a flood before it is measured, and after it has ended."""
TIMEOUT_S = 1.0
_LISTENS = "0A"

Place = tuple[str, int]


def listening() -> set[Place]:
    """Return where processes of this host listen."""
    rows = (line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:])
    at = [row[1].split(":") for row in rows if row[3] == _LISTENS]
    return {(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in at}


def sent_bytes() -> int:
    """Return the bytes that this host has sent over its link."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.split(":")[0].strip() == INTERFACE)
    return int(line.split(":")[1].split()[8])


def intrude(places: list[Place], ends: Event) -> int:
    """Greet at each place in turn as a member would, with a wrong HMAC; return how often."""
    count = 0
    while not ends.is_set():
        try:
            with socket.create_connection(places[count % len(places)], TIMEOUT_S) as connection:
                connection.sendall(greeting_of_a_helper() + secrets.token_bytes(960))
                while connection.recv(256):
                    pass
        except OSError:  # it was cut, or its link is full
            pass
        count += 1
    return count


class Flood:
    """Counts what a flood has sent."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        self.strangers = self.bytes = 0
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        ends = Event()
        with ThreadPoolExecutor(THREADS) as pool:
            counts = [pool.submit(intrude, self.places, ends) for _ in range(THREADS)]
            time.sleep(SETTLE_S)
            bytes_before, before_s = sent_bytes(), time.perf_counter()
            yield
            self.bytes += sent_bytes() - bytes_before
            self.seconds += time.perf_counter() - before_s
            ends.set()
            self.strangers += sum(count.result() for count in counts)
        time.sleep(SETTLE_S)


@with_groups("gloo")
def flooded_steps(spec: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """Return seconds of each step, without and with a flood, and what the flood has been."""
    gradient = torch.zeros(spec["bytes"] // 4)
    others = listening()
    made = dist.new_group([0, 1], backend="shoal", pg_options=EngineOptions())
    group = made if isinstance(made, dist.ProcessGroup) else None  # the stranger is no member

    def steps(count: int) -> list[float]:
        seconds = []
        for _ in range(count if group else 0):
            begin_s = time.perf_counter()
            dist.all_reduce(gradient, group=group)
            seconds.append(time.perf_counter() - begin_s)
        return seconds

    steps(WARM_UPS)
    mine = sorted(listening() - others) if group else []
    places = [tuple(place) for each in groups.gather_json(mine) for place in each]
    flood = Flood([tuple(spec["helper"]), *places])
    seconds: dict[str, list[float]] = {"quiet": [], "flooded": []}
    for _ in range(spec["turns"]):
        groups.barrier()
        seconds["quiet"] += steps(spec["steps"])
        groups.barrier()
        if group:
            groups.barrier()
            seconds["flooded"] += steps(spec["steps"])
            groups.barrier()
        else:
            with flood.running():
                groups.barrier()
                groups.barrier()
    dropped = native_group.counters(group)["strangers_dropped"] if group else 0
    rate = 8 * flood.bytes / flood.seconds if flood.seconds else 0.0
    told = groups.gather_json([flood.strangers, rate, dropped])
    return {
        **seconds,
        "places": len(flood.places),
        "strangers": told[STRANGER][0],
        "bits_per_s": told[STRANGER][1],
        "dropped_by_ranks": [each[2] for each in told[:STRANGER]],
    }
