"""Drives one headless Chromium over its pipe: opens pages and runs scripts in them."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SITE = Path(__file__).parents[2] / "build" / "site"
_FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of a Chromium, which is given commands of the DevTools protocol."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._ids = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result.

        Raises:
            AssertionError: Chromium refuses it.
        """
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._answers, 1 << 16)
            assert piece, "Chromium has ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(text))

    def resize(self, width: int, height: int = 900) -> None:
        """Show pages in a window of ``width`` pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; that of a promise when it has one."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, file: Path) -> None:
        """Write what the window shows as a PNG file."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a Chromium with an empty profile in a folder, and end it."""
    assert BROWSER
    flags = [*_FLAGS, f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium's sandbox refuses to run as root, as in a container
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to 4
    shell = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
    with (profile.parent / "chromium.log").open("wb") as log:
        child = subprocess.Popen(
            ["bash", "-c", shell, "bash", BROWSER, *flags],
            pass_fds=(read_commands, write_answers),
            stderr=log,
        )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)  # it ends with its pipe
        os.close(answers)
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
