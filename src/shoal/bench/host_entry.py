"""Measures this host in seconds, for an entry of the planner's catalog.

Products and copies are timed on one device. The rate of the network is what the interface's driver says: one
host alone cannot measure it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SIDE = {"cpu": 1024, "cuda": 8192}
_COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
_LEAST_S = 0.3
_UNKNOWN_GBIT = 10.0
_UNKNOWN_GHZ = 2.0
_INTERFACES = Path("/sys/class/net")


@dataclass(frozen=True, kw_only=True)
class HostEntry:
    """This host, in the units of a catalog file."""

    device: str
    num_devices: int
    memory_gib: float
    memory_gbyte_per_s: float
    clock_ghz: float
    tflops: dict[str, float]
    nic_gbit_per_s: float | None
    """None: no interface says its rate."""
    is_cpu: bool = False
    """The device is the host's processors."""
    shared_kib: int = 0
    """Most shared memory of a block on a GPU."""

    def toml(self, name: str, date: str) -> str:
        """Return a catalog file with this host as ``name``."""
        nic = self.nic_gbit_per_s or _UNKNOWN_GBIT
        of_nic = "the rate of its interface" if self.nic_gbit_per_s else "the network is assumed"
        rates = ", ".join(f"{key} = {value:.4g}" for key, value in self.tflops.items())
        source = json.dumps(f"measured on {date}: one large product and one large copy on {self.device}")
        shared = f"shared_kib = {self.shared_kib}\n" if self.shared_kib else ""
        of_kind = "cpu = true\n" if self.is_cpu else shared
        network = json.dumps(f"{of_nic}; measure it with shoal bench comm")
        return (
            f"[accelerator.{json.dumps(name)}]\n"
            f"memory_gib = {self.memory_gib:.4g}\n"
            f"memory_gbyte_per_s = {self.memory_gbyte_per_s:.4g}\n"
            f"clock_ghz = {self.clock_ghz:.4g}\n"
            f"tflops = {{ {rates} }}\n"
            f"source = {source}\n"
            f"{of_kind}\n"
            f"[instance.{json.dumps(name)}]\n"
            f"accelerator = {json.dumps(name)}\n"
            f"num_accelerators = {self.num_devices}\n"
            'local_network = "pcie"\n'
            "local_gbyte_per_s = 12  # PCIe 3 x16; put your link between GPUs here\n"
            'network = "ethernet"\n'
            f"nic_gbit_per_s = {nic:g}\n"
            'unpriced = "your own"\n'
            f"source = {network}\n"
        )


def measure_host() -> HostEntry:
    """Measure the first device of this host: a GPU if there is one, else the CPU."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if on_gpu else "cpu")
    types = {"fp32": torch.float32}
    if on_gpu:
        types["fp16"] = torch.float16
        if torch.cuda.is_bf16_supported(including_emulation=False):
            types["bf16"] = torch.bfloat16
    properties = torch.cuda.get_device_properties(0) if on_gpu else None
    return HostEntry(
        device=properties.name if properties else _cpu_name(),
        num_devices=torch.cuda.device_count() if on_gpu else 1,
        memory_gib=(properties.total_memory if properties else _host_memory()) / 2**30,
        memory_gbyte_per_s=copied_bytes_per_s(device) / 1e9,
        clock_ghz=properties.clock_rate / 1e6 if properties else _cpu_ghz(),
        tflops={key: matmul_flops_per_s(device, dtype) / 1e12 for key, dtype in types.items()},
        nic_gbit_per_s=nic_gbit_per_s(),
        is_cpu=not on_gpu,
        shared_kib=properties.shared_memory_per_block_optin >> 10 if properties else 0,
    )


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest large square product within some tenths of a second."""
    import torch

    side = _SIDE[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _fastest_s(device, lambda: torch.mm(left, right))


def copied_bytes_per_s(device: torch.device) -> float:
    """Return the bytes/s that the fastest large copy within a device's memory reads and writes."""
    import torch

    source = torch.ones(_COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest_s(device, lambda: target.copy_(source))


def _fastest_s(device: torch.device, work: Callable[[], object]) -> float:
    import torch

    def once() -> float:
        begin_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin_s

    best, begin_s = once(), time.perf_counter()
    while time.perf_counter() - begin_s < _LEAST_S:
        best = min(best, once())
    return best


def nic_gbit_per_s(interfaces: Path = _INTERFACES) -> float | None:
    """Return the rate of the fastest network interface, as its driver says it, if one does."""
    rates = []
    for file in interfaces.glob("*/speed"):
        try:
            rates.append(int(file.read_text()) / 1000)  # Mbit/s; -1: unknown
        except (OSError, ValueError):  # an interface that is down, or has no rate
            continue
    return max((rate for rate in rates if rate > 0), default=None)


def _cpu_name() -> str:
    return next(iter(_cpu_facts("model name")), platform.processor() or "CPU")


def _cpu_ghz() -> float:
    return max((float(text) / 1000 for text in _cpu_facts("cpu MHz")), default=_UNKNOWN_GHZ)


def _cpu_facts(key: str) -> list[str]:
    """Return the values of a key of /proc/cpuinfo, one for each core."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key]


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
