"""Serves the counters of a helper's server over HTTP, in the text format of Prometheus.

    curl http://127.0.0.1:9100/metrics

It answers ``GET /metrics`` and nothing else, to any number of clients, a few at a time. The page holds counts
only: no names of groups, hosts or users. It has no password: let only the monitoring reach the port.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import NamedTuple, Self

import shoal
from shoal.errors import ShoalError, UsageError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOOPBACK = "127.0.0.1"
MAX_CLIENTS = 8
"""Connections that are served at a time; one more is closed at once."""
DEADLINE_S = 3.0
"""A connection is closed this many seconds after it was accepted, whatever the client does."""


_POLL_S = 0.1
"""Seconds in which the thread notices that it is to end."""


class Metric(NamedTuple):
    """A metric of the page: the name without ``shoal_server_``, its type and its help."""

    name: str
    type: str
    help: str


METRICS: Mapping[str, Metric] = {
    "groups": Metric("groups", "gauge", "Process groups that have ranks connected."),
    "jobs": Metric("jobs", "gauge", "Jobs: processes that have groups in common."),
    "connections": Metric("connections", "gauge", "Connections to other processes."),
    "chunks_summed": Metric("summed_chunks_total", "counter", "Chunks whose sum is complete."),
    "held_bytes": Metric("held_bytes", "gauge", "Memory of sums that ranks may still ask for."),
    "weight_bytes": Metric(
        "weight_bytes", "gauge", "Memory of weights, optimizer state and options that are kept."
    ),
    "bytes_received": Metric("received_bytes_total", "counter", "Bytes received from ranks."),
    "bytes_sent": Metric("sent_bytes_total", "counter", "Bytes sent to ranks."),
    "frames_received": Metric("received_frames_total", "counter", "Messages received from ranks."),
    "frames_sent": Metric("sent_frames_total", "counter", "Messages sent to ranks."),
    "strangers_dropped": Metric(
        "dropped_strangers_total", "counter", "Connections closed because the peer may not join."
    ),
    "paths_lost": Metric("lost_paths_total", "counter", "Interfaces of peers that were given up."),
    "fabric_bytes_sent": Metric(
        "fabric_sent_bytes_total", "counter", "The part of the bytes sent that went through libfabric."
    ),
    "fabric_frames_sent": Metric(
        "fabric_sent_frames_total", "counter", "The part of the messages sent that went through libfabric."
    ),
}
"""The server's counters by their names in the core."""


def parse_location(location: str) -> tuple[str, int]:
    """Return address and port of ``PORT`` (on the loopback interface) or ``ADDRESS:PORT``.

    Raises:
        UsageError: it is neither.

    Example:
        >>> parse_location("9100"), parse_location("10.0.0.21:9100")
        (('127.0.0.1', 9100), ('10.0.0.21', 9100))
    """
    address, colon, port = location.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16 and (address or not colon)):
        raise UsageError(
            f"--metrics {location}: it is PORT, on the loopback interface, or ADDRESS:PORT, with a port of "
            "at most 65535 (0 takes a free one)"
        )
    return address or LOOPBACK, int(port)


def exposition(counters: Mapping[str, int], started_s: float) -> str:
    """Return the page.

    Args:
        counters: of a server, by their names in the core.
        started_s: when it started, in seconds since 1970.
    """
    values: list[tuple[Metric, str, float]] = [
        (Metric("info", "gauge", "The version of shoal."), f'{{version="{shoal.__version__}"}}', 1),
        (Metric("start_time_seconds", "gauge", "When the server started, since 1970."), "", started_s),
        *((METRICS[name], "", value) for name, value in counters.items() if name in METRICS),
    ]
    lines = []
    for metric, labels, value in values:
        name = f"shoal_server_{metric.name}"
        lines += [
            f"# HELP {name} {metric.help}",
            f"# TYPE {name} {metric.type}",
            f"{name}{labels} {value}",
        ]
    return "\n".join([*lines, ""])


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], page: Callable[[], str], deadline_s: float) -> None:
        self.page, self._deadline_s = page, deadline_s
        self._connections: dict[str, socket.socket] = {}
        """The connection of each address that has one."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking for the host's name, as HTTPServer does: that can take seconds."""
        super(HTTPServer, self).server_bind()

    def process_request(self, request: object, client_address: object) -> None:
        """Give a connection the place of its address, whose earlier one is closed, or refuse it."""
        assert isinstance(request, socket.socket) and isinstance(client_address, tuple)
        with self._lock:
            earlier = self._connections.get(client_address[0])
            is_free = earlier is not None or len(self._connections) < MAX_CLIENTS
            if is_free:
                self._connections[client_address[0]] = request
        if earlier is not None:
            _shut(earlier)
        if is_free:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket) and isinstance(client_address, tuple)
        timer = threading.Timer(self._deadline_s, _shut, [request])
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            with self._lock:
                if self._connections.get(client_address[0]) is request:
                    del self._connections[client_address[0]]

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that has gone: there is nobody to tell."""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "shoal", ""
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            return self.send_error(HTTPStatus.NOT_FOUND, explain="The counters are at /metrics")
        page = self.server.page().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
        return None

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests: their text is the client's."""


class MetricsServer:
    """Serves the counters of a server in a thread, as a context manager.

    Args:
        location: PORT, on the loopback interface, or ADDRESS:PORT; port 0 takes a free one.
        counters: returns the server's counters, for each request.
        deadline_s: seconds after which a connection is closed, whatever the client does.

    Raises:
        UsageError: the location is malformed.
        ShoalError: the address or the port is not available.
    """

    def __init__(
        self, location: str, counters: Callable[[], Mapping[str, int]], *, deadline_s: float = DEADLINE_S
    ) -> None:
        endpoint, started_s = parse_location(location), time.time()
        try:
            self._server = _Server(endpoint, lambda: exposition(counters(), started_s), deadline_s)
        except OSError as error:
            reason = error.strerror or error
            raise ShoalError(
                f"shoal serve: cannot listen at --metrics {location}: {reason}; choose another"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True
        )

    @property
    def url(self) -> str:
        """Return the address of the page."""
        address, port = self._server.server_address[:2]
        return f"http://{address!s}:{port}/metrics"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
