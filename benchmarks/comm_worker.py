"""One worker of ``comm``: runs collectives on several backends by turns.

Its spec: ``{"backends": {"gloo": null, "shoal": 8, "openmpi": null}, "cases": [["all_reduce", 16777216]],
"repeats": 7}``. A number says how many of the helper hosts a shoal group uses; an object holds settings of
its ``EngineOptions``. ``openmpi`` needs mpirun. ``copy`` copies the case's bytes on each rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.memory_device import MemoryDevice
from shoal.bench.collectives import Case, Groups, prepare
from shoal.comm import native_group
from shoal.comm.engine import EngineOptions
from shoal.env import settings as env
from shoal.env.launcher import worker_env
from shoal.env.settings import HELPERS, HOST_ID, NATIVE_GROUP

WARM_UPS = 2
MIN_SAMPLE_S = 0.02
"""A sample of a short collective is the mean of so many calls that it takes about this long."""

MANY, NUM_MANY = "consecutive all_reduces", 256
"""So many all-reduces that are begun before the first is waited for, on parts of the case's bytes."""

SMALL_LAYERS, WIDTH = "DDP step of small layers", 64
"""Forward and backward pass of so many layers of that width as the case's bytes hold, six to a bucket."""

IN_PYTHON = "shoal's group in Python"

ALL_TO_ALL = "all_to_all"

NUM_HELPERS, OTHER_HOST, INTERFACE, ON_DEVICE = "helpers", "host_id", "interface", "on_device"
"""Settings of a group beside those of ``EngineOptions``: helper hosts; ranks count as hosts of their own;
interfaces as in SHOAL_INTERFACE; tensors lie on a simulated accelerator."""

HELPER_RATE, FOLLOW = "helper_rate", "follow"
"""Settings of a group: the helpers' rate as in SHOAL_HELPERS, and how often the shares of its servers are
adapted before it is measured, each time after two sums."""

PROCESSOR = "processor seconds of "
"""Prefix of a case's samples of processor time: that of the rank that used most."""

Call = Callable[[], object]


def with_groups(*backends: str) -> Callable[[Callable[[Any, Groups], Any]], Callable[[Any], Any]]:
    """Return a decorator: the function joins the groups of a benchmark's workers, on one thread each."""

    def decorate(function: Callable[[Any, Groups], Any]) -> Callable[[Any], Any]:
        @wraps(function)
        def run(spec: Any) -> Any:
            torch.set_num_threads(1)
            worker = worker_env()
            assert worker is not None
            groups = Groups(worker, backends)
            result = function(spec, groups)
            groups.barrier()
            dist.destroy_process_group()
            return result

        return run

    return decorate


def shoal_group(given: int | dict[str, Any], *, in_python: bool = False) -> dist.ProcessGroup:
    """Make a group of all workers that uses the first ``given`` helper hosts, or these options."""
    settings = dict(given) if isinstance(given, dict) else {NUM_HELPERS: given}
    num_helpers = settings.pop(NUM_HELPERS, 0)
    helpers = os.environ.get(HELPERS, "")
    rate = settings.pop(HELPER_RATE, None)
    used = [each if rate is None else f"{each}*{rate}" for each in helpers.split(",")[:num_helpers]]
    os.environ[HELPERS] = ",".join(used)
    if settings.pop(OTHER_HOST, False):
        os.environ[HOST_ID] = f"host of rank {dist.get_rank()}"
    if interface := str(settings.pop(INTERFACE, "")):
        os.environ[env.INTERFACE] = interface
    num_follows = settings.pop(FOLLOW, 0)
    on_device = settings.pop(ON_DEVICE, False)
    if in_python or on_device:
        os.environ[NATIVE_GROUP] = "0"
    group = dist.new_group(backend="shoal", pg_options=EngineOptions(**settings))
    assert isinstance(group, dist.ProcessGroup)
    if on_device:
        device = MemoryDevice()
        native_group.python_group(group).devices["cpu"] = lambda _: device
        dist.all_reduce(torch.zeros(1), group=group)  # a group in Python reads SHOAL_HELPERS at its first use
    os.environ[HELPERS] = helpers
    os.environ.pop(HOST_ID, None)
    os.environ.pop(env.INTERFACE, None)
    gradient = torch.ones(4 << 20 if num_follows else 0)
    for _ in range(num_follows):
        for _ in range(2):
            dist.all_reduce(gradient, dist.ReduceOp.MAX, group=group)
        native_group.follow_rates(group)
    return group


