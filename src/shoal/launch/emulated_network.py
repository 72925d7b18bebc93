"""Plans the network of an emulated cluster, and creates and holds it in a keeper process.

The plan is pure: worker host i has the address 10.77.0.(i+1), helper host j 10.77.1.(j+1), in one network
/16. Every cluster uses the same addresses: its bridge lives in a network namespace of its own.

The keeper is ``python -m shoal.launch.emulated_network``. Network namespaces without names live while a
process is in them or holds them open: when the keeper and the processes on the hosts are gone, the kernel
removes namespaces, links and bridge. The keeper outlives the launcher, even a killed one, until it has
ended the processes on the hosts. It leads a session of its own, which the terminal's Ctrl-C does not reach.

It reads the plan from stdin, one line of JSON, and answers with one line: file descriptors, or the error.
Then it waits for the line ``close``, for the end of stdin, or for the launcher's death.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.json_text import parse_json
from shoal.launch.supervision import POLL_S

MASTER_PORT = 29_500
HELPER_PORT = 7_070
INTERFACE = "eth0"
"""The name of the first network interface inside every host; further ones are ``eth1`` …"""

MAX_INTERFACES = 8
MAX_HOSTS = 250
_NETWORK = "10.77"
BURST_BYTES = 256 << 10
"""Bytes that a link sends at once after a pause."""
_QUEUE = "latency 50ms"
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
GRACE_S = 2.0
"""Time from SIGTERM to SIGKILL for processes on the hosts."""

_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_TOOL_DEADLINE_S = 60.0

Namespace = tuple[int, int]
"""Device and inode of a network namespace's file ``/proc/PID/ns/net``."""


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One host of an emulated cluster."""

    name: str
    port: str
    """Its port of the bridge: ``host0`` … or ``helper0`` …"""
    address: str
    rate_bps: int | None
    """Bits per second of each of its links in each direction; ``None``: not shaped."""
    burst_bytes: int
    is_helper: bool
    num_interfaces: int = 1
    """Each is in a network of its own."""

    def links(self) -> list[tuple[str, str, str, str]]:
        """Return bridge, port of the bridge, interface and address of each link."""
        subnet, _, rest = self.address.removeprefix("10.").partition(".")
        return [
            (
                f"br{index}",
                self.port if index == 0 else f"{self.port}-{index}",
                f"eth{index}",
                f"10.{int(subnet) + index}.{rest}",
            )
            for index in range(self.num_interfaces)
        ]


def plan_cluster(
    *,
    hosts: int,
    helpers: int = 0,
    nic: str | None = None,
    helper_nic: str | None = None,
    burst_bytes: int = BURST_BYTES,
    interfaces: int = 1,
    prefix: str,
) -> list[HostPlan]:
    """Return the hosts of a cluster: those of the workers first, then the helper hosts.

    Args:
        hosts: number of worker hosts.
        helpers: number of helper hosts.
        nic: rate of each host's link in each direction, such as ``200mbit``; ``None``: not shaped.
        helper_nic: the same for helper hosts; ``None``: as ``nic``.
        burst_bytes: bytes that a shaped link sends at once after a pause.
        interfaces: number of links of each worker host; helper hosts have one.
        prefix: prefix of the host names, unique among running clusters.

    Raises:
        UsageError: a number is out of range, or a rate is invalid.
    """
    if not 1 <= hosts <= MAX_HOSTS:
        raise UsageError(f"--hosts {hosts} must be from 1 to {MAX_HOSTS}")
    if not 0 <= helpers <= MAX_HOSTS:
        raise UsageError(f"--helpers {helpers} must be from 0 to {MAX_HOSTS}")
    if not 1 <= interfaces <= MAX_INTERFACES:
        raise UsageError(f"interfaces {interfaces} must be from 1 to {MAX_INTERFACES}")
    if helper_nic is not None and helpers == 0:
        raise UsageError(
            f"--helper-nic {helper_nic} needs --helpers: there are no helper hosts to apply it to"
        )
    rate = None if nic is None else parse_rate(nic, option="--nic")
    helper_rate = rate if helper_nic is None else parse_rate(helper_nic, option="--helper-nic")
    kinds = (("host", hosts, rate), ("helper", helpers, helper_rate))
    return [
        HostPlan(
            name=f"{prefix}-{kind}{index}",
            port=f"{kind}{index}",
            address=f"{_NETWORK}.{subnet}.{index + 1}",
            rate_bps=rate_bps,
            burst_bytes=burst_bytes,
            is_helper=kind == "helper",
            num_interfaces=interfaces if kind == "host" else 1,
        )
        for subnet, (kind, count, rate_bps) in enumerate(kinds)
        for index in range(count)
    ]


def parse_rate(text: str, *, option: str) -> int:
    """Return a rate such as ``200mbit`` in bits per second.

    Raises:
        UsageError: it is not a positive number with a unit of bits.
    """
    match = _RATE.fullmatch(text.strip().lower())
    rate = round(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if rate < 1:
        bytes_too = " (tc reads mbps as megabytes per second)" if match and match[2].endswith("bps") else ""
        raise UsageError(
            f"{option} {text!r} must be a number above 0 and one of {', '.join(_UNITS)}, such as 200mbit or "
            f"1gbit, in bits per second{bytes_too}"
        )
    return rate


def format_rate(rate_bps: int | None) -> str:
    """Return a rate as text, such as ``200mbit``."""
    if rate_bps is None:
        return "not shaped"
    unit = next(name for name, size in reversed(_UNITS.items()) if rate_bps >= size)
    return f"{rate_bps / _UNITS[unit]:g}{unit}"


def describe(plan: Sequence[HostPlan], *, workers_per_host: int) -> str:
    """Return a description of the hosts, one line per host."""
    lines = []
    for index, host in enumerate(plan):
        first = index * workers_per_host
        ranks = str(first) if workers_per_host == 1 else f"{first}-{first + workers_per_host - 1}"
        processes = f"server, port {HELPER_PORT}" if host.is_helper else f"rank {ranks}"
        rate = format_rate(host.rate_bps)
        lines.append(f"{host.port:<10} {host.address:<12} {rate:<12} {processes}")
    return "\n".join(lines)


def helpers_setting(plan: Sequence[HostPlan], *, announce_rates: bool) -> str:
    """Return the value of SHOAL_HELPERS: ``address:port`` per helper host, with ``*ratio`` of other rates."""
    entries = []
    worker_rate = plan[0].rate_bps
    for host in (host for host in plan if host.is_helper):
        entry = f"{host.address}:{HELPER_PORT}"
        if announce_rates and worker_rate and host.rate_bps and host.rate_bps != worker_rate:
            entry += f"*{host.rate_bps / worker_rate:.6g}"
        entries.append(entry)
    return ",".join(entries)


# ---- batch files of iproute2 ------------------------------------------------------------------------------


def bridge_links(hosts: list[HostPlan], namespaces: list[str]) -> str:
    """Return the ``ip -batch`` lines for the bridges and the links to the hosts' namespaces (paths)."""
    lines = []
    for bridge in dict.fromkeys(bridge for host in hosts for bridge, *_ in host.links()):
        lines += [f"link add {bridge} type bridge mcast_snooping 0", f"link set {bridge} up"]
    for host, namespace in zip(hosts, namespaces, strict=True):
        for bridge, port, interface, address in host.links():
            mac = hardware_address(address)
            lines += [
                f"link add {port} type veth peer name {interface} address {mac} netns {namespace}",
                f"link set {port} master {bridge}",
                f"link set {port} up",
            ]
    return "\n".join(lines) + "\n"


