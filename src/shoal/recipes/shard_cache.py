"""Adds the options of a cache of shards to the data's section of a recipe, and records what was read."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

import atexit
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shoal.errors import UsageError
from shoal.formatting import parse_bytes

if TYPE_CHECKING:
    from shoal.data.cache import CacheConfig
    from shoal.train.run import Run
    from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class CachedDataConfig:
    """Settings of the local cache of shards: its folder, its size, and copies from other hosts."""

    cache: Path | None = None
    """Folder on a fast local disk, or in memory, to which shards are copied on demand."""
    cache_bytes: str = "64GB"
    """Maximum size of the cache folder, such as 40GB (40 x 10^9 bytes) or 40G (40 x 2^30, as 40GiB); further
    shards are read from their storage."""
    cache_peers: Literal["off", "on"] = "off"
    """on: each of several hosts reads its part of the shards from their storage, for all of them."""

    def __post_init__(self) -> None:
        parse_bytes(self.cache_bytes, "data.cache_bytes")
        if self.cache_peers == "on" and self.cache is None:
            raise UsageError(
                "data.cache_peers on: peers give each other what they keep in their caches; name a folder "
                "for it, e.g. --data.cache /dev/shm/shards"
            )

    def own_cache(self, **settings: Any) -> "CacheConfig | None":
        """Return the cache that the settings name, of this host alone.

        Args:
            settings: further ones of :class:`~shoal.data.cache.CacheConfig`.
        """
        if self.cache is None:
            return None
        from shoal.data.cache import CacheConfig

        num_bytes = parse_bytes(self.cache_bytes, "data.cache_bytes")
        return CacheConfig(directory=self.cache, num_bytes=num_bytes, **settings)

    def open_cache(
        self,
        world: "World | None",
        kind: Literal["images", "text"],
        location: Path | str,
        *,
        evict: bool = False,
    ) -> "CacheConfig | None":
        """Return the cache that the settings name, with its peers; a collective of all workers.

        Args:
            world: of the workers that read; ``None``: there is no cache.
            kind: of the data.
            location: of the prepared directory.
            evict: make room in a full cache by removing the shards that were not needed for longest.
        """
        if self.cache is None or world is None:
            return None
        cache = self.own_cache(evict=evict, counts=counts_folder(world))
        if cache is None or self.cache_peers == "off":
            return cache
        from shoal.recipes.shard_peers import join_peers

        return join_peers(world, cache, kind=kind, location=location)


def counts_folder(world: "World") -> Path:
    """Return a new folder for the counts of this host's processes. A collective of all workers."""
    from shoal.env.machine import host_identity
    from shoal.train.world import all_gather_json

    is_first = world.ranks.local_rank == 0 or world.is_late
    made = tempfile.mkdtemp(prefix="shoal-reads-") if is_first else None
    if made is not None:
        atexit.register(shutil.rmtree, made, ignore_errors=True)
    gathered = all_gather_json(world.control, [host_identity(), made])
    return Path(next(folder for host, folder in gathered if host == host_identity() and folder is not None))


class Counting(Protocol):
    """Shards that may have a cache."""

    @property
    def counts_folder(self) -> Path | None: ...

    @property
    def cache_policy(self) -> str: ...


def record_reads(run: "Run", shards: "Counting | None") -> None:
    """Write a row of the bytes that all hosts have read since the start. A collective of all workers.

    Args:
        shards: of the data; without a cache nothing is written.
    """
    if shards is None or (counts := shards.counts_folder) is None or run.stopped:
        return
    from shoal.data.cache import total_counts
    from shoal.record import Reads
    from shoal.train.world import all_gather_json

    own = asdict(total_counts(counts)) if run.world.ranks.local_rank == 0 else None
    everywhere = run.workers.together(lambda: all_gather_json(run.world.control, own))
    gathered = [counts for counts in everywhere if counts is not None]
    if run.log and gathered:  # the process that has a host's counts may be lost
        totals = {name: sum(counts[name] for counts in gathered) for name in gathered[0]}
        kept = {name: totals[name] for name in ("memory_bytes", "peer_bytes", "storage_bytes")}
        row = Reads(
            step=run.step,
            peer_failures=totals["num_peer_failures"],
            policy=shards.cache_policy,
            without_room=totals["num_declined"],
            **kept,
        )
        run.log.write(row)
