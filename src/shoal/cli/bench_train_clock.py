"""What ``shoal bench train`` measures of any recipe: its steps, and the device that they run on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shoal.bench.step_timing import TrainBench, TrainResult

if TYPE_CHECKING:
    import torch

    from shoal.train.clock import StepClock
    from shoal.train.world import World

_MATMUL_SIDE = {"cpu": 1024, "cuda": 8192}
_MATMUL_S = 0.3


def timed(
    steps: Iterator[None], clock: StepClock, what: TrainBench
) -> tuple[tuple[float, ...], dict[str, float]]:
    """Take the steps; return the seconds of each timed one, and their mean by part."""
    for _ in range(what.warm_up):
        next(steps)
    clock.reset()
    samples_s = []
    for _ in range(what.steps):
        before = clock.total_s
        next(steps)
        samples_s.append(clock.total_s - before)
    steps.close()  # type: ignore[attr-defined]
    return tuple(samples_s), clock.parts_s()


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of one large square product: the best of some tenths of a second."""
    import torch

    side = _MATMUL_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def product_s() -> float:
        begin_s = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin_s

    best, begin_s = product_s(), time.perf_counter()
    while time.perf_counter() - begin_s < _MATMUL_S:
        best = min(best, product_s())
    return 2 * side**3 / best


def result_of(
    world: World,
    *,
    name: str,
    sequence_length: int,
    num_parameters: int,
    global_batch: int,
    micro_batch: int,
    precision: str,
    samples_s: Sequence[float],
    parts_s: dict[str, float],
    flops: float,
    unit: str = "sequences",
) -> TrainResult:
    """Return what was measured, with the worker's device, its memory and what a product reaches there."""
    import torch

    from shoal.train.window import peak_memory_bytes

    device = world.device
    cpu = f"CPU ({torch.get_num_threads()} threads)"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return TrainResult(
        recipe=name,
        sequence_length=sequence_length,
        num_parameters=num_parameters,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        num_devices=world.num_workers,
        precision=precision,
        global_batch=global_batch,
        micro_batch=micro_batch,
        unit=unit,
        samples_s=tuple(samples_s),
        parts_s=parts_s,
        peak_memory_bytes=peak_memory_bytes(device),
        flops_per_sample=flops,
        matmul_flops_per_s=matmul_flops_per_s(device, dtype),
    )
