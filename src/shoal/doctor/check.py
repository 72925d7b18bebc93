"""One line of the examination, and how it says sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "missing"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the examination; ``missing`` means that training cannot run, ``note`` that it can."""

    name: str
    found: str
    state: State = "ok"
    remedy: str = ""


def judged(name: str, found: str, *, well: bool, otherwise: State, remedy: str) -> Check:
    """Return a check that is ok if all is ``well``, and otherwise has that state and the remedy."""
    if well:
        return Check(name=name, found=found)
    return Check(name=name, found=found, state=otherwise, remedy=remedy)


def gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
