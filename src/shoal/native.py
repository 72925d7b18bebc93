"""Wraps the C++ core with types, checks and errors. Imports neither torch nor NumPy.

Buffers are NumPy arrays, CPU tensors of torch, or any object with the buffer protocol or DLPack
(``bytearray``, ``memoryview`` of shared memory).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import ShoalError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

DType = Literal["float32", "bfloat16", "float16"]
Level = Literal["portable", "avx2", "avx512"]
Buffer = Any
"""An object with the buffer protocol or ``__dlpack__``: the two have no common type."""

_loaded: ModuleType | None = None
_why_missing = ""
try:
    _loaded = import_module("shoal._core")
except ImportError as error:
    _why_missing = str(error)


def core() -> ModuleType:
    """Return the compiled extension.

    Raises:
        ShoalError: the extension was not built, or not for this Python.
    """
    if _loaded is None:
        raise ShoalError(
            f"shoal's native core cannot be loaded ({_why_missing}); reinstall shoal where a C++20 compiler "
            "(g++ or clang++) is found, and see `shoal doctor`"
        )
    return _loaded


def is_built() -> bool:
    """Return whether the compiled extension is available."""
    return _loaded is not None


def cpu_features() -> dict[str, bool]:
    """Return the instruction sets that this processor supports, of avx2, f16c, avx512f and avx512_bf16.

    Empty on processors other than x86-64.

    Raises:
        ShoalError: the native core is missing.
    """
    return dict(core().cpu_features())


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """State of libfabric on this machine.

    Attributes:
        built: whether this core was built with it.
        version: version of the library, empty if not found.
        problem: reason for which it cannot be loaded, or empty.
        providers: for each provider that backend shoal can use, the reason for which it cannot be opened, or
        empty.
    """

    built: bool
    version: str
    problem: str
    providers: dict[str, str]


def fabric(address: str) -> Fabric:
    """Open and close an endpoint of each libfabric provider at an IPv4 address.

    Raises:
        ShoalError: the native core is missing.
    """
    built, version, problem, providers = core().fabric_state(address)
    return Fabric(built=built, version=version, problem=problem, providers=dict(providers))


def simd_levels() -> tuple[Level, ...]:
    """Return the kernel levels that this machine supports, the fastest, which is used, last.

    Raises:
        ShoalError: the native core is missing.
    """
    return tuple(core().simd_levels())


def sum_in_rank_order(
    out: Buffer,
    inputs: Sequence[Buffer],
    *,
    dtype: DType | None = None,
    num_threads: int = 1,
    level: Level | None = None,
) -> None:
    """Sum contiguous buffers of equal length in order into ``out``.

    Additions are in fp32, and the sum is rounded once, to nearest even, to the element type; a NaN result is
    the quiet NaN without payload. The bits depend only on the inputs. The GIL is released.

    Args:
        out: float32, bfloat16 or float16 elements, of any shape and alignment; may be one of the inputs.
        inputs: at least one buffer, with as many bytes as ``out``.
        dtype: element type of buffers that do not carry it (``bytearray``, or bfloat16 in a uint16 array);
            ``None`` takes it from the buffers.
        num_threads: maximum number of threads; a few megabytes use fewer.
        level: kernel level (for tests); ``None`` for the fastest.

    Raises:
        UsageError: sizes or types differ, a buffer is not contiguous or not in host memory, ``out`` overlaps
            an input partly, ``num_threads`` is below 1, or the processor does not support the level.
        ShoalError: the native core is missing.
    """
    try:
        core().sum_in_rank_order(out, list(inputs), dtype, num_threads, level)
    except ValueError as error:
        raise UsageError(f"sum in rank order: {error}") from None
    except TypeError:
        kinds = ", ".join(sorted({type(buffer).__name__ for buffer in (out, *inputs)}))
        raise UsageError(
            f"sum in rank order: output must be a writable buffer and the inputs readable ones, got {kinds}"
        ) from None


def lamb_step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    bias_correction: bool = True,
    trust_ratio: bool = True,
    num_threads: int = 1,
    level: Level | None = None,
) -> tuple[float, float]:
    """Update weights and moments in place by LAMB (:mod:`shoal.optim.lamb` has the formula).

    The bits of the result depend neither on the number of threads nor on the level.

    Args:
        weights: dense fp32 tensors on the CPU, updated in place.
        grads: gradients, multiplied by ``grad_scale`` on the fly and not changed. Like ``exp_avgs`` and
            ``exp_avg_sqs``, each has the shape and the strides of its weight.
        exp_avgs: first moments, updated in place.
        exp_avg_sqs: second moments, updated in place.
        steps: number of this update per tensor, from 1.
        learning_rate: of this update.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: multiple of the weights that is added to the update.
        grad_scale: factor on the gradients.
        bias_correction: whether moments are corrected for their start at zero.
        trust_ratio: whether updates are scaled by the norms; else the ratio is 1.
        num_threads: maximum number of threads.
        level: kernel level (for tests); ``None`` for the fastest.

    Returns:
        The norms of all scaled gradients and of all weights before the update.

    Raises:
        UsageError: a tensor has another dtype, device or layout.
        ShoalError: the native core is missing.
    """
    counts = [weight.numel() for weight in weights]
    addresses = [_addresses(tensors, weights) for tensors in (weights, grads, exp_avgs, exp_avg_sqs)]
    grad_sq, weight_sq = core().lamb_step(
        *addresses,
        counts,
        list(steps),
        learning_rate=learning_rate,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        grad_scale=grad_scale,
        bias_correction=bias_correction,
        trust_ratio=trust_ratio,
        num_threads=num_threads,
        level=level,
    )
    return math.sqrt(grad_sq), math.sqrt(weight_sq)


def lars_step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
    eta: float,
    eps: float = 0.0,
    grad_scale: float = 1.0,
    clips: bool = False,
    nesterov: bool = False,
    trust_ratio: bool = True,
    num_threads: int = 1,
    level: Level | None = None,
) -> tuple[float, float]:
    """Update weights and momenta in place by LARS (:mod:`shoal.optim.lars` has the formulas).

    Tensors, returned norms, errors and reproducibility are as in :func:`lamb_step`.

    Args:
        weights: updated in place.
        grads: gradients.
        momenta: updated in place.
        learning_rate: of this update.
        momentum: decay rate of the momentum.
        weight_decay: multiple of the weights that is added to the gradients.
        eta: factor on the trust ratio.
        eps: added to the denominator of the trust ratio.
        grad_scale: factor on the gradients.
        clips: whether to use the LARC form.
        nesterov: whether to use Nesterov momentum.
        trust_ratio: whether gradients are scaled by the norms; else the ratio is 1.
        num_threads: maximum number of threads.
        level: kernel level (for tests); ``None`` for the fastest.
    """
    counts = [weight.numel() for weight in weights]
    addresses = [_addresses(tensors, weights) for tensors in (weights, grads, momenta)]
    grad_sq, weight_sq = core().lars_step(
        *addresses,
        counts,
        learning_rate=learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
        eta=eta,
        eps=eps,
        grad_scale=grad_scale,
        clips=clips,
        nesterov=nesterov,
        trust_ratio=trust_ratio,
        num_threads=num_threads,
        level=level,
    )
    return math.sqrt(grad_sq), math.sqrt(weight_sq)


def novograd_step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    norm_sqs: Sequence[Tensor],
    steps: Sequence[float],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    bias_correction: bool = False,
    grad_averaging: bool = False,
    init_zero: bool = False,
    reg_inside_moment: bool = True,
    num_threads: int = 1,
    level: Level | None = None,
) -> tuple[float, float]:
    """Update weights, momenta and squared norms in place by NovoGrad (:mod:`shoal.optim.novograd`).

    Tensors, returned norms, errors and reproducibility are as in :func:`lamb_step`.

    Args:
        weights: updated in place.
        grads: gradients.
        momenta: updated in place.
        norm_sqs: running squared norm per weight, as fp32 CPU tensors of one number, updated in place.
        steps: number of this update per tensor, from 1.
        learning_rate: of this update.
        betas: decay rates of the momentum and of the squared norm.
        eps: added to the norm.
        weight_decay: multiple of the weights that is added to the update.
        grad_scale: factor on the gradients.
        bias_correction: whether moments are corrected for their start at zero.
        grad_averaging: whether gradients are scaled by 1 - beta1 in the momentum.
        init_zero: whether squared norms start at zero instead of at the first gradient's.
        reg_inside_moment: whether weight decay is part of the momentum.
        num_threads: maximum number of threads.
        level: kernel level (for tests); ``None`` for the fastest.
    """
    counts = [weight.numel() for weight in weights]
    if len(norm_sqs) != len(counts) or any(norm_sq.numel() != 1 for norm_sq in norm_sqs):
        raise UsageError(f"NovoGrad takes one squared norm for each of the {len(counts)} weights")
    addresses = [_addresses(tensors, weights) for tensors in (weights, grads, momenta)]
    grad_sq, weight_sq = core().novograd_step(
        *addresses,
        _addresses(norm_sqs, norm_sqs),
        counts,
        list(steps),
        learning_rate=learning_rate,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        grad_scale=grad_scale,
        bias_correction=bias_correction,
        grad_averaging=grad_averaging,
        init_zero=init_zero,
        reg_inside_moment=reg_inside_moment,
        num_threads=num_threads,
        level=level,
    )
    return math.sqrt(grad_sq), math.sqrt(weight_sq)


def l2_norm(tensors: Sequence[Tensor], *, num_threads: int = 1, level: Level | None = None) -> float:
    """Return the L2 norm over all elements of contiguous fp32 CPU tensors.

    Raises:
        UsageError: a tensor has another dtype, device or layout.
        ShoalError: the native core is missing.
    """
    counts = [tensor.numel() for tensor in tensors]
    return math.sqrt(core().sum_of_squares(_addresses(tensors, tensors), counts, num_threads, level))


def _addresses(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[int]:
    """Return the addresses of tensors, after checking that the core can treat them as flat fp32 arrays.

    They must be dense, with the strides of their weights. The check of contiguous tensors is short: for a few
    hundred tensors per step, it costs as much as the update of the small ones.
    """
    addresses = []
    for tensor, weight in zip(tensors, weights, strict=True):
        if not tensor.is_cpu or tensor.itemsize != 4 or not tensor.is_floating_point():
            raise UsageError(f"native kernels take float32 on the CPU, got {tensor.dtype} on {tensor.device}")
        plain = tensor.is_contiguous() and (
            tensor is weight or (weight.is_contiguous() and tensor.shape == weight.shape)
        )
        if not (plain or _lies_like(tensor, weight)):
            raise UsageError(
                "native kernels take tensors without gaps that lie like their weights, got "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} for a weight {tuple(weight.shape)} "
                f"with strides {weight.stride()}"
            )
        addresses.append(tensor.data_ptr())
    return addresses


def _lies_like(tensor: Tensor, weight: Tensor) -> bool:
    """Return whether a tensor is dense and has the memory order of the weight."""
    shape, strides, expected = tensor.shape, tensor.stride(), weight.stride()
    if shape != weight.shape or not _is_dense(shape, strides):
        return False
    return all(n == 1 or ours == theirs for n, ours, theirs in zip(shape, strides, expected, strict=True))


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements are dense in memory, in some order of the dims."""
    dense = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True)):
        if size > 1:
            if stride != dense:
                return False
            dense *= size
    return True
