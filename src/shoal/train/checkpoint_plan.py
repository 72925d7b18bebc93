"""Assigns the tensors of a checkpoint to workers for saving, and their chunks to readers for loading.

Replicated tensors are distributed over the workers by size, and each shard of a DTensor is stored by one
worker. A reader with another number of workers or another sharding reads the boxes that overlap its own, as
the planner of ``torch.distributed.checkpoint`` (DCP) finds them. DCP's storage is not used: it pickles.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from shoal.errors import ShoalError
from shoal.optim.moments import local_box, local_part
from shoal.train.checkpoint_files import DTYPE_NAMES, DTYPES, Chunk, StoredTensor, WrittenFile, write_file
from shoal.train.world import all_gather_json

Layout = list[dict[str, Any]]
"""The tensors and shards that a worker holds, one entry each, in JSON values: the tensor's name, type and
size, the shard's offsets and sizes, and its key in the worker's file."""


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
        self.file = _file_of(rank)
        layouts = all_gather_json(group, layout)
        self.differs = len({frozenset(entry["name"] for entry in other) for other in layouts}) > 1
        parts = _assigned(layouts)
        self.tensors = _stored_tensors(parts)
        self._names = {entry["key"]: entry["name"] for entry in parts[rank]}
        self._on_device = any(tensor.device.type != "cpu" for tensor in tensors.values())
        shapes = {e["key"]: (DTYPES[e["dtype"]], torch.Size(e["sizes"])) for e in parts[rank]}
        self.buffer = StagingBuffer(shapes, pinned=self._on_device)

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this worker's part into the buffer, after which the tensors may change."""
        for key, name in self._names.items():
            self.buffer.views[key].copy_(local_part(tensors[name]), non_blocking=True)
        if self._on_device:
            torch.accelerator.synchronize()


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout of this worker's tensors: the replicated ones, and its shards of the others.

    Raises:
        ShoalError: a tensor has an element type that safetensors cannot store.
    """
    layout: Layout = []
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ShoalError(f"{name} is of type {tensor.dtype}, which a checkpoint cannot store")
        box = local_box(tensor)
        offsets = [side.start for side in box]
        layout.append(
            {
                "name": name,
                "key": f"{name}@{','.join(map(str, offsets))}" if isinstance(tensor, DTensor) else name,
                "dtype": DTYPE_NAMES[tensor.dtype],
                "size": list(tensor.shape),
                "offsets": offsets,
                "sizes": [side.stop - side.start for side in box],
            }
        )
    return layout


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


def _file_of(rank: int) -> str:
    return f"worker-{rank:05}.safetensors"


def _assigned(layouts: list[Layout]) -> list[Layout]:
    """Give each tensor or shard, the largest first, to the worker that holds it with the fewest bytes so far.

    The order of the layouts does not matter: that of an optimizer's state differs after it has been loaded.
    Shards of tensors that some worker holds unsharded are dropped: a tied weight is not sharded on a worker
    whose stages share it, but may be where one stage has it.
    """
    whole = {entry["name"] for layout in layouts for entry in layout if entry["sizes"] == entry["size"]}
    holders: dict[tuple[Any, ...], list[tuple[int, dict[str, Any]]]] = {}
    for rank, layout in enumerate(layouts):
        for entry in layout:
            if entry["name"] not in whole or entry["sizes"] == entry["size"]:
                holders.setdefault((entry["name"], *entry["offsets"]), []).append((rank, entry))
    parts: list[Layout] = [[] for _ in layouts]
    num_bytes = [0] * len(layouts)
    for key in sorted(holders, key=lambda key: (-_bytes_of(holders[key][0][1]), key)):
        rank, entry = min(holders[key], key=lambda holder: num_bytes[holder[0]])
        parts[rank].append(entry)
        num_bytes[rank] += _bytes_of(entry)
    return parts


def _bytes_of(entry: Mapping[str, Any]) -> int:
    num_bytes: int = DTYPES[entry["dtype"]].itemsize * math.prod(entry["sizes"])
    return num_bytes


def _stored_tensors(parts: list[Layout]) -> dict[str, StoredTensor]:
    """Return the tensors that the workers' ``parts`` make up.

    Raises:
        ShoalError: the shards of a tensor are not the whole of it.
    """
    entries = [(rank, entry) for rank, part in enumerate(parts) for entry in part]
    chunks: dict[str, list[Chunk]] = {}
    for rank, entry in entries:
        offsets, sizes = tuple(entry["offsets"]), tuple(entry["sizes"])
        chunk = Chunk(offsets=offsets, sizes=sizes, file=_file_of(rank), key=entry["key"])
        chunks.setdefault(entry["name"], []).append(chunk)
    stored: dict[str, StoredTensor] = {}
    for _, entry in entries:
        name, size = entry["name"], tuple(entry["size"])
        if sum(math.prod(chunk.sizes) for chunk in chunks[name]) != math.prod(size):
            raise ShoalError(f"the workers' shards of {name} do not make up a tensor of shape {size}")
        stored[name] = StoredTensor(dtype=entry["dtype"], size=size, chunks=tuple(chunks[name]))
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