def many_calls(num_bytes: int, group: dist.ProcessGroup) -> Call:
    """Return small all-reduces, one after the other without waiting; their sums have been looked at."""
    parts = [torch.full((num_bytes // NUM_MANY // 4,), float(k)) for k in range(NUM_MANY)]

    def call() -> None:
        works = [dist.all_reduce(part, group=group, async_op=True) for part in parts]
        for work in works:
            assert work is not None
            work.wait()

    call()
    if any((part != k * group.size()).any() for k, part in enumerate(parts)):
        raise SystemExit("consecutive all_reduces gave a wrong sum")
    for part in parts:
        part.zero_()
    return call


def step_call(num_bytes: int, group: dist.ProcessGroup) -> Call:
    """Return a step of small layers under DDP, whose gradients have been looked at."""
    torch.manual_seed(0)
    layer_bytes = 4 * WIDTH * (WIDTH + 1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_bytes // layer_bytes)))
    inputs = torch.randn(8, WIDTH)
    expected = torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=6 * layer_bytes / (1 << 20))

    def call() -> None:
        ddp.zero_grad()
        ddp(inputs).sum().backward()

    for _ in range(2):  # DDP orders its buckets after the first
        call()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    return call


def all_to_all_call(case: Case, group: dist.ProcessGroup) -> Call:
    """Return an all_to_all of equal parts whose result has been looked at."""
    size, rank = group.size(), group.rank()
    part = case.num_elements // size
    given = torch.arange(size, dtype=torch.float32).repeat_interleave(part) + size * rank
    taken = torch.empty_like(given)

    def call() -> None:
        dist.all_to_all_single(taken, given, group=group)

    call()
    if not torch.equal(taken, (size * torch.arange(size) + rank).float().repeat_interleave(part)):
        raise SystemExit("all_to_all gave a wrong result")
    return call


def copy_call(case: Case) -> Call:
    """Return a copy of the case's bytes: what memory allows for taking a tensor in and giving one out."""
    source = torch.ones(case.num_elements)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def mpi_call(case: Case) -> Call:
    """Return an all-reduce by OpenMPI whose result has been looked at."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    values = torch.full((case.num_elements,), float(world.rank + 1)).numpy()
    world.Allreduce(MPI.IN_PLACE, values)
    if not (values == world.size * (world.size + 1) / 2).all():
        raise SystemExit("OpenMPI gave a wrong sum")
    values[:] = 0
    return lambda: world.Allreduce(MPI.IN_PLACE, values)


def seconds_of(call: Call, num_calls: int, groups: Groups) -> tuple[float, float]:
    """Return the seconds that a call takes, and the processor's that this rank's threads use for it."""
    groups.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - begin) / num_calls, (time.process_time() - used) / num_calls


Samples = dict[str, list[float]]


def calls_in_a_sample(call: Call, groups: Groups) -> int:
    """Return how many calls take about ``MIN_SAMPLE_S``.

    Ranks leave a barrier at different times, so that few calls take longer each than many.
    """
    num_calls = 1
    for turn in range(6):
        (once,) = groups.largest([seconds_of(call, num_calls, groups)[0]])
        enough = min(max(round(MIN_SAMPLE_S / once), 1), 1000)
        if turn + 1 >= WARM_UPS and enough <= 1.25 * num_calls:
            break
        num_calls = enough
    return num_calls


def samples_of(calls: dict[str, Call], groups: Groups, repeats: int) -> tuple[Samples, Samples]:
    """Return the largest seconds and processor seconds of any rank, ``repeats`` times, by turns."""
    num_calls = {name: calls_in_a_sample(call, groups) for name, call in calls.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name in list(calls) if turn % 2 == 0 else reversed(list(calls)):
            samples[name].append(seconds_of(calls[name], num_calls[name], groups))
    wall, processor = (
        {name: groups.largest([pair[column] for pair in pairs]) for name, pairs in samples.items()}
        for column in (0, 1)
    )
    return wall, processor


def cases_of(spec: dict[str, Any], num_ranks: int) -> Iterator[Case]:
    for collective, num_bytes in spec["cases"]:
        num_elements = -(-num_bytes // (4 * num_ranks)) * num_ranks
        yield Case(collective=collective, num_elements=num_elements, num_bytes=num_elements * 4)


def call_of(name: str, group: dist.ProcessGroup | None, case: Case) -> Call | None:
    """Return the call of a case on a backend, or ``None`` for all but all_reduce where there is no group."""
    if group is None:
        if case.collective != "all_reduce":
            return None
        return {"openmpi": mpi_call, "copy": copy_call}[name](case)
    if case.collective == MANY:
        return many_calls(case.num_bytes, group)
    if case.collective == SMALL_LAYERS:
        return step_call(case.num_bytes, group)
    if case.collective == ALL_TO_ALL:
        return all_to_all_call(case, group)
    return prepare(case, group, torch.float32, name)


@with_groups("gloo")
def measure(spec: dict[str, Any], groups: Groups) -> dict[str, Samples]:
    """Return the samples of each case, and of its processor time, by backend."""
    backends = dict(groups.of_backend)
    for name, given in spec["backends"].items():
        if given is not None:
            backends[name] = shoal_group(given, in_python=name == IN_PYTHON)
    result: dict[str, Samples] = {}
    for case, (collective, num_bytes) in zip(cases_of(spec, groups.size), spec["cases"], strict=True):
        calls = {}
        for name in spec["backends"]:
            if (call := call_of(name, backends.get(name), case)) is not None:
                calls[name] = call
        key = f"{collective} {num_bytes}"
        result[key], result[PROCESSOR + key] = samples_of(calls, groups, spec["repeats"])
    return result
