"""Watches for the notice that EC2 gives two minutes before it takes a spot instance back.

The launcher treats it as SIGTERM: the workers of this host leave a run whose members come and go, and any
other run saves and stops.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from shoal.env.variables import Environ, text
from shoal.errors import ShoalError
from shoal.json_text import parse_json

ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Address of the instance metadata service, a variable of AWS's tools."""
DISABLED = "AWS_EC2_METADATA_DISABLED"
"""A variable of AWS's tools; ``true``: nobody is to ask the service."""
POLL_S = 5.0
"""Time between two questions, as EC2's documentation advises."""
_ADDRESS = "http://169.254.169.254"
_ANSWER_S = 2.0
_MOST_BYTES = 4096
_TOKEN = "X-aws-ec2-metadata-token"
_TOKEN_S = 60
_OK, _NOT_FOUND = 200, 404
_ACTION = re.compile("terminate|stop|hibernate")
_TIME = re.compile(r"[0-9TZ:.+-]{1,40}")
_DMI = Path("/sys/devices/virtual/dmi/id")


def metadata_endpoint(environ: Environ = None, dmi: Path = _DMI) -> str | None:
    """Return the address of the instance metadata service; ``None`` where it is not to be asked.

    Args:
        environ: default: this process's variables.
        dmi: folder in which the kernel shows the machine's vendor.
    """
    if (text(DISABLED, environ) or "").lower() == "true":
        return None
    if (given := text(ENDPOINT, environ)) is not None:
        return given.rstrip("/")
    try:
        vendor = (dmi / "sys_vendor").read_text(errors="replace")
    except OSError:
        return None
    return _ADDRESS if vendor.strip() == "Amazon EC2" else None


def read_notice(endpoint: str) -> str | None:
    """Return the notice in words, such as ``terminate at 2026-11-28T08:22:00Z``; ``None`` if there is none.

    Raises:
        OSError: the service did not answer.
        ShoalError: its answer is not of the documented form.
    """
    address = urlsplit(endpoint)
    token = _answer(address.netloc, "PUT", "/latest/api/token", {f"{_TOKEN}-ttl-seconds": str(_TOKEN_S)})
    path = "/latest/meta-data/spot/instance-action"
    answer = _answer(address.netloc, "GET", path, {_TOKEN: (token or b"").decode("latin-1")})
    if answer is None:
        return None
    notice = parse_json(answer, path)
    values = (notice.get("action"), notice.get("time")) if isinstance(notice, dict) else (None, None)
    action, time = map(str, values)
    if not _ACTION.fullmatch(action) or not _TIME.fullmatch(time):
        raise ShoalError(f"{path}: {answer[:80]!r} is not an action and a time")
    return f"{action} at {time}"


@contextmanager
def watched_notice(on_notice: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_notice`` in a thread, once, if EC2 gives its notice within this block."""
    endpoint = metadata_endpoint()
    if endpoint is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            try:
                notice = read_notice(endpoint)
            except (OSError, ShoalError):  # a service that is busy, or a container without it
                notice = None
            if notice is not None:
                on_notice(notice)
                return
            ended.wait(POLL_S)

    threading.Thread(target=watch, name="spot-notice", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _answer(host: str, method: str, path: str, headers: dict[str, str]) -> bytes | None:
    """Return the beginning of an answer; ``None`` if the service has no such path."""
    from http.client import HTTPConnection, HTTPException  # only on EC2

    try:
        connection = HTTPConnection(host, timeout=_ANSWER_S)
        with closing(connection):
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            answer = response.read(_MOST_BYTES)
    except (HTTPException, ValueError) as error:
        raise ShoalError(f"{path} of {host}: the answer is not HTTP: {error}") from error
    if response.status not in (_OK, _NOT_FOUND):
        raise ShoalError(f"{path} of {host}: the service answered {response.status}")
    return answer if response.status == _OK else None
