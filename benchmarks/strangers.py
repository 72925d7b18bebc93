"""Measures the cost of strangers: bytes and processor time of each, until it is cut, and a flood of them.

python -m benchmarks.strangers [--quick] [--cases each flood] [--json FILE] [--markdown FILE]

Two ports: a helper's, and that of the store in which JAX's and TensorFlow's workers meet. A stranger sends
what a member would send first, with a wrong HMAC. The bytes are counted by sending one after the other until
the connection ends. The processor time is that of all threads of the process, of the kernel's part too,
by ``/proc/PID/task/*/schedstat``. Neither depends on what else runs on the machine, but for its caches.

The flood (root) comes from an emulated host whose link has 5 % of the rate of the others', to two workers
and a helper that sum (``strangers_worker.py``). A step without it is the peer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.comm_runs import MIB, retakes_of, watched
from benchmarks.harness import Benchmark
from benchmarks.worker import run_on_hosts
from shoal.comm.tcp_store import TcpStoreServer
from shoal.launch.emulated import HELPER_COMMAND, Cluster
from shoal.launch.emulated_network import HELPER_PORT

ADDRESS = "127.0.0.1"
MARK = b"SHOAL\0\0\4"
"""The beginning of a member's first message to a helper, of 40 bytes."""
HELLO_BYTES = 40
STORE_PROTOCOL = b"shoal-store-2"
MOST_BYTES = 4096
RATE_MBIT, FLOOD_MBIT = 200, 10
TURNS, QUICK_TURNS, STEPS_OF_A_TURN = 8, 2, 6
NUM_STRANGERS, QUICK_STRANGERS, WARM_UP = 5000, 1000, 100


@contextmanager
def helper() -> Iterator[tuple[int, int]]:
    """Run a helper; yield its process and its port."""
    environment = {**os.environ, "SHOAL_SECRET": secrets.token_hex(16)}
    command = [*HELPER_COMMAND, "--address", ADDRESS, "--port", "0"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        found = re.search(r"listening on .*:(\d+)", process.stdout.readline())
        if found is None:
            sys.exit("the helper does not start")
        yield process.pid, int(found[1])
        process.terminate()


def _hold_store(port: Connection) -> None:
    listener = socket.create_server((ADDRESS, 0), backlog=256)
    server = TcpStoreServer(listener, secrets.token_bytes(16))
    port.send(server.port)
    port.recv()


@contextmanager
def store() -> Iterator[tuple[int, int]]:
    """Run a store; yield its process and its port."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_hold_store, args=(theirs,), daemon=True)
    process.start()
    assert process.pid is not None
    yield process.pid, ours.recv()
    ours.send("end")
    process.join()


def greeting_of_a_helper() -> bytes:
    """Return the words of a stranger at a helper, of the form of a member's, with a wrong HMAC."""
    return MARK + secrets.token_bytes(HELLO_BYTES - len(MARK))


def greeting_of_a_store() -> bytes:
    """Return the words of a stranger at a store, of the form of a member's, with a wrong HMAC."""
    return _message(STORE_PROTOCOL, secrets.token_bytes(32), secrets.token_bytes(32))


def _message(*fields: bytes) -> bytes:
    body = b"".join(struct.pack("!I", len(each)) + each for each in fields)
    return struct.pack("!I", len(body)) + body


def _ends(connection: socket.socket) -> bool:
    """Read until the other side has closed the connection."""
    try:
        while connection.recv(MOST_BYTES):
            pass
    except ConnectionError:
        pass
    return True


def bytes_until_cut(port: int, words: bytes) -> int:
    """Return how many bytes a stranger can send before its connection ends, one after the other."""
    with socket.create_connection((ADDRESS, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(0.02)
        for count, each in enumerate((words + bytes(MOST_BYTES))[:MOST_BYTES], 1):
            try:
                connection.sendall(bytes([each]))
                while connection.recv(MOST_BYTES):
                    pass
                return count
            except TimeoutError:
                continue
            except ConnectionError:
                return count
    return MOST_BYTES


def processor_us(pid: int) -> float:
    """Return the processor time that a process has had."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total_ns += int(path.read_text().split()[0])
        except FileNotFoundError:  # a thread that has ended meanwhile
            continue
    return total_ns / 1e3


def intrude(port: int, count: int, greeting: Callable[[], bytes]) -> None:
    for _ in range(count):
        with socket.create_connection((ADDRESS, port)) as connection:
            connection.sendall(greeting())
            _ends(connection)


def measure_each(bench: Benchmark) -> None:
    """Strangers one after the other: bytes and processor time."""
    count = QUICK_STRANGERS if bench.quick else NUM_STRANGERS
    for place, listening, greeting, most_bytes in (
        ("a helper", helper, greeting_of_a_helper, 64),
        ("the store", store, greeting_of_a_store, 256),
    ):
        with listening() as (pid, port):
            read = bytes_until_cut(port, greeting())
            case = f"bytes read of a stranger at {place}"
            bench.limit(case, read, most_bytes, unit="bytes", formula=str(most_bytes))
            intrude(port, WARM_UP, greeting)
            before = processor_us(pid)
            intrude(port, count, greeting)
            each = (processor_us(pid) - before) / count
            bench.limit(f"processor time for a stranger at {place}", each, 50, unit="us", formula="50")


def measure_flood(bench: Benchmark) -> None:
    """Strangers at once, over a narrow link: the time of a step."""
    with Cluster(hosts=3, helpers=1, nic=f"{RATE_MBIT}mbit") as cluster:
        cluster.limit(2, f"{FLOOD_MBIT}mbit")
        spec = {
            "helper": [cluster.address(3), HELPER_PORT],
            "bytes": 8 * MIB,
            "steps": STEPS_OF_A_TURN,
            "turns": QUICK_TURNS if bench.quick else TURNS,
        }
        run = partial(run_on_hosts, cluster, "benchmarks.strangers_worker:flooded_steps", spec)
        seen, foreign, num_retaken = watched(run, most_retaken=retakes_of(bench))
    case = f"a step in a flood over a link of {FLOOD_MBIT / RATE_MBIT:.0%}"
    bench.add(
        case,
        ours=[1e3 * seconds for seconds in seen["flooded"]],
        peer=[1e3 * seconds for seconds in seen["quiet"]],
        peer_name="without strangers",
        unit="ms",
        target=1 / 1.1,
        foreign_cores=[foreign],
        num_retaken=num_retaken,
    )
    print(
        f"{case}: {seen['strangers']:,} strangers at {seen['places']} ports, "
        f"{seen['bits_per_s'] / 1e6:.1f} of {FLOOD_MBIT} Mbit/s; the ranks dropped {seen['dropped_by_ranks']}"
    )


CASES = {"each": measure_each, "flood": measure_flood}


def main() -> None:
    """Measure, and exit with 1 if a target does not hold."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="default: all")
    bench = Benchmark("strangers", options=options)
    for case in bench.args.cases:
        CASES[case](bench)
    raise SystemExit(bench.finish())


if __name__ == "__main__":
    main()
