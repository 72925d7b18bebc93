"""Implements the process group of ``init_process_group("shoal")``: torch's collectives on the engine.

A method for each of torch's: it checks the tensors, has :class:`CollectiveBuilder` build operations, and
submits them. torch calls several methods by an old or a new name, depending on its version; both are defined
here. A missing one would not raise: FSDP2 would bypass the engine.
"""

# torch's stubs of ProcessGroup differ between its versions and lack methods that only some have.
# mypy: disable-error-code="override, assignment, misc"

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
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
    PrefixStore,
    ProcessGroup,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
    Work,
)
from torch.distributed import distributed_c10d

from shoal.comm import BACKEND_NAME, native_group
from shoal.comm.collectives import (
    DEVICES,
    UNSET_TIMEOUT,
    CollectiveBuilder,
    check_tensors,
    limit_s,
    options_of,
    seconds_of,
    single_tensor,
)
from shoal.comm.device_group import DeviceGroup
from shoal.comm.devices import Device
from shoal.comm.engine import (
    CollectiveEngine,
    CommError,
    EngineOptions,
    Operation,
    Peer,
    SingleProcessEngine,
)
from shoal.comm.messages import MessageBuilder
from shoal.comm.operations import Member, Operations
from shoal.comm.rendezvous import connect_engine
from shoal.comm.sparse import SparseParts
from shoal.comm.store import monitored_barrier
from shoal.comm.work import BaseWork, JoinedWork, opaque_to_dynamo
from shoal.errors import UsageError

_CPU = torch.device("cpu")
_HANDLE_BYTES = 8
_ACCELERATOR_BACKENDS = ("nccl", "xccl", "ucc", "mpi")


def create_group(backend_options: Any, options: Any) -> Any:
    """Create the process group that torch asks for: the C++ backend, or a ``ShoalProcessGroup`` without it.

    Args:
        backend_options: torch's ``DistributedBackendOptions``.
        options: the caller's ``pg_options``.

    Raises:
        CommError: a rank did not come in time.
        UsageError: the options have another type, another backend was asked for as well, or an environment
            variable is wrong.
    """
    if native_group.load() is None:
        refuse_other_backends(backend_options)
    if not isinstance(options, EngineOptions | None):
        raise UsageError(
            f"pg_options is {type(options).__name__}; backend shoal takes shoal.comm.engine.EngineOptions, "
            "the same on all ranks, or nothing"
        )
    group = ShoalProcessGroup(
        backend_options.store,
        backend_options.group_rank,
        backend_options.group_size,
        backend_options.timeout,
        backend_options.group_id,
        list(backend_options.global_ranks_in_group) or list(range(backend_options.group_size)),
        options,
        awaits_members=getattr(backend_options, "enable_reconfigure", False),  # torch 2.14
    )
    return native_group.wrap(group)


def _connected(
    store: Store,
    rank: int,
    size: int,
    name: str,
    global_rank: int,
    timeout: timedelta,
    options: EngineOptions,
    *,
    returning: Sequence[Peer] | None = None,
) -> CollectiveEngine:
    if size == 1:
        return SingleProcessEngine()
    return connect_engine(store, rank, size, name, global_rank, timeout, options, returning=returning)


def _rank_of(handle: str) -> int:
    """Return the rank that a process had in the group when it was made.

    Raises:
        UsageError: it is no handle of a group of this backend.
    """
    rank, _, token = handle.partition("-")
    if not rank.isdecimal() or len(token) != 2 * _HANDLE_BYTES:
        raise UsageError(f"reconfigure: {handle!r} is no handle of backend {BACKEND_NAME}")
    return int(rank)


def _device_of(operation: Operation) -> torch.device | None:
    """Return the device of an operation's tensors; ``None`` if it has none."""
    tensors = [operation.source] if operation.source is not None else operation.memory
    return tensors[-1].device if tensors else None


def _open_cuda(device: torch.device) -> Device:
    from shoal.comm.cuda_device import CudaDevice

    return CudaDevice(device)


class _FalsyDevices(list[torch.device]):
    """A group's devices, as a list that is false.

    torch's flight recorder attaches only to groups with a C++ backend and raises for others, but skips a
    group where ``not group._device_types``. All other code of torch iterates over the list.
    """

    def __bool__(self) -> bool:
        return False


