"""Writes timelines for chrome://tracing and ui.perfetto.dev: one process per rank, lanes per kind of work.

The format is Chrome's "Trace Event Format", complete events (``ph: X``), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Begin and end of one piece of work of a rank."""

    lane: str
    name: str
    begin_ns: int
    end_ns: int
    seq: int | None = None
    """Number of the operation in its group."""
    chunk: int | None = None


def rank_events(rank: int, host: int, spans: Sequence[Span], *, zero_ns: int = 0) -> list[dict[str, Any]]:
    """Return the events of one rank; times count from ``zero_ns``."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}, host {host}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
    ]
    labels: dict[int, str] = {}
    for span, row in zip(spans, _rows(spans), strict=True):
        labels.setdefault(row, span.lane)
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": rank,
                "tid": row,
                "ts": (span.begin_ns - zero_ns) / 1e3,
                "dur": max(span.end_ns - span.begin_ns, 0) / 1e3,
                "args": {k: v for k, v in (("seq", span.seq), ("chunk", span.chunk)) if v is not None},
            }
        )
    for row, lane in labels.items():
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": lane}})
    return events


def _rows(spans: Sequence[Span]) -> list[int]:
    """Assign each span a row so that spans of a row do not overlap: viewers stack only nested spans.

    Rows of a lane are adjacent, lanes in the order of their first span.
    """
    rows = [0] * len(spans)
    next_row = 0
    for lane in dict.fromkeys(span.lane for span in spans):
        free_at: list[int] = []
        indices = [index for index, span in enumerate(spans) if span.lane == lane]
        for index in sorted(indices, key=lambda i: spans[i].begin_ns):
            span = spans[index]
            row = next((r for r, end in enumerate(free_at) if end <= span.begin_ns), len(free_at))
            free_at[row : row + 1] = [span.end_ns]
            rows[index] = next_row + row
        next_row += len(free_at)
    return rows


def write_trace(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Write the events of all ranks to one file."""
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")
