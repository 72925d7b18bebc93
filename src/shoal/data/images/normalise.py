"""Normalises images on the device that were copied to it as bytes, a quarter of their floats."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.data.images.augment import IMAGENET_MEAN, IMAGENET_STD
from shoal.data.images.pixels import Triple
from shoal.data.images.transform import normalisation


class Normalisation:
    """Turns uint8 images into the float32 ones that :mod:`shoal.data.images.transform` makes on the host.

    The bits are the same: the native pass multiplies and adds in fp32 without fusing, and so does this.

    Args:
        device: of the images.
        mean: subtracted from red, green and blue, for values from 0 to 1.
        std: divisors after the subtraction.
    """

    def __init__(
        self, device: torch.device, *, mean: Triple = IMAGENET_MEAN, std: Triple = IMAGENET_STD
    ) -> None:
        scale, shift = (torch.tensor(values).view(1, 3, 1, 1) for values in normalisation(mean, std))
        self._scale, self._shift = scale.to(device), shift.to(device)

    def __call__(
        self, pixels: Tensor, sizes: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the images in the memory format of ``pixels``, rounded to ``dtype``.

        Args:
            pixels: uint8 ``[B, 3, H, W]``.
            sizes: int64 ``[B, 2]``: height and width of each image within its padding, which becomes 0;
                default: there is none.
            dtype: of the result.
        """
        made = pixels.float().mul_(self._scale).add_(self._shift)
        if sizes is not None:
            rows, columns = (
                torch.arange(side, device=pixels.device)[None] < sizes[:, k, None]
                for k, side in enumerate(pixels.shape[2:])
            )
            made.masked_fill_((rows[:, None, :, None] & columns[:, None, None, :]).logical_not_(), 0.0)
        return made.to(dtype)
