"""Assigns the tensors of a checkpoint to workers for saving, and their chunks to readers for loading.

The planners of ``torch.distributed.checkpoint`` (DCP) do it: replicated tensors are distributed over the
workers by size, each shard of a DTensor is stored by one worker, and a reader with another number of workers
or another sharding reads the boxes that overlap its own. DCP's storage is not used, because it pickles.
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
from shoal.train.checkpoint_files import DTYPE_NAMES, DTYPES, Chunk, StoredTensor, WrittenFile, write_file
from shoal.train.world import all_gather_json

Layout = list[dict[str, Any]]
"""The tensors and shards that a worker holds, one entry each, in JSON values."""


class StagingBuffer:
    """Memory with the layout of a safetensors file's data, and a view per tensor.

    Wide types come first, which aligns the views. GPUs copy into ``pinned`` memory asynchronously.
    """

    def __init__(self, shapes: dict[str, tuple[torch.dtype, torch.Size]], *, pinned: bool) -> None:
        num_bytes = {key: dtype.itemsize * shape.numel() for key, (dtype, shape) in shapes.items()}
        self._data = torch.empty(sum(num_bytes.values()), dtype=torch.uint8, pin_memory=pinned)
        self.views: dict[str, Tensor] = {}
        table: dict[str, dict[str, Any]] = {}
        end = 0
        for key, (dtype, shape) in sorted(shapes.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
            begin, end = end, end + num_bytes[key]
            self.views[key] = self._data[begin:end].view(dtype).view(shape)
            table[key] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
        header = json.dumps(table).encode()
        header = header.ljust(-(-len(header) // 8) * 8)
        self._header = len(header).to_bytes(8, "little") + header

    def write(self, path: Path) -> WrittenFile:
        """Write the buffer as a safetensors file.

        Raises:
            ShoalError: the file cannot be written.
        """
        return write_file(path, [self._header, self._data.numpy().data])


class SavePart:
    """The save plan of this worker with its staging buffer, reused while the layout of the state is the same.

    A collective: all workers construct one together.

    Attributes:
        tensors: the stored tensors of all workers.
        differs: whether workers hold tensors of different names, such as stages of a model; the same on all.
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
            _key(item): (data.properties.dtype, data.chunk.sizes) for item, data in _tensor_items(plans[rank])
        }
        self.buffer = StagingBuffer(shapes, pinned=self._on_device)

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this worker's part into the buffer, after which the tensors may change."""
        planner = _save_planner(tensors)
        for key, index in self._items.items():
            self.buffer.views[key].copy_(planner.lookup_object(index), non_blocking=True)
        if self._on_device:
            torch.accelerator.synchronize()


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout of this worker's tensors: the replicated ones, and its shards of the others.

    Raises:
        ShoalError: a tensor has an element type that safetensors cannot store.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ShoalError(f"{name} is of type {tensor.dtype}, which a checkpoint cannot store")
    return [
        {
            "name": item.index.fqn,
            "kind": item.type.name,
            "dtype": DTYPE_NAMES[data.properties.dtype],
            "size": list(data.size),
            "offsets": list(data.chunk.offsets),
            "sizes": list(data.chunk.sizes),
        }
        for item, data in _tensor_items(_save_planner(tensors).create_local_plan())
    ]


def read_tensors(path: Path, stored: Mapping[str, StoredTensor], targets: dict[str, Tensor]) -> None:
    """Fill ``targets`` (tensors or DTensors) from the files of the checkpoint at ``path``.

    Raises:
        ShoalError: a file cannot be read.
    """
    metadata = Metadata({name: _tensor_metadata(tensor) for name, tensor in stored.items()})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
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


def _save_planner(tensors: Mapping[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    return planner


def _tensor_items(plan: SavePlan) -> list[tuple[WriteItem, TensorWriteData]]:
    return [(item, item.tensor_data) for item in plan.items if item.tensor_data is not None]


def _key(item: WriteItem) -> str:
    if item.type != WriteItemType.SHARD or item.index.offset is None:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, item.index.offset))}"


def _without_overlaps(layouts: list[Layout]) -> list[Layout]:
    """Drop the shards of tensors that some worker holds unsharded.

    A tied weight is not sharded on a worker whose stages share it, but may be where one stage has it.
    """
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
            properties=TensorProperties(dtype=DTYPES[entry["dtype"]]),
            size=torch.Size(entry["size"]),
        ),
    )


def _stored_tensors(plans: list[SavePlan]) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for rank, plan in enumerate(plans):
        for item, data in _tensor_items(plan):
            chunk = Chunk(
                offsets=tuple(data.chunk.offsets),
                sizes=tuple(data.chunk.sizes),
                file=f"worker-{rank:05}.safetensors",
                key=_key(item),
            )
            before = stored.get(item.index.fqn)
            stored[item.index.fqn] = StoredTensor(
                dtype=DTYPE_NAMES[data.properties.dtype],
                size=tuple(data.size),
                chunks=(*before.chunks, chunk) if before else (chunk,),
            )
    return stored


def _tensor_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
        size=torch.Size(tensor.size),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in tensor.chunks
        ],
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
