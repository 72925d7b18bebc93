"""The timeline as Chrome reads it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.chrome_trace import Span, rank_events, write_trace

TIMES = st.tuples(st.sampled_from(["push", "sum", "pull"]), st.integers(0, 50), st.integers(0, 20))


def test_events_name_rank_host_and_chunk() -> None:
    spans = [
        [Span("push", "push", 1_000, 3_500, seq=7, chunk=2)],
        [Span("call", "all_reduce 4 KiB on gloo", 0, 4_000)],
    ]
    events = [event for rank in range(2) for event in rank_events(rank, rank, spans[rank])]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0, host 0", "rank 1, host 1"]
    push, call = (event for event in events if event["ph"] == "X")
    assert (push["pid"], push["ts"], push["dur"], push["args"]) == (0, 1.0, 2.5, {"seq": 7, "chunk": 2})
    assert (call["pid"], call["name"], call["args"]) == (1, "all_reduce 4 KiB on gloo", {})


@given(st.lists(TIMES, max_size=30))
def test_spans_of_one_row_do_not_overlap_and_rows_are_of_one_lane(found: list[tuple[str, int, int]]) -> None:
    spans = [Span(lane, lane, begin, begin + length) for lane, begin, length in found]
    events = [event for event in rank_events(0, 0, spans) if event["ph"] == "X"]
    assert len(events) == len(spans)
    rows: dict[int, list[dict[str, float]]] = {}
    for event in events:
        rows.setdefault(event["tid"], []).append(event)
    for row in rows.values():
        assert len({event["cat"] for event in row}) == 1
        row.sort(key=lambda event: (event["ts"], event["dur"]))
        for before, after in itertools.pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-9


def test_the_file_is_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, rank_events(0, 0, [Span("call", "barrier", 5_000, 6_000)], zero_ns=2_000))
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["ts"] for event in events if event["ph"] == "X"] == [3.0]
