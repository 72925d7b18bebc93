"""Gives the shards in this host's cache to the other hosts of a job, and copies those that they ask for.

    python -m shoal.data.shard_server --address 10.0.0.9

It prints the port at which it listens, reads one line of JSON with its settings from standard input, and
serves until its input ends, with the process that started it. With ``--cache`` and ``--cache-bytes`` it is
that of a helper host, which serves at once, and learns from the workers of its jobs what to keep.

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from shoal.data.cache import CacheConfig, Kept, Parts, ShardCache
from shoal.data.images.manifest import ImageManifest
from shoal.data.manifest import Manifest, PreparedManifest, ShardFile
from shoal.data.peers import (
    DONE,
    FAILED,
    FRAME,
    MAX_FRAME,
    MAX_REASON,
    MAX_SETTINGS,
    PROTOCOL,
    WAITING,
    Peer,
    Peers,
)
from shoal.data.storage import Storage, open_storage
from shoal.env import proof
from shoal.env.secret import job_secret
from shoal.errors import ShoalError
from shoal.formatting import parse_bytes
from shoal.json_text import parse_json

_FILLS_AT_ONCE = 4
"""Shards that are read from the storage at a time; each may have several requests."""
_BEAT_S = 0.5
"""A client hears from the server this often while it waits for the storage."""
_IDLE_S = 60.0
_SEND_S = 30.0
"""Time for a client to take what was sent, before it is given up."""
_KINDS: Mapping[str, type[PreparedManifest[Any]]] = {"images": ImageManifest, "text": Manifest}
"""Manifests of the kinds of data."""


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


@dataclass(frozen=True)
class _Kept:
    """A file that may be asked for."""

    cache: ShardCache
    file: ShardFile
    parts: Parts


class ShardServer:
    """Serves the copies of caches, and makes them.

    Args:
        listener: the socket at which it listens; this takes it over.
        secret: of the job.
    """

    _max_request = 1 << 10

    def __init__(self, listener: socket.socket, secret: bytes | None) -> None:
        self._files: dict[bytes, _Kept] = {}
        self._fills: dict[str, _Fill] = {}
        self._lock = threading.Lock()
        self._places = threading.Semaphore(_FILLS_AT_ONCE)
        self._listener = proof.ProvedListener(listener, PROTOCOL, secret, self._serve)
        self.port = self._listener.port

    def add(self, cache: ShardCache, files: Iterable[ShardFile], parts: Callable[[ShardFile], Parts]) -> None:
        """Serve files.

        Args:
            cache: of this host; workers use the same folder.
            files: those that may be asked for.
            parts: starts reading a file from the storage.
        """
        self._files |= {file.copy_name.encode(): _Kept(cache, file, parts(file)) for file in files}

    def start(self) -> None:
        """Answer requests, in threads."""
        self._listener.start()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        while not self._listener.is_closed:
            request = proof.receive(connection, self._max_request, time.monotonic() + _IDLE_S)
            connection.settimeout(_SEND_S)
            if len(request) != 4 or request[0] != b"get":
                proof.send(connection, self._answer_other(request))
                continue
            kept = self._files.get(request[1])
            if kept is None:
                proof.send(connection, [b"no", b"no such shard is in the manifest"])
                continue
            start, size = int(request[2]), int(request[3])  # a ValueError ends the connection
            if min(start, size) < 0 or start + size > kept.file.num_bytes:
                proof.send(connection, [b"no", b"the shard ends before"])
                continue
            self._answer(connection, kept, start, size)

    def _answer_other(self, request: list[bytes]) -> list[bytes]:
        """Return the answer to a request for no shard."""
        return [b"no", b"no such shard is in the manifest"]

    def _answer(self, connection: socket.socket, kept: _Kept, start: int, size: int) -> None:
        copy = kept.cache.find(kept.file)
        if copy is not None:
            with copy:
                proof.send(connection, [b"ok", b"ready"])
                _send_range(connection, copy, start, size)
            connection.sendall(FRAME.pack(DONE))
            return
        fill = self._fill(kept)
        proof.send(connection, [b"ok", b"filling"])
        problem = self._pass_on(connection, fill, kept, start, size)
        if problem:
            connection.sendall(FRAME.pack(FAILED))
            proof.send(connection, [problem.encode()[: MAX_REASON // 2]])
        else:
            connection.sendall(FRAME.pack(DONE))

    def _pass_on(self, connection: socket.socket, fill: _Fill, kept: _Kept, start: int, size: int) -> str:
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
                    copy = kept.cache.find_partial(kept.file) or kept.cache.find(kept.file)
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

    def _fill(self, kept: _Kept) -> _Fill:
        """Return the copy that is being made, and begin if nobody has."""
        with self._lock:
            fill = self._fills.get(kept.file.copy_name)
            if fill is None:
                fill = self._fills[kept.file.copy_name] = _Fill()
                threading.Thread(target=self._make, args=(fill, kept), daemon=True).start()
        return fill

    def _make(self, fill: _Fill, kept: _Kept) -> None:
        def parts() -> Iterator[bytes | memoryview]:
            for part in kept.parts():
                yield part
                fill.update(len(part))  # the cache has written it

        problem = "an unexpected error"
        try:
            with self._places:
                copy = kept.cache.get(kept.file, parts)
            problem = "its cache has no room" if copy is None else ""
            if copy is not None:
                copy.close()
        except ShoalError as error:
            problem = str(error)
        finally:
            with self._lock:
                del self._fills[kept.file.copy_name]
            fill.update(is_over=True, problem=problem)


def _send_range(connection: socket.socket, copy: BinaryIO, start: int, size: int) -> None:
    """Send bytes of a file in frames."""
    for first in range(start, start + size, MAX_FRAME):
        count = min(MAX_FRAME, start + size - first)
        connection.sendall(FRAME.pack(count))
        if connection.sendfile(copy, first, count) != count:
            raise ConnectionError("the copy ended early")


class HelperShardServer(ShardServer):
    """Serves shards of any data that the job's workers name, on a helper host.

    Of each data set it keeps what it owns, as far as it fits; copies of earlier ones make room.

    Args:
        directory: of the cache.
        num_bytes: of the cache.
        listener: as for :class:`ShardServer`.
        secret: as for :class:`ShardServer`.
    """

    _max_request = MAX_SETTINGS

    def __init__(
        self, directory: Path, num_bytes: int, listener: socket.socket, secret: bytes | None
    ) -> None:
        super().__init__(listener, secret)
        self._config = CacheConfig(directory=directory, num_bytes=num_bytes, evict=True)
        ShardCache(self._config)  # the folder can be used

    def _answer_other(self, request: list[bytes]) -> list[bytes]:
        if request == [b"room"]:
            return [b"ok", b"%d" % self._config.num_bytes]
        if len(request) != 2 or request[0] != b"keep":
            return super()._answer_other(request)
        try:
            self._keep(parse_json(request[1], "the settings of a job's data"))
        except ShoalError as error:
            return [b"no", str(error).encode()[:MAX_REASON]]
        except (KeyError, TypeError):
            return [b"no", b"its settings are malformed: is it the same version of shoal?"]
        return [b"ok", b""]

    def _keep(self, settings: Mapping[str, Any]) -> None:
        storage, files = _opened(settings)
        own, left = [], self._config.num_bytes
        for file in _peers_of(settings).own_files(files):
            if file.num_bytes <= left:
                own.append(file)
                left -= file.num_bytes
        cache = ShardCache(self._config, Kept("own", tuple(own)))
        for file in own:
            cache.touch(file)
        self.add(cache, files, lambda file: partial(storage.parts, file))


def _opened(settings: Mapping[str, Any]) -> tuple[Storage, list[ShardFile]]:
    """Return the storage of the data that settings name, and the files that are kept.

    Raises:
        ShoalError: the data cannot be read.
    """
    storage = open_storage(settings["location"])
    return storage, storage.manifest(_KINDS[settings["kind"]]).files()


def _peers_of(settings: Mapping[str, Any]) -> Peers:
    return Peers(hosts=tuple(Peer(**peer) for peer in settings["hosts"]), own=settings["own"])


def open_server(settings: Mapping[str, Any], listener: socket.socket) -> ShardServer:
    """Return a server of the data at a location, by the settings of its line of JSON.

    Raises:
        ShoalError: the data cannot be read, or the cache's folder cannot be used.
    """
    storage, files = _opened(settings)
    config = CacheConfig(
        directory=Path(settings["directory"]),
        num_bytes=settings["num_bytes"],
        evict=settings["evict"],
        counts=Path(settings["counts"]) if settings["counts"] is not None else None,
    )
    server = ShardServer(listener, job_secret())
    cache = ShardCache(config, replace(config, peers=_peers_of(settings)).kept(files))
    server.add(cache, files, lambda file: partial(storage.parts, file))
    return server


def main() -> None:
    """Run the command line of ``python -m shoal.data.shard_server``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="address of the interface to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: a free one")
    parser.add_argument("--cache", type=Path, help="folder of a helper host's cache")
    parser.add_argument("--cache-bytes", default="", help="maximum size of that cache, such as 64GB")
    options = parser.parse_args()
    try:
        family = socket.AF_INET6 if ":" in options.address else socket.AF_INET
        listener = socket.create_server((options.address, options.port), family=family, backlog=1024)
        if options.cache is not None:
            num_bytes = parse_bytes(options.cache_bytes, "--cache-bytes")
            HelperShardServer(options.cache, num_bytes, listener, job_secret()).start()
    except (OSError, ShoalError) as error:
        sys.exit(f"the server of shards at {options.address}:{options.port}: {error}")
    print(listener.getsockname()[1], flush=True)
    if options.cache is not None:
        sys.stdin.buffer.read()
        os._exit(0)
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
