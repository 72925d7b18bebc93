"""Gives the shards in this host's cache to the other hosts of a job, and copies those that they ask for.

    python -m shoal.data.shard_server --address 10.0.0.9

It prints the port at which it listens, reads one line of JSON with its settings from standard input, and
serves until its input ends, with the process that started it.

A copy is made once, however many hosts ask for it at a time: they get its bytes while it is being filled. The
kernel sends the bytes from the file. Only files of the manifest are served, to processes that know the job's
secret (:mod:`shoal.data.peers` has the protocol). It imports neither torch nor a framework.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from shoal.data.cache import CacheConfig, Parts, ShardCache
from shoal.data.images.manifest import TAR, ImageManifest
from shoal.data.manifest import Manifest, PreparedManifest, ShardFile, ShardInfo
from shoal.data.peers import DONE, FAILED, FRAME, MAX_FRAME, MAX_REASON, PROTOCOL, WAITING, Peer, Peers
from shoal.data.storage import open_storage
from shoal.env import proof
from shoal.env.secret import job_secret
from shoal.errors import ShoalError
from shoal.json_text import parse_json

_FILLS_AT_ONCE = 4
"""Shards that are read from the storage at a time; each may have several requests."""
_BEAT_S = 0.5
"""A client hears from the server this often while it waits for the storage."""
_IDLE_S = 60.0
_SEND_S = 30.0
"""Time for a client to take what was sent, before it is given up."""
_MAX_REQUEST = 1 << 10
_KINDS: Mapping[str, tuple[type[PreparedManifest[Any]], tuple[str, ...]]] = {
    "images": (ImageManifest, (TAR,)),
    "text": (Manifest, ShardInfo.SUFFIXES),
}
"""Kinds of data: the manifest, and the suffixes of the files that are kept."""


class _Fill:
    """A copy that is being made."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.num_bytes = 0
        self.is_over = False
        self.problem = ""

    def update(self, num_bytes: int = 0, *, is_over: bool = False, problem: str = "") -> None:
        with self.changed:
            self.num_bytes += num_bytes
            self.is_over, self.problem = is_over, problem
            self.changed.notify_all()


