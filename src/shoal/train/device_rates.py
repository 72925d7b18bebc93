"""Rates of devices and of the links between them, for layouts that are chosen by a cost model."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.decide.cost import Link
from shoal.pipelining.roofline import Rates


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
