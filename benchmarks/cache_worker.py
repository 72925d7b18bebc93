"""A worker of :mod:`benchmarks.cache`: reads its part of each epoch's images, and says when and what."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.cache import CacheConfig, total_counts
from shoal.data.images.shards import ImageShards
from shoal.decide.order import ShuffledOrder
from shoal.env.launcher import worker_env
from shoal.recipes import shard_cache, shard_peers
from shoal.train.config import DistributedConfig
from shoal.train.world import World, join_world

_THREADS = 8


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
