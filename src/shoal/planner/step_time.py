"""Predicts one optimizer step: compute, the release of buckets, and exposed communication.

    micro-batch    K τ + b f / r        K kernels at least τ each, b samples of f FLOPs at r achieved FLOP/s
    split layers   sum their activations in rings over the local links, and wait for them
    last backward  releases the buckets; earlier micro-batches of an accumulated batch send nothing
    stages         the timeline of interleaved 1F1B over the model's own layers (``pipeline_bubble``); equal
                   stages without relays wait (p - 1) / (v m) of the computation (Narayanan et al. 2021,
                   arXiv 2104.04473, section 2.2)
    optimizer      reads and writes weights, gradients and moments at memory rate

τ is physical: launch, ramp and tail of a kernel with next to no work. Because of it, eight times the hosts at
the same global batch are never eight times as fast, however good the network is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shoal.decide.layout import Layout
from shoal.decide.workload import Workload, gradient_buckets
from shoal.errors import UsageError
from shoal.planner import pipeline_bubble
from shoal.planner.hardware import Machines, require_accelerators
from shoal.planner.network import Collective, capacities, collective
from shoal.planner.simulate import Exchange, exchange, slowest

KERNEL_S = 10e-6
"""τ at the clock of an A100: launch, ramp and tail of a kernel over a tiny tensor. Latencies are counted in
cycles, so τ scales with the inverse of the clock. One figure for all models and devices; see
docs/plan-errors.md."""
GRAPH_KERNEL_S = 3.7e-6
"""τ without the launch: 3.4 µs of a short kernel in a CUDA graph on a V100, scaled to the clock of an A100
(Gray 2019, "Getting Started with CUDA Graphs", developer.nvidia.com)."""
KERNEL_CLOCK_HZ = 1.41e9
MOST_BUCKETS = 64
"""Buckets that are simulated: of more, several are one, whose bytes count and whose latency counts once."""
MEMORY_EFFICIENCY = 0.8
"""Streaming kernels reach about 80 % of a device's memory rate (STREAM on GPUs)."""
JITTER = 0.01
"""Relative standard deviation of a worker's time. Sinha et al. (SC 2022, "Not All GPUs Are Created Equal")
found up to 8 % between GPUs of one cluster; 1 % is ±3 σ over 6 %."""

SEVERAL_HOSTS = 0.05
"""Cost of several hosts beyond all that is computed, over the time of the computation: the weighted median of
published runs (``Intervals.cost_of_several`` with 0 here). ``benchmarks.plan_published`` fits it for each
publisher without its rows."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of a step by cause, in seconds."""

    forward_s: float
    backward_s: float
    bubble_s: float
    straggler_s: float
    """Wait for the slowest worker: of its device, or of its samples."""
    several_hosts_s: float
    """Overhead of running on several hosts, beyond the modelled causes (:data:`SEVERAL_HOSTS`)."""
    exposed_s: float
    """Communication that the backward pass does not hide."""
    optimizer_s: float
    input_s: float
    """Wait for samples, where the processors of a host take longer to read them than the rest takes."""
    micro_batches: int
    exchange: Exchange
    """Times count from the beginning of the step."""

    @property
    def total_s(self) -> float:
        return self.computed_s + self.exposed_s + self.optimizer_s + self.input_s

    @property
    def computed_s(self) -> float:
        """Return the time to the end of the backward pass."""
        passes_s = self.forward_s + self.backward_s + self.bubble_s
        return passes_s + self.straggler_s + self.several_hosts_s


