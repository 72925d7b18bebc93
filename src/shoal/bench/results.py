"""What was measured, what the links allow, and both as a table for people and as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.decide.server_assignment import ring_seconds, two_hop_seconds


@dataclass(frozen=True, kw_only=True)
class Network:
    """The hosts as far as the limits depend on them."""

    num_workers: int
    num_hosts: int
    helper_bandwidths: tuple[float, ...] = ()
    """Each as a multiple of a worker host's."""
    link_bytes_per_s: float | None = None
    """In each direction; ``None``: not known."""

    def describe(self) -> str:
        def plural(count: int, word: str) -> str:
            return f"{count} {word}" if count == 1 else f"{count} {word}s"

        parts = [f"{plural(self.num_workers, 'worker')} on {plural(self.num_hosts, 'host')}"]
        if self.helper_bandwidths:
            parts.append(plural(len(self.helper_bandwidths), "helper host"))
        if self.link_bytes_per_s:
            parts.append(f"links of {self.link_bytes_per_s * 8 / 1e6:,g} Mbit/s")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One collective of one size on one backend. A sample is the time of the slowest rank, in seconds."""

    collective: str
    num_bytes: int
    backend: str
    samples_s: list[float]
    limit_s: float | None
    """No scheme is faster on these links; ``None`` inside one host or where the links are not known."""
    formula_s: float | None
    """What this backend's scheme takes on these links; ``None`` where there is no formula."""
    time_s: float = field(init=False)
    algbw_bytes_per_s: float | None = field(init=False)

    def __post_init__(self) -> None:
        time = statistics.median(self.samples_s)
        object.__setattr__(self, "time_s", time)
        object.__setattr__(self, "algbw_bytes_per_s", self.num_bytes / time if self.num_bytes else None)


def limit_seconds(collective: str, num_bytes: int, network: Network) -> float | None:
    """Return the least time for which every byte that must cross a host's link has crossed it.

    An all-reduce must send M bytes from each host and bring M back; a reduce-scatter and an all-gather
    (M: the whole tensor) leave the host's own 1/n out; a broadcast and a reduce move M over the root's link.
    """
    if network.link_bytes_per_s is None or network.num_hosts == 1:
        return None
    seconds = num_bytes / network.link_bytes_per_s
    if collective in ("reduce_scatter", "all_gather"):
        return seconds * (network.num_hosts - 1) / network.num_hosts
    return seconds if num_bytes else None


def formula_seconds(collective: str, backend: str, num_bytes: int, network: Network) -> float | None:
    """Return what an all-reduce takes by the formulas of ``decide.server_assignment``, without latency."""
    if network.link_bytes_per_s is None or network.num_hosts == 1 or collective != "all_reduce":
        return None
    links = [network.link_bytes_per_s] * network.num_hosts
    if backend == "gloo":
        return ring_seconds(num_bytes, links)
    if backend.startswith("shoal"):
        factors = network.helper_bandwidths if backend == "shoal" else ()
        return two_hop_seconds(num_bytes, links, [f * network.link_bytes_per_s for f in factors])
    return None


HEADER = (
    f"{'collective':<15}{'size':>10}  {'backend':<16}{'median':>10}{'min':>10}{'max':>10}"
    f"{'algbw':>12}{'of limit':>10}{'formula':>10}{'speed':>8}"
)


def table_line(row: Row, first: Row | None) -> str:
    """Return a row for people; ``first`` is the first backend's of the same case, to compare with."""
    cells = [
        f"{row.collective:<15}",
        f"{size_text(row.num_bytes):>10}  " if row.num_bytes else f"{'':>12}",
        f"{row.backend:<16}",
        *(f"{time_text(t):>10}" for t in (row.time_s, min(row.samples_s), max(row.samples_s))),
        f"{row.algbw_bytes_per_s / 1e6:>7,.4g} MB/s" if row.algbw_bytes_per_s else f"{'':>12}",
        f"{100 * row.limit_s / row.time_s:>8.1f} %" if row.limit_s else f"{'':>10}",
        f"{time_text(row.formula_s):>10}" if row.formula_s else f"{'':>10}",
        f"{first.time_s / row.time_s:>7.2f}×" if first is not None else "",
    ]
    return "".join(cells).rstrip()


def explain(network: Network, first_backend: str) -> str:
    """Return what the columns mean."""
    lines = [
        "size: of the whole tensor, M. algbw: M / median. A time is the slowest rank's. "
        f"speed: as fast as {first_backend}."
    ]
    if network.num_hosts > 1 and network.link_bytes_per_s:
        lines.append(
            "of limit: of what any scheme can reach, M / B for an all-reduce. formula: what the backend's "
            "scheme takes at least."
        )
    elif network.num_hosts > 1:
        lines.append("Name the rate of a host's link (--link 10gbit) to see the limit.")
    return "\n".join(lines)


def write_json(path: Path, rows: list[Row], network: Network, settings: dict[str, Any]) -> None:
    """Write ``{"settings", "network", "rows"}``; times in seconds, rates in bytes a second."""
    whole = {"settings": settings, "network": asdict(network), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def size_text(num_bytes: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:g} B"


def time_text(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return (
                f"{seconds / unit:.3g} {name}" if seconds < 1000 * unit else f"{seconds / unit:,.0f} {name}"
            )
    return f"{seconds * 1e6:.3g} µs"
