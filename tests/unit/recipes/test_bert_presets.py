"""BERT's presets against the published sets: batches, steps, and learning rates by the sources' formulas."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import resources

import pytest

from shoal.errors import UsageError
from shoal.models.text_config import BertModelConfig
from shoal.optim.lr_schedules import learning_rate
from shoal.recipes.bert import PRESETS, BertConfig, PhaseConfig, TrainConfig
from shoal.train.config import RunConfig
from shoal.train.optim_config import PhasesOptimConfig, schedule_of


def preset(name: str) -> BertConfig:
    file = resources.files("shoal.recipes") / "presets" / "bert" / f"{name}.toml"
    tree = tomllib.loads(file.read_text(encoding="utf-8"))
    optim = {key: None if value == "none" else value for key, value in tree["optim"].items()}
    return BertConfig(
        model=BertModelConfig(**tree["model"]),
        phase1=PhaseConfig(**tree["phase1"]),
        phase2=PhaseConfig(**tree["phase2"]),
        train=TrainConfig(**tree.get("train", {})),
        optim=PhasesOptimConfig(**optim),
        run=RunConfig(**tree.get("run", {})),
    )


# name: for each phase (sequence length, predictions, global batch, steps)
PUBLISHED = {
    "large": [(128, 20, 65_536, 7_038), (512, 80, 32_768, 1_563)],
    "large-lans": [(128, 20, 98_304, 3_519), (512, 80, 33_792, 782)],
    "base": [(128, 20, 32_768, 14_064), (512, 80, 8_192, 6_248)],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    found = [
        (p.max_seq_length, p.max_predictions_per_seq, p.global_batch_size, p.total_steps)
        for _, p in preset(name).phases
    ]
    assert found == PUBLISHED[name]


def nvidia(base: float, warmup: float) -> Callable[[float], float]:
    """DeepLearningExamples' PolyWarmUpScheduler, by the part of the steps that is done."""
    return lambda done: base * done / warmup if done < warmup else base * (1 - done) ** 0.5


def lans(base: float, warmup: float, constant: float) -> Callable[[float], float]:
    """Warm-up, constant rate, linear to 0, by the part of the steps that is done."""
    held = warmup + constant
    return lambda done: base * min(done / warmup, 1.0, (1 - done) / (1 - held))


def aws(base: float, end: float, warmup: float) -> Callable[[float], float]:
    """Linear warm-up, then a square root from there to the end."""

    def rate(done: float) -> float:
        if done < warmup:
            return base * done / warmup
        return end + (base - end) * ((1 - done) / (1 - warmup)) ** 0.5

    return rate


@pytest.mark.parametrize(
    ("name", "number", "published"),
    [
        ("large", 0, nvidia(6e-3, 0.2843)),
        ("large", 1, nvidia(4e-3, 0.128)),
        ("large-lans", 0, lans(6.75e-3, 0.4265, 0.2735)),
        ("large-lans", 1, lans(5e-3, 0.192, 0.108)),
        ("base", 0, aws(5e-3, 3e-4, 2_812 / 14_064)),
        ("base", 1, aws(4e-3, 3e-4, 625 / 6_248)),
    ],
)
def test_learning_rates_follow_the_published_formulas(
    name: str, number: int, published: Callable[[float], float]
) -> None:
    config = preset(name)
    _, phase = config.phases[number]
    num_steps = phase.total_steps
    schedule = schedule_of(phase, config.optim, num_steps)
    border = schedule.warmup_steps
    highest = max(published(step / num_steps) for step in range(num_steps))
    # The sources give parts of all steps, and this whole steps: they differ by less than a step of 500.
    for done in range(num_steps):
        if abs(done - border) > 1:
            found = learning_rate(schedule, done)
            assert found == pytest.approx(published(done / num_steps), abs=2e-3 * highest), done
    peak = learning_rate(schedule, border)
    jump = (1 - border / num_steps) ** 0.5 if name == "large" else 1.0
    assert peak == pytest.approx(schedule.base * jump)


def test_lans_does_not_clip_and_lamb_clips_to_1() -> None:
    assert preset("large-lans").optim.optimizer == "lans"
    assert preset("large-lans").optim.max_grad_norm is None
    assert (preset("large").optim.optimizer, preset("large").optim.max_grad_norm) == ("lamb", 1.0)


def test_large_has_the_sizes_of_bert_large() -> None:
    assert preset("large").model.num_parameters == 336_226_108
    assert preset("large-lans").model == preset("large").model
    assert set(PRESETS) == {*PUBLISHED, "tiny"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase1": {"total_steps": 0}, "phase2": {"total_steps": 0}}, "both 0: nothing to train"),
        ({"phase2": {"total_steps": -1}}, "phase2.total_steps -1 must be at least 0"),
        (
            {"phase1": {"warmup_steps": 11}},
            "phase1.warmup_steps 11 must lie between 0 and phase1.total_steps 10",
        ),
        ({"phase2": {"max_seq_length": 513}}, "phase2.max_seq_length 513 is more than model.max_position"),
        ({"phase2": {"global_batch_size": 0}}, "phase2.global_batch_size 0 must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_phases_that_cannot_be(changes: dict[str, dict[str, int]], message: str) -> None:
    phases = {
        name: PhaseConfig(**{"total_steps": 10, **changes.get(name, {})}) for name in ("phase1", "phase2")
    }
    with pytest.raises(UsageError, match=message):
        BertConfig(**phases)
