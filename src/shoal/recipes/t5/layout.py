"""Which layout trains a T5 fastest and fits: found with a cost model, before anything starts.

Nothing is measured here, so all workers and a laptop come to the same layout. Costs count in fp32, in which
weights and gradients are kept; bf16 activations need less memory than is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from shoal.decide.autotune import PORTFOLIO, VIRTUAL_CHOICES
from shoal.decide.cost import Link
from shoal.decide.layout_search import Conditions, Layout, choose_layout
from shoal.decide.partition import Memory
from shoal.errors import UsageError
from shoal.models.t5 import new_t5
from shoal.pipelining.export_graph import export_model
from shoal.pipelining.roofline import Rates, estimate_cost
from shoal.recipes.t5.config import T5PretrainConfig
from shoal.train.parallel_config import ScheduleName, parse_bytes

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
"""Sequences of a micro-batch that are tried where none is asked for."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device and its links reach: about half of a data sheet's arithmetic, 80 % of its bandwidth."""

    rates: Rates
    near: Link
    """To a device of the same host, which the next stage is on."""
    far: Link
    """To another host: a device's share of the host's network, over which replicas average."""


DEVICES = {
    "v100": Device(
        rates=Rates(flops_per_s=60e12, bytes_per_s=0.72e12),
        near=Link(bytes_per_s=20e9, latency_s=1e-5),
        far=Link(bytes_per_s=1.5e9, latency_s=5e-5),
    ),
    "a100": Device(
        rates=Rates(flops_per_s=150e12, bytes_per_s=1.25e12),
        near=Link(bytes_per_s=200e9, latency_s=1e-5),
        far=Link(bytes_per_s=6e9, latency_s=5e-5),
    ),
    "h100": Device(
        rates=Rates(flops_per_s=450e12, bytes_per_s=2.7e12),
        near=Link(bytes_per_s=300e9, latency_s=1e-5),
        far=Link(bytes_per_s=45e9, latency_s=3e-5),
    ),
}
"""Of p3dn.24xlarge, p4d.24xlarge and p5.48xlarge. Data sheets: V100 125 TFLOP/s and 0.9 TB/s, A100 312 and
1.56, H100 990 and 3.35."""


def resolve(config: T5PretrainConfig, num_devices: int) -> T5PretrainConfig:
    """Return the settings with the layout that ``parallel.layout auto`` asks for.

    Raises:
        UsageError: no layout fits; the message says how much is missing and which one would fit.
    """
    if config.parallel.layout == "given":
        return config
    return settled(config, find_layouts(config, num_devices)[0])


def settled(config: T5PretrainConfig, layout: Layout) -> T5PretrainConfig:
    """Return the settings that mean ``layout``."""
    parallel = replace(
        config.parallel,
        pipeline=layout.pipeline,
        data=layout.data,
        virtual_stages=layout.num_virtual,
        micro_batches=layout.num_micro_batches,
        schedule=cast(ScheduleName, layout.choice.schedule.name),
    )
    return replace(config, parallel=parallel, train=replace(config.train, micro_batch_size=None))


def find_layouts(config: T5PretrainConfig, num_devices: int) -> list[Layout]:
    """Return the layouts that fit, the fastest first.

    Raises:
        UsageError: there is no memory to fit into, or no layout does.
    """
    parallel, device = config.parallel, DEVICES[config.parallel.device]
    if parallel.memory is None:
        raise UsageError("parallel.layout auto needs the memory of a device, such as --memory 40GB")
    given = config.train.micro_batch_size
    sizes = (given,) if given else MICRO_BATCH_SIZES
    base = sizes[
        len(sizes) // 2
    ]  # launches count for less in larger ones, so take a middle one as the measure
    spans = config.spans()
    with torch.device("meta"):
        model = new_t5(config.model, pad_id=0, end_id=1)
        example = {
            "input_ids": torch.zeros(base, spans.input_length, dtype=torch.int64),
            "labels": torch.zeros(base, spans.target_length, dtype=torch.int64),
        }
    return choose_layout(
        estimate_cost(export_model(model, example, training=True), device.rates),
        num_devices,
        Memory(
            limit_bytes=parse_bytes(parallel.memory),
            optimizer_ratio=0.01 if config.optim.optimizer == "adafactor" else 2.0,
        ),
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=base,
        micro_batch_sizes=sizes,
        pipelines=None if parallel.layout == "auto" else (parallel.pipeline,),
        conditions=Conditions(
            link=device.near,
            names=PORTFOLIO if parallel.schedule == "auto" else (parallel.schedule,),
            virtual=VIRTUAL_CHOICES if parallel.virtual_stages is None else (parallel.virtual_stages,),
            optimize=parallel.optimize,
        ),
        data_link=device.far,
        shard=parallel.shard,
    )


def layout_lines(layouts: list[Layout], device: str) -> list[str]:
    """Return what a dry run says of the layouts that were found: all, then the stages of the best."""
    lines = [f"predicted    on {device.upper()}s, by a cost model, not measured:"]
    for layout in layouts:
        lines += [f"  {1_000 * layout.step_s:10,.1f} ms a step  {layout}", f"{'':24}{layout.reason}"]
    best = layouts[0]
    placement = best.choice.schedule.placement
    lines.append(f"stages of    {best}: rank, stages, parameters, memory, computing")
    for rank, needed in enumerate(best.choice.rank_bytes):
        held = [stage for stage, place in enumerate(placement) if place == rank]
        parameters = sum(best.stages[stage].parameter_bytes for stage in held)
        busy = best.num_micro_batches * sum(
            best.stages[stage].forward_s + best.stages[stage].backward_s for stage in held
        )
        lines.append(
            f"  rank {rank:<3}   {', '.join(map(str, held)):<10} {parameters / 1e9:7.2f} GB "
            f"{needed / 1e9:7.2f} of {best.memory.limit_bytes / 1e9:.0f} GB "
            f"{100 * busy / best.choice.timeline.makespan_s:5.1f} %"
        )
    return lines