def step_time(
    workload: Workload,
    workers: Machines,
    layout: Layout,
    *,
    achieved_flops: float,
    helpers: Machines | None = None,
) -> StepTime:
    """Predict one optimizer step.

    Args:
        achieved_flops: FLOP/s of one accelerator in matrix work, as a calibration finds it.

    Raises:
        UsageError: the layout does not divide the accelerators.
    """
    replicas = num_replicas(workers, layout)
    accelerator = require_accelerators(workers)
    share = layout.global_batch / replicas
    # A share below one sample splits the samples themselves (spatial or context parallel): no accumulation.
    micro = min(layout.micro_batch or (1.0 if layout.stages > 1 else share), share)
    count = max(1, math.ceil(share / micro - 1e-9))
    flops_s = share / count * workload.training_flops / (layout.per_replica * achieved_flops)
    kernel_s = GRAPH_KERNEL_S if layout.cuda_graphs else KERNEL_S
    kernels_s = kernel_s * KERNEL_CLOCK_HZ / accelerator.clock_hz * workload.num_kernels / layout.stages
    compute_s = flops_s + kernels_s + summing_s(workload, workers, layout, micro_batch=share / count)
    bubble_s = 0.0
    if layout.stages > 1:
        bubble_s = pipeline_bubble.bubble_s(
            workload,
            workers,
            stages=layout.stages,
            virtual=layout.virtual,
            tensor=layout.tensor * layout.context,
            micro_batches=count,
            micro_batch=share / count,
            compute_s=compute_s,
            flow_bytes_per_s=layout.connections * workers.instance.flow_bytes_per_s,
        )
    # With virtual stages, the last passes of each come at another time: gradients become ready over the
    # backward passes of the last ``stages`` micro-batches, not of one.
    window_s = compute_s * workload.backward_share * (min(count, layout.stages) if layout.virtual > 1 else 1)
    # The samples of one replica are more work than those of another one, by less the more there are.
    spread = workload.work_spread / math.sqrt(max(share, 1.0))
    late = math.hypot(slowest(workers.num_accelerators, JITTER) - 1, slowest(replicas, spread) - 1)
    straggler_s = late * (count * compute_s + bubble_s)
    several_s = SEVERAL_HOSTS * (count * compute_s + bubble_s) if workers.count > 1 else 0.0
    computed_s = count * compute_s + bubble_s + straggler_s + several_s
    sent = Exchange(end_s=computed_s, spans=(), busy_s={})
    if replicas > 1 and not layout.shard:
        sent = _average(workload, workers, helpers, layout, begin_s=computed_s - window_s, window_s=window_s)
    updated = workload.num_parameters * workload.trainable / layout.per_replica
    gathered_s = 0.0
    if layout.updates_by_host:
        updated /= min(workers.instance.num_accelerators, replicas)
    if layout.shard:
        updated /= replicas
        gathered_s = _sharding_s(workload, workers, layout, num_passes=count, pass_s=compute_s)
    elif layout.scatters:
        updated /= replicas
        gathered_s = max(0.0, max(sent.busy_s.values(), default=0.0) - window_s / 2)
    elif layout.sharded_optimizer and replicas > 1:
        # Each worker receives all new weights in fp32 after the update: half the traffic of an all-reduce.
        all_reduce, links = _all_reduce(workers, helpers, layout)
        gathered_s = exchange([(0.0, 2.0 * updated)], all_reduce, links).end_s
        updated *= workload.owned(replicas)
    exposed_s = max(0.0, sent.end_s - computed_s) + gathered_s
    optimizer_s = updated * workload.optimizer_bytes / (accelerator.memory_bytes_per_s * MEMORY_EFFICIENCY)
    return StepTime(
        forward_s=count * compute_s * (1 - workload.backward_share),
        backward_s=count * compute_s * workload.backward_share,
        bubble_s=bubble_s,
        straggler_s=straggler_s,
        several_hosts_s=several_s,
        exposed_s=exposed_s,
        optimizer_s=optimizer_s,
        input_s=max(0.0, reading_s(workload, workers, layout) - computed_s - exposed_s - optimizer_s),
        micro_batches=count,
        exchange=sent,
    )


