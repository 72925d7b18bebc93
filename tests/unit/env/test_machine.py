"""Cores that a process may use, by affinity and by the quota of its container."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.data.images.reader import DecodeThreads
from shoal.env import machine
from shoal.env.machine import cpu_quota, num_cores

NO_QUOTA = 1 << 20


def groups(tmp_path: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    (tmp_path / "own").write_text(own)
    for name, content in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(content)
    return tmp_path / "cgroup", tmp_path / "own"


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        pytest.param("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5, id="container, version 2"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, NO_QUOTA, id="no quota"),
        pytest.param("0::/\n", {}, NO_QUOTA, id="root group"),
        pytest.param(
            "0::/kubepods/pod1/a\n",
            {"kubepods/cpu.max": "800000 100000", "kubepods/pod1/cpu.max": "250000 100000",
             "kubepods/pod1/a/cpu.max": "max 100000"},
            2.5, id="of the pod around",
        ),
        pytest.param(
            "5:memory:/x\n4:cpu,cpuacct:/docker/b\n1:name=systemd:/docker/b\n0::/\n",
            {"cpu,cpuacct/docker/b/cpu.cfs_quota_us": "50000",
             "cpu,cpuacct/docker/b/cpu.cfs_period_us": "100000"},
            0.5, id="version 1",
        ),
        pytest.param(
            "4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, NO_QUOTA,
            id="version 1, no quota",
        ),
        pytest.param("0::/\n", {"cpu.max": "broken"}, NO_QUOTA, id="not understood"),
    ],
)  # fmt: skip
def test_quota_of_the_container(tmp_path: Path, own: str, files: dict[str, str], quota: float) -> None:
    assert cpu_quota(*groups(tmp_path, own, files)) == quota


def test_no_file_of_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path / "none") == NO_QUOTA


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.5, 1), (2.0, 2), (99.0, 8), (NO_QUOTA, 8)])
def test_cores_are_those_of_affinity_and_quota(
    quota: float, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    monkeypatch.setattr(machine, "num_scheduled", lambda: 8)
    assert num_cores() == cores
    assert DecodeThreads().count == cores


def test_host_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    own = machine.host_identity()
    assert own == machine.host_identity()
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in own
    monkeypatch.setenv("SHOAL_HOST_ID", "other")
    assert machine.host_identity() == "other"
