"""What a group is, apart from its collectives: its engine, its names, its parts, its end."""

# torch's stubs of ProcessGroup differ between its versions and lack what only some have.
# mypy: disable-error-code="override, assignment, misc"

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, Work

from shoal.comm import BACKEND_NAME
from shoal.comm.addresses import LOOPBACK, local_address
from shoal.comm.bootstrap import connect_engine
from shoal.comm.completer import Completer
from shoal.comm.device_side import DeviceSide, Membership
from shoal.comm.devices import Device
from shoal.comm.ending import Ending, end_when_dropped
from shoal.comm.engine import CommError, Engine, EngineOptions, Operation
from shoal.comm.inner import InnerGloo
from shoal.comm.lone import LoneEngine
from shoal.comm.messages import Messages
from shoal.comm.mixes import refuse_configuration
from shoal.comm.operands import DEVICES
from shoal.comm.routes import Asked
from shoal.comm.untraced import untraced
from shoal.comm.work import NO_TIMEOUT, EngineWork, JoinedWork
from shoal.errors import UsageError

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


def _open_cuda(place: torch.device) -> Device:
    return importlib.import_module("shoal.comm.cuda_device").CudaDevice(place)  # type: ignore[no-any-return]


class _Devices(list[torch.device]):
    """The devices of a group, with which torch's flight recorder leaves the group alone.

    It can only attach to a group with a C++ backend, and would raise. It takes a group for one without when
    ``not group._device_types``; all other code of torch looks into the list.
    """

    def __bool__(self) -> bool:
        return False


