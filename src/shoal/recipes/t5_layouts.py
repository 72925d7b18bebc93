"""Searches the layout of T5 that trains fastest within the memory, with a cost model.

The result does not depend on the machine, since nothing is measured. Tensors are counted in fp32, the type of
weights and gradients; bf16 activations need less memory than that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from shoal.decide.autotune import PORTFOLIO, VIRTUAL_CHOICES, Conditions
from shoal.decide.cost import Link
from shoal.decide.layout_search import MICRO_BATCH_SIZES, Layout, LayoutSearch
from shoal.decide.partition import Memory
from shoal.errors import UsageError
from shoal.models.t5 import new_t5
from shoal.pipelining.export_graph import export_model
from shoal.pipelining.roofline import Rates, estimate_cost
from shoal.train.parallel_config import ScheduleName, parse_bytes

if TYPE_CHECKING:
    from shoal.recipes.t5 import T5Config


@dataclass(frozen=True, kw_only=True)
class Device:
    """Rates of a device and its links: about half the FLOP/s and 80 % of the bandwidth of its data sheet."""

    rates: Rates
    near: Link
    """Link to a device of the same host, between neighbouring stages."""
    far: Link
    """A device's share of the host's network, over which replicas average gradients."""


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
"""Devices of p3dn.24xlarge, p4d.24xlarge and p5.48xlarge. Data sheets: V100 125 TFLOP/s and 0.9 TB/s, A100
312 and 1.56, H100 990 and 3.35."""


def find_layouts(config: T5Config, num_devices: int) -> list[Layout]:
    """Return the layouts that fit into memory, the fastest first. Allocates no tensors.

    ``parallel.pipeline`` is fixed unless ``parallel.layout`` is ``auto``.

    Raises:
        UsageError: ``parallel.memory`` is not set, or no layout fits; the message has the missing amount.
    """
    train, parallel, spans = config.train, config.parallel, config.spans()
    device = DEVICES[parallel.device]
    if parallel.memory is None:
        raise UsageError("parallel.layout auto needs the memory of a device, such as --memory 40GB")
    sizes = (train.micro_batch_size,) if train.micro_batch_size else MICRO_BATCH_SIZES
    base = sizes[len(sizes) // 2]  # costs per launch depend on the size
    lengths = {"input_ids": spans.input_length, "labels": spans.target_length}
    with torch.device("meta"):
        model = new_t5(config.model, pad_id=0, end_id=1)
        batch = {name: torch.zeros(base, size, dtype=torch.int64) for name, size in lengths.items()}
        graph = export_model(model, batch, training=True)
    optimizer_ratio = 0.01 if config.optim.optimizer == "adafactor" else 2.0
    search = LayoutSearch(
        cost=estimate_cost(graph, device.rates),
        memory=Memory(limit_bytes=parse_bytes(parallel.memory), optimizer_ratio=optimizer_ratio),
        global_batch_size=train.global_batch_size,
        micro_batch_size=base,
        sizes=sizes,
        conditions=Conditions(
            link=device.near,
            names=PORTFOLIO if parallel.schedule == "auto" else (parallel.schedule,),
            virtual=VIRTUAL_CHOICES if parallel.virtual_stages is None else (parallel.virtual_stages,),
            optimize=parallel.optimize,
        ),
        data_link=device.far,
        shard=parallel.shard,
    )
    return search.choose(num_devices, None if parallel.layout == "auto" else (parallel.pipeline,))


def with_layout(config: T5Config, layout: Layout) -> T5Config:
    """Return the settings that mean ``layout``; its micro-batches replace ``train.micro_batch_size``."""
    parallel = replace(
        config.parallel,
        pipeline=layout.pipeline,
        data=layout.data,
        virtual_stages=layout.num_virtual,
        micro_batches=layout.num_micro_batches,
        schedule=cast(ScheduleName, layout.choice.schedule.name),
    )
    return replace(config, parallel=parallel, train=replace(config.train, micro_batch_size=None))
