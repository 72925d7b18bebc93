"""Is the two-hop backend as fast as its formulas promise, and faster than gloo and OpenMPI?

Hosts are emulated: network namespaces whose links are shaped. All backends run in the same processes, by
turns. Nobody tells the engine a rate: it measures its helpers' links, and the formulas take the rate of a
plain TCP transfer between two of the hosts in this run. Needs root and iproute2; OpenMPI for its rows.
``--only`` chooses parts; each takes at most 4 minutes on 2 cores (``--only growth-1mb-32`` about that).
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from functools import partial

from benchmarks.comm_buckets import bucket_samples
from benchmarks.comm_links import (
    capped_rows,
    fabric_rows,
    interface_rows,
    protection_rows,
    threads_rows,
    unshaped_rows,
)
from benchmarks.comm_one_host import four_large, four_others, four_small, native_rows, two_small
from benchmarks.comm_rooflines import roofline_rows
from benchmarks.comm_rounding import cancelling_inputs, engine_sum, errors_over_bound, ring_sum
from benchmarks.comm_runs import (
    ALL_REDUCE,
    KIB,
    MIB,
    Backends,
    add_row,
    by_mpirun,
    missing_for_openmpi,
    on_cluster,
    repeats_of,
    retakes_of,
    spec_of,
    watched,
    wire_bytes_per_s,
)
from benchmarks.comm_worker import MANY, NUM_HELPERS, NUM_MANY, ON_DEVICE
from benchmarks.harness import Benchmark
from shoal.decide.server_assignment import (
    DDP_BUCKET_BYTES,
    gain_over_ring,
    recommended_bucket_bytes,
    two_hop_seconds,
)
from shoal.errors import install_command
from shoal.launch.emulated import Cluster

NUM_HOSTS = 8
NIC = "200mbit"
FAST_NIC = "400mbit"
SLOW_NIC = "50mbit"
SLOW_HELPER_NIC = "100mbit"
BURSTS = {"32kb": 32_000, "1mb": 1_000_000}


def helpers_rows(bench: Benchmark, *, on_device: bool = False) -> None:
    """8 workers, with 8, 4, 2 and no helper hosts, links of 200 Mbit/s each, against the formula and gloo.

    Args:
        on_device: tensors of shoal lie on a simulated accelerator and pass through staging; gloo's do not.
    """
    big, num_bytes = (ALL_REDUCE, 16 * MIB), 16 * MIB
    targets = {2: (0.97, None), 4: (0.97, 1.25), 8: (0.98, 1.55), 0: (0.98, 0.95)}
    # Fewer before more: a group measures helpers that no earlier group has measured.
    given = {f"{each} helpers": {NUM_HELPERS: each, ON_DEVICE: on_device} for each in targets}
    backends: Backends = {"gloo": None, **given}
    with Cluster(hosts=NUM_HOSTS, helpers=8, nic=NIC, announce_rates=False) as cluster:
        rates = wire_bytes_per_s(cluster, repeats=2)
        spec = spec_of(backends, [big], repeats_of(bench))
        measured = on_cluster(cluster, spec, most_retaken=retakes_of(bench))
        rates += wire_bytes_per_s(cluster, repeats=1)
    samples = measured.samples[f"{ALL_REDUCE} {num_bytes}"]
    for helpers, (of_formula, of_gloo) in sorted(targets.items(), reverse=True):
        name = f"{helpers} helpers"
        case = f"{NUM_HOSTS} workers + {name}, 16 MiB" + ", on a simulated accelerator" * on_device
        bench.add(
            f"{case}, formula",
            ours=[1e3 * seconds for seconds in samples[name]],
            peer=[1e3 * two_hop_seconds(num_bytes, [rate] * NUM_HOSTS, [rate] * helpers) for rate in rates],
            peer_name=f"formula at a plain TCP transfer's {sorted(rates)[1] * 8e-6:.1f} Mbit/s",
            unit="ms",
            target=of_formula,
            foreign_cores=[measured.foreign],
        )
        add_row(bench, measured, case, big, name, target=of_gloo)
        if helpers == NUM_HOSTS:
            add_row(bench, measured, case, big, name, peer="0 helpers", target=of_gloo)


def short_rows(bench: Benchmark) -> None:
    """Short sums of 8 hosts without helpers."""
    medium, small, many = (ALL_REDUCE, 64 * KIB), (ALL_REDUCE, KIB), (MANY, NUM_MANY * KIB)
    few: Backends = {"gloo": None, "colocated": 0}
    with Cluster(hosts=NUM_HOSTS, nic=NIC) as cluster:
        short = on_cluster(
            cluster, spec_of(few, [medium, small], 3 * repeats_of(bench)), most_retaken=retakes_of(bench)
        )
        row = on_cluster(cluster, spec_of(few, [many], 3), most_retaken=0)
    workers = f"{NUM_HOSTS} workers, colocated"
    add_row(bench, short, f"{workers}, 64 KiB", medium, "colocated", target=3.0)
    add_row(bench, short, f"{workers}, 1 KiB", small, "colocated", target=3.0)
    add_row(bench, row, f"{workers}, {NUM_MANY} × 1 KiB in a row", many, "colocated")


def fast_helpers_rows(bench: Benchmark) -> None:
    """4 helpers with twice the bandwidth against the gain that the formula promises."""
    big = (ALL_REDUCE, 16 * MIB)
    with Cluster(hosts=NUM_HOSTS, helpers=4, nic=NIC, helper_nic=FAST_NIC, announce_rates=False) as cluster:
        spec = spec_of({"gloo": None, "4 helpers": 4}, [big], repeats_of(bench))
        measured = on_cluster(cluster, spec, most_retaken=retakes_of(bench))
    gain = gain_over_ring(NUM_HOSTS, [2.0] * 4)
    add_row(
        bench, measured, f"{NUM_HOSTS} workers + 4 helpers × 2, 16 MiB", big, "4 helpers", target=0.9 * gain
    )
    away = 100 * abs(bench.rows[-1].ratio / gain - 1)
    bench.limit(
        f"{NUM_HOSTS} workers + 4 helpers × 2, away from formula", away, 10.0, unit="%",
        formula=f"10 % of the formula's gain over a ring, {gain:.3f}", foreign_cores=[measured.foreign],
    )  # fmt: skip


def slow_helper_rows(bench: Benchmark) -> None:
    """4 helpers given as equal, one of which has half the bandwidth."""
    big = (ALL_REDUCE, 16 * MIB)
    with Cluster(hosts=NUM_HOSTS, helpers=4, nic=NIC, announce_rates=False) as cluster:
        rates = wire_bytes_per_s(cluster, repeats=1)
        cluster.start_helpers()
        cluster.limit(NUM_HOSTS, SLOW_HELPER_NIC)
        given = {"helpers": 4, "helper_rate": 1.0}
        backends: Backends = {"as given": given, "followed": {**given, "follow": 12}}
        measured = on_cluster(
            cluster, spec_of(backends, [big], repeats_of(bench)), most_retaken=retakes_of(bench)
        )
    samples = {
        name: [1e3 * s for s in found] for name, found in measured.samples[f"{ALL_REDUCE} {16 * MIB}"].items()
    }
    case = f"{NUM_HOSTS} workers + 4 helpers, one at half the rate, 16 MiB"
    best = [
        1e3 * two_hop_seconds(16 * MIB, [rate] * NUM_HOSTS, [rate / 2, rate, rate, rate]) for rate in rates
    ]
    ours = samples["followed"]
    bench.add(
        case, ours=ours, peer=samples["as given"], peer_name="shares of equal helpers, as given",
        unit="ms", foreign_cores=[measured.foreign],
    )  # fmt: skip
    bench.add(
        f"{case}, formula", ours=ours, peer=best, peer_name="formula at a plain TCP transfer's rate",
        unit="ms", foreign_cores=[measured.foreign],
    )  # fmt: skip


def growth_rows(bench: Benchmark, burst: str, most: int) -> None:
    """As many helpers as workers: time must not grow with their number, whatever a link lets through."""
    big, burst_bytes = (ALL_REDUCE, 16 * MIB), BURSTS[burst]
    key = f"{ALL_REDUCE} {16 * MIB}"
    took: dict[int, list[float]] = {}
    rates: list[float] = []
    foreign: list[float] = []
    for hosts in (4, most):
        with Cluster(
            hosts=hosts, helpers=hosts, nic=SLOW_NIC, burst_bytes=burst_bytes, announce_rates=False
        ) as cluster:
            if not rates:
                rates = wire_bytes_per_s(cluster, repeats=1)
            measured = on_cluster(cluster, spec_of({"helpers": hosts}, [big], 3), most_retaken=0)
        took[hosts] = [1e3 * seconds for seconds in measured.samples[key]["helpers"]]
        foreign.append(measured.foreign)
    case = f"{most} + {most} hosts, {SLOW_NIC}, bursts of {burst_bytes // 1000} KB, 16 MiB"
    bench.add(
        case, ours=took[most], peer=took[4], peer_name="4 + 4 hosts, rates measured in both", unit="ms",
        target=1 / 1.05, foreign_cores=foreign,
    )  # fmt: skip
    wire = [1e3 * 16 * MIB / rate for rate in rates]
    bench.add(
        f"{case}, wire", ours=took[most], peer=wire, peer_name="M/B at the rate of a plain TCP transfer",
        unit="ms", foreign_cores=foreign,
    )  # fmt: skip


def bucket_rows(bench: Benchmark) -> None:
    """DDP's default buckets over 32 hosts, the recommended size, and one that the rule calls too small.

    With one worker a host the recommended size is the default. It is larger from 104 ranks on (32 MiB for
    128, 64 MiB for 256), and so many engines' heartbeats alone, one to each other rank every quarter of a
    second, keep the two cores of the machine of the published results busy.
    """
    total_bytes, nic, too_small = 50 * MIB, "100mbit", 4 * MIB
    recommended = recommended_bucket_bytes(32)
    sizes = [recommended, DDP_BUCKET_BYTES, too_small]
    samples, foreign, num_retaken = watched(
        lambda: bucket_samples(32, 1, nic, total_bytes, sizes, repeats_of(bench)), most_retaken=0
    )
    for peer_bytes, peer, target in zip(sizes[1:], samples[1:], (1.2, None), strict=True):
        what = "DDP's default" if peer_bytes == DDP_BUCKET_BYTES else "below the rule"
        bench.add(
            f"32 hosts, {total_bytes // MIB} MiB in buckets of {recommended // MIB} MiB",
            ours=samples[0],
            peer=peer,
            peer_name=f"buckets of {peer_bytes // MIB} MiB ({what}), links of {nic}",
            unit="s",
            target=target,
            foreign_cores=[foreign],
            num_retaken=num_retaken,
        )


def rounding_rows(bench: Benchmark) -> None:
    """bf16 sums over 64 ranks against fp64; no times."""
    for kind in ("random", "cancelling"):
        inputs = cancelling_inputs(1, cancelling=kind == "cancelling")
        ours, ring = (errors_over_bound(add(inputs), inputs) for add in (engine_sum, ring_sum))
        case = f"bf16 sum over 64 ranks, {kind}: error"
        formula = "½ ulp_bf16(sum) + 64·2⁻²⁴·Σ|xᵢ|"
        bench.limit(case, ours, 1.0, unit="× bound", formula=formula)
        bench.add(case, ours=[ours], peer=[ring], peer_name="simulated ring in bf16", unit="× bound")


def mpi_rows(bench: Benchmark) -> None:
    """OpenMPI on the same emulated hosts, in the same processes as ours."""
    missing = missing_for_openmpi()
    case = f"{NUM_HOSTS} workers"
    if missing:
        print(
            f"OpenMPI's rows are missing, which counts as a failure: {', '.join(missing)} cannot be found; "
            f"{install_command('bench')}"
        )
        bench.add(
            f"{case}, OpenMPI", ours=[float("nan")], peer=[float("nan")], unit="ms", target=1.0,
            peer_name=f"OpenMPI: not installed ({', '.join(missing)})",
        )  # fmt: skip
        return
    big, medium = (ALL_REDUCE, 16 * MIB), (ALL_REDUCE, 64 * KIB)
    backends: Backends = {"openmpi": None, "colocated": 0, "8 helpers": 8}
    with Cluster(hosts=NUM_HOSTS, helpers=8, nic=NIC, announce_rates=False) as cluster:
        spec = spec_of(backends, [big, medium], repeats_of(bench))
        measured = by_mpirun(cluster, spec, most_retaken=retakes_of(bench))
    peer = "openmpi"
    add_row(bench, measured, f"{case} + 8 helpers, 16 MiB", big, "8 helpers", peer=peer, target=1.0)
    add_row(bench, measured, f"{case}, colocated, 16 MiB", big, "colocated", peer=peer, target=1.0)
    add_row(bench, measured, f"{case}, colocated, 64 KiB", medium, "colocated", peer=peer)


PARTS: dict[str, Callable[[Benchmark], None]] = {
    "one-host-2": two_small,
    "one-host-4-small": four_small,
    "one-host-4-large": four_large,
    "one-host-4-others": four_others,
    "native-group-2": partial(native_rows, num_processes=2),
    "native-group-4": partial(native_rows, num_processes=4),
    "unshaped-2": partial(unshaped_rows, hosts=2),
    "unshaped-4": partial(unshaped_rows, hosts=4),
    "threads": threads_rows,
    "protection": protection_rows,
    "helpers": helpers_rows,
    "helpers-device": partial(helpers_rows, on_device=True),
    "short": short_rows,
    "fast-helpers": fast_helpers_rows,
    "slow-helper": slow_helper_rows,
    "capped-flows": capped_rows,
    "interfaces": interface_rows,
    "fabric": fabric_rows,
    "growth-32kb-16": partial(growth_rows, burst="32kb", most=16),
    "growth-1mb-16": partial(growth_rows, burst="1mb", most=16),
    "growth-32kb-32": partial(growth_rows, burst="32kb", most=32),
    "growth-1mb-32": partial(growth_rows, burst="1mb", most=32),
    "rooflines": roofline_rows,
    "buckets": bucket_rows,
    "rounding": rounding_rows,
    "openmpi": mpi_rows,
}


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--only", choices=tuple(PARTS), action="append", help="only this part")
    bench = Benchmark("comm", options=options)
    if shutil.which("ip") is None:
        raise SystemExit("benchmarks.comm emulates hosts: install iproute2 and run it as root")
    for name, part in PARTS.items():
        if not bench.args.only or name in bench.args.only:
            part(bench)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