@untraced
class EngineGroup(ProcessGroup):
    """A group of ranks with an engine of its own."""

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
        self._options = options or EngineOptions()
        self.devices: dict[str, Callable[[torch.device], Device]] = {"cuda": _open_cuda}
        """Devices whose tensors go through staging, by type."""
        self.engine: Engine | LoneEngine
        if size == 1:
            self.engine, address = LoneEngine(), LOOPBACK
        else:
            self.engine = connect_engine(store, rank, size, name, global_ranks[rank], timeout, options)
            address = local_address(store)
        self.inner = InnerGloo(store, rank, size, address, timeout, self.engine.error)
        self._messages = Messages(self.inner)
        self._completer = Completer(self.engine, ordered=self._options.ordered_callbacks)
        self._ending = Ending(self.engine, self._completer, self.inner)
        end_when_dropped(self, self._ending)
        self._pending: dict[int, EngineWork] = {}
        self._sequence = 0
        self._splits = 0
        self._closed = False
        self._coalescing: list[Work] | None = None

    # ---- what works ask of their group --------------------------------------------------------------------

    def is_done(self, handle: int) -> bool:
        return self.engine.is_done(handle)

    def wait_once(self, handle: int, timeout_s: float) -> bool:
        if self.engine.wait(handle, timeout_s):
            return True
        if timeout_s > 0:
            self._idle()
        return False

    def _idle(self) -> None:
        """See to what others ask of a rank that waits."""
        self.inner.join_if_wanted()
        for event in self.engine.take_events():
            _log.warning("group %s: %s", self._name, event)

    def forget(self, handle: int) -> None:
        self._pending.pop(handle, None)
        self._ending.operands.pop(handle, None)

    def complete_later(self, work: EngineWork) -> None:
        self._completer.add(work)

    def _submit(
        self,
        kind: str,
        input: Tensor,
        output: Tensor,
        count: int,
        dtype: str,
        *,
        op: str = "sum",
        root: int = 0,
        shape: Sequence[int] = (),
        timeout: timedelta,
        result: Any,
        finish: Callable[[], None] | None = None,
        priority: int = 0,
    ) -> Work:
        """Begin an operation on two blocks of memory, which stay alive until it is done."""
        side = self._side(input.device) if kind != "barrier" else None
        if side is not None:
            wanted = Asked(
                kind=kind, input=input, output=output, dtype=dtype,
                op=op, root=root, shape=shape, priority=priority,
            )  # fmt: skip
            return self._coalesced(
                side.submit(
                    wanted, begin=self._begin, idle=self._idle,
                    timeout=self._limit(timeout), result=result, finish=finish,
                )
            )  # fmt: skip
        asked = Operation(
            kind=kind, input=input.data_ptr(), output=output.data_ptr(), count=count, dtype=dtype,
            op=op, root=root, shape=shape, timeout_s=self._limit(timeout).total_seconds(), priority=priority,
        )  # fmt: skip
        handle = self._begin(asked)
        self._ending.operands[handle] = input, output
        work = EngineWork(self, handle, kind, result, (input, output), finish)
        self._pending[handle] = work
        # What nobody waits for is settled here, at the latest when the group ends.
        for oldest in list(self._pending.values()):
            if oldest is work or not oldest.is_completed():
                break
        return self._coalesced(work)

    def _coalesced(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _side(self, place: torch.device) -> DeviceSide | None:
        """Return what serves tensors on this device; ``None`` if the engine itself does."""
        if place.type not in self.devices:
            return None
        sides = self._ending.sides
        if place not in sides:
            if self._closed:
                raise CommError(
                    f"collective on {place}: this process group has been shut down; make a new one"
                )
            membership = Membership(
                store=PrefixStore(f"device/{len(sides)}/", self._store), rank=self._rank,
                size=self._size, name=self._name, global_rank=self._global_ranks[self._rank],
                engine=self.engine, options=self._options,
            )  # fmt: skip
            sides[place] = DeviceSide(self.devices[place.type](place), membership, self._timeout)
        return sides[place]

    def _begin(self, asked: Operation) -> int:
        """Give the engine an operation and count it."""
        if self._closed:
            raise CommError(f"{asked.name}: this process group has been shut down; make a new one")
        if self._sequence == 0:
            refuse_configuration(self)
        handle = self._completer.begin(partial(self.engine.submit, asked), asked.name, self._timeout)
        self._sequence += 1
        return handle

    def _limit(self, timeout: timedelta) -> timedelta:
        """Return the time that an operation may take: as asked, or else as this group's operations may."""
        return timeout if timeout > NO_TIMEOUT else self._timeout

    # ---- groups -------------------------------------------------------------------------------------------

    def split_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, opts: Any = None,
        group_name: str | None = None, group_desc: str | None = None, device_types: Any = None,
    ) -> EngineGroup | None:  # fmt: skip
        """Return a group of some of this group's ranks, or ``None`` if this rank is not among them."""
        ranks = list(ranks)
        if self._rank not in ranks:
            return None
        self._splits += 1
        name = group_name or f"{self._name}:split:{self._splits}:{'-'.join(map(str, ranks))}"
        part = type(self)(
            PrefixStore(f"{name}/", self._store), ranks.index(self._rank), len(ranks),
            timeout or self._timeout, name, [self._global_ranks[rank] for rank in ranks],
        )  # fmt: skip
        if group_desc is not None:
            part.setGroupDesc(group_desc)
        return part

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Nothing to do: a group is connected when it is made."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing to do: ranks outside a subgroup have no part in making it."""

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
        return _Devices([_CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])])

    def _get_backend(self, device: torch.device) -> EngineGroup:
        """
        Raises:
            UsageError: a device that this backend does not serve.
        """
        if torch.device(device).type not in DEVICES:
            raise UsageError(f"backend shoal serves {', '.join(DEVICES)} tensors, and {device} was asked for")
        return self

    get_backend = _get_backend

    def getSequenceNumberForGroup(self) -> int:
        return self._sequence

    def setSequenceNumberForGroup(self) -> None:
        """Nothing to do: every group starts at 0."""

    _get_sequence_number_for_group = getSequenceNumberForGroup
    _set_sequence_number_for_group = setSequenceNumberForGroup

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of the operations that start from now on without one of their own."""
        self._timeout = timeout
        self.inner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    # ---- the end ------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Fail everything under way here and on all other ranks of the group."""
        if not self._closed:
            self.engine.abort(f"rank {self._rank} of group {self._name} aborted it")

    def shutdown(self) -> None:
        """Leave the group. The others do not mind, unless they wait for this rank.

        A group that is dropped without it leaves too, a moment later.
        """
        if self._closed:
            return
        for work in list(self._pending.values()):
            work.is_completed()
        self._closed = True
        self._ending.run()
        self._pending.clear()
