"""Calls the lane of the C++ core (``csrc/device/lane.h``), which moves device tensors through the host."""

from __future__ import annotations

from shoal import native
from shoal.comm.collectives import ENGINE_DTYPES
from shoal.comm.engine import CollectiveEngine, CommError, Operation
from shoal.comm.routes import Route


class Lane:
    """Copies tensors to the host, submits them to engines and copies results back, on threads of its own.

    Args:
        library: CUDA's runtime, by file name or path. This process must have loaded it; nothing is loaded
            here.
        device: index of the device.
        to_host: handle of the stream of copies to the host.
        to_device: that of the copies back.
        num_buffers: pinned buffers at most.
        buffer_bytes: size of a buffer.

    Raises:
        CommError: the library is not loaded, or is not CUDA's runtime.
    """

    def __init__(
        self,
        library: str,
        device: int,
        to_host: int,
        to_device: int,
        *,
        num_buffers: int,
        buffer_bytes: int,
    ) -> None:
        try:
            self._core = native.core().Lane(library, device, to_host, to_device, num_buffers, buffer_bytes)
        except RuntimeError as error:
            raise CommError(f"tensors of a GPU need CUDA's functions: {error}") from error

    def begin(self, route: Route, columns: int, ready: int, timeout_s: float) -> int:
        """Begin to move a tensor, and return the number of the transfer. Does not block.

        Args:
            route: of the tensor, with an engine. The caller keeps it until device work that was queued before
                the end of the transfer has completed.
            columns: of a chunk.
            ready: handle of the event after which the source may be read; lives until the transfer has ended.
            timeout_s: deadline of the chunks.
        """
        assert route.engine is not None
        requested, (source_row, target_row) = route.operation, route.buffered_rows
        operation = requested
        if not requested.is_served:
            operation = Operation(
                kind=requested.kind, dtype=ENGINE_DTYPES[route.source.dtype], op=route.op, root=route.root,
                shape=requested.shape, priority=requested.priority,
            )  # fmt: skip
        source, target = (
            (table.data_ptr() if copied else 0, table.shape[0], first)
            for table, copied, first in (
                (route.source, route.sends, source_row),
                (route.target, route.receives, target_row),
            )
        )
        number: int = self._core.begin(
            route.engine.core, operation, source, target, route.rows, route.width, columns, ready, timeout_s
        )  # fmt: skip
        return number

    def begin_messages(
        self, engine: CollectiveEngine, operation: Operation, ready: int, timeout_s: float
    ) -> int:
        """Begin messages of tensors of the device, whose addresses the operation has; as :meth:`begin`.

        They travel whole, in a buffer of their own size.
        """
        number: int = self._core.begin_messages(engine.core, operation, ready, timeout_s)
        return number

    def next_ended(self, timeout_s: float) -> int | None:
        """Return a transfer that has ended, which :meth:`wait` then takes, or ``None``.

        It waits for ``timeout_s`` at most, and not after :meth:`stop`.
        """
        number: int | None = self._core.next_ended(timeout_s)
        return number

    def wait(self, number: int, timeout_s: float) -> bool:
        """Return whether a transfer has ended within ``timeout_s``: all copies back are queued.

        Raises:
            CommError: the engine's error.
            RuntimeError: a call of CUDA failed; it names the call and the code.
        """
        ended: bool = self._core.wait(number, timeout_s)
        return ended

    def counters(self) -> dict[str, int]:
        """Return chunks, copies and bytes of each direction, events, waits for events and sleeps in them."""
        return dict(self._core.counters())

    def stop(self) -> None:
        """Join the threads, once all transfers have ended."""
        self._core.stop()
