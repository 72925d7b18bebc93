"""Defines the rows of a run's record and reads them. Standard library only.

A record is the file ``record.jsonl`` of a run directory: one JSON object per line, each with ``kind`` and
``time_s`` (seconds since 1970). Lines are only appended. A killed run may leave an incomplete last line; a
run that went back to a checkpoint has a ``resume`` line, which supersedes earlier lines about later steps.
:func:`read_record` handles both, so that no reader has to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json

FILE_NAME = "record.jsonl"
FORMAT = 1
"""Version of the record, in every ``start`` line; records of another version are refused. New kinds and
fields do not change it, since readers skip unknown ones."""

PARTS = ("data", "forward", "backward", "gradient_wait", "optimizer", "other")
"""Parts of a step's time: reading examples, forward, backward, gradient averaging not overlapped with
backward, optimizer, and the rest (metrics, checkpoint staging)."""


_MOST_SHARES = 8
"""Shares that are listed; of more, the least and the largest."""


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line of the record."""

    kind: ClassVar[str]
    time_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Start(_Line):
    """A process group has started or resumed the run."""

    kind = "start"
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
    """Plural name of the samples: "images"."""
    epoch_samples: int = 0
    """Samples per epoch of a run defined in epochs; 0 for a run defined in steps."""
    references: dict[str, float] = field(default_factory=dict)
    """Reference lines for the plots of evaluation metrics: metric name -> value."""
    backend_reason: str = ""
    """Reason for the backend: a setting, the kind of the workers, or a comparison with its times."""
    planned: dict[str, Any] = field(default_factory=dict)
    """Figures of ``run.plan`` (:func:`read_planned`); empty without one."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Phase(_Line):
    """A phase of the run, with its own batch and lengths, begins with ``step``."""

    kind = "phase"
    step: int
    last_step: int
    name: str
    sequence_length: int
    """Tokens of the longest examples."""
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


@dataclass(frozen=True, kw_only=True)
class Step(_Line):
    """Averages over the steps since the last such line; ``step`` counts optimizer steps from 1."""

    kind = "step"
    step: int
    samples: int
    """Samples consumed since the start of the run."""
    loss: float
    metrics: dict[str, float]
    learning_rate: float
    loss_scale: float
    grad_norm: float
    weight_norm: float
    samples_per_s: float
    step_s: float
    parts_s: dict[str, float]
    """Seconds per step in each of :data:`PARTS`; their sum is ``step_s``."""
    num_skipped: int = 0
    """Steps skipped since the last line because of overflow."""
    layer_norms: dict[str, float] = field(default_factory=dict)
    """Norms of this step's gradient before clipping, by layer, where the settings ask for them."""
    peak_memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Shares(_Line):
    """Workers have other parts of the global batch, from ``step`` on."""

    kind = "shares"
    step: int
    samples: list[int]
    """Samples of each worker, by rank."""
    seconds: list[float] = field(default_factory=list)
    """Median time of each worker's part before, by rank, without waiting; empty for repeated shares."""

    def __str__(self) -> str:
        """Return ``69 × 2, 68 × 5, 34``, or ``61 to 72`` if there are too many to list."""
        parts = [(share, len(list(equal))) for share, equal in groupby(self.samples)]
        if len(parts) > _MOST_SHARES:
            return f"{min(self.samples):,} to {max(self.samples):,}"
        return ", ".join(f"{share:,} × {count}" if count > 1 else f"{share:,}" for share, count in parts)


@dataclass(frozen=True, kw_only=True)
class Members(_Line):
    """Workers were lost, or others came, after ``step``."""

    kind = "members"
    step: int
    num_workers: int
    """Workers from here on."""
    num_before: int


@dataclass(frozen=True, kw_only=True)
class Contributions(_Line):
    """Gradients of steps that did not wait for all workers, since the last such line."""

    kind = "contributions"
    step: int
    used: list[int]
    """Gradients that steps have taken, by rank."""
    dropped: list[int]
    """Gradients that came too late for any, by rank."""
    staleness: list[int]
    """Of those taken, how many were of weights that lacked 0, 1, 2, … steps."""


