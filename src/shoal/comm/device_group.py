"""Holds the per-device state of a process group: its engines, the intra-host group and the staging.

The group's first collective on the device creates it; all ranks take part. Its engines are separate from the
group's engine, because chunks are submitted when they have left the device, and the caller submits other
operations in the meantime.
"""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.devices import Device
from shoal.comm.engine import CommError, Engine, Operation
from shoal.comm.operations import Member
from shoal.comm.rendezvous import connect_engine
from shoal.comm.routes import (
    INTRA_HOST_OPS,
    HierarchicalRoutes,
    IntraHostGroup,
    RankLayout,
    Route,
    flat_route,
    message_route,
    served_route,
)
from shoal.comm.staging import DeviceMessage, DeviceWork, MessageStaging, Staging, Transfer
from shoal.comm.store import wait_for_keys
from shoal.comm.work import first_cause
from shoal.env.machine import host_identity
from shoal.errors import UsageError
from shoal.json_text import parse_json

_log = logging.getLogger(__name__)
_POLL_S = 0.2
_GROUP_ERROR_S = 1.0
_MAX_ELEMENT_BYTES = 8


class DeviceGroup:
    """The collectives of one process group on the tensors of one device.

    Every collective is announced on the group's engine, so that it detects mismatched collectives.
    """

    def __init__(self, device: Device, group: Member, store: Store, timeout: timedelta) -> None:
        self._device, self._group, self._store, self._timeout = device, group, store, timeout
        options = group.options
        min_bytes = (group.size + 1) * _MAX_ELEMENT_BYTES
        self.staging = Staging(
            device, self,
            num_buffers=options.staging_buffers, buffer_bytes=max(options.staging_bytes, min_bytes),
        )  # fmt: skip
        self._opening = threading.Lock()  # a thread may send while another one receives
        self._messages: MessageStaging | None = None
        self._stopped = threading.Event()
        self._knows_layout = False
        self._hierarchical: HierarchicalRoutes | None = None
        self._flat: Engine | None = None
        self._engines: list[Engine] = []
        self._intra_host: list[IntraHostGroup] = []
        threading.Thread(target=self._watch, name="shoal-device-guard", daemon=True).start()

    # ---- collectives --------------------------------------------------------------------------------------

    def submit(
        self,
        operation: Operation,
        *,
        begin: Callable[[Operation], int],
        idle: Callable[[], None],
    ) -> DeviceWork:
        """Submit a collective, ordered after the work that the caller has queued on the device.

        Args:
            operation: the collective; its ``finish`` is queued on the device after the result.
            begin: submits an operation to the group's engine and counts it. Like ``idle`` it belongs to the
                group's operations and is not stored here, where threads would keep them alive.
            idle: called by threads that wait for long.

        Raises:
            CommError: the group has failed, or a rank did not join the first collective.
            UsageError: the stream is being captured into a graph.
        """
        device, kind = self._device.torch_device.type, operation.kind
        self._require_no_capture(operation)
        handle = begin(_announcement(f"{device}_{kind}", operation))
        try:
            route = self._route(operation)
            ready = self._device.current_stream().record_event()
        except Exception:
            self._group.engine.finish_delegated(handle)
            raise
        work = DeviceWork(self._device, kind, operation.result, self, idle)
        self.staging.begin(
            Transfer(
                route=route,
                ready=ready,
                timeout_s=operation.timeout_s,
                work=work,
                on_end=lambda: self._group.engine.finish_delegated(handle),
            )
        )
        return work

    def submit_message(self, operation: Operation, idle: Callable[[], None]) -> DeviceMessage:
        """Begin a send or a receive, which only the other rank has to join. Arguments as in :meth:`submit`.

        Messages of tensors of the host and of devices have different tags to the engine: those of a device
        are sent when they have left it, and the order among the two is that of neither.
        """
        self._require_no_capture(operation)
        with self._opening:
            if self._messages is None:
                self._messages = MessageStaging(self._device, self)
        operation.tag = ~operation.tag
        work = DeviceMessage(self._device, operation.kind, operation.result, self, idle)
        work.note_source(operation)
        self._messages.begin(
            Transfer(
                route=message_route(operation, self._group.engine),
                ready=self._device.current_stream().record_event(),
                timeout_s=operation.timeout_s,
                work=work,
                on_end=lambda: None,
            )
        )
        return work

    def _require_no_capture(self, operation: Operation) -> None:
        if self._device.is_capturing():
            raise UsageError(
                f"{operation.kind} on {self._device.torch_device.type} while a graph is captured: the "
                "network's part is the processor's and cannot be replayed; capture forward and backward pass "
                "and average the gradients outside"
            )

    def _route(self, operation: Operation) -> Route:
        if operation.is_served:
            return served_route(operation, self._engine_of_all(), self._group.rank, self._group.size)
        if operation.is_by_messages:
            return message_route(operation, self._engine_of_all() if self._group.size > 1 else None)
        if self._group.size == 1 or operation.target.numel() == 0:
            return flat_route(operation, None, 0, 1)
        self._exchange_layout()
        if self._hierarchical is not None and operation.op in INTRA_HOST_OPS:
            return self._hierarchical.route(operation)
        return flat_route(operation, self._engine_of_all(), self._group.rank, self._group.size)

    def _engine_of_all(self) -> Engine:
        """Return the engine of all ranks; the first call connects it."""
        if self._flat is None:
            self._exchange("all", None)
            self._flat = self._connect("all", self._group.rank, self._group.size)
        return self._flat

    # ---- rendezvous ---------------------------------------------------------------------------------------

    def _exchange_layout(self) -> None:
        """Find out which ranks share a host, and connect these; only the first call does anything."""
        if self._knows_layout:
            return
        records = self._exchange("place", [host_identity(), self._device.identity()])
        layout = RankLayout.of([(host, device) for host, device in records], self._group.rank)
        if layout.is_hierarchical and self._group.options.order == "host":
            self._connect_hierarchy(layout)
        self._knows_layout = True

    def _connect_hierarchy(self, layout: RankLayout) -> None:
        """Connect the ranks of this host and of this rail, unless the intra-host group of any rank fails."""
        problem = ""
        try:
            self._intra_host = [self._connect_host(layout, direction) for direction in range(2)]
        except (RuntimeError, OSError) as refusal:
            problem = f"rank {self._group.rank}: {refusal}"
        problems = [each for each in self._exchange("beside", problem) if each]
        if problems:
            if self._group.rank == 0:
                _log.warning(
                    "group %s: whole tensors leave each %s: the ranks of a host cannot add up there (%s)",
                    self._group.name, self._device.torch_device.type, problems[0],
                )  # fmt: skip
            return
        rail = (
            self._connect(f"rail/{layout.local}", layout.host, len(layout.hosts))
            if len(layout.hosts) > 1
            else None
        )
        d2h_ranks, h2d_ranks = self._intra_host
        self._hierarchical = HierarchicalRoutes(
            layout=layout, rail=rail, d2h_ranks=d2h_ranks, h2d_ranks=h2d_ranks,
            widen=self._group.options.partial_dtype == "float32",
        )  # fmt: skip

    def _connect_host(self, layout: RankLayout, direction: int) -> IntraHostGroup:
        """Connect the ranks of this host for the collectives of one stream, and test a reduction."""
        store = PrefixStore(f"host/{layout.host}/{direction}/", self._store)
        name = f"{self._group.name}, host {layout.host}, stream {direction}"
        size = len(layout.hosts[0])
        ranks = self._device.intra_host_group(store, layout.local, size, self._timeout, name)
        ones = torch.ones(size, device=self._device.torch_device)
        part = ones.new_empty(1)
        ranks.reduce_scatter(part, ones, "sum")
        ranks.all_gather(ones, part)
        if ones.tolist() != [size] * size:
            raise CommError(f"the ranks of host {layout.host} add ones up to {ones.tolist()}")
        return ranks

    def _connect(self, name: str, rank: int, size: int) -> Engine:
        group = self._group
        engine = connect_engine(
            PrefixStore(f"{name}/", self._store), rank, size,
            f"{group.name} on {self._device.torch_device.type}",
            group.global_rank, self._timeout, group.options, verbose=False,
        )  # fmt: skip
        self._engines.append(engine)
        return engine

    def _exchange(self, topic: str, value: Any) -> list[Any]:
        """Return the values of all ranks for a topic, in rank order.

        Raises:
            CommError: the group has failed, or a rank did not come in time.
        """
        group = self._group
        keys = [f"{topic}/{rank}" for rank in range(group.size)]
        self._store.set(keys[group.rank], json.dumps(value))
        if not wait_for_keys(self._store, keys, lambda: self.error() is not None, self._timeout):
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise CommError(
                self.error()
                or f"rank {', '.join(missing)} of group {group.name} did not begin its first collective on "
                f"{self._device.torch_device.type} within {self._timeout.total_seconds():g} s; see where it "
                "is"
            )
        return [parse_json(self._store.get(key), f"{key} in the store") for key in keys]

    # ---- failure and shutdown -----------------------------------------------------------------------------

    def error(self) -> str | None:
        return self._group.engine.error()

    def explain(self, problem: Exception) -> Exception:
        """Return the group's error, which names the first cause, if it has failed; else ``problem``."""
        if self._stopped.is_set():
            return problem
        # a rank of this host that dies fails the others' kernels, too
        may_be_another = isinstance(problem, CommError) or self._hierarchical is not None
        return first_cause(problem, self.error, _GROUP_ERROR_S if may_be_another else 0.0)

    def abort(self, reason: str) -> None:
        """Fail the group on all ranks, unless it is being shut down."""
        if not self._stopped.is_set():
            self._group.engine.abort(f"rank {self._group.rank} of group {self._group.name}: {reason}")

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            for engine in self._engines:
                for event in engine.take_events():
                    _log.warning(
                        "group %s on %s: %s", self._group.name, self._device.torch_device.type, event
                    )
            if reason := self.error():
                self._abort_all(reason)
                return

    def _abort_all(self, reason: str) -> None:
        for engine in self._engines:
            engine.abort(reason)
        for ranks in self._intra_host:
            ranks.abort(reason)

    def stop(self) -> None:
        """Shut down; abort operations that have not completed."""
        self._stopped.set()
        if self.error() or not self.staging.is_idle:
            self._abort_all(
                self.error() or f"rank {self._group.rank} of group {self._group.name} has left it"
            )
        self.staging.stop()
        for ranks in self._intra_host:
            ranks.close()
        for engine in self._engines:
            engine.close()

    def release(self) -> None:
        """Release the device, after :meth:`stop` and when the group's engine is closed."""
        if self._messages is not None:
            self._messages.stop()
        self._device.close()


def _announcement(name: str, operation: Operation) -> Operation:
    """Return the delegated operation that announces a device collective on the group's engine.

    The engine compares name, dtype and root of delegated operations. The operation and its root are therefore
    part of the name, and a checksum of the element count takes the place of the root. The ranks of an
    all_to_all may differ in it.
    """
    if operation.op != "sum":
        name += f"_{operation.op}"
    if operation.kind in ("broadcast", "scatter", "reduce", "gather"):
        name += f"_{'from' if operation.kind in ('broadcast', 'scatter') else 'to'}_{operation.root}"
    count = 0 if operation.kind == "all_to_all" else operation.count
    return Operation(
        kind="delegated", op=name, root=zlib.crc32(f"{count}".encode()) >> 1,
        count=count, dtype=operation.dtype, shape=operation.shape, timeout_s=operation.timeout_s,
    )  # fmt: skip
