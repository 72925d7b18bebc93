"""Times collectives on several backends by turns; run by each worker of ``shoal bench comm``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shoal import formatting
from shoal.bench import comm_results, framework_calls
from shoal.bench.chrome_trace import Span, rank_events, write_trace
from shoal.bench.comm_options import COLOCATED, FRAMEWORKS, CommBench, parse_sizes, split_list
from shoal.bench.comm_results import CollectiveRow, HostNetwork, formula_seconds, limit_seconds
from shoal.comm.helpers import helper_bandwidths
from shoal.comm.native_group import python_group
from shoal.comm.store import PrefixStore
from shoal.env.machine import host_identity
from shoal.env.settings import HELPERS, helpers
from shoal.env.variables import without
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK, ShoalError, UsageError
from shoal.json_text import parse_json

_WARM_UPS = 2
_MIN_SAMPLE_S = 0.02
"""A sample of a short collective is the mean of as many calls as take about this long."""
_MAX_CALLS = 1000

Call = Callable[[], object]


class Groups:
    """A process group per backend, and ``control``, a gloo group for the benchmark's own messages.

    Args:
        backends: names of torch backends, ``shoal-colocated``, or of a framework; empty: gloo and shoal, and
            shoal without helpers if there are helpers.
    """

    def __init__(self, worker: WorkerEnv, backends: Sequence[str] = (), *, timeout_s: float = 300.0) -> None:
        self.rank, self.size = worker.ranks.rank, worker.ranks.num_workers
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "gloo", init_method=worker.init_method, rank=self.rank, world_size=self.size, timeout=timeout
        )
        world = dist.group.WORLD
        assert world is not None
        self.control: dist.ProcessGroup = world
        ranks = self.gather_json({"host": host_identity(), "helpers": len(helpers())})
        self.hosts: list[str] = [rank["host"] for rank in ranks]
        if not backends:  # backend shoal, too, takes rank 0's helpers
            backends = ("gloo", COLOCATED, "shoal") if ranks[0]["helpers"] else ("gloo", "shoal")
        self.backends = tuple(backends)
        self.of_backend: dict[str, dist.ProcessGroup] = {}
        self.frameworks: dict[str, framework_calls.Prepare] = {}
        for backend in backends:
            if backend == COLOCATED:
                with without(HELPERS):
                    self.of_backend[backend] = _new_group("shoal", timeout)
            elif backend in FRAMEWORKS:
                store = PrefixStore(f"{backend}/", dist.distributed_c10d._get_default_store())
                self.frameworks[backend] = framework_calls.join(backend, store, timeout)
            else:
                self.of_backend[backend] = _new_group(backend, timeout)
        self.helper_bandwidths: tuple[float, ...] = tuple(self.gather_json(helper_bandwidths())[0])

    def largest(self, values: list[float]) -> list[float]:
        """Return each value's maximum over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)
        return [float(value) for value in tensor]

    def gather_json(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order; as JSON, so that nothing is unpickled."""
        data = json.dumps(value).encode()
        longest = int(self.largest([len(data)])[0])
        padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.control)
        return [
            parse_json(text.numpy().tobytes(), f"the message of rank {rank}")
            for rank, text in enumerate(texts)
        ]

    def barrier(self) -> None:
        dist.barrier(group=self.control)


def _new_group(backend: str, timeout: timedelta) -> dist.ProcessGroup:
    if not hasattr(dist.Backend, backend.upper()) and backend not in dist.Backend.backend_list:
        known = ", ".join(name for name in dist.Backend.backend_list if name != "undefined")
        own = ", ".join((COLOCATED, *FRAMEWORKS))
        raise UsageError(f"--backends: torch has no backend {backend!r}; it knows {known}, and shoal {own}")
    group = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


@dataclass(frozen=True, kw_only=True)
class Case:
    """A collective on a tensor of one size."""

    collective: str
    num_elements: int
    """Of the whole tensor; a multiple of the number of ranks for reduce_scatter and all_gather."""
    num_bytes: int


def measure_all(bench: CommBench, worker: WorkerEnv) -> int:
    """Measure every case on every backend; rank 0 prints and writes. Returns the exit code."""
    dtype = getattr(torch, bench.dtype)
    groups = Groups(worker, split_list(bench.backends), timeout_s=bench.timeout)
    backends = list(groups.backends)
    network = HostNetwork(
        num_workers=groups.size,
        num_hosts=len(set(groups.hosts)),
        helper_bandwidths=groups.helper_bandwidths,
        link_bytes_per_s=bench.link_bytes_per_s,
    )
    groups.barrier()
    zero_ns = time.monotonic_ns()  # hosts' clocks differ; a barrier is their common moment
    if groups.rank == 0:
        head = f"{network.describe()}; {bench.dtype}, median of {bench.repeats}"
        print(f"{head}\n\n{comm_results.HEADER}", flush=True)
    rows: list[CollectiveRow] = []
    spans: list[Span] = []
    for case in cases_of(bench, dtype, groups.size):
        calls = {
            name: _prepare_in_framework(case, groups, dtype, name)
            if name in groups.frameworks
            else prepare(case, groups.of_backend[name], dtype, name)
            for name in backends
        }
        samples = _sample(calls, groups, bench.repeats)
        if bench.trace:
            spans += _trace(calls, groups, case)
        first: CollectiveRow | None = None
        for name in backends:
            row = CollectiveRow(
                collective=case.collective,
                num_bytes=case.num_bytes,
                backend=name,
                samples_s=samples[name],
                limit_s=limit_seconds(case.collective, case.num_bytes, network),
                formula_s=formula_seconds(case.collective, name, case.num_bytes, network),
            )
            rows.append(row)
            if groups.rank == 0:
                print(row.line(first), flush=True)
            first = first or row
    host = list(dict.fromkeys(groups.hosts)).index(groups.hosts[groups.rank])
    events = groups.gather_json(rank_events(groups.rank, host, spans, zero_ns=zero_ns) if spans else [])
    if groups.rank == 0:
        print("\n" + comm_results.explain(network, backends[0]))
        _write(bench, backends, rows, network, [event for of_rank in events for event in of_rank])
    groups.barrier()
    dist.destroy_process_group()
    return EXIT_OK


def _write(
    bench: CommBench,
    backends: list[str],
    rows: list[CollectiveRow],
    network: HostNetwork,
    events: list[dict[str, Any]],
) -> None:
    """Write the files that the options name, and print their paths."""
    if bench.json is not None:
        settings = {"backends": backends, "dtype": bench.dtype, "repeats": bench.repeats}
        comm_results.write_json(bench.json, rows, network, settings | {"torch": torch.__version__})
    if bench.plot is not None:
        comm_results.draw(bench.plot, rows, network)
    if bench.trace is not None:
        write_trace(bench.trace, events)
    for path in filter(None, (bench.json, bench.plot, bench.trace)):
        print(path)


def cases_of(bench: CommBench, dtype: torch.dtype, num_ranks: int) -> Iterator[Case]:
    """Yield the cases; a size is rounded up to whole elements, and to equally many on each rank."""
    for collective in split_list(bench.collectives):
        if collective == "barrier":
            yield Case(collective="barrier", num_elements=0, num_bytes=0)
            continue
        step = num_ranks if collective in ("reduce_scatter", "all_gather") else 1
        for size in parse_sizes(bench.sizes):
            elements = -(-size // (dtype.itemsize * step)) * step
            yield Case(collective=collective, num_elements=elements, num_bytes=elements * dtype.itemsize)


def prepare(case: Case, group: dist.ProcessGroup, dtype: torch.dtype, backend: str) -> Call:
    """Return a call of the collective, after one call whose result has been checked.

    The check sums rank + 1, or with 16 ranks and more ones and zeros: every dtype represents that exactly.
    Afterwards the data is zero, so that in-place sums do not grow from call to call.

    Raises:
        ShoalError: the result is wrong.
    """
    rank, size = group.rank(), group.size()
    whole, part = (
        _operand(count, rank, size, dtype) for count in (case.num_elements, case.num_elements // size)
    )
    call: Call
    match case.collective:
        case "all_reduce":
            call, result = partial(dist.all_reduce, whole, group=group), whole
        case "reduce":
            call, result = partial(dist.reduce, whole, dst=0, group=group), whole
        case "broadcast":
            call, result = partial(dist.broadcast, whole, src=0, group=group), whole
        case "reduce_scatter":
            call, result = partial(dist.reduce_scatter_tensor, part, whole, group=group), part
        case "all_gather":
            call, result = partial(dist.all_gather_into_tensor, whole, part, group=group), whole
        case _:
            return partial(dist.barrier, group=group)
    try:
        call()
    except RuntimeError as error:
        raise ShoalError(f"{case.collective} in {dtype} on {backend}: {error}") from error
    _check_result(case, rank, size, backend, result)
    whole.zero_()
    part.zero_()
    return call


def _prepare_in_framework(case: Case, groups: Groups, dtype: torch.dtype, backend: str) -> Call:
    """Return a call of the collective by a framework's program, after one whose result has been checked."""
    rank, size = groups.rank, groups.size
    count = case.num_elements // size if case.collective == "all_gather" else case.num_elements
    call, result = groups.frameworks[backend](case.collective, _operand(count, rank, size, dtype))
    if result is not None:
        _check_result(case, rank, size, backend, result)
    return call


def _value(rank: int, size: int) -> int:
    return rank + 1 if size < 16 else int(rank < 16)


def _operand(count: int, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count,), _value(rank, size), dtype=dtype)


