"""Predicts what hosts of unequal speed cost, and what dividing the batch by speed saves.

Every step waits for its slowest host. A host's part takes

    its samples / (samples of an equal part) / its speed · a factor drawn per step

of the time that a plan predicts for its computation. The factor is lognormal with median 1. Network and
optimizer take what they take. Modes in which a step does not wait for its slowest host are simulated with
the code that decides in a run (:mod:`shoal.decide.bounded_waiting`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.decide.bounded_waiting import WaitingRule, simulate
from shoal.decide.shares import balanced_shares
from shoal.errors import UsageError
from shoal.planner.prediction import Plan

NUM_STEPS = 2_000
"""Steps that are drawn."""
WORTHWHILE = 0.02
"""Share of the time that a division must save to be recommended."""
STALE_WORTHWHILE = 0.1
"""The same of a mode that is another algorithm than plain training."""
_MOST_SIMULATED = 8_000
"""Gradients of a simulation: with more hosts it takes fewer steps."""
_GRACE = 0.1
"""Grace of steps that do not wait for all, in units of a step of a host at full speed."""
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Division:
    """Training in one way on hosts of unequal speed."""

    name: str
    """Value of ``--distributed.shares``, or other options of ``--distributed``."""
    step_s: float
    total_s: float
    of_possible: float
    """Samples per second of the computation, over those if no host ever waited."""
    exact: bool = True
    """True for synchronous training: all samples, and no stale gradient."""


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
    """Return what training takes with equal shares and, except for pipelines, in other ways.

    Plain training comes first: equal shares and shares by speed, the better one first. Then, if there is
    jitter, steps that do not wait for all hosts.

    Args:
        plan: with hosts of one speed.
        speeds: of each host, relative to the plan's.
        jitter: σ of the logarithm of the factor of a host's step.

    Raises:
        UsageError: ``jitter`` is negative, or a host would have no sample.
    """
    if not 0 <= jitter <= 2:
        raise UsageError(f"--jitter {jitter:g} must lie between 0 and 2: σ of the logarithm of a step's time")
    factors = _factors(jitter, len(speeds))
    possible = len(speeds) / sum(speeds) * float(factors.mean())
    found = []
    # T5's recipe is a pipeline even of one stage, and a pipeline is built for parts of one size.
    whole = plan.job.recipe.startswith("t5") or any(layout.per_replica > 1 for layout in plan.layouts)
    for name in ("equal",) if whole else ("equal", "by-speed"):
        slow = []
        for layout in plan.layouts:
            batch = layout.global_batch
            if batch < len(speeds):
                raise UsageError(
                    f"a batch of {batch} samples cannot be divided among {len(speeds)} hosts of unequal speed"
                )
            equal = batch / len(speeds)
            parts: Sequence[float] = [equal] * len(speeds)
            if name == "by-speed":
                parts = balanced_shares([1 / speed for speed in speeds], batch)
            relative = np.array([part / equal / speed for part, speed in zip(parts, speeds, strict=True)])
            slow.append(float((relative * factors).max(axis=1).mean()))
        found.append(_division(name, plan, slow, possible))
    exact = found if found[-1].total_s > (1 - WORTHWHILE) * found[0].total_s else found[::-1]
    return exact if whole else exact + _bounded(plan, speeds, factors, possible)


def recommended(divisions: Sequence[Division]) -> Division:
    """Return the division to train with: the first, or one that is no plain training and saves far more."""
    first = divisions[0]
    others = [each for each in divisions if not each.exact]
    if not others:
        return first
    best = min(others, key=lambda each: each.total_s)
    if best.total_s > (1 - STALE_WORTHWHILE) * first.total_s:
        return first
    # among those that are nearly as good the first, which is the least stale
    return next(each for each in others if each.total_s <= (1 + WORTHWHILE) * best.total_s)


def _factors(jitter: float, num_hosts: int) -> npt.NDArray[np.float64]:
    draw = np.random.default_rng(_SEED)
    factors: npt.NDArray[np.float64] = np.exp(jitter * draw.standard_normal((NUM_STEPS, num_hosts)))
    return factors


def _division(
    name: str, plan: Plan, slow: Sequence[float], possible: float, *, exact: bool = True
) -> Division:
    """Return what training takes if the computation of a batch takes ``slow`` times as long, by layout."""
    step_s, total_s = 0.0, plan.total_s
    for number, (step, run) in enumerate(zip(plan.steps, plan.runs, strict=True)):
        computed_s = step.forward_s + step.backward_s + step.bubble_s + step.straggler_s
        total_s += run.num_steps * (slow[number] - 1) * computed_s
        if not number:
            step_s = step.total_s + (slow[number] - 1) * computed_s
    return Division(name=name, step_s=step_s, total_s=total_s, of_possible=possible / slow[0], exact=exact)


def _bounded(
    plan: Plan, speeds: Sequence[float], factors: npt.NDArray[np.float64], possible: float
) -> list[Division]:
    """Return what steps take that do not wait for all hosts, the time being that of as many samples.

    Where hosts are slow, those modes are left out that would always drop the same hosts' samples.
    """
    num_hosts = len(speeds)
    if num_hosts < 2 or (factors == 1).all():
        return []
    seconds = (factors / np.array(speeds)).T.tolist()
    rules = {f"staleness={s}": WaitingRule(num_hosts, num_hosts, staleness=s) for s in (1, 2, 4)}
    if num_hosts > 2:
        few = num_hosts - 1
        if len(set(speeds)) == 1:
            rules[f"wait_for={few}"] = WaitingRule(num_hosts, few, grace_s=_GRACE)
        rules[f"wait_for={few}, late=next"] = WaitingRule(
            num_hosts, few, late="next", staleness=4, grace_s=_GRACE
        )
    num_steps = max(100, min(NUM_STEPS, _MOST_SIMULATED // num_hosts))
    found = []
    for name, rule in rules.items():
        step_s, num_used = simulate(rule, seconds, num_steps)
        slow = step_s * num_hosts / num_used
        found.append(_division(name, plan, [slow] * len(plan.steps), possible, exact=False))
    return found
