"""The worker of ``shoal bench comm``: runs the collectives, and has rank 0 say how long they took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench import chrome_trace, results
from shoal.bench.groups import Groups
from shoal.bench.results import Network, Row
from shoal.bench.settings import CommBench
from shoal.env import WorkerEnv
from shoal.errors import EXIT_OK, ShoalError

_WARM_UPS = 2
_MIN_SAMPLE_S = 0.02
"""A sample of a short collective is the mean of so many calls that it takes about this long."""
_MAX_CALLS = 1000

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A collective of one size."""

    collective: str
    num_elements: int
    """Of the whole tensor; a multiple of the number of ranks where it is cut into one part a rank."""
    num_bytes: int


def measure_all(bench: CommBench, place: WorkerEnv) -> int:
    """Measure every case on every backend; rank 0 prints and writes. Returns the exit code."""
    dtype = getattr(torch, bench.dtype)
    with _groups(bench, place) as groups:
        backends = tuple(groups.of_backend)
        network = Network(
            num_workers=groups.size,
            num_hosts=len(set(groups.hosts)),
            helper_bandwidths=groups.helper_bandwidths,
            link_bytes_per_s=bench.link_bytes_per_s,
        )
        is_main = groups.rank == 0
        groups.barrier()
        zero_ns = time.monotonic_ns()  # hosts have clocks of their own; a barrier is their common moment
        if is_main:
            print(
                f"{network.describe()}; {bench.dtype}, median of {bench.repeats}\n\n{results.HEADER}",
                flush=True,
            )
        rows: list[Row] = []
        traces: list[chrome_trace.Span] = []
        for case in cases_of(bench, dtype, groups.size):
            calls = {name: prepare(case, group, dtype, name) for name, group in groups.of_backend.items()}
            samples = _sample(calls, groups, bench.repeats)
            traces += _trace(calls, groups, case) if bench.trace else []
            for name in calls:
                row = _row(case, name, samples[name], network)
                rows.append(row)
                if is_main:
                    first = None if name == backends[0] else rows[-1 - list(calls).index(name)]
                    print(results.table_line(row, first), flush=True)
        everyone = groups.gather_json([s.since(zero_ns).as_json() for s in traces]) if bench.trace else []
        if is_main:
            print("\n" + results.explain(network, backends[0]))
            _write(bench, backends, rows, network, everyone, groups.hosts)
    return EXIT_OK


@contextlib.contextmanager
def _groups(bench: CommBench, place: WorkerEnv) -> Iterator[Groups]:
    groups = Groups(bench, place)
    yield groups
    groups.barrier()
    dist.destroy_process_group()


