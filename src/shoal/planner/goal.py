"""Orders plans by what is asked for: the least time or cost, within a time or a budget."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.errors import UsageError
from shoal.formatting import duration
from shoal.planner.prediction import Plan

Goal = Literal["time", "cost"]

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True)
class Aim:
    """A goal, and limits that a plan must keep.

    Attributes:
        goal: rank by time or by cost; ``None``: the cheapest within ``by_s``, else the fastest.
        by_s: the longest time, in seconds.
        budget: the highest cost, in dollars.

    Raises:
        UsageError: a limit is not a positive number.
    """

    goal: Goal | None = None
    by_s: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        for option, limit in (("--by", self.by_s), ("--budget", self.budget)):
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise UsageError(f"{option} is {limit:g}; it must be a positive number")

    @property
    def is_limited(self) -> bool:
        """Return true if a time or a budget is set."""
        return self.by_s is not None or self.budget is not None

    @property
    def ranks_by(self) -> Goal:
        """Return the figure that ranks the plans within the limits."""
        by_cost = self.by_s is not None and self.budget is None
        return self.goal or ("cost" if by_cost else "time")

    def meets(self, plan: Plan) -> bool:
        """Return whether a plan keeps the limits; a cost that is unknown keeps no budget."""
        return plan.total_s <= (self.by_s or math.inf) and (
            self.budget is None or _dollars(plan) <= self.budget
        )

    def key(self, plan: Plan) -> tuple[float, ...]:
        """Return the key by which plans are sorted, the best first; plans without a price come last."""
        figures = (
            (plan.total_s, _dollars(plan)) if self.ranks_by == "time" else (_dollars(plan), plan.total_s)
        )
        return (not self.meets(plan), *figures)

    def chosen(self, plans: Sequence[Plan]) -> Plan:
        """Return the best of the plans that keep the limits.

        Raises:
            UsageError: none does; names the nearest.
        """
        best = min(plans, key=self.key)
        if self.meets(best):
            return best
        fastest, cheapest = min(plans, key=lambda each: each.total_s), min(plans, key=_dollars)
        raise UsageError(
            f"none of {len(plans)} clusters would {self}: the fastest, {fastest.hosts}, takes "
            f"{duration(fastest.total_s)}, and the cheapest, {cheapest.hosts}, costs "
            f"{_price(cheapest)}; name other --cluster hosts, or a range of them such as 1..64xp5.48xlarge"
        )

    def __str__(self) -> str:
        limits = [f"take at most {duration(self.by_s)}"] if self.by_s is not None else []
        limits += [f"cost at most {self.budget:,.0f} dollars"] if self.budget is not None else []
        return " and ".join(limits)


def _dollars(plan: Plan) -> float:
    return math.inf if plan.dollars is None else plan.dollars


def _price(plan: Plan) -> str:
    return "an unknown price" if plan.dollars is None else f"{plan.dollars:,.0f} dollars"


def seconds_of(text: str, option: str) -> float:
    """Return the seconds of a time such as ``90min``, ``12h`` or ``1d6h``.

    Raises:
        UsageError: the text is not of that form.

    Example:
        >>> seconds_of("1d6h", "--by") / 3600
        30.0
    """
    joined = text.replace(" ", "")
    if not re.fullmatch(r"(?:\d+(?:\.\d+)?(?:s|min|h|d))+", joined):
        raise UsageError(f"{option} {text!r} is not a time; write it as 90min, 12h or 1d6h")
    parts = re.findall(r"(\d+(?:\.\d+)?)(s|min|h|d)", joined)
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
