"""The record of a run: what ``train`` writes and ``report`` reads. Standard library only.

A record is the file ``record.jsonl`` of a run directory: one JSON object a line, each with ``kind`` and
``time_s`` (seconds since 1970). Lines are only ever appended. A run that was killed may leave a cut last
line; a run that went back to a checkpoint has a ``resume`` line, and whatever earlier lines say of later
steps is superseded by it. :func:`read_record` settles both, so that no reader has to.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from io import RawIOBase
from os import SEEK_END
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

from shoal.errors import ShoalError
from shoal.json_text import parse_json

FILE_NAME = "record.jsonl"

PARTS = ("data", "forward", "backward", "gradient_wait", "optimizer", "other")
"""Where a step's time goes: reading examples, forward, backward, gradient averaging that backward did not
hide, optimizer, and the rest (metrics, checkpoint staging)."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One process group has begun or taken up the run."""

    kind: ClassVar[str] = "start"
    run: str
    recipe: str
    command: list[str]
    config: dict[str, Any]
    num_workers: int
    num_hosts: int
    backend: str
    device: str
    precision: str
    versions: dict[str, str]
    num_parameters: int
    total_steps: int
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    unit: str = "sequences"
    """What samples are called, for rates: "images"."""
    epoch_samples: int = 0
    """Samples in an epoch of a run that is defined in epochs; 0 for one that is defined in steps."""
    references: dict[str, float] = field(default_factory=dict)
    """Lines to draw in the plots of evaluation metrics: metric name -> value."""
    time_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of the run begins with ``step``: what its steps are made of."""

    kind: ClassVar[str] = "phase"
    step: int
    last_step: int
    name: str
    sequence_length: int
    """Tokens of its longest examples."""
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    time_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The average over the steps since the last such line; ``step`` counts optimizer steps from 1."""

    kind: ClassVar[str] = "step"
    step: int
    samples: int
    """Samples consumed since the beginning of the run."""
    loss: float
    metrics: dict[str, float]
    learning_rate: float
    loss_scale: float
    grad_norm: float
    weight_norm: float
    samples_per_s: float
    step_s: float
    parts_s: dict[str, float]
    """Seconds a step in each of :data:`PARTS`; they sum up to ``step_s``."""
    num_skipped: int = 0
    """Steps skipped since the last line because of an overflow."""
    peak_memory_bytes: int = 0
    time_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores on held-out data."""

    kind: ClassVar[str] = "evaluation"
    step: int
    split: str
    num_samples: int
    metrics: dict[str, float]
    seconds: float
    time_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint is complete on disk."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    num_bytes: int
    blocked_s: float
    """Time that training stood still for it."""
    written_s: float
    """Time from the request to the complete file."""
    time_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The run went on from a checkpoint; earlier lines about later steps no longer count."""

    kind: ClassVar[str] = "resume"
    step: int
    path: str
    damaged: list[str] = field(default_factory=list)
    """Newer checkpoints that were passed over, with the reason."""
    time_s: float = field(default_factory=time.time)