def hardware_address(address: str) -> str:
    """Return the hardware address of the interface with an IPv4 address."""
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def host_links(host: HostPlan, hosts: list[HostPlan]) -> str:
    """Return the ``ip -batch`` lines for the inside of a host.

    The hardware addresses of all other hosts are set. The kernel keeps at most 1024 addresses that it has
    resolved itself, of all namespaces together: too few for 33 hosts that all send to each other.
    """
    lines = "link set lo up\n"
    for index, (_, _, interface, address) in enumerate(host.links()):
        lines += f"address add {address}/16 brd + dev {interface}\nlink set {interface} up\n"
        for other in hosts:
            if other is not host and index < other.num_interfaces:
                peer = other.links()[index][3]
                mac = hardware_address(peer)
                lines += f"neighbor add {peer} lladdr {mac} nud permanent dev {interface}\n"
    return lines


def shaping(device: str, host: HostPlan) -> str:
    """Return the ``tc -batch`` line that limits the sending rate of a device of the host's link, if any."""
    if host.rate_bps is None:
        return ""
    return f"qdisc add dev {device} root tbf rate {host.rate_bps}bit burst {host.burst_bytes} {_QUEUE}\n"


# ---- the keeper --------------------------------------------------------------------------------------------


def identity(path: str | int) -> Namespace:
    """Return the namespace of an open file or of a path in ``/proc``."""
    status = os.stat(path)  # noqa: PTH116 -- takes file descriptors too
    return status.st_dev, status.st_ino


