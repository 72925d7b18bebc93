"""Mixed precision: which type to compute in, and the loss scale that fp16 needs.

The scale is kept on the host: the loop reads the gradient norm once a step anyway, and its being finite, the
same on every worker after averaging, decides for all of them alike.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from shoal.errors import UsageError

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The autocast type of a device; ``dtype`` is ``None`` for plain fp32."""

    name: str
    device_type: str
    dtype: torch.dtype | None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which to run the forward pass."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)


def has_native_bf16(device: torch.device) -> bool:
    """Whether ``device`` has units that multiply bf16 matrices."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # AMX tiles multiply bf16. Processors that only have AVX-512 BF16's dot products stay with fp32: what
    # those gain was not measured; --train.precision bf16 uses them.
    return bool(torch.cpu._is_amx_tile_supported())


def choose_precision(name: str, device: torch.device) -> Precision:
    """Resolve ``auto``.

    Raises:
        UsageError: ``name`` is not one of auto, fp32, bf16, fp16.
    """
    if name == "auto":
        name = "bf16" if has_native_bf16(device) else "fp32"
    if name not in _DTYPES:
        raise UsageError(f"train.precision {name!r} must be one of auto, {', '.join(_DTYPES)}")
    return Precision(name=name, device_type=device.type, dtype=_DTYPES[name])


class LossScale:
    """Static or dynamic loss scale (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

    The dynamic scale doubles after ``growth_interval`` finite steps in a row and halves at each overflow.

    Args:
        enabled: off for fp32 and bf16, whose range needs none; the scale is then 1.
        static: the fixed scale, or ``None`` for a dynamic one.
    """

    def __init__(self, *, enabled: bool, static: float | None = None, growth_interval: int = 2_000) -> None:
        if static is not None and not static > 0:
            raise UsageError(f"train.loss_scale {static} must be above 0")
        self.dynamic = enabled and static is None
        self.value = (65_536.0 if static is None else static) if enabled else 1.0
        self.growth_interval = growth_interval
        self.num_finite = 0

    def update(self, *, finite: bool) -> None:
        """Take note of whether the step's gradients were finite."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.num_finite = max(self.value / 2, 1.0), 0
        else:
            self.num_finite += 1
            if self.num_finite == self.growth_interval:
                self.value, self.num_finite = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "num_finite": self.num_finite}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.dynamic:
            self.value, self.num_finite = float(state["value"]), int(state["num_finite"])