@dataclass(frozen=True, kw_only=True)
class Reads(_Line):
    """Bytes of training data since the start of the process group, on all hosts, by where they came from."""

    kind = "reads"
    step: int
    memory_bytes: int
    """Read from the caches of the workers' own hosts."""
    peer_bytes: int
    """Copied to these caches from other hosts."""
    storage_bytes: int
    """Copied to these caches, or read, from the storage of the data."""
    peer_failures: int
    """Times that another host did not give what it was asked for."""
    policy: str = ""
    """Kept by each host (:mod:`shoal.decide.cache_policy`): ``all``, its ``own`` part, or a ``window``."""
    without_room: int = 0
    """Times that a cache had no room for a shard, or its disk was full."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(_Line):
    """Scores on held-out data."""

    kind = "evaluation"
    step: int
    split: str
    num_samples: int
    metrics: dict[str, float]
    seconds: float
    samples: int = 0
    """Samples that training had consumed since the start of the run."""
    beside: bool = False
    """Set where training went on meanwhile; ``seconds`` are those of other processes then."""


@dataclass(frozen=True, kw_only=True)
class Samples(_Line):
    """Outputs of the model of ``step`` for the inputs that ``run.samples`` names."""

    kind = "samples"
    step: int
    path: str
    """File with all rows of ``shoal predict``."""
    rows: list[dict[str, Any]]
    """The first of them."""
    num_rows: int
    """Number of rows in the file."""
    seconds: float
    """Time that they took beside training."""

    def cells(self, width: int) -> tuple[list[str], list[list[str]]]:
        """Return the names of the rows' fields, and each row's values as texts of at most ``width``."""
        names = list(dict.fromkeys(name for row in self.rows for name in row if name != "precision"))
        texts = [[_text(row.get(name, "")) for name in names] for row in self.rows]
        cut = [[text if len(text) <= width else f"{text[: width - 1]}…" for text in row] for row in texts]
        return names, cut


@dataclass(frozen=True, kw_only=True)
class Checkpoint(_Line):
    """A checkpoint is complete on disk."""

    kind = "checkpoint"
    step: int
    path: str
    num_bytes: int
    blocked_s: float
    """Seconds that training was blocked."""
    written_s: float
    """Seconds from the request to the complete file."""
    uploaded_s: float = 0.0
    """Seconds from the request to the complete copy in an object store; 0: there is none."""


@dataclass(frozen=True, kw_only=True)
class Resume(_Line):
    """The run continued from a checkpoint; earlier lines about later steps are void."""

    kind = "resume"
    step: int
    path: str
    damaged: list[str] = field(default_factory=list)
    """Newer checkpoints that were skipped, with the reason."""
    samples: int = 0
    """Samples consumed since the start of the run."""


class PipelineBox(NamedTuple):
    """One computation of a pipeline's rank; times in seconds since the start of the step."""

    rank: int
    stage: int
    action: str
    """``F`` forward, ``B`` backward, ``I`` input gradient, ``W`` weight gradient."""
    micro_batch: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class PipelineStep(_Line):
    """Timeline of one pipeline step per rank, predicted and measured."""

    kind = "pipeline_step"
    step: int
    schedule: str
    placement: list[int]
    """The rank of each stage."""
    num_micro_batches: int
    predicted: list[PipelineBox] = field(default_factory=list)
    traced: list[PipelineBox] = field(default_factory=list)
    predicted_peak_bytes: list[int] = field(default_factory=list)
    """Per rank: peak bytes kept for backward; empty if unknown."""
    traced_peak_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Convert boxes read from JSON to named tuples."""
        for name in ("predicted", "traced"):
            object.__setattr__(self, name, [PipelineBox(*box) for box in getattr(self, name)])


@dataclass(frozen=True, kw_only=True)
class Target(_Line):
    """The scores of ``step`` are those up to which the run was to train."""

    kind = "target"
    step: int
    until: str
    """The conditions, such as ``box_AP>=0.377,mask_AP>=0.339``."""
    metrics: dict[str, float]
    """The scores that they are about, by ``split/name``."""
    seconds: float
    """Time to target: of all process groups, from the start to these scores, without pauses between them and
    without steps that were done again."""
    evaluation_s: float
    """Seconds of it in evaluations."""


@dataclass(frozen=True, kw_only=True)
class Stop(_Line):
    """The run ended itself before its last step: a signal, or a loss that is not finite."""

    kind = "stop"
    step: int
    reason: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class End(_Line):
    """The run reached its last step, or its target."""

    kind = "end"
    step: int
    seconds: float
    """Duration of the training loop in this process group."""
    metrics: dict[str, float]


Row = (
    Start
    | Phase
    | Step
    | Shares
    | Members
    | Contributions
    | Reads
    | Evaluation
    | Samples
    | Checkpoint
    | PipelineStep
    | Resume
    | Target
    | Stop
    | End
)
History = Start | Resume | Stop
"""Rows about events of the run; the others are progress."""
_ROW_OF_KIND: dict[str, type[Row]] = {row.kind: row for row in get_args(Row)}
_TYPES_OF_KIND = {kind: get_type_hints(row) for kind, row in _ROW_OF_KIND.items()}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def record_of(run_dir: Path) -> Path:
    """Return the file of a run's record.

    Raises:
        UsageError: there is none.
    """
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise UsageError(
            f"{run_dir} {'holds' if run_dir.exists() else 'does not exist, so it has'} no {FILE_NAME}: it is "
            "not the directory of a shoal run"
        )
    return path


def read_planned(path: Path) -> dict[str, Any]:
    """Return the best plan's figures of a file of ``shoal plan --json``.

    They are the cluster, the mean time of a step, samples per second, seconds of the run, dollars an hour
    (``None``: unknown), bytes of memory of the fullest device, and steps.

    Raises:
        UsageError: it cannot be read, or is another file.
    """
    try:
        best = parse_json(path.read_bytes(), f"run.plan {path}", error=UsageError)["best"]
        num_steps = [int(number) for number in best["num_steps"]]
        total_s, dollars = float(best["total_s"]), best["dollars"]
        steps_s = sum(n * float(each) for n, each in zip(num_steps, best["step_s"], strict=True))
        return {
            "cluster": str(best["cluster"]),
            "step_s": steps_s / sum(num_steps),
            "samples_per_s": float(best["samples_per_s"]),
            "total_s": total_s,
            "dollars_per_h": None if dollars is None else 3600 * float(dollars) / total_s,
            "memory_bytes": int(best["memory_bytes"]),
            "num_steps": sum(num_steps),
        }
    except OSError as error:
        raise UsageError(f"run.plan {path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"run.plan {path} is no file of `shoal plan --json` for one cluster ({error!r})"
        ) from error


def read_record(run_dir: Path) -> list[Row]:
    """Return the valid rows of a run, oldest first.

    Incomplete lines (of a killed run) and unknown kinds are skipped. After a ``resume`` at step s, rows of
    earlier attempts about steps after s are dropped; after a ``start`` without a ``resume``, all of them are.
    Events (``start``, ``resume``, ``stop``) are always kept.

    Raises:
        UsageError: there is no record.
        ShoalError: it is of another :data:`FORMAT`, or a whole line does not match its kind.
    """
    path = record_of(run_dir)
    rows: list[Row] = []
    since_progress: set[type[Row]] = set()
    for row in _rows(path):
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


def process_groups(rows: Sequence[Row]) -> list[Sequence[Row]]:
    """Divide the rows of a run by process group; each part begins with its ``start``."""
    begins = [index for index, row in enumerate(rows) if isinstance(row, Start)]
    return [rows[a:b] for a, b in zip(begins, [*begins[1:], len(rows)], strict=True)]


def duration_s(rows: Sequence[Row]) -> float:
    """Return the seconds of all process groups of a run, without the pauses between them."""
    return sum(max(row.time_s for row in group) - group[0].time_s for group in process_groups(rows))


def target_row(rows: Sequence[Row], step: int, until: str, metrics: Mapping[str, float]) -> Target:
    """Return the row of a run whose last evaluation, after ``step``, has the scores of its target."""
    last = max(index for index, row in enumerate(rows) if isinstance(row, Evaluation) and row.step == step)
    rows = rows[: last + 1]
    return Target(
        step=step,
        until=until,
        metrics=dict(metrics),
        seconds=duration_s(rows),
        evaluation_s=sum(row.seconds for row in rows if isinstance(row, Evaluation) and not row.beside),
    )


def check_format(path: Path) -> None:
    """Raise a :class:`ShoalError` if the record in the file ``path`` is of another :data:`FORMAT`."""
    next((row for row in _rows(path) if isinstance(row, Start)), None)


def _rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file.

    Raises:
        ShoalError: a whole line does not match its kind, or the record is of another format.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            row = _row(line)
        except TypeError as error:
            raise ShoalError(f"{path}, line {number}: {error}; the file was changed by hand?") from None
        if isinstance(row, Start) and row.format != FORMAT:
            writer = "an older" if row.format < FORMAT else "a newer"
            raise ShoalError(
                f"{path}, line {number}: the record has format {row.format}, of {writer} shoal, and this one "
                f"has {FORMAT}: use that version for this run, or start it again with another --run.dir"
            )
        if row is not None:
            yield row


def _row(line: bytes) -> Row | None:
    """Parse one line; ``None`` for an incomplete line and for an unknown kind."""
    try:
        values = parse_json(line, "a line")
    except ShoalError:
        return None
    if not isinstance(values, dict):
        raise TypeError(f"a line is an object with a kind, not {values!r:.40}")
    row_type = _ROW_OF_KIND.get(str(values.pop("kind", None)))
    if row_type is None:
        return None
    if row_type is Start:
        values.setdefault("format", 0)  # of records before there was a number
    types = _TYPES_OF_KIND[row_type.kind]
    for name, expected in types.items():
        if name in values and not _fits(values[name], expected):
            raise TypeError(f"{row_type.kind}.{name} must be {expected}, not {values[name]!r}")
    return row_type(**{name: value for name, value in values.items() if name in types})


def _fits(value: Any, expected: Any) -> bool:
    """Return whether a JSON value has the type of a field (``int`` is a ``float``, ``bool`` is neither)."""
    origin = get_origin(expected)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, get_args(expected)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, get_args(expected)[1]) for item in value.values())
    if expected is PipelineBox:
        types = get_type_hints(PipelineBox).values()
        return isinstance(value, list) and len(value) == len(types) and all(map(_fits, value, types))
    if expected is Any:
        return True
    return type(value) is expected or (expected is float and type(value) is int)
