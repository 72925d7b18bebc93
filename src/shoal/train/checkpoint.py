"""Checkpoints that training hardly waits for, and that are whole or not there.

1. :meth:`Checkpointer.save` copies this worker's part of the state into memory that is kept for it. Training
   goes on as soon as that is done. (``torch.distributed.checkpoint.async_save`` may hand the very tensors of
   a CPU model to its thread, which then race with the optimizer: pytorch issue 144657.)
2. A thread writes the part to ``step-00000100.7.tmp`` and waits on a process group of its own, never the
   training's, until all workers have written theirs.
3. The first worker adds checksums, renames the folder to ``step-00000100`` and only then deletes older ones.
   It owns the run directory (``owner``), so no other job writes or deletes there meanwhile.
4. :meth:`Checkpointer.restore` takes the newest checkpoint whose checksums hold, with any number of workers.

The workers may hold the same model, shards of it (FSDP2) or its stages, each under the whole model's names:
what any number of them saved, any other division of the model reads.

``checkpoint_state`` names the tensors, ``checkpoint_plan`` shares them out,
``checkpoint_files`` stores them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import torch.distributed as dist
from torch import nn

from shoal.errors import ShoalError, UsageError
from shoal.train import checkpoint_files as files
from shoal.train.checkpoint_plan import Layout, SavePart, layout_of, read_tensors, saved_tensors
from shoal.train.checkpoint_state import FlatState, Held, flatten, held, restore
from shoal.train.run_dir import Ownership, own
from shoal.train.world import all_gather_json, run_on_all

_DEADLINE_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class CompletedCheckpoint:
    """A checkpoint that is complete on disk, for the record (fields as in ``record.Checkpoint``)."""

    step: int
    path: Path
    num_bytes: int
    blocked_s: float
    written_s: float


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was loaded: the step, the plain values of the state, and the newer checkpoints passed over."""

    step: int
    path: Path
    values: dict[str, Any]
    damaged: list[str]


@dataclass(kw_only=True)
class _Pending:
    """A save that a thread carries out; once the thread has ended, ``num_bytes`` or ``error`` is final."""

    step: int
    requested: float
    path: Path = Path()
    thread: threading.Thread | None = None
    blocked_s: float = 0.0
    written_s: float = 0.0
    num_bytes: int = 0
    error: Exception | None = None


