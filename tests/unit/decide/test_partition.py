"""Cuts: the dynamic programme is what trying everything finds, and the search never makes a step slower."""

import random
import re
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.decide.cost import Link, ModelCost, Unit, stage_costs
from shoal.decide.partition import (
    DoesNotFit,
    Memory,
    in_gb,
    partition,
    rank_bytes,
    refine,
)
from shoal.decide.pipeline_schedules import make_schedule
from shoal.decide.pipeline_simulator import simulate
from shoal.errors import UsageError

NAMES = [f"weight.{index}" for index in range(6)]
SIZES = {name: 10 + 30 * index for index, name in enumerate(NAMES)}


def random_cost(rng, num_units):
    """Costs with whole numbers, so that sums are exact; the few names make many parameters tied."""
    units = tuple(
        Unit(
            name=f"unit.{index}",
            forward_s=rng.randint(0, 9),
            backward_s=rng.randint(0, 19),
            parameters=tuple((name, SIZES[name]) for name in rng.sample(NAMES, rng.randint(0, 3))),
            saved_bytes=rng.randint(0, 40),
        )
        for index in range(num_units)
    )
    return ModelCost(units=units, relay_bytes=tuple(rng.randint(0, 30) for _ in range(num_units - 1)))


def all_cuts(cost, num_stages):
    return combinations(range(1, len(cost.units)), num_stages - 1)


def slowest_s(cost, cuts, link):
    """The slowest stage with its relay there and back."""
    return max(
        s.forward_s
        + s.backward_s
        + 2 * (link.latency_s + s.relay_bytes / link.bytes_per_s) * bool(s.relay_bytes)
        for s in stage_costs(cost, cuts)
    )


def stage_bytes(cost, cuts, memory, kept):
    return [
        s.parameter_bytes * (1 + memory.gradient_ratio + memory.optimizer_ratio)
        + k * (s.saved_bytes + s.relay_bytes)
        for s, k in zip(stage_costs(cost, cuts), kept, strict=True)
    ]


@given(seed=st.integers(0, 2**32), num_units=st.integers(1, 8), data=st.data())
@settings(max_examples=150, deadline=None)
def test_cuts_are_the_best_of_all(seed, num_units, data):
    cost = random_cost(random.Random(seed), num_units)
    num_stages = data.draw(st.integers(1, num_units))
    link = Link(bytes_per_s=4.0, latency_s=0.5)
    cuts = partition(cost, num_stages, link=link)
    assert len(cuts) == num_stages - 1
    assert slowest_s(cost, cuts, link) == min(slowest_s(cost, c, link) for c in all_cuts(cost, num_stages))


@given(seed=st.integers(0, 2**32), num_units=st.integers(2, 8), data=st.data())
@settings(max_examples=150, deadline=None)
def test_cuts_are_the_best_of_those_that_fit(seed, num_units, data):
    """Under a limit: the fastest of all cuts within it; where there are none, exactly what is missing."""
    cost = random_cost(random.Random(seed), num_units)
    num_stages = data.draw(st.integers(1, num_units))
    memory = Memory(
        limit_bytes=data.draw(st.integers(100, 3000)),
        gradient_ratio=1.0,
        optimizer_ratio=2.0,
        reserved_bytes=50,
    )
    link = Link(bytes_per_s=4.0, latency_s=0.5)
    kept = range(num_stages, 0, -1)
    needed = {cuts: max(stage_bytes(cost, cuts, memory, kept)) + 50 for cuts in all_cuts(cost, num_stages)}
    fitting = [cuts for cuts, num_bytes in needed.items() if num_bytes <= memory.limit_bytes]
    if fitting:
        cuts = partition(cost, num_stages, link=link, memory=memory)
        assert cuts in fitting
        assert slowest_s(cost, cuts, link) == min(slowest_s(cost, c, link) for c in fitting)
    else:
        with pytest.raises(DoesNotFit) as caught:
            partition(cost, num_stages, link=link, memory=memory)
        assert caught.value.missing_bytes == min(needed.values()) - memory.limit_bytes


def test_optimizing_for_memory_makes_the_fullest_stage_least():
    for seed in range(20):
        cost = random_cost(random.Random(seed), 8)
        memory = Memory(limit_bytes=10**6)
        kept = (2, 2, 2)
        fullest = {cuts: max(stage_bytes(cost, cuts, memory, kept)) for cuts in all_cuts(cost, 3)}
        cuts = partition(cost, 3, memory=memory, num_kept=kept, memory_weight=1.0)
        assert fullest[cuts] == min(fullest.values())
        by_default = partition(cost, 3, memory=memory, num_kept=kept, optimize="memory")
        assert by_default == partition(cost, 3, memory=memory, num_kept=kept, memory_weight=0.8)
        assert partition(cost, 3, num_kept=kept) == partition(cost, 3, num_kept=kept, memory_weight=0.0)


