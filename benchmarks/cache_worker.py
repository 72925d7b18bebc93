"""A worker of :mod:`benchmarks.cache`: reads its part of each epoch's images, and says when and what."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shoal.data import precedence
from shoal.data.cache import CacheConfig, total_counts
from shoal.data.images.shards import ImageShards
from shoal.decide.order import ShuffledOrder
from shoal.env.launcher import worker_env
from shoal.recipes import shard_cache, shard_peers
from shoal.train.config import DistributedConfig
from shoal.train.world import World, join_world

_THREADS = 8
GRADIENT_BYTES = 16 << 20
"""Of a sum, which takes some 0.5 s on links of 500 Mbit/s."""
NUM_SUMS, _WARM_UP = 20, 3
_COMPUTE_S = 0.3
"""Between two sums, as a step's forward pass and most of its backward pass."""


def read(spec: Mapping[str, Any]) -> None:
    """Read the epochs, and write the result to a file of this rank."""
    joined = worker_env()
    assert joined is not None
    with join_world(joined, DistributedConfig(backend=spec["backend"], device="cpu")) as world:
        cache = None
        if spec["cache"]:
            own = Path(spec["cache"]) / os.uname().nodename
            cache = CacheConfig(
                directory=own, num_bytes=spec["cache_bytes"], counts=shard_cache.counts_folder(world)
            )
            if spec["peers"]:
                cache = shard_peers.join_peers(world, cache, kind="images", location=spec["location"])
        shards = ImageShards(spec["location"], "train", cache=cache)
        result: dict[str, Any] = {"seconds": [], "hashes": []}
        world.barrier()
        for epoch in range(spec["epochs"]):
            _read_epoch(shards, world, epoch, spec, result)
        if spec["local"]:
            result["local_s"], result["cached_s"] = _against_local(shards, world, spec)
        if cache is not None and cache.counts is not None:
            result["counts"] = asdict(total_counts(cache.counts))
        path = Path(spec["folder"]) / f"{world.rank}.json"
        path.with_suffix(".tmp").write_text(json.dumps(result))
        path.with_suffix(".tmp").rename(path)
        if spec["killed"] is None:
            world.barrier()
            return
        while len(list(path.parent.glob("?.json"))) < world.num_workers - 1:  # its server is needed
            time.sleep(0.2)
        for server in shard_peers._servers:
            server.process.kill()
        os._exit(0)  # the group has lost a member


def _read_epoch(
    shards: ImageShards, world: World, epoch: int, spec: Mapping[str, Any], result: dict[str, Any]
) -> None:
    order = ShuffledOrder(num_examples=len(shards), seed=1)
    numbers = np.arange(epoch * len(shards) + world.rank, (epoch + 1) * len(shards), world.num_workers)
    mine = order.examples_of(numbers)[1].tolist()
    began = time.monotonic()
    digest = hashlib.sha256()
    dies = spec["killed"] == epoch and world.rank == world.num_workers - 1
    with ThreadPoolExecutor(_THREADS) as pool:
        for count, part in enumerate(pool.map(lambda number: _digest(shards, number), mine)):
            digest.update(part)
            if dies and count >= len(mine) // 2:
                for server in shard_peers._servers:
                    server.process.kill()
                os.kill(os.getpid(), signal.SIGKILL)
    if spec["killed"] is None:
        world.barrier()
    result["seconds"].append(time.monotonic() - began)
    result["hashes"].append(digest.hexdigest())


def exchange(spec: Mapping[str, Any]) -> None:
    """Time sums of a gradient without reads beside them, and beside the first epoch's reads from peers."""
    joined = worker_env()
    assert joined is not None
    with join_world(joined, DistributedConfig(backend=spec["backend"], device="cpu")) as world:
        gradient = torch.ones(GRADIENT_BYTES // 4)
        for _ in range(_WARM_UP):
            _sum_s(world, gradient, is_reading=True)
        alone = [_sum_s(world, gradient, is_reading=True)[0] for _ in range(NUM_SUMS)]
        own = Path(spec["cache"]) / os.uname().nodename
        cache = shard_peers.join_peers(
            world,
            CacheConfig(directory=own, num_bytes=spec["cache_bytes"]),
            kind="images",
            location=spec["location"],
        )
        shards = ImageShards(spec["location"], "train", cache=cache)
        beside: list[float] = []
        reader = threading.Thread(target=_read_mine, args=(shards, world))
        world.barrier()
        reader.start()
        while True:
            seconds, num_reading = _sum_s(world, gradient, is_reading=reader.is_alive())
            if num_reading < world.num_workers:  # a host has all that it needs
                break
            beside.append(seconds)
        reader.join()
        times = {"alone": alone, "beside": beside}
        (Path(spec["folder"]) / f"{world.rank}.json").write_text(json.dumps(times))
        world.barrier()


def _sum_s(world: World, gradient: torch.Tensor, *, is_reading: bool) -> tuple[float, int]:
    """Return the seconds of a sum over all hosts, and the number of hosts that still read before it."""
    time.sleep(_COMPUTE_S)
    reading = torch.tensor(float(is_reading))
    dist.all_reduce(reading, group=world.control)  # they begin together
    precedence.OWN.begin()  # as in a step
    began = time.monotonic()
    dist.all_reduce(gradient)
    seconds = time.monotonic() - began
    precedence.OWN.end()
    gradient.fill_(1.0)
    return seconds, round(float(reading))


def _read_mine(shards: ImageShards, world: World) -> None:
    mine = range(world.rank, len(shards), world.num_workers)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda number: _digest(shards, number), mine))


def _digest(shards: ImageShards, number: int) -> bytes:
    return hashlib.sha256(shards.read(number)).digest()


def _against_local(
    shards: ImageShards, world: World, spec: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    """Return the seconds of epochs from a local folder and from the cache, in turn."""
    local = ImageShards(spec["local"], "train")
    seconds: tuple[list[float], list[float]] = [], []
    for epoch in range(2, 2 + spec["repeats"]):
        for source, kept in zip((local, shards), seconds, strict=True):
            result: dict[str, Any] = {"seconds": [], "hashes": []}
            _read_epoch(source, world, epoch, spec, result)
            kept += result["seconds"]
    return seconds
