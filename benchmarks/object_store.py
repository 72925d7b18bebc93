"""Stands in for S3: serves the files of a folder to GetObject, counts what it sends, and fails on demand.

    python -m benchmarks.object_store FOLDER --address 10.77.0.1 --port 9000

Each GET prints a line with the object's name and the number of its bytes that were sent.
"""

from __future__ import annotations

import argparse
import http.server
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
Fault = Callable[[str, int, bytes], tuple[int, bytes, int]]
"""Gets an object's name, the number of earlier GETs, and its bytes; returns status, body, and bytes sent."""


class ObjectStore(http.server.ThreadingHTTPServer):
    """An endpoint for ``AWS_ENDPOINT_URL``; the bucket's name is not looked at.

    Attributes:
        sent: bytes sent of each object.
        gets: GETs of each object.
        fault: changes answers; default: none.
        validators: returns headers of the answer to a GET by its number; default: none.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, folder: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((address, port), _Handler)
        self.folder = folder
        self.sent: Counter[str] = Counter()
        self.gets: Counter[str] = Counter()
        self.fault: Fault | None = None
        self.validators: Callable[[int], dict[str, str]] = lambda number: {}
        self.lock = threading.Lock()
        self.report: Callable[[str, int], None] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ObjectStore
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        store, name = self.server, self.path.partition("?")[0].rpartition("/")[2]
        path = store.folder / name
        if not path.is_file():
            self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
            return
        data, headers, status = path.read_bytes(), {}, 200
        if asked := _RANGE.fullmatch(self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            headers, status = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, 206
            data = data[first : last + 1]
        with store.lock:
            number = store.gets[name]
            store.gets[name] += 1
        count = len(data)
        if store.fault is not None:
            faulty, data, count = store.fault(name, number, data)
            status = faulty if faulty >= 400 else status
        self._reply(status, data, headers | store.validators(number), count)
        with store.lock:
            store.sent[name] += count
            if store.report is not None:
                store.report(name, count)

    def _reply(self, status: int, data: bytes, headers: dict[str, str], count: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:count])
        if count is not None and count < len(data):
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    store = ObjectStore(options.folder, options.address, options.port)
    store.report = lambda name, count: print(name, count, flush=True)
    print(store.url, flush=True)
    store.serve_forever()


if __name__ == "__main__":
    main()
