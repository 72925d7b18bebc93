"""Tests where the images of a worker are decoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.recipes import images
from shoal.recipes.images import ImageDataConfig


def decoders(device: str, cores: int, **settings: Any) -> tuple[int, int]:
    """Return the loader processes of a worker, and the threads of each (or of the worker)."""
    world: Any = SimpleNamespace(device=torch.device(device), cores=cores)
    data = ImageDataConfig(**settings)
    num_processes = images.loader_processes(data, world)
    return num_processes, images.decode_threads(data, world, num_processes)


@pytest.mark.parametrize("share", [16, 5, 3, 1])
def test_a_gpu_s_worker_leaves_decoding_to_processes(share: int) -> None:
    assert decoders("cuda", share) == (share - 1, 1)
    assert decoders("cpu", share) == (0, share)


def test_what_the_settings_say_is_done() -> None:
    assert decoders("cuda", 7, loader_processes=0) == (0, 7)
    assert decoders("cuda", 1, decode_threads=3) == (0, 3)
    assert decoders("cuda", 1, decode_threads=3, loader_processes=2) == (2, 3)
    assert decoders("cpu", 7, loader_processes=2) == (2, 3)
    assert decoders("cpu", 1, loader_processes=2) == (2, 1)
