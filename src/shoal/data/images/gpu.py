"""Decodes and augments images on the GPU; the host only reads their bytes.

``EncodedReader`` reads batches of encoded images in the same order as ``reader.ImageReader``.
``GpuTransform`` decodes a batch (torchvision's ``decode_jpeg``: nvJPEG on a CUDA device, libjpeg on the CPU,
so that tests take the same path), and crops, resizes, mirrors, lights, normalises and erases it as
``transform.TrainTransform`` does, with the same draws. Images that nvJPEG cannot decode (CMYK, other formats)
are decoded on the host. Colours are not jittered. ``DecodedAhead`` runs it in a thread and on a stream of its
own.

Not measured: it was compared with the CPU's path on a machine without a GPU.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from shoal.data.images.augment import JITTERS, AugmentConfig, Draws, Key, draws
from shoal.data.images.headers import JPEG_BEGIN, BadImage, check_jpeg
from shoal.data.images.reader import ShardReader
from shoal.data.images.shards import ImageShards
from shoal.data.images.transform import decode, normalisation
from shoal.data.loader import Batch, BatchStream, in_thread
from shoal.data.sources import ReaderSource
from shoal.data.steps import DataShard, example_names
from shoal.env.machine import runs_triton
from shoal.errors import ShoalError, UsageError


class EncodedReader(ShardReader):
    """Reads encoded images, for ``loader.streamed_steps``. Picklable."""

    def __init__(self, shards: ImageShards, *, seed: int) -> None:
        super().__init__(shards, seed)
        self.example_tokens = shards.num_image_bytes // len(shards)

    @property
    def example_bytes(self) -> int:
        """Mean bytes of an encoded image."""
        return self.example_tokens

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the images ``indices``: ``encoded`` (objects, ``[B]``); the rest as ``ImageReader`` does.

        Raises:
            ShoalError: a shard cannot be read.
        """
        epochs_, indices_ = example_names(epochs, indices)
        self.shards.will_need(indices_.tolist())
        encoded = np.empty(len(indices_), dtype=object)
        for row, index in enumerate(indices_.tolist()):
            encoded[row] = self.shards.read(index)
        return {
            "encoded": encoded,
            "labels": self.shards.labels[indices_],
            "replaced": np.zeros(len(indices_), dtype=bool),
            "epoch": epochs_,
            "index": indices_,
        }

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return ``encoded`` as uint8 ``[sum of lengths]``, ``lengths`` int64 ``[B]``, and the rest."""
        encoded = arrays["encoded"].tolist()
        return {
            **arrays,
            "encoded": np.frombuffer(bytearray().join(encoded), dtype=np.uint8),
            "lengths": np.array([len(image) for image in encoded], dtype=np.int64),
        }


class GpuTransform:
    """Turns batches of an ``EncodedReader`` into training images, on the device."""

    def __init__(self, config: AugmentConfig, *, seed: int, device: torch.device) -> None:
        """Augment as ``config`` describes.

        Raises:
            UsageError: ``config`` jitters colours, blurs or pads crops, or torchvision was built without
                nvJPEG.
        """
        refused = [f"{name} {getattr(config, name)}" for name in (*JITTERS, "blur") if getattr(config, name)]
        if config.crop == "padded":
            refused.append(f"crop {config.crop!r}")
        if refused:
            raise UsageError(
                f"{refused[0]} is not done on the device: leave it out, or set data.decode 'host'"
            )
        self.config, self.seed, self.device = config, seed, device
        self._probe()
        self.num_refused = 0
        """JPEGs that the device's decoder refused, decoded on the host instead."""
        scale, shift = normalisation(config.mean, config.std)
        self.factors = torch.tensor(scale, device=device), torch.tensor(shift, device=device)
        """Scale and shift of pixels from 0 to 255, by channel."""

    def _probe(self) -> None:
        """Decode one image, so that a decoder that is missing is found before the run."""
        from PIL import Image

        file = io.BytesIO()
        Image.new("RGB", (16, 16)).save(file, "JPEG")
        try:
            decode_on(self.device, [torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)])
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise UsageError(
                f"data.decode device: torchvision cannot decode a JPEG on {self.device} ({text}); install a "
                "torchvision with nvJPEG, or set data.decode 'host'"
            ) from None

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the images of a batch, float32 ``[B, 3, S, S]`` on the device.

        Raises:
            ShoalError: an image cannot be decoded; it is named by its index.
            torch.OutOfMemoryError: the device has no memory for the pixels.
        """
        keys = [
            (self.seed, *names)
            for names in zip(batch["epoch"].tolist(), batch["index"].tolist(), strict=True)
        ]
        size = max(self.config.size_at(epoch) for _, epoch, _ in keys)
        encoded = torch.split(batch["encoded"], batch["lengths"].tolist())
        images = self._decoded(encoded, keys)
        drawn = [
            draws(self.config, key, image.shape[1], image.shape[2], size)
            for image, key in zip(images, keys, strict=True)
        ]
        if not runs_triton(self.device.type):
            return self.finished(images, drawn, size)
        from shoal.data.images.crop_kernel import augmented  # Triton is loaded where it is needed

        made = torch.empty(len(keys), 3, size, size, device=self.device, memory_format=torch.channels_last)
        augmented(images, drawn, made, *self.factors)
        return made

    def finished(self, images: Sequence[Tensor], drawn: Sequence[Draws], size: int) -> Tensor:
        """Return decoded images as ``drawn`` says, by torch's operations: ``[B, 3, size, size]``."""
        light = torch.tensor([one.light for one in drawn]).view(-1, 3, 1, 1) * 255.0
        scale, shift = (factor.view(3, 1, 1) for factor in self.factors)
        crops = [self._cropped(image, one, size) for image, one in zip(images, drawn, strict=True)]
        made = (torch.stack(crops) + light.to(self.device)) * scale + shift
        for image, one in zip(made, drawn, strict=True):
            if (box := one.erased) is not None:
                image[:, box.top : box.top + box.height, box.left : box.left + box.width] = 0
        return made

    def _cropped(self, image: Tensor, drawn: Draws, size: int) -> Tensor:
        box = drawn.crop
        crop = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width].float()
        pixels = interpolate(crop, (size, size), mode="bilinear", antialias=True)[0].round_().clamp_(0, 255)
        return pixels.flip(2) if drawn.flip else pixels

    def _decoded(self, encoded: Sequence[Tensor], keys: Sequence[Key]) -> list[Tensor]:
        """Return uint8 ``[3, H, W]`` each, on the device; what its decoder refuses is decoded on the host."""
        jpegs = [index for index, data in enumerate(encoded) if _is_jpeg(data)]
        try:
            on_device: list[Any] = decode_on(self.device, [encoded[index] for index in jpegs])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # one image makes the whole call fail
            on_device = [self._decoded_alone(encoded[index], keys[index]) for index in jpegs]
        images: dict[int, Tensor | None] = dict(zip(jpegs, on_device, strict=True))
        decoded = []
        for index, (data, key) in enumerate(zip(encoded, keys, strict=True)):
            image = images.get(index)
            decoded.append(self._decoded_here(data, key) if image is None else image)
        return decoded

    def _decoded_alone(self, data: Tensor, key: Key) -> Tensor | None:
        """Return an image, or ``None`` where the device's decoder refuses it, which is reported once."""
        try:
            return decode_on(self.device, [data])[0]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self.num_refused:
                text = str(error).partition("\n")[0]
                sys.stderr.write(
                    f"image {key[2]} of the split is decoded on the host, as are others of its kind, which "
                    f"is slower: {text}\n"
                )
            self.num_refused += 1
            return None

    def _decoded_here(self, data: Tensor, key: Key) -> Tensor:
        try:
            pixels = decode(data.numpy().tobytes())
        except ShoalError as error:
            raise ShoalError(f"image {key[2]} of the split: {error}") from None
        return torch.from_numpy(pixels).permute(2, 0, 1).to(self.device)


