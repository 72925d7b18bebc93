"""Predicts what hosts of unequal speed cost, and which other way of training saves it.

Every step waits for its slowest host. A host's part takes

    its samples / (samples of an equal part) / its speed · a factor drawn per step

of the time that a plan predicts for its computation. The factor is lognormal with median 1. Modes in which a
step does not wait for its slowest host are simulated with the code that decides in a run
(:mod:`shoal.decide.bounded_waiting`). With C the slowest host's computation, N the network's time that the
backward pass does not hide, O the optimizer's and X that of an update on servers, a step takes

    C + N + O               on workers, with equal shares or shares by speed
    C + N' + O / n          on servers: weights come after the backward pass
    C + X + O / n           as soon as enough workers have their gradients
    max(C, X + O / n)       with staleness: workers compute while servers step
    max(C + X, n X) + O     asynchronous, n gradients
    C + O + X / H           with H local steps

where C is that of the mode's own waiting, and all but the first two are scaled to a whole batch of samples.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.decide.bounded_waiting import WaitingRule, simulate
from shoal.decide.shares import balanced_shares
from shoal.errors import UsageError
from shoal.planner.prediction import Plan
from shoal.planner.step_time import served_s

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
LOCAL_STEPS = 50
_FRAGMENTS, _DELAY = 5, 5
_STREAMED = f", fragments={_FRAGMENTS}, delay={_DELAY}"
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Division:
    """Training in one way on hosts of unequal speed."""

    name: str
    """Value of ``--distributed.shares``; or ``--servers.mode``, and other options of ``--servers``."""
    kind: Literal["shares", "served", "loose", "compared"] = "shares"
    """Plain training with shares of the batch, or on servers; another algorithm; or one for comparison
    only."""
    step_s: float
    total_s: float
    of_possible: float
    """Samples per second of the computation, over those if no host ever waited."""
    why: str = ""
    """Reason for which a mode of another algorithm is faster."""

    @property
    def exact(self) -> bool:
        """True for synchronous training: all samples, and no stale gradient."""
        return self.kind in ("shares", "served")


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
    """Return the time of training with equal shares and, except for pipelines, in other modes.

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
    factors = _factors(jitter, NUM_STEPS, len(speeds))
    possible = len(speeds) / sum(speeds) * float(factors.mean())
    modes, slows = [], []
    # what divides the model over workers is built for parts of one size
    whole = any(layout.per_replica > 1 or layout.shard for layout in plan.layouts)
    whole = whole or any(part.workload.equal_shares for part in plan.training.parts)
    for name in ("equal",) if whole else ("equal", "by-speed"):
        slow = [_slowest_part(layout.global_batch, speeds, factors, name) for layout in plan.layouts]
        times = [
            step.total_s + (relative - 1) * step.computed_s
            for step, relative in zip(plan.steps, slow, strict=True)
        ]
        modes.append(_division(name, plan, times, possible / slow[0]))
        slows.append(slow)
    if whole:
        return modes
    best = 0
    if modes[1].total_s <= (1 - WORTHWHILE) * modes[0].total_s:
        modes, best = modes[::-1], 1
    if len(speeds) > 1:
        modes += _served(plan, slows[best], possible)
    if len(speeds) > 1 and jitter:
        modes += _loose(plan, speeds, jitter, possible)
    return modes


def _slowest_part(
    batch: int, speeds: Sequence[float], factors: npt.NDArray[np.float64], shares: str
) -> float:
    """Return the computation of a step, over that of an equal part on a host of speed 1."""
    if batch < len(speeds):
        raise UsageError(
            f"a batch of {batch} samples cannot be divided among {len(speeds)} hosts of unequal speed"
        )
    equal = batch / len(speeds)
    parts: Sequence[float] = [equal] * len(speeds)
    if shares == "by-speed":
        parts = balanced_shares([1 / speed for speed in speeds], batch)
    relative = np.array([part / equal / speed for part, speed in zip(parts, speeds, strict=True)])
    return float((relative * factors).max(axis=1).mean())


def recommended(divisions: Sequence[Division]) -> Division:
    """Return the recommended mode: plain training, unless another one saves far more time."""
    first = divisions[0]
    others = [each for each in divisions if each.kind == "loose"]
    if not others:
        return first
    best = min(others, key=lambda each: each.total_s)
    if best.total_s > (1 - STALE_WORTHWHILE) * first.total_s:
        return first
    # among those that are nearly as good the first, which is the least stale
    return next(each for each in others if each.total_s <= (1 + WORTHWHILE) * best.total_s)


def _factors(jitter: float, *shape: int) -> npt.NDArray[np.float64]:
    draw = np.random.default_rng(_SEED)
    factors: npt.NDArray[np.float64] = np.exp(jitter * draw.standard_normal(shape))
    return factors


