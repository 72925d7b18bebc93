"""The collectives and messages that go to the inner gloo group."""

# torch's stubs of ProcessGroup differ between its versions and lack what only some have.
# mypy: disable-error-code="override, assignment, misc"

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, GatherOptions, ScatterOptions, Work

from shoal.comm import operands
from shoal.comm.delegated import DelegatedWork
from shoal.comm.engine import Operation
from shoal.comm.fused import check_rows
from shoal.comm.group import EngineGroup
from shoal.comm.inner import Start
from shoal.comm.messages import MessageWork
from shoal.comm.operands import Finish, options_of
from shoal.comm.untraced import untraced
from shoal.comm.work import NO_TIMEOUT
from shoal.errors import UsageError


@untraced
class DelegatingGroup(EngineGroup):
    """A group whose rarer collectives run on gloo, announced through the engine."""

    # ---- delegated to the inner group ---------------------------------------------------------------------

    def _delegate(
        self, name: str, start: Start, opts: Any,
        *, root: int = 0, shape: Sequence[int] = (), num_bytes: int = 0, result: Any = None,
        finish: Finish | None = None,
    ) -> Work:  # fmt: skip
        """Announce a collective through the engine, which counts it, and start it on the inner group."""
        opts.timeout = self._limit(opts.timeout)
        timeout_s = opts.timeout.total_seconds()
        handle = self._begin(
            Operation(kind="delegated", op=name, root=root, count=num_bytes, shape=shape, timeout_s=timeout_s)
        )

        def end() -> None:
            self.engine.finish_delegated(handle)

        try:
            work = start(self.inner.group())
        except Exception:
            end()
            raise
        return DelegatedWork(self.inner, work, name, end, result, finish)

    def _given(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors for gloo to read: these, or copies in the host's memory."""
        side = self._side(tensors[0].device) if tensors else None
        return list(tensors) if side is None else side.aside.given(tensors)

    def _room(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Finish | None]:
        """Return tensors for gloo to write: these, or others and what then copies them to the device."""
        side = self._side(tensors[0].device) if tensors else None
        return (list(tensors), None) if side is None else side.aside.room(tensors)

    def gather(
        self, output_lists: Any, inputs: Any, opts: Any = None, timeout: timedelta = NO_TIMEOUT
    ) -> Work:
        opts = options_of(opts, GatherOptions, timeout)
        operands.check([*inputs, *itertools.chain(*output_lists)], "gather")
        given = self._given(inputs)
        rooms = [self._room(outputs) for outputs in output_lists]
        finish = rooms[0][1] if rooms else None
        return self._delegate(
            "gather", lambda g: g.gather([room for room, _ in rooms], given, opts), opts,
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
        operands.check([*outputs, *itertools.chain(*input_lists)], "scatter")
        given = [self._given(inputs) for inputs in input_lists]
        room, finish = self._room(outputs)
        return self._delegate(
            "scatter", lambda g: g.scatter(room, given, opts), opts,
            root=opts.rootRank, shape=outputs[0].shape, finish=finish, result=outputs if finish else None,
        )  # fmt: skip

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        opts = options_of(opts, AllToAllOptions)
        operands.check([*outputs, *inputs], "all_to_all")
        outputs, sizes = list(outputs), [output.numel() for output in outputs]
        source = torch.cat([operands.block(tensor).view(-1) for tensor in self._given(inputs)])
        target = torch.empty(sum(sizes), dtype=source.dtype)  # gloo takes no lists
        room, bring = self._room(outputs)
        copy = operands.copy_back(room, target)

        def finish() -> None:
            copy()
            if bring is not None:
                bring()

        return self._delegate(
            "all_to_all",
            lambda g: g.alltoall_base(target, source, sizes, [tensor.numel() for tensor in inputs], opts),
            opts, result=outputs, finish=finish,
        )  # fmt: skip

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Work:
        opts = options_of(opts, AllToAllOptions)
        operands.check([output, input], "all_to_all_single")
        (given,), ((room,), finish) = self._given([input]), self._room([output])
        return self._delegate(
            "all_to_all_single",
            lambda g: g.alltoall_base(room, given, output_sizes, input_sizes, opts),
            opts, num_bytes=input.numel() * input.element_size(), finish=finish,
            result=[output] if finish else None,
        )  # fmt: skip

    # Messages have no number in the group's sequence: only two ranks know of them.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> MessageWork:
        operands.check(tensors, "send")
        given = self._given(tensors)
        return self._message(to, lambda g: g.send(given, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> MessageWork:
        operands.check(tensors, "recv")
        room, finish = self._room(tensors)
        return self._message(source, lambda g: g.recv(room, source, tag), finish)

    def _message(self, peer: int, start: Start, finish: Finish | None = None) -> MessageWork:
        if not 0 <= peer < self._size or peer == self._rank:
            raise UsageError(
                f"a message between rank {self._rank} and rank {peer} of a group of {self._size}"
            )
        work = self._messages.start(peer, start, self._timeout, finish)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MessageWork:
        """Receive from whoever sends. gloo connects to all ranks for it: each must have its inner group."""
        operands.check(tensors, "recv")
        group = self.inner.group()
        self.inner.want_all()
        for peer in range(self._size):
            if peer != self._rank:
                self.inner.until_ready(peer, self._timeout)
        room, finish = self._room(tensors)
        work = MessageWork(self.inner, self._timeout, finish)
        work.started(group.recv_anysource(room, tag))
        return work

    # other names of the same
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
    recvAnysource = recv_anysource
