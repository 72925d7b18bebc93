"""Opens images, and writes networks for ``resnet50.py`` and ``mask_rcnn.py``."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from shoal.data.bad_entries import MOST_BAD, OnBad
from shoal.data.images.shards import ImageShards
from shoal.data.images.sources import TRAIN, VALIDATION
from shoal.data.manifest import MANIFEST
from shoal.data.storage import open_storage
from shoal.errors import ShoalError, UsageError, require_positive
from shoal.json_text import parse_json
from shoal.recipes import Use
from shoal.recipes.model_source import MODEL_CONFIG, NETWORK, ModelSource, find_model, find_run
from shoal.recipes.shard_cache import CachedDataConfig
from shoal.train import run_dir
from shoal.train.config import (
    REQUIRED,
    DistributedConfig,
    LoopConfig,
    RunOutputConfig,
    ServersConfig,
    check_combination,
    required,
)
from shoal.train.optim_config import VisionOptimizerConfig, check_served

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shoal.data.images.augment import AugmentConfig
    from shoal.data.loader import Batch
    from shoal.data.steps import Reader
    from shoal.train.run import Run
    from shoal.train.world import World

# ------------------------------------------------------------------------------------------------- config


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig(CachedDataConfig):
    """Images, and how to read them."""

    path: Annotated[str | None, Parameter(group=REQUIRED)] = None
    """Directory that `shoal prepare` wrote, or s3://BUCKET/PREFIX of one."""
    made_images: Annotated[int, Parameter(group=REQUIRED)] = 0
    """Without a path: generate this many training images in the run directory, and a fifth more for
    validation."""
    made_size: int = 32
    """Side of the generated images, in pixels."""
    verify: Literal["sizes", "checksums"] = "sizes"
    """Compare only sizes at the start, or read every byte once (by the main worker)."""
    decode_threads: int | None = None
    """Threads of a worker that decode images; default: its share of the host's processors."""
    loader_processes: int | None = None
    """Processes that decode images; 0: threads of the worker, which share its memory and its interpreter.
    Default: without decode_threads, on a GPU its share of the host's processors less one; else 0."""
    on_bad: OnBad | None = None
    """A training image that cannot be used: name it and take another in its place, or end the run. Default:
    skip; refuse where the device decodes. With skip given, the record counts replaced images."""
    most_bad: float = MOST_BAD
    """Largest share of the images that may be replaced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("data", self, "decode_threads", "made_size")
        require_positive("data", self, "made_images", "loader_processes", least=0)

    @property
    def bad_images(self) -> dict[str, Any]:
        """Options of :class:`~shoal.data.images.reader.ShardReader` for images that cannot be used."""
        return {"on_bad": self.on_bad or "skip", "most_bad": self.most_bad}

    @property
    def num_made_held_out(self) -> int:
        """Number of images to validate on that a run makes."""
        return max(self.made_images // 5, 1)


@dataclass(frozen=True, kw_only=True)
class ImageTrainConfig:
    """Sections of settings that the recipes for images share; each recipe extends some."""

    unit: ClassVar[str] = "images"
    memory_remedy: ClassVar[str] = "--train.precision bf16"
    prepare: ClassVar[str]
    """Command that prepares the images of the recipe."""

    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    optim: VisionOptimizerConfig = field(default_factory=VisionOptimizerConfig)
    run: RunOutputConfig = field(default_factory=RunOutputConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)

    def __post_init__(self) -> None:
        check_combination(self.train, self.distributed, self.servers, clip=self.optim.clip)
        check_served(self.optim, self.servers)


# ------------------------------------------------------------------------------------------------- data

MADE = "images"
"""Folder of the run directory with the images that it made."""


def location_of(config: ImageTrainConfig) -> Path | str:
    """Return the location of the prepared images: a directory, or s3://BUCKET/PREFIX.

    Raises:
        UsageError: no images are named, nor to be made.
    """
    if config.data.path is None and not config.data.made_images:
        raise UsageError(
            f"data.path is not set: name the directory that `{config.prepare}` wrote, "
            "e.g. --data.path runs/images"
        )
    return config.data.path or required(config.run.dir) / MADE


def keep_description(config: ImageTrainConfig, run: "Run", *names: str) -> None:
    """Copy files that describe the prepared images into the run directory, on the first worker."""
    if run.directory is not None and run.world.is_main:
        run_dir.keep_description(run.directory, open_storage(location_of(config)).whole, *names)


def make_images(
    config: ImageTrainConfig, world: "World", make: Callable[..., object], last_file: str = MANIFEST
) -> None:
    """Make the run's own images on the main worker, where none are named and they are not there yet.

    Args:
        make: writes them; the last file it writes is ``last_file``.

    Raises:
        UsageError: no images are named, nor to be made.
    """
    from shoal.train.world import run_on_all

    def made() -> None:
        data, location = config.data, location_of(config)
        if world.is_main and data.path is None and not (Path(location) / last_file).is_file():
            make(
                Path(location),
                num_train=data.made_images,
                num_validation=data.num_made_held_out,
                size=data.made_size,
                seed=config.train.seed,
            )

    run_on_all(world.control, made)


def open_shards(
    config: ImageTrainConfig, world: "World | None" = None, *, evict: bool = False
) -> tuple[ImageShards, ImageShards]:
    """Return the images to train and to validate on.

    Args:
        world: of the workers that read them: the first one verifies, all use the cache; default: neither.
        evict: make room in a full cache by removing the shards that were not needed for longest.

    Raises:
        UsageError: they are not there, or there are none to validate on.
    """
    data, location = config.data, location_of(config)
    cache = data.open_cache(world, "images", location, evict=evict)
    verify = data.verify if world is not None and world.is_main else "sizes"
    train = ImageShards(location, TRAIN, verify=verify, cache=cache)
    if VALIDATION not in train.manifest.splits:
        raise UsageError(
            f"{location} has no images to validate on: prepare it again with some, see "
            f"`{config.prepare} --help`"
        )
    return train, ImageShards(location, VALIDATION, verify=verify, cache=cache)


def loader_processes(data: ImageDataConfig, world: "World") -> int:
    """Return the number of processes of this worker that decode images; 0: its threads do.

    Threads that decode hold the interpreter so often that the launches of kernels wait for it.
    """
    if data.loader_processes is not None:
        return data.loader_processes
    if data.decode_threads or world.device.type != "cuda":
        return 0
    return world.cores - 1


def decode_threads(data: ImageDataConfig, world: "World", num_processes: int = 0) -> int:
    """Return the number of threads that decode images, of this worker or of each of its processes."""
    return data.decode_threads or max(1, world.cores // max(1, num_processes))


# ------------------------------------------------------------------------------------------------- training


def like_weights(inputs: "Tensor", model: "nn.Module") -> "Tensor":
    """Return images ``[B, 3, H, W]`` on the device of ``model``, in the memory format of its weights."""
    import torch

    weight = next(parameter for parameter in model.parameters() if parameter.ndim == 4)
    last = weight.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if last else torch.contiguous_format
    return inputs.to(weight.device, non_blocking=True, memory_format=form)


def copies_bytes(world: "World", augment: "AugmentConfig | None" = None) -> bool:
    """Return whether training images go to the device as bytes, and are normalised there: a GPU's do.

    Args:
        augment: of the images, which may give them colours that are not whole numbers; default: it does not.
    """
    return world.device.type == "cuda" and (augment is None or augment.is_in_bytes)


def shared_batches(reader: "Reader", world: "World", batch_size: int, **options: Any) -> "Iterator[Batch]":
    """Yield this worker's batches of a fixed set of images, cut the same however many workers share them.

    Args:
        options: of :func:`shoal.data.loader.held_out_batches`.
    """
    from shoal.data.loader import held_out_batches

    return held_out_batches(
        reader,
        micro_batch_size=batch_size,
        rank=world.rank,
        num_workers=world.num_workers,
        dealt=True,
        num_ahead=2,
        pin_memory=world.device.type == "cuda",
        **options,
    )


# ------------------------------------------------------------------------------------------------- export

WEIGHTS = "model.safetensors"


def write_directory(out: Path, model: "nn.Module", tree: Mapping[str, Any]) -> None:
    """Write the weights and ``tree``, whole or not at all; an older export in ``out`` is replaced."""
    from safetensors.torch import save_file

    from shoal.atomic_io import write_json

    temporary = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    dtype = next(model.parameters()).dtype
    write_json(temporary / MODEL_CONFIG, {**tree, "dtype": str(dtype).removeprefix("torch.")})
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)


def read_tree(directory: Path, form: str) -> dict[str, Any]:
    """Return the configuration of a network of format ``form``; call it within :func:`reading`.

    Raises:
        UsageError: the directory has another format.
    """
    path = directory / MODEL_CONFIG
    tree: dict[str, Any] = parse_json(path.read_bytes(), str(path))
    if tree["format"] != form:
        raise UsageError(f"{path} is not that of a network that shoal trained: it is no {form}")
    return tree


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Name the directory of :func:`write_directory` in errors of reading it.

    Raises:
        UsageError: ``directory`` is no such directory.
        ShoalError: its files are damaged.
    """
    from safetensors import SafetensorError

    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(
            f"{directory} is not an exported network: {Path(error.filename).name} is missing"
        ) from None
    except ShoalError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ShoalError(f"{directory} cannot be read: {' '.join(str(error).split())[:200]}") from None


