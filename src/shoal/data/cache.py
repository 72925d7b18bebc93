"""Caches shards in local memory (``/dev/shm``) or on a local disk, shared by the processes of a host.

Copies are in ``shoal-cache`` below the given folder; other files there are neither counted nor removed. A
copy is named by its checksum, so data sets may share a folder and a stale copy cannot exist. One process
fills it (under a lock per shard) while others wait; the copy is compared with the manifest's checksum while
it is written and renamed when it is complete. Space is allocated before a copy begins: the temporary file has
its full size at once, so processes that fill concurrently do not exceed the limit together, and a full disk
fails early.

A later run trusts the name of a copy that has the manifest's size, and makes others again. It does not
compute the checksum again, which would read every byte at each start. The name can be trusted because only
compared data gets it, and the folder has mode 0700 and is refused if it belongs to another user or others may
write to it. The folder stays open and is accessed through its descriptor, so that a user who may write to the
folder above cannot replace it.

With peers (:mod:`shoal.data.peers`), a copy comes from the host that owns the shard, and only that host reads
its storage. Where the caches of all hosts together hold the data, a host keeps room for the shards that it
owns, and others use what is left (:mod:`shoal.decide.cache_policy`).

:class:`Prefetch` makes copies before they are needed, in the order in which the samples use them.

Without room, shards are read from their storage, which is slower but never wrong; this is counted, and
reported once.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import secrets
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from shoal.atomic_io import PARTIAL, open_private_folder, publish, take_lock, write_atomically
from shoal.data.manifest import ShardFile, map_file
from shoal.data.peers import Peer, PeerError, PeerReader, Peers
from shoal.data.storage import Bytes, LocalStorage, Storage
from shoal.decide.cache_policy import CachePolicy, bytes_ahead, cache_policy, first_uses
from shoal.errors import ShoalError, UsageError

Parts = Callable[[], Iterable[bytes | memoryview]]
"""Starts reading the original of a file, in order."""

OWN_FOLDER = "shoal-cache"
_COPY = re.compile(r".+-[0-9a-f]{16}\.[a-z]+")
_NUM_COPIED = 8
"""Files that are copied at a time, where several are needed at once."""
_NUM_PREFETCHED = 4
_LOOK_S = 0.1
_NO_ROOM = "the shards in use leave no room"


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Location and size of the cache on each host."""

    directory: Path
    """A folder on this host: ``/dev/shm/NAME`` for memory, or one on a local NVMe. The copies are in
    ``shoal-cache`` below it."""
    num_bytes: int
    """Limit of the bytes of all copies together."""
    evict: bool = False
    """Evict the least recently used copy to make room for the next shard. Right for a block shuffle, which
    goes from shard to shard; with a full shuffle each image would copy a whole shard, so what does not fit is
    better read from its storage."""
    peers: Peers | None = None
    """Hosts with caches of the same data, from which copies come. Default: none."""
    counts: Path | None = None
    """Folder in which each process of the host writes its counts, for :func:`total_counts`. Default: none."""

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise UsageError(f"cache_bytes {self.num_bytes} must be at least 1")

    def kept(self, files: Iterable[ShardFile]) -> Kept:
        """Return what this host keeps of the files of a data set."""
        files = list(files)
        peers = self.peers
        policy = cache_policy(
            data_bytes=sum(file.num_bytes for file in files),
            cache_bytes=self.num_bytes,
            cluster_bytes=sum(peer.num_bytes for peer in peers.hosts) if peers else self.num_bytes,
        )
        return Kept(policy, tuple(peers.own_files(files)) if peers else ())


@dataclass(frozen=True)
class Kept:
    """Part of a data set that a host keeps."""

    policy: CachePolicy = "window"
    own: tuple[ShardFile, ...] = ()
    """Files that this host copies from their storage for its peers."""


@dataclass(kw_only=True)
class CacheCounts:
    """Counts of the cache in this process."""

    num_filled: int = 0
    num_evicted: int = 0
    num_declined: int = 0
    """Shards for which there was no room; each counts once, with ``evict`` each time."""
    num_read_in_place: int = 0
    """Reads that the cache could not serve."""
    memory_bytes: int = 0
    """Bytes that were read from copies of this host."""
    peer_bytes: int = 0
    """Bytes of copies that came from other hosts."""
    storage_bytes: int = 0
    """Bytes that came from the storage: of copies, and of reads in place."""
    num_peer_failures: int = 0


