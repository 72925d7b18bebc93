"""Handles the reasons to end a run early: signals, non-finite losses, lack of memory, a target.

Torch is imported in functions: the launcher reads targets without it.
"""

from __future__ import annotations

import atexit
import re
import signal
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType

from shoal import record
from shoal.decide.batch import BatchPlan
from shoal.env.settings import debug
from shoal.errors import WARNING_SIGNALS, ShoalError, UsageError, did_you_mean
from shoal.train.config import DistributedConfig, LoopConfig, RunOutputConfig, ServersConfig

_STOP_SIGNALS = (signal.SIGTERM, *WARNING_SIGNALS)


class StopRequest:
    """Records the first signal that requests a stop; the loop checks it between steps.

    Handles SIGTERM (schedulers, the launcher) and those that come before a preemption: SIGUSR1 (Slurm's
    ``--signal=USR1@60``) and SIGUSR2 (submitit's). All are ignored once the interpreter exits: Python then
    restores the default actions, and a second SIGTERM would replace the exit code of a saved run. Construct
    it in the main thread.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the first signal received, such as ``"SIGTERM"``."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._record)
        atexit.register(_ignore)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number).name


def _ignore() -> None:
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_in_one_line() -> None:
    """Make scripts end with one line and an exit code after a :class:`ShoalError`, as commands do.

    Every other exception keeps its traceback; ``SHOAL_DEBUG=1`` shows that of a ShoalError too. Joining a
    process group puts a hook of torch before this one, so it is called again after that.
    """
    others = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ShoalError) or hasattr(sys, "ps1"):  # which a prompt has
            others(kind, error, trace)
            return
        if debug():
            traceback.print_exception(error)
        else:
            print(f"shoal: {error}{_in_a_script(str(error))}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)

    sys.excepthook = end


def _in_a_script(text: str) -> str:
    """Return the settings of a script that correspond to the options named in ``text``, in parentheses."""
    kinds = {
        "run": RunOutputConfig,
        "train": LoopConfig,
        "distributed": DistributedConfig,
        "servers": ServersConfig,
    }
    named = re.findall(rf"--({'|'.join(kinds)})\.([\w-]+)", text)
    fields = dict.fromkeys((kinds[section], option.replace("-", "_")) for section, option in named)
    settings = [f"{kind.__name__}({name}=...)" for kind, name in fields if hasattr(kind, name)]
    return f" (in a script: {', '.join(settings)})" if settings else ""


def not_finite(count: int, step: int, sample_ids: Sequence[str], *, section: str | None) -> ShoalError:
    """Return the error for ``count`` consecutive steps with a non-finite loss, up to ``step``.

    Args:
        sample_ids: samples of the last step.
        section: the section of the settings that has the schedule; ``None``: a script has it.
    """
    remedy = "the learning rate or lengthen its warmup"
    if section is not None:
        remedy = f"--{section}.learning-rate or lengthen --{section}.warmup-steps"
    shown = ", ".join(sample_ids[:8]) + (" …" if len(sample_ids) > 8 else "")
    return ShoalError(
        f"the loss was not finite for {count} steps in a row, up to step {step:,}; samples of that step: "
        f"{shown}. Lower {remedy}; the same command continues from the last checkpoint"
    )


def out_of_memory(
    error: BaseException, batch: BatchPlan, remedy: str, *, section: str | None = "train"
) -> ShoalError:
    """Return the error for lack of memory, which names the settings to change.

    Args:
        batch: sizes of the batch.
        remedy: a further option that reduces memory.
        section: the section of the settings that has the batch size; ``None``: a script has it.
    """
    size = batch.micro_batch_size
    option = "micro_batch_size" if section is None else f"--{section}.micro-batch-size"
    smaller = f"{option} {size // 2} or " if size > 1 else ""
    return ShoalError(
        f"out of memory with a micro-batch of {size} {batch.unit}: use {smaller}"
        f"{remedy}; the global batch stays the same ({error})"
    )


# ---- a target -------------------------------------------------------------------------------------------

Scores = Mapping[str, Mapping[str, float]]
"""Scores of one step: split -> name -> value."""

_CONDITION = re.compile(r"([^\s<>=,]+)\s*([<>]=)\s*([-+.\deE]+)\s*(%?)")
_ALIASES = {
    "top1": "top1_accuracy",
    "top5": "top5_accuracy",
    "acc": "accuracy",
    "mlm_acc": "mlm_accuracy",
    "sop_acc": "sop_accuracy",
    "nsp_acc": "nsp_accuracy",
    "span_acc": "span_accuracy",
    "bbox": "box_AP",
    "segm": "mask_AP",
    "exact": "exact_match",
    "em": "exact_match",
    "squad_f1": "f1",
    "squad_exact": "exact_match",
}
"""Short names of scores, and the names in the record."""
_FALLING = ("loss", "perplexity", "bits_per_byte", "error")
"""Ends of the names of scores that fall."""
_ALSO = {"exact_match": "exact"}
"""Names that a score has in other data: that of SQuAD 2.0."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score that decides something about a run."""

    name: str
    rises: bool
    """True if a higher score is better, otherwise a lower one."""
    split: str = ""
    """Whose score; empty: that of every split that has one."""

    def __str__(self) -> str:
        return f"{self.split}/{self.name}" if self.split else self.name

    def scores_of(self, scores: Scores) -> dict[str, float]:
        """Return the values of the score, by ``split/name``."""
        return {
            f"{split}/{name}": values[name]
            for split, values in scores.items()
            for name in (self.name, _ALSO.get(self.name, self.name))
            if self.split in ("", split) and name in values
        }


