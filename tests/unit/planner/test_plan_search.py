"""Ranking of layouts, what helpers bring, what breaks at scale, and the command itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from plan_made import DEVICE, hosts, model
from shoal.decide.layout import Layout
from shoal.decide.workload import LayerPart
from shoal.errors import UsageError
from shoal.planner.answer import best_of_each, helpers_sentence, reason
from shoal.planner.convergence import Convergence
from shoal.planner.goal import Aim, seconds_of
from shoal.planner.hardware import Accelerator, Instance, Machines
from shoal.planner.network import RINGS
from shoal.planner.prediction import Part, StoredData, Training, predict, run_time
from shoal.planner.scaling_limits import breaks_first, strains
from shoal.planner.search import helpers_to_try, layouts_of, search

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
    for plan in search(training, hosts(8), [hosts(8, per_host=0, accelerator=None, price=1.0)]):
        assert sum(plan.seconds_by_cause.values()) == pytest.approx(plan.total_s)
        price = 8 * 10.0 + (8 * 1.0 if plan.helpers else 0.0)
        assert plan.dollars == pytest.approx(price * plan.total_s / 3600)
        assert 0 < plan.efficiency <= 1.0001


def test_time_and_cost_rank_differently() -> None:
    training = Training(recipe="made", parts=(part(),))
    # A slow network, so that helpers pay in time; and dear, so that they do not in money.
    workers, helpers = hosts(8, nic=1e9), hosts(8, per_host=0, nic=1e9, accelerator=None, price=1000.0)
    fastest = search(training, workers, [helpers], goal="time")[0]
    cheapest = search(training, workers, [helpers], goal="cost")[0]
    assert fastest.helpers and not cheapest.helpers
    assert fastest.total_s < cheapest.total_s and (fastest.dollars or 0) > (cheapest.dollars or 0)
    assert "save" in helpers_sentence(fastest, cheapest) and "dollars more" in helpers_sentence(
        fastest, cheapest
    )
    with pytest.raises(UsageError, match="has no price per hour"):
        search(training, hosts(8, price=None), goal="cost")
    best, second, *_ = best_of_each(search(training, workers, [helpers]))
    assert reason(best, best).startswith("the best; it loses most to network")
    assert "network" in reason(second, best)


def test_of_plans_that_are_as_good_the_simplest_comes_first() -> None:
    training = Training(recipe="made", parts=(part(),))
    alone = search(training, hosts(1))
    assert alone[-1].total_s == pytest.approx(alone[0].total_s) and alone[0].layouts[0].algorithm == "ring"
    fast, slow = (search(training, hosts(8, nic=nic)) for nic in (1e15, 1e8))
    assert fast[0].layouts[0].algorithm == "ring" != fast[1].layouts[0].algorithm
    assert slow[0].total_s == pytest.approx(min(plan.total_s for plan in slow), rel=1e-3)


def test_sets_of_helpers_are_tried_and_ranked_together() -> None:
    training = Training(recipe="made", parts=(part(),))
    sets = [hosts(count, per_host=0, nic=1e9, accelerator=None, price=20.0) for count in (1, 4, 8)]
    plans = search(training, hosts(8, nic=1e9), sets)
    alone = [search(training, hosts(8, nic=1e9), [each], algorithms=["two-hop-helpers"])[0] for each in sets]
    found = {plan.helpers.count: plan.total_s for plan in plans if plan.helpers}
    assert found == {plan.helpers.count: plan.total_s for plan in alone if plan.helpers}
    assert plans[0].helpers == sets[-1], "the fastest network has most helpers"
    assert [plan.total_s for plan in plans] == sorted(plan.total_s for plan in plans)


def test_helpers_that_another_type_beats_in_price_and_network_are_not_tried() -> None:
    def helper(
        name: str, nic: float, price: float | None, accelerator: Accelerator | None = None
    ) -> Instance:
        made = hosts(1, per_host=0, accelerator=accelerator, nic=nic, price=price).instance
        return replace(made, name=name)

    slow, dear, fast = helper("slow", 1e9, 1.0), helper("dear", 1e9, 3.0), helper("fast", 1e10, 2.0)
    others = helper("unpriced", 1e11, None), helper("trains", 1e11, 0.1, DEVICE)
    tried = helpers_to_try(hosts(6), [slow, dear, fast, *others])
    assert [(each.instance.name, each.count) for each in tried] == [
        (name, count) for name in ("slow", "fast") for count in (1, 3, 6)
    ]


def test_a_limit_chooses_among_the_plans_that_keep_it() -> None:
    training = Training(recipe="made", parts=(part(),))
    plans = [search(training, hosts(count))[0] for count in (1, 2, 8)]
    seconds, dollars = ([getattr(plan, name) for plan in plans] for name in ("total_s", "dollars"))
    assert sorted(seconds, reverse=True) == seconds and sorted(dollars) == dollars
    assert Aim(by_s=seconds[1]).chosen(plans) is plans[1], "the cheapest in time"
    assert Aim(by_s=seconds[1], goal="time").chosen(plans) is plans[2]
    assert Aim(budget=dollars[1]).chosen(plans) is plans[1], "the fastest within the budget"
    assert Aim(budget=dollars[1], by_s=seconds[1]).chosen(plans) is plans[1]
    unpriced = search(training, hosts(16, price=None))[0]
    assert Aim(budget=dollars[2]).chosen([unpriced, *plans]) is plans[2], "no price keeps no budget"
    with pytest.raises(UsageError, match=r"none of 3 clusters would take at most .*: the fastest, 8xhost"):
        Aim(by_s=seconds[2] / 2).chosen(plans)


@pytest.mark.parametrize(("text", "seconds"), [("90min", 5400.0), ("1.5h", 5400.0), ("1d 6h", 108000.0)])
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text, "--by") == seconds


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
        chosen(part(parameters=600_000_000), has_stages=False, has_shards=False)
    with pytest.raises(UsageError, match=r"nearest, 1 stage with micro-batches of 1 and sharded state"):
        chosen(part(parameters=600_000_000), has_stages=False)


def in_parts(made: Part, *widths: int, divided: tuple[tuple[int, ...], ...] = ((7,),)) -> Part:
    """A part whose layers divide evenly over these numbers of workers.

    Args:
        divided: shapes of weights; by default one that does not divide into shards.
    """
    counted = made.workload
    kept = counted.activations
    parts = {
        n: LayerPart(num_parameters=counted.num_parameters // n, activations=kept, divided=divided)
        for n in widths
    }
    return replace(made, workload=replace(counted, parts=parts))


def test_a_model_that_fits_in_shards_alone_is_planned_in_shards() -> None:
    large = part(parameters=600_000_000)  # 24 GB of weights, whole at a time: 0.3 of them
    in_blocks = replace(large, workload=replace(large.workload, gathered=0.3))
    (found,) = chosen(in_blocks, has_stages=False)
    assert (found.stages, found.shard, found.sharded_optimizer) == (1, True, False)
    for training in (
        Training(recipe="made", parts=(in_blocks,), has_stages=False, has_shards=False),
        Training(recipe="made", parts=(in_blocks,), has_stages=False, shard_optimizer=True),
    ):
        with pytest.raises(UsageError, match="fits on no layout"):
            search(training, hosts(4))
    plans = search(Training(recipe="made", parts=(in_blocks,), has_stages=False), hosts(4))
    assert {plan.layouts[0].algorithm for plan in plans} == set(RINGS)
    assert any(layout.stages > 1 for layout in chosen(in_blocks)), "stages are ranked beside shards"


def test_layers_are_divided_over_the_fewest_devices_that_fit_and_twice_as_many() -> None:
    large = in_parts(part(parameters=600_000_000), 2, 4, 8)  # 96 GB of state on 32 GiB
    found = chosen(large, has_stages=False)
    widths = {(layout.tensor, layout.sharded_optimizer) for layout in found}
    assert widths == {(2, True), (4, False)}
    odd = chosen(in_parts(part(1152, parameters=600_000_000), 2, 3), hosts(3, per_host=3), has_stages=False)
    assert {layout.tensor for layout in odd} == {3}, "2 do not divide a host"
    assert {layout.tensor for layout in chosen(in_parts(part(), 2, 4))} == {1}, "it fits on one device"
    assert {layout.tensor for layout in chosen(large, has_tensor=False)} == {1}
    huge = in_parts(part(parameters=6_000_000_000), 2, 4, 8)
    assert {(each.tensor, each.stages) for each in chosen(huge, hosts(16))} == {(8, 4), (8, 8)}


def test_divided_layers_are_sharded_where_their_weights_divide_evenly() -> None:
    """Weights and gradients of 96 GB on 32 GiB: a half of 0.3 of them, and of each shard's, is 20 GB."""
    large = part(parameters=1_200_000_000)
    in_blocks = replace(large, workload=replace(large.workload, gathered=0.3))
    evenly = in_parts(in_blocks, 2, divided=((64, 6), (6, 64), (32,)))
    assert [(each.tensor, each.shard) for each in chosen(evenly, has_stages=False)] == [(2, True)]
    for sizes in ((6, 6), (16,)):
        with pytest.raises(UsageError, match="fits on no layout"):
            chosen(in_parts(in_blocks, 2, divided=(sizes,)), has_stages=False)