def total_counts(folder: Path) -> CacheCounts:
    """Return the sums of what processes have written to ``CacheConfig.counts``."""
    size = _COUNTS.size
    texts = [path.read_bytes().ljust(size, b"\0")[:size] for path in folder.glob("*.counts")]
    totals = map(sum, zip(*map(_COUNTS.unpack, texts), strict=True))
    return CacheCounts(
        **{field.name: total for field, total in zip(fields(CacheCounts), totals, strict=False)}
    )


_COUNT = struct.Struct("=q")
_COUNTS = struct.Struct(f"={len(fields(CacheCounts))}q")
_OFFSETS = {field.name: _COUNT.size * index for index, field in enumerate(fields(CacheCounts))}


class ShardCache:
    """Maps copies of shards into memory, and makes them. Threads may share it, processes may not."""

    def __init__(self, config: CacheConfig, kept: Kept | None = None) -> None:
        """Open the folder of the cache, or create it.

        Args:
            config: location and size.
            kept: of the data set, by :meth:`CacheConfig.kept`; default: what is needed.

        Raises:
            UsageError: it cannot be made or written, belongs to another user, or others may write to it.
        """
        self.config = config
        self.name = config.directory / OWN_FOLDER
        self.counts = CacheCounts()
        self._maps: dict[str, memoryview] = {}
        self._declined: set[str] = set()
        self._has_declined = False
        self._peers = PeerReader(config.peers) if config.peers else None
        self.kept = kept or Kept()
        reserved = self.kept.own if self.kept.policy == "own" else ()
        self._own = {file.copy_name: file.num_bytes for file in reserved}
        self._lock = threading.Lock()
        self._changed_ns = 0
        self._written = _shared_counts(config.counts) if config.counts else None
        try:
            config.directory.mkdir(parents=True, exist_ok=True)
            folder = open_private_folder(self.name, "remove it, or name another folder as the cache")
            weakref.finalize(self, os.close, folder).atexit = False
            self._folder = Path(f"/proc/self/fd/{folder}")
            with _locked(self._folder / ".lock"):
                pass
        except OSError as error:
            raise UsageError(
                f"cache {self.name}: the folder cannot be made or written ({error.strerror}); name "
                "another one, or leave the cache out"
            ) from None

    def read(self, file: ShardFile, start: int, size: int, storage: Storage) -> Bytes:
        """Return a range of a file of a shard, from a copy if there is room for one.

        Raises:
            ShoalError: the original differs from the manifest, or cannot be read.
        """
        data = self.view(file, lambda: storage.parts(file))
        if data is None:
            self.count(num_read_in_place=1, storage_bytes=size)
            return storage.read(file, start, size)
        self.count(memory_bytes=size)
        return data[start : start + size]

    def view(self, file: ShardFile, parts: Parts) -> memoryview | None:
        """Return the bytes of a file of a shard, copying it first if necessary; ``None`` without room.

        Raises:
            ShoalError: the original differs from the manifest, or cannot be read.
        """
        name = file.copy_name
        if self.config.evict:
            self._forget_evicted()
        data = self._maps.get(name)
        if data is None and name not in self._declined:
            data = self._mapped(file, parts)
        if data is not None and self.config.evict:
            self.touch(file)
        return data

    def touch(self, file: ShardFile) -> None:
        """Mark the copy of a file as used now, if there is one: those used long ago make room."""
        now = time.time_ns()
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._folder / file.copy_name, ns=(now, now))

    def last_use_ns(self, name: str) -> int | None:
        """Return when a copy was used last (with ``evict``), or made; ``None`` if there is none."""
        try:
            return (self._folder / name).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    @property
    def peer_problems(self) -> Mapping[tuple[str, str], int]:
        """Number of failures of peers, by the host's name and their kind."""
        return self._peers.problems if self._peers else {}

    def find(self, file: ShardFile) -> BinaryIO | None:
        """Open the copy of a file for reading; return ``None`` if there is none. Raises ``OSError``."""
        return _opened(self._folder / file.copy_name, file.num_bytes)

    def find_partial(self, file: ShardFile) -> BinaryIO | None:
        """Open a copy that is being made, as ``find``; it has its full size at once."""
        return _opened(self._folder / f"{file.copy_name}{PARTIAL}", file.num_bytes)

    def get(self, file: ShardFile, parts: Parts) -> BinaryIO | None:
        """Open the copy of a file, which is made first if necessary; return ``None`` without room.

        Raises:
            ShoalError: the original differs from the manifest, or cannot be read.
        """
        name = file.copy_name
        path = self._folder / name
        try:
            if (copy := self.find(file)) is None and self._peers is not None:
                copy = self._held(self._peers, file)
            if copy is not None:
                return copy
            with _locked(_lock_of(path)):
                copy = self.find(file)  # another one may have been first
                if copy is None and name not in self._declined:
                    copy = self.find(file) if self._has_room_and_fills(path, file, parts) else None
                return copy
        except OSError as error:
            self._decline(name, error.strerror or str(error))
            return None

    def _mapped(self, file: ShardFile, parts: Parts) -> memoryview | None:
        copy = self.get(file, parts)
        if copy is None:
            return None
        if not file.num_bytes:
            copy.close()
            return memoryview(b"")
        with copy, self._lock:
            data = self._maps.get(file.copy_name)
            if data is None:
                mapped = mmap.mmap(copy.fileno(), file.num_bytes, access=mmap.ACCESS_READ)
                data = self._maps[file.copy_name] = memoryview(mapped)
        return data

    def _held(self, reader: PeerReader, file: ShardFile) -> BinaryIO | None:
        """Let this host's own server make the copy of a file that it owns, once for all who ask."""
        owner = next(iter(reader.usable(file)), None)
        if owner is None or owner.name != reader.peers.own:
            return None
        try:
            reader.hold(owner, file)
        except PeerError as error:
            self._note(reader, owner, error)
        return self.find(file)

    def _has_room_and_fills(self, path: Path, file: ShardFile, parts: Parts) -> bool:
        """Copy a shard, unless the limit forbids it. Raises ``OSError`` if the disk does."""
        partial = path.with_name(path.name + PARTIAL)
        num_bytes = file.num_bytes
        try:
            with _locked(self._folder / ".lock"):
                partial.unlink(missing_ok=True)  # of a process that was killed: its lock is ours
                path.unlink(missing_ok=True)  # if it is there, it is not the copy
                reason = self._why_no_room(file)
                if reason is None:
                    with partial.open("wb") as opened:
                        if num_bytes:
                            os.posix_fallocate(opened.fileno(), 0, num_bytes)
            if reason is not None:
                self._decline(path.name, reason)
                return False
            is_from_peer = self._fill_from_peers(partial, file)
            if not is_from_peer:
                _fill(partial, file, parts)
            publish(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        if is_from_peer:
            self.count(num_filled=1, peer_bytes=num_bytes)
        else:
            self.count(num_filled=1, storage_bytes=num_bytes)
        return True

    def count(self, **more: int) -> None:
        """Add to the counts of this process."""
        with self._lock:
            for name, count in more.items():
                total = getattr(self.counts, name) + count
                setattr(self.counts, name, total)
                if self._written is not None:
                    _COUNT.pack_into(self._written, _OFFSETS[name], total)

    def _note(self, reader: PeerReader, peer: Peer, error: PeerError) -> None:
        self.count(num_peer_failures=1)
        reader.note(peer, error)

    def _fill_from_peers(self, partial: Path, file: ShardFile) -> bool:
        """Copy a shard from the first peer that gives its bytes; return whether one did."""
        reader = self._peers
        if reader is None:
            return False

        def parts_of(peer: Peer) -> Parts:
            return lambda: reader.parts(peer, file)

        for peer in reader.usable(file):
            if peer.name == reader.peers.own:
                continue  # it was asked before
            try:
                _fill(partial, file, parts_of(peer))
                return True
            except PeerError as error:
                self._note(reader, peer, error)
            except ShoalError as error:
                self._note(reader, peer, PeerError("sent wrong bytes", str(error)))
        return False

    def _why_no_room(self, file: ShardFile) -> str | None:
        """Make room if ``evict`` allows it; return the reason if there is none. Holds the folder's lock."""
        limit, num_bytes = self.config.num_bytes, file.num_bytes
        if num_bytes > limit:
            return f"a shard of {num_bytes:,} bytes is more than its limit of {limit:,}"
        used = _remove_abandoned(self._folder)
        copies = sorted(_entries(self._folder))
        if file.copy_name not in self._own:
            limit = max(0, limit - sum(self._own.values()))  # the rest is for the shards that this host owns
            copies = [copy for copy in copies if copy[2].name not in self._own]
        used += sum(size for _, size, _ in copies)
        if num_bytes > limit:
            return f"its limit of {self.config.num_bytes:,} bytes is for the shards that this host owns"
        if used + num_bytes > limit and not self.config.evict:
            return f"its limit of {limit:,} bytes is reached"
        for _, size, path in copies:
            if used + num_bytes <= limit:
                return None
            with _locked(_lock_of(path), wait=False) as is_free:  # if not, it is being opened
                if is_free:
                    path.unlink(missing_ok=True)
                    used -= size
                    self.count(num_evicted=1)
                    with self._lock:
                        self._maps.pop(path.name, None)
        return None if used + num_bytes <= limit else _NO_ROOM

    def _forget_evicted(self) -> None:
        """Unmap copies that another process removed; mapped, they would keep their memory."""
        changed_ns = self._folder.stat().st_mtime_ns
        if changed_ns == self._changed_ns:
            return
        with self._lock:
            self._changed_ns = changed_ns
            for name in [name for name in self._maps if not (self._folder / name).exists()]:
                del self._maps[name]

    def _decline(self, name: str, reason: str) -> None:
        self.count(num_declined=1)
        with self._lock:
            is_first, self._has_declined = not self._has_declined, True
            if reason != _NO_ROOM:
                self._declined.add(name)
        if is_first:
            print(
                f"cache {self.name}: {reason}; shards without a copy are read where they are "
                "(slower): give the cache more bytes or another folder",
                file=sys.stderr,
                flush=True,
            )


class Prefetch:
    """Makes copies in threads, in the order in which steps use files, until it is closed or all is full.

    By the policy ``own`` only files of this host are copied before they are needed. Where the cache evicts,
    copies that nobody has used yet take a part of it only; any process of the host may use them.

    Errors are left to the reads, which meet them again.

    Args:
        cache: of this host.
        files: that the steps use.
        steps: the number of the file of each sample, step by step.
        storage: of the files.
    """

    def __init__(
        self,
        cache: ShardCache,
        files: Sequence[ShardFile],
        steps: Iterable[npt.NDArray[np.int64]],
        storage: Storage,
    ) -> None:
        """Start the threads."""
        self._cache, self._storage = cache, storage
        config, policy = cache.config, cache.kept.policy
        self._room = bytes_ahead(policy, cache_bytes=config.num_bytes, evicts=config.evict)
        numbers = first_uses(steps, len(files), again=policy == "window" and config.evict)
        used = map(files.__getitem__, numbers)
        own = {file.copy_name for file in cache.kept.own}
        self._files = (file for file in used if policy != "own" or file.copy_name in own)
        self._unused: dict[str, tuple[int, int | None]] = {}
        """Bytes of each copy that was made here, and the time of its last use then; ``None``: it is made."""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self.threads = [
            threading.Thread(target=self._run, name="shoal-prefetch", daemon=True)
            for _ in range(_NUM_PREFETCHED)
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Begin no further copy."""
        self._is_over.set()

    def _run(self) -> None:
        with contextlib.suppress(ShoalError, OSError):
            while (file := self._next()) is not None:
                copy = self._cache.get(file, partial(self._storage.parts, file))
                if copy is None:
                    break
                with copy:
                    made_ns = os.fstat(copy.fileno()).st_mtime_ns
                    self._unused[file.copy_name] = file.num_bytes, made_ns
        self.close()

    def _next(self) -> ShardFile | None:
        """Return the next file without a copy, once it has room; ``None``: there is none, or no room."""
        with self._lock:
            for file in self._files:
                if (copy := self._cache.find(file)) is not None:
                    copy.close()
                elif file.copy_name not in self._unused:
                    if not self._waits_for_room(file.num_bytes):
                        return None
                    self._unused[file.copy_name] = file.num_bytes, None
                    return file
        return None

    def _waits_for_room(self, num_bytes: int) -> bool:
        """Wait until copies were used, so that there is room for another; return whether there is."""
        while not self._is_over.is_set():
            for name, (_, made_ns) in list(self._unused.items()):
                used_ns = self._cache.last_use_ns(name) if made_ns is not None else None
                if made_ns is not None and used_ns is None:
                    return False  # evicted before it was used: what is in use leaves no room
                if used_ns != made_ns:
                    del self._unused[name]
            if sum(size for size, _ in self._unused.values()) + num_bytes <= self._room:
                return True
            if not self._cache.config.evict:
                return False
            self._is_over.wait(_LOOK_S)
        return False


class CachedFiles:
    """Files of a prepared directory that are mapped where their copies are.

    Args:
        config: location and size of the cache.
        storage: of the directory.
        files: all that the hosts read, of which each keeps its own for its peers.
        needed: those of this process. They are copied at once, those that this host owns first.

    Raises:
        ShoalError: a file is missing or differs from the manifest.
    """

    def __init__(
        self, config: CacheConfig, storage: Storage, files: Iterable[ShardFile], needed: Iterable[ShardFile]
    ) -> None:
        self.kept = config.kept(files)
        self._cache, self._storage = ShardCache(config, self.kept), storage
        own = self.kept.own
        with ThreadPoolExecutor(_NUM_COPIED) as pool:
            deque(pool.map(self._copy, sorted(needed, key=lambda file: file not in own)), maxlen=0)

    def get(self, file: ShardFile) -> mmap.mmap | bytes | memoryview:
        """Return the bytes of a file: its copy, or without room for one the file itself.

        The bytes count as read when the file is opened, once for each process.

        Raises:
            ShoalError: there is no room, and the file cannot be mapped where it is.
        """
        copy = self._copy(file)
        if copy is not None:
            self._cache.count(memory_bytes=file.num_bytes)
            return copy
        if isinstance(self._storage, LocalStorage):
            self._cache.count(num_read_in_place=1, storage_bytes=file.num_bytes)
            return map_file(self._storage.directory / file.name, file)
        raise ShoalError(
            f"{self._storage.path(file)}: the cache {self._cache.name} has no room for its "
            f"{file.num_bytes:,} bytes, and text of an object store has to fit: give it more "
            "(--data.cache-bytes), or a larger disk"
        )

    def _copy(self, file: ShardFile) -> memoryview | None:
        return self._cache.view(file, lambda: self._storage.parts(file))

    def description(self, *names: str) -> Path:
        """Return a folder of the cache with copies of small files of the directory."""
        contents = {name: self._storage.whole(name) for name in names}
        digest = hashlib.sha256(b"".join(contents.values())).hexdigest()
        folder = self._cache.name / f"description-{digest[:16]}"
        with _locked(self._cache.name / ".description.lock"):  # others of this host write the same
            folder.mkdir(mode=0o700, exist_ok=True)
            for name, data in contents.items():
                write_atomically(folder / name, data)
        return folder


def _shared_counts(folder: Path) -> mmap.mmap:
    """Return memory that is a file of its own in ``folder``: it stays when the process is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{secrets.token_hex(8)}.counts").open("xb+") as file:
        file.truncate(_COUNTS.size)
        return mmap.mmap(file.fileno(), _COUNTS.size)


def _opened(path: Path, num_bytes: int) -> BinaryIO | None:
    """Open a copy of ``num_bytes``; return ``None`` if there is none. Raises ``OSError``."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    if os.fstat(file.fileno()).st_size == num_bytes:
        return file
    file.close()
    return None


def _fill(partial: Path, file: ShardFile, parts: Parts) -> None:
    digest = hashlib.sha256()
    num_bytes = 0
    with partial.open("r+b") as opened:
        for part in parts():
            opened.write(part)
            opened.flush()  # the server of shards passes it on
            digest.update(part)
            num_bytes += len(part)
        opened.flush()
        os.fsync(opened.fileno())
    file.check(file.name, num_bytes, digest.hexdigest())


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name.removesuffix(PARTIAL)}.lock")


def _entries(directory: Path, suffix: str = "") -> Iterator[tuple[int, int, Path]]:
    """Yield (last use in ns, bytes, path) of the copies, or of those with a suffix after their name."""
    for path in directory.iterdir():
        if path.name.endswith(suffix) and _COPY.fullmatch(path.name.removesuffix(suffix)):
            with contextlib.suppress(FileNotFoundError):
                state = path.stat()
                yield state.st_mtime_ns, state.st_size, path


def _remove_abandoned(directory: Path) -> int:
    """Remove temporary files of killed processes; return the bytes of the others."""
    used = 0
    for _, size, path in list(_entries(directory, PARTIAL)):
        with _locked(_lock_of(path), wait=False) as is_free:
            if is_free:
                path.unlink(missing_ok=True)
            else:
                used += size
    return used


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock among threads and processes; the system releases it when the process ends.

    Yields whether it is held: without ``wait``, another process may hold it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield take_lock(file, path, wait=wait)
    finally:
        os.close(file)
