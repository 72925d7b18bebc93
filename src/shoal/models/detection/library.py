"""torchvision: the network's layers and the pooling of regions. The only module that loads it."""

from __future__ import annotations

from functools import cache
from typing import Any

from shoal.errors import ShoalError


@cache
def torchvision() -> Any:
    """Return the package, with its detectors and operations.

    Raises:
        ShoalError: it is not installed.
    """
    try:
        import torchvision.models.detection
        import torchvision.ops
    except ImportError as error:
        raise ShoalError(
            f"detectors need torchvision, which cannot be imported ({error}); pip install 'shoal[vision]'"
        ) from None
    return torchvision
