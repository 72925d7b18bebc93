"""Adds the options of a cache of shards to the data's section of a recipe."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.errors import UsageError
from shoal.train.config import parse_bytes

if TYPE_CHECKING:
    from shoal.data.cache import CacheConfig
    from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class CachedDataConfig:
    """Settings of the local cache of shards: its folder, its size, and copies from other hosts."""

    cache: Path | None = None
    """Folder on a fast local disk, or in memory, to which shards are copied on demand."""
    cache_bytes: str = "64GB"
    """Maximum size of the cache folder; further shards are read from their storage."""
    cache_peers: Literal["off", "on"] = "off"
    """on: each of several hosts reads its part of the shards from their storage, for all of them."""

    def __post_init__(self) -> None:
        parse_bytes(self.cache_bytes, "data.cache_bytes")
        if self.cache_peers == "on" and self.cache is None:
            raise UsageError(
                "data.cache_peers on: peers give each other what they keep in their caches; name a folder "
                "for it, e.g. --data.cache /dev/shm/shards"
            )

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
        from shoal.data.cache import CacheConfig
        from shoal.recipes.shard_peers import counts_folder, join_peers

        cache = CacheConfig(
            directory=self.cache,
            num_bytes=parse_bytes(self.cache_bytes, "data.cache_bytes"),
            evict=evict,
            counts=counts_folder(world),
        )
        return join_peers(world, cache, kind=kind, location=location) if self.cache_peers == "on" else cache
