"""Rows of ``comm`` about links: not shaped, with a cap for each flow, and libfabric beside TCP."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from tempfile import NamedTemporaryFile
from typing import Any

from benchmarks.comm_runs import (
    ALL_REDUCE,
    MIB,
    Backends,
    Measured,
    add_row,
    on_cluster,
    on_this_host,
    repeats_of,
    retakes_of,
    spec_of,
)
from benchmarks.comm_worker import INTERFACE, OTHER_HOST, PROCESSOR
from benchmarks.harness import Benchmark
from shoal import native
from shoal.launch.emulated import Cluster

FLOW_RATE = "100mbit"
RAIL = "tcp;ofi_rxm"


def unshaped_rows(bench: Benchmark, hosts: int) -> None:
    """Hosts whose links are not shaped: what the processors can do, and what each GB costs them."""
    big = (ALL_REDUCE, 25 * MIB)
    key = f"{big[0]} {big[1]}"
    with Cluster(hosts=hosts) as cluster:
        spec = spec_of({"gloo": None, "shoal": 0}, [big], 3 * repeats_of(bench))
        measured = on_cluster(cluster, spec, most_retaken=retakes_of(bench))
    sent_gb = 2 * (hosts - 1) / hosts * big[1] / 1e9  # by each rank, in a ring as with servers on the workers
    case = f"{hosts} hosts, links not shaped, 25 MiB"
    add_row(bench, measured, case, big, "shoal", target=1.2)
    used = measured.samples[PROCESSOR + key]
    bench.add(
        f"{case}, processor time for each GB that a rank sends",
        ours=[seconds / sent_gb for seconds in used["shoal"]],
        peer=[seconds / sent_gb for seconds in used["gloo"]],
        peer_name="gloo",
        unit="s",
        target=1 / 0.7,
        foreign_cores=[measured.foreign],
        num_retaken=measured.num_retaken,
    )
    _print_rates(case, measured, key, ("shoal", "gloo"), sent_gb)


def threads_rows(bench: Benchmark) -> None:
    """Two hosts whose links are not shaped: 2 and 4 network threads of each process against one."""
    big = (ALL_REDUCE, 25 * MIB)
    key = f"{big[0]} {big[1]}"
    backends: dict[str, int | dict[str, Any] | None] = {
        _threads(number): {"network_threads": number} for number in (1, 2, 4)
    }
    with Cluster(hosts=2) as cluster:
        measured = on_cluster(
            cluster, spec_of(backends, [big], 3 * repeats_of(bench)), most_retaken=retakes_of(bench)
        )
    case, sent_gb, one = "2 hosts, links not shaped, 25 MiB", big[1] / 1e9, _threads(1)
    for number in (2, 4):
        add_row(bench, measured, f"{case}, {_threads(number)}", big, _threads(number), peer=one)
        used = measured.samples[PROCESSOR + key]
        bench.add(
            f"{case}, {_threads(number)}, processor time for each GB that a rank sends",
            ours=[seconds / sent_gb for seconds in used[_threads(number)]],
            peer=[seconds / sent_gb for seconds in used[one]],
            peer_name=one,
            unit="s",
            foreign_cores=[measured.foreign],
            num_retaken=measured.num_retaken,
        )
    _print_rates(case, measured, key, backends, sent_gb)


def protection_rows(bench: Benchmark) -> None:
    """Two hosts whose links are not shaped: tags and encryption of messages against checksums."""
    big = (ALL_REDUCE, 25 * MIB)
    key, checksums = f"{big[0]} {big[1]}", "checksums"
    names = {checksums: "checksum", "tags": "tag", "encrypted": "encrypt"}
    backends: Backends = {name: {"protection": protection} for name, protection in names.items()}
    with Cluster(hosts=2) as cluster:
        measured = on_cluster(
            cluster, spec_of(backends, [big], 3 * repeats_of(bench)), most_retaken=retakes_of(bench)
        )
    case, sent_gb = "2 hosts, links not shaped, 25 MiB", big[1] / 1e9
    used = measured.samples[PROCESSOR + key]
    for name, speed, cost in (("tags", 0.95, 1.1), ("encrypted", None, None)):
        add_row(bench, measured, f"{case}, {name}", big, name, peer=checksums, target=speed)
        bench.add(
            f"{case}, {name}, processor time for each GB that a rank sends",
            ours=[seconds / sent_gb for seconds in used[name]],
            peer=[seconds / sent_gb for seconds in used[checksums]],
            peer_name=checksums,
            unit="s",
            target=None if cost is None else 1 / cost,
            foreign_cores=[measured.foreign],
            num_retaken=measured.num_retaken,
        )
    _print_rates(case, measured, key, backends, sent_gb)


def _threads(number: int) -> str:
    return f"{number} network thread{'s' * (number > 1)}"


def _print_rates(case: str, measured: Measured, key: str, names: Iterable[str], sent_gb: float) -> None:
    gbit = 8 * sent_gb
    for name in names:
        took, cores = median(measured.samples[key][name]), median(measured.samples[PROCESSOR + key][name])
        print(
            f"{case}: {name} sends {gbit / took:.1f} Gbit/s a rank, {gbit / cores:.1f} for each core "
            f"in use; 25 GbE takes {25 * cores / gbit:.1f} cores"
        )


def capped_rows(bench: Benchmark) -> None:
    """Two hosts whose links let each flow have 100 Mbit/s, as clouds do: several flows against one."""
    key = (ALL_REDUCE, 16 * MIB)
    one, four, rail, rails = "1 connection", "4 connections", "1 rail", "2 rails"
    # Groups share connections, unless an option of the transport differs.
    apart = {"peer_grace_s": 2.1}
    backends: dict[str, int | dict[str, Any] | None] = {one: 0, four: {"connections_per_peer": 4, **apart}}
    with_fabric = fabric_is_there()
    if with_fabric:
        backends |= {rail: {"transport": f"ofi:{RAIL}"}, rails: {"transport": f"ofi:{RAIL},{RAIL}"}}
    with Cluster(hosts=2) as cluster:
        cap_flows(cluster)
        spec = spec_of(backends, [key], repeats_of(bench))
        measured = on_cluster(cluster, spec, most_retaken=retakes_of(bench))
    case = f"2 hosts, {FLOW_RATE} for each flow, 16 MiB"
    add_row(bench, measured, f"{case}, {four}", key, four, peer=one, target=3.6)
    if with_fabric:
        add_row(bench, measured, f"{case}, libfabric, {rails}", key, rails, peer=rail, target=1.8)


def interface_rows(bench: Benchmark) -> None:
    """Two hosts with two links of 100 Mbit/s each: both against one."""
    key = (ALL_REDUCE, 16 * MIB)
    one, two = "1 interface", "2 interfaces"
    backends: Backends = {one: {INTERFACE: "eth0"}, two: {INTERFACE: "eth0,eth1"}}
    spec = spec_of(backends, [key], repeats_of(bench))
    with Cluster(hosts=2, nic=FLOW_RATE, interfaces=2) as cluster:
        measured = on_cluster(cluster, spec, most_retaken=retakes_of(bench))
    case = f"2 hosts with two links of {FLOW_RATE} each, 16 MiB, 2 interfaces"
    add_row(bench, measured, case, key, two, peer=one, target=1.9)


def cap_flows(cluster: Cluster) -> None:
    """Give each flow between the first two hosts a rate of its own; their links are not shaped otherwise."""
    for host, port in enumerate(("dport", "sport")):  # the greater address calls
        with NamedTemporaryFile("w", suffix=".tc") as file:
            file.write(capped_flows(port))
            file.flush()
            if cluster.start(host, ["tc", "-batch", file.name]).wait():
                raise SystemExit("tc cannot cap the rate of each flow")


def capped_flows(port: str) -> str:
    """Return tc's batch that gives each flow of a link a rate of its own: a class by 8 bits of a port.

    The port is the calling side's, "sport" or "dport" (of source or destination): the other one is the same
    for all flows. Two of four flows share a class once in 40 runs.
    """
    shape = f"htb rate {FLOW_RATE} quantum 1514"
    lines = ["qdisc add dev eth0 root handle 1: htb default 1"]
    lines += [f"class add dev eth0 parent 1: classid 1:1 {shape}"]
    for bits in range(256):
        number = f"1:{16 + bits:x}"
        match = f"match ip {port} {bits << 1:#x} 0x1fe"  # a kernel takes every second port for calls
        lines += [
            f"class add dev eth0 parent 1: classid {number} {shape}",
            f"filter add dev eth0 parent 1: protocol ip prio 1 u32 {match} flowid {number}",
        ]
    return "\n".join(lines) + "\n"


def fabric_rows(bench: Benchmark) -> None:
    """libfabric against our TCP between two hosts, and against our shared memory inside one."""
    key = (ALL_REDUCE, 25 * MIB)
    if not fabric_is_there():
        missing(bench, "libfabric", "libfabric, which this machine does not have", 0.9)
        return
    retakes, repeats = retakes_of(bench), repeats_of(bench)
    pair: Backends = {"TCP": 0, "libfabric": {"transport": f"ofi:{RAIL}"}}
    with Cluster(hosts=2) as cluster:
        between = on_cluster(cluster, spec_of(pair, [key], repeats), most_retaken=retakes)
    add_row(
        bench,
        between,
        f"2 hosts, links not shaped, 25 MiB, libfabric {RAIL}",
        key,
        "libfabric",
        peer="TCP",
        target=0.9,
    )
    inside: Backends = {"shared memory": 0, "libfabric": {"transport": "ofi:shm", OTHER_HOST: True}}
    measured: Measured = on_this_host(2, spec_of(inside, [key], repeats), most_retaken=retakes)
    case = "2 processes of one host, 25 MiB, libfabric shm"
    add_row(bench, measured, case, key, "libfabric", peer="shared memory", target=0.9)


def fabric_is_there() -> bool:
    return native.fabric("127.0.0.1").providers.get(RAIL) == ""


def missing(bench: Benchmark, case: str, what: str, target: float) -> None:
    """Add a row that cannot be measured, which counts as a miss."""
    print(f"{case}: needs {what}")
    bench.add(
        case,
        ours=[float("nan")],
        peer=[float("nan")],
        peer_name=f"not measured: {what}",
        unit="ms",
        target=target,
    )