def processes_in(namespaces: Collection[Namespace]) -> list[int]:
    """Return the ids of all other processes in these network namespaces."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has ended meanwhile, or is a zombie
                if identity(f"{entry}/ns/net") in namespaces:
                    pids.append(int(entry.name))
    return pids


def end_processes(namespaces: Collection[Namespace], *, grace_s: float) -> None:
    """End every process in these namespaces: SIGTERM, and after ``grace_s`` SIGKILL; wait for all.

    Processes are searched by namespace, not by parent, to include daemons.
    """
    kill_at = time.monotonic() + grace_s
    signalled: set[int] = set()
    num_empty = 0  # a second scan sees a process that was just entering
    while num_empty < 2:
        pids = processes_in(namespaces)
        num_empty = 0 if pids else num_empty + 1
        for pid in pids:
            number = signal.SIGKILL if time.monotonic() >= kill_at else signal.SIGTERM
            if number == signal.SIGKILL or pid not in signalled:
                signalled.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(POLL_S)


class Keeper:
    """Creates the namespaces and links of the hosts and holds them open."""

    def __init__(self, hosts: list[HostPlan], *, ip: str, tc: str) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._ip, self._tc = ip, tc
        self._hosts = hosts
        self.bridge = self._new_namespaces("bridge")[0]
        self.files = [self._new_namespaces(host.name) for host in hosts]
        self._enter(self.bridge)
        paths = [f"/proc/{os.getpid()}/fd/{network}" for network, _ in self.files]
        self._batch(ip, bridge_links(hosts, paths))
        self._batch(tc, "".join(shaping(port, host) for host in hosts for _, port, _, _ in host.links()))
        for host, (network, _) in zip(hosts, self.files, strict=True):
            self._enter(network)
            self._batch(ip, host_links(host, hosts))
            self._batch(tc, "".join(shaping(interface, host) for _, _, interface, _ in host.links()))
        self._enter(self.bridge)

    @property
    def namespaces(self) -> set[Namespace]:
        return {identity(file) for file in (self.bridge, *(network for network, _ in self.files))}

    def release(self) -> None:
        """Restore all links, and make the kernel drop unsent data.

        A socket without a process holds its namespace until the peer has acknowledged all data, or until the
        kernel has retransmitted 8 times, which takes minutes if a cable was pulled.
        """
        for host, (network, _) in zip(self._hosts, self.files, strict=True):
            devices = [
                end
                for _, port, interface, _ in host.links()
                for end in ((network, interface), (self.bridge, port))
            ]
            for namespace, device in devices:
                self._enter(namespace)
                Path("/proc/sys/net/ipv4/tcp_orphan_retries").write_text("1", encoding="ascii")
                for command in (
                    [self._tc, "qdisc", "del", "dev", device, "root"],
                    [self._ip, "link", "set", device, "up"],
                ):
                    subprocess.run(command, stderr=subprocess.DEVNULL, check=False, timeout=_TOOL_DEADLINE_S)

    def _new_namespaces(self, name: str) -> tuple[int, int]:
        """Move into new network and UTS namespaces; return open files of both."""
        self._checked(self._libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS))
        self._checked(self._libc.sethostname(name.encode(), len(name)))
        # an IPv6 address becomes usable only after seconds, and gloo might choose it
        for scope in ("all", "default"):
            with suppress(OSError):
                Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1", encoding="ascii")
        network, uts = (
            os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "uts")
        )
        return network, uts

    def _enter(self, network: int) -> None:
        self._checked(self._libc.setns(network, _CLONE_NEWNET))

    def _checked(self, result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _batch(self, tool: str, lines: str) -> None:
        if not lines:
            return
        command = [tool, "-batch", "-"]
        done = subprocess.run(
            command, input=lines, text=True, check=False, timeout=_TOOL_DEADLINE_S, capture_output=True
        )
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")


def main() -> int:
    """Create the hosts that stdin describes, answer, hold them, and finally end the processes on them."""
    request: dict[str, Any] = parse_json(sys.stdin.readline(), "what the launcher asks for")
    # readable when the launcher ends; the end of stdin is no sign of it, if the launcher has forked
    launcher = os.pidfd_open(request["launcher"])
    if os.getppid() != request["launcher"]:
        return 0  # it has ended before
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher's end decides
    try:
        keeper = Keeper([HostPlan(**host) for host in request["hosts"]], ip=request["ip"], tc=request["tc"])
    except (OSError, subprocess.SubprocessError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps({"bridge": keeper.bridge, "hosts": keeper.files}), flush=True)
    ready, _, _ = select.select([0, launcher], [], [])
    is_closed = 0 in ready and sys.stdin.readline() == "close\n"
    end_processes(keeper.namespaces, grace_s=0 if is_closed else GRACE_S)
    keeper.release()
    shutil.rmtree(request["folder"], ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
