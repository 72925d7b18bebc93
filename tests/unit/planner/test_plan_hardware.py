"""The catalog: what ships is complete, and what a user writes wrong is said in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from plan_made import INSTANCE
from shoal import attention
from shoal.errors import UsageError
from shoal.planner.convergence import convergence_of
from shoal.planner.hardware import Catalog, peak_flops_per_s, require_accelerators

NAMES = {
    *("p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p5.48xlarge", "g4dn.12xlarge", "c5n.18xlarge"),
    *("m4.16xlarge", "m5.2xlarge", "DGX-1", "DGX-2", "DGX-2H", "DGX-A100", "DGX-H100"),
    *("p3.8xlarge", "p4de.24xlarge", "p5e.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "g5.48xlarge"),
    *("g6.48xlarge", "g6e.48xlarge", "RTX-3090", "RTX-4090", "RTX-5090", "A10", "L4", "L40S", "T4"),
    *("c6i.32xlarge", "c7i.48xlarge", "hpc7a.96xlarge"),
}


def test_shipped_entries_have_sources_and_sensible_figures() -> None:
    catalog = Catalog()
    assert not NAMES - set(catalog.instances)
    for entries in (catalog.accelerators, catalog.networks, catalog.instances):
        assert all(entry.source for entry in entries.values())
    for instance in catalog.instances.values():
        assert 1e8 < instance.nic_bytes_per_s < 1e12
        assert (instance.price_per_hour or 1) > 0 and instance.price_source
    p3dn = catalog.instance("p3dn.24xlarge")
    assert p3dn.nic_bytes_per_s == 100e9 / 8 and p3dn.flow_bytes_per_s == 10e9 / 8
    assert require_accelerators(catalog.machines("2xp3dn.24xlarge")).peak("fp16") == 125e12


def test_a_plan_assumes_the_attention_kernels_where_training_chooses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "USES_KERNELS", True)
    monkeypatch.setattr(attention, "_load", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with_kernels = set()
    for device in Catalog().accelerators.values():
        assert (device.shared_bytes > 0) != device.is_cpu
        properties = SimpleNamespace(shared_memory_per_block_optin=device.shared_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        chosen = attention.runs_kernels(torch.device("cpu" if device.is_cpu else "cuda"))
        assert device.numerics("bf16").has_kernels == device.numerics("fp16").has_kernels == chosen
        if chosen:
            with_kernels.add(device.name.split("-")[0])
    assert with_kernels == {"A100", "H100", "H200", "B200", "GB200"}


def test_prices_are_those_of_a_market() -> None:
    on_demand, blocks = Catalog(), Catalog(market="capacity-block")
    assert on_demand.instance("p4d.24xlarge").price_per_hour == 21.957642
    assert blocks.instance("p4d.24xlarge").price_per_hour == 14.75
    assert "not offered on demand" in on_demand.instance("p5e.48xlarge").price_source
    assert on_demand.instance("p5e.48xlarge").price_per_hour is None
    missing = blocks.instance("g5.48xlarge")
    assert missing.price_per_hour is None and "no capacity-block price" in missing.price_source
    same = {"price_per_hour": 1.0, "price_source": ""}
    for name, instance in on_demand.instances.items():
        assert replace(blocks.instances[name], **same) == replace(instance, **same)
    with pytest.raises(UsageError, match=r"--price 'spto' is no market. Did you mean 'spot'\?"):
        Catalog(market="spto")


def test_a_users_file_has_prices_of_markets(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    spot = 'market.spot = { price_per_hour = 2.5, price_source = "seen in May" }\n'
    path.write_text(INSTANCE + spot, encoding="utf-8")
    assert Catalog([path]).instance("mine").price_per_hour == 7.5
    assert Catalog([path], "spot").instance("mine").price_source == "seen in May"
    path.write_text(INSTANCE + spot.replace("spot", "spto"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"market has an unknown key 'spto'. Did you mean 'spot'\?"):
        Catalog([path])
    path.write_text(INSTANCE + "market.spot = { price_per_hour = 2.5 }\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"instance 'mine', market.spot lacks price_source; add it"):
        Catalog([path], "spot")


@pytest.mark.parametrize(
    ("device", "bf16"),
    [
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA RTX A6000", None),
    ],
)
def test_devices_are_found_by_the_name_of_their_driver(device: str, bf16: float | None) -> None:
    assert peak_flops_per_s(device, "bf16") == bf16


def test_machines_are_read_as_people_write_them() -> None:
    catalog = Catalog()
    assert catalog.machines("64xc5n.18xlarge").count == 64
    assert catalog.machines("DGX-A100").count == 1
    assert str(catalog.machines("8 x p4d.24xlarge")) == "8xp4d.24xlarge"
    assert catalog.machines("4xp3dn.24xlarge").price_per_hour == pytest.approx(4 * 31.212)
    assert catalog.machines("4xDGX-2").price_per_hour is None


def test_a_users_file_adds_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(INSTANCE, encoding="utf-8")
    mine = Catalog([path]).instance("mine")
    assert (mine.num_accelerators, mine.nic_bytes_per_s, mine.price_per_hour) == (4, 5e9, 7.5)
    assert mine.effective_nic == pytest.approx(5e9 * mine.network.efficiency)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("price_per_hour = 7.5", "price_per_hour = -7.5"), r"price_per_hour is -7.5; it must be at least 0"),
        (("nic_gbit_per_s = 40\n", ""), r"instance 'mine' lacks nic_gbit_per_s; add it"),
        (('network = "ethernet"\nnic_gbit_per_s = 40\n', ""), r"lacks network, nic_gbit_per_s; add them"),
        (
            ("nic_gbit_per_s", "nic_gbits_per_s"),
            r"unknown key 'nic_gbits_per_s'. Did you mean 'nic_gbit_per_s'\?",
        ),
        (('"V100-32GB"', '"V100-32"'), r"accelerator 'V100-32' is in no catalog. Did you mean 'V100-32GB'\?"),
        (("= 40", '= "40"'), r"nic_gbit_per_s is '40'; it must be a number"),
        (("= 40", "= 0"), r"nic_gbit_per_s is 0; it must be above 0"),
        (("[instance.mine]", "[instances.mine]"), r"unknown key 'instances'. Did you mean 'instance'\?"),
        (("[instance.mine]", "[instance.mine"), r"is not TOML"),
    ],
)
def test_what_is_wrong_in_a_users_file(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(INSTANCE.replace(*change), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        Catalog([path])


def test_unknown_instance_says_which_was_meant(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"'p3dn.24xlage' is not in the catalog. Did you mean 'p3dn.24xlarge'\?"
    ):
        Catalog().machines("256xp3dn.24xlage")
    with pytest.raises(UsageError, match="the number of hosts is 0"):
        Catalog().machines("0xp3dn.24xlarge")
    with pytest.raises(UsageError, match="does not name machines"):
        Catalog().machines("a few p3dn")
    path = tmp_path / "mine.toml"
    path.write_text(
        "[instance.mine]\nnetwork = 'ethernet'\nnic_gbit_per_s = 10\nunpriced = 'own'\nsource = 'own'\n"
    )
    with pytest.raises(UsageError, match="mine has no accelerators"):
        require_accelerators(Catalog([path]).machines("4xmine"))
    with pytest.raises(UsageError, match="cannot be read"):
        Catalog([Path("nowhere.toml")])


def test_epochs_between_and_beyond_the_points() -> None:
    table = convergence_of("resnet50")
    assert table.epochs(32768) == 56
    assert table.epochs(100) == 35
    assert 45.5 < table.epochs(20000) < 56
    assert table.epochs(2 * 67840) > 1.4 * 85.85
    with pytest.raises(UsageError, match=r"Did you mean 'resnet50'\?"):
        convergence_of("resnet5")
