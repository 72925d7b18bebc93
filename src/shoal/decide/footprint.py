"""Estimates the memory of a worker: for dry runs, for the search of layouts, and for plans of other hosts.

Weights and gradients are fp32, whatever the precision of the computation. The optimizer's state depends on
its class. What the forward pass keeps was counted (:mod:`shoal.models.step_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

KERNEL_SHARED_BYTES = 128 << 10
"""Shared memory per block that a GPU needs for our kernels (:func:`shoal.attention.runs_kernels`)."""
_ONE_MOMENT = frozenset({"sgd", "lars", "novograd", "muon"})


class Numerics(StrEnum):
    """Precision and operators of a forward pass, on which the bytes that it keeps depend.

    In 16 bits, autocast on CPUs keeps other tensors than on GPUs. The kernels of attention, which are for 16
    bits, and of the losses of tokens keep fewer.
    """

    FP32 = "fp32"
    FP32_KERNELS = "fp32-kernels"
    BF16 = "bf16"
    BF16_KERNELS = "bf16-kernels"
    BF16_CPU = "bf16-cpu"
    FP16 = "fp16"
    FP16_KERNELS = "fp16-kernels"
    FP16_CPU = "fp16-cpu"

    @classmethod
    def of(cls, precision: str, *, is_cpu: bool, has_kernels: bool) -> Numerics:
        """Return those of a device, for ``fp32``, ``bf16`` or ``fp16``."""
        of_cpu = "" if precision == "fp32" else "-cpu"
        return cls(precision + (of_cpu if is_cpu else "-kernels" if has_kernels else ""))

    @property
    def precision(self) -> str:
        return self.partition("-")[0]

    @property
    def is_cpu(self) -> bool:
        return self.endswith("-cpu")

    @property
    def has_kernels(self) -> bool:
        return self.endswith("-kernels")

    @property
    def without_kernels(self) -> Numerics:
        """The same precision by torch's operators alone."""
        return Numerics(self.removesuffix("-kernels"))


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes that the forward pass of a micro-batch keeps for its backward pass, with some numerics."""

    sample_bytes: float
    """For each sample."""
    fixed_bytes: float = 0.0
    """For any number of samples: 16-bit copies of weights, and the gradient of the largest weight before it
    is added to the others of a step."""
    once_sample_bytes: float = 0.0
    """For each sample of one micro-batch, whatever stages divide: the layer that a backward pass computes
    again, and what its largest operation adds."""
    once_fixed_bytes: float = 0.0
    """The same, for any number of samples."""

    def of(self, num_samples: float, share: float = 1.0, num_micro_batches: int = 1) -> int:
        """Return the bytes of micro-batches of ``num_samples`` on a device with a share of the layers."""
        kept = share * (self.fixed_bytes + num_micro_batches * num_samples * self.sample_bytes)
        return round(kept + self.once_of(num_samples))

    def once_of(self, num_samples: float) -> float:
        """Return the bytes that are there for one micro-batch of ``num_samples`` at a time."""
        return self.once_fixed_bytes + num_samples * self.once_sample_bytes

    def with_recomputed(self, whole: Activations, num_layers: int) -> Activations:
        """Return these, of activation checkpointing, with the layer that the backward pass computes again.

        Args:
            whole: what is kept without checkpointing; both with what the largest operation adds ``apart``.
        """
        return replace(
            self,
            once_sample_bytes=self.once_sample_bytes
            + max(whole.sample_bytes - self.sample_bytes, 0.0) / num_layers,
            once_fixed_bytes=self.once_fixed_bytes
            + max(whole.fixed_bytes - self.fixed_bytes, 0.0) / num_layers,
        )


class CountedActivations(Mapping[Numerics, Activations]):
    """Activations by numerics, each counted when it is first looked up."""

    def __init__(self, count: Callable[[Numerics], Activations]) -> None:
        self._count = cache(count)

    def __getitem__(self, numerics: Numerics) -> Activations:
        return self._count(numerics)

    def __iter__(self) -> Iterator[Numerics]:
        return iter(Numerics)

    def __len__(self) -> int:
        return len(Numerics)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on a worker's device."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes

    def __str__(self) -> str:
        return (
            f"about {_size(self.total_bytes)} a worker: weights {_size(self.weights_bytes)}, gradients "
            f"{_size(self.gradients_bytes)}, optimizer {_size(self.optimizer_bytes)}, activations "
            f"{_size(self.activations_bytes)}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def optimizer_state_bytes(optimizer: str) -> float:
    """Return the bytes of state that an optimizer keeps for each parameter, in fp32.

    Adafactor keeps a row and a column of a matrix, next to nothing; SGD, LARS, NovoGrad and Muon keep one
    moment of a weight, others two.

    Example:
        >>> optimizer_state_bytes("lamb"), optimizer_state_bytes("sgd")
        (8.0, 4.0)
    """
    if optimizer == "adafactor":
        return 0.04
    return 4.0 if optimizer in _ONE_MOMENT else 8.0
