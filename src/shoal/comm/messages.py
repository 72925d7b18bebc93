"""Builds the operations that are messages between two ranks: all_to_all, gather, scatter, send and recv.

Each rank gives a *block* for each other one: an address and a number of elements, on the host or on a device
(``device_group``). A tensor that is not contiguous is copied first, and results are copied back. Sizes may
differ between pairs of ranks, and may be zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import (
    ENGINE_DTYPES,
    Finish,
    as_contiguous,
    as_movable,
    check_rows,
    limit_s,
    output_buffer,
    seconds_of,
    single_tensor,
)
from shoal.comm.engine import Operation
from shoal.errors import UsageError


@dataclass(frozen=True)
class MessageBuilder:
    """Builds the operations of one rank.

    Args:
        rank: of this process in the group.
        size: number of ranks.
    """

    rank: int
    size: int

    def gather(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Operation:
        """Copy each rank's tensor to the root, whose list has one per rank."""
        (input,), outputs = single_tensor(inputs, "gather"), list(itertools.chain(*output_lists))
        self._check_list("gather", "output", outputs, input, opts.rootRank)
        (source,), (targets, finish) = self._inputs([input]), self._outputs(outputs)
        return self._operation(
            "gather", opts, root=opts.rootRank, shape=input.shape, sources=[source], targets=targets,
            finish=finish, result=list(output_lists), outputs=_blocks(targets),
            input=source.data_ptr(), count=source.numel(),
        )  # fmt: skip

    def gather_rows(self, output: Tensor, input: Tensor, opts: Any) -> Operation:
        """Copy each rank's tensor into a row of the root's output."""
        if opts.rootRank != self.rank:
            return self.gather([], [input], opts)
        check_rows(self.size, "gather_into_tensor", "output", output, "input", input)
        return self.gather([list(output.view(self.size, *input.shape).unbind())], [input], opts)

    def scatter(
        self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any
    ) -> Operation:
        """Copy a tensor of the root's list to each rank."""
        (output,), inputs = single_tensor(outputs, "scatter"), list(itertools.chain(*input_lists))
        self._check_list("scatter", "input", inputs, output, opts.rootRank)
        sources, ((target,), finish) = self._inputs(inputs), self._outputs([output])
        return self._operation(
            "scatter", opts, root=opts.rootRank, shape=output.shape, sources=sources, targets=[target],
            finish=finish, result=[output], inputs=_blocks(sources), output=target.data_ptr(),
            count=target.numel(),
        )  # fmt: skip

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Operation:
        """Copy tensor r of each rank to rank r."""
        for name, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self.size:
                raise UsageError(
                    f"all_to_all: {len(tensors)} {name} tensors for {self.size} ranks; give one per rank"
                )
        sources, (targets, finish) = self._inputs(inputs), self._outputs(outputs)
        return self._all_to_all(
            sources, targets, opts, [sum(each.numel() for each in inputs)], list(outputs), finish
        )

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> Operation:
        """Copy part r of each rank's tensor to rank r; sizes count along the first dimension."""
        input_parts = self._parts("input", input, input_sizes)
        output_parts = self._parts("output", output, output_sizes)
        (source,), ((target,), finish) = self._inputs([input]), self._outputs([output])
        return self._all_to_all(
            _split(source, input_parts), _split(target, output_parts), opts, input.shape, [output], finish
        )

    def send(self, tensors: Sequence[Tensor], to: int, tag: int, timeout: timedelta) -> Operation:
        """Send a tensor to a rank."""
        self._check_peer(to)
        (tensor,) = single_tensor(tensors, "send")
        (source,) = self._inputs([tensor])
        return Operation(
            kind="send", root=to, tag=tag, shape=tensor.shape, timeout_s=seconds_of(timeout),
            memory=[source], result=[], **_memory(source),
        )  # fmt: skip

    def recv(self, tensors: Sequence[Tensor], source: int | None, tag: int, timeout: timedelta) -> Operation:
        """Receive a tensor of a rank, or of any for ``None``; the first of ``memory`` gets its number."""
        if source is not None:
            self._check_peer(source)
        (tensor,), rank = single_tensor(tensors, "recv"), torch.full((1,), -1, dtype=torch.int32)
        (target,), finish = self._outputs([tensor])
        return Operation(
            kind="recv", root=-1 if source is None else source, tag=tag, shape=tensor.shape,
            timeout_s=seconds_of(timeout), output=target.data_ptr(), count=target.numel(),
            dtype=ENGINE_DTYPES[target.dtype], source_rank=rank.data_ptr(), memory=[rank, target],
            result=[tensor], finish=finish,
        )  # fmt: skip

    # ---- parts --------------------------------------------------------------------------------------------

    def _all_to_all(
        self,
        sources: list[Tensor],
        targets: list[Tensor],
        opts: Any,
        shape: Sequence[int],
        result: list[Tensor],
        finish: Finish | None,
    ) -> Operation:
        return self._operation(
            "all_to_all", opts, shape=shape, sources=sources, targets=targets, finish=finish, result=result,
            inputs=_blocks(sources), outputs=_blocks(targets), count=sum(each.numel() for each in sources),
        )  # fmt: skip

    def _operation(
        self, kind: str, opts: Any, *, sources: list[Tensor], targets: list[Tensor], **fields: Any
    ) -> Operation:
        dtypes = {each.dtype for each in (*sources, *targets)}
        if len(dtypes) > 1:
            raise UsageError(
                f"{kind} of tensors of {', '.join(map(str, dtypes))}; all dtypes must be the same"
            )
        return Operation(
            kind=kind, dtype=ENGINE_DTYPES[dtypes.pop()], timeout_s=limit_s(opts.timeout),
            memory=[*sources, *targets], **fields,
        )  # fmt: skip

    def _inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors' elements as the engine reads them: flat and contiguous."""
        return [as_movable(as_contiguous(tensor)) for tensor in tensors]

    def _outputs(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Finish | None]:
        """Return memory for the engine to write, and a function that copies it to the tensors, if needed."""
        buffers, steps = zip(*map(output_buffer, tensors), strict=True) if tensors else ((), ())
        steps = tuple(step for step in steps if step is not None)

        def copy_all() -> None:
            for step in steps:
                step()

        return [as_movable(buffer) for buffer in buffers], copy_all if steps else None

    def _parts(self, name: str, tensor: Tensor, sizes: list[int]) -> list[int]:
        """Return the elements of each rank's part of a tensor whose first dimension is split."""
        rows = tensor.shape[0] if tensor.dim() else -1
        if not sizes and rows % self.size == 0:
            sizes = [rows // self.size] * self.size
        if len(sizes) != self.size or sum(sizes) != rows or min(sizes) < 0:
            raise UsageError(
                f"all_to_all_single: the {name} has shape {tuple(tensor.shape)} and the split sizes "
                f"{sizes or 'of equal parts'}; give {self.size} sizes (one per rank of the group) that add "
                "up to its first dimension, or none where that is a multiple of it"
            )
        return [size * tensor.numel() // rows if rows else 0 for size in sizes]

    def _check_list(
        self, name: str, listed: str, tensors: Sequence[Tensor], alone: Tensor, root: int
    ) -> None:
        """Check that the root has a tensor per rank, its own as large as the one it gives or takes."""
        expected = self.size if root == self.rank else 0
        if len(tensors) != expected:
            raise UsageError(
                f"{name}: {len(tensors)} {listed} tensors on rank {self.rank} of {self.size}, root is rank "
                f"{root}; the root has one per rank, the others none"
            )
        if tensors and tensors[self.rank].numel() != alone.numel():
            raise UsageError(
                f"{name}: the root's own {listed} has shape {tuple(tensors[self.rank].shape)}, its tensor "
                f"{tuple(alone.shape)}; they must have as many elements"
            )

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise UsageError(f"a message between rank {self.rank} and rank {peer} of a group of {self.size}")


def _memory(source: Tensor) -> dict[str, Any]:
    return {"input": source.data_ptr(), "count": source.numel(), "dtype": ENGINE_DTYPES[source.dtype]}


def _blocks(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]


def _split(flat: Tensor, counts: list[int]) -> list[Tensor]:
    """Return consecutive parts of a flat tensor, whose elements may be bytes of the counted ones."""
    scale = flat.numel() // max(sum(counts), 1)
    return list(torch.split(flat, [count * scale for count in counts]))
