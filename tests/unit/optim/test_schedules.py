"""Learning rates against the closed forms of the references, written out."""

from itertools import pairwise
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.optim.schedules import Constant, InverseSquareRoot, Schedule, learning_rate


def rates(schedule: Schedule, steps: range | None = None) -> list[float]:
    return [learning_rate(schedule, step) for step in steps or range(schedule.total_steps + 1)]


def test_aws_albert_decays_from_the_end_of_the_warmup() -> None:
    schedule = Schedule(base=1.76e-3, end=3e-5, warmup_steps=3125, total_steps=125_000)
    for step in (0, 1, 1000, 3124, 3125):
        assert learning_rate(schedule, step) == pytest.approx(1.76e-3 * step / 3125, rel=1e-12)
    for step in (3125, 3126, 64_000, 124_999, 125_000):
        left = (125_000 - step) / (125_000 - 3125)
        assert learning_rate(schedule, step) == pytest.approx((1.76e-3 - 3e-5) * left + 3e-5, rel=1e-12)
    assert learning_rate(schedule, 10**9) == 3e-5


@pytest.mark.parametrize("power", [1.0, 0.5, 2.0])
def test_google_and_nvidia_count_the_decay_from_step_0(power: float) -> None:
    schedule = Schedule(base=6e-3, warmup_steps=2000, total_steps=7038, power=power, decay_from="start")
    for step in (0, 1, 1999):
        assert learning_rate(schedule, step) == pytest.approx(6e-3 * step / 2000, rel=1e-12)
    for step in (2000, 2001, 5000, 7037):
        assert learning_rate(schedule, step) == pytest.approx(6e-3 * (1 - step / 7038) ** power, rel=1e-9)
    jump = learning_rate(schedule, 2000) / learning_rate(schedule, 1999)
    assert jump == pytest.approx((1 - 2000 / 7038) ** power * 2000 / 1999)
    assert learning_rate(schedule, 7038) == 0.0


def test_lans_is_a_trapezoid() -> None:
    schedule = Schedule(base=6.75e-3, warmup_steps=1500, constant_steps=963, total_steps=3519)
    assert learning_rate(schedule, 750) == pytest.approx(6.75e-3 / 2)
    assert rates(schedule, range(1500, 2464)) == [6.75e-3] * 964
    assert learning_rate(schedule, 2464) == pytest.approx(6.75e-3 * (3519 - 2464) / (3519 - 2463))
    assert learning_rate(schedule, 2991) == pytest.approx(6.75e-3 / 2)
    assert learning_rate(schedule, 3519) == 0.0


def test_constant_linear_and_no_warmup() -> None:
    assert rates(Schedule(base=0.3, total_steps=5, power=0.0)) == [0.3] * 6
    linear = Schedule(base=1.0, total_steps=4)
    assert rates(linear) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(linear) == rates(Schedule(base=1.0, total_steps=4, decay_from="start"))
    assert rates(Schedule(base=1.0, end=0.5, total_steps=4, power=2.0))[2] == 0.5 + 0.5 * 0.25


def test_warmup_to_the_very_end() -> None:
    assert rates(Schedule(base=1.0, warmup_steps=4, total_steps=4)) == [0.0, 0.25, 0.5, 0.75, 0.0]
    held = Schedule(base=1.0, warmup_steps=2, constant_steps=2, total_steps=4)
    assert rates(held) == [0.0, 0.5, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_decay_never_rises_and_stays_within_bounds(power: float) -> None:
    values = rates(Schedule(base=2.0, end=0.1, warmup_steps=10, total_steps=200, power=power))
    assert all(later >= earlier for earlier, later in pairwise(values[:11]))
    assert all(later <= earlier for earlier, later in pairwise(values[10:]))
    assert max(values) == 2.0
    assert values[-1] == 0.1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base": -1.0}, "base=-1.0"),
        ({"base": float("nan")}, "base=nan"),
        ({"end": 2.0}, "end=2.0 .* above base=1.0"),
        ({"power": -0.5}, "power=-0.5"),
        ({"total_steps": 0}, "total_steps=0 must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_steps": 8, "constant_steps": 3}, "warmup_steps=8 and constant_steps=3 .* total_steps=10"),
        ({"decay_from": "middle"}, "'middle' must be 'warmup' or 'start'"),
        ({"decay_from": "start", "constant_steps": 1}, "decay_from='warmup'"),
    ],
)
def test_wrong_schedules_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Schedule(**{"base": 1.0, "total_steps": 10, **values})
    with pytest.raises(UsageError, match="step=-1"):
        learning_rate(Schedule(base=1.0, total_steps=10), -1)


def test_t5_is_level_and_then_falls_with_the_root_of_the_steps() -> None:
    schedule = InverseSquareRoot()
    for step in (0, 1, 9_999, 10_000):
        assert learning_rate(schedule, step) == pytest.approx(0.01, rel=1e-12)
    assert learning_rate(schedule, 10_001) < 0.01
    assert learning_rate(schedule, 1_000_000) == pytest.approx(1e-3, rel=1e-12)
    assert learning_rate(InverseSquareRoot(base=2.0, hold_steps=4), 16) == pytest.approx(0.5)
    assert [learning_rate(Constant(base=1e-3), step) for step in (0, 7, 10**9)] == [1e-3] * 3


def test_wrong_values_of_endless_schedules_are_refused() -> None:
    with pytest.raises(UsageError, match="hold_steps=0 must be at least 1"):
        InverseSquareRoot(hold_steps=0)
    with pytest.raises(UsageError, match="base=-1"):
        Constant(base=-1.0)
    with pytest.raises(UsageError, match="step=-1"):
        learning_rate(Constant(base=1.0), -1)
