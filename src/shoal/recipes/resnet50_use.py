"""Classifies images with a trained network: ``shoal predict resnet50``."""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.errors import UsageError
from shoal.recipes import images, using
from shoal.recipes.using import PredictConfig, Row
from shoal.train.config import REQUIRED

if TYPE_CHECKING:
    from shoal.train.gradients import Precision
    from shoal.train.world import Float32Array, World


@dataclass(frozen=True, kw_only=True)
class Predict(PredictConfig):
    """The network, and how images are classified."""

    model: Annotated[Path, Parameter(group=REQUIRED)]
    """A run of `shoal train resnet50`, one of its checkpoints, or a directory that `shoal export` wrote."""
    mirror: bool | None = None
    """Average the logits of each image and its mirror image; default: as in training."""
    top: int = 5
    """Classes to list for each image, the likeliest first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 1:
            raise UsageError(f"--top {self.top} must be at least 1")


def check_prediction(what: Predict, inputs: tuple[Path, ...]) -> list[str]:
    """Check what can be checked without torch; return the lines of a dry run.

    Raises:
        UsageError: no network, no image, or a folder that is not there.
    """
    images.find_network(what.model)
    if not inputs:
        raise UsageError("no image is named: give image files, or folders of them")
    using.check_out(what.out)
    return [f"images       {len(_files(inputs)):,}"]


def _files(inputs: tuple[Path, ...]) -> list[Path]:
    from shoal.data.images.files import image_files

    return image_files(inputs)


def predict(what: Predict, inputs: tuple[Path, ...], world: "World", precision: "Precision") -> Iterator[Row]:
    """Yield a row for each image, on the first worker; all workers call it.

    Raises:
        UsageError: a file is no image, or the model no residual network.
        ShoalError: the network's files are damaged.
    """
    import numpy as np
    import torch

    from shoal.data.images.files import FileReader
    from shoal.data.images.reader import default_decode_threads
    from shoal.data.images.transform import CentreTransform
    from shoal.recipes.resnet50_export import read_network
    from shoal.recipes.resnet50_score import image_logits
    from shoal.train.world import gather_rows, infer

    network, files = read_network(what.model), _files(inputs)
    model = network.model.to(world.device).to(memory_format=torch.channels_last).eval()
    mirror = network.mirror if what.mirror is None else what.mirror
    centre = CentreTransform(network.size, network.resize, mean=network.mean, std=network.std)
    reader = FileReader(files, centre, threads=default_decode_threads(world.place.num_local_workers))

    def logits_of(batch: Any) -> torch.Tensor:
        return image_logits(model, batch["images"], precision, mirror=mirror).cpu()

    batches = images.shared_batches(reader, world, what.batch_size)
    own = [torch.empty(0, len(network.classes)), *infer(logits_of, batches, world.device)]
    cuts = np.array_split(np.arange(len(files)), range(what.batch_size, len(files), what.batch_size))
    rows = [
        np.concatenate([np.empty(0, dtype=np.int64), *cuts[rank :: world.num_workers]])
        for rank in range(world.num_workers)
    ]
    logits = gather_rows(world, torch.cat(own), rows)
    if logits is not None:
        yield from _rows(files, network.classes, logits, what.top)


def _rows(files: list[Path], classes: tuple[str, ...], logits: "Float32Array", top: int) -> Iterator[Row]:
    chances: Any = using.probabilities(logits)
    for path, row, own in zip(files, logits, chances, strict=True):
        best = (-row).argsort(kind="stable")[:top].tolist()
        listed = [{"label": classes[label], "probability": float(own[label])} for label in best]
        yield {"image": str(path), **listed[0], "top": listed}
