"""Answers as EC2's instance metadata service does, in its second version, which asks for tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Service(ThreadingHTTPServer):
    """The service; ``notice`` is what it says of this instance."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.notice: bytes | None = None
        self.num_tokens = self.num_looks = 0
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        is_right = self.path == "/latest/api/token" and ttl.isdecimal() and 1 <= int(ttl) <= 21600
        self.server.num_tokens += is_right
        self.answer(200 if is_right else 400, f"token-{self.server.num_tokens}".encode())

    def do_GET(self) -> None:
        self.server.num_looks += 1
        if self.headers.get("X-aws-ec2-metadata-token") != f"token-{self.server.num_tokens}":
            self.answer(401, b"")
        elif self.path != "/latest/meta-data/spot/instance-action" or self.server.notice is None:
            self.answer(404, b"")
        else:
            self.answer(200, self.server.notice)

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing to the terminal."""


@contextmanager
def serving() -> Iterator[Service]:
    """Serve in a thread within this block."""
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()