def test_a_rank_counts_a_parameter_of_several_of_its_stages_once():
    units = tuple(
        Unit(name=name, forward_s=1, backward_s=2, parameters=parameters, saved_bytes=100)
        for name, parameters in (
            ("embeddings", (("table", 1000),)),
            ("block.0", (("w0", 10),)),
            ("block.1", (("w1", 20),)),
            ("head", (("table", 1000), ("bias", 1))),
        )
    )
    cost = ModelCost(units=units, relay_bytes=(1, 2, 3))
    memory = Memory(limit_bytes=0, gradient_ratio=0.5, optimizer_ratio=1.5, reserved_bytes=7)
    vee = make_schedule("vee", num_ranks=2, num_virtual=2, num_micro_batches=1)
    assert rank_bytes(cost, (1, 2, 3), vee, memory) == (7 + 3 * 1001 + 201, 7 + 3 * 30 + 205)
    loop = make_schedule("bfs", num_ranks=2, num_virtual=2, num_micro_batches=3)
    assert rank_bytes(cost, (1, 2, 3), loop, memory) == (7 + 3 * 1020 + 3 * 204, 7 + 3 * 1011 + 3 * 202)
    assert rank_bytes(cost, (1, 2, 3), loop) == (1020 + 612, 1011 + 606)
    recomputing = replace(cost, recomputed_bytes=50)
    assert rank_bytes(recomputing, (1, 2, 3), loop) == (1020 + 612 + 50, 1011 + 606 + 50)


def test_sharded_state_keeps_whole_parameters_and_gradients_beside_the_shard():
    memory = Memory(limit_bytes=0, gradient_ratio=1.0, optimizer_ratio=6.0, shards=4)
    assert memory.state_bytes(100) == 200 + 800 / 4
    assert Memory(limit_bytes=0, gradient_ratio=1.0, optimizer_ratio=6.0).state_bytes(100) == 800


@pytest.mark.parametrize(("name", "num_virtual"), [("1f1b", 1), ("interleaved", 2), ("bfs", 2)])
def test_the_search_ends_in_a_step_that_no_single_cut_makes_faster(name, num_virtual):
    for seed in range(5):
        cost = random_cost(random.Random(seed), 14)
        link = Link(bytes_per_s=8.0, latency_s=0.2)
        schedule = make_schedule(name, num_ranks=2, num_virtual=num_virtual, num_micro_batches=4)

        def step_s(cuts, cost=cost, schedule=schedule, link=link):
            return simulate(schedule, stage_costs(cost, cuts), link).makespan_s

        start = partition(cost, 2 * num_virtual, link=link)
        found = refine(cost, start, schedule, link=link)
        assert step_s(found) <= step_s(start)
        for index, cut in enumerate(found):
            for moved in (cut - 1, cut + 1):
                neighbour = [*found[:index], moved, *found[index + 1 :]]
                if all(a < b for a, b in zip([0, *neighbour], [*neighbour, 14], strict=True)):
                    assert step_s(neighbour) >= step_s(found)


def test_the_search_finds_the_best_cut_of_two_stages():
    """One cut of nine: moves by 8, 4, 2 and 1 must not stop in front of a slower neighbour."""
    schedule = make_schedule("1f1b", num_ranks=2, num_virtual=1, num_micro_batches=4)
    link = Link(bytes_per_s=8.0, latency_s=0.2)
    for seed in range(20):
        cost = random_cost(random.Random(seed), 10)
        best = min(simulate(schedule, stage_costs(cost, c), link).makespan_s for c in all_cuts(cost, 2))
        found = refine(cost, partition(cost, 2, link=link), schedule, link=link)
        assert simulate(schedule, stage_costs(cost, found), link).makespan_s <= 1.05 * best


def test_the_search_puts_memory_first():
    cost = random_cost(random.Random(1), 12)
    schedule = make_schedule("1f1b", num_ranks=3, num_virtual=1, num_micro_batches=6)
    least = min(max(rank_bytes(cost, c, schedule, Memory(limit_bytes=0))) for c in all_cuts(cost, 3))
    memory = Memory(limit_bytes=int(1.1 * least))
    found = refine(cost, (4, 8), schedule, memory=memory)
    assert max(rank_bytes(cost, found, schedule, memory)) <= memory.limit_bytes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda cost: partition(cost, 9),
            "9 stages need 8 cut points, and the model has 7: take at most 8 stages",
        ),
        (lambda cost: partition(cost, 0), "the number of stages is 0"),
        (
            lambda cost: partition(cost, 2, memory_weight=1.5),
            "memory_weight is 1.5; it must be between 0 and 1",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(call, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        call(random_cost(random.Random(0), 8))


def test_a_limit_that_nothing_meets_says_what_is_missing():
    units = tuple(
        Unit(name=f"u{i}", forward_s=1, backward_s=1, parameters=((f"w{i}", 2 * 10**9),)) for i in range(4)
    )
    cost = ModelCost(units=units, relay_bytes=(0, 0, 0))
    with pytest.raises(
        DoesNotFit, match=re.escape("into 2 stages fit 12 GB a device: the best need 4 GB more")
    ):
        partition(cost, 2, memory=Memory(limit_bytes=12 * 10**9))
    assert partition(cost, 2, memory=Memory(limit_bytes=16 * 10**9)) == (2,)
    assert partition(cost, 2, memory=Memory(limit_bytes=12 * 10**9), limited=False) == (2,)
    with pytest.raises(DoesNotFit, match="the best need 1 GB more"):
        partition(replace(cost, recomputed_bytes=10**9), 2, memory=Memory(limit_bytes=16 * 10**9))


def test_bytes_in_words():
    assert list(map(in_gb, (40 * 10**9, 3_210_000_000, 120_400_000, 1500, 12))) == [
        "40 GB",
        "3.21 GB",
        "120 MB",
        "1.5 kB",
        "12 B",
    ]
