"""Decodes and augments images on the GPU; the host only reads their bytes.

``EncodedReader`` reads batches of encoded images in the same order as ``reader.ImageReader``.
``GpuTransform`` decodes a batch (torchvision's ``decode_jpeg``: nvJPEG on a CUDA device, libjpeg on the CPU,
so that tests take the same path), and crops, resizes, mirrors, lights, normalises and erases it as
``transform.TrainTransform`` does, with the same draws. Images that nvJPEG cannot decode (CMYK, other formats)
are decoded on the host. Colours are not jittered.

Not measured: it was compared with the CPU's path on a machine without a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from shoal.data.images.augment import JITTERS, AugmentConfig, Key, draws
from shoal.data.images.headers import BadImage, check_jpeg
from shoal.data.images.reader import ShardReader
from shoal.data.images.shards import ImageShards
from shoal.data.images.transform import decode, normalisation
from shoal.data.steps import example_names
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
            UsageError: ``config`` jitters colours or pads crops.
        """
        refused = [f"{name} {getattr(config, name)}" for name in JITTERS if getattr(config, name)]
        if config.crop == "padded":
            refused.append(f"crop {config.crop!r}")
        if refused:
            raise UsageError(
                f"{refused[0]} is not done on the device: leave it out, or set data.decode 'host'"
            )
        self.config, self.seed, self.device = config, seed, device
        scale, shift = normalisation(config.mean, config.std)
        self._scale, self._shift = (
            torch.tensor(x, device=device).reshape(1, 3, 1, 1) for x in (scale, shift)
        )

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the images of a batch, float32 ``[B, 3, S, S]`` on the device.

        Raises:
            ShoalError: an image cannot be decoded; it is named by its index.
        """
        keys = [
            (self.seed, *names)
            for names in zip(batch["epoch"].tolist(), batch["index"].tolist(), strict=True)
        ]
        size = max(self.config.size_at(epoch) for _, epoch, _ in keys)
        encoded = torch.split(batch["encoded"], batch["lengths"].tolist())
        made = [
            self._cropped(image, key, size)
            for image, key in zip(self._decoded(encoded, keys), keys, strict=True)
        ]
        return torch.stack(made)

    def _cropped(self, image: Tensor, key: Key, size: int) -> Tensor:
        drawn = draws(self.config, key, image.shape[1], image.shape[2], size)
        box = drawn.crop
        crop = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width].float()
        pixels = interpolate(crop, (size, size), mode="bilinear", antialias=True).round_().clamp_(0, 255)
        if drawn.flip:
            pixels = pixels.flip(3)
        light = torch.tensor(drawn.light, device=self.device).reshape(1, 3, 1, 1) * 255.0
        made = ((pixels + light) * self._scale + self._shift)[0]
        if (box_ := drawn.erased) is not None:
            made[:, box_.top : box_.top + box_.height, box_.left : box_.left + box_.width] = 0
        return made

    def _decoded(self, encoded: Sequence[Tensor], keys: Sequence[Key]) -> list[Tensor]:
        """Return uint8 ``[3, H, W]`` each, on the device; decode one by one on the host if nvJPEG fails."""
        from torchvision.io import decode_jpeg

        try:
            for data in encoded:
                check_jpeg(data.numpy().tobytes())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torchvision: the argument device is in beta
                images: list[Tensor] = decode_jpeg(list(encoded), mode="RGB", device=self.device)
            return images
        except (BadImage, RuntimeError, ValueError):
            return [self._decoded_here(data, key) for data, key in zip(encoded, keys, strict=True)]

    def _decoded_here(self, data: Tensor, key: Key) -> Tensor:
        try:
            pixels = decode(data.numpy().tobytes())
        except ShoalError as error:
            raise ShoalError(f"image {key[2]} of the split: {error}") from None
        return torch.from_numpy(pixels).permute(2, 0, 1).to(self.device)
