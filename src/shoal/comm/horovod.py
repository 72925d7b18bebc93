"""Names of Horovod for reductions and formats, which ``shoal.tensorflow`` and ``shoal.keras`` share."""

from __future__ import annotations

from typing import Literal

Reduction = Literal["mean", "sum", "min", "max", "prod"]
Wire = Literal["bfloat16", "float16"]
Average: Literal["mean"] = "mean"
Sum: Literal["sum"] = "sum"
Min: Reduction = "min"
Max: Reduction = "max"
Product: Reduction = "prod"


class Compression:
    """Formats in which float32 and float64 are sent.

    Attributes:
        none: as they are.
        fp16: as float16.
        bf16: as bfloat16, which has the range of float32.
    """

    none: Wire | None = None
    fp16: Wire = "float16"
    bf16: Wire = "bfloat16"
