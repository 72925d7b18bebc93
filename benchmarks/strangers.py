"""Measures the cost of strangers: bytes read of each, and processor time for it, before it is cut.

python -m benchmarks.strangers [--quick] [--json FILE] [--markdown FILE]

Two ports: a helper's, and that of the store in which JAX's and TensorFlow's workers meet. A stranger sends
what a member would send first, with a wrong HMAC. The bytes are counted by sending one after the other until
the connection ends. The processor time is that of all threads of the process, of the kernel's part too,
by ``/proc/PID/task/*/schedstat``. Neither depends on what else runs on the machine, but for its caches.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import Benchmark
from shoal.comm.tcp_store import TcpStoreServer
from shoal.launch.emulated import HELPER_COMMAND

ADDRESS = "127.0.0.1"
MARK = b"SHOAL\0\0\4"
"""The beginning of a member's first message to a helper, of 40 bytes."""
HELLO_BYTES = 40
STORE_PROTOCOL = b"shoal-store-2"
MOST_BYTES = 4096
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


def greeting(*, to_store: bool) -> bytes:
    """Return the words of a stranger, of the form of a member's, with a wrong HMAC."""
    if not to_store:
        return MARK + secrets.token_bytes(HELLO_BYTES - len(MARK))
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


def intrude(port: int, count: int, *, to_store: bool) -> None:
    for _ in range(count):
        with socket.create_connection((ADDRESS, port)) as connection:
            connection.sendall(greeting(to_store=to_store))
            _ends(connection)


def measure(bench: Benchmark) -> None:
    count = QUICK_STRANGERS if bench.quick else NUM_STRANGERS
    with helper() as (pid, port):
        most = bytes_until_cut(port, greeting(to_store=False))
        bench.limit("bytes read of a stranger at a helper", most, 64, unit="bytes", formula="64")
        intrude(port, WARM_UP, to_store=False)
        before = processor_us(pid)
        intrude(port, count, to_store=False)
        each = (processor_us(pid) - before) / count
        bench.limit("processor time for a stranger at a helper", each, 50, unit="us", formula="50")
    with store() as (pid, port):
        most = bytes_until_cut(port, greeting(to_store=True))
        bench.limit("bytes read of a stranger at the store", most, 256, unit="bytes", formula="256")
        intrude(port, WARM_UP, to_store=True)
        before = processor_us(pid)
        intrude(port, count, to_store=True)
        each = (processor_us(pid) - before) / count
        bench.limit("processor time for a stranger at the store", each, 50, unit="us", formula="50")


def main() -> None:
    """Measure, and exit with 1 if a target does not hold."""
    bench = Benchmark("strangers")
    measure(bench)
    raise SystemExit(bench.finish())


if __name__ == "__main__":
    main()
