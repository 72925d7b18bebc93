"""A step's time against hand calculation and its limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from plan_made import hosts, ideal, model
from shoal.decide.layout import Layout
from shoal.decide.workload import gradient_buckets
from shoal.errors import UsageError
from shoal.planner.prediction import largest_micro_batch
from shoal.planner.simulate import slowest
from shoal.planner.step_time import achieved_flops_for, achieved_flops_of, step_time


@pytest.fixture(autouse=True)
def equal_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.planner.step_time.JITTER", 0.0)
    monkeypatch.setattr("shoal.planner.step_time.SEVERAL_HOSTS", 0.0)


def test_one_device_computes_and_nothing_else() -> None:
    workload = model(num_layers=10, flops=1e9, kernels=100)
    step = step_time(workload, hosts(1, per_host=1), Layout(global_batch=16), achieved_flops=1e13)
    compute = 100 * 1e-5 + 16 * 3 * 10 * 1e9 / 1e13
    assert step.forward_s + step.backward_s == pytest.approx(compute)
    assert step.exposed_s == step.bubble_s == step.straggler_s == 0
    assert step.optimizer_s == pytest.approx(1e8 * 36 / (1e12 * 0.8))


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical-ring", "tree", "two-hop"])
@pytest.mark.parametrize("count", [1, 2, 64])
def test_infinite_bandwidth_scales_perfectly(algorithm: str, count: int) -> None:
    workload = model()
    layout = Layout(global_batch=64 * count, algorithm=algorithm)
    free = replace(hosts(count), instance=ideal(hosts(1).instance))
    step = step_time(workload, free, layout, achieved_flops=1e13)
    one = step_time(workload, hosts(1), Layout(global_batch=64), achieved_flops=1e13)
    assert step.exposed_s == 0
    assert step.total_s == pytest.approx(one.total_s - one.exposed_s)


def test_accumulation_pays_kernels_each_time_and_the_network_once() -> None:
    workload, workers = model(), hosts(4, nic=1e8)
    whole = step_time(workload, workers, Layout(global_batch=256), achieved_flops=1e13)
    parts = step_time(workload, workers, Layout(global_batch=256, micro_batch=2), achieved_flops=1e13)
    assert parts.micro_batches == 4
    more = 3 * 100 * 1e-5
    assert parts.forward_s + parts.backward_s == pytest.approx(whole.forward_s + whole.backward_s + more)
    assert parts.exposed_s == pytest.approx(whole.exposed_s, rel=0.1)


def test_kernels_of_a_graph_cost_no_launch_each() -> None:
    one, graph = (
        step_time(
            model(num_layers=10, flops=1e9, kernels=1000),
            hosts(1, per_host=1),
            Layout(global_batch=16, cuda_graphs=cuda_graphs),
            achieved_flops=1e13,
        )
        for cuda_graphs in (False, True)
    )
    assert one.forward_s + one.backward_s - graph.forward_s - graph.backward_s == pytest.approx(1000 * 6.3e-6)


def test_replicas_wait_for_the_one_with_the_largest_samples() -> None:
    """E[max] of 64 and 16 standard normals is 2.349 and 1.766 (Harter 1961); a replica has four samples."""
    workload = replace(model(), work_spread=0.2)
    step = step_time(workload, hosts(16, per_host=4), Layout(global_batch=256), achieved_flops=1e13)
    assert step.straggler_s / (step.forward_s + step.backward_s) == pytest.approx(0.1 * 2.349, rel=0.05)
    split = step_time(workload, hosts(16, per_host=4), Layout(global_batch=16, tensor=4), achieved_flops=1e13)
    assert split.straggler_s / (split.forward_s + split.backward_s) == pytest.approx(0.2 * 1.766, rel=0.05)


def test_devices_of_split_layers_sum_their_activations_over_local_links() -> None:
    workload = model(num_layers=10, flops=1e9, kernels=100)
    summing = replace(workload, summed_bytes=4e9)

    def more_s(count: int, *, global_batch: int, **layout: int) -> float:
        steps = [
            step_time(
                each,
                hosts(count, per_host=8),
                Layout(global_batch=global_batch, **layout),
                achieved_flops=1e13,
            )
            for each in (workload, summing)
        ]
        return steps[1].total_s - steps[0].total_s

    rate = hosts(1).instance.effective_local
    assert more_s(1, global_batch=4, tensor=4) == pytest.approx(2 * 3 / 4 * 2 * 4e9 / rate)
    assert more_s(1, global_batch=4, tensor=4, context=2) == pytest.approx(2 * 3 / 4 * 4 * 2e9 / rate)
    assert more_s(1, global_batch=4) == 0 and more_s(1, global_batch=4, context=8) == 0


def test_accelerators_that_update_a_part_each_read_less() -> None:
    layouts = [Layout(global_batch=64, updates_by_host=parts) for parts in (False, True)]
    whole, part = (step_time(model(), hosts(2), layout, achieved_flops=1e13) for layout in layouts)
    assert part.optimizer_s == pytest.approx(whole.optimizer_s / 8)
    assert part.exposed_s == whole.exposed_s


def test_a_host_waits_for_samples_that_its_cores_read_too_slowly() -> None:
    workload, workers = replace(model(), input_s=0.1), hosts(2)
    layout = Layout(global_batch=64)
    free = step_time(workload, workers, layout, achieved_flops=1e13)
    few, many = (
        step_time(
            workload,
            replace(workers, instance=replace(workers.instance, cores=cores)),
            layout,
            achieved_flops=1e13,
        )
        for cores in (4, 1000)
    )
    assert few.total_s == pytest.approx(32 * 0.1 / 4) and few.input_s == pytest.approx(
        few.total_s - free.total_s
    )
    assert many == free and free.input_s == 0


def test_a_rate_is_measured_where_samples_are_read_fast_enough() -> None:
    workload, host = replace(model(), input_s=0.1), hosts(1)
    slow = replace(host, instance=replace(host.instance, cores=1))
    layout = Layout(global_batch=64)
    assert achieved_flops_of(workload, slow, layout, 1000.0) == achieved_flops_of(
        workload, host, layout, 1000.0
    )


def test_hosts_of_one_domain_exchange_over_its_local_links() -> None:
    workload, layout = model(), Layout(global_batch=640)
    linked = hosts(4, per_host=2, nic=1e8)
    linked = replace(linked, instance=replace(linked.instance, local_hosts=4))
    together = step_time(workload, linked, layout, achieved_flops=1e13)
    assert together == step_time(workload, hosts(1, per_host=8, nic=1e8), layout, achieved_flops=1e13)
    apart = step_time(workload, hosts(4, per_host=2, nic=1e8), layout, achieved_flops=1e13)
    assert together.exposed_s < 0.1 * apart.exposed_s


def test_domains_are_as_even_as_the_hosts_allow() -> None:
    five = hosts(5, per_host=2, nic=1e8, flow=1e7)
    domains = replace(five, instance=replace(five.instance, local_hosts=3)).domains
    assert (domains.count, domains.instance.num_accelerators) == (2, 6)
    assert (domains.instance.nic_bytes_per_s, domains.instance.flow_bytes_per_s) == (3e8, 3e7)
    assert five.domains == five


def test_network_hides_behind_the_backward_pass_until_it_is_longer() -> None:
    workload = model(num_layers=100, parameters=1_000_000)
    fast = step_time(workload, hosts(8, nic=1e11), Layout(global_batch=512), achieved_flops=1e13)
    slow = step_time(workload, hosts(8, nic=1e8), Layout(global_batch=512), achieved_flops=1e13)
    on_the_wire = 2 * 7 / 8 * 100 * 1e6 * 2 / 1e8
    assert fast.exposed_s < 0.1 * fast.backward_s
    assert slow.exposed_s == pytest.approx(on_the_wire - slow.backward_s, rel=0.05)


def test_without_overlap_all_of_the_network_shows() -> None:
    workload = model(num_layers=100, parameters=1_000_000)
    layout = Layout(global_batch=512, overlap=False)
    step = step_time(workload, hosts(8, nic=1e10), layout, achieved_flops=1e13)
    assert step.exposed_s >= 2 * 7 / 8 * 100 * 1e6 * 2 / 1e10


def test_a_sharded_optimizer_updates_less_and_sends_its_weights() -> None:
    workload = model(num_layers=10, parameters=1_000_000)
    whole, sharded = (
        step_time(
            workload,
            hosts(8, per_host=1, nic=1e10),
            Layout(global_batch=512, sharded_optimizer=is_sharded),
            achieved_flops=1e13,
        )
        for is_sharded in (False, True)
    )
    assert sharded.optimizer_s == pytest.approx(whole.optimizer_s * 2 / 10)  # of ten weights, two at most
    assert sharded.exposed_s - whole.exposed_s == pytest.approx(7 / 8 * 10e6 * 4 / 1e10)


def test_shards_gather_weights_and_sum_gradients_in_each_pass_of_blocks() -> None:
    """Of ten million numbers in fp32: half the traffic of an all-reduce each, over eight hosts."""
    workload = model(num_layers=10, parameters=1_000_000, kernels=0)
    crossing = 7 / 8 * 10e6 * 4 / 1e8  # 0.35 s; a pass of 32 samples takes 0.096 s
    layout = Layout(global_batch=512, micro_batch=32, shard=True, wire_bytes=4, algorithm="ring")
    workers = hosts(8, per_host=1, nic=1e8)
    whole, blocks, hidden = (
        step_time(made, where, layout, achieved_flops=1e13)
        for made, where in (
            (workload, workers),
            (replace(workload, gathered=0.4), workers),
            (replace(workload, gathered=0.4), hosts(8, per_host=1, nic=1e11)),
        )
    )
    assert whole.exposed_s == pytest.approx(2 * crossing)
    assert blocks.exposed_s == pytest.approx(2 * (3 * crossing - 0.096)), "two passes"
    assert hidden.exposed_s == pytest.approx(2 * 0.4 * 2 * crossing / 1e3), "the first blocks are waited for"
    assert whole.optimizer_s == pytest.approx(1e7 / 8 * 36 / (1e12 * 0.8))


def test_bubble_is_that_of_interleaved_1f1b() -> None:
    layout = Layout(global_batch=64, micro_batch=1, stages=4, virtual=2)
    workload = model(num_layers=16)
    step = step_time(workload, hosts(1, per_host=4), layout, achieved_flops=1e13)
    assert step.micro_batches == 64
    assert step.bubble_s == pytest.approx((step.forward_s + step.backward_s) * 3 / (2 * 64))
    # Sixteen layers do not divide into three stages: two wait for the one with six.
    layout = Layout(global_batch=63, micro_batch=1, stages=3)
    step = step_time(workload, hosts(1, per_host=3), layout, achieved_flops=1e13)
    alone = step.forward_s + step.backward_s
    micro_s = alone / 63
    assert step.bubble_s == pytest.approx((62 * 6 + 16) * 3 / 16 * micro_s - alone)


def test_relays_wait_where_nothing_hides_them() -> None:
    # One micro-batch through four stages: relays of 1e9 bytes at 1e11 a second, three there and three back.
    workload = replace(model(num_layers=4), relay_bytes=1e9)
    layout = Layout(global_batch=1, micro_batch=1, stages=4)
    free = step_time(replace(workload, relay_bytes=0), hosts(1, per_host=4), layout, achieved_flops=1e13)
    local = step_time(workload, hosts(1, per_host=4), layout, achieved_flops=1e13)
    assert local.bubble_s - free.bubble_s == pytest.approx(6 * 1e9 / 1e11)
    apart = step_time(workload, hosts(4, per_host=1, nic=1e10, latency_s=1e-3), layout, achieved_flops=1e13)
    assert apart.bubble_s - free.bubble_s == pytest.approx(6 * (1e9 / 1e10 + 1e-3))


def test_micro_batches_beyond_the_simulated_ones_cost_what_a_round_costs() -> None:
    workload, few, many = model(num_layers=8), 4 * 8, 1000
    steps = [
        step_time(
            workload,
            hosts(1, per_host=4),
            Layout(global_batch=count, micro_batch=1, stages=4, virtual=2),
            achieved_flops=1e13,
        )
        for count in (few, many)
    ]
    assert steps[1].bubble_s == pytest.approx(steps[0].bubble_s)


def test_a_layout_must_divide_the_accelerators() -> None:
    with pytest.raises(UsageError, match="8 accelerators do not divide"):
        step_time(model(), hosts(1), Layout(global_batch=8, stages=3), achieved_flops=1e13)


def test_slowest_grows_with_the_workers() -> None:
    few, many = slowest(8, 0.01), slowest(8192, 0.01)
    assert 1 < few < many
    # The expected maximum of n normal draws lies just below sqrt(2 ln n).
    assert many == pytest.approx(1 + 0.01 * math.sqrt(2 * math.log(8192)), abs=0.01)
    assert slowest(8, 0.0) == 1


def test_calibration_finds_the_rate_that_was_hidden() -> None:
    workload, workers = model(), hosts(2)

    def rate(flops: float) -> float:
        return 64 / step_time(workload, workers, Layout(global_batch=64), achieved_flops=flops).total_s

    for hidden in (3e12, 9e13):
        assert achieved_flops_for(rate(hidden), rate, peak=1e14) == pytest.approx(hidden, rel=1e-3)
        assert achieved_flops_for(1 / rate(hidden), lambda f: 1 / rate(f), peak=1e14) == pytest.approx(
            hidden, rel=1e-3
        )
    with pytest.raises(UsageError, match="at infinite speed the prediction is"):
        achieved_flops_for(1e9, rate, peak=1e14)


def test_buckets_fill_in_backward_order() -> None:
    workload = model(num_layers=4, parameters=100)
    assert gradient_buckets(workload.layers, 400, 2) == [(0.5, 400), (1.0, 400)]
    assert gradient_buckets(workload.layers, 500, 2) == [(0.75, 600), (1.0, 200)]
    assert gradient_buckets(workload.layers, 1, 2) == [(0.25, 200), (0.5, 200), (0.75, 200), (1.0, 200)]


def test_micro_batch_halves_until_it_fits() -> None:
    workload = model(parameters=0)
    device = hosts(1).instance.accelerator
    assert device
    room = device.memory_bytes * 0.9
    assert largest_micro_batch(workload, device, share=64) == 64
    assert largest_micro_batch(workload, device, share=1e5) * 1e6 <= room
    with pytest.raises(UsageError, match=r"made needs .* GiB for one sample and device has 32 GiB"):
        largest_micro_batch(model(parameters=1_000_000_000), device, share=8)
