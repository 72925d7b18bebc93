"""The C++ core with types and errors that people can read. Imports neither torch nor NumPy.

Buffers are NumPy arrays, torch tensors on the CPU, or anything else with the buffer protocol or DLPack
(``bytearray``, ``memoryview`` of shared memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from shoal.errors import ShoalError, UsageError

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
        ShoalError: it was not built or does not fit this Python.
    """
    if _loaded is None:
        raise ShoalError(
            f"shoal's native core cannot be loaded ({_why_missing}); reinstall shoal where a C++20 compiler "
            "(g++ or clang++) is found, and see `shoal doctor`"
        )
    return _loaded


def cpu_features() -> dict[str, bool]:
    """Return which instruction sets of interest this processor has: avx2, f16c, avx512f, avx512_bf16.

    Empty on processors other than x86-64.

    Raises:
        ShoalError: the native core is missing.
    """
    return dict(core().cpu_features())


def simd_levels() -> tuple[Level, ...]:
    """Return the levels of kernels that this machine can run, the fastest last; it is the one in use.

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
    """Write the sum of equally long contiguous buffers, added in order, into ``out``.

    Each addition is one in fp32, and the sum is rounded once, to nearest even, to the element type; a NaN
    comes out as the quiet NaN without payload. The bits depend on nothing but the inputs. ``out`` may be one
    of the inputs. The GIL is released meanwhile.

    Args:
        out: float32, bfloat16 or float16 elements, of any shape and alignment.
        inputs: at least one buffer with as many bytes as ``out``.
        dtype: what the bytes are, for buffers that do not say it (``bytearray``, or bfloat16 in a uint16
            array); ``None`` takes it from the buffers.
        num_threads: at most so many threads; few megabytes use fewer.
        level: forces the kernels of a level (for tests); ``None`` is the fastest.

    Raises:
        UsageError: sizes or types differ, a buffer is not contiguous or not in host memory, ``out`` overlaps
            an input partly, ``num_threads`` is below 1, this processor cannot run the level.
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
