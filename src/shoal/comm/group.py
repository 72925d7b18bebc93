"""Process-group lifecycle: construction, submission, splitting, timeouts, shutdown.

Collectives are in ``backend``.
"""

# torch's stubs of ProcessGroup differ between its versions and lack what only some have.
# mypy: disable-error-code="override, assignment, misc"

from __future__ import annotations

import importlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, Work
from torch.distributed import distributed_c10d

from shoal.comm import BACKEND_NAME
from shoal.comm.addresses import LOOPBACK, local_address
from shoal.comm.completer import Completer
from shoal.comm.device_group import DeviceGroup
from shoal.comm.devices import Device
from shoal.comm.engine import CommError, Engine, EngineOptions, Operation
from shoal.comm.gloo_fallback import GlooFallback
from shoal.comm.rendezvous import Membership, connect_engine
from shoal.comm.single_process import SingleProcessEngine
from shoal.comm.tensors import DEVICES, CollectiveRequest
from shoal.comm.work import NO_TIMEOUT, EngineWork, JoinedWork, opaque_to_dynamo
from shoal.errors import UsageError

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_ACCELERATOR_BACKENDS = ("nccl", "xccl", "ucc", "mpi")


def _open_cuda(device: torch.device) -> Device:
    return importlib.import_module("shoal.comm.cuda_device").CudaDevice(device)  # type: ignore[no-any-return]


class _FalsyDevices(list[torch.device]):
    """A group's devices, as a list that is false.

    torch's flight recorder attaches only to groups with a C++ backend and raises for others, but skips a
    group where ``not group._device_types``. All other code of torch iterates over the list.
    """

    def __bool__(self) -> bool:
        return False


