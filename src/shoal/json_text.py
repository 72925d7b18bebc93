"""Parses JSON from files, peers and other processes; writes it for programs. Standard library only.

Any problem becomes one error that names the source. ``json.loads`` itself raises ``RecursionError`` for
lists nested too deeply, and different kinds of ``ValueError`` for text that is not JSON or not UTF-8 and for
numbers with too many digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from shoal.errors import ShoalError


def parse_json(
    text: str | bytes | bytearray,
    source: str,
    *,
    error: type[ShoalError] = ShoalError,
    remedy: str = "",
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the JSON; bytes are UTF-8.
        source: name of the file, line or peer.
        error: type of the exception.
        remedy: end of the message.
        object_pairs_hook: as of ``json.loads``.

    Raises:
        ShoalError: or ``error``: the text is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError as reason:
        problem = f"is not JSON: {reason}"
    raise error(f"{source}: {problem}" + (f"; {remedy}" if remedy else ""))


def json_bytes(value: Any) -> bytes:
    """Return a value as indented JSON in UTF-8, where bytes of file names that are no UTF-8 are escaped."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")


def json_document(value: Any) -> str:
    """Return a value as indented JSON that every parser reads: numbers that are not finite become null."""
    return json.dumps(_finite(value), indent=1, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
