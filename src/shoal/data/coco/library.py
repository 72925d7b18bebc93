"""faster-coco-eval: rasterises polygons, measures overlaps, matches. The only module that loads it."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from shoal.errors import ShoalError


@cache
def _module(name: str) -> Any:
    try:
        return import_module(f"faster_coco_eval{name}")
    except ImportError as error:
        raise ShoalError(
            f"COCO's masks and scores need faster-coco-eval, which cannot be loaded ({error}); "
            "pip install 'shoal[vision]'"
        ) from None


def mask_library() -> Any:
    """Return its functions on masks (``faster_coco_eval.core.mask``).

    Raises:
        ShoalError: it is not installed.
    """
    return _module(".core.mask")


def evaluation_library() -> tuple[Any, Any]:
    """Return its matcher (compiled) and its class of parameters, COCO's official ones by default.

    Raises:
        ShoalError: it is not installed.
    """
    return _module(".faster_eval_api_cpp"), _module(".core.cocoeval").Params
