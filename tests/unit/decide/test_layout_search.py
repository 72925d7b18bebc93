"""Schedules and layouts chosen: the fastest that fits by trying all, averaging counted, errors that help."""

import random
import re
from itertools import combinations

import pytest

from shoal.decide.autotune import Conditions, ScheduleSearch
from shoal.decide.cost import Link, ModelCost, Unit, stage_costs
from shoal.decide.layout_search import LayoutSearch, averaging_s
from shoal.decide.partition import DoesNotFit, Memory, rank_bytes
from shoal.decide.pipeline_schedules import make_schedule
from shoal.decide.pipeline_simulator import simulate
from shoal.errors import UsageError


def blocks(num_blocks, *, forward_s=0.01, parameter_bytes=1000, saved_bytes=100, relay_bytes=10):
    """Equal blocks, each with a weight of its own."""
    units = tuple(
        Unit(
            name=f"block.{index}",
            forward_s=forward_s,
            backward_s=2 * forward_s,
            parameters=((f"weight.{index}", parameter_bytes),),
            saved_bytes=saved_bytes,
        )
        for index in range(num_blocks)
    )
    return ModelCost(units=units, relay_bytes=(relay_bytes,) * (num_blocks - 1))


def choose_layout(cost, num_devices, memory, *, pipelines=None, num_layouts=5, micro_batch_size=1, **options):
    """The search of ``LayoutSearch``, with micro-batches of the measured size if no others are given."""
    options = {"sizes": (micro_batch_size,), **options}
    search = LayoutSearch(cost=cost, memory=memory, micro_batch_size=micro_batch_size, **options)
    return search.choose(num_devices, pipelines, num_layouts=num_layouts)


def uneven(seed, num_units):
    rng = random.Random(seed)
    units = tuple(
        Unit(name=f"u{i}", forward_s=rng.uniform(0.5, 2), backward_s=rng.uniform(1, 4), saved_bytes=10)
        for i in range(num_units)
    )
    return ModelCost(units=units, relay_bytes=tuple(rng.randint(1, 9) for _ in range(num_units - 1)))


def test_equal_blocks_are_interleaved_and_idle_as_the_formula_says():
    best = ScheduleSearch(cost=blocks(16, relay_bytes=0), num_ranks=4, num_micro_batches=8).choose()[0]
    assert best.schedule.name == "interleaved"
    assert best.num_virtual == 4
    assert best.timeline.bubble == pytest.approx(3 / (4 * 8 + 3))
    assert best.cuts == tuple(range(1, 16))


def test_the_portfolio_is_ranked_and_each_figure_is_that_of_its_own_cuts():
    cost = uneven(0, 12)
    link = Link(bytes_per_s=50.0, latency_s=0.01)
    memory = Memory(limit_bytes=10**6)
    given = Conditions(link=link, memory=memory)
    search = ScheduleSearch(cost=cost, num_ranks=2, num_micro_batches=4, conditions=given)
    choices = search.choose()
    assert (
        len(choices) == 10
    )  # gpipe, 1f1b, vee; interleaved, bfs, backward_first with 1, 2 and 4 stages per rank,
    # of which 1 is 1f1b and gpipe again
    times = [choice.timeline.makespan_s for choice in choices]
    assert times == sorted(times)
    quick = search.choose(num_refined=0)
    quick_times = [choice.timeline.makespan_s for choice in quick]
    assert quick_times == sorted(quick_times)
    assert times[0] <= quick_times[0]
    for choice in choices:
        assert choice.timeline == simulate(choice.schedule, stage_costs(cost, choice.cuts), link)
        assert choice.rank_bytes == rank_bytes(cost, choice.cuts, choice.schedule, memory)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_close_to_the_best_of_all_schedules_and_cuts(seed):
    cost = uneven(seed, 9)
    link = Link(bytes_per_s=50.0, latency_s=0.01)
    given = Conditions(link=link, names=("1f1b", "interleaved"), virtual=(1, 2))
    chosen = ScheduleSearch(cost=cost, num_ranks=2, num_micro_batches=4, conditions=given).choose()[0]
    best = float("inf")
    for name, virtual in (("1f1b", 1), ("interleaved", 2)):
        schedule = make_schedule(name, num_ranks=2, num_virtual=virtual, num_micro_batches=4)
        for cuts in combinations(range(1, 9), 2 * virtual - 1):
            best = min(best, simulate(schedule, stage_costs(cost, cuts), link).makespan_s)
    assert best <= chosen.timeline.makespan_s <= 1.05 * best


def test_given_cuts_decide_the_stages():
    choices = ScheduleSearch(cost=blocks(8), num_ranks=2, num_micro_batches=4, cuts=(1, 3, 6)).choose()
    assert {choice.cuts for choice in choices} == {(1, 3, 6)}
    assert {choice.num_virtual for choice in choices} == {2}
    with pytest.raises(
        UsageError, match="2 cuts make 3 stages, which 2 ranks cannot share equally; give 1 cuts"
    ):
        ScheduleSearch(cost=blocks(8), num_ranks=2, num_micro_batches=4, cuts=(1, 3)).choose()


