"""Hosts and workloads made for tests: round figures, no catalog."""

from __future__ import annotations

import math
from dataclasses import replace

from shoal.decide.footprint import Activations, Numerics
from shoal.decide.workload import Layer, Workload
from shoal.planner.hardware import Accelerator, Instance, Machines, Network

DEVICE = Accelerator(
    name="device",
    memory_bytes=32 << 30,
    memory_bytes_per_s=1e12,
    clock_hz=1.41e9,
    flops={"fp32": 1e13, "fp16": 1e14},
    source="test",
)


INSTANCE = """
[instance.mine]
accelerator = "V100-32GB"
num_accelerators = 4
local_network = "nvlink"
local_gbyte_per_s = 150
network = "ethernet"
nic_gbit_per_s = 40
price_per_hour = 7.5
price_source = "invoice of May"
source = "our rack"
"""
"""An entry of a catalog."""


def hosts(
    count: int,
    *,
    per_host: int = 8,
    nic: float = 1e10,
    local: float = 1e11,
    latency_s: float = 0.0,
    flow: float = math.inf,
    price: float | None = 10.0,
    accelerator: Accelerator | None = DEVICE,
) -> Machines:
    network = Network(name="test", efficiency=1.0, latency_s=latency_s, source="test")
    instance = Instance(
        name="host",
        accelerator=accelerator,
        num_accelerators=per_host,
        local_network=Network(name="local", efficiency=1.0, latency_s=0.0, source="test"),
        local_bytes_per_s=local,
        network=network,
        nic_bytes_per_s=nic,
        flow_bytes_per_s=flow,
        price_per_hour=price,
        price_source="test",
        source="test",
    )
    return Machines(count=count, instance=instance)


KEPT = {
    numerics: Activations(sample_bytes=2e6 if numerics.precision == "fp32" else 1e6) for numerics in Numerics
}


def model(
    *, num_layers: int = 10, parameters: int = 10_000_000, flops: float = 1e9, kernels: int = 100
) -> Workload:
    layers = tuple(
        Layer(name=f"layer.{index}", num_parameters=parameters, forward_flops=flops)
        for index in range(num_layers)
    )
    return Workload(name="made", layers=layers, num_kernels=kernels, activations=KEPT)


def ideal(instance: Instance) -> Instance:
    """Return ``instance`` with links that cost nothing."""
    free = Network(name="ideal", efficiency=1.0, latency_s=0.0, source="limit")
    rates = dict.fromkeys(("nic_bytes_per_s", "local_bytes_per_s", "flow_bytes_per_s"), math.inf)
    return replace(instance, network=free, local_network=free, **rates)