@dataclass(frozen=True, kw_only=True)
class Condition(Score):
    """A bound that a score must reach, such as ``box_AP>=0.377``."""

    bound: float
    """The score must be at least this, or at most if it falls."""

    def __str__(self) -> str:
        return f"{super().__str__()}{'>=' if self.rises else '<='}{self.bound:g}"

    def holds(self, scores: Scores) -> bool:
        """Return whether there is such a score and all of them reach the bound."""
        values = self.scores_of(scores).values()
        return bool(values) and all(
            value >= self.bound if self.rises else value <= self.bound for value in values
        )


@dataclass(frozen=True)
class Target:
    """The scores that end a training: all conditions must hold at the same step.

    Example:
        >>> target = read_target("top1>=75.9%", {"validation": ["loss", "top1_accuracy"]})
        >>> str(target), target.holds({"validation": {"loss": 1.0, "top1_accuracy": 0.761}})
        ('top1_accuracy>=0.759', True)
    """

    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.conditions))

    @property
    def names(self) -> frozenset[str]:
        """The names of the scores."""
        return frozenset(condition.name for condition in self.conditions)

    def holds(self, scores: Scores) -> bool:
        """Return whether the scores of a step reach the target."""
        return all(condition.holds(scores) for condition in self.conditions)

    def scores_of(self, scores: Scores) -> dict[str, float]:
        """Return the scores to which the target applies, by ``split/name``."""
        return {name: value for one in self.conditions for name, value in one.scores_of(scores).items()}