@opaque_to_dynamo
class EngineGroup(ProcessGroup):
    """A process group with its own engine."""

    supports_splitting = True
    supports_coalescing = False

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_ranks: list[int],
        options: EngineOptions | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._name, self._description = name, "undefined"
        self._global_ranks = global_ranks
        options = options or EngineOptions()
        self.devices: dict[str, Callable[[torch.device], Device]] = {"cuda": _open_cuda}
        """Factories by device type, for tensors that pass through the copy pipeline."""
        self.engine: Engine | SingleProcessEngine
        if size == 1:
            self.engine, address = SingleProcessEngine(), LOOPBACK
        else:
            self.engine = connect_engine(store, rank, size, name, global_ranks[rank], timeout, options)
            address = local_address(store)
        self._membership = Membership(
            store=store, rank=rank, size=size, name=name, global_rank=global_ranks[rank],
            engine=self.engine, options=options,
        )  # fmt: skip
        self.gloo = GlooFallback(self._membership, address, timeout)
        self._completer = Completer(self.engine, ordered=options.ordered_callbacks)
        self._resources = GroupResources(self.engine, self._completer, self.gloo)
        close_when_collected(self, self._resources)
        self._pending: dict[int, EngineWork] = {}
        self._sequence = 0
        self._splits = 0
        self._closed = False
        self._coalescing: list[Work] | None = None

    # ---- WorkOwner ----------------------------------------------------------------------------------------

    def is_done(self, handle: int) -> bool:
        return self.engine.is_done(handle)

    def wait_once(self, handle: int, timeout_s: float) -> bool:
        if self.engine.wait(handle, timeout_s):
            return True
        if timeout_s > 0:
            self._idle()
        return False

    def _idle(self) -> None:
        """Answer requests of other ranks and log the engine's events; called during long waits."""
        self.gloo.join_if_wanted()
        for event in self.engine.take_events():
            _log.warning("group %s: %s", self._name, event)

    def forget(self, handle: int) -> None:
        self._pending.pop(handle, None)
        self._resources.operands.pop(handle, None)

    def complete_later(self, work: EngineWork) -> None:
        self._completer.add(work)

    # ---- submission ---------------------------------------------------------------------------------------

    def _submit(self, request: CollectiveRequest) -> Work:
        """Submit a collective; its tensors are kept alive until it completes."""
        request.timeout = self._limit(request.timeout)
        device_group = self._device_group(request.input.device) if request.kind != "barrier" else None
        if device_group is not None:
            return self._coalesced(device_group.submit(request, begin=self._begin, idle=self._idle))
        operation = Operation(
            kind=request.kind, input=request.input.data_ptr(), output=request.output.data_ptr(),
            count=request.count, dtype=request.dtype, op=request.op, root=request.root, shape=request.shape,
            timeout_s=request.timeout.total_seconds(), priority=request.priority,
        )  # fmt: skip
        handle = self._begin(operation)
        self._resources.operands[handle] = request.input, request.output
        work = EngineWork(self, handle, request)
        self._pending[handle] = work
        # Works that nobody waits for are settled here, at the latest when the group shuts down.
        for oldest in list(self._pending.values()):
            if oldest is work or not oldest.is_completed():
                break
        return self._coalesced(work)

    def _coalesced(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _device_group(self, device: torch.device) -> DeviceGroup | None:
        """Return the device group of tensors on this device; ``None`` if the group's engine takes them."""
        if device.type not in self.devices:
            return None
        groups = self._resources.device_groups
        if device not in groups:
            if self._closed:
                raise CommError(
                    f"collective on {device}: this process group has been shut down; make a new one"
                )
            store = PrefixStore(f"device/{len(groups)}/", self._store)
            device_of = self.devices[device.type]
            groups[device] = DeviceGroup(device_of(device), self._membership, store, self._timeout)
        return groups[device]

    def _begin(self, operation: Operation) -> int:
        """Submit an operation to the engine and count it."""
        if self._closed:
            raise CommError(f"{operation.name}: this process group has been shut down; make a new one")
        if self._sequence == 0:
            refuse_mixed_configuration(self)
        handle = self._completer.begin(partial(self.engine.submit, operation), operation.name, self._timeout)
        self._sequence += 1
        return handle

    def _limit(self, timeout: timedelta) -> timedelta:
        """Return an operation's timeout: the given one, or the group's if that is zero."""
        return timeout if timeout > NO_TIMEOUT else self._timeout

    # ---- torch's ProcessGroup interface -------------------------------------------------------------------

    def split_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, opts: Any = None,
        group_name: str | None = None, group_desc: str | None = None, device_types: Any = None,
    ) -> EngineGroup | None:  # fmt: skip
        """Return a group of the given ranks of this group, or ``None`` on other ranks."""
        ranks = list(ranks)
        if self._rank not in ranks:
            return None
        self._splits += 1
        name = group_name or f"{self._name}:split:{self._splits}:{'-'.join(map(str, ranks))}"
        subgroup = type(self)(
            PrefixStore(f"{name}/", self._store), ranks.index(self._rank), len(ranks),
            timeout or self._timeout, name, [self._global_ranks[rank] for rank in ranks],
        )  # fmt: skip
        if group_desc is not None:
            subgroup.setGroupDesc(group_desc)
        return subgroup

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: a group is connected on construction."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a subgroup take no part in its construction."""

    def start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalescing = []

    def end_coalescing(self, device: torch.device | None = None) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return JoinedWork(works, [])

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return _FalsyDevices([_CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])])

    def _get_backend(self, device: torch.device) -> EngineGroup:
        """Return this group, which is its own backend.

        Raises:
            UsageError: the device is not one of :data:`DEVICES`.
        """
        if torch.device(device).type not in DEVICES:
            raise UsageError(f"backend shoal serves {', '.join(DEVICES)} tensors, and {device} was asked for")
        return self

    get_backend = _get_backend

    def getSequenceNumberForGroup(self) -> int:
        return self._sequence

    def setSequenceNumberForGroup(self) -> None:
        """Do nothing: every group starts at 0."""

    _get_sequence_number_for_group = getSequenceNumberForGroup
    _set_sequence_number_for_group = setSequenceNumberForGroup

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations that have none of their own."""
        self._timeout = timeout
        self.gloo.set_timeout(timeout)

    _set_default_timeout = set_timeout

    # ---- shutdown -----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Fail all pending operations here and on all other ranks of the group."""
        if not self._closed:
            self.engine.abort(f"rank {self._rank} of group {self._name} aborted it")

    def shutdown(self) -> None:
        """Leave the group. Other ranks are not affected unless they wait for this rank.

        A group that is garbage-collected without it is shut down shortly after.
        """
        if self._closed:
            return
        for work in list(self._pending.values()):
            work.is_completed()
        self._closed = True
        self._resources.close()
        self._pending.clear()