def test_a_batch_need_not_divide_over_devices_that_do_not_hold_the_model() -> None:
    with pytest.raises(UsageError, match=r"train\.global_batch_size 8 does not divide over 32 workers"):
        chosen(part(8))
    large = in_parts(part(8, parameters=600_000_000), 4)
    assert {(each.tensor, each.stages, each.shard) for each in chosen(large)} == {
        (4, 1, False),
        (1, 4, False),
        (1, 8, False),
    }
    with pytest.raises(UsageError, match=r"train\.global_batch_size 7 does not divide over 32 workers"):
        chosen(in_parts(part(7, parameters=600_000_000), 4), has_stages=False)


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
    whole, passes = (
        run_time(replace(part(batch=1000), convergence=table), hosts(1), step_s=0.1, micro_batch=micro)
        for micro in (None, 100)
    )
    of_kernels = whole.evaluations_s - found.evaluations_s
    assert passes.evaluations_s - found.evaluations_s == pytest.approx(10 * of_kernels), "of 1,000 samples"
    assert found.checkpoints_s == pytest.approx(10 * 1e8 * 12 / 8 / 10e9)
    assert found.total_s == pytest.approx(30 + 100 + found.evaluations_s + found.checkpoints_s)


@pytest.mark.parametrize(
    ("num_hosts", "store", "fill_s"),
    [(1, math.inf, 60.0), (4, math.inf, 60.0), (4, 2e10, 60.0), (4, 5e9, 120.0), (1, 1e9, 600.0)],
)
def test_data_are_read_once_before_the_first_step(num_hosts: int, store: float, fill_s: float) -> None:
    """600 GB at 10 GB/s of a host's network, or at the store's rate, however many hosts share it."""
    data, layout = StoredData(num_bytes=6e11, store_bytes_per_s=store), Layout(global_batch=1024)
    training = Training(recipe="made", parts=(part(), part()), start_s=30.0, data=data)
    found, without = (
        predict(each, hosts(num_hosts), [layout, layout]) for each in (training, replace(training, data=None))
    )
    assert [run.start_s for run in found.runs] == [30 + fill_s, 0]
    assert found.total_s - without.total_s == pytest.approx(fill_s)
    assert found.seconds_by_cause["start"] == 30 + fill_s
    assert sum(found.seconds_by_cause.values()) == pytest.approx(found.total_s)
    assert found.dollars == pytest.approx(num_hosts * 10 / 3600 * found.total_s)


@pytest.mark.parametrize(
    ("cache", "store", "fill_s", "share"),
    [
        (6e11, math.inf, 60.0, 3 / 4),  # each host receives 600 GB, a fourth of them from the store
        (5e11, math.inf, 15.0, 3 / 4),  # each its own 150 GB
        (5e11, 5e9, 120.0, 15 / 120 * 3 / 4),  # the store gives 600 GB once
        (1e11, 5e9, 80.0, 10 / 80 * 3 / 4),  # and 400 GB if no more fit
    ],
)
def test_hosts_receive_what_caches_hold(cache: float, store: float, fill_s: float, share: float) -> None:
    """Four hosts with 10 GB/s each."""
    data = StoredData(num_bytes=6e11, store_bytes_per_s=store, cache_bytes=cache)
    assert data.fill_s(hosts(4)) == pytest.approx(fill_s)
    assert data.network_share(hosts(4)) == pytest.approx(share)


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