def _division(
    name: str,
    plan: Plan,
    step_s: Sequence[float],
    of_possible: float,
    kind: Literal["shares", "served", "loose", "compared"] = "shares",
    reason: str = "",
) -> Division:
    """Return the time of training with steps of these seconds, by layout."""
    saved_s = sum(
        run.num_steps * (step.total_s - now_s)
        for step, run, now_s in zip(plan.steps, plan.runs, step_s, strict=True)
    )
    return Division(
        name=name,
        kind=kind,
        step_s=step_s[0],
        total_s=plan.total_s - saved_s,
        of_possible=of_possible,
        why=reason,
    )


def _served(plan: Plan, slow: Sequence[float], possible: float) -> list[Division]:
    """Return the time of plain steps on servers, without and with a copy of the helpers' weights."""
    modes = []
    for copies in (False, True)[: 1 + (plan.helpers is not None)]:
        times = []
        for number, step in enumerate(plan.steps):
            back_s = _exchange_s(plan, number, step.backward_s / step.micro_batches, copies=copies)
            optimizer_s = step.optimizer_s / plan.workers.count
            times.append(slow[number] * step.computed_s + back_s + optimizer_s)
        name = "sync" + ", replicas=2" * copies
        modes.append(_division(name, plan, times, possible / slow[0], "served"))
    return modes


def _exchange_s(plan: Plan, number: int, window_s: float = 0.0, *, copies: bool = False) -> float:
    workload, layout = plan.training.parts[number].workload, plan.layouts[number]
    return served_s(workload, plan.workers, plan.helpers, layout, window_s=window_s, copies=copies)


def _loose(plan: Plan, speeds: Sequence[float], jitter: float, possible: float) -> list[Division]:
    """Return the time of steps that do not wait for all hosts, for an equal number of samples.

    Where hosts are slow, those modes are left out that would always drop the same hosts' samples.
    """
    num_hosts, per_host = len(speeds), plan.workers.instance.num_accelerators
    rules = {
        f"bounded, staleness={s}": (WaitingRule(num_hosts, num_hosts, staleness=s), 1) for s in (1, 2, 4)
    }
    few, text = num_hosts - 1, (num_hosts - 1) * per_host
    drop = WaitingRule(num_hosts, few, grace_s=_GRACE) if few > 1 else None
    rounds = f"local, local_steps={LOCAL_STEPS}"
    if drop and len(set(speeds)) == 1:
        rules[f"bounded, wait_for={text}"] = (drop, 1)
    if drop:
        late = WaitingRule(num_hosts, few, late="next", staleness=4, grace_s=_GRACE)
        rules[f"bounded, wait_for={text}, late=next, staleness=4"] = (late, 1)
    rules[rounds] = rules[f"{rounds}{_STREAMED}"] = (WaitingRule(num_hosts, num_hosts), LOCAL_STEPS)
    if drop and len(set(speeds)) == 1:
        rules[f"{rounds}, wait_for={text}"] = (drop, LOCAL_STEPS)
    rules["async"] = (WaitingRule(num_hosts, 1, "next", asynchronous=True), 1)
    num_steps = max(100, min(NUM_STEPS, _MOST_SIMULATED // num_hosts))
    modes = []
    for name, (rule, every) in rules.items():
        num_taken = num_hosts * num_steps if rule.asynchronous else num_steps
        seconds = _factors(jitter, num_hosts, num_steps, every).mean(axis=2) / np.array(speeds)[:, None]
        waited_s, num_used = simulate(rule, seconds.tolist(), num_taken)
        scale = num_hosts / num_used
        streams = name.endswith(_STREAMED)
        times = [
            scale * _loose_step_s(plan, number, waited_s, rule, every, streams=streams)
            for number in range(len(plan.steps))
        ]
        kind: Literal["loose", "compared"] = "compared" if rule.asynchronous else "loose"
        reason = _reason_of(rule, every)
        modes.append(_division(name, plan, times, possible / (waited_s * scale), kind, reason))
    return modes


def _reason_of(rule: WaitingRule, every: int) -> str:
    if every > 1:
        last = ", and not for the last one" * (not rule.waits_for_all)
        return f"hosts wait for each other and for the network once in {every} steps{last}"
    if rule.waits_for_all:
        return f"hosts go on for {rule.staleness} steps while another is late, and while the network sends"
    return "a step does not wait for its last host"


def _loose_step_s(
    plan: Plan, number: int, waited_s: float, rule: WaitingRule, every: int, *, streams: bool
) -> float:
    """Return the seconds of a step whose computation takes ``waited_s`` times that of an equal host.

    If it ``streams``, exchanges of fragments overlap the next steps.
    """
    step = plan.steps[number]
    computed_s, sent_s = waited_s * step.computed_s, _exchange_s(plan, number)
    on_servers_s = sent_s + step.optimizer_s / plan.workers.count
    if every > 1:
        hidden_s = _FRAGMENTS * _DELAY * (computed_s + step.optimizer_s) * streams
        return computed_s + step.optimizer_s + max(0.0, sent_s - hidden_s) / every
    if rule.asynchronous:
        return max(computed_s + on_servers_s / rule.num_workers, on_servers_s)
    if rule.waits_for_all:
        return max(computed_s, on_servers_s)
    return computed_s + on_servers_s