class PipelineBox(NamedTuple):
    """One computation of a pipeline's rank and when it ran, in seconds since its step began."""

    rank: int
    stage: int
    action: str
    """``F`` forward, ``B`` backward, ``I`` input gradient, ``W`` weight gradient."""
    micro_batch: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """How the ranks of a pipeline spent one step, and how it was predicted that they would."""

    kind: ClassVar[str] = "pipeline_step"
    step: int
    schedule: str
    placement: list[int]
    """The rank of each stage."""
    num_micro_batches: int
    predicted: list[PipelineBox] = field(default_factory=list)
    traced: list[PipelineBox] = field(default_factory=list)
    predicted_peak_bytes: list[int] = field(default_factory=list)
    """Of each rank: the most bytes kept for backward at one time; empty where it is not known."""
    traced_peak_bytes: list[int] = field(default_factory=list)
    time_s: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        """Give the boxes of a line of the record their names again."""
        for name in ("predicted", "traced"):
            object.__setattr__(self, name, [PipelineBox(*box) for box in getattr(self, name)])


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The run ended before its last step, of its own accord: a signal or a loss that is not finite."""

    kind: ClassVar[str] = "stop"
    step: int
    reason: str
    exit_code: int
    time_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class End:
    """The run reached its last step."""

    kind: ClassVar[str] = "end"
    step: int
    seconds: float
    """Time of the training loop in this process group."""
    metrics: dict[str, float]
    time_s: float = field(default_factory=time.time)


Row = Start | Phase | Step | Evaluation | Checkpoint | PipelineStep | Resume | Stop | End
History = Start | Resume | Stop
"""Rows about what happened to the run; the others say how far it got."""
_ROW_OF_KIND: dict[str, type[Row]] = {
    row.kind: row for row in (Start, Phase, Step, Evaluation, Checkpoint, PipelineStep, Resume, Stop, End)
}
_TYPES_OF_KIND = {kind: get_type_hints(row) for kind, row in _ROW_OF_KIND.items()}


class RecordWriter:
    """Appends rows to a run's record; each line reaches the operating system before the call returns.

    Raises:
        ShoalError: the file cannot be opened or written (permissions, a full disk); what it holds stays.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        try:
            self._file: RawIOBase = self._path.open("a+b", buffering=0)
            size = self._file.seek(0, SEEK_END)
            if size:
                self._file.seek(size - 1)
                if self._file.read(1) != b"\n":  # the line that a kill has cut stays alone on its line
                    self._file.write(b"\n")
        except OSError as error:
            raise ShoalError(f"{self._path} cannot be written: {error.strerror}") from None

    def write(self, row: Row) -> None:
        line = (json.dumps({"kind": row.kind, **asdict(row)}) + "\n").encode()
        try:
            num_written = self._file.write(line)
        except OSError as error:
            raise ShoalError(f"{self._path} cannot be written: {error.strerror}") from None
        if num_written != len(line):
            raise ShoalError(f"{self._path} was cut at {num_written} of {len(line)} bytes: the disk is full")

    def close(self) -> None:
        self._file.close()


def read_record(run_dir: Path) -> list[Row]:
    """Return the rows of a run that still count, oldest first.

    Lines that are not JSON (a kill has cut them) and kinds of a newer version are passed over. After a
    ``resume`` at step s, rows of earlier attempts about steps after s are dropped; after a ``start`` without
    a ``resume``, all of them are. What happened (``start``, ``resume``, ``stop``) is always kept.

    Raises:
        ShoalError: there is no record, or a whole line does not have the form of its kind.
    """
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise ShoalError(f"{run_dir} holds no {FILE_NAME}: it is not the directory of a shoal run")
    rows: list[Row] = []
    since_progress: set[type[Row]] = set()
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            row = _row(line)
        except TypeError as error:
            raise ShoalError(f"{path}, line {number}: {error}; the file was changed by hand?") from None
        if row is None:
            continue
        if isinstance(row, Resume):
            rows = [old for old in rows if isinstance(old, History) or old.step <= row.step]
        if isinstance(row, History):
            since_progress.add(type(row))
        elif since_progress:
            if Start in since_progress and Resume not in since_progress:  # it began again from nothing
                rows = [old for old in rows if isinstance(old, History)]
            since_progress.clear()
        rows.append(row)
    return rows


def _row(line: bytes) -> Row | None:
    """Parse one line; ``None`` for a cut one and for a kind that this version does not know."""
    try:
        values = parse_json(line, "a line")
    except ShoalError:  # cut, or from another writer
        return None
    if not isinstance(values, dict):
        raise TypeError(f"a line is an object with a kind, not {line[:40].decode()!r}")
    row_type = _ROW_OF_KIND.get(str(values.pop("kind", "")))
    if row_type is None:
        return None
    types = _TYPES_OF_KIND[row_type.kind]
    for name, wanted in types.items():
        if name in values and not _fits(values[name], wanted):
            raise TypeError(f"{row_type.kind}.{name} must be {wanted}, not {values[name]!r}")
    return row_type(**{name: value for name, value in values.items() if name in types})


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a JSON value fits a row's field (``int`` counts as ``float``, ``bool`` as neither)."""
    origin = get_origin(wanted)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, get_args(wanted)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, get_args(wanted)[1]) for item in value.values())
    if wanted is PipelineBox:
        types = list(get_type_hints(PipelineBox).values())
        return isinstance(value, list) and len(value) == len(types) and all(map(_fits, value, types))
    if wanted is Any:
        return True
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, int | float if wanted is float else wanted)