def test_memory_decides_between_fast_and_small():
    """GPipe, 1F1B and fewer micro-batches at one time, as the limit goes down."""
    cost = blocks(2, parameter_bytes=0, saved_bytes=100, relay_bytes=0)

    def chosen(limit, *names):
        memory = Memory(limit_bytes=limit)
        given = Conditions(memory=memory, names=names)
        return ScheduleSearch(cost=cost, num_ranks=2, num_micro_batches=8, conditions=given).choose()

    assert [c.schedule.name for c in chosen(800, "gpipe", "1f1b")] == ["gpipe", "1f1b"]
    assert [c.schedule.name for c in chosen(799, "gpipe", "1f1b")] == ["1f1b"]
    (single,) = chosen(199, "gpipe", "1f1b", "backward_first")
    assert single.schedule.name == "backward_first"
    assert single.rank_bytes == (100, 100)
    with pytest.raises(
        DoesNotFit, match=r"no schedule of 2 ranks fits 99 B a device: the best, '.*', needs 1 B"
    ):
        chosen(99, "gpipe", "1f1b", "backward_first")


def test_optimize_memory_ranks_by_the_fullest_rank():
    given = Conditions(memory=Memory(limit_bytes=10**9), optimize="memory")
    choices = ScheduleSearch(cost=blocks(8), num_ranks=2, num_micro_batches=8, conditions=given).choose()
    fullest = [max(choice.rank_bytes) for choice in choices]
    assert fullest == sorted(fullest)
    assert fullest[0] < max(
        max(choice.rank_bytes) for choice in choices if choice.schedule.name in {"gpipe", "bfs"}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ("interleave",)}, "no schedule is called 'interleave'. Did you mean 'interleaved'?"),
        ({"names": ("interleaved",), "virtual": (2,)}, "needs at least as many micro-batches as ranks"),
        ({"virtual": (8,)}, "32 stages need 31 cut points, and the model has 7: take at most 8 stages"),
        ({"names": ("vee",), "virtual": (1,)}, "vee cannot run 4 ranks of 1 stages cut from 8 units"),
    ],
)
def test_what_cannot_be_chosen_is_refused(changes, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        ScheduleSearch(
            cost=blocks(8), num_ranks=4, num_micro_batches=3, conditions=Conditions(**changes)
        ).choose()


# ---- layouts --------------------------------------------------------------------------------------------


def test_averaging_begins_when_a_rank_is_done_and_tied_weights_come_first():
    units = (
        Unit(name="embeddings", forward_s=1, backward_s=2, parameters=(("table", 40),)),
        Unit(name="head", forward_s=1, backward_s=2, parameters=(("table", 40), ("bias", 400))),
    )
    cost = ModelCost(units=units, relay_bytes=(0,))
    given = Conditions(names=("1f1b",))
    (choice,) = ScheduleSearch(cost=cost, num_ranks=2, num_micro_batches=1, conditions=given).choose()
    assert choice.timeline.rank_end_s == (6, 4)
    link = Link(bytes_per_s=10.0, latency_s=0.25)
    # The table: both ranks at 6, two of them: 2 (0.25 + 40 / 20). Then 440 bytes of rank 1 over 4 replicas.
    tied = 6 + 2 * (0.25 + 2)
    assert averaging_s(cost, choice, data=1, link=link) == tied
    assert averaging_s(cost, choice, data=4, link=link) == tied + 6 * (0.25 + 440 / 40)
    assert averaging_s(cost, choice, data=4, link=None) == 6
    sharded = averaging_s(cost, choice, data=4, link=link, broadcasts=True)
    assert sharded == tied + (6 + 3) * (0.25 + 440 / 40)
    half = averaging_s(cost, choice, data=4, link=link, gradient_ratio=0.5)
    assert half == 6 + 2 * (0.25 + 1) + 6 * (0.25 + 220 / 40)


def test_a_model_that_fits_one_device_is_only_replicated():
    layouts = choose_layout(blocks(8), 4, Memory(limit_bytes=10**6), global_batch_size=16)
    best = layouts[0]
    assert (best.layout.stages, best.data, best.num_micro_batches) == (1, 4, 4)
    assert best.step_s == pytest.approx(4 * 8 * 0.03)
    assert best.reason.startswith("the fastest that fits: 0.0 % idle, 0.0 % of the step averaging gradients")
    assert [layout.step_s for layout in layouts] == sorted(layout.step_s for layout in layouts)
    assert re.match(r"1\.\d\d times the time of the fastest: ", layouts[1].reason)


def test_slow_averaging_turns_replicas_into_a_pipeline():
    cost = blocks(16, parameter_bytes=10**6, relay_bytes=1)
    link = Link(bytes_per_s=10**7)
    best = choose_layout(
        cost, 4, Memory(limit_bytes=10**9), global_batch_size=16, conditions=Conditions(link=link)
    )[0]
    assert best.layout.stages == 4
    fast = choose_layout(
        cost, 4, Memory(limit_bytes=10**9), global_batch_size=16, conditions=Conditions(link=link),
        data_link=Link(bytes_per_s=10**12),
    )[0]  # fmt: skip
    assert fast.layout.stages == 1


def test_memory_decides_the_pipeline_and_every_figure_is_that_of_the_layout():
    cost = blocks(16, parameter_bytes=1000, saved_bytes=10)
    memory = Memory(limit_bytes=20_000)  # of 64,000 for the whole state: four ranks at least
    layouts = choose_layout(cost, 8, memory, global_batch_size=32, micro_batch_size=2)
    assert {layout.layout.stages for layout in layouts} <= {4, 8}
    for layout in layouts:
        assert layout.layout.stages * layout.data == 8
        assert layout.num_micro_batches * layout.data * layout.micro_batch_size == 32
        assert 0 <= layout.spare_bytes == memory.limit_bytes - max(layout.choice.rank_bytes)
        assert layout.stages == stage_costs(cost, layout.choice.cuts)
        assert layout.averaging_s == pytest.approx(0)


def test_micro_batch_sizes_are_chosen_and_the_cost_is_scaled():
    cost = blocks(8, saved_bytes=1000, parameter_bytes=1, relay_bytes=0)
    layouts = choose_layout(
        cost, 4, Memory(limit_bytes=20_000), global_batch_size=16, micro_batch_size=2,
        sizes=(1, 2, 4), pipelines=(4,),
    )  # fmt: skip
    assert layouts[0].micro_batch_size == 1  # equal work, least bubble
    assert layouts[0].num_micro_batches == 16
    assert layouts[0].stages[0].saved_bytes in {500, 1000}


def test_pipelines_can_be_given():
    layouts = choose_layout(
        blocks(16), 8, Memory(limit_bytes=10**9), global_batch_size=16, pipelines=(4,), num_layouts=3
    )
    assert {(layout.layout.stages, layout.data) for layout in layouts} == {(4, 2)}
    assert re.fullmatch(
        r"pipeline 4 × data 2, 4 stages per rank, 8 micro-batches of 1, interleaved", str(layouts[0])
    )


def test_where_nothing_fits_it_says_what_is_missing_and_what_would_fit():
    cost = blocks(8, parameter_bytes=1000, saved_bytes=10, relay_bytes=0)
    with pytest.raises(DoesNotFit) as caught:
        choose_layout(cost, 2, Memory(limit_bytes=8000), global_batch_size=8)
    # Two ranks of four blocks: 16,000 of state and what one micro-batch keeps.
    assert caught.value.missing_bytes == 8040
    message = str(caught.value)
    assert message.startswith(
        "no layout of 2 devices of 8 kB fits: pipeline 2 × data 1 with micro-batches of 1"
    )
    assert "lacks 8.04 kB on its fullest rank" in message
    assert "with 8 devices it fits as pipeline 8 × data 1" in message


def test_smaller_micro_batches_and_sharded_state_are_named_where_they_help():
    cost = blocks(4, parameter_bytes=1, saved_bytes=1000, relay_bytes=0)
    with pytest.raises(DoesNotFit, match=r"with micro-batches of 2 it fits as pipeline [124] × data"):
        choose_layout(
            cost, 4, Memory(limit_bytes=600), global_batch_size=16, micro_batch_size=4, pipelines=(4,)
        )
    heavy = blocks(1, parameter_bytes=1000, saved_bytes=0)
    with pytest.raises(DoesNotFit, match="with sharded state it fits as pipeline 1 × data 4"):
        choose_layout(heavy, 4, Memory(limit_bytes=3000), global_batch_size=16)


def test_a_sharded_optimizer_is_divided_over_replicas_and_named_where_it_helps():
    cost, memory = blocks(4, parameter_bytes=1000, saved_bytes=0), Memory(limit_bytes=10_010)
    options = {"global_batch_size": 16, "pipelines": (1,)}
    with pytest.raises(DoesNotFit, match="with a sharded optimizer it fits as pipeline 1 × data 4"):
        choose_layout(cost, 4, memory, **options)  # 4000 x (1 + 1 + 2)
    (layout,) = choose_layout(cost, 4, memory, **options, shard_optimizer=True)
    assert layout.spare_bytes == 10  # 4000 x (1 + 1 + 2 / 4)


def test_nothing_that_helps_is_said_too():
    cost = blocks(1, parameter_bytes=1000, saved_bytes=0)
    with pytest.raises(DoesNotFit, match="nothing that was tried fits: take a device with more memory"):
        choose_layout(cost, 2, Memory(limit_bytes=500), global_batch_size=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipelines": (9,)}, "9 stages need 8 cut points, and the model has 7"),
        ({"pipelines": (3,)}, "a pipeline of 3 ranks does not divide 8 devices"),
        ({"global_batch_size": 3, "pipelines": (1,)}, "a global batch of 3 cannot be divided over 8 devices"),
    ],
)
def test_layouts_that_cannot_be_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        choose_layout(blocks(8), 8, Memory(limit_bytes=10**9), **{"global_batch_size": 64, **options})