class Checkpointer:
    """Saves and restores the state of one run. All workers make one, at the same place in the program.

    The first worker owns the run directory while there is one: no other job can have it. At the start it
    names checkpoints that were complete when a kill came, and deletes what is incomplete.

    Args:
        run_dir: the run's directory, which is there; on a file system that all hosts share.
        keep: how many of the last checkpoints stay.
        keep_every: those at multiples of so many steps stay too; 0: none.
        deadline_s: how long a worker waits for the others' disks.

    Raises:
        UsageError: ``keep`` is below 1 or ``keep_every`` below 0, or another job uses the run directory.
        ShoalError: the folder for the checkpoints cannot be made.

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
        self, run_dir: Path, *, keep: int = 3, keep_every: int = 0, deadline_s: float = _DEADLINE_S
    ) -> None:
        if keep < 1 or keep_every < 0:
            raise UsageError(
                f"keep={keep} must be at least 1 and keep_every={keep_every} at least 0: "
                "a run without a checkpoint cannot be continued"
            )
        self._run_dir = run_dir
        self._retention = {"keep": keep, "keep_every": keep_every}
        self._group: dist.ProcessGroup | None = None
        self._rank, self._num_workers = 0, 1
        if dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
            self._group = cast(dist.ProcessGroup, group)
            self._rank, self._num_workers = dist.get_rank(), dist.get_world_size()
        self._owner: Ownership | None = None
        self._part: SavePart | None = None
        self._pending: _Pending | None = None
        self._completed: list[CompletedCheckpoint] = []
        self._good_step: int | None = None
        self._damaged_steps: set[int] = set()
        run_on_all(self._group, self._own_folder)
        self._recover()

    def save(self, step: int, state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Begin to save ``state``; on return it may change. With ``wait``, return when it is on disk.

        ``state`` maps names to models, optimizers, tensors that are alike on all workers, state of which each
        worker has its own (``checkpoint_state.OwnState``), and plain values that JSON can hold (those of the
        first worker are stored; of optimizers over the stages of a model, all workers' together). A step that
        is saved already is not saved again. Only one save is in flight: this one waits for the one before.

        Raises:
            ShoalError: this save failed, or the one before, or the run directory was taken over by another
                job. Older checkpoints are untouched, and ``save`` can be called again. With ``wait``, an
                earlier failure is forgotten when this save succeeds.
        """
        started = time.monotonic()
        earlier = self._settle()
        if earlier is not None and not wait:
            _surface(earlier)
        if step == self._good_step:
            return
        flat = flatten(state)
        layout = layout_of(flat.tensors)
        if self._part is None or self._must_plan(self._part, layout):
            self._part = None  # frees the old memory first
            self._part = SavePart(flat.tensors, layout, self._group, self._rank)
        self._part.stage(flat.tensors)
        self._pending = pending = _Pending(step=step, requested=started)
        pending.thread = threading.Thread(
            target=self._write, args=(pending, self._part, flat), name="checkpoint", daemon=True
        )
        pending.thread.start()
        if wait:
            pending.thread.join()
        pending.blocked_s = time.monotonic() - started
        if wait:
            self.finish()

    def poll(self) -> list[CompletedCheckpoint]:
        """Return the checkpoints completed since the last call. Never waits and never raises."""
        pending = self._pending
        if pending and pending.thread and not pending.thread.is_alive() and not pending.error:
            self._settle()
        completed, self._completed = self._completed, []
        return completed

    def finish(self) -> None:
        """Wait until the save that was begun is on disk. To be called before the process leaves.

        Raises:
            ShoalError: the save failed.
        """
        if (error := self._settle()) is not None:
            _surface(error)

    def restore(self, state: Mapping[str, Any]) -> Restored | None:
        """Load the newest good checkpoint of the run into the models and optimizers of ``state``.

        Returns ``None`` when the run has no checkpoint. All workers take the same one.

        Raises:
            ShoalError: there are checkpoints and all are damaged.
            UsageError: the model or the optimizer is not the one that was saved; nothing was changed.
        """
        listed = run_on_all(self._group, lambda: [str(p) for p in files.list_checkpoints(self._run_dir)])[0]
        damaged: list[str] = []
        for path in map(Path, reversed(listed)):
            if (damage := self._find_damage(path)) is None:
                values = self._load(path, state)
                self._good_step = files.step_of(path)
                return Restored(step=self._good_step, path=path, values=values, damaged=damaged)
            damaged.append(f"{path}: {damage}")
            self._damaged_steps.add(files.step_of(path))
        if damaged:
            listing = "\n  ".join(damaged)
            raise ShoalError(
                f"every checkpoint of the run is damaged:\n  {listing}\n"
                "Put a good copy back, or begin anew in another run directory."
            )
        return None

    def _own_folder(self) -> None:
        if self._rank == 0:
            self._owner = own(self._run_dir)
            (self._run_dir / files.FOLDER).mkdir(exist_ok=True)

    def _recover(self) -> None:
        """Name what is whole and has no name, and delete what else kills have left."""
        run_dir, is_first = self._run_dir, self._rank == 0
        listed = run_on_all(
            self._group, lambda: [str(p) for p in files.list_unnamed(run_dir)] if is_first else []
        )
        whole: dict[int, Path] = {}
        for path in map(Path, listed[0]):
            if files.step_of(path) not in whole and self._find_damage(path) is None:
                whole[files.step_of(path)] = path
        run_on_all(self._group, lambda: files.tidy(run_dir, whole.values()) if is_first else None)

    def _require_owner(self) -> None:
        if self._owner is not None:
            self._owner.require()

    def _find_damage(self, path: Path) -> str | None:
        found = run_on_all(
            self._group,
            lambda: files.find_damage(path, part=self._rank, num_parts=self._num_workers),
        )
        return next((damage for damage in found if damage), None)

    def _load(self, path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        workers = run_on_all(self._group, lambda: held(state))
        return run_on_all(self._group, lambda: _load(path, state, workers))[self._rank]

    def _must_plan(self, part: SavePart, layout: Layout) -> bool:
        """Whether the workers must share out the state anew, which all do together."""
        changed = part.layout != layout
        if part.differs:  # one stage's state may grow and another's not
            return any(all_gather_json(self._group, changed))
        return changed

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
                sizes = run_on_all(self._group, lambda: self._complete(pending.step, temporary, written))
            except Exception:
                with contextlib.suppress(Exception):  # gives the space of a full disk back
                    run_on_all(self._group, lambda: self._give_up(temporary))
                raise
            pending.num_bytes = sizes[0]
            pending.written_s = time.monotonic() - pending.requested
        except Exception as error:  # it surfaces on the training's thread, at the next call
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
                contents = files.Contents(tensors=part.tensors, values=values)
                written.append(files.write_contents(temporary, contents))
            return [asdict(file) for file in written]
        finally:  # a new owner deletes this folder: that is then the error, not a file that is not there
            self._require_owner()

    def _complete(self, step: int, temporary: Path, written: list[list[dict[str, Any]]]) -> int:
        if self._rank != 0:
            return 0
        self._require_owner()
        num_bytes = files.complete(
            temporary, step, [files.WrittenFile(**file) for part in written for file in part]
        )
        present = [files.step_of(path) for path in files.list_checkpoints(self._run_dir)]
        for old in files.superseded(present, newest=step, damaged=self._damaged_steps, **self._retention):
            files.remove_checkpoint(files.checkpoint_path(self._run_dir, old))
        return num_bytes

    def _give_up(self, temporary: Path) -> None:
        if self._rank == 0:
            files.remove_folder(temporary)

    def _settle(self) -> Exception | None:
        """Wait for the save in flight, take note of it, and return its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is None or pending.thread is None:
            return None
        pending.thread.join()
        if pending.error is not None:
            return pending.error
        self._good_step = pending.step
        self._completed.append(
            CompletedCheckpoint(
                step=pending.step,
                path=pending.path,
                num_bytes=pending.num_bytes,
                blocked_s=pending.blocked_s,
                written_s=pending.written_s,
            )
        )
        return None


def _surface(error: Exception) -> NoReturn:
    """Raise the error of a writing thread on the training's thread; a defect as it is, with its traceback."""
    if isinstance(error, ShoalError):
        raise ShoalError(str(error)) from error
    raise error


def load_model(path: Path, model: nn.Module, *, key: str = "model") -> int:
    """Load only the model of a checkpoint, and return its step: for evaluation, export or a new run.

    Args:
        path: a checkpoint, or a run directory, whose newest checkpoint is taken.
        key: the model's name in the state that was saved.

    Each worker reads for itself.

    Raises:
        ShoalError: there is no checkpoint, or it is damaged.
        UsageError: it is of another model.
    """
    if not files.is_checkpoint(path):
        found = files.list_checkpoints(path)
        if not found:
            raise ShoalError(f"{path} is neither a checkpoint nor the directory of a run that has one")
        path = found[-1]
    if damage := files.find_damage(path):
        raise ShoalError(f"the checkpoint {path} is damaged: {damage}; name an older one of the run instead")
    _load(path, {key: model}, [held({key: model})])
    return files.step_of(path)


def _load(path: Path, state: Mapping[str, Any], workers: list[Held]) -> dict[str, Any]:
    contents = files.read_contents(path)
    return restore(
        state,
        saved_tensors(contents.tensors),
        contents.values,
        lambda targets: read_tensors(path, contents.tensors, targets),
        workers,
    )
