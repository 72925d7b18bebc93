"""The settings that recipes for images share. No torch."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from shoal.errors import UsageError
from shoal.train.config import (
    DistributedConfig,
    LoopConfig,
    RunPlaceConfig,
    VisionOptimizerConfig,
    check_wire,
    require_positive,
)
from shoal.train.parallel_config import parse_bytes


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig:
    """Which images, and how they are read."""

    path: str | None = None
    """Directory that `shoal prepare` wrote, or s3://BUCKET/PREFIX of one."""
    made_images: int = 0
    """Without a path: make so many training images in the run directory, and a fifth more to validate on."""
    made_size: int = 32
    """Side of the made images, in pixels."""
    verify: Literal["sizes", "checksums"] = "sizes"
    """Compare only sizes at the start, or read every byte once (by the main worker)."""
    decode_threads: int | None = None
    """Threads of a worker that decode images; default: the processors that there are for it."""
    loader_processes: int = 0
    """Processes that decode images; 0: threads of the worker, which share its memory."""
    cache: Path | None = None
    """Folder on a fast local disk, or in memory, into which shards are copied as they are needed."""
    cache_bytes: str = "64GB"
    """How large it may become. Shards beyond that are read where they are."""

    def __post_init__(self) -> None:
        require_positive("data", self, "decode_threads", "made_size")
        for name in ("made_images", "loader_processes"):
            if getattr(self, name) < 0:
                raise UsageError(f"data.{name} {getattr(self, name)} must be at least 0")
        parse_bytes(self.cache_bytes, "data.cache_bytes")

    @property
    def num_made_held_out(self) -> int:
        """How many images to validate on a run makes."""
        return max(self.made_images // 5, 1)


@dataclass(frozen=True, kw_only=True)
class ImageTrainConfig:
    """What all runs on images are told; each recipe has its own form of the parts."""

    recipe: ClassVar[str]
    """Its name in commands and records."""
    prepare: ClassVar[str]
    """The command that prepares its images."""
    fixed: ClassVar[tuple[str, ...]]
    """What must stay when a run goes on: weights, optimizer state and the images that are still to come."""

    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    optim: VisionOptimizerConfig = field(default_factory=VisionOptimizerConfig)
    run: RunPlaceConfig = field(default_factory=RunPlaceConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        check_wire(self.distributed, precision=self.train.precision, clip=self.optim.clip)