@opaque_to_dynamo
class ShoalProcessGroup(ProcessGroup):
    """A process group of backend ``"shoal"``. Collectives do not block; each returns a ``Work``.

    Its members may change: :meth:`reconfigure`.

    Attributes:
        engine: of CPU tensors; it announces the collectives on others.
        operations: submits to the engine, and keeps operations that are in flight.
        devices: makes the device of tensors that pass through staging, by device type.
        device_groups: the collectives on each of these devices.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_reconfigure = True

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_ranks: list[int],
        options: EngineOptions | None = None,
        *,
        awaits_members: bool = False,
    ) -> None:
        super().__init__(rank, size)
        self._name, self._description = name, "undefined"
        self._global_ranks, self.store = global_ranks, store
        self._handle = f"{global_ranks[rank]}-{secrets.token_hex(_HANDLE_BYTES)}"
        self._uuids: set[int] = set()
        self._peers: dict[str, Peer] = {}  # that this process has met, by handle
        self.devices: dict[str, Callable[[torch.device], Device]] = {"cuda": _open_cuda}
        self._coalescing: list[BaseWork] | None = None
        options = options or EngineOptions()
        if awaits_members:
            engine: CollectiveEngine = SingleProcessEngine()
            engine.abort(f"group {name} has no members yet: call torch.distributed._reconfigure first")
        else:
            engine = _connected(store, rank, size, name, global_ranks[rank], timeout, options)
        self._join(store, rank, size, timeout, engine, options)

    def _join(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        engine: CollectiveEngine,
        options: EngineOptions,
    ) -> None:
        """Use an engine, which is connected to that of each rank."""
        self.engine = engine
        self.member = Member(
            store=store, rank=rank, size=size, name=self._name, global_rank=self._global_ranks[rank],
            engine=engine, options=options,
        )  # fmt: skip
        self._build = CollectiveBuilder(rank, size)
        self.operations = Operations(self.member, timeout)
        self.device_groups: dict[torch.device, DeviceGroup] = {}
        self._opening = threading.Lock()
        self._splits = self._num_monitored = 0

    # ---- members ------------------------------------------------------------------------------------------

    def get_reconfigure_handle(self) -> str:
        """Return the string by which :meth:`reconfigure` knows this process, the same for its whole life."""
        return self._handle

    def reconfigure(self, options: Any) -> Work:
        """Go on with other members; each of them calls it. Connections to those that stay are kept.

        Works in flight fail. If it raises, the former members remain, and another try may follow.

        Args:
            options: torch's ``ReconfigureOptions``: a ``uuid`` that no attempt has had; the ``handles``
                of all members, as a list by rank or as a set, which is ordered by their first ranks; the
                ``timeout`` for their arrival, by default the group's.

        Returns:
            A work that has ended.

        Raises:
            CommError: a member did not come in time, or the uuid was used before.
            UsageError: this process is not among the members, or one is named twice.
        """
        handles, rank = self._ranked(options.handles)
        uuid, limit = int(options.uuid), options.timeout or self.operations.timeout
        store = PrefixStore(f"reconfigure/{uuid}/", self.store)
        if uuid in self._uuids or store.add(f"attempts/{rank}", 1) > 1:
            raise CommError(
                f"group {self._name}: uuid {uuid} was already used; take a new one for each attempt"
            )
        self._uuids.add(uuid)
        old, size = self.operations, len(handles)
        global_ranks = [_rank_of(each) for each in handles]
        engine = _connected(
            store, rank, size, f"{self._name}/{uuid}", global_ranks[rank], limit, self.member.options,
            returning=[self._peers[each] for each in handles if each in self._peers],
        )  # fmt: skip
        self._global_ranks = global_ranks
        self._peers.update(zip(handles, engine.peers, strict=False))
        self._join(store, rank, size, old.timeout, engine, self.member.options)
        old.close()
        return JoinedWork([], None)

    def _ranked(self, handles: set[str] | list[str]) -> tuple[list[str], int]:
        """Return the handles by rank, and the rank of this process."""
        ranked = (
            handles if isinstance(handles, list) else sorted(handles, key=lambda each: (_rank_of(each), each))
        )
        if len(set(ranked)) < len(ranked) or self._handle not in ranked:
            raise UsageError(
                f"reconfigure of group {self._name}: handles are {', '.join(ranked) or 'missing'}; they must "
                f"be different, and this process's, {self._handle}, among them"
            )
        return ranked, ranked.index(self._handle)

    # ---- submission ---------------------------------------------------------------------------------------

    def _submit(self, operations: Sequence[Operation], result: Any = None) -> BaseWork:
        """Submit operations; several are one work with this result."""
        works = [self._submit_one(operation) for operation in operations]
        return works[0] if len(works) == 1 else JoinedWork(works, result)

    def _submit_one(self, operation: Operation, device: torch.device | None = None) -> BaseWork:
        if operation.timeout_s <= 0:
            operation.timeout_s = seconds_of(self.operations.timeout)
        if device is None:
            device = _device_of(operation)
        device_group = None if device is None else self._device_group(device)
        if device_group is not None:
            return self._coalesced(
                device_group.submit(operation, begin=self._begin, idle=self.operations.idle)
            )
        self._check_first()
        return self._coalesced(self.operations.submit(operation))

    def _begin(self, operation: Operation) -> int:
        self._check_first()
        return self.operations.begin(operation)

    def _check_first(self) -> None:
        if self.engine.num_submitted == 0:
            refuse_mixed_configuration(self)

    def _coalesced(self, work: BaseWork) -> BaseWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _device_group(self, device: torch.device) -> DeviceGroup | None:
        """Return the collectives on tensors of a device; ``None`` if the group's engine takes them."""
        if device.type not in self.devices:
            return None
        with self._opening:
            if device not in self.device_groups:
                self.device_groups[device] = self._open_device(device)
            return self.device_groups[device]

    def _open_device(self, device: torch.device) -> DeviceGroup:
        if self.operations.is_closed:
            raise CommError(f"collective on {device}: this process group has been shut down; make a new one")
        store = PrefixStore(f"device/{len(self.device_groups)}/", self.member.store)
        opened = self.devices[device.type](device)
        group = DeviceGroup(opened, self.member, store, self.operations.timeout)
        self.operations.resources.callback(group.stop)
        self.operations.after_engine.callback(group.release)
        return group

    # ---- collectives of the engine ------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        (tensor,), opts = single_tensor(tensors, "all_reduce"), options_of(opts, AllreduceOptions, timeout)
        if tensor.layout == torch.sparse_coo and tensor.device.type == "cpu":
            return self._sparse_all_reduce(tensor, opts)
        check_tensors([tensor], "all_reduce")
        return self._submit(self._build.reduce([tensor], opts))

    def _sparse_all_reduce(self, tensor: Tensor, opts: Any) -> Work:
        """Sum sparse tensors. Waits until all ranks have sent their numbers of elements."""
        parts = SparseParts(tensor, opts.reduceOp)
        self._submit(self._build.all_gather([parts.sizes(self.member.size)], [parts.size], opts)).wait()
        return self._submit(
            self._build.all_gather_list(parts.rows(), parts.packed, opts, parts.add_up, [tensor])
        )

    def reduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        (tensor,), opts = single_tensor(tensors, "reduce"), options_of(opts, ReduceOptions, timeout)
        check_tensors([tensor], "reduce")
        return self._submit(self._build.reduce([tensor], opts, root=opts.rootRank))

    def all_reduce_with_priority(self, tensor: Tensor, priority: int) -> Work:
        """Sum a tensor in place, with a priority over other queued operations.

        Args:
            tensor: as in ``all_reduce``.
            priority: higher priorities are sent first; rank 0's apply to all ranks. Operations with priority
                0, as all other collectives have, are not queued behind any. The bits of the result do not
                depend on it. Where ranks share a host, operations are sent in the order of the calls.
        """
        check_tensors([tensor], "all_reduce")
        return self._submit(self._build.reduce([tensor], AllreduceOptions(), priority=priority))

    def submit(self, operation: Operation, device: torch.device = _CPU) -> Work:
        """Submit an operation on weights that servers keep, for ``train.servers.tensors``.

        Args:
            operation: its memory; see :attr:`Operation.served`.
            device: of the weights. All operations of a model take the way of their device, so that servers
                get them in one order.
        """
        return self._submit_one(operation, device)

    def carries(self, device: torch.device) -> bool:
        """Return whether tensors of a device pass through this group."""
        return device.type == "cpu" or device.type in self.devices

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = options_of(opts, AllreduceCoalescedOptions)
        check_tensors(tensors, "all_reduce_coalesced")
        return self._submit(self._build.reduce(list(tensors), opts), tensors)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        (tensor,), opts = single_tensor(tensors, "broadcast"), options_of(opts, BroadcastOptions, timeout)
        check_tensors([tensor], "broadcast")
        return self._submit(self._build.broadcast(tensor, opts))

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        if outputs and isinstance(outputs[0], Tensor):  # all_gather(list, tensor)
            outputs = [outputs]
        (tensor,), opts = single_tensor(inputs, "all_gather"), options_of(opts, AllgatherOptions, timeout)
        check_tensors([tensor, *outputs[0]], "all_gather")
        return self._submit(self._build.all_gather_list(list(outputs[0]), tensor, opts))

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        opts = options_of(opts, AllgatherOptions, timeout)
        check_tensors([output, input], "all_gather_into_tensor")
        return self._submit(self._build.all_gather([output], [input], opts))

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = options_of(opts, AllgatherOptions)
        check_tensors([*outputs, *inputs], "all_gather_into_tensor_coalesced")
        return self._submit(self._build.all_gather(list(outputs), list(inputs), opts))

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = options_of(opts, AllgatherOptions)
        check_tensors([*inputs, *itertools.chain(*output_lists)], "all_gather_coalesced")
        return self._submit(
            self._build.all_gather_lists([list(each) for each in output_lists], list(inputs), opts)
        )

    def reduce_scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        if input_lists and isinstance(input_lists[0], Tensor):  # reduce_scatter(tensor, list)
            input_lists = [input_lists]
        (output,) = single_tensor(outputs, "reduce_scatter")
        opts = options_of(opts, ReduceScatterOptions, timeout)
        check_tensors([output, *input_lists[0]], "reduce_scatter")
        return self._submit(self._build.reduce_scatter_list(output, list(input_lists[0]), opts))

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        opts = options_of(opts, ReduceScatterOptions, timeout)
        check_tensors([output, input], "reduce_scatter_tensor")
        return self._submit(self._build.reduce_scatter([output], [input], opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = options_of(opts, ReduceScatterOptions)
        check_tensors([*outputs, *inputs], "reduce_scatter_tensor_coalesced")
        return self._submit(self._build.reduce_scatter(list(outputs), list(inputs), opts), outputs)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        opts = options_of(opts, BarrierOptions, timeout)
        return self._submit([Operation(kind="barrier", timeout_s=limit_s(opts.timeout), result=[])])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 names the ranks that did not come.

        Raises:
            CommError: on rank 0, ranks are missing; on other ranks, rank 0 did not answer.
        """
        self._num_monitored += 1
        member, limit = self.member, self.operations.timeout if timeout in (None, UNSET_TIMEOUT) else timeout
        monitored_barrier(member.store, self._num_monitored, member.rank, member.size, limit, wait_all_ranks)

    # ---- messages -----------------------------------------------------------------------------------------

    @property
    def _message(self) -> MessageBuilder:
        """Builds operations by messages; not kept, or this group would refer to itself."""
        return MessageBuilder(self.member.rank, self.member.size)

    def gather(
        self, output_lists: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        opts = options_of(opts, GatherOptions, timeout)
        check_tensors([*inputs, *itertools.chain(*output_lists)], "gather")
        return self._submit_one(self._message.gather(output_lists, inputs, opts))

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        opts = options_of(opts, GatherOptions)
        check_tensors([input, *([output] if opts.rootRank == self.member.rank else [])], "gather_into_tensor")
        return self._submit_one(self._message.gather_rows(output, input, opts))

    def scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        opts = options_of(opts, ScatterOptions, timeout)
        check_tensors([*outputs, *itertools.chain(*input_lists)], "scatter")
        return self._submit_one(self._message.scatter(outputs, input_lists, opts))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        check_tensors([*outputs, *inputs], "all_to_all")
        return self._submit_one(self._message.all_to_all(outputs, inputs, options_of(opts, AllToAllOptions)))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Work:
        opts = options_of(opts, AllToAllOptions)
        check_tensors([output, input], "all_to_all_single")
        return self._submit_one(
            self._message.all_to_all_single(output, input, output_sizes, input_sizes, opts)
        )

    def send(self, tensors: list[Tensor], to: int, tag: int, timeout: timedelta | None = None) -> BaseWork:
        """Send a tensor to a rank; the group's timeout is the default."""
        check_tensors(tensors, "send")
        limit = timeout or self.operations.timeout
        return self._submit_message(self._message.send(tensors, to, tag, limit))

    def recv(
        self, tensors: list[Tensor], source: int | None, tag: int, timeout: timedelta | None = None
    ) -> BaseWork:
        """Receive a tensor of a rank, or of any for ``None``; the group's timeout is the default."""
        check_tensors(tensors, "recv")
        limit = timeout or self.operations.timeout
        return self._submit_message(self._message.recv(tensors, source, tag, limit))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> BaseWork:
        return self.recv(tensors, None, tag)

    def _submit_message(self, operation: Operation) -> BaseWork:
        device = _device_of(operation)
        if device is None or (group := self._device_group(device)) is None:
            return self._coalesced(self.operations.submit_message(operation))
        return self._coalesced(group.submit_message(operation, self.operations.idle))

    def start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalescing = []

    def end_coalescing(self, device: torch.device | None = None) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return JoinedWork(works, [])

    # ---- the group ----------------------------------------------------------------------------------------

    def split_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, opts: Any = None,
        group_name: str | None = None, group_desc: str | None = None, device_types: Any = None,
    ) -> ShoalProcessGroup | None:  # fmt: skip
        """Return a group of the given ranks of this group, or ``None`` on other ranks."""
        ranks = list(ranks)
        if self.member.rank not in ranks:
            return None
        self._splits += 1
        name = group_name or f"{self._name}:split:{self._splits}:{'-'.join(map(str, ranks))}"
        subgroup = ShoalProcessGroup(
            PrefixStore(f"{name}/", self.member.store), ranks.index(self.member.rank), len(ranks),
            timeout or self.operations.timeout, name, [self._global_ranks[rank] for rank in ranks],
        )  # fmt: skip
        if group_desc is not None:
            subgroup.setGroupDesc(group_desc)
        return subgroup

    def duplicate(self) -> ShoalProcessGroup:
        """Return a new group of the same ranks and options, for another thread; all ranks call it."""
        group = distributed_c10d.new_group(
            self._global_ranks, backend=BACKEND_NAME, pg_options=self.member.options,
            use_local_synchronization=True,
        )  # fmt: skip
        duplicated: ShoalProcessGroup = native_group.python_group(group)
        return duplicated

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: a group is connected on construction."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a subgroup take no part in its construction."""

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def getRank(self) -> int:
        return self.member.rank

    def getSize(self) -> int:
        return self.member.size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def get_group_store(self) -> Store:
        return self.member.store

    @property
    def _device_types(self) -> list[torch.device]:
        return _FalsyDevices([_CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])])

    def _get_backend(self, device: torch.device) -> ShoalProcessGroup:
        """Return this group, which is its own backend.

        Raises:
            UsageError: the device is not one of :data:`DEVICES`.
        """
        if torch.device(device).type not in DEVICES:
            raise UsageError(f"backend shoal serves {', '.join(DEVICES)} tensors, and {device} was asked for")
        return self

    def getSequenceNumberForGroup(self) -> int:
        return self.engine.num_submitted

    def setSequenceNumberForGroup(self) -> None:
        """Do nothing: every group starts at 0."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations that have none of their own."""
        self.operations.timeout = timeout

    def abort(self) -> None:
        """Fail all pending operations here and on all other ranks of the group."""
        if not self.operations.is_closed:
            self.engine.abort(f"rank {self.member.rank} of group {self._name} aborted it")

    def shutdown(self) -> None:
        """Leave the group. Other ranks are not affected unless they wait for this rank.

        A group that is garbage-collected without it is shut down shortly after.
        """
        self.operations.close()

    # names that torch 2.11 to 2.14 call, and its wrappers
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
    recvAnysource = recv_anysource
    get_backend = _get_backend
    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing
    _get_sequence_number_for_group = getSequenceNumberForGroup
    _set_sequence_number_for_group = setSequenceNumberForGroup
    _set_default_timeout = set_timeout


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
                f"the backend of this group mixes {BACKEND_NAME} and {name}; {BACKEND_NAME}'s process group "
                f"in Python has all tensors, and {name} would not be used: let the one in C++ be built (the "
                f'log says why it was not), write "{BACKEND_NAME}" for CPU and CUDA tensors, or make two '
                f'groups, init_process_group("{name}") and new_group(backend="{BACKEND_NAME}")'
            )
