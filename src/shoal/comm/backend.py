"""The process group behind ``init_process_group("shoal")``: torch's collectives on top of the engine.

torch calls several of these methods by an old or a new name, according to its version; both are defined here.
A missing one would not fail: FSDP2 would go around the engine.
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
    BarrierOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
    Work,
)

from shoal.comm import operands
from shoal.comm.delegating import DelegatingGroup
from shoal.comm.engine import EngineOptions
from shoal.comm.fused import Fused
from shoal.comm.monitored import monitored_barrier
from shoal.comm.operands import one, options_of
from shoal.comm.untraced import untraced
from shoal.comm.work import NO_TIMEOUT
from shoal.errors import UsageError


def create_group(meeting: Any, options: Any) -> ShoalProcessGroup:
    """Make the process group that torch asks for; ``meeting`` is its ``DistributedBackendOptions``.

    Raises:
        CommError: a rank did not come in time.
        UsageError: the options are not ours, or an environment variable is wrong.
    """
    if not isinstance(options, EngineOptions | None):
        raise UsageError(
            f"pg_options is {type(options).__name__}; backend shoal takes shoal.comm.engine.EngineOptions, "
            "the same on all ranks, or nothing"
        )
    ranks = list(meeting.global_ranks_in_group) or list(range(meeting.group_size))
    return ShoalProcessGroup(
        meeting.store,
        meeting.group_rank,
        meeting.group_size,
        meeting.timeout,
        meeting.group_id,
        ranks,
        options,
    )


@untraced
class ShoalProcessGroup(DelegatingGroup):
    """A group whose collectives run on the engine. They return at once, with a ``Work``."""

    @cached_property
    def _fused(self) -> Fused:
        return Fused(self._submit, self._rank, self._size)

    # ---- collectives of the engine ------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT) -> Work:
        (tensor,), opts = one(tensors, "all_reduce"), options_of(opts, AllreduceOptions, timeout)
        if tensor.layout == torch.sparse_coo and tensor.device.type == "cpu":
            return self._delegate("sparse_all_reduce", lambda g: g.allreduce([tensor], opts), opts)
        return self._reduce("all_reduce", tensor, opts, 0)

    def reduce(self, tensors: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT) -> Work:
        (tensor,), opts = one(tensors, "reduce"), options_of(opts, ReduceOptions, timeout)
        return self._reduce("reduce", tensor, opts, opts.rootRank)

    def all_reduce_with_priority(self, tensor: Tensor, priority: int) -> Work:
        """Begin to sum a tensor in place. Of what waits to be sent, higher priorities go first.

        Rank 0's priorities decide for all. Other collectives have priority 0, which is no place in that
        order: they go at once. The bits do not depend on it. Where workers share a host, all keep the order
        of the calls.
        """
        return self._reduce("all_reduce", tensor, options_of(None, AllreduceOptions), 0, priority)

    def _reduce(self, kind: str, tensor: Tensor, opts: Any, root: int, priority: int = 0) -> Work:
        operands.check([tensor], kind)
        op = operands.reduction(opts.reduceOp, tensor)
        output, finish = operands.destination(tensor)
        if kind == "reduce" and root != self._rank:
            finish = None
        else:
            finish = op.after(output, self._size, finish)
        input, dtype = operands.numbers(op.before(operands.block(tensor)))
        output, _ = operands.numbers(output)
        return self._submit(
            kind, input, output, input.numel(), dtype,
            op=op.name, root=root, shape=tensor.shape, timeout=opts.timeout, result=[tensor], finish=finish,
            priority=priority,
        )  # fmt: skip

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = options_of(opts, AllreduceCoalescedOptions)
        operands.check(tensors, "all_reduce_coalesced")
        return self._fused.all_reduce(list(tensors), opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT) -> Work:
        (tensor,) = one(tensors, "broadcast")
        root, opts = (opts, None) if isinstance(opts, int) else (None, opts)
        opts = options_of(opts, BroadcastOptions, timeout)
        operands.check([tensor], "broadcast")
        root = opts.rootRank if root is None else root
        output, finish = operands.destination(tensor)
        source = operands.block(tensor) if root == self._rank else output
        input, dtype = operands.plain(source)
        output, _ = operands.plain(output)
        return self._submit(
            "broadcast", input, output, input.numel(), dtype,
            root=root, shape=tensor.shape, timeout=opts.timeout, result=[tensor],
            finish=finish if root != self._rank else None,
        )  # fmt: skip

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT) -> Work:
        if outputs and isinstance(outputs[0], Tensor):  # all_gather(list, tensor)
            outputs = [outputs]
        (tensor,), opts = one(inputs, "all_gather"), options_of(opts, AllgatherOptions, timeout)
        operands.check([tensor, *outputs[0]], "all_gather")
        return self._fused.all_gather_list(list(outputs[0]), tensor, opts)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta = NO_TIMEOUT
    ) -> Work:
        opts = options_of(opts, AllgatherOptions, timeout)
        operands.check([output, input], "all_gather_into_tensor")
        return self._fused.all_gather([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = options_of(opts, AllgatherOptions)
        operands.check([*outputs, *inputs], "all_gather_into_tensor_coalesced")
        return self._fused.all_gather(list(outputs), list(inputs), opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = options_of(opts, AllgatherOptions)
        operands.check([*inputs, *itertools.chain(*output_lists)], "all_gather_coalesced")
        return self._fused.all_gather_lists([list(outputs) for outputs in output_lists], list(inputs), opts)

    def reduce_scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT
    ) -> Work:
        if input_lists and isinstance(input_lists[0], Tensor):  # reduce_scatter(tensor, list)
            input_lists = [input_lists]
        (output,), opts = one(outputs, "reduce_scatter"), options_of(opts, ReduceScatterOptions, timeout)
        operands.check([output, *input_lists[0]], "reduce_scatter")
        return self._fused.reduce_scatter_list(output, list(input_lists[0]), opts)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta = NO_TIMEOUT
    ) -> Work:
        opts = options_of(opts, ReduceScatterOptions, timeout)
        operands.check([output, input], "reduce_scatter_tensor")
        return self._fused.reduce_scatter([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = options_of(opts, ReduceScatterOptions)
        operands.check([*outputs, *inputs], "reduce_scatter_tensor_coalesced")
        return self._fused.reduce_scatter(list(outputs), list(inputs), opts)

    def barrier(self, opts: Any = None, timeout: timedelta = NO_TIMEOUT) -> Work:
        opts = options_of(opts, BarrierOptions, timeout)
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._submit("barrier", nothing, nothing, 0, "uint8", timeout=opts.timeout, result=[])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier after which rank 0 names the ranks that did not come.

        Raises:
            CommError: ranks are missing, which rank 0 names; on the others: rank 0 did not answer.
        """
        self._sequence += 1
        limit = self._timeout if timeout is None else timeout
        monitored_barrier(self._store, self._sequence, self._rank, self._size, limit, wait_all_ranks)

    # the names that torch 2.11 to 2.14 call
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
