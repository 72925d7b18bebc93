"""Which worker stores which part of which tensor, and who reads what back.

The planners of ``torch.distributed.checkpoint`` (DCP) decide: replicated tensors are shared out among the
workers by size, each shard of a DTensor is stored by one worker, and a reader with another number of workers,
or another sharding, gets the boxes that overlap its own. Only DCP's transport is not used: it pickles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from shoal.errors import ShoalError
from shoal.train.checkpoint_files import Chunk, StoredTensor, WrittenFile, write_file
from shoal.train.checkpoint_state import SavedTensor
from shoal.train.world import all_gather_json

# The element types of safetensors 0.5 and newer
_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

Layout = list[dict[str, Any]]
"""One entry for each piece that a worker holds; values that JSON can hold."""


class StagingBuffer:
    """Memory laid out as the data part of one safetensors file, with a view for every tensor in it.

    Wide types come first, so that each view is aligned. A device copies into ``pinned`` memory directly.
    """

    def __init__(self, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], *, pinned: bool) -> None:
        ordered = sorted(shapes, key=lambda key: (-shapes[key][0].itemsize, key))
        offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for key in ordered:
            dtype, shape = shapes[key]
            begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
            offsets[key] = (begin, end)
        self._data = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        self.views: dict[str, Tensor] = {
            key: self._data[begin:end].view(shapes[key][0]).view(shapes[key][1])
            for key, (begin, end) in offsets.items()
        }
        header = json.dumps(
            {
                key: {"dtype": _DTYPE_NAMES[shapes[key][0]], "shape": shapes[key][1], "data_offsets": span}
                for key, span in offsets.items()
            }
        ).encode()
        header = header.ljust(-(-len(header) // 8) * 8)
        self._header = len(header).to_bytes(8, "little") + header

    def write(self, path: Path) -> WrittenFile:
        """Write the file at ``path`` to the disk.

        Raises:
            ShoalError: it cannot be written.
        """
        return write_file(path, [self._header, self._data.numpy().data])


class SavePart:
    """This worker's part of every save of one layout, with the memory to stage it in.

    ``differs`` says, alike on all workers, whether they hold tensors of different names: stages of a model.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], layout: Layout, group: dist.ProcessGroup | None, rank: int
    ) -> None:
        self.layout = layout
        self.file = f"worker-{rank:05}.safetensors"
        planner = _save_planner(tensors)
        layouts = all_gather_json(group, layout)
        self.differs = len({frozenset(entry["name"] for entry in other) for other in layouts}) > 1
        plans = [SavePlan([_write_item(entry) for entry in other]) for other in _without_overlaps(layouts)]
        plans, _ = planner.create_global_plan(plans)
        self.tensors = _stored_tensors(plans)
        self._items = {_key(item): item.index for item in plans[rank].items}
        self._on_device = any(tensor.device.type != "cpu" for tensor in tensors.values())
        shapes = {
            _key(item): (data.properties.dtype, tuple(data.chunk.sizes))
            for item in plans[rank].items
            if (data := item.tensor_data) is not None
        }
        self.buffer = StagingBuffer(shapes, pinned=self._on_device)

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this worker's part into its buffer; on return the tensors may change."""
        planner = _save_planner(tensors)
        for key, index in self._items.items():
            self.buffer.views[key].copy_(planner.lookup_object(index), non_blocking=True)
        if self._on_device:
            torch.accelerator.synchronize()


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return what this worker holds: every replicated tensor, and its own shards of the others.

    Raises:
        ShoalError: a tensor has an element type that safetensors cannot store.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise ShoalError(f"{name} is of type {tensor.dtype}, which a checkpoint cannot store")
    return [
        {
            "name": item.index.fqn,
            "kind": item.type.name,
            "dtype": _DTYPE_NAMES[data.properties.dtype],
            "size": list(data.size),
            "offsets": list(data.chunk.offsets),
            "sizes": list(data.chunk.sizes),
        }
        for item in _save_planner(tensors).create_local_plan().items
        if (data := item.tensor_data) is not None
    ]


def read_tensors(path: Path, stored: Mapping[str, StoredTensor], targets: dict[str, Tensor]) -> None:
    """Fill ``targets`` (plain tensors or DTensors) from the files of the checkpoint at ``path``.

    Raises:
        ShoalError: a file cannot be read.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), _metadata(stored), is_coordinator=True)
    chunk_at = {
        MetadataIndex(name, chunk.offsets): chunk
        for name, tensor in stored.items()
        for chunk in tensor.chunks
    }
    by_file: dict[str, list[tuple[str, ReadItem]]] = {}
    for item in planner.create_local_plan().items:
        chunk = chunk_at[item.storage_index]
        by_file.setdefault(chunk.file, []).append((chunk.key, item))
    for name, wanted in by_file.items():
        try:
            with safe_open(path / name, framework="pt") as file:
                for key, item in wanted:
                    _read_box(file, key, item, planner)
        except (OSError, RuntimeError) as error:
            raise ShoalError(f"cannot read {path / name}: {error}") from error


def saved_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, SavedTensor]:
    return {name: SavedTensor(size=t.size, dtype=_DTYPES[t.dtype]) for name, t in stored.items()}


def _save_planner(tensors: Mapping[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    return planner


def _key(item: WriteItem) -> str:
    if item.type != WriteItemType.SHARD or item.index.offset is None:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, item.index.offset))}"


def _without_overlaps(layouts: list[Layout]) -> list[Layout]:
    """Leave out the shards of tensors that some worker holds whole: a tied weight that one worker's stages
    share is not sharded there, and may be where a single stage has it."""
    whole = {entry["name"] for layout in layouts for entry in layout if entry["sizes"] == entry["size"]}
    return [
        [entry for entry in layout if entry["name"] not in whole or entry["sizes"] == entry["size"]]
        for layout in layouts
    ]


def _write_item(entry: Mapping[str, Any]) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(entry["offsets"]), sizes=torch.Size(entry["sizes"]))
    return WriteItem(
        index=MetadataIndex(entry["name"], entry["offsets"]),
        type=WriteItemType[entry["kind"]],
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=_DTYPES[entry["dtype"]]),
            size=torch.Size(entry["size"]),
        ),
    )


def _stored_tensors(plans: list[SavePlan]) -> dict[str, StoredTensor]:
    chunks: dict[str, list[Chunk]] = {}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if (data := item.tensor_data) is None:
                continue
            name = item.index.fqn
            shapes[name] = (_DTYPE_NAMES[data.properties.dtype], tuple(data.size))
            chunk = Chunk(
                offsets=tuple(data.chunk.offsets),
                sizes=tuple(data.chunk.sizes),
                file=f"worker-{rank:05}.safetensors",
                key=_key(item),
            )
            chunks.setdefault(name, []).append(chunk)
    return {
        name: StoredTensor(dtype=dtype, size=size, chunks=tuple(chunks[name]))
        for name, (dtype, size) in shapes.items()
    }


def _metadata(stored: Mapping[str, StoredTensor]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=_DTYPES[tensor.dtype]),
                size=torch.Size(tensor.size),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                    for chunk in tensor.chunks
                ],
            )
            for name, tensor in stored.items()
        }
    )


@torch.no_grad()
def _read_box(file: Any, key: str, item: ReadItem, planner: DefaultLoadPlanner) -> None:
    target = planner.resolve_tensor(item)
    if target.dim() == 0:
        target.copy_(file.get_tensor(key))
        return
    box = tuple(
        slice(begin, begin + length) for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
    target.copy_(file.get_slice(key)[box])
