"""A GPU as staging sees it: lanes are streams, marks are events, the ranks of a host are NCCL's.

Nothing here waits on the processor but :meth:`CudaMark.wait`, which only threads of our own call. Tensors of
other streams are not recorded with the allocator: who queues a step keeps them until a later mark is passed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions, Store
from torch.distributed import ReduceOp

_OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "prod": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
}
_NCCL_PATIENCE = 10
"""times the group's timeout. NCCL's own watchdog ends the process; the engine is to name the rank before."""


class CudaMark:
    """An event behind what a stream holds now. The thread that waits for it sleeps."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return bool(self.event.query())


class CudaLane:
    """A stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, step: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            step()

    def wait_for(self, mark: CudaMark) -> None:
        self._stream.wait_event(mark.event)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)


class CudaDevice:
    """The GPU on which a group's tensors are."""

    def __init__(self, place: torch.device) -> None:
        self.place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.place).uuid)

    def here(self) -> CudaLane:
        return CudaLane(torch.cuda.current_stream(self.place))

    def new_lane(self) -> CudaLane:
        # Of high priority: a copy that is ready goes before kernels of the backward pass that are queued.
        return CudaLane(torch.cuda.Stream(self.place, priority=-1))  # type: ignore[no-untyped-call]

    def buffer(self, num_bytes: int) -> Tensor:
        with torch.cuda.device(self.place):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def inside_host(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> NcclHost:
        return NcclHost(store, rank, size, timeout, name)

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def future_devices(self) -> list[torch.device]:
        return [self.place]

    def run_thread(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self.place), torch.no_grad():
            work()

    def close(self) -> None:
        """Nothing to do: torch keeps streams for the next who asks."""


class NcclHost:
    """The GPUs of one host, as a group of NCCL's. Its operations join the stream that is current."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        from torch.distributed import ProcessGroupNCCL  # not in builds without NCCL

        options: Any = ProcessGroupNCCL.Options()
        options._timeout = timeout * _NCCL_PATIENCE
        options.group_name = name
        group: Any = ProcessGroupNCCL(store, rank, size, options)
        self._group = group
        # torch 2.11 to 2.14 have the old names only
        self._scatter = getattr(self._group, "reduce_scatter_single", None) or group._reduce_scatter_base
        self._gather = getattr(self._group, "all_gather_single", None) or group._allgather_base

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        options = ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        self._scatter(output, input, options).wait()  # the current stream waits, not the processor

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self._gather(output, input, AllgatherOptions()).wait()

    def abort(self, reason: str) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Leave in order, unless it was aborted."""
        if self._group is not None:
            self._group.shutdown()