def _check_result(case: Case, rank: int, size: int, backend: str, result: torch.Tensor) -> None:
    every = torch.tensor([_value(each, size) for each in range(size)], dtype=result.dtype)
    match case.collective:
        case "all_gather":
            expected = every.repeat_interleave(case.num_elements // size)
        case "broadcast":
            expected = every[0].expand(len(result))
        case "reduce" if rank != 0:
            return  # undefined
        case _:
            expected = every.sum().to(result.dtype).expand(len(result))
    if not torch.equal(result, expected):
        raise ShoalError(
            f"{case.collective} of {case.num_bytes:,} bytes on {backend} gave a wrong result on rank {rank}: "
            f"{result[:4].tolist()} … where all elements must be as in {expected[:4].tolist()} …"
        )


def _sample(calls: dict[str, Call], groups: Groups, repeats: int) -> dict[str, list[float]]:
    """Return ``repeats`` samples per backend, taken by turns: seconds per call on the slowest rank."""
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


def _trace(calls: dict[str, Call], groups: Groups, case: Case) -> list[Span]:
    """Run each call once more and return the spans that the engines recorded, in this host's time."""
    spans = []
    for name, call in calls.items():
        group = groups.of_backend.get(name)
        engine = getattr(python_group(group), "engine", None) if group else None
        if engine is not None:
            engine.trace(True)
            engine.take_trace()
        groups.barrier()
        begin = time.monotonic_ns()
        call()
        end = time.monotonic_ns()
        title = f"{case.collective} {formatting.size(case.num_bytes)} on {name}"
        spans.append(Span("call", title, begin, end))
        if engine is not None:
            spans += [Span(lane, lane, b, e, seq, chunk) for lane, b, e, seq, chunk in engine.take_trace()]
            engine.trace(False)
    return spans
