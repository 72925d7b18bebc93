"""Implements the device interface for GPUs: CUDA streams and events; NCCL inside a host.

Nothing here blocks the CPU except an event's ``synchronize``, which only the thread that delivers calls.
Tensors of other streams are not recorded with the caching allocator: the code that queues a step keeps
them alive until a later event is reached.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions, Store
from torch.distributed import ReduceOp

from shoal.comm.engine import CommError
from shoal.comm.lane import Lane

_log = logging.getLogger(__name__)
_RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``."""

_OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "prod": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
}
_NCCL_TIMEOUT_FACTOR = 10
"""Multiple of the group's timeout: NCCL's watchdog kills the process; the engine reports first."""


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    def run(self, step: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            step()

    def wait_event(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)

    def record_event(self) -> torch.cuda.Event:
        # A thread that synchronizes with a blocking event sleeps instead of spinning.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class CudaDevice:
    """The GPU that holds a group's tensors."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.torch_device))

    def new_stream(self) -> CudaStream:
        # High priority: a copy that is ready runs before kernels of the backward pass that are already
        # queued.
        return CudaStream(torch.cuda.Stream(self.torch_device, priority=-1))  # type: ignore[no-untyped-call]

    def open_lane(
        self, to_host: CudaStream, to_device: CudaStream, num_buffers: int, buffer_bytes: int
    ) -> Lane:
        return Lane(
            runtime_library(), self.torch_device.index, to_host.handle, to_device.handle,
            num_buffers=num_buffers, buffer_bytes=buffer_bytes,
        )  # fmt: skip

    def intra_host_group(
        self, store: Store, rank: int, size: int, timeout: timedelta, name: str
    ) -> NcclIntraHostGroup:
        return NcclIntraHostGroup(store, rank, size, timeout, name)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def future_devices(self) -> list[torch.device]:
        return [self.torch_device]

    def run_thread(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self.torch_device), torch.no_grad():
            permit_captures()
            work()

    def close(self) -> None:
        """Do nothing: torch pools its streams."""


def runtime_library() -> str:
    """Return the name of CUDA's runtime that torch has loaded, such as ``libcudart.so.13``.

    Raises:
        CommError: torch was built without CUDA.
    """
    if torch.version.cuda is None:
        raise CommError("tensors of a GPU need a torch that was built with CUDA; install one (pytorch.org)")
    return f"libcudart.so.{torch.version.cuda.split('.')[0]}"


def permit_captures() -> None:
    """Allow this thread to wait for events and to allocate while another one captures a graph.

    By default (``capture_error_mode="global"``) these calls fail in every thread of the process and end the
    capture. torch's own threads for NCCL do the same.
    """
    mode = ctypes.c_int(_RELAXED)
    try:  # torch has loaded CUDA's runtime
        exchange = ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode
    except AttributeError:
        code = -1
    else:
        code = exchange(ctypes.byref(mode))
    if code:
        _log.warning(
            "graphs cannot be captured while collectives are under way, unless with "
            'capture_error_mode="thread_local" (cudaThreadExchangeStreamCaptureMode: error %d)',
            code,
        )


class NcclIntraHostGroup:
    """The GPUs of one host as an NCCL process group. Its collectives run on the current stream."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        from torch.distributed import ProcessGroupNCCL  # missing from builds without NCCL

        options: Any = ProcessGroupNCCL.Options()
        options._timeout = timeout * _NCCL_TIMEOUT_FACTOR
        options.group_name = name
        group: Any = ProcessGroupNCCL(store, rank, size, options)
        self._group = group
        # torch 2.11 to 2.14 have only the old names
        self._scatter = getattr(self._group, "reduce_scatter_single", None) or group._reduce_scatter_base
        self._gather = getattr(self._group, "all_gather_single", None) or group._allgather_base

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        options = ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        self._scatter(output, input, options).wait()  # blocks the current stream, not the CPU

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self._gather(output, input, AllgatherOptions()).wait()

    def abort(self, reason: str) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Shut the group down, unless it was aborted."""
        if self._group is not None:
            self._group.shutdown()
