"""Runs the server of a helper host, which sums chunks for any number of groups.

    python -m shoal.comm.server --address 10.0.0.9 --port 7070        (or: shoal serve ...)

Imports neither torch nor NumPy. The job's secret is read from SHOAL_SECRET or SHOAL_SECRET_FILE.
"""

from __future__ import annotations

import argparse
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shoal import native
from shoal.comm.engine import fabric_providers, threads_for
from shoal.env import settings
from shoal.env.machine import num_cores
from shoal.env.secret import MAKE_SECRET, job_secret
from shoal.env.settings import SECRET, SECRET_FILE
from shoal.env.variables import variables_of
from shoal.errors import EXIT_OK, WARNING_SIGNALS, ShoalError, UsageError, ending, print_any_character
from shoal.formatting import parse_bytes

DEFAULT_PORT = 7070
_WAIT_S = 0.1
_LEAST_SUMS_MIB = 16


def serve(
    *,
    address: str,
    port: int = DEFAULT_PORT,
    secret_file: Path | None = None,
    report_every_s: float = 0.0,
    transport: str | None = None,
    metrics: str | None = None,
    weights_mib: int = 0,
    sums_mib: int = 0,
    cache: Path | None = None,
    cache_bytes: str = "",
) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code. SIGUSR1, SIGUSR2 and SIGHUP change nothing.

    Args:
        address: address (IPv4 or IPv6) of the interface to listen on, and on no other.
        port: Port to listen on; 0 takes a free one.
        secret_file: File with the job's secret, which other users cannot read; default: SHOAL_SECRET_FILE or
            SHOAL_SECRET.
        report_every_s: Seconds between prints of counters; 0 for never.
        transport: tcp, or ofi: and libfabric's providers, as for the workers; default: SHOAL_TRANSPORT, or
            tcp.
        metrics: PORT, on the loopback interface, or ADDRESS:PORT, at which counters are served over HTTP for
            Prometheus; default: none.
        weights_mib: Maximum MiB of weights, optimizer state and options, where servers update weights
            (``shoal.train.servers.update``); 0: half of the host's memory.
        sums_mib: Maximum MiB of sums that wait for other workers, at least 16 for each process; 0: half of
            the host's memory.
        cache: Folder, such as /dev/shm/shards, in which this host keeps shards of the jobs' data too, for
            runs with --data.cache-peers on; they are given to the workers at the port after --port.
        cache_bytes: Maximum size of that folder, such as 64GB.

    Raises:
        UsageError: there is no secret, or the transport, the place of the metrics or a number is malformed.
        ShoalError: the address, the port or the transport is not available.
    """
    secret = job_secret({SECRET_FILE: str(secret_file)} if secret_file else None)
    if secret is None:
        raise UsageError(
            "a server admits only peers that know the job's secret: make one with "
            f"{MAKE_SECRET} and set SHOAL_SECRET_FILE=job.secret, here and on the workers"
        )
    if (cache is None) != (not cache_bytes):
        raise UsageError("--cache and --cache-bytes belong together: name both, or neither")
    if cache is not None:
        parse_bytes(cache_bytes, "--cache-bytes")
    if weights_mib < 0:
        raise UsageError(f"--weights-mib is {weights_mib}; it is at least 0")
    if sums_mib < _LEAST_SUMS_MIB and sums_mib != 0:
        raise UsageError(
            f"--sums-mib is {sums_mib}; it is 0, or at least {_LEAST_SUMS_MIB} for each process of a job"
        )
    fabric = fabric_providers(transport or settings.transport())
    core = native.core()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most_files, most_files)
    )  # each connection of a worker takes one
    try:
        server = core.HelperServer(
            address, port, secret, 128 << 10, fabric, max_weight_bytes=weights_mib << 20,
            max_sum_bytes=sums_mib << 20,
            network_threads=settings.network_threads() or threads_for(num_cores()),
        )  # fmt: skip
    except RuntimeError as error:
        raise ShoalError(f"shoal serve: {error}; choose another --port, --address or --transport") from None
    stops: list[int] = []  # no Event: a second signal within its set() would wait for the first for ever
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stops.append(number))
    for number in (signal.SIGHUP, *WARNING_SIGNALS):  # schedulers warn all of a job's processes by them
        signal.signal(number, signal.SIG_IGN)
    with ExitStack() as stack:
        pages = None
        if metrics is not None:
            from shoal.comm.metrics import MetricsServer  # an HTTP server, loaded where it is used

            pages = stack.enter_context(MetricsServer(metrics, server.counters))
        server.start()
        if cache is not None:
            stack.enter_context(_shard_server(address, server.port + 1, cache, cache_bytes, secret_file))
        print(f"shoal serve: listening on {address}:{server.port}", flush=True)
        if pages is not None:
            print(f"shoal serve: metrics at {pages.url}", flush=True)
        # Short waits: signal handlers run between two of them, whichever thread received the signal.
        next_report = time.monotonic() + report_every_s
        while not stops:
            time.sleep(_WAIT_S)
            if report_every_s and time.monotonic() >= next_report:
                next_report += report_every_s
                print(f"shoal serve: {_report(server.counters())}", flush=True)
        print(f"shoal serve: stopped; {_report(server.counters())}", flush=True)
    server.stop()
    return EXIT_OK


@contextmanager
def _shard_server(
    address: str, port: int, cache: Path, cache_bytes: str, secret_file: Path | None
) -> Iterator[None]:
    """Keep shards for the workers of jobs, in a process of its own."""
    command = [sys.executable, "-m", "shoal.data.shard_server", "--address", address, "--port", str(port)]
    command += ["--cache", str(cache), "--cache-bytes", cache_bytes]
    environ = dict(variables_of(None))
    if secret_file is not None:
        environ.pop(SECRET, None)
        environ[SECRET_FILE] = str(secret_file)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=environ, start_new_session=True
    ) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise ShoalError(f"shoal serve: the server of shards did not start (exit code {process.wait()})")
        print(f"shoal serve: keeps {cache_bytes} of shards in {cache}, port {port}", flush=True)
        yield  # it ends with its input


def _report(counters: dict[str, int]) -> str:
    return (
        f"{counters['groups']} groups, {counters['chunks_summed']:,} chunks summed, "
        f"{counters['bytes_received'] / 2**20:,.1f} MiB in, {counters['bytes_sent'] / 2**20:,.1f} MiB out, "
        f"{counters['strangers_dropped']} strangers dropped"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line of ``python -m shoal.comm.server``."""
    parser = argparse.ArgumentParser(prog="shoal serve", description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--address", required=True, help="address of the interface to listen on")
    option("--port", type=int, default=DEFAULT_PORT, help="port to listen on (default %(default)s)")
    option("--secret-file", type=Path, help="file with the job's secret, which others cannot read")
    option("--report-every-s", type=float, default=0.0, help="seconds between prints of counters; 0: never")
    option("--transport", help="tcp, or ofi:PROVIDER,... as the workers' (default: SHOAL_TRANSPORT)")
    option("--metrics", metavar="PORT", help="serve the counters for Prometheus at PORT or ADDRESS:PORT")
    option(
        "--weights-mib", type=int, default=0,
        help="MiB of weights, optimizer state and options to keep at most; 0: half of the host's memory",
    )  # fmt: skip
    option(
        "--sums-mib", type=int, default=0,
        help="MiB of sums that wait for other workers at most, 16 or more for each process; 0: half of the "
        "host's memory",
    )  # fmt: skip
    option("--cache", type=Path, help="folder in which this host keeps shards of the jobs' data too")
    option("--cache-bytes", default="", help="maximum size of that folder, such as 64GB")
    arguments = parser.parse_args(argv)
    print_any_character()
    try:
        return serve(**vars(arguments))
    except Exception as error:  # noqa: BLE001  # the last net, where the command line's is not
        end = ending(error, prefix="shoal serve: error: ", debug=settings.debug())
        print(end.text, file=sys.stderr)
        return end.exit_code


if __name__ == "__main__":
    sys.exit(main())