def cases_of(bench: CommBench, dtype: torch.dtype, num_ranks: int) -> Iterator[Case]:
    """Yield the cases; a size is rounded up to whole elements, and to as many on each rank."""
    for collective in bench.collectives:
        if collective == "barrier":
            yield Case(collective="barrier", num_elements=0, num_bytes=0)
            continue
        step = num_ranks if collective in ("reduce_scatter", "all_gather") else 1
        for size in bench.sizes:
            elements = -(-size // (dtype.itemsize * step)) * step
            yield Case(collective=collective, num_elements=elements, num_bytes=elements * dtype.itemsize)


def prepare(case: Case, group: dist.ProcessGroup, dtype: torch.dtype, backend: str) -> Call:
    """Return a call of the collective whose result has been looked at once.

    The check sums rank + 1, or from 16 ranks on ones and zeros: every dtype holds that exactly. Afterwards
    the data is zero, so that sums in place do not grow from call to call.

    Raises:
        ShoalError: the result is wrong.
    """
    rank, size = group.rank(), group.size()
    mine = rank + 1 if size < 16 else int(rank < 16)
    every = [r + 1 if size < 16 else int(r < 16) for r in range(size)]
    count = case.num_elements
    whole = torch.full((count,), mine, dtype=dtype)
    part = torch.full((count // size,), mine, dtype=dtype)
    summed = torch.full((count,), sum(every), dtype=dtype)
    call: Call
    expected: torch.Tensor | None
    match case.collective:
        case "all_reduce":
            call, result, expected = partial(dist.all_reduce, whole, group=group), whole, summed
        case "reduce":
            call, result = partial(dist.reduce, whole, dst=0, group=group), whole
            expected = summed if rank == 0 else None  # elsewhere the content is nobody's business
        case "broadcast":
            call, result = partial(dist.broadcast, whole, src=0, group=group), whole
            expected = torch.full((count,), every[0], dtype=dtype)
        case "reduce_scatter":
            call, result = partial(dist.reduce_scatter_tensor, part, whole, group=group), part
            expected = summed[: len(part)]
        case "all_gather":
            call, result = partial(dist.all_gather_into_tensor, whole, part, group=group), whole
            expected = torch.tensor(every, dtype=dtype).repeat_interleave(count // size)
        case _:
            return partial(dist.barrier, group=group)
    try:
        call()
    except RuntimeError as error:
        raise ShoalError(f"{case.collective} in {dtype} on {backend}: {error}") from error
    if expected is not None and not torch.equal(result, expected):
        raise ShoalError(
            f"{case.collective} of {case.num_bytes:,} bytes on {backend} gave a wrong result on rank {rank}: "
            f"{result[:4].tolist()} … where all elements must be as in {expected[:4].tolist()} …"
        )
    whole.zero_()
    part.zero_()
    return call


def _sample(calls: dict[str, Call], groups: Groups, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of one call, slowest rank, ``repeats`` times for each backend by turns."""
    num_calls = {}
    for name, call in calls.items():
        (once,) = groups.largest([min(_seconds(call, 1, groups) for _ in range(_WARM_UPS))])
        num_calls[name] = min(max(round(_MIN_SAMPLE_S / once), 1), _MAX_CALLS)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(_seconds(call, num_calls[name], groups))
    return {name: groups.largest(seconds) for name, seconds in samples.items()}


def _seconds(call: Call, num_calls: int, groups: Groups) -> float:
    groups.barrier()
    begin = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - begin) / num_calls


def _trace(calls: dict[str, Call], groups: Groups, case: Case) -> list[chrome_trace.Span]:
    """Run each call once more and return what the engines saw of it, in this host's time."""
    spans = []
    for name, call in calls.items():
        engine = getattr(groups.of_backend[name], "engine", None)
        if engine is not None:
            engine.trace(True)
            engine.take_trace()
        groups.barrier()
        begin = time.monotonic_ns()
        call()
        end = time.monotonic_ns()
        what = f"{case.collective} {results.size_text(case.num_bytes)} on {name}"
        spans.append(chrome_trace.Span(lane="call", name=what, begin_ns=begin, end_ns=end))
        if engine is not None:
            spans += [
                chrome_trace.Span(lane=lane, name=lane, begin_ns=b, end_ns=e, seq=seq, chunk=chunk)
                for lane, b, e, seq, chunk in engine.take_trace()
            ]
            engine.trace(False)
    return spans


def _row(case: Case, backend: str, samples: list[float], network: Network) -> Row:
    return Row(
        collective=case.collective,
        num_bytes=case.num_bytes,
        backend=backend,
        samples_s=samples,
        limit_s=results.limit_seconds(case.collective, case.num_bytes, network),
        formula_s=results.formula_seconds(case.collective, backend, case.num_bytes, network),
    )


def _write(
    bench: CommBench,
    backends: tuple[str, ...],
    rows: list[Row],
    network: Network,
    traces: list[list[dict[str, Any]]],
    hosts: list[str],
) -> None:
    if bench.json is not None:
        settings = {
            "backends": backends,
            "dtype": bench.dtype,
            "repeats": bench.repeats,
            "torch": torch.__version__,
        }
        results.write_json(bench.json, rows, network, settings)
    if bench.plot is not None:
        from shoal.bench.plot import draw

        draw(bench.plot, rows, network)
    if bench.trace is not None:
        spans = [[chrome_trace.Span(**span) for span in of_rank] for of_rank in traces]
        chrome_trace.write_trace(bench.trace, spans, hosts)
    for path in filter(None, (bench.json, bench.plot, bench.trace)):
        print(path)
