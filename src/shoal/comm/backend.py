"""Implements the process group of ``init_process_group("shoal")``: torch's collectives on the engine.

torch calls several methods by an old or a new name, depending on its version; both are defined here. A
missing one would not raise: FSDP2 would bypass the engine.
"""

# torch's stubs of ProcessGroup differ between its versions and lack what only some have.
# mypy: disable-error-code="override, assignment, misc"

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from shoal.comm.coalescing import Coalescer, check_rows
from shoal.comm.engine import EngineOptions, Operation
from shoal.comm.gloo_fallback import GlooWork, PointToPointWork, Start
from shoal.comm.group import EngineGroup, refuse_other_backends
from shoal.comm.store import monitored_barrier
from shoal.comm.tensors import (
    CollectiveRequest,
    Finish,
    as_contiguous,
    as_movable,
    check_tensors,
    copy_back,
    options_of,
    output_buffer,
    single_tensor,
)
from shoal.comm.work import NO_TIMEOUT, opaque_to_dynamo
from shoal.errors import UsageError


def create_group(backend_options: Any, options: Any) -> ShoalProcessGroup:
    """Create the process group that torch asks for.

    Args:
        backend_options: torch's ``DistributedBackendOptions``.
        options: the caller's ``pg_options``.

    Raises:
        CommError: a rank did not come in time.
        UsageError: the options have another type, another backend was asked for as well, or an environment
            variable is wrong.
    """
    refuse_other_backends(backend_options)
    if not isinstance(options, EngineOptions | None):
        raise UsageError(
            f"pg_options is {type(options).__name__}; backend shoal takes shoal.comm.engine.EngineOptions, "
            "the same on all ranks, or nothing"
        )
    return ShoalProcessGroup(
        backend_options.store,
        backend_options.group_rank,
        backend_options.group_size,
        backend_options.timeout,
        backend_options.group_id,
        list(backend_options.global_ranks_in_group) or list(range(backend_options.group_size)),
        options,
    )


