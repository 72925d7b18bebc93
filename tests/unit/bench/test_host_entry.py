"""A host that is measured, as an entry of the planner's catalog."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from shoal.bench.host_entry import (
    HostEntry,
    copied_bytes_per_s,
    matmul_flops_per_s,
    measure_host,
    nic_gbit_per_s,
)
from shoal.planner.hardware import Catalog, require_accelerators
from shoal.recipes.workloads import plan


def entry(nic: float | None = 25.0) -> HostEntry:
    return HostEntry(
        device='Made "fast" CPU',
        num_devices=2,
        memory_gib=64,
        memory_gbyte_per_s=100,
        clock_ghz=2.5,
        tflops={"fp32": 1.5},
        nic_gbit_per_s=nic,
    )


def test_an_entry_is_read_as_it_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(entry().toml("mine", "2026-11-28"))
    machines = Catalog([path]).machines("3xmine")
    device = require_accelerators(machines)
    assert (device.memory_bytes, device.memory_bytes_per_s, device.clock_hz) == (64 << 30, 1e11, 2.5e9)
    assert (dict(device.flops), device.precision) == ({"fp32": 1.5e12}, "fp32")
    assert machines.num_accelerators == 6 and machines.instance.nic_bytes_per_s == 25e9 / 8
    assert 'Made "fast" CPU' in device.source and machines.price_per_hour is None
    path.write_text(entry(None).toml("mine", "2026-11-28"))
    assert "the network is assumed" in Catalog([path]).instance("mine").source
    found = plan("albert-tiny", "1xmine", global_batch=64, catalog=[path])[0]
    assert found.training.parts[0].precision == "fp32"
    assert not Catalog([path]).instance("mine").is_cpu
    path.write_text(replace(entry(), is_cpu=True).toml("mine", "2026-11-28"))
    mine = Catalog([path]).instance("mine")
    assert mine.is_cpu and mine.num_accelerators == 1, "a worker has all processors of its host"
    path.write_text(replace(entry(), shared_kib=227).toml("mine", "2026-11-28"))
    assert require_accelerators(Catalog([path]).machines("mine")).shared_bytes == 227 << 10


def test_the_fastest_interface_that_says_its_rate(tmp_path: Path) -> None:
    for name, text in (("eth0", "10000"), ("eth1", "25000"), ("down", "-1"), ("odd", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(text)
    assert nic_gbit_per_s(tmp_path) == 25.0
    assert nic_gbit_per_s(tmp_path / "eth0") is None


def test_this_host_is_measured() -> None:
    found = measure_host()
    assert found.num_devices >= 1 and found.memory_gib > 0.1 and found.clock_ghz > 0.1
    assert found.device and set(found.tflops) <= {"fp32", "fp16", "bf16"}
    cpu = torch.device("cpu")
    assert matmul_flops_per_s(cpu, torch.float32) > 1e6 and copied_bytes_per_s(cpu) > 1e6
