"""The process group behind ``init_process_group("shoal")``: torch's collectives on top of the engine.

torch calls several of these methods under an old and a new name, by its version; both are defined here. A name
that was missing would not fail: FSDP2 would go around the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm import BACKEND_NAME, operands
from shoal.comm.bootstrap import connect_engine, local_address
from shoal.comm.delegate import DelegatedWork, InnerGloo, MessageWork
from shoal.comm.engine import CommError, Engine
from shoal.comm.fused import Fused
from shoal.comm.lone import LoneEngine
from shoal.comm.monitored import monitored_barrier
from shoal.comm.work import Completer, EngineWork, JoinedWork
from shoal.errors import UsageError

_UNSET = timedelta(0)
_CPU = torch.device("cpu")


def create_group(meeting: Any, options: Any) -> ShoalProcessGroup:
    """Make the process group that torch asks for; ``meeting`` is its ``DistributedBackendOptions``.

    Raises:
        CommError: a rank did not come in time.
        UsageError: options were given (there are none), or an environment variable is wrong.
    """
    if options is not None:
        raise UsageError(
            f"pg_options is {type(options).__name__}; backend shoal has no options: leave it out (the environment "
            "variables SHOAL_HELPERS, SHOAL_INTERFACE and SHOAL_SECRET configure it)"
        )
    ranks = list(meeting.global_ranks_in_group) or list(range(meeting.group_size))
    return ShoalProcessGroup(
        meeting.store, meeting.group_rank, meeting.group_size, meeting.timeout, meeting.group_id, ranks
    )


class _Devices(list[torch.device]):
    """The devices of a group, with which torch's flight recorder leaves the group alone.

    It can only attach to a group with a C++ backend, and would raise. It takes a group for one without when
    ``not group._device_types``; all other code of torch looks into the list.
    """

    def __bool__(self) -> bool:
        return False


class ShoalProcessGroup(dist.ProcessGroup):
    """One group of ranks with an engine of its own. Methods return at once, with a ``Work``."""

    supports_splitting = True
    supports_coalescing = False

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, global_ranks: list[int]
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._name, self._description = name, "undefined"
        self._global_ranks = global_ranks
        self.engine: Engine | LoneEngine
        if size == 1:
            self.engine, address = LoneEngine(), "127.0.0.1"
        else:
            self.engine = connect_engine(store, rank, size, name, global_ranks[rank], timeout)
            address = local_address(store)
        self.inner = InnerGloo(store, rank, size, address, timeout, self.engine.error)
        self._completer = Completer(self.engine.watch, self.engine.next_watched)
        self._pending: dict[int, EngineWork] = {}
        self._sequence = 0
        self._splits = 0
        self._closed = False
        self._fused = Fused(self._submit, rank, size)
        self._coalescing: list[dist.Work] | None = None

    # ---- what works ask of their group --------------------------------------------------------------------

    def is_done(self, handle: int) -> bool:
        return self.engine.is_done(handle)

    def wait_once(self, handle: int, timeout_s: float) -> bool:
        if self.engine.wait(handle, timeout_s):
            return True
        if timeout_s > 0:
            self.inner.join_if_wanted()
        return False

    def forget(self, handle: int) -> None:
        self._pending.pop(handle, None)

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
    ) -> EngineWork:
        """Give the engine an operation on two blocks of memory, which stay alive until it is done."""
        if self._closed:
            raise CommError(f"{kind}: this process group has been shut down; make a new one")
        handle = self.engine.submit(
            kind,
            input=input.data_ptr(),
            output=output.data_ptr(),
            count=count,
            dtype=dtype,
            op=op,
            root=root,
            shape=shape,
            timeout_s=self._limit(timeout).total_seconds(),
        )
        self._sequence += 1
        work = EngineWork(self, handle, kind, result, (input, output), finish)
        self._pending[handle] = work
        # A work that nobody waits for is settled here, at the latest when the group ends.
        for oldest in list(itertools.islice(self._pending.values(), 2)):
            if oldest is not work:
                oldest.is_completed()
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _limit(self, timeout: timedelta) -> timedelta:
        return timeout if timeout > _UNSET else self._timeout

    # ---- collectives of the engine ------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta = _UNSET) -> dist.Work:
        (tensor,), opts = _one(tensors, "all_reduce"), _options(opts, dist.AllreduceOptions, timeout)
        if tensor.layout == torch.sparse_coo and tensor.device.type == "cpu":
            return self._delegate("sparse_all_reduce", lambda g: g.allreduce([tensor], opts), [tensor], opts)
        return self._reduce("all_reduce", tensor, opts, 0)

    def reduce(self, tensors: Any, opts: Any = None, timeout: timedelta = _UNSET) -> dist.Work:
        (tensor,), opts = _one(tensors, "reduce"), _options(opts, dist.ReduceOptions, timeout)
        return self._reduce("reduce", tensor, opts, opts.rootRank)

    def _reduce(self, kind: str, tensor: Tensor, opts: Any, root: int) -> dist.Work:
        operands.check_cpu([tensor], kind)
        op = operands.reduction(opts.reduceOp, tensor)
        output, finish = operands.destination(tensor)
        if kind == "reduce" and root != self._rank:
            finish = None
        source = operands.block(tensor)
        if op.factor is not None:
            source = source * op.factor
        input, dtype = operands.numbers(source)
        output, _ = operands.numbers(output)
        return self._submit(
            kind, input, output, input.numel(), dtype,
            op=op.name, root=root, shape=tensor.shape, timeout=opts.timeout, result=[tensor], finish=finish,
        )  # fmt: skip

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = _options(opts, dist.AllreduceCoalescedOptions)
        operands.check_cpu(tensors, "all_reduce_coalesced")
        return self._fused.all_reduce(list(tensors), opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta = _UNSET) -> dist.Work:
        (tensor,) = _one(tensors, "broadcast")
        root, opts = (opts, None) if isinstance(opts, int) else (None, opts)
        opts = _options(opts, dist.BroadcastOptions, timeout)
        operands.check_cpu([tensor], "broadcast")
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

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta = _UNSET
    ) -> dist.Work:
        if outputs and isinstance(outputs[0], Tensor):  # all_gather(list, tensor)
            outputs = [outputs]
        (tensor,), opts = (
            _one(inputs, "all_gather"),
            _options(opts, torch._C._distributed_c10d.AllgatherOptions, timeout),
        )
        operands.check_cpu([tensor, *outputs[0]], "all_gather")
        return self._fused.all_gather_list(list(outputs[0]), tensor, opts)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta = _UNSET
    ) -> dist.Work:
        opts = _options(opts, torch._C._distributed_c10d.AllgatherOptions, timeout)
        operands.check_cpu([output, input], "all_gather_into_tensor")
        return self._fused.all_gather([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(opts, torch._C._distributed_c10d.AllgatherOptions)
        operands.check_cpu([*outputs, *inputs], "all_gather_into_tensor_coalesced")
        return self._fused.all_gather(list(outputs), list(inputs), opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(opts, torch._C._distributed_c10d.AllgatherOptions)
        operands.check_cpu([*inputs, *itertools.chain(*output_lists)], "all_gather_coalesced")
        return self._fused.all_gather_lists([list(outputs) for outputs in output_lists], list(inputs), opts)

    def reduce_scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta = _UNSET
    ) -> dist.Work:
        if input_lists and isinstance(input_lists[0], Tensor):  # reduce_scatter(tensor, list)
            input_lists = [input_lists]
        (output,), opts = _one(outputs, "reduce_scatter"), _options(opts, dist.ReduceScatterOptions, timeout)
        operands.check_cpu([output, *input_lists[0]], "reduce_scatter")
        return self._fused.reduce_scatter_list(output, list(input_lists[0]), opts)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta = _UNSET
    ) -> dist.Work:
        opts = _options(opts, dist.ReduceScatterOptions, timeout)
        operands.check_cpu([output, input], "reduce_scatter_tensor")
        return self._fused.reduce_scatter([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(opts, dist.ReduceScatterOptions)
        operands.check_cpu([*outputs, *inputs], "reduce_scatter_tensor_coalesced")
        return self._fused.reduce_scatter(list(outputs), list(inputs), opts)

    def barrier(self, opts: Any = None, timeout: timedelta = _UNSET) -> dist.Work:
        opts = _options(opts, dist.BarrierOptions, timeout)
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._submit("barrier", nothing, nothing, 0, "uint8", timeout=opts.timeout, result=[])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier after which rank 0 names the ranks that did not come.

        Raises:
            CommError: ranks are missing, which rank 0 names; on the others: rank 0 did not answer.
        """
        self._sequence += 1
        limit = self._timeout if timeout is None else self._limit(timeout)
        monitored_barrier(self._store, self._sequence, self._rank, self._size, limit, wait_all_ranks)

    # ---- delegated to the inner group ---------------------------------------------------------------------

    def _delegate(
        self, name: str, start: Callable[[dist.ProcessGroupGloo], dist.Work], tensors: Sequence[Tensor], opts: Any,
        *, root: int = 0, shape: Sequence[int] = (), result: Any = None,
    ) -> dist.Work:  # fmt: skip
        """Announce a collective through the engine and start it on the inner group."""
        if self._closed:
            raise CommError(f"{name}: this process group has been shut down; make a new one")
        if opts.timeout < _UNSET or opts.timeout == _UNSET:
            opts.timeout = self._timeout
        handle = self.engine.submit(
            "delegated", input=0, output=0, count=0, dtype="uint8", op=name, root=root, shape=shape,
            timeout_s=opts.timeout.total_seconds(),
        )  # fmt: skip
        self._sequence += 1
        work = start(self.inner.group())
        return DelegatedWork(self.inner, work, name, lambda: self.engine.finish_delegated(handle), result)

    def gather(
        self, output_lists: Any, inputs: Any, opts: Any = None, timeout: timedelta = _UNSET
    ) -> dist.Work:
        opts = _options(opts, dist.GatherOptions, timeout)
        operands.check_cpu([*inputs, *itertools.chain(*output_lists)], "gather")
        return self._delegate(
            "gather", lambda g: g.gather(output_lists, inputs, opts), inputs, opts,
            root=opts.rootRank, shape=inputs[0].shape,
        )  # fmt: skip

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = _options(opts, dist.GatherOptions)
        rows: list[list[Tensor]] = []
        if opts.rootRank == self._rank:
            self._fused.check_rows("gather_into_tensor", "output", output, "input", input)
            rows = [list(output.view(self._size, *input.shape).unbind())]
        return self.gather(rows, [input], opts)

    def scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta = _UNSET
    ) -> dist.Work:
        opts = _options(opts, dist.ScatterOptions, timeout)
        operands.check_cpu([*outputs, *itertools.chain(*input_lists)], "scatter")
        return self._delegate(
            "scatter", lambda g: g.scatter(outputs, input_lists, opts), outputs, opts,
            root=opts.rootRank, shape=outputs[0].shape,
        )  # fmt: skip

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = _options(opts, dist.AllToAllOptions)
        operands.check_cpu([*outputs, *inputs], "all_to_all")
        outputs, inputs = list(outputs), list(inputs)
        return self._delegate("all_to_all", lambda g: g.alltoall(outputs, inputs, opts), inputs, opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        opts = _options(opts, dist.AllToAllOptions)
        operands.check_cpu([output, input], "all_to_all_single")
        return self._delegate(
            "all_to_all_single",
            lambda g: g.alltoall_base(output, input, output_sizes, input_sizes, opts),
            [input], opts,
        )  # fmt: skip

    # Messages have no number in the group's sequence: only two ranks know of them.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> MessageWork:
        operands.check_cpu(tensors, "send")
        return self._message(to, lambda g: g.send(tensors, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> MessageWork:
        operands.check_cpu(tensors, "recv")
        return self._message(source, lambda g: g.recv(tensors, source, tag))

    def _message(self, peer: int, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> MessageWork:
        if not 0 <= peer < self._size or peer == self._rank:
            raise UsageError(
                f"a message between rank {self._rank} and rank {peer} of a group of {self._size}"
            )
        work = self.inner.start_when_ready(peer, start, self._timeout)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MessageWork:
        """Receive from whoever sends. gloo connects to all ranks for it, so each must have its inner group."""
        operands.check_cpu(tensors, "recv")
        group = self.inner.group()
        self.inner.want_all()
        for peer in range(self._size):
            if peer != self._rank:
                self.inner.until_ready(peer, self._timeout)
        work = MessageWork(self.inner, self._timeout)
        work.started(group.recv_anysource(tensors, tag))
        return work

    # ---- groups -------------------------------------------------------------------------------------------

    def split_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, opts: Any = None,
        group_name: str | None = None, group_desc: str | None = None, device_types: Any = None,
    ) -> ShoalProcessGroup | None:  # fmt: skip
        """Return a group of some of this group's ranks, or ``None`` if this rank is not among them."""
        ranks = list(ranks)
        if self._rank not in ranks:
            return None
        self._splits += 1
        name = group_name or f"{self._name}:split:{self._splits}:{'-'.join(map(str, ranks))}"
        part = ShoalProcessGroup(
            dist.PrefixStore(f"{name}/", self._store), ranks.index(self._rank), len(ranks),
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

    def end_coalescing(self, device: torch.device | None = None) -> dist.Work:
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

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return _Devices([_CPU])

    def _get_backend(self, device: torch.device) -> ShoalProcessGroup:
        """
        Raises:
            UsageError: a device that this backend does not serve.
        """
        if torch.device(device).type != "cpu":
            raise UsageError(f"backend shoal serves CPU tensors, and {device} was asked for; use nccl for it")
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
        """Leave the group. The others do not mind, unless they wait for this rank."""
        if self._closed:
            return
        for work in list(self._pending.values()):
            work.is_completed()
        self._closed = True
        self._completer.stop()
        self.inner.stop()
        self.engine.close()
        self._pending.clear()

    # the names that torch 2.11 to 2.14 call
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
    recvAnysource = recv_anysource


def _one(tensors: Any, name: str) -> list[Tensor]:
    """Return the list of the one tensor that each rank gives."""
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(found) != 1:
        raise UsageError(
            f"{name}: {len(found)} tensors; one a rank is possible (or the coalesced form, for many)"
        )
    return found


def _options(opts: Any, kind: type, timeout: timedelta = _UNSET) -> Any:
    """Return an options object: the given one, or one made from the short forms (an operation, a rank)."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if isinstance(opts, int):
        made.rootRank = opts
    elif opts is not None and hasattr(made, "reduceOp"):
        made.reduceOp = opts
    made.timeout = timeout
    return made