@opaque_to_dynamo
class ShoalProcessGroup(EngineGroup):
    """Collectives of the backend ``"shoal"``. They do not block; each returns a ``Work``."""

    @cached_property
    def _coalescer(self) -> Coalescer:
        return Coalescer(self._submit, self._rank, self._size)

    # ---- collectives of the engine ------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT) -> Work:
        (tensor,), opts = single_tensor(tensors, "all_reduce"), options_of(opts, AllreduceOptions, timeout)
        if tensor.layout == torch.sparse_coo and tensor.device.type == "cpu":
            return self._delegate("sparse_all_reduce", lambda g: g.allreduce([tensor], opts), opts)
        check_tensors([tensor], "all_reduce")
        return self._coalescer.reduce([tensor], opts)

    def reduce(self, tensors: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT) -> Work:
        (tensor,), opts = single_tensor(tensors, "reduce"), options_of(opts, ReduceOptions, timeout)
        check_tensors([tensor], "reduce")
        return self._coalescer.reduce([tensor], opts, root=opts.rootRank)

    def all_reduce_with_priority(self, tensor: Tensor, priority: int) -> Work:
        """Sum a tensor in place, with a priority over other queued operations.

        Args:
            tensor: as in ``all_reduce``.
            priority: higher priorities are sent first; rank 0's apply to all ranks. Operations with priority
            0,
                as all other collectives have, are not queued behind any. The bits of the result do not depend
                on it. Where ranks share a host, operations are sent in the order of the calls.
        """
        check_tensors([tensor], "all_reduce")
        return self._coalescer.reduce([tensor], options_of(None, AllreduceOptions), priority=priority)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = options_of(opts, AllreduceCoalescedOptions)
        check_tensors(tensors, "all_reduce_coalesced")
        return self._coalescer.reduce(list(tensors), opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT) -> Work:
        (tensor,) = single_tensor(tensors, "broadcast")
        opts = options_of(opts, BroadcastOptions, timeout)
        check_tensors([tensor], "broadcast")
        root = opts.rootRank
        output, finish = output_buffer(tensor)
        source = as_contiguous(tensor) if root == self._rank else output
        return self._submit(
            CollectiveRequest(
                kind="broadcast", input=as_movable(source), output=as_movable(output),
                root=root, shape=tensor.shape, timeout=opts.timeout, result=[tensor],
                finish=finish if root != self._rank else None,
            )
        )  # fmt: skip

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT) -> Work:
        if outputs and isinstance(outputs[0], Tensor):  # all_gather(list, tensor)
            outputs = [outputs]
        (tensor,), opts = single_tensor(inputs, "all_gather"), options_of(opts, AllgatherOptions, timeout)
        check_tensors([tensor, *outputs[0]], "all_gather")
        return self._coalescer.all_gather_list(list(outputs[0]), tensor, opts)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta = NO_TIMEOUT
    ) -> Work:
        opts = options_of(opts, AllgatherOptions, timeout)
        check_tensors([output, input], "all_gather_into_tensor")
        return self._coalescer.all_gather([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = options_of(opts, AllgatherOptions)
        check_tensors([*outputs, *inputs], "all_gather_into_tensor_coalesced")
        return self._coalescer.all_gather(list(outputs), list(inputs), opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = options_of(opts, AllgatherOptions)
        check_tensors([*inputs, *itertools.chain(*output_lists)], "all_gather_coalesced")
        return self._coalescer.all_gather_lists([list(each) for each in output_lists], list(inputs), opts)

    def reduce_scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT
    ) -> Work:
        if input_lists and isinstance(input_lists[0], Tensor):  # reduce_scatter(tensor, list)
            input_lists = [input_lists]
        (output,) = single_tensor(outputs, "reduce_scatter")
        opts = options_of(opts, ReduceScatterOptions, timeout)
        check_tensors([output, *input_lists[0]], "reduce_scatter")
        return self._coalescer.reduce_scatter_list(output, list(input_lists[0]), opts)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta = NO_TIMEOUT
    ) -> Work:
        opts = options_of(opts, ReduceScatterOptions, timeout)
        check_tensors([output, input], "reduce_scatter_tensor")
        return self._coalescer.reduce_scatter([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = options_of(opts, ReduceScatterOptions)
        check_tensors([*outputs, *inputs], "reduce_scatter_tensor_coalesced")
        return self._coalescer.reduce_scatter(list(outputs), list(inputs), opts)

    def barrier(self, opts: Any = None, timeout: timedelta = NO_TIMEOUT) -> Work:
        opts = options_of(opts, BarrierOptions, timeout)
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._submit(
            CollectiveRequest(kind="barrier", input=nothing, output=nothing, timeout=opts.timeout, result=[])
        )

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 names the ranks that did not come.

        Raises:
            CommError: on rank 0, ranks are missing; on other ranks, rank 0 did not answer.
        """
        self._sequence += 1
        limit = self._timeout if timeout is None else timeout
        monitored_barrier(self._store, self._sequence, self._rank, self._size, limit, wait_all_ranks)

    # ---- operations of the inner gloo group ---------------------------------------------------------------

    def _delegate(
        self, name: str, start: Start, opts: Any,
        *, root: int = 0, shape: Sequence[int] = (), num_bytes: int = 0, result: Any = None,
        finish: Finish | None = None,
    ) -> Work:  # fmt: skip
        """Announce a collective on the engine, which counts it, and start it on the inner group."""
        opts.timeout = self._limit(opts.timeout)
        timeout_s = opts.timeout.total_seconds()
        handle = self._begin(
            Operation(kind="delegated", op=name, root=root, count=num_bytes, shape=shape, timeout_s=timeout_s)
        )

        def on_end() -> None:
            self.engine.finish_delegated(handle)

        try:
            work = start(self.gloo.group())
        except Exception:
            on_end()
            raise
        return GlooWork(self.gloo, work, name, on_end, result, finish)

    def _gloo_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors for gloo to read: the given ones, or host copies of device tensors."""
        group = self._device_group(tensors[0].device) if tensors else None
        return list(tensors) if group is None else group.bounce_buffers.to_host(tensors)

    def _gloo_outputs(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Finish | None]:
        """Return tensors for gloo to write, and a function that copies them to the device, if needed."""
        group = self._device_group(tensors[0].device) if tensors else None
        return (list(tensors), None) if group is None else group.bounce_buffers.for_outputs(tensors)

    def gather(
        self, output_lists: Any, inputs: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT
    ) -> Work:
        opts = options_of(opts, GatherOptions, timeout)
        check_tensors([*inputs, *itertools.chain(*output_lists)], "gather")
        sources = self._gloo_inputs(inputs)
        targets = [self._gloo_outputs(outputs) for outputs in output_lists]
        finish = targets[0][1] if targets else None
        return self._delegate(
            "gather", lambda g: g.gather([target for target, _ in targets], sources, opts), opts,
            root=opts.rootRank, shape=inputs[0].shape, finish=finish, result=output_lists if finish else None,
        )  # fmt: skip

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        opts = options_of(opts, GatherOptions)
        rows: list[list[Tensor]] = []
        if opts.rootRank == self._rank:
            check_rows(self._size, "gather_into_tensor", "output", output, "input", input)
            rows = [list(output.view(self._size, *input.shape).unbind())]
        return self.gather(rows, [input], opts)

    def scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT
    ) -> Work:
        opts = options_of(opts, ScatterOptions, timeout)
        check_tensors([*outputs, *itertools.chain(*input_lists)], "scatter")
        sources = [self._gloo_inputs(inputs) for inputs in input_lists]
        targets, finish = self._gloo_outputs(outputs)
        return self._delegate(
            "scatter", lambda g: g.scatter(targets, sources, opts), opts,
            root=opts.rootRank, shape=outputs[0].shape, finish=finish, result=outputs if finish else None,
        )  # fmt: skip

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        opts = options_of(opts, AllToAllOptions)
        check_tensors([*outputs, *inputs], "all_to_all")
        outputs, sizes = list(outputs), [output.numel() for output in outputs]
        source = torch.cat([as_contiguous(tensor).view(-1) for tensor in self._gloo_inputs(inputs)])
        target = torch.empty(sum(sizes), dtype=source.dtype)  # gloo takes no lists
        targets, to_device = self._gloo_outputs(outputs)
        unpack = copy_back(targets, target)

        def finish() -> None:
            unpack()
            if to_device is not None:
                to_device()

        return self._delegate(
            "all_to_all",
            lambda g: g.alltoall_base(target, source, sizes, [tensor.numel() for tensor in inputs], opts),
            opts, result=outputs, finish=finish,
        )  # fmt: skip

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Work:
        opts = options_of(opts, AllToAllOptions)
        check_tensors([output, input], "all_to_all_single")
        (source,), ((target,), finish) = self._gloo_inputs([input]), self._gloo_outputs([output])
        return self._delegate(
            "all_to_all_single",
            lambda g: g.alltoall_base(target, source, output_sizes, input_sizes, opts),
            opts, num_bytes=input.numel() * input.element_size(), finish=finish,
            result=[output] if finish else None,
        )  # fmt: skip

    # Point-to-point operations have no number in the group's sequence: only two ranks take part.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> PointToPointWork:
        check_tensors(tensors, "send")
        sources = self._gloo_inputs(tensors)
        return self._message(to, lambda g: g.send(sources, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> PointToPointWork:
        check_tensors(tensors, "recv")
        targets, finish = self._gloo_outputs(tensors)
        return self._message(source, lambda g: g.recv(targets, source, tag), finish)

    def _message(self, peer: int, start: Start, finish: Finish | None = None) -> PointToPointWork:
        if not 0 <= peer < self._size or peer == self._rank:
            raise UsageError(
                f"a message between rank {self._rank} and rank {peer} of a group of {self._size}"
            )
        work = self.gloo.message(peer, start, finish)
        self._coalesced(work)
        return work

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> PointToPointWork:
        """Receive from any rank. gloo connects to all ranks for it, so all create their inner group."""
        check_tensors(tensors, "recv")
        group = self.gloo.connect_all()
        targets, finish = self._gloo_outputs(tensors)
        work = PointToPointWork(self.gloo, self._timeout, finish)
        work.started(group.recv_anysource(targets, tag))
        return work

    # names that torch 2.11 to 2.14 call
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
    recvAnysource = recv_anysource
