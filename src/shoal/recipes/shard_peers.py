"""Starts a server of shards on each host of a job, and tells all workers where they are.

1. The first worker of each host starts :mod:`shoal.data.shard_server`, which ends with it.
2. The workers exchange addresses and sizes of the caches. The first one asks the helper hosts for theirs.
3. The servers learn which hosts there are, and with that which shards their own one keeps.

It works under any launcher, since only workers and their control group take part.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch.distributed.distributed_c10d import _get_default_store

from shoal.comm.rendezvous import local_address
from shoal.data import precedence
from shoal.data.cache import CacheConfig
from shoal.data.peers import Peer, PeerError, Peers, keep, room_of
from shoal.env import settings
from shoal.env.machine import boot_identity, host_identity
from shoal.env.secret import MAKE_SECRET, job_secret
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.train.world import World, all_gather_json, run_on_all

_END_S = 10.0


def join_peers(
    world: World, cache: CacheConfig, *, kind: Literal["images", "text"], location: Path | str
) -> CacheConfig:
    """Return the cache with the peers of the job, whose servers run then. A collective of all workers.

    On one host the cache is returned as it is.

    Args:
        cache: of each host.
        kind: of the data.
        location: of the prepared directory, the storage of the shards.

    Raises:
        UsageError: the job has no secret, or wants encryption, which the servers do not have.
        ShoalError: a server did not start, a helper's one does not answer, or a worker was lost.
    """
    if world.num_hosts == 1:
        return cache
    server = run_on_all(world.control, lambda: _own_server(world, cache))[world.rank]
    own = _servers[-1] if server is not None else None
    gathered = [entry for entry in all_gather_json(world.control, server) if entry is not None]
    names = _names([entry["node"] for entry in gathered])
    hosts = tuple(
        Peer(name=name, **{field: entry[field] for field in ("address", "port", "num_bytes")})
        for name, entry in zip(names, gathered, strict=True)
    )
    helpers = tuple(Peer(**helper) for helper in gathered[0]["helpers"])
    here = next(index for index, entry in enumerate(gathered) if entry["host"] == host_identity())
    exchange = Path(gathered[here]["exchange"])
    precedence.OWN.open(exchange, world.ranks.local_rank)
    peers = Peers(hosts=(*hosts, *helpers), own=names[here], exchange=exchange)
    folders = [entry["folder"] for entry in gathered]
    if len(set(folders)) < len(folders):  # emulated hosts
        cache = replace(cache, directory=cache.directory / names[here])

    def open_own() -> None:
        if own is not None:
            own.open(cache, peers, kind, location)
        for helper in helpers if world.rank == 0 else ():
            _let_keep(helper, _data_settings(replace(peers, own=helper.name), kind, location))

    run_on_all(world.control, open_own)
    return replace(cache, peers=peers)


_servers: list[_Server] = []
"""Servers that this process has started; they end with it."""


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[str]
    address: str
    port: int

    def open(self, cache: CacheConfig, peers: Peers, kind: str, location: Path | str) -> None:
        """Give the server its settings, and wait until it serves."""
        values = {
            **_data_settings(peers, kind, location),
            "directory": str(cache.directory),
            "num_bytes": cache.num_bytes,
            "evict": cache.evict,
            "counts": str(cache.counts) if cache.counts is not None else None,
        }
        answer = {"problem": "it has ended"}
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(values) + "\n")
            self.process.stdin.flush()
            answer = parse_json(self._line(), "the answer of the server of shards")
        except BrokenPipeError:
            pass
        if answer["problem"]:
            raise ShoalError(f"the server of shards at {self.address}: {answer['problem']}")

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline().encode() or b'{"problem": "it has ended"}'

    def end(self) -> None:
        """Let the server end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(_END_S)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def _data_settings(peers: Peers, kind: str, location: Path | str) -> dict[str, Any]:
    """Return the settings by which a server finds the data and its part of them."""
    hosts = [asdict(peer) for peer in peers.hosts]
    return {"kind": kind, "location": str(location), "hosts": hosts, "own": peers.own}


def _helpers() -> list[Peer]:
    """Return the helper hosts that keep shards."""
    found = []
    for helper in settings.helpers():
        try:
            found.append(room_of(helper))
        except PeerError as error:
            raise _unusable(helper.address, helper.port + 1, error) from None
    return [helper for helper in found if helper is not None]


def _let_keep(helper: Peer, data: dict[str, Any]) -> None:
    try:
        keep(helper, data)
    except PeerError as error:
        raise _unusable(helper.address, helper.port, error) from None


def _unusable(address: str, port: int, error: PeerError) -> ShoalError:
    return ShoalError(
        f"the server of shards of the helper host {address}, at port {port}, {error.problem} "
        f"({error.reason}); start shoal serve there with the job's secret, or without --cache"
    )


def _own_server(world: World, cache: CacheConfig) -> dict[str, Any] | None:
    """Start the server of this host, on its first worker; return what the other hosts have to know."""
    if world.ranks.local_rank != 0:
        return None
    if job_secret() is None:
        raise UsageError(
            "data.cache_peers on several hosts needs the job's secret, so that strangers cannot take part: "
            f"make one with {MAKE_SECRET}, copy it to every host, and on each: export "
            f"{settings.SECRET_FILE}=job.secret"
        )
    if settings.encrypt():
        raise UsageError(
            f"data.cache_peers on with {settings.ENCRYPT}=1: shards between hosts are not encrypted; leave "
            "one of them out"
        )
    address = local_address(_get_default_store()).partition(",")[0]
    command = [sys.executable, "-m", "shoal.data.shard_server", "--address", address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = process.stdout.readline()
    if not port.strip().isdecimal():
        process.kill()
        raise ShoalError(f"the server of shards at {address} did not start: exit code {process.wait()}")
    server = _Server(process, address, int(port))
    _servers.append(server)
    atexit.register(server.end)
    cache.directory.mkdir(parents=True, exist_ok=True)
    state = cache.directory.stat()
    exchange = precedence.make_slots(world.ranks.num_local_workers)
    atexit.register(exchange.unlink, missing_ok=True)
    return {
        "host": host_identity(),
        "node": os.uname().nodename,
        "folder": f"{boot_identity()}/{state.st_dev}/{state.st_ino}",
        "address": address,
        "port": server.port,
        "num_bytes": cache.num_bytes,
        "exchange": str(exchange),
        "helpers": [asdict(helper) for helper in _helpers()] if world.rank == 0 else [],
    }


def _names(nodes: list[str]) -> list[str]:
    """Return names of hosts that stay the same at the next start: those of the nodes, if all differ."""
    if len(set(nodes)) == len(nodes):
        return nodes
    return [f"host-{index}" for index in range(len(nodes))]
