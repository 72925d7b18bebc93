"""Saves checkpoints asynchronously and atomically, and restores them at any number of workers.

1. :meth:`Checkpointer.save` copies this worker's part of the state into a staging buffer that is allocated
   once. Training continues after the copy. (``torch.distributed.checkpoint.async_save`` may pass the live
   tensors of a CPU model to its thread, which then race with the optimizer: pytorch issue 144657.)
2. A thread writes the part to ``step-00000100.7.tmp`` and waits until all workers have written theirs. It
   uses its own process group, never that of training.
3. The first worker writes the checksums, renames the folder to ``step-00000100`` and then deletes older
   checkpoints. It owns the run directory (``run_dir``), so no other job writes there meanwhile.
4. :meth:`Checkpointer.restore` loads the newest checkpoint whose checksums match.

With an object store (``checkpoint_uploads``), each worker then uploads what it has written, and the first one
completes the copy. Hosts that do not share the run directory have whole checkpoints there only.

Workers may hold replicas of a model, shards of it (FSDP2) or pipeline stages, each under the names of the
whole model. A checkpoint of any such division can be restored into any other.

``checkpoint_state`` names the tensors, ``checkpoint_files`` stores them. Replicated tensors are distributed
over the workers by size, and each shard of a DTensor is stored by one worker. A reader with another number of
workers or another sharding reads the boxes that overlap its own, as the planner of
``torch.distributed.checkpoint`` (DCP) determines them. DCP's storage is not used: it pickles.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
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

from shoal import record
from shoal.env.machine import host_identity
from shoal.errors import ShoalError, UsageError
from shoal.optim.moments import local_box, local_part, parameters_of
from shoal.train import checkpoint_files as files
from shoal.train.checkpoint_files import DTYPE_NAMES, DTYPES, Chunk, StoredTensor, WrittenFile, write_file
from shoal.train.checkpoint_state import (
    FlatState,
    Held,
    LocalState,
    flatten,
    local_state,
    restore,
)
from shoal.train.config import RunOutputConfig
from shoal.train.run_dir import Ownership, own
from shoal.train.world import all_gather_json, run_on_all

if TYPE_CHECKING:
    from shoal.train.checkpoint_uploads import Uploads

_DEADLINE_S = 1800.0

Layout = list[dict[str, Any]]
"""The tensors and shards that a worker holds, one entry each, in JSON values: the tensor's name, type and
size, the shard's offsets and sizes, and its key in the worker's file."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint that was loaded: its step and plain values, and the newer damaged ones skipped."""

    step: int
    path: Path | str
    """A folder, or the location in an object store."""
    values: dict[str, Any]
    damaged: list[str]


@dataclass(kw_only=True)
class _Pending:
    """A save in progress; once the thread has ended, ``num_bytes`` or ``error`` is final."""

    step: int
    path: Path = Path()
    location: str = ""
    """Location of the complete checkpoint, if not ``path``."""
    requested: float = field(default_factory=time.monotonic)
    thread: threading.Thread | None = None
    blocked_s: float = 0.0
    written_s: float = 0.0
    num_bytes: int = 0
    uploaded_s: float = 0.0
    error: Exception | None = None


