"""Tests where the images of a worker are decoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.env.machine import num_cores
from shoal.recipes import images
from shoal.recipes.images import ImageDataConfig


def decoders(device: str, num_local: int, **settings: Any) -> tuple[int, int]:
    """Return the loader processes of a worker, and the threads of each (or of the worker)."""
    world: Any = SimpleNamespace(
        device=torch.device(device), ranks=SimpleNamespace(num_local_workers=num_local)
    )
    data = ImageDataConfig(**settings)
    num_processes = images.loader_processes(data, world)
    return num_processes, images.decode_threads(data, world, num_processes)


@pytest.mark.parametrize(("num_local", "share"), [(1, 16), (3, 5), (5, 3), (16, 1), (32, 1)])
def test_a_gpu_s_worker_leaves_decoding_to_processes(
    monkeypatch: pytest.MonkeyPatch, num_local: int, share: int
) -> None:
    monkeypatch.setattr("shoal.data.images.reader.num_cores", lambda: 16)
    assert decoders("cuda", num_local) == (share - 1, 1)
    assert decoders("cpu", num_local) == (0, share)


def test_what_the_settings_say_is_done() -> None:
    assert decoders("cuda", 1, loader_processes=0) == (0, num_cores())
    assert decoders("cuda", 1, decode_threads=3) == (0, 3)
    assert decoders("cuda", 1, decode_threads=3, loader_processes=2) == (2, 3)
    assert decoders("cpu", 1, loader_processes=2) == (2, max(1, num_cores() // 2))
