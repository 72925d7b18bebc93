"""Tests the prediction for hosts of unequal speed against a step-time model of its own."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from shoal.errors import UsageError
from shoal.planner import api
from shoal.planner.answer import json_of, text_of
from shoal.planner.network import OUT, capacities
from shoal.planner.prediction import Plan
from shoal.planner.step_time import served_s
from shoal.planner.unequal_hosts import divisions, host_speeds, recommended


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A step is long, so that the network matters little."""
    return api.plan("bert-large", "8xp3dn.24xlarge", algorithms=["hierarchical-ring"])[0]


def possible(speeds: list[float], jitter: float) -> float:
    """Return the part of the possible samples/s with equal shares, by drawing steps one by one."""
    draw = random.Random(1)
    factors = [[draw.lognormvariate(0, jitter) for _ in speeds] for _ in range(20_000)]
    slowest = fmean(max(f / v for f, v in zip(step, speeds, strict=True)) for step in factors)
    mean = fmean(f for step in factors for f in step)
    return mean * len(speeds) / sum(speeds) / slowest


@pytest.mark.parametrize(
    ("slow", "jitter", "published"),
    [(["1x0.5"], 0.0, 0.533), ([], 0.1, 0.87), ([], 0.3, 0.67), (["2x0.8"], 0.2, None)],
)
def test_equal_shares_wait_for_the_slowest(
    plan: Plan, slow: list[str], jitter: float, published: float | None
) -> None:
    speeds = host_speeds(8, slow)
    found = {division.name: division for division in divisions(plan, speeds, jitter=jitter)}
    assert found["equal"].of_possible == pytest.approx(possible(speeds, jitter), abs=0.01)
    if published is not None:
        assert found["equal"].of_possible == pytest.approx(published, abs=0.01)


def test_one_host_at_half_speed_is_worth_dividing_by_speed(plan: Plan) -> None:
    best, equal, served = divisions(plan, host_speeds(8, ["1x0.5"]), jitter=0.0)
    assert (best.name, equal.name, served.name) == ("by-speed", "equal", "sync")
    assert best.of_possible > 0.99
    step = plan.steps[0]
    computed_s = step.total_s - step.exposed_s - step.optimizer_s
    assert equal.step_s == pytest.approx(step.total_s + computed_s)
    assert best.step_s == pytest.approx(step.total_s + computed_s * (8 / 7.5 - 1), rel=0.01)
    seconds = plan.seconds_by_cause
    computed_s = sum(seconds[name] for name in ("compute", "bubble", "stragglers", "several hosts"))
    assert equal.total_s == pytest.approx(plan.total_s + computed_s)
    text = text_of([plan], unequal=[best, equal, served])
    assert "train with --distributed.shares by-speed: it saves" in text
    assert [row["name"] for row in json_of([plan], unequal=[best, equal])["unequal_hosts"]] == [
        "by-speed",
        "equal",
    ]


def test_little_jitter_alone_is_not(plan: Plan) -> None:
    found = divisions(plan, host_speeds(8, []), jitter=0.05)
    assert [division.name for division in found if division.kind == "shares"] == ["equal", "by-speed"]
    assert recommended(found).name == "equal"
    assert "every host is late now and then" in text_of([plan], unequal=found)


def test_jitter_is_worth_staleness(plan: Plan) -> None:
    """The published shares are those of a simulation of its own (8 hosts, σ = 0.3)."""
    found = {each.name: each for each in divisions(plan, host_speeds(8, []), jitter=0.3)}
    for name, published in (
        ("bounded, staleness=1", 0.90),
        ("bounded, staleness=2", 0.94),
        ("bounded, staleness=4", 0.96),
    ):
        assert found[name].of_possible == pytest.approx(published, abs=0.035)
    chosen = recommended(list(found.values()))
    assert not chosen.exact
    assert chosen.total_s < 0.9 * found["equal"].total_s
    text = text_of([plan], unequal=list(found.values()))
    staleness = chosen.name.removeprefix("bounded, staleness=")
    assert f"--servers.mode bounded --servers.staleness {staleness} would save" in text
    assert f"hosts go on for {staleness} steps while another is late" in text


def test_local_steps_wait_for_the_sum_of_their_times(plan: Plan) -> None:
    """The simulation's published shares (8 hosts, σ = 0.3, H = 50), and a worker-by-worker sum of its own."""
    found = {each.name: each for each in divisions(plan, host_speeds(8, []), jitter=0.3)}
    local = found["local, local_steps=50"]
    assert local.of_possible == pytest.approx(0.94, abs=0.01)
    draw = random.Random(2)
    rounds = [[fmean(draw.lognormvariate(0, 0.3) for _ in range(50)) for _ in range(8)] for _ in range(400)]
    share = fmean(f for each in rounds for f in each) / fmean(max(each) for each in rounds)
    assert local.of_possible == pytest.approx(share, abs=0.01)
    assert found["local, local_steps=50, wait_for=56"].exact is False
    assert found["async"].of_possible == pytest.approx(1.0, abs=0.01)


