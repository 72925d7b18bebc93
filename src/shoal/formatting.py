"""Formats numbers, units and names for readers, and reads sizes. Standard library only."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from shoal.errors import UsageError

_SIZES = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("", 1024), ("IB", 1024))
}
"""Bytes of a unit."""
_SHORT = {"sequences": "seq"}

_REFERENCES = {
    "mlm_loss": "unigram entropy",
    "span_loss": "unigrams, sentinels known",
    **dict.fromkeys(("sop_loss", "sop_accuracy", "nsp_loss", "nsp_accuracy", "top1_accuracy"), "chance"),
}
_SPELT_OUT = {
    "mlm": "masked-LM",
    "sop": "sentence-order",
    "nsp": "next-sentence",
    "span": "span-corruption",
    "grad": "gradient",
    "top1": "top-1",
    "top5": "top-5",
}


def metric_title(name: str) -> str:
    """Return a metric's title, such as ``Masked-LM accuracy``; unknown words get a capital at most."""
    text = " ".join(_SPELT_OUT.get(word, word) for word in name.split("_") if word)
    return text[:1].upper() + text[1:]


def reference_title(metric: str) -> str:
    """Return the name of a metric's reference line."""
    return _REFERENCES.get(metric, "reference")


def is_fraction(metric: str) -> bool:
    """Return whether a metric is a fraction, shown as a percentage."""
    return metric.endswith("accuracy")


def number(value: float, digits: int = 4) -> str:
    """Format a number with ``digits`` significant digits: 12,346 · 6.543 · 0.00125 · 1.2e-05 · inf."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")  # else 999.96 would be formatted as a number of hundreds
    size = math.floor(math.log10(abs(rounded)))
    if size < -4 or size >= 9:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    elif size >= digits - 1 or float(value).is_integer():
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{digits - 1 - size}f}".rstrip("0").rstrip(".")
    return text.replace("-", "−")


def score(metric: str, value: float) -> str:
    """Format a metric: accuracies in percent, losses with three decimals."""
    if not math.isfinite(value):
        return number(value)
    if is_fraction(metric):
        return f"{100 * value:.1f} %"
    if metric.endswith("loss") and 0.1 <= abs(value) < 1000:
        return f"{value:.3f}".replace("-", "−")
    return number(value)


def count(value: int) -> str:
    """Abbreviate a large count: 11.8 M, 336 M, 2.85 B."""
    for limit, unit in ((10**9, "B"), (10**6, "M")):
        if value >= limit:
            return f"{number(value / limit, 3)} {unit}"
    return f"{value:,}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def size(num_bytes: float) -> str:
    """Format a size in binary units: 512 B, 47.1 MiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{number(num_bytes, 3)} {unit}"
        num_bytes /= 1024
    return f"{number(num_bytes, 3)} TiB"


def size_setting(num_bytes: int) -> str:
    """Format a size for :func:`parse_bytes`, rounded down.

    Example:
        >>> size_setting(512), size_setting(47 << 20), size_setting((3 << 30) - 1), size_setting(40 << 30)
        ('512B', '47MiB', '3071MiB', '40GiB')
    """
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= 10 * factor:
            return f"{num_bytes // factor}{unit}"
    return f"{num_bytes}B"


def parse_bytes(text: str, name: str = "parallel.memory") -> int:
    """Return the number of bytes of a text such as ``40GB``, ``16GiB`` or ``40G``.

    Units are those of GNU's coreutils, in any case: ``KB``, ``MB``, ``GB`` and ``TB`` are powers of 1000;
    ``KiB`` … ``TiB`` are powers of 1024, and so are ``K`` … ``T``, as in ``mount -o size=40G``. A number
    without a unit is in bytes.

    Args:
        text: a number with a unit.
        name: the setting, for the error.

    Raises:
        UsageError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _SIZES:
        raise UsageError(
            f"{name} {text!r} must be a number with a unit, such as 40GB (10^9) or 40GiB or 40G (2^30)"
        )
    return int(float(match[1]) * _SIZES[match[2].upper()])


def milliseconds(seconds: float) -> str:
    """Format a short time, always in ms, so that the cells of a column compare."""
    value = 1000 * seconds
    if not math.isfinite(value):
        return number(value)
    return f"{value:,.0f} ms" if value >= 100 else f"{value:,.1f} ms"


def duration(seconds: float) -> str:
    """Format a long time with two units: 0.8 s, 47 s, 5 min 12 s, 3 h 05 min, 2 d 04 h."""
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def rate(per_second: float, samples: str) -> str:
    """Format a rate: ``8.1 seq/s``, ``43,900 images/s``; ``samples`` is the run's name for them."""
    return f"{number(per_second, 3)} {per_second_unit(samples)}"


def per_second_unit(samples: str) -> str:
    return f"{_SHORT.get(samples, samples)}/s"


def moment(time_s: float) -> str:
    """Format seconds since 1970 as date and time, UTC."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def plural(amount: int, word: str, several: str = "") -> str:
    return f"{amount:,} {word if amount == 1 else several or word + 's'}"


def ranges(numbers: Sequence[int], limit: int = 6) -> str:
    """List numbers without the middle of a long list: 3, 4, 5, … 91 (17 in all)."""
    if len(numbers) <= limit:
        return ", ".join(f"{n:,}" for n in numbers)
    shown = ", ".join(f"{n:,}" for n in numbers[: limit - 1])
    return f"{shown}, … {numbers[-1]:,} ({len(numbers):,} in all)"


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Align the cells of a table: those of the columns ``left`` to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def without_unseen(text: str) -> str:
    """Return a text without what no reader sees: blanks at its ends, format characters, forms of a letter.

    Example:
        >>> without_unseen("cafe\u0301\u200b ") == "caf\u00e9"
        True
    """
    composed = unicodedata.normalize("NFC", text)
    return "".join(char for char in composed if unicodedata.category(char) != "Cf").strip()
