"""Predicts what hosts of unequal speed cost, and what dividing the batch by speed saves.

Every step waits for its slowest host. A host's part takes

    its samples / (samples of an equal part) / its speed · a factor drawn per step

of the time that a plan predicts for its computation. The factor is lognormal with median 1. Network and
optimizer take what they take.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.decide.shares import balanced_shares
from shoal.errors import UsageError
from shoal.planner.prediction import Plan

NUM_STEPS = 2_000
"""Steps that are drawn."""
WORTHWHILE = 0.02
"""Share of the time that a division must save to be recommended."""
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Division:
    """Training with the batch divided in one way."""

    name: str
    """Value of ``--distributed.shares``."""
    step_s: float
    total_s: float
    of_possible: float
    """Computation of a step in which no host ever waits, over that of this division."""


def host_speeds(count: int, slow: Sequence[str]) -> list[float]:
    """Return the relative speed of each host, the slow ones last.

    Args:
        count: hosts.
        slow: like ``1x0.5``: one host at half the speed of the others.

    Raises:
        UsageError: the text is not of that form, or there are more slow hosts than hosts.

    Example:
        >>> host_speeds(4, ["1x0.5", "1x0.8"])
        [1.0, 1.0, 0.5, 0.8]
    """
    speeds: list[float] = []
    for text in slow:
        match = re.fullmatch(r"(\d+)x(0?\.\d+|1(?:\.0*)?)", text)
        if not match or not float(match[2]):
            raise UsageError(
                f"--slow-hosts {text!r} is not of the form 1x0.5: how many, and their speed up to 1"
            )
        speeds += [float(match[2])] * int(match[1])
    if len(speeds) > count:
        raise UsageError(f"--slow-hosts {' '.join(slow)}: {len(speeds)} slow hosts of {count}")
    return [1.0] * (count - len(speeds)) + speeds


def divisions(plan: Plan, speeds: Sequence[float], *, jitter: float) -> list[Division]:
    """Return what equal shares and, except for pipelines, shares by speed take, the recommended one first.

    Args:
        plan: with hosts of one speed.
        speeds: of each host, relative to the plan's.
        jitter: σ of the logarithm of the factor of a host's step.

    Raises:
        UsageError: ``jitter`` is negative, or a host would have no sample.
    """
    if not 0 <= jitter <= 2:
        raise UsageError(f"--jitter {jitter:g} must lie between 0 and 2: σ of the logarithm of a step's time")
    factors = np.exp(jitter * np.random.default_rng(_SEED).standard_normal((NUM_STEPS, len(speeds))))
    possible = len(speeds) / sum(speeds) * float(factors.mean())
    found = []
    # T5's recipe is a pipeline even of one stage, and a pipeline is built for parts of one size.
    whole = plan.job.recipe.startswith("t5") or any(layout.per_replica > 1 for layout in plan.layouts)
    for name in ("equal",) if whole else ("equal", "by-speed"):
        step_s, total_s, slowest = 0.0, plan.total_s, 1.0
        for number, (step, run) in enumerate(zip(plan.steps, plan.runs, strict=True)):
            batch = plan.layouts[number].global_batch
            if batch < len(speeds):
                raise UsageError(
                    f"a batch of {batch} samples cannot be divided among {len(speeds)} hosts of unequal speed"
                )
            equal = batch / len(speeds)
            parts: Sequence[float] = [equal] * len(speeds)
            if name == "by-speed":
                parts = balanced_shares([1 / speed for speed in speeds], batch)
            relative = np.array([part / equal / speed for part, speed in zip(parts, speeds, strict=True)])
            slow = float((relative * factors).max(axis=1).mean())
            computed_s = step.forward_s + step.backward_s + step.bubble_s + step.straggler_s
            total_s += run.num_steps * (slow - 1) * computed_s
            if not number:
                step_s, slowest = step.total_s + (slow - 1) * computed_s, slow
        found.append(Division(name=name, step_s=step_s, total_s=total_s, of_possible=possible / slowest))
    return found if found[-1].total_s > (1 - WORTHWHILE) * found[0].total_s else found[::-1]
