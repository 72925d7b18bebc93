"""Learning rates against the closed forms of the references, written out."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from shoal.errors import UsageError
from shoal.optim.lr_schedules import (
    Cosine,
    InverseSquareRoot,
    LRSchedule,
    Steps,
    learning_rate,
)


def rates(schedule: LRSchedule | Cosine, steps: range | None = None) -> list[float]:
    return [learning_rate(schedule, step) for step in steps or range(schedule.total_steps + 1)]


def test_aws_albert_decays_from_the_end_of_the_warmup() -> None:
    schedule = LRSchedule(base=1.76e-3, end=3e-5, warmup_steps=3125, total_steps=125_000)
    for step in (0, 1, 1000, 3124, 3125):
        assert learning_rate(schedule, step) == pytest.approx(1.76e-3 * step / 3125, rel=1e-12)
    for step in (3125, 3126, 64_000, 124_999, 125_000):
        left = (125_000 - step) / (125_000 - 3125)
        assert learning_rate(schedule, step) == pytest.approx((1.76e-3 - 3e-5) * left + 3e-5, rel=1e-12)
    assert learning_rate(schedule, 10**9) == 3e-5


@pytest.mark.parametrize("power", [1.0, 0.5, 2.0])
def test_google_and_nvidia_count_the_decay_from_step_0(power: float) -> None:
    schedule = LRSchedule(base=6e-3, warmup_steps=2000, total_steps=7038, power=power, decay_from="start")
    for step in (0, 1, 1999):
        assert learning_rate(schedule, step) == pytest.approx(6e-3 * step / 2000, rel=1e-12)
    for step in (2000, 2001, 5000, 7037):
        assert learning_rate(schedule, step) == pytest.approx(6e-3 * (1 - step / 7038) ** power, rel=1e-9)
    jump = learning_rate(schedule, 2000) / learning_rate(schedule, 1999)
    assert jump == pytest.approx((1 - 2000 / 7038) ** power * 2000 / 1999)
    assert learning_rate(schedule, 7038) == 0.0


def test_lans_is_a_trapezoid() -> None:
    schedule = LRSchedule(base=6.75e-3, warmup_steps=1500, constant_steps=963, total_steps=3519)
    assert learning_rate(schedule, 750) == pytest.approx(6.75e-3 / 2)
    assert rates(schedule, range(1500, 2464)) == [6.75e-3] * 964
    assert learning_rate(schedule, 2464) == pytest.approx(6.75e-3 * (3519 - 2464) / (3519 - 2463))
    assert learning_rate(schedule, 2991) == pytest.approx(6.75e-3 / 2)
    assert learning_rate(schedule, 3519) == 0.0


def test_constant_linear_and_no_warmup() -> None:
    assert rates(LRSchedule(base=0.3, total_steps=5, power=0.0)) == [0.3] * 6
    linear = LRSchedule(base=1.0, total_steps=4)
    assert rates(linear) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(linear) == rates(LRSchedule(base=1.0, total_steps=4, decay_from="start"))
    assert rates(LRSchedule(base=1.0, end=0.5, total_steps=4, power=2.0))[2] == 0.5 + 0.5 * 0.25


def test_warmup_to_the_very_end() -> None:
    assert rates(LRSchedule(base=1.0, warmup_steps=4, total_steps=4)) == [0.0, 0.25, 0.5, 0.75, 0.0]
    held = LRSchedule(base=1.0, warmup_steps=2, constant_steps=2, total_steps=4)
    assert rates(held) == [0.0, 0.5, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_decay_never_rises_and_stays_within_bounds(power: float) -> None:
    values = rates(LRSchedule(base=2.0, end=0.1, warmup_steps=10, total_steps=200, power=power))
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
        LRSchedule(**{"base": 1.0, "total_steps": 10, **values})
    with pytest.raises(UsageError, match="step=-1"):
        learning_rate(LRSchedule(base=1.0, total_steps=10), -1)


def test_t5_is_level_and_then_falls_with_the_root_of_the_steps() -> None:
    schedule = InverseSquareRoot()
    for step in (0, 1, 9_999, 10_000):
        assert learning_rate(schedule, step) == pytest.approx(0.01, rel=1e-12)
    assert learning_rate(schedule, 10_001) < 0.01
    assert learning_rate(schedule, 1_000_000) == pytest.approx(1e-3, rel=1e-12)
    assert learning_rate(InverseSquareRoot(base=2.0, hold_steps=4), 16) == pytest.approx(0.5)
    constant = LRSchedule(base=1e-3, power=0.0, total_steps=10)
    assert [learning_rate(constant, step) for step in (0, 7, 10**9)] == [1e-3] * 3


def test_wrong_values_of_endless_schedules_are_refused() -> None:
    with pytest.raises(UsageError, match="hold_steps=0 must be at least 1"):
        InverseSquareRoot(hold_steps=0)
    with pytest.raises(UsageError, match="base=-1"):
        InverseSquareRoot(base=-1.0)
    with pytest.raises(UsageError, match="step=-1"):
        learning_rate(InverseSquareRoot(), -1)


def test_resnet_of_16384_images_a_step() -> None:
    """0.1 for 256 images, 10 of 90 epochs of 78 steps to warm up from 0.001, then power 2 to 1e-5."""
    schedule = LRSchedule(
        base=6.4, end=1e-5, power=2.0, warmup_from=1e-3, warmup_steps=780, total_steps=90 * 78
    )
    by_hand = {0: 1e-3, 390: 3.2005, 780: 6.4, 3_900: 1.6000075, 5_460: 0.4000094, 7_020: 1e-5, 9_999: 1e-5}
    for step, rate in by_hand.items():
        assert learning_rate(schedule, step) == pytest.approx(rate, abs=1e-7)


@pytest.mark.parametrize(
    ("batch", "peak", "warmup_epochs", "epochs"), [(8_192, 17.0, 5, 42), (32_768, 21.2, 16, 58)]
)
def test_lars_of_mlperf(batch: int, peak: float, warmup_epochs: int, epochs: int) -> None:
    """The published sets: linear from 0, then power 2 to 1e-4."""
    of_epoch = 1_281_167 // batch
    schedule = LRSchedule(
        base=peak,
        end=1e-4,
        power=2.0,
        warmup_steps=warmup_epochs * of_epoch,
        total_steps=epochs * of_epoch,
    )
    for epoch in range(warmup_epochs):
        assert learning_rate(schedule, epoch * of_epoch) == pytest.approx(peak * epoch / warmup_epochs)
    for epoch in range(warmup_epochs, epochs + 1):
        left = 1 - (epoch - warmup_epochs) / (epochs - warmup_epochs)
        expected = (peak - 1e-4) * left**2 + 1e-4
        assert learning_rate(schedule, epoch * of_epoch) == pytest.approx(expected, rel=1e-12)


def torch_rates(base: float, num_steps: int, **schedules: tuple[type, dict[str, Any]]) -> list[float]:
    """Return the rates of torch's schedulers, all of which change the same one."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=base)
    made = [kind(optimizer, **options) for kind, options in schedules.values()]
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for schedule in made:
            schedule.step()
    return found