class StreamDevice(Protocol):
    """A device with streams, as :class:`DecodedAhead` uses it."""

    def current_stream(self) -> Any:
        """Return the stream of the calling thread; it has ``wait_event(event)``."""

    def new_stream(self) -> Any:
        """Return another stream; it has ``record_event()``."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread queues its work on ``stream``."""

    def lend(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of ``tensor`` until what ``stream`` has queued at its release is done."""


class _Gpu:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def lend(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)


def streams_of(device: torch.device) -> StreamDevice | None:
    """Return the streams of a GPU; of a CPU there are none."""
    return _Gpu(device) if device.type == "cuda" else None


class DecodedAhead:
    """Steps of a source of encoded images, whose images a thread decodes on a stream of its own.

    Kernels of training run meanwhile; their stream waits for the images that it uses.
    """

    def __init__(
        self, source: ReaderSource, transform: Callable[[Batch], Tensor], streams: StreamDevice | None
    ) -> None:
        """Decode ahead.

        Args:
            source: of encoded images.
            transform: makes the images of a batch.
            streams: of its device; ``None`` for a CPU.
        """
        self.reader, self._source, self._transform = source.reader, source, transform
        self._streams = streams
        self._stream: Any = None if streams is None else streams.new_stream()

    def names(self, shard: DataShard, step: int) -> list[str]:
        """Return what the source does."""
        return self._source.names(shard, step)

    def open(self, shard: DataShard, steps: range, *, pin_memory: bool = False) -> BatchStream[Any]:
        """Return the source's stream, whose micro-batches are for :meth:`images_of`."""
        encoded = self._source.open(shard, steps, pin_memory=pin_memory)
        made = in_thread(self._make, chain.from_iterable(encoded))

        def by_step() -> Iterator[Iterator[Batch]]:
            for _ in steps:
                own = islice(made, shard.num_micro_batches)
                yield own
                deque(own, maxlen=0)  # those of a step that was not taken

        return BatchStream(by_step(), [*made.pools, *encoded.pools])

    def images_of(self, batch: Batch) -> Tensor:
        """Return the images of a micro-batch, for work that is queued from now on; others are made here."""
        if "images" not in batch:
            return self._transform(batch)
        images: Tensor = batch["images"]
        if self._streams is not None:
            current = self._streams.current_stream()
            current.wait_event(batch["decoded"])
            self._streams.lend(images, current)
        return images

    def _make(self, batch: Batch) -> dict[str, Any]:
        rest = {name: value for name, value in batch.items() if name not in ("encoded", "lengths")}
        if self._streams is None:
            return {**rest, "images": self._transform(batch)}
        with self._streams.on(self._stream):
            images = self._transform(batch)
        return {**rest, "images": images, "decoded": self._stream.record_event()}


def decode_on(device: torch.device, encoded: list[Tensor]) -> list[Tensor]:
    """Return the pixels uint8 ``[3, H, W]`` of JPEGs, on ``device``.

    Raises:
        RuntimeError: the decoder refuses one of them (torch.OutOfMemoryError: the device is out of memory).
    """
    from torchvision.io import decode_jpeg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision: the argument device is in beta
        images: list[Tensor] = decode_jpeg(encoded, mode="RGB", device=device) if encoded else []
    return images


def _is_jpeg(data: Tensor) -> bool:
    """Return whether an image is a JPEG of an allowed size; the host reports problems of others."""
    encoded = data.numpy().tobytes()
    try:
        check_jpeg(encoded)
    except BadImage:
        return False
    return encoded.startswith(JPEG_BEGIN)
