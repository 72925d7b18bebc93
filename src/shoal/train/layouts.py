"""Searches the fastest pipeline layout that fits the memory, with a cost model.

The result does not depend on the machine, since nothing is measured. Tensors are counted in fp32, the type of
weights and gradients; bf16 activations need less memory than that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.decide.autotune import PORTFOLIO, VIRTUAL_CHOICES, Conditions
from shoal.decide.cost import Link
from shoal.decide.layout_search import MICRO_BATCH_SIZES, Layout, LayoutSearch
from shoal.decide.partition import Memory
from shoal.errors import UsageError
from shoal.pipelining.export_graph import export_model
from shoal.pipelining.roofline import Rates, estimate_cost
from shoal.train.parallel_config import ParallelConfig, parse_bytes


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


def search_layouts(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], dict[str, Tensor]],
    parallel: ParallelConfig,
    num_devices: int,
    *,
    global_batch_size: int,
    micro_batch_size: int | None,
    optimizer_ratio: float,
) -> list[Layout]:
    """Return the layouts that fit into memory, the fastest first. Allocates no tensors.

    Args:
        make_model: returns the model; called on the meta device, as ``make_batch``.
        make_batch: returns a batch of a given number of samples, by names of the model's arguments.
        parallel: the fixed settings; ``pipeline`` is fixed unless ``layout`` is ``auto``.
        num_devices: number of devices to use.
        global_batch_size: samples per optimizer step.
        micro_batch_size: samples per micro-batch; ``None`` tries several.
        optimizer_ratio: bytes of optimizer state per byte of parameters.

    Raises:
        UsageError: ``parallel.memory`` is not set, or no layout fits; the message has the missing amount.
    """
    device = DEVICES[parallel.device]
    if parallel.memory is None:
        raise UsageError("parallel.layout auto needs the memory of a device, such as --memory 40GB")
    sizes = (micro_batch_size,) if micro_batch_size else MICRO_BATCH_SIZES
    base = sizes[len(sizes) // 2]  # costs per launch depend on the size
    with torch.device("meta"):
        graph = export_model(make_model(), make_batch(base), training=True)
    search = LayoutSearch(
        cost=estimate_cost(graph, device.rates),
        memory=Memory(limit_bytes=parse_bytes(parallel.memory), optimizer_ratio=optimizer_ratio),
        global_batch_size=global_batch_size,
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
