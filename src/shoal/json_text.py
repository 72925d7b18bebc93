"""JSON that comes from a file, a peer or another process: read in one place. Standard library only.

Whatever is wrong with it becomes one error that names where it came from. ``json.loads`` itself raises a
``RecursionError`` where lists are nested too deeply, and different kinds of ``ValueError`` at what is not
JSON, is not UTF-8, or is a number of too many digits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shoal.errors import ShoalError


def parse_json(
    text: str | bytes | bytearray,
    where: str,
    *,
    error: type[ShoalError] = ShoalError,
    remedy: str = "",
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the JSON; bytes are UTF-8.
        where: names the file, line or peer that it came from.
        error: what to raise.
        remedy: ends the message.
        object_pairs_hook: as of ``json.loads``.

    Raises:
        ShoalError: or what ``error`` says: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError as reason:
        problem = f"is not JSON: {reason}"
    raise error(f"{where}: {problem}" + (f"; {remedy}" if remedy else ""))
