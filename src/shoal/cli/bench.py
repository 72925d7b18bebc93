"""``shoal bench …``: measures this machine or cluster."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App

from shoal.cli.bench_train import bench_train

bench = App(name="bench", help="Measure this machine or cluster.")
bench.command(bench_train)


@bench.command(name="comm")
def bench_comm(
    *,
    sizes: str = "4k,64k,1m,16m",
    collectives: str = "all_reduce",
    backends: str = "",
    dtype: str = "float32",
    repeats: int = 7,
    workers: int | None = None,
    hosts: int | None = None,
    nic: str | None = None,
    helpers: int = 0,
    helper_nic: str | None = None,
    link: str | None = None,
    timeout: float = 300.0,
    json: Path | None = None,
    plot: Path | None = None,
    trace: Path | None = None,
) -> int:
    """Time the collectives of gloo and shoal, and compare them with what the links allow.

    Started by torchrun or mpirun, the command is one of their workers and measures your hosts. Started alone,
    it starts workers on this machine; with --hosts on emulated hosts.

    Parameters
    ----------
    sizes
        Bytes of the tensor, separated by commas; k, m and g are powers of 1,024.
    collectives
        all_reduce, reduce_scatter, all_gather, broadcast, reduce, barrier; several separated by commas.
    backends
        Backends of torch.distributed, and shoal-colocated for shoal without its helper hosts. Default: gloo
        and shoal, and shoal-colocated where there are helpers.
    dtype
        Of the elements.
    repeats
        Times that each is measured.
    workers
        Workers on this machine (default 2), or on each emulated host (default 1).
    hosts
        Emulated hosts to make. Needs Linux, root and iproute2.
    nic
        Rate of each emulated host's link, such as 200mbit.
    helpers
        Emulated helper hosts.
    helper_nic
        Rate of their links; default: --nic.
    link
        Rate of a host's link on a real cluster, such as 10gbit: shows how near to the limit it gets.
    timeout
        Seconds after which a collective has failed.
    json
        File for all samples.
    plot
        File for a picture: .png, .svg or .pdf.
    trace
        File for a timeline, which chrome://tracing and ui.perfetto.dev open.
    """
    from shoal.bench import comm
    from shoal.bench.settings import CommBench, parse_sizes, split_list

    settings = CommBench(
        sizes=parse_sizes(split_list(sizes)),
        collectives=tuple(split_list(collectives)),
        backends=tuple(split_list(backends)),
        dtype=dtype,
        repeats=repeats,
        timeout_s=timeout,
        workers=workers,
        hosts=hosts,
        nic=nic,
        num_helpers=helpers,
        helper_nic=helper_nic,
        link=link,
        json=json,
        plot=plot,
        trace=trace,
    )
    return comm.run(settings, command=[sys.executable, "-m", "shoal", *sys.argv[1:]])
