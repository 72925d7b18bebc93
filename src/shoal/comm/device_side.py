"""What a group has for the tensors of one device: engines of its own, the ranks beside it, and the staging.

It is made with the group's first collective on the device, for which all ranks meet. Its engines are not the
group's: chunks enter them when they have left the device, between which the caller begins other operations.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.addresses import host_identity
from shoal.comm.aside import Aside
from shoal.comm.bootstrap import connect_engine
from shoal.comm.devices import Device, HostRanks
from shoal.comm.engine import CommError, Engine, EngineOptions, Operation
from shoal.comm.lone import LoneEngine
from shoal.comm.meeting import met
from shoal.comm.routes import HOST_OPS, Asked, ByParts, Place, Route, straight
from shoal.comm.staged import StagedWork
from shoal.comm.staging import Job, Staging
from shoal.errors import UsageError
from shoal.json_text import parse_json

_log = logging.getLogger(__name__)
_POLL_S = 0.2
_NAMING_S = 1.0
_MOST_ELEMENT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Membership:
    """This rank in its group."""

    store: Store
    rank: int
    size: int
    name: str
    global_rank: int
    engine: Engine | LoneEngine
    """The group's own: every collective is announced there, so that it finds what ranks do differently."""
    options: EngineOptions


class DeviceSide:
    """The collectives of one group on the tensors of one device."""

    def __init__(self, device: Device, group: Membership, timeout: timedelta) -> None:
        self._device, self._group, self._timeout = device, group, timeout
        options = group.options
        least = (group.size + 1) * _MOST_ELEMENT_BYTES
        self.staging = Staging(
            device, self,
            num_buffers=options.staging_buffers, buffer_bytes=max(options.staging_bytes, least),
        )  # fmt: skip
        self.aside = Aside(device)
        self._stopped = threading.Event()
        self._place: Place | None = None
        self._by_parts: ByParts | None = None
        self._all: Engine | None = None
        self._engines: list[Engine] = []
        self._beside: list[HostRanks] = []
        threading.Thread(target=self._guard, name="shoal-device-guard", daemon=True).start()

    # ---- collectives --------------------------------------------------------------------------------------

    def submit(
        self,
        asked: Asked,
        *,
        begin: Callable[[Operation], int],
        idle: Callable[[], None],
        timeout: timedelta,
        result: Any,
        finish: Callable[[], None] | None,
    ) -> StagedWork:
        """Begin a collective; what the caller has queued on the device comes before it.

        Args:
            begin: gives the group's engine an operation, and counts it. Like ``idle`` it belongs to the group
                and is not kept here, where threads would keep the group alive.
            idle: called by a thread that waits for long.

        Raises:
            CommError: the group has failed, or the ranks did not meet for the first collective.
            UsageError: while a graph is captured.
        """
        device, kind = self._device.place.type, asked.kind
        if self._device.is_recording():
            raise UsageError(
                f"{kind} on {device} while a graph is captured: the network's part is the processor's and "
                "cannot be replayed; capture forward and backward pass and average the gradients outside"
            )
        handle = begin(_announcement(f"{device}_{kind}", asked, timeout))
        try:
            route = self._route(asked)
        except Exception:
            self._group.engine.finish_delegated(handle)
            raise
        work = StagedWork(self._device, kind, result, self.error, idle)
        job = Job(
            name=kind,
            route=route,
            ready=self._device.here().mark(),
            end_s=time.monotonic() + timeout.total_seconds(),
            work=work,
            finish=finish,
            ended=lambda: self._group.engine.finish_delegated(handle),
        )
        self.staging.begin(job)
        return work

    def _route(self, asked: Asked) -> Route:
        if self._group.size == 1 or asked.output.numel() == 0:
            return straight(asked, None, 0, 1)
        place = self._meet()
        if place.by_parts and asked.op in HOST_OPS and self._by_parts is not None:
            return self._by_parts.route(asked)
        if self._all is None:
            self._exchange("all", None)
            self._all = self._connect("all", self._group.rank, self._group.size)
        return straight(asked, self._all, self._group.rank, self._group.size)

    # ---- meeting the others -------------------------------------------------------------------------------

    def _meet(self) -> Place:
        if self._place is None:
            group = self._group
            found = self._exchange("place", [host_identity(), self._device.identity()])
            place = Place.of([(host, device) for host, device in found], group.rank)
            if place.by_parts and group.options.order == "host":
                self._open_parts(place)
            self._place = place
        return self._place

    def _open_parts(self, place: Place) -> None:
        """Meet the ranks of this host, and of this rail; without them, if any rank's device refuses."""
        problem = ""
        try:
            self._beside = [self._beside_in(place, lane) for lane in range(2)]
        except Exception as refusal:
            problem = f"rank {self._group.rank}: {refusal}"
        problems = [each for each in self._exchange("beside", problem) if each]
        if problems:
            if self._group.rank == 0:
                _log.warning(
                    "group %s: whole tensors leave each %s: the ranks of a host cannot add up there (%s)",
                    self._group.name, self._device.place.type, problems[0],
                )  # fmt: skip
            return
        rail = (
            self._connect(f"rail/{place.local}", place.host, len(place.hosts))
            if len(place.hosts) > 1
            else None
        )
        wide = self._group.options.partial == "float32"
        self._by_parts = ByParts(place, rail, *self._beside, wide=wide)

    def _beside_in(self, place: Place, lane: int) -> HostRanks:
        """Meet the ranks of this host for one of the two lanes, and see whether they can add up."""
        store = PrefixStore(f"host/{place.host}/{lane}/", self._group.store)
        name = f"{self._group.name}, host {place.host}, lane {lane}"
        ranks = self._device.inside_host(store, place.local, len(place.hosts[0]), self._timeout, name)
        ones = torch.ones(len(place.hosts[0]), device=self._device.place)
        part = ones.new_empty(1)
        ranks.reduce_scatter(part, ones, "sum")
        ranks.all_gather(ones, part)
        if ones.tolist() != [len(ones)] * len(ones):
            raise CommError(f"the ranks of host {place.host} add ones up to {ones.tolist()}")
        return ranks

    def _connect(self, name: str, rank: int, size: int) -> Engine:
        group = self._group
        engine = connect_engine(
            PrefixStore(f"{name}/", group.store), rank, size, f"{group.name} on {self._device.place.type}",
            group.global_rank, self._timeout, group.options, tell=False,
        )  # fmt: skip
        self._engines.append(engine)
        return engine

    def _exchange(self, topic: str, mine: Any) -> list[Any]:
        """Return what every rank has given under this topic.

        Raises:
            CommError: the group has failed, or a rank did not come in time.
        """
        group = self._group
        keys = [f"{topic}/{rank}" for rank in range(group.size)]
        group.store.set(keys[group.rank], json.dumps(mine))
        if not met(group.store, keys, lambda: self.error() is not None, self._timeout):
            missing = [str(rank) for rank, key in enumerate(keys) if not group.store.check([key])]
            raise CommError(
                self.error()
                or f"rank {', '.join(missing)} of group {group.name} did not begin its first collective on "
                f"{self._device.place.type} within {self._timeout.total_seconds():g} s; see where it is"
            )
        return [parse_json(group.store.get(key), f"{key} in the store") for key in keys]

    # ---- failure and end ----------------------------------------------------------------------------------

    def error(self) -> str | None:
        return self._group.engine.error()

    def explain(self, problem: Exception) -> Exception:
        """Return the group's reason if it has failed, which names the first cause; else ``problem``.

        A rank that leaves after a failure ends these engines too. The group's own hears of the first cause.
        """
        end = time.monotonic() + (_NAMING_S if isinstance(problem, CommError) else 0.0)
        while not self._stopped.is_set():
            if reason := self.error():
                return CommError(reason)
            if time.monotonic() >= end:
                break
            time.sleep(_POLL_S / 10)
        return problem

    def abort(self, reason: str) -> None:
        """Fail the group, on all ranks; a group that ends itself only ends."""
        if not self._stopped.is_set():
            self._group.engine.abort(f"rank {self._group.rank} of group {self._group.name}: {reason}")

    def _guard(self) -> None:
        while not self._stopped.wait(_POLL_S):
            for engine in self._engines:
                for event in engine.take_events():
                    _log.warning("group %s on %s: %s", self._group.name, self._device.place.type, event)
            if reason := self.error():
                self._break_off(reason)
                return

    def _break_off(self, reason: str) -> None:
        for engine in self._engines:
            engine.abort(reason)
        for ranks in self._beside:
            ranks.abort(reason)

    def stop(self) -> None:
        """End it; what is under way is broken off."""
        self._stopped.set()
        if self.error() or not self.staging.is_idle:
            self._break_off(
                self.error() or f"rank {self._group.rank} of group {self._group.name} has left it"
            )
        self.staging.stop()
        for ranks in self._beside:
            ranks.close()
        for engine in self._engines:
            engine.close()
        self._device.close()


def _announcement(name: str, asked: Asked, timeout: timedelta) -> Operation:
    """Return how the group's engine tells the others of a collective.

    Of an announced operation the engine compares the name, the dtype and the root. A number for everything
    that must agree stands for the root.
    """
    if asked.op != "sum":
        name += f"_{asked.op}"
    if asked.kind in ("broadcast", "reduce"):
        name += f"_{'from' if asked.kind == 'broadcast' else 'to'}_{asked.root}"
    count = asked.output.numel() if asked.kind == "reduce_scatter" else asked.input.numel()
    return Operation(
        kind="delegated", op=name, root=zlib.crc32(f"{count}".encode()) >> 1, count=count, dtype=asked.dtype,
        shape=asked.shape, timeout_s=timeout.total_seconds(),
    )  # fmt: skip
