"""Defines the options of ``shoal bench train`` and writes its result as a table and as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal import formatting
from shoal.bench.comm_results import time_text
from shoal.errors import UsageError

KIND = "shoal bench train"
"""Value of ``kind`` in the files."""


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """Options of ``shoal bench train``."""

    batch: int | None = None
    """Samples per worker and micro-batch; default: the recipe's. With --fill-memory: no more than these."""
    accumulate: int | None = None
    """Micro-batches per optimizer step; default: 1, of a pipeline 4 per stage."""
    steps: int = 5
    """Timed steps."""
    warm_up: int = 2
    """Steps before the timed ones."""
    json: Path | None = None
    """File for the result; `shoal plan --measured` reads it."""
    fill_memory: bool = False
    """Find the largest micro-batch that leaves a tenth of the memory free, and time that one."""
    memory: str | None = None
    """With --fill-memory: memory of a worker, such as 8GB; default: its GPU's."""
    trace: Path | None = None
    """File for a trace of two more steps, for Perfetto (.json or .json.gz); prints their time by kernel."""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("accumulate", 1), ("steps", 1), ("warm_up", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        if self.memory is not None and not self.fill_memory:
            raise UsageError(f"--memory {self.memory} is the limit of --fill-memory: give that too")


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Timing of some optimizer steps of a recipe, after warm-up."""

    recipe: str
    """Recipe and preset, as named by the planner: ``albert-base``."""
    sequence_length: int
    """1 for images."""
    num_parameters: int
    device: str
    num_devices: int
    precision: str
    global_batch: int
    micro_batch: int
    """Samples per device."""
    samples_s: tuple[float, ...]
    """Seconds of each step; on a GPU means of as many as divide the warm-up and the timed ones."""
    parts_s: dict[str, float]
    """Mean seconds per step and part; their sum is the mean step."""
    parts_apart_s: dict[str, float] | None = None
    """On a GPU the same of later steps that wait for it after each part: what its work takes by itself."""
    peak_memory_bytes: int
    """Peak of the main worker: allocated by torch on a GPU, else resident memory of the process."""
    counted_memory_bytes: int | None = None
    """Memory of the main worker as dry runs and plans count it, without the process and its libraries."""
    alloc_retries: int | None = None
    """Times that torch freed its cache on the main worker's GPU, which take long."""
    flops_per_sample: float
    """Matrix products of forward and backward for one sample; a multiply-add counts as two."""
    unit: str = "sequences"
    """Plural name of the samples."""
    matmul_flops_per_s: float
    """Of one large matrix product in the same precision; the reference of utilisation."""
    peak_flops_per_s: float | None = None
    """Of the device by its data sheet, in the same precision; the reference of MFU."""
    device_memory_bytes: int | None = None
    """Of a GPU."""
    num_stages: int = 1
    """Devices that hold a part of the model each."""

    @property
    def step_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.step_s

    @property
    def flops_per_s(self) -> float:
        """Per device."""
        return self.samples_per_s * self.flops_per_sample / self.num_devices

    @property
    def utilisation(self) -> float:
        return self.flops_per_s / self.matmul_flops_per_s

    @property
    def mfu(self) -> float | None:
        """Share of the device's peak that the model's own FLOPs reach."""
        return self.flops_per_s / self.peak_flops_per_s if self.peak_flops_per_s else None

    def lines(self) -> list[str]:
        """Return the result as text."""
        replicas = self.num_devices // self.num_stages
        accumulation = self.global_batch // (self.micro_batch * replicas)
        tokens = f" of {self.sequence_length} tokens" if self.unit == "sequences" else ""
        peak = f"the data sheet's {(self.peak_flops_per_s or 0) / 1e12:.4g} TFLOP/s"
        copies = f"{self.num_devices} devices"
        if self.num_stages > 1:
            copies = f"{replicas} × a pipeline of {self.num_stages}"
        retries = f", the allocator freed its cache {self.alloc_retries} times" if self.alloc_retries else ""
        counted = formatting.size(self.counted_memory_bytes) if self.counted_memory_bytes else ""
        spread = f"{time_text(min(self.samples_s))} to {time_text(max(self.samples_s))}"
        return [
            f"{self.recipe}, {self.num_parameters:,} parameters, {self.unit}{tokens}, {self.precision}, on "
            f"{self.num_devices} × {self.device}",
            f"  batch         {self.micro_batch} {self.unit} × {accumulation} × {copies} = "
            f"{self.global_batch:,}",
            f"  step          {time_text(self.step_s)}, median of {len(self.samples_s)} ({spread}): "
            f"{1 / self.step_s:.4g} steps/s",
            f"  throughput    {self.samples_per_s:.4g} {self.unit}/s",
            f"  time          {_shares(self.parts_s)}",
            *([] if self.parts_apart_s is None else [f"  with waits    {_shares(self.parts_apart_s)}"]),
            f"  peak memory   {formatting.size(self.peak_memory_bytes)}{retries}",
            *([f"  by count      {counted}: weights, gradients, optimizer, activations"] if counted else []),
            f"  FLOPs         {self.flops_per_sample / 1e9:,.4g} GFLOP per sample, "
            f"{self.flops_per_s / 1e12:.4g} TFLOP/s per device",
            f"  utilisation   {100 * self.utilisation:.1f} % of the "
            f"{self.matmul_flops_per_s / 1e12:.4g} TFLOP/s of one large matrix product here",
            *([] if self.mfu is None else [f"  MFU           {100 * self.mfu:.1f} %, of {peak}"]),
        ]

    def write(self, path: Path) -> None:
        """Write the result as JSON, for ``shoal plan --measured``."""
        whole = {"kind": KIND, **asdict(self), "samples_per_s": self.samples_per_s, "mfu": self.mfu}
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _shares(parts_s: dict[str, float]) -> str:
    """Return the shares of a step's parts in words, without the smallest."""
    step_s = sum(parts_s.values()) or 1.0
    shares = {name: 100 * seconds / step_s for name, seconds in parts_s.items()}
    return ", ".join(f"{name} {share:.0f} %" for name, share in shares.items() if share >= 0.5)