class Goal:
    """Compares scores with the target of a run; on the first worker.

    Attributes:
        target: the scores that end the run.
        row: its row in the record, once the target is reached.
        reached: step and scores of the first weights that an evaluation beside training scored high enough.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.row: record.Target | None = None
        self.reached: tuple[int, Scores] | None = None

    def read(self, rows: Sequence[record.Row]) -> None:
        """Restore the row that an earlier process group wrote about this target."""
        rows_of_it = (row for row in rows if isinstance(row, record.Target) and row.until == str(self.target))
        self.row = next(rows_of_it, None)

    def holds(self, scores: Scores) -> bool:
        """Return whether the target is reached: before, or by the scores of the last step."""
        return self.row is not None or self.reached is not None or self.target.holds(scores)

    def offer(self, step: int, scores: Scores) -> bool:
        """Return whether the scores of an earlier step reach the target; if so, keep them."""
        if not self.target.holds(scores):
            return False
        self.reached = (step, scores)
        return True

    def scores_of(self, scores: Scores) -> dict[str, float]:
        """Return the scores that reached the target, or else those of the last step."""
        if self.row is not None:
            return self.row.metrics
        return self.target.scores_of(self.reached[1] if self.reached else scores)

    def reach(self, rows: Sequence[record.Row], step: int, scores: Scores) -> record.Target:
        """Return the row of the target, for the record.

        Args:
            rows: the record.
            step: the last step.
            scores: its scores.
        """
        step = self.reached[0] if self.reached else step
        self.row = record.target_row(rows, step, str(self.target), self.scores_of(scores))
        return self.row


def read_target(text: str | None, known: Mapping[str, Collection[str]]) -> Target | None:
    """Read conditions on scores that a run will have; ``None`` for no text.

    Args:
        text: conditions with commas between them, such as ``box_AP>=0.377,mask_AP>=0.339``; a bound may be in
            percent, a score written as ``split/name`` and by a shorter name.
        known: the names of the scores, by split.

    Raises:
        UsageError: the text has another form, names a score that is not known, or gives it a bound that it
            cannot have or has from the beginning.
    """
    if text is None:
        return None
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"run.until {text!r}: {part.strip()!r} is not a condition; write NAME>=NUMBER or "
                "NAME<=NUMBER, and commas between several, such as 'box_AP>=0.377,mask_AP>=0.339'"
            )
        word, sign, number, percent = match.groups()
        split, _, name = word.rpartition("/")
        try:
            known_name = _known_name(split, name, known)
            condition = Condition(name=known_name, rises=sign == ">=", bound=float(number), split=split)
            conditions.append(_sensible(condition, in_percent=bool(percent)))
        except ValueError as error:  # a UsageError is one
            raise UsageError(f"run.until {text!r}: {error}") from None
    return Target(tuple(conditions))


def read_best(text: str | None, known: Mapping[str, Collection[str]]) -> Score | None:
    """Read the score by which a run keeps its best checkpoint; ``None`` for no text.

    Args:
        text: a score, written as for :func:`read_target` without a bound; with ``:min`` or ``:max`` behind it
            where its name does not say whether it falls or rises.
        known: the names of the scores, by split.

    Raises:
        UsageError: the score is not known, several splits have it, or it may fall or rise.

    Example:
        >>> read_best("top1", {"validation": ["loss", "top1_accuracy"]})
        Score(name='top1_accuracy', rises=True, split='validation')
    """
    if text is None:
        return None
    word, _, order = text.strip().partition(":")
    split, _, name = word.rpartition("/")
    try:
        name = _known_name(split, name, known)
    except UsageError as error:
        raise UsageError(f"run.keep_best {text!r}: {error}") from None
    splits = [own for own, names in known.items() if split in ("", own) and name in names]
    if len(splits) > 1:
        choices = " or ".join(f"{own}/{name}" for own in splits)
        raise UsageError(f"run.keep_best {text!r} is a score of {len(splits)} splits: write {choices}")
    falls = name.endswith(_FALLING)
    rises = _is_fraction(name) or _is_percentage(name) or name in ("pearson", "spearman")
    if order not in ("", "min", "max") or not (order or falls or rises):
        raise UsageError(
            f"run.keep_best {text!r}: write {word}:min if the lowest score is the best, or {word}:max"
        )
    return Score(name=name, rises=order == "max" if order else rises, split=splits[0])


def _known_name(split: str, name: str, known: Mapping[str, Collection[str]]) -> str:
    """Return the name in the record of a score that the user named in some way.

    Raises:
        UsageError: there is none.
    """
    names = {own for key, values in known.items() if split in ("", key) for own in values}
    by_lower = {own.lower(): own for own in names}
    score = name if name in names else by_lower.get(name.lower()) or _ALIASES.get(name.lower())
    if score in names:
        return score
    shorter = {short: own for short, own in _ALIASES.items() if own in names}
    listed = "; ".join(f"{key}: {', '.join(values)}" for key, values in known.items()) or "none"
    also = ", ".join(f"{short} for {own}" for short, own in shorter.items())
    guess = did_you_mean(name, [*names, *shorter])
    raise UsageError(
        f"this run has no score {f'{split}/{name}' if split else name}.{guess} Its scores by split are "
        f"{listed}{f' ({also})' if also else ''}"
    )


def _sensible(condition: Condition, *, in_percent: bool) -> Condition:
    """Convert the bound to the score's unit, which its name implies (percent for F1).

    Raises:
        UsageError: the bound is outside of the score's range, or the sign the wrong way.
    """
    name, bound = condition.name, condition.bound
    falls, fraction, percentage = name.endswith(_FALLING), _is_fraction(name), _is_percentage(name)
    if falls == condition.rises and (falls or fraction or percentage):
        raise UsageError(f"{name} is to {'fall: write <=' if falls else 'rise: write >='}")
    if in_percent and not (fraction or percentage):
        raise UsageError(f"{name} is not a fraction: write its bound without %")
    bound = bound / 100 if in_percent and fraction else bound
    if fraction and not 0 <= bound <= 1:
        raise UsageError(f"{name} lies between 0 and 1: write {name}>={bound / 100:g} or {bound:g}%")
    if percentage and (not 0 <= bound <= 100 or (0 < bound < 1 and not in_percent)):
        raise UsageError(f"{name} is a percentage, between 0 and 100: write 0.5% for less than 1")
    return replace(condition, bound=bound)


def _is_fraction(name: str) -> bool:
    return name.endswith("accuracy") or "_AP" in name


def _is_percentage(name: str) -> bool:
    return name in ("f1", "exact_match", "bleu") or name.startswith("rouge")
