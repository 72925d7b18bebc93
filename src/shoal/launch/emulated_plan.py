"""What an emulated cluster consists of: names, addresses, rates, and the commands that make it. Pure.

Worker host i has the address 10.77.0.(i+1), helper host j 10.77.1.(j+1), in one network /16. Every cluster
uses the same addresses: its bridge lives in a network namespace of its own, so nobody else sees them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import UsageError

MASTER_PORT = 29_500
HELPER_PORT = 7_070
INTERFACE = "eth0"
"""The name of the network interface inside every host."""

BRIDGE = "br0"
MAX_HOSTS = 250
_NETWORK = "10.77"
_SHAPING = "burst 256k latency 50ms"
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One host of an emulated cluster."""

    name: str
    port: str
    """Its port of the bridge: ``host0`` … or ``helper0`` …"""
    address: str
    rate_bps: int | None
    """Bits a second of its link in each direction; ``None``: not shaped."""
    is_helper: bool


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """All hosts: those of the workers first, then the helper hosts."""

    hosts: tuple[HostPlan, ...]

    @property
    def num_worker_hosts(self) -> int:
        return sum(not host.is_helper for host in self.hosts)

    @property
    def helpers(self) -> tuple[HostPlan, ...]:
        return tuple(host for host in self.hosts if host.is_helper)


def plan_cluster(
    *, hosts: int, helpers: int = 0, nic: str | None = None, helper_nic: str | None = None, prefix: str
) -> ClusterPlan:
    """Return the hosts of a cluster.

    Args:
        hosts: number of worker hosts.
        helpers: number of helper hosts.
        nic: rate of each host's link in each direction, such as ``200mbit``; ``None``: not shaped.
        helper_nic: the same for helper hosts; ``None``: as ``nic``.
        prefix: begins the host names, so that clusters that live at once can be told apart.

    Raises:
        UsageError: a number out of its range, or a rate that is none.
    """
    if not 1 <= hosts <= MAX_HOSTS:
        raise UsageError(f"--hosts {hosts} must be from 1 to {MAX_HOSTS}")
    if not 0 <= helpers <= MAX_HOSTS:
        raise UsageError(f"--helpers {helpers} must be from 0 to {MAX_HOSTS}")
    if helper_nic is not None and helpers == 0:
        raise UsageError(
            f"--helper-nic {helper_nic} needs --helpers: there are no helper hosts to apply it to"
        )
    rate = None if nic is None else parse_rate(nic, option="--nic")
    helper_rate = rate if helper_nic is None else parse_rate(helper_nic, option="--helper-nic")
    return ClusterPlan(
        hosts=(
            *(_host("host", i, f"{_NETWORK}.0.{i + 1}", rate, prefix) for i in range(hosts)),
            *(_host("helper", i, f"{_NETWORK}.1.{i + 1}", helper_rate, prefix) for i in range(helpers)),
        )
    )


def _host(kind: str, index: int, address: str, rate_bps: int | None, prefix: str) -> HostPlan:
    return HostPlan(
        name=f"{prefix}-{kind}{index}",
        port=f"{kind}{index}",
        address=address,
        rate_bps=rate_bps,
        is_helper=kind == "helper",
    )


def parse_rate(text: str, *, option: str) -> int:
    """Return a rate such as ``200mbit`` in bits a second.

    Raises:
        UsageError: it is not a positive number with a unit of bits.
    """
    match = _RATE.fullmatch(text.strip().lower())
    rate = round(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if rate < 1:
        bytes_too = " (tc reads mbps as megabytes a second)" if match and match[2].endswith("bps") else ""
        raise UsageError(
            f"{option} {text!r} must be a number above 0 and one of {', '.join(_UNITS)}, such as 200mbit or "
            f"1gbit, in bits a second{bytes_too}"
        )
    return rate


def format_rate(rate_bps: int | None) -> str:
    """Return a rate for people."""
    if rate_bps is None:
        return "not shaped"
    unit = next(name for name, size in reversed(_UNITS.items()) if rate_bps >= size)
    return f"{rate_bps / _UNITS[unit]:g}{unit}"


def describe(plan: ClusterPlan, *, workers_per_host: int) -> str:
    """Return what a dry run prints: one line a host."""
    lines = []
    for index, host in enumerate(plan.hosts):
        first = index * workers_per_host
        ranks = str(first) if workers_per_host == 1 else f"{first}-{first + workers_per_host - 1}"
        what = f"server, port {HELPER_PORT}" if host.is_helper else f"rank {ranks}"
        rate = format_rate(host.rate_bps)
        lines.append(f"{host.port:<10} {host.address:<12} {rate:<12} {what}")
    return "\n".join(lines)


def helpers_setting(plan: ClusterPlan, *, announce_rates: bool) -> str:
    """Return the value of SHOAL_HELPERS: ``address:port`` of each helper host, ``*ratio`` if it differs."""
    entries = []
    worker_rate = plan.hosts[0].rate_bps
    for host in plan.helpers:
        entry = f"{host.address}:{HELPER_PORT}"
        if announce_rates and worker_rate and host.rate_bps and host.rate_bps != worker_rate:
            entry += f"*{host.rate_bps / worker_rate:.6g}"
        entries.append(entry)
    return ",".join(entries)


def worker_places(plan: ClusterPlan, *, rank: int, workers_per_host: int, master_port: int) -> dict[str, str]:
    """Return the variables by which torchrun tells worker ``rank`` its place and where to meet."""
    host, local_rank = divmod(rank, workers_per_host)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.num_worker_hosts * workers_per_host),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(workers_per_host),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(plan.num_worker_hosts),
        "NODE_RANK": str(host),
        "MASTER_ADDR": plan.hosts[0].address,
        "MASTER_PORT": str(master_port),
    }


# ---- batch files of iproute2 ------------------------------------------------------------------------------


def bridge_links(hosts: list[HostPlan], namespaces: list[str]) -> str:
    """Return the ``ip -batch`` lines that make the bridge and a link to each host's namespace (a path)."""
    lines = [f"link add {BRIDGE} type bridge mcast_snooping 0", f"link set {BRIDGE} up"]
    for host, namespace in zip(hosts, namespaces, strict=True):
        lines += [
            f"link add {host.port} type veth peer name {INTERFACE} netns {namespace}",
            f"link set {host.port} master {BRIDGE}",
            f"link set {host.port} up",
        ]
    return "\n".join(lines) + "\n"


def host_links(host: HostPlan) -> str:
    """Return the ``ip -batch`` lines for the inside of a host."""
    return f"link set lo up\naddress add {host.address}/16 brd + dev {INTERFACE}\nlink set {INTERFACE} up\n"


def shaping(device: str, rate_bps: int | None) -> str:
    """Return the ``tc -batch`` line that shapes what a device sends, or nothing."""
    if rate_bps is None:
        return ""
    return f"qdisc add dev {device} root tbf rate {rate_bps}bit {_SHAPING}\n"
