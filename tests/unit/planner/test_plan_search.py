"""Ranking of layouts, what helpers bring, what breaks at scale, and the command itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plan_made import hosts, model
from shoal.decide.layout import Layout
from shoal.errors import UsageError
from shoal.planner.answer import best_of_each, helpers_sentence, reason
from shoal.planner.convergence import Convergence
from shoal.planner.hardware import Machines
from shoal.planner.prediction import Part, Training, run_time
from shoal.planner.scaling_limits import breaks_first, strains
from shoal.planner.search import layouts_of, search

TABLE = Convergence(
    name="made",
    source="test",
    points=((1, 10.0), (1 << 30, 10.0)),
    samples_per_epoch=100_000,
    largest_batch=1 << 30,
)


def part(batch: int = 1024, **made: float) -> Part:
    return Part(
        workload=model(**made),
        convergence=TABLE,
        global_batch=batch,
        achieved_flops=1e13,
        basis="made for a test",
    )


def chosen(made: Part, workers: Machines | None = None, **options: bool) -> list[Layout]:
    """The layouts of a training with one part, on 32 devices."""
    training = Training(recipe="made", parts=(made,), **options)
    return [layout for (layout,) in layouts_of(training, workers or hosts(4), algorithm="ring")]


def test_the_parts_of_the_time_add_up_and_cost_follows() -> None:
    training = Training(recipe="made", parts=(part(),), start_s=60.0)
    for plan in search(training, hosts(8), hosts(8, per_host=0, accelerator=None, price=1.0)):
        assert sum(plan.seconds_by_cause.values()) == pytest.approx(plan.total_s)
        price = 8 * 10.0 + (8 * 1.0 if plan.helpers else 0.0)
        assert plan.dollars == pytest.approx(price * plan.total_s / 3600)
        assert 0 < plan.efficiency <= 1.0001


def test_time_and_cost_rank_differently() -> None:
    training = Training(recipe="made", parts=(part(),))
    # A slow network, so that helpers pay in time; and dear, so that they do not in money.
    workers, helpers = hosts(8, nic=1e9), hosts(8, per_host=0, nic=1e9, accelerator=None, price=1000.0)
    fastest = search(training, workers, helpers, goal="time")[0]
    cheapest = search(training, workers, helpers, goal="cost")[0]
    assert fastest.helpers and not cheapest.helpers
    assert fastest.total_s < cheapest.total_s and (fastest.dollars or 0) > (cheapest.dollars or 0)
    assert "save" in helpers_sentence(fastest, cheapest) and "dollars more" in helpers_sentence(
        fastest, cheapest
    )
    with pytest.raises(UsageError, match="has no price per hour"):
        search(training, hosts(8, price=None), goal="cost")
    best, second, *_ = best_of_each(search(training, workers, helpers))
    assert reason(best, best).startswith("the best; it loses most to network")
    assert "network" in reason(second, best)


def test_a_model_is_split_only_when_it_must_be() -> None:
    assert [layout.stages for layout in chosen(part())] == [1]
    large = part(parameters=600_000_000)  # 96 GB of state, 48 of it the optimizer's; 32 GiB a device
    found = chosen(large)
    assert found and all(layout.stages > 1 for layout in found)
    with pytest.raises(
        UsageError, match=r"made fits on no layout of 1xhost: the nearest, .* GiB more than there"
    ):
        chosen(part(parameters=40_000_000_000), hosts(1))


def test_the_optimizer_is_sharded_only_where_its_state_does_not_fit_whole() -> None:
    large = part(parameters=300_000_000)  # 48 GB on 32 GiB: half of it the optimizer's
    first, *others = chosen(large)
    assert (first.stages, first.sharded_optimizer) == (1, True)
    assert others and all(layout.stages > 1 for layout in others)
    assert [layout.sharded_optimizer for layout in chosen(part(), shard_optimizer=True)] == [True]
    with pytest.raises(UsageError, match=r"nearest, 1 stage with micro-batches of 1 and a sharded optimizer"):
        chosen(part(parameters=600_000_000), has_stages=False)


def test_parts_of_a_training_have_one_layout() -> None:
    parts = part(), part(parameters=600_000_000)
    training = Training(recipe="made", parts=parts)
    found = layouts_of(training, hosts(4), algorithm="ring")
    assert found and all(first.stages == second.stages > 1 for first, second in found)
    assert search(training, hosts(4))


def test_evaluations_and_checkpoints_are_counted() -> None:
    table = replace(TABLE, evaluate_every_epochs=2.5, evaluation_samples=8000, evaluation_pause_s=1.0)
    found = run_time(
        replace(part(batch=1000, kernels=0), convergence=table),
        hosts(1),
        step_s=0.1,
        start_s=30.0,
        checkpoint_every_steps=100,
    )
    assert found.num_steps == 1000 and found.steps_s == pytest.approx(100)
    assert found.evaluations_s == pytest.approx(4 * (1.0 + 1000 * 1e10 / 1e13))
    assert found.checkpoints_s == pytest.approx(10 * 1e8 * 12 / 8 / 10e9)
    assert found.total_s == pytest.approx(30 + 100 + found.evaluations_s + found.checkpoints_s)


@pytest.mark.parametrize("num_hosts", [256, 2048, 16384])
def test_many_workers_are_simulated_at_once(num_hosts: int) -> None:
    first = breaks_first(
        part(batch=1 << 20), hosts(num_hosts), Layout(global_batch=1 << 20, algorithm="two-hop")
    )
    assert first and first[0] <= num_hosts


def test_what_breaks_first_depends_on_what_is_stretched() -> None:
    tiny = strains(part(batch=64), hosts(64), Layout(global_batch=64))
    assert tiny[0].assumption == "every replica has a sample" and tiny[0].stretch == 8
    slow = hosts(512, nic=1e12, local=1e13, latency_s=1e-4)
    ring = strains(part(batch=1 << 16), slow, Layout(global_batch=1 << 16))
    assert ring[0].assumption == "latency of hops does not matter"
    beyond = replace(part(batch=1 << 12), convergence=replace(TABLE, largest_batch=1 << 10))
    assert strains(beyond, hosts(2), Layout(global_batch=1 << 12))[0].assumption.startswith("the batch still")
    assert breaks_first(part(batch=1 << 16), hosts(2, nic=1e12), Layout(global_batch=1 << 16)) is None
