"""Timelines that chrome://tracing and ui.perfetto.dev open: one process a rank, one lane a kind of work.

The format is Chrome's "Trace Event Format", complete events (``ph: X``), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Span:
    """What a rank did, from when to when."""

    lane: str
    name: str
    begin_ns: int
    end_ns: int
    seq: int | None = None
    """Number of the operation in its group."""
    chunk: int | None = None

    def since(self, zero_ns: int) -> Span:
        return replace(self, begin_ns=self.begin_ns - zero_ns, end_ns=self.end_ns - zero_ns)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def chrome_events(spans_of_rank: Sequence[Sequence[Span]], hosts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events of all ranks; ``hosts`` has the host of each."""
    host_numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(spans_of_rank):
        name = f"rank {rank}, host {host_numbers[hosts[rank]]}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        rows = _rows(spans)
        labels: dict[int, str] = {}
        for span, row in zip(spans, rows, strict=True):
            labels.setdefault(row, span.lane)
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.lane,
                    "pid": rank,
                    "tid": row,
                    "ts": span.begin_ns / 1e3,
                    "dur": max(span.end_ns - span.begin_ns, 0) / 1e3,
                    "args": {k: v for k, v in (("seq", span.seq), ("chunk", span.chunk)) if v is not None},
                }
            )
        for row, lane in labels.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": lane}})
    return events


def _rows(spans: Sequence[Span]) -> list[int]:
    """Give each span a row; a lane has as many as it has spans at one time.

    Viewers stack only spans that nest. Rows of one lane stand together, lanes in the order of their first
    span.
    """
    lanes = list(dict.fromkeys(span.lane for span in spans))
    rows = [0] * len(spans)
    next_row = 0
    for lane in lanes:
        free_at: list[int] = []
        mine = sorted(
            (i for i, span in enumerate(spans) if span.lane == lane), key=lambda i: spans[i].begin_ns
        )
        for index in mine:
            span = spans[index]
            row = next((r for r, end in enumerate(free_at) if end <= span.begin_ns), len(free_at))
            free_at[row : row + 1] = [span.end_ns]
            rows[index] = next_row + row
        next_row += len(free_at)
    return rows


def write_trace(path: Path, spans_of_rank: Sequence[Sequence[Span]], hosts: Sequence[str]) -> None:
    """Write the timeline of all ranks."""
    trace = {"traceEvents": chrome_events(spans_of_rank, hosts), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(trace) + "\n", encoding="utf-8")