class Checkpointer:
    """Saves and restores the state of a run. A collective: all workers construct one together.

    The first worker owns the run directory for the lifetime of the object, which excludes other jobs. At the
    start it renames complete checkpoints that a killed process left unnamed, and deletes incomplete ones.

    Args:
        run_dir: an existing directory, on a file system that all hosts share or, with ``uploads``, not.
        keep: number of most recent checkpoints to keep.
        deadline_s: seconds that a worker waits for the others to write.
        is_alone: this process writes and reads the whole state, without the other workers.
        uploads: to an object store, which has the checkpoints, too; the newest one of both is restored.

    Raises:
        UsageError: ``keep`` is below 1, or another job uses the run directory.
        ShoalError: the checkpoint folder cannot be created, or holds a checkpoint of another format.

    Example:

        >>> import torch
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> checkpointer = Checkpointer(Path("runs/example"))
        >>> state = {"model": model, "optimizer": optimizer, "samples": 0}
        >>> restored = checkpointer.restore(state)         # None: a run without a checkpoint
        >>> checkpointer.save(100, {**state, "samples": 6400}, wait=True)
        >>> Checkpointer(Path("runs/example")).restore(state).values
        {'samples': 6400}
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int = 3,
        deadline_s: float = _DEADLINE_S,
        is_alone: bool = False,
        uploads: Uploads | None = None,
    ) -> None:
        if keep < 1:
            raise UsageError(
                f"keep={keep} must be at least 1: a run without a checkpoint cannot be continued"
            )
        self._run_dir, self._keep = run_dir, keep
        self._group: dist.ProcessGroup | None = None
        self._rank, self._num_workers = 0, 1
        if not is_alone and dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
            self._group = cast(dist.ProcessGroup, group)
            self._rank, self._num_workers = dist.get_rank(), dist.get_world_size()
        self._owner: Ownership | None = None
        self._part: SavePart | None = None
        self._pending: _Pending | None = None
        self._completed: list[record.Checkpoint] = []
        self._good_step: int | None = None
        self._damaged_steps: set[int] = set()
        self._uploads = uploads
        run_on_all(self._group, self._own_folder)
        self._is_shared, self._has_folder = True, self._rank == 0
        if uploads is not None:
            run_on_all(self._group, lambda: uploads.take_over() if self._rank == 0 else None)
            self._is_shared, self._has_folder = self._look_around()
        self._recover()

    def save(self, step: int, state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Start to save ``state``, which may change after the call.

        A step that was saved before is not saved again. At most one save is in progress: a second one waits
        for it.

        Args:
            step: number of optimizer steps done.
            state: by name: models; optimizers; tensors that are equal on all workers; state that differs per
                worker (:class:`~shoal.train.checkpoint_state.OwnState`); JSON values, of which those of the
                first worker are stored.
            wait: return when the checkpoint is complete on disk.

        Raises:
            ShoalError: this save or the previous one failed, or another job took over the run directory.
                Older checkpoints are untouched, and ``save`` can be called again. With ``wait``, a failure of
                the previous save is dropped if this one succeeds.
        """
        pending = _Pending(step=step)
        earlier = self._settle()
        if earlier is not None and not wait:
            _surface(earlier)
        if step == self._good_step:
            return
        flat = flatten(state)
        layout = layout_of(flat.tensors)
        if self._part is None or self._must_plan(self._part, layout):
            self._part = None  # frees the old buffer first
            self._part = SavePart(flat.tensors, layout, self._group, self._rank)
        self._part.stage(flat.tensors)
        self._pending = pending
        pending.thread = threading.Thread(
            target=self._write, args=(pending, self._part, flat), name="checkpoint", daemon=True
        )
        pending.thread.start()
        if wait:
            pending.thread.join()
        pending.blocked_s = time.monotonic() - pending.requested
        if wait:
            self.finish()

    def poll(self) -> list[record.Checkpoint]:
        """Return the checkpoints completed since the last call. Never blocks.

        Raises:
            ShoalError: the save in progress has failed.
        """
        pending = self._pending
        if pending and pending.thread and not pending.thread.is_alive():
            self.finish()
        completed, self._completed = self._completed, []
        return completed

    def finish(self) -> None:
        """Wait for the save in progress. Call it before the process exits.

        Raises:
            ShoalError: the save failed.
        """
        if (error := self._settle()) is not None:
            _surface(error)

    def upload_run_files(self) -> None:
        """Upload the record as it is now, if checkpoints are uploaded; a failure is a line."""
        if self._uploads is not None and self._rank == 0:
            try:
                self._uploads.put_run_files()
            except ShoalError as error:
                sys.stderr.write(f"the record was not uploaded: {error}\n")

    @contextlib.contextmanager
    def uploaded_export(self, step: int) -> Iterator[None]:
        """Upload what the body writes into the run directory; a failure is a line.

        Only the first worker calls it.
        """
        before = self._uploads.export_files() if self._uploads is not None else {}
        yield
        if self._uploads is not None:
            try:
                self._uploads.put_export(step, before)
            except ShoalError as error:
                sys.stderr.write(f"the exported model was not uploaded: {error}; it is on this host's disk\n")

    def restore(self, state: Mapping[str, Any], *, held: Held = parameters_of) -> Restored | None:
        """Load the newest undamaged checkpoint into ``state``, the same one on all workers.

        Args:
            state: as for :meth:`save`; models, optimizers, tensors and own state are filled in place.
            held: returns the parameters of an optimizer whose state this worker keeps; default: all.

        Returns:
            ``None`` if the run has no checkpoint.

        Raises:
            ShoalError: all checkpoints are damaged, or one is of another format.
            UsageError: the model or the optimizer differs from the saved one; ``state`` is unchanged.
        """
        damaged: list[str] = []
        for name, is_uploaded in reversed(run_on_all(self._group, self._list)[0]):
            path, named, damage = Path(name), name, None
            if is_uploaded:
                path, named, damage = self._fetch(name)
            if (damage := damage or self._find_damage(path)) is None:
                workers = run_on_all(self._group, lambda: local_state(state))
                load = partial(_load, path, state, workers, held)
                values = run_on_all(self._group, load)[self._rank]
                self._remove_parts(path)
                self._good_step = files.step_of(path)
                return Restored(
                    step=self._good_step,
                    path=named if is_uploaded else path,
                    values=values,
                    damaged=damaged,
                )
            damaged.append(f"{named}: {damage}")
            self._damaged_steps.add(files.step_of(path))
        if damaged:
            listing = "\n  ".join(damaged)
            raise ShoalError(
                f"every checkpoint of the run is damaged:\n  {listing}\n"
                "Restore an intact copy, or start again in another run directory."
            )
        return None

    def _own_folder(self) -> None:
        if self._rank == 0:
            self._owner = own(self._run_dir)
            (self._run_dir / files.FOLDER).mkdir(exist_ok=True)

    def _look_around(self) -> tuple[bool, bool]:
        """Return whether all workers see the first one's files, and whether this one has to bring files."""
        token = run_on_all(self._group, lambda: self._owner.token if self._owner else "")[0]
        mark = self._run_dir / files.FOLDER / f"seen-{token}"
        run_on_all(self._group, lambda: mark.touch() if self._rank == 0 else None)
        (self._run_dir / files.FOLDER).mkdir(parents=True, exist_ok=True)
        seen = run_on_all(self._group, lambda: (host_identity(), mark.exists()))
        run_on_all(self._group, lambda: mark.unlink() if self._rank == 0 else None)
        if all(each for _, each in seen):
            return True, self._rank == 0
        first_of_host = next(rank for rank, (host, _) in enumerate(seen) if host == host_identity())
        return False, self._rank == first_of_host

    def _list(self) -> list[tuple[str, bool]]:
        """Return the checkpoints by path, or by name if they are uploaded ones; the oldest first."""
        if self._rank != 0:
            return []
        found = (
            [(files.step_in(name), False, name) for name in self._uploads.names()] if self._uploads else []
        )
        if self._is_shared:
            found += [(files.step_of(p), True, str(p)) for p in files.list_checkpoints(self._run_dir)]
        return [(name, not is_here) for _, is_here, name in sorted(found)]

    def _fetch(self, name: str) -> tuple[Path, str, str | None]:
        """Bring an uploaded checkpoint to all hosts; return its folder, its location, and what is wrong."""
        uploads = self._uploads
        assert uploads is not None

        def fetch() -> str | None:
            try:
                if self._has_folder:
                    uploads.fetch(name)
            except UsageError:
                raise
            except ShoalError as error:
                return str(error)
            return None

        problems = run_on_all(self._group, fetch)
        path = files.checkpoint_path(self._run_dir, files.step_in(name))
        return path, uploads.uri(name), next((problem for problem in problems if problem), None)

    def _remove_parts(self, path: Path) -> None:
        """Remove a folder that holds a checkpoint on each host, if hosts do not share the run directory."""
        if not self._is_shared:
            run_on_all(self._group, lambda: files.remove_folder(path) if self._has_folder else None)

    def _recover(self) -> None:
        """Rename complete checkpoints that a killed process left unnamed, and delete its other files."""
        run_dir, is_first = self._run_dir, self._rank == 0
        listed = run_on_all(
            self._group, lambda: [str(p) for p in files.list_unnamed(run_dir)] if is_first else []
        )
        whole: dict[int, Path] = {}
        for path in map(Path, listed[0]):
            if files.step_of(path) not in whole and self._find_damage(path) is None:
                whole[files.step_of(path)] = path
        run_on_all(self._group, lambda: files.tidy(run_dir, whole.values()) if is_first else None)

    def _find_damage(self, path: Path) -> str | None:
        damages = run_on_all(
            self._group,
            lambda: files.find_damage(path, part=self._rank, num_parts=self._num_workers),
        )
        return next((damage for damage in damages if damage), None)

    def _must_plan(self, part: SavePart, layout: Layout) -> bool:
        """Return whether the save plan is outdated; the same on all workers, since planning is collective.

        The state of one worker's optimizer may have grown and that of another not.
        """
        changed = part.layout != layout
        return changed if self._group is None else any(all_gather_json(self._group, changed))

    def _write(self, pending: _Pending, part: SavePart, flat: FlatState) -> None:
        """Write this worker's file and, on the first worker, complete the checkpoint. Runs in a thread."""
        try:
            pending.path = files.checkpoint_path(self._run_dir, pending.step)
            name = run_on_all(self._group, lambda: self._temporary_name(pending.path))[0]
            temporary = pending.path.with_name(name)
            try:
                workers = (
                    all_gather_json(self._group, [flat.values, flat.optimizers]) if part.differs else None
                )
                written = run_on_all(
                    self._group, lambda: self._write_part(temporary, part, flat.all_values(workers))
                )
                pending.num_bytes = sum(file.num_bytes for file in _files_in(written))
                if self._is_shared:
                    sizes = run_on_all(self._group, lambda: self._complete(pending.step, temporary, written))
                    pending.num_bytes = sizes[0]
                    pending.written_s = time.monotonic() - pending.requested
                self._upload(pending, temporary, written)
            except Exception:
                with contextlib.suppress(RuntimeError, OSError):  # frees the space on a full disk
                    run_on_all(
                        self._group, lambda: files.remove_folder(temporary) if self._has_folder else None
                    )
                raise
        except Exception as error:  # noqa: BLE001  # raised in the training thread, at the next step
            pending.error = error

    def _temporary_name(self, path: Path) -> str:
        if self._owner is None:
            return ""
        self._owner.require()
        return files.temporary_path(path, self._owner.number).name

    def _write_part(self, temporary: Path, part: SavePart, values: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            written = [part.buffer.write(temporary / part.file)]
            if self._rank == 0:
                written.append(files.write_contents(temporary, part.tensors, values))
            return [asdict(file) for file in written]
        finally:  # if a new owner deleted the folder, report that instead of a missing file
            if self._owner is not None:
                self._owner.require()

    def _upload(self, pending: _Pending, temporary: Path, written: list[list[dict[str, Any]]]) -> None:
        """Upload a checkpoint, which is complete on disk if all hosts share the run directory.

        Raises:
            ShoalError: it was not uploaded, and is nowhere complete.
        """
        uploads, best = self._uploads, files.best_step(self._run_dir)
        if uploads is None:
            return
        mine, everything = _files_in(written[self._rank : self._rank + 1]), _files_in(written)
        is_first, folder = self._rank == 0, pending.path if self._is_shared else temporary
        try:
            name = run_on_all(self._group, lambda: uploads.new_name(pending.step) if is_first else "")[0]
            run_on_all(self._group, lambda: uploads.put(name, folder, mine))
            run_on_all(self._group, lambda: uploads.complete(name, everything) if is_first else None)
            pending.uploaded_s = time.monotonic() - pending.requested
            run_on_all(
                self._group, lambda: uploads.prune(name, keep=self._keep, best=best) if is_first else None
            )
        except ShoalError as error:
            if not self._is_shared:
                raise
            if is_first:
                sys.stderr.write(
                    f"the checkpoint of step {pending.step} is complete in {pending.path}, but not uploaded; "
                    f"the next one is tried again: {error}\n"
                )
        if not self._is_shared:
            pending.written_s, pending.location = pending.uploaded_s, uploads.uri(name)
            self._remove_parts(temporary)

    def _complete(self, step: int, temporary: Path, written: list[list[dict[str, Any]]]) -> int:
        if self._owner is None:
            return 0
        self._owner.require()
        num_bytes = files.complete(temporary, step, _files_in(written))
        present = [files.step_of(path) for path in files.list_checkpoints(self._run_dir)]
        for old in files.superseded(
            present,
            newest=step,
            keep=self._keep,
            damaged=self._damaged_steps,
            best=files.best_step(self._run_dir),
        ):
            files.remove_checkpoint(files.checkpoint_path(self._run_dir, old))
        return num_bytes

    def _settle(self) -> Exception | None:
        """Wait for the save in progress, count it as completed or return its error."""
        pending, self._pending = self._pending, None
        if pending is None or pending.thread is None:
            return None
        pending.thread.join()
        if pending.error is not None:
            return pending.error
        self._good_step = pending.step
        self._completed.append(
            record.Checkpoint(
                step=pending.step,
                path=pending.location or str(pending.path),
                num_bytes=pending.num_bytes,
                blocked_s=pending.blocked_s,
                written_s=pending.written_s,
                uploaded_s=pending.uploaded_s,
            )
        )
        return None


def open_checkpointer(output: RunOutputConfig, run_dir: Path, *, is_alone: bool = False) -> Checkpointer:
    """Return the checkpointer of a run by its settings; the arguments are those of :class:`Checkpointer`."""
    uploads = None
    if output.upload_to is not None:
        from shoal.train.checkpoint_uploads import Uploads

        uploads = Uploads(output.upload_to, run_dir)
    return Checkpointer(run_dir, keep=output.keep_checkpoints, is_alone=is_alone, uploads=uploads)


def _files_in(written: list[list[dict[str, Any]]]) -> list[WrittenFile]:
    """Return the files that workers have written."""
    return [WrittenFile(**file) for part in written for file in part]


def _surface(error: Exception) -> NoReturn:
    """Raise the error of the writing thread in the training thread; defects keep class and traceback."""
    if isinstance(error, ShoalError):
        raise ShoalError(str(error)) from error
    raise error


def load_model(path: Path, model: nn.Module, *, key: str = "model", whole: nn.Module | None = None) -> int:
    """Load only the model of a checkpoint, for evaluation, export or a new run. Not a collective.

    Args:
        path: a checkpoint, or a run directory, whose best or newest checkpoint is loaded.
        model: filled in place.
        key: name of the model in the saved state.
        whole: the model, on meta or not, of which ``model`` is a part; default: ``model`` is all of it.

    Returns:
        The step of the checkpoint.

    Raises:
        ShoalError: there is no checkpoint, it is damaged, or it is of another format.
        UsageError: it is of another model.
    """
    path = _find_whole(path)
    _load(path, {key: model}, [local_state({key: each}) for each in (model, whole or model)])
    return files.step_of(path)


def load_models(
    path: Path, models: Mapping[str, nn.Module], group: dist.ProcessGroup | None
) -> tuple[int, dict[str, Any]]:
    """Load the models of a checkpoint, in any division over the workers. A collective.

    Args:
        path: a checkpoint, or a run directory, whose best or newest checkpoint is loaded.
        models: by their names in the saved state; filled in place.
        group: of all workers; ``None``: there is one.

    Returns:
        The step of the checkpoint, and its plain values.

    Raises:
        ShoalError: there is no checkpoint, it is damaged, or it is of another format.
        UsageError: it is of other models.
    """
    path = Path(run_on_all(group, lambda: str(_find_whole(path)))[0])
    workers = run_on_all(group, lambda: local_state(models))
    values = run_on_all(group, lambda: _load(path, models, workers))[0]
    return files.step_of(path), values


def stored_model(path: Path, *, key: str = "model") -> tuple[int, dict[str, Callable[[], Tensor]]]:
    """Return the step of a checkpoint, and name -> function that reads the tensor, of its model.

    So a model that fits no worker can be written elsewhere one tensor at a time.

    Args:
        path: a checkpoint, or a run directory, whose best or newest checkpoint is read.
        key: name of the model in the saved state.

    Raises:
        ShoalError: there is no checkpoint, it is damaged, or it is of another format.
    """
    path = _find_whole(path)
    stored, _ = files.read_contents(path)

    def read(name: str) -> Tensor:
        target = torch.empty(stored[name].size, dtype=DTYPES[stored[name].dtype])
        read_tensors(path, {name: stored[name]}, {name: target})
        return target

    names = [name for name in stored if name.startswith(f"{key}.")]
    return files.step_of(path), {name.removeprefix(f"{key}."): partial(read, name) for name in names}


def _find_whole(path: Path) -> Path:
    """Return a checkpoint whose checksums match: ``path``, or the best or newest in it.

    Raises:
        ShoalError: there is none, or it is damaged.
    """
    chosen = files.newest_or_best(path)
    if chosen is None:
        raise ShoalError(f"{path} is neither a checkpoint nor the directory of a run that has one")
    if damage := files.find_damage(chosen):
        raise ShoalError(f"the checkpoint {chosen} is damaged: {damage}; use an older one of the run instead")
    return chosen


def _load(
    path: Path, state: Mapping[str, Any], workers: list[LocalState], held: Held = parameters_of
) -> dict[str, Any]:
    tensors, values = files.read_contents(path)

    def read(targets: dict[str, Tensor]) -> None:
        read_tensors(path, tensors, targets)

    return restore(state, tensors, values, read, workers, held)


# ---- the division over the workers -------------------------------------------------------------------------


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
    for name, items in by_file.items():
        try:
            with safe_open(path / name, framework="pt") as file:
                for key, item in items:
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