def test_cosine_is_torchs() -> None:
    schedule = Cosine(base=0.06, end=6e-5, total_steps=200)
    expected = torch_rates(
        0.06, 201, decay=(torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 200, "eta_min": 6e-5})
    )
    assert rates(schedule) == pytest.approx(expected, rel=1e-9)
    warmed = Cosine(base=0.06, end=6e-5, warmup_steps=50, total_steps=250)
    assert rates(warmed, range(50, 251)) == pytest.approx(rates(schedule), rel=1e-12)
    assert rates(warmed, range(50)) == pytest.approx([0.06 * step / 50 for step in range(50)])
    assert learning_rate(warmed, 150) == pytest.approx((0.06 + 6e-5) / 2)
    assert learning_rate(warmed, 10**6) == 6e-5


def test_steps_are_torchs_and_detectrons() -> None:
    schedule = Steps(base=0.1, milestones=(30, 60, 80), factor=0.1)
    expected = torch_rates(
        0.1, 90, steps=(torch.optim.lr_scheduler.MultiStepLR, {"milestones": [30, 60, 80], "gamma": 0.1})
    )
    assert [learning_rate(schedule, step) for step in range(90)] == pytest.approx(expected, rel=1e-12)
    # Mask R-CNN: 1,000 steps from a thousandth of 0.02, drops after 60,000 and 80,000
    schedule = Steps(base=0.02, warmup_from=2e-5, warmup_steps=1_000, milestones=(60_000, 80_000))
    by_hand = {0: 2e-5, 500: 0.01001, 1_000: 0.02, 59_999: 0.02, 60_000: 2e-3, 79_999: 2e-3, 80_000: 2e-4}
    for step, rate in by_hand.items():
        assert learning_rate(schedule, step) == pytest.approx(rate, rel=1e-12)


def test_a_warmup_goes_before_the_milestones_within_it() -> None:
    schedule = Steps(base=1.0, warmup_steps=4, milestones=(2, 6), factor=0.5)
    assert [learning_rate(schedule, step) for step in range(7)] == [0.0, 0.25, 0.5, 0.75, 0.5, 0.5, 0.25]
    assert learning_rate(Steps(base=0.5), 10**6) == 0.5


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (Steps, {"milestones": (5, 5)}, r"milestones=\(5, 5\) must be steps of at least 1, and rise"),
        (Steps, {"milestones": (0,)}, "milestones="),
        (Steps, {"factor": -0.1}, "factor=-0.1"),
        (Steps, {"warmup_from": 2.0}, "warmup_from=2.0 .* above base=1.0"),
        (Steps, {"warmup_from": -1.0}, "warmup_from=-1.0"),
        (Cosine, {"total_steps": 4, "warmup_steps": 5}, "warmup_steps=5 must fit into total_steps=4"),
        (Cosine, {"total_steps": 4, "end": 1.5}, "end=1.5 .* above base=1.0"),
        (Cosine, {"total_steps": 0}, "total_steps=0 must be at least 1"),
    ],
)
def test_wrong_schedules_of_vision_are_refused(make: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**{"base": 1.0, **values})
