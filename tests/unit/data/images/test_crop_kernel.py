"""The kernel for a batch of images against torch's resize of one: Triton's interpreter runs it on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interpreted import run_in_interpreter
from shoal.data.images.augment import AugmentConfig, Draws, draws
from shoal.data.images.gpu import GpuTransform

SIZE = 24


def an_image(number: int, height: int, width: int) -> Tensor:
    """Noise or a slope; every second one as the host decodes, with the channels side by side."""
    random = torch.Generator().manual_seed(number)
    noise = torch.randint(0, 256, (height, width, 3), generator=random, dtype=torch.uint8)
    slope = torch.arange(width * 3).view(width, 3) * 255 // (3 * width)
    pixels = slope.to(torch.uint8).expand(height, -1, -1).contiguous() if number % 3 == 0 else noise
    image = pixels.permute(2, 0, 1)
    return image if number % 2 else image.contiguous()


def check(options: dict[str, Any], area: tuple[float, float]) -> None:
    """Larger and smaller crops than the result, mirrored, lit and erased; the last channel layouts."""
    from shoal.data.images.crop_kernel import augmented

    config = AugmentConfig(size=SIZE, area=area, **options)
    transform = GpuTransform(config, seed=5, device=torch.device("cpu"))
    sides = [(150, 90), (31, 47), (24, 24), (7, 100), (60, 9)]
    images = [an_image(number, *each) for number, each in enumerate(sides)]
    drawn: list[Draws] = [draws(config, (5, 0, number), *each, SIZE) for number, each in enumerate(sides)]
    assert len({one.flip for one in drawn}) == 2
    wanted = transform.finished(images, drawn, SIZE)
    for layout, dtype in ((torch.channels_last, torch.float32), (torch.contiguous_format, torch.bfloat16)):
        found = torch.full((len(sides), 3, SIZE, SIZE), torch.nan, dtype=dtype).contiguous(
            memory_format=layout
        )
        augmented(images, drawn, found, *transform.factors)
        level = transform.factors[0].view(3, 1, 1)
        difference = (found.float() - wanted).abs() / level
        if dtype == torch.float32:  # sums in another order may round a pixel to the next level
            assert difference.max() <= 1.001 and (difference > 0.01).float().mean() < 2e-3
        else:
            assert ((found.float() - wanted).abs() <= 2**-7 * wanted.abs() + 1.01 * level).all()


def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


if __name__ == "__main__":
    check({"lighting": 0.1, "erase": 0.6}, (0.3, 1.0))
    check({}, (0.08, 0.3))
