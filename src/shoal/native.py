"""Wraps the C++ core with types, checks and errors. Imports neither torch nor NumPy.

Buffers are NumPy arrays, CPU tensors of torch, or any object with the buffer protocol or DLPack
(``bytearray``, ``memoryview`` of shared memory).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
    import shoal._core as _compiled  # type: ignore[import-not-found,import-untyped,unused-ignore]

    _loaded = _compiled
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


class Fabric(NamedTuple):
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
    return Fabric(built, version, problem, dict(providers))


def simd_levels() -> tuple[Level, ...]:
    """Return the kernel levels that this machine supports, the fastest, which is used, last.

    Raises:
        ShoalError: the native core is missing.
    """
    return tuple(core().simd_levels())


def crc32c(data: bytes) -> int:
    """Return the CRC32C (Castagnoli) of ``data``.

    Raises:
        ShoalError: the native core is missing.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    return int(core().crc32c(data))


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


def adamw_step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    **options: Any,
) -> tuple[float, float]:
    """Update weights and moments in place by AdamW (:mod:`shoal.optim.adamw` has the formula).

    Arguments, returned norms, errors and reproducibility are as in :func:`lamb_step`.
    """
    return _step("adamw_step", [weights, grads, exp_avgs, exp_avg_sqs], list(steps), **options)


def sgd_step(
    weights: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], **options: Any
) -> tuple[float, float]:
    """Update weights and momenta in place by SGD (:mod:`shoal.optim.sgd` has the formula).

    Arguments, returned norms, errors and reproducibility are as in :func:`lamb_step`; with ``momentum`` 0
    ``momenta`` are not read, and may be the weights.
    """
    return _step("sgd_step", [weights, grads, momenta], **options)


def lamb_step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    **options: Any,
) -> tuple[float, float]:
    """Update weights and moments in place by LAMB.

    The bits of the result depend neither on the number of threads nor on the level.

    Args:
        weights: dense fp32 tensors on the CPU, updated in place.
        grads: gradients, multiplied by ``grad_scale`` on the fly and not changed. Like ``exp_avgs`` and
            ``exp_avg_sqs``, each has the shape and the strides of its weight.
        exp_avgs: first moments, updated in place.
        exp_avg_sqs: second moments, updated in place.
        steps: number of this update per tensor, from 1.
        options: the kernel's, by keyword, all of them; :mod:`shoal.optim.lamb` has the formula. Besides the
            names of the optimizer's there are ``learning_rate``, ``grad_scale`` (a factor on the gradients),
            ``num_threads`` (at most) and ``level`` (of the kernel, for tests; default: the fastest).

    Returns:
        The norms of all scaled gradients and of all weights before the update.

    Raises:
        UsageError: a tensor has another dtype, device or layout.
        ShoalError: the native core is missing.
    """
    return _step("lamb_step", [weights, grads, exp_avgs, exp_avg_sqs], list(steps), **options)


def lans_step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    **options: Any,
) -> tuple[float, float]:
    """Update weights and moments in place by LANS (:mod:`shoal.optim.lans` has the formula).

    Arguments, returned norms, errors and reproducibility are as in :func:`lamb_step`; the norm of the
    gradients is that before they are normalised.
    """
    return _step("lans_step", [weights, grads, exp_avgs, exp_avg_sqs], list(steps), **options)


def lars_step(
    weights: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], **options: Any
) -> tuple[float, float]:
    """Update weights and momenta in place by LARS (:mod:`shoal.optim.lars` has the formulas).

    Arguments, returned norms, errors and reproducibility are as in :func:`lamb_step`; ``clips`` chooses the
    LARC form.
    """
    return _step("lars_step", [weights, grads, momenta], **options)


def novograd_step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    norm_sqs: Sequence[Tensor],
    steps: Sequence[float],
    **options: Any,
) -> tuple[float, float]:
    """Update weights, momenta and squared norms in place by NovoGrad (:mod:`shoal.optim.novograd`).

    Arguments, returned norms, errors and reproducibility are as in :func:`lamb_step`; ``norm_sqs`` are the
    running squared norm per weight, as fp32 CPU tensors of one number, updated in place.
    """
    if len(norm_sqs) != len(weights) or any(norm_sq.numel() != 1 for norm_sq in norm_sqs):
        raise UsageError(f"NovoGrad takes one squared norm for each of the {len(weights)} weights")
    addresses = [_addresses(tensors, weights) for tensors in (weights, grads, momenta)]
    addresses.append(_addresses(norm_sqs, norm_sqs))
    return _updated("novograd_step", *addresses, _counts(weights), list(steps), **options)


def adafactor_step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    second_moments: Sequence[tuple[Tensor, Tensor] | Tensor],
    shares: Sequence[float],
    **options: Any,
) -> tuple[float, float]:
    """Update weights and second moments in place by Adafactor (:mod:`shoal.optim.adafactor`).

    Arguments, returned norms, errors and reproducibility are as in :func:`lamb_step`; ``shares`` are
    1 - beta2, ``second_moments`` those of rows and of columns of a matrix, or one of the weights' shape.
    """
    rows, columns = [], []
    for weight, moments in zip(weights, second_moments, strict=True):
        if isinstance(moments, tuple):
            rows += _addresses(moments, moments)
            columns.append(weight.shape[1])
        else:
            rows += _addresses([moments], [weight]) * 2
            columns.append(0)
    addresses = [*(_addresses(tensors, weights) for tensors in (weights, grads)), rows[::2], rows[1::2]]
    return _updated("adafactor_step", *addresses, _counts(weights), columns, list(shares), **options)


def _step(
    kernel: str, lists: Sequence[Sequence[Tensor]], *numbers: Sequence[float], **options: Any
) -> tuple[float, float]:
    """Run an optimizer's kernel on lists of tensors alike, the weights first, and numbers of each."""
    addresses = [_addresses(tensors, lists[0]) for tensors in lists]
    return _updated(kernel, *addresses, _counts(lists[0]), *numbers, **options)


def _updated(
    kernel: str,
    *arguments: Sequence[float],
    betas: tuple[float, float] | None = None,
    level: Level | None = None,
    **options: Any,
) -> tuple[float, float]:
    """Run an optimizer's kernel and return the norms of gradients and weights."""
    if betas is not None:
        options["beta1"], options["beta2"] = betas
    grad_sq, weight_sq = getattr(core(), kernel)(*arguments, level=level, **options)
    return math.sqrt(grad_sq), math.sqrt(weight_sq)


def _counts(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def l2_norm(tensors: Sequence[Tensor], *, num_threads: int = 1, level: Level | None = None) -> float:
    """Return the L2 norm over all elements of contiguous fp32 CPU tensors.

    Raises:
        UsageError: a tensor has another dtype, device or layout.
        ShoalError: the native core is missing.
    """
    addresses = _addresses(tensors, tensors)
    return math.sqrt(core().sum_of_squares(addresses, _counts(tensors), num_threads, level))


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
