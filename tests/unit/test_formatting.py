"""Numbers, units and names as a person reads them."""

from __future__ import annotations

import math

import pytest

from shoal import formatting
from shoal.errors import UsageError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (1000, "1,000"),
        (12_345.6, "12,346"),
        (6.5432, "6.543"),
        (6.5, "6.5"),
        (-3.25, "−3.25"),
        (0.00125, "0.00125"),
        (0.0000176, "1.76e−5"),
        (1e-5, "1e−5"),
        (2.5e12, "2.5e12"),
        (999.96, "1,000"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "NaN"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert formatting.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.84, "0.8 s"),
        (9.96, "10 s"),
        (47.2, "47 s"),
        (59.6, "1 min 00 s"),
        (312, "5 min 12 s"),
        (3599.7, "1 h 00 min"),
        (11_100, "3 h 05 min"),
        (86_399, "1 d 00 h"),
        (2 * 86_400 + 4 * 3600, "2 d 04 h"),
        (math.inf, "∞"),
    ],
)
def test_duration_never_says_sixty(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


def test_units() -> None:
    assert formatting.milliseconds(0.0031) == "3.1 ms"
    assert formatting.milliseconds(0.1224) == "122 ms"
    assert formatting.milliseconds(12.5) == "12,500 ms"
    assert formatting.milliseconds(math.nan) == "NaN"
    assert formatting.size(512) == "512 B"
    assert formatting.size(22_480_920) == "21.4 MiB"
    assert formatting.size(3 * 2**40) == "3 TiB"
    assert formatting.count(999_999) == "999,999"
    assert formatting.count(11_800_000) == "11.8 M"
    assert formatting.count(2_850_000_000) == "2.85 B"
    assert (
        formatting.rate(293.4, "sequences") == "293 seq/s"
        and formatting.rate(12_345, "images") == "12,345 images/s"
    )
    assert formatting.moment(0) == "1970-01-01 00:00:00"
    assert formatting.plural(1, "host") == "1 host"
    assert formatting.plural(2000, "host") == "2,000 hosts"


def test_metrics() -> None:
    assert formatting.metric_title("mlm_accuracy") == "Masked-LM accuracy"
    assert formatting.metric_title("sop_f1") == "Sentence-order f1"
    assert formatting.metric_title("box_ap") == "Box ap"
    assert formatting.score("sop_accuracy", 0.6349) == "63.5 %"
    assert formatting.score("mlm_loss", 5.1) == "5.100"
    assert formatting.score("perplexity", 164.0) == "164"
    assert formatting.score("mlm_loss", math.nan) == "NaN"


def test_ranges() -> None:
    assert formatting.ranges([3]) == "3"
    assert formatting.ranges([116, 117, 118, 119, 120]) == "116, 117, 118, 119, 120"
    assert formatting.ranges(list(range(1, 2001))) == "1, 2, 3, 4, 5, … 2,000 (2,000 in all)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", 7),
        ("7B", 7),
        ("40GB", 40_000_000_000),
        ("40GiB", 42_949_672_960),
        ("40G", 42_949_672_960),  # as tmpfs counts size=40G
        ("40 g", 42_949_672_960),
        ("1.5 GiB", 1_610_612_736),
        ("512mb", 512_000_000),
        ("512M", 536_870_912),
        ("2T", 2_199_023_255_552),
        ("2TB", 2_000_000_000_000),
        ("3k", 3_072),
    ],
)
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    assert formatting.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "G", "40 P", "-1G", "40Gb/s", "1e9", "40iB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"^data\.cache_bytes '.*' must be a number with a unit, such as"):
        formatting.parse_bytes(text, "data.cache_bytes")
