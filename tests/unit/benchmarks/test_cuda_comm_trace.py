"""The overlap of copies and kernels in a trace, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.cuda_comm import overlap_of_trace


def event(category: str, begin: float, end: float) -> dict[str, Any]:
    return {"cat": category, "ts": begin, "dur": end - begin, "name": "x", "ph": "X"}


def test_the_share_of_copies_during_kernels() -> None:
    kernels = [event("kernel", 0, 10), event("kernel", 5, 12), event("kernel", 20, 30)]
    copies = [event("gpu_memcpy", 8, 16), event("gpu_memcpy", 10, 14), event("gpu_memcpy", 28, 32)]
    other = [event("cpu_op", 0, 100), {"ph": "M", "name": "process_name"}]
    # copies are busy 8 to 16 and 28 to 32; of that kernels run 8 to 12 and 28 to 30
    assert overlap_of_trace([*other, *copies, *kernels]) == pytest.approx(6 / 12)
    assert overlap_of_trace(copies) == 0
    assert overlap_of_trace(kernels) is None