def test_modes_on_servers_take_what_the_formulas_say(plan: Plan) -> None:
    """With next to no jitter and one host at half speed every mode's time is a sum of known parts."""
    speeds, step, hosts = host_speeds(8, ["1x0.5"]), plan.steps[0], 8
    found = {each.name: each for each in divisions(plan, speeds, jitter=1e-9)}
    computed_s = step.total_s - step.exposed_s - step.optimizer_s
    workload, layout = plan.training.parts[0].workload, plan.layouts[0]
    sent_s = served_s(workload, plan.workers, None, layout)
    on_servers_s = sent_s + step.optimizer_s / hosts
    assert found["bounded, staleness=2"].step_s == pytest.approx(2 * computed_s, rel=1e-3)
    assert found["local, local_steps=50"].step_s == pytest.approx(
        2 * computed_s + step.optimizer_s + sent_s / 50
    )
    of_own_s = 2 * computed_s + step.optimizer_s
    streamed = found["local, local_steps=50, fragments=5, delay=5"]
    assert streamed.step_s == pytest.approx(of_own_s + max(0, sent_s - 25 * of_own_s) / 50)
    # the slow host makes half as many gradients, so a batch takes 8 / 7.5 of an equal part's time
    assert found["async"].step_s == pytest.approx(
        max(hosts / 7.5 * computed_s + on_servers_s, hosts * on_servers_s), rel=0.01
    )
    window_s = step.backward_s / step.micro_batches
    served = found["sync"]
    back_s = served_s(workload, plan.workers, None, layout, window_s=window_s)
    slowest_s = found["by-speed"].step_s - step.exposed_s - step.optimizer_s
    assert served.step_s == pytest.approx(slowest_s + back_s + step.optimizer_s / hosts)
    assert served.of_possible == found["by-speed"].of_possible
    assert recommended(list(found.values())).name == "by-speed"


def test_an_update_on_servers_sends_there_and_back() -> None:
    """Eight hosts that serve each other: 7/8 of the bytes leave while as many come, then again; a long
    window hides the way there.
    """
    plan = api.plan("bert-large", "8xp3dn.24xlarge", global_batch=512 * 8)[0]
    workload, workers = plan.training.parts[0].workload, plan.workers
    num_bytes = 4 * workload.num_parameters * workload.trainable
    rate = capacities(workers)[OUT]
    hop_s = workers.instance.network.latency_s
    host = replace(workers, instance=replace(workers.instance, num_accelerators=1))
    both_s = served_s(workload, host, None, plan.layouts[0])
    assert both_s == pytest.approx(2 * 7 / 8 * num_bytes / rate + 4 * hop_s, rel=0.02)
    back_s = served_s(workload, host, None, plan.layouts[0], window_s=1e3)
    assert hop_s < back_s < 0.6 * both_s
    helpers = api.plan("bert-large", "8xp3dn.24xlarge", "4xc5n.18xlarge", global_batch=4096)[0].helpers
    assert helpers is not None
    kept_s, copied_s = (served_s(workload, host, helpers, plan.layouts[0], copies=c) for c in (False, True))
    later_s = copied_s - kept_s
    assert -0.125 * kept_s < later_s < 2.1 * hop_s, "two hops; what copies get is sent while gradients come"


def test_a_slow_host_is_no_case_for_staleness(plan: Plan) -> None:
    found = divisions(plan, host_speeds(8, ["1x0.5"]), jitter=0.01)
    names = {each.name for each in found}
    assert not names & {"bounded, wait_for=56", "local, local_steps=50, wait_for=56"}, (
        "its samples would never be learned"
    )
    assert {each.name: each.of_possible for each in found}["bounded, staleness=4"] == pytest.approx(
        0.533, abs=0.01
    )
    assert recommended(found).name == "by-speed"


def test_equal_hosts_change_nothing(plan: Plan) -> None:
    for division in divisions(plan, host_speeds(8, []), jitter=0.0)[:2]:
        assert division.total_s == pytest.approx(plan.total_s)
        assert division.of_possible == pytest.approx(1.0)


@pytest.mark.slow
def test_pipelines_are_not_divided() -> None:
    plan = api.plan("t5-3b", "8xp4d.24xlarge")[0]
    found = divisions(plan, host_speeds(8, ["1x0.5"]), jitter=0.0)
    assert [division.name for division in found] == ["equal"]
    assert "cannot follow the speed" in text_of([plan], unequal=found)


@pytest.mark.parametrize("text", ["1xx5", "0.5", "1x0", "1x1.5", "-1x0.5", "1x0.5 "])
def test_what_is_no_number_of_slow_hosts_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not of the form 1x0\.5"):
        host_speeds(8, [text])


def test_more_slow_hosts_than_hosts_are_refused() -> None:
    with pytest.raises(UsageError, match="9 slow hosts of 8"):
        host_speeds(8, ["9x0.5"])


@pytest.mark.parametrize("jitter", [-0.1, 2.5])
def test_jitter_out_of_range_is_refused(plan: Plan, jitter: float) -> None:
    with pytest.raises(UsageError, match="must lie between 0 and 2"):
        divisions(plan, host_speeds(8, []), jitter=jitter)