# ------------------------------------------------------------------------------------------------- use


class ImageUse(Use):
    """Uses the networks of a recipe for images: its runs, checkpoints and exports; the hub has none."""

    export_folder = NETWORK

    @classmethod
    def read_checkpoint(cls, source: Path) -> tuple[Any, int]:
        """Return the network of a checkpoint, or of the best or newest one of a run, and the step.

        Raises:
            UsageError: it is not of a run of this recipe.
            ShoalError: there is no checkpoint, or it is damaged.
        """
        raise NotImplementedError

    @classmethod
    def read_export(cls, directory: Path) -> Any:
        """Load an exported network.

        Raises:
            UsageError: ``directory`` has none of this recipe.
            ShoalError: its files are damaged.
        """
        raise NotImplementedError

    @classmethod
    def write_export(cls, network: Any, out: Path) -> None:
        """Write a directory, whole or not at all; an older export in ``out`` is replaced."""
        raise NotImplementedError

    @classmethod
    def find(cls, path: Path) -> ModelSource:
        return find_model(path, kinds=("run", "checkpoint", "export"))

    @classmethod
    def read_network(cls, path: Path) -> Any:
        """Return the network that ``path`` names."""
        source = cls.find(path)
        if source.checkpoint is not None:
            return cls.read_checkpoint(source.checkpoint)[0]
        return cls.read_export(required(source.directory))

    @classmethod
    def export(cls, source: Path, out: Path | None, dtype: "torch.dtype") -> Path:
        network, step = cls.read_checkpoint(source)
        network.model.to(dtype)
        out = out or find_run(source, "SOURCE") / f"{NETWORK}-{step}"
        cls.write_export(network, out)
        return out

    def read(self, inputs: tuple[Path, ...]) -> list[list[Path]]:
        from shoal.data.images.files import image_files

        if not inputs:
            raise UsageError("no image is named: give image files, or folders of them")
        return [image_files(inputs)]

    def describe(self, data: list[Path]) -> str:
        return f"images       {len(data):,}"

    def check_evaluation(self, inputs: tuple[Path, ...]) -> list[str]:
        shards = ImageShards(self.settings.data, self.settings.split)
        return [f"images       {len(shards):,} of {self.settings.data}"]