# ---- mixed backends -------------------------------------------------------------------------------------


def refuse_other_backends(options: Any) -> None:
    """Refuse a group for which torch was asked to make a second backend for CUDA tensors.

    torch replaces the whole group by one that is written in Python, so this backend would silently serve the
    tensors of the other one. For a second backend of CPU tensors it does that.

    Args:
        options: torch's ``DistributedBackendOptions``.

    Raises:
        UsageError: another backend was asked for.
    """
    group = getattr(options, "process_group", None)
    if group is None:  # torch 2.11: the configuration is known once the group is registered
        return
    # Backends that exist already are in the group; of later ones the accelerator's is the default.
    _refuse(
        [
            *(group._get_backend(each).name() for each in group._device_types if each.type != "cpu"),
            group.name(),
        ]
    )


def refuse_mixed_configuration(group: Any) -> None:
    """Make the same check on a registered group, before its first operation.

    Raises:
        UsageError: another backend was asked for.
    """
    configuration = distributed_c10d._world.pg_backend_config.get(group, "")
    _refuse([each.rpartition(":")[2] for each in configuration.split(",")])


def _refuse(names: list[str]) -> None:
    for name in names:
        if name in _ACCELERATOR_BACKENDS:
            raise UsageError(
                f"the backend of this group mixes {BACKEND_NAME} and {name}; torch lets a group have one "
                f"backend where {BACKEND_NAME} is among them, and {name} would not be used: write "
                f'"{BACKEND_NAME}" for CPU and CUDA tensors, or make two groups, '
                f'init_process_group("{name}") and new_group(backend="{BACKEND_NAME}") for the CPU tensors'
            )


# ---- garbage collection ---------------------------------------------------------------------------------
# Python collects garbage on any thread and under any lock, where joining a thread can deadlock. Resources of
# a collected group are therefore closed by a thread that already exists; the collecting thread only puts them
# into a queue. shoal.comm.engine closes engines that are open when the interpreter exits.


class GroupResources:
    """Open resources of a group. Holds no reference to the group, so that the group can be collected."""

    def __init__(
        self, engine: Engine | SingleProcessEngine, completer: Completer, gloo: GlooFallback
    ) -> None:
        self._engine, self._completer, self._gloo = engine, completer, gloo
        self.device_groups: dict[torch.device, DeviceGroup] = {}
        self.operands: dict[int, Sequence[Any]] = {}
        """Memory that the engine reads and writes, by operation; must outlive the engine."""
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Leave the group and join its threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for device_group in self.device_groups.values():
            device_group.stop()
        self._completer.stop()
        self._gloo.stop()
        self._engine.close()
        self.operands.clear()


# SimpleQueue: the garbage collector may call put() while the same thread is in put().
_collected: queue.SimpleQueue[GroupResources] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def close_when_collected(group: object, resources: GroupResources) -> None:
    """Close ``resources`` on a background thread once ``group`` has been garbage-collected."""
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():  # a forked child has no threads
            _thread = threading.Thread(target=_close_collected, name="shoal-ending", daemon=True)
            _thread.start()
    weakref.finalize(group, _collected.put, resources).atexit = False


def _close_collected() -> None:
    while True:
        _collected.get().close()