def summing_s(workload: Workload, workers: Machines, layout: Layout, *, micro_batch: float) -> float:
    """Return the time in which the devices of split layers sum the activations of a micro-batch."""
    instance = workers.domains.instance
    link = instance.near if layout.tensor <= instance.num_accelerators else instance.far
    num_bytes = workload.summed_bytes * micro_batch / layout.context / layout.stages
    return 2 * (layout.tensor - 1) / layout.tensor * num_bytes / link.bytes_per_s


def reading_s(workload: Workload, workers: Machines, layout: Layout) -> float:
    """Return the time that the processors of a host take to read its samples of a step, in parallel to it."""
    cores = workers.instance.cores or math.inf
    return layout.global_batch / workers.count * workload.input_s / cores


def _average(
    workload: Workload,
    workers: Machines,
    helpers: Machines | None,
    layout: Layout,
    *,
    begin_s: float,
    window_s: float,
) -> Exchange:
    """Simulate the averaging of the gradients that become ready in the window after ``begin_s``."""
    trained = workload.trainable / layout.per_replica * layout.wire_bytes
    least = workload.num_parameters * trained / MOST_BUCKETS
    buckets = gradient_buckets(workload.layers, max(layout.bucket_bytes, least), trained)
    # Scattered gradients take half of it; the new parameters are gathered in the next forward pass.
    halved = 0.5 if layout.scatters else 1.0
    ready = [
        (begin_s + (done if layout.overlap else 1.0) * window_s, halved * num_bytes)
        for done, num_bytes in buckets
    ]
    mean_bytes = sum(num_bytes for _, num_bytes in buckets) / max(len(buckets), 1)
    return exchange(ready, *_all_reduce(workers, helpers, layout, mean_bytes))


def _sharding_s(
    workload: Workload, workers: Machines, layout: Layout, *, num_passes: int, pass_s: float
) -> float:
    """Return the time of a step in which devices wait for weights, or for sums of gradients, in shards.

    The weights of a stage are gathered before a step, and its gradients are summed after it. Where blocks of
    the only stage are gathered one at a time, those of the next are gathered meanwhile, for each micro-batch
    forward and backward, and gradients are summed in each; the first ones are waited for.

    Args:
        num_passes: micro-batches of the step.
        pass_s: computation of one of them, forward and backward.
    """
    held = workload.num_parameters / layout.per_replica
    all_reduce, links = _all_reduce(workers, None, layout)
    # Each takes half the traffic of an all-reduce.
    gather_s = exchange([(0.0, 4 * held / 2)], all_reduce, links).end_s
    summed = layout.wire_bytes * held * workload.trainable / 2
    sum_s = exchange([(0.0, summed)], all_reduce, links).end_s
    if workload.gathered == 1 or layout.stages > 1:
        return gather_s + sum_s
    backward_s = pass_s * workload.backward_share
    forward = max(workload.gathered * gather_s, gather_s - (pass_s - backward_s))
    backward = max(workload.gathered * sum_s, gather_s + sum_s - backward_s)
    return num_passes * (forward + backward)