class ShardServer:
    """Serves the copies of a cache, and makes them.

    Args:
        cache: of this host; workers use the same folder.
        files: those that may be asked for.
        parts: starts reading a file from the storage.
        listener: the socket at which it listens; this takes it over.
        secret: of the job.
    """

    def __init__(
        self,
        cache: ShardCache,
        files: Iterable[ShardFile],
        parts: Callable[[ShardFile], Parts],
        listener: socket.socket,
        secret: bytes | None,
    ) -> None:
        self._cache, self._parts = cache, parts
        self._files = {file.copy_name.encode(): file for file in files}
        self._fills: dict[str, _Fill] = {}
        self._lock = threading.Lock()
        self._places = threading.Semaphore(_FILLS_AT_ONCE)
        self._listener = proof.ProvedListener(listener, PROTOCOL, secret, self._serve)
        self.port = self._listener.port

    def start(self) -> None:
        """Answer requests, in threads."""
        self._listener.start()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        while not self._listener.is_closed:
            request = proof.receive(connection, _MAX_REQUEST, time.monotonic() + _IDLE_S)
            connection.settimeout(_SEND_S)
            file = self._files.get(request[1]) if len(request) == 4 and request[0] == b"get" else None
            if file is None:
                proof.send(connection, [b"no", b"no such shard is in the manifest"])
                continue
            start, size = int(request[2]), int(request[3])  # a ValueError ends the connection
            if min(start, size) < 0 or start + size > file.num_bytes:
                proof.send(connection, [b"no", b"the shard ends before"])
                continue
            self._answer(connection, file, start, size)

    def _answer(self, connection: socket.socket, file: ShardFile, start: int, size: int) -> None:
        copy = self._cache.find(file)
        if copy is not None:
            with copy:
                proof.send(connection, [b"ok", b"ready"])
                _send_range(connection, copy, start, size)
            connection.sendall(FRAME.pack(DONE))
            return
        fill = self._fill(file)
        proof.send(connection, [b"ok", b"filling"])
        problem = self._pass_on(connection, fill, file, start, size)
        if problem:
            connection.sendall(FRAME.pack(FAILED))
            proof.send(connection, [problem.encode()[: MAX_REASON // 2]])
        else:
            connection.sendall(FRAME.pack(DONE))

    def _pass_on(self, connection: socket.socket, fill: _Fill, file: ShardFile, start: int, size: int) -> str:
        """Send the bytes of a copy as they come, and wait for its end; return the problem, if any."""
        copy: BinaryIO | None = None
        sent = 0
        try:
            while True:
                with fill.changed:
                    if not fill.is_over and min(fill.num_bytes - start, size) <= sent:
                        fill.changed.wait(_BEAT_S)
                    count = (size if fill.is_over else min(fill.num_bytes - start, size)) - sent
                    is_over, problem = fill.is_over, fill.problem
                if problem:
                    return problem
                if copy is None and (is_over or count > 0):
                    # without a partial one, it was published since
                    copy = self._cache.find_partial(file) or self._cache.find(file)
                if is_over and copy is None:
                    return "the copy was removed"
                if copy is not None and count > 0:
                    _send_range(connection, copy, start + sent, count)
                    sent += count
                elif not is_over:
                    connection.sendall(FRAME.pack(WAITING))
                if is_over:
                    return ""
        finally:
            if copy is not None:
                copy.close()

    def _fill(self, file: ShardFile) -> _Fill:
        """Return the copy that is being made, and begin if nobody has."""
        with self._lock:
            fill = self._fills.get(file.copy_name)
            if fill is None:
                fill = self._fills[file.copy_name] = _Fill()
                threading.Thread(target=self._make, args=(fill, file), daemon=True).start()
        return fill

    def _make(self, fill: _Fill, file: ShardFile) -> None:
        def parts() -> Iterator[bytes | memoryview]:
            for part in self._parts(file)():
                yield part
                fill.update(len(part))  # the cache has written it

        problem = "an unexpected error"
        try:
            with self._places:
                copy = self._cache.get(file, parts)
            problem = "its cache has no room" if copy is None else ""
            if copy is not None:
                copy.close()
        except ShoalError as error:
            problem = str(error)
        finally:
            with self._lock:
                del self._fills[file.copy_name]
            fill.update(is_over=True, problem=problem)


def _send_range(connection: socket.socket, copy: BinaryIO, start: int, size: int) -> None:
    """Send bytes of a file in frames."""
    for first in range(start, start + size, MAX_FRAME):
        count = min(MAX_FRAME, start + size - first)
        connection.sendall(FRAME.pack(count))
        if connection.sendfile(copy, first, count) != count:
            raise ConnectionError("the copy ended early")


def open_server(settings: Mapping[str, Any], listener: socket.socket) -> ShardServer:
    """Return a server of the data at a location, by the settings of its line of JSON.

    Raises:
        ShoalError: the data cannot be read, or the cache's folder cannot be used.
    """
    kind, suffixes = _KINDS[settings["kind"]]
    storage = open_storage(settings["location"])
    manifest = storage.manifest(kind)
    files = manifest.files(*suffixes)
    peers = Peers(hosts=tuple(Peer(**peer) for peer in settings["hosts"]), own=settings["own"])
    config = CacheConfig(
        directory=Path(settings["directory"]),
        num_bytes=settings["num_bytes"],
        evict=settings["evict"],
        counts=Path(settings["counts"]),
    )
    cache = ShardCache(config, replace(config, peers=peers).kept(files))
    return ShardServer(cache, files, lambda file: lambda: storage.parts(file), listener, job_secret())


def main() -> None:
    """Run the command line of ``python -m shoal.data.shard_server``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="address of the interface to listen on")
    listener = socket.create_server((parser.parse_args().address, 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the worker has ended
    try:
        open_server(parse_json(line, "the settings of the server of shards"), listener).start()
        print(json.dumps({"problem": ""}), flush=True)
    except ShoalError as error:
        print(json.dumps({"problem": str(error)}), flush=True)
        return
    sys.stdin.buffer.read()
    os._exit(0)  # not waiting for threads that wait for the storage


if __name__ == "__main__":
    main()
