"""Sends CPU tensors the way of CUDA tensors, on a runtime of CUDA whose streams are threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from benchmarks.memory_device import MemoryDevice

from shoal.comm.backend import ShoalProcessGroup
from shoal.comm.device_group import DeviceGroup
from shoal.comm.native_group import python_group

PYTHON_GROUP = {"SHOAL_NATIVE_GROUP": "0"}
"""Environment of the workers: with the native group CPU tensors do not pass through Python."""


def small_pieces(group: Any = None, num_bytes: int = 4 * 128, num_buffers: int = 2) -> None:
    """Let tensors of a few kilobytes travel in several chunks, through few buffers."""
    group = python_group(group or dist.group.WORLD)
    options = replace(group.member.options, staging_bytes=num_bytes, staging_buffers=num_buffers)
    group.member = replace(group.member, options=options)


@contextmanager
def staged(identity: str | None = None, group: Any = None, seed: int | None = None) -> Iterator[DeviceGroup]:
    """Send what is begun inside through staging. The device is made at the first use and stays.

    Args:
        seed: delays the device's streams at random.
    """
    group = group or dist.group.WORLD
    device = MemoryDevice(identity=identity, seed=seed)
    group.devices["cpu"] = lambda _: device
    try:
        device_group: DeviceGroup = group._device_group(device.torch_device)
        yield device_group
    finally:
        del group.devices["cpu"]


def stage_all(num_bytes: int | None = None, seed: int | None = None) -> None:
    """Send what this process begins from now on through staging, in all groups in Python, also later ones.

    Args:
        num_bytes: of a buffer; default: the options'.
        seed: delays the devices' streams at random.
    """
    begin = ShoalProcessGroup.__init__

    def open_group(self: ShoalProcessGroup, *args: Any, **given: Any) -> None:
        begin(self, *args, **given)
        self.devices["cpu"] = lambda _: MemoryDevice(seed=seed)

    ShoalProcessGroup.__init__ = open_group  # type: ignore[method-assign]
    world = python_group(dist.group.WORLD)
    world.devices["cpu"] = lambda _: MemoryDevice(seed=seed)
    if num_bytes is not None:
        small_pieces(world, num_bytes, 3)


def device_of(side: DeviceGroup) -> MemoryDevice:
    device = side._device
    assert isinstance(device, MemoryDevice)
    return device