def _all_reduce(
    workers: Machines, helpers: Machines | None, layout: Layout, bucket_bytes: float = math.inf
) -> tuple[Collective, Mapping[str, float]]:
    """Return the phases of averaging over the replicas, and the rates of the links."""
    workers = workers.domains
    per_host = max(workers.instance.num_accelerators, 1)
    all_reduce = collective(
        layout.algorithm,
        workers,
        helpers,
        local_group=max(1, per_host // layout.per_replica),
        num_hosts=math.ceil(workers.count / max(1, layout.per_replica // per_host)),
        bucket_bytes=bucket_bytes,
        at_once=layout.collectives_at_once,
    )
    return all_reduce, capacities(
        workers, helpers, algorithm=layout.algorithm, connections=layout.connections
    )


def served_s(
    workload: Workload,
    workers: Machines,
    helpers: Machines | None,
    layout: Layout,
    *,
    window_s: float = 0.0,
    copies: bool = False,
) -> float:
    """Return the seconds from the end of the backward pass to the new weights, with updates on servers.

    Gradients go there as they become ready, the norm of all of them takes two hops, and then all weights
    come back, both in fp32 and in two hops whatever the layout says.

    Args:
        window_s: end of the backward pass in which gradients become ready; 0: all are sent at its end.
        copies: workers have a copy of what helpers keep.
    """
    workers = workers.domains
    buckets = gradient_buckets(workload.layers, layout.bucket_bytes, 4 * workload.trainable)
    algorithm = "two-hop-helpers" if helpers else "two-hop"
    phases = collective(algorithm, workers, helpers, copies=copies).phases
    links = capacities(workers, helpers, algorithm=algorithm, connections=layout.connections)
    back = next((index for index, phase in enumerate(phases) if phase.name == "pull"), len(phases))
    ready = [(done * window_s, num_bytes) for done, num_bytes in buckets]
    there_s, back_s = (
        exchange(times, Collective(phases=part, at_once=None), links).end_s
        for times, part in (
            (ready, phases[:back]),
            ([(0.0, num_bytes) for _, num_bytes in buckets], phases[back:]),
        )
    )
    return max(0.0, there_s - window_s) + 2 * workers.instance.network.latency_s + back_s


def num_replicas(workers: Machines, layout: Layout) -> int:
    """Return the number of replicas of the model on the accelerators.

    Raises:
        UsageError: the accelerators do not divide into replicas.
    """
    num_workers = workers.num_accelerators
    if num_workers % layout.per_replica:
        raise UsageError(
            f"{num_workers} accelerators do not divide into copies of the model over {layout.per_replica} of "
            "them (tensor × context × stages); choose a divisor"
        )
    return num_workers // layout.per_replica


def achieved_flops_for(
    measured: float,
    predict: Callable[[float], float],
    *,
    peak: float,
    tolerance: float = 1e-6,
) -> float:
    """Return the FLOP/s of an accelerator at which ``predict`` gives ``measured``, by secants and halving.

    Args:
        predict: a time, falling with the FLOP/s, or a throughput, growing with it.
        peak: of the accelerator; the answer lies between a thousandth of it and 100 times it. A result above
            the peak means that the fixed costs are overestimated; the caller judges that.
        tolerance: relative error of the result.

    Raises:
        UsageError: no such rate exists: fixed costs alone exceed the measured time.
    """

    def error(log_flops: float) -> float:
        return math.log(predict(math.exp(log_flops)) / measured)

    low, high = math.log(peak * 1e-3), math.log(peak * 100)
    at_low, at_high = error(low), error(high)
    if (at_low > 0) == (at_high > 0):
        raise UsageError(
            f"no rate of computation gives {measured:g}: at infinite speed the prediction is "
            f"{predict(peak * 100):g}; the measurement is of another model, batch or hardware"
        )
    while high - low > tolerance:
        # Both sides of the secant's root soon enclose the answer; the middle ends it where they do not.
        root = low + (high - low) * at_low / (at_low - at_high)
        for tried in (root - 0.4 * tolerance, root + 0.4 * tolerance, (low + high) / 2):
            if low < tried < high and high - low > tolerance:
                at_tried = error(tried)
                if (at_tried > 0) == (at_low > 0):
                    low, at_low = tried, at_tried
                else:
                    high, at_high = tried, at_tried
    return math.exp((low + high) / 2)


def achieved_flops_of(workload: Workload, host: Machines, layout: Layout, samples_per_s: float) -> float:
    """Return the FLOP/s of an accelerator at which ``layout`` on one host gives a throughput.

    The host is taken to read its samples fast enough.

    Raises:
        UsageError: no such rate exists.
    """

    unread = replace(host, instance=replace(host.instance, cores=None))

    def rate(flops: float) -> float:
        return layout.global_batch / step_time(workload, unread, layout, achieved_flops=flops).total_s

    return achieved_flops_for(samples_per_s, rate, peak=require_accelerators(host).peak("fp16"))
