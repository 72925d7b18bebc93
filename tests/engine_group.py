"""Runs engines as threads of one process, over loopback and shared memory, with NumPy oracles of sums."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from shoal import native
from shoal.comm.engine import Engine, EngineOptions, Helper, Operation, Peer
from shoal.decide.server_assignment import chunk_pattern

SECRET = b"secret of the tests"
DEADLINE_S = 60.0
"""Far more than anything here takes: reached only by a hang."""

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")

PLACEMENTS: dict[str, tuple[list[str], int]] = {
    "two hosts": (["a", "b"], 0),
    "one host": (["a", "a", "a"], 0),
    "two hosts of two": (["a", "a", "b", "b"], 0),
    "three and one": (["a", "a", "a", "b"], 0),
    "a host with a gap": (["a", "b", "a"], 0),
    "three hosts, two helpers": (["a", "b", "c"], 2),
    "hosts of two, a helper": (["a", "a", "b", "b"], 1),
    "eight ranks": (["a", "a", "b", "c", "c", "c", "b", "d"], 0),
}
"""Name: host of each rank, number of helper hosts."""

STORAGE = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
    "int64": np.int64,
}
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int32", "int64")

_numbers = itertools.count()


@dataclass
class Group:
    """The engines of all ranks."""

    hosts: list[str]
    engines: list[Engine]
    servers: list[Any]

    @property
    def size(self) -> int:
        return len(self.engines)

    def each(self, call: Callable[[int, Engine], T]) -> list[T]:
        return on_threads(self.size, lambda rank: call(rank, self.engines[rank]))

    def run(self, kind: str, inputs: Sequence[Array], outputs: Sequence[Array], **words: Any) -> None:
        """Do one collective on all ranks."""
        self.each(
            lambda rank, engine: wait(engine, submit(engine, kind, inputs[rank], outputs[rank], **words))
        )


def on_threads(count: int, call: Callable[[int], T]) -> list[T]:
    """Return call(0) ... call(count - 1), each made on a thread of its own; raises the first error."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = call(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * DEADLINE_S)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


@contextmanager
def engine_group(
    hosts: Sequence[str], num_helpers: int = 0, *, pattern: Sequence[int] | None = None, **options: Any
) -> Iterator[Group]:
    """Engines that have met, one for each entry of ``hosts``; closed at the end."""
    name = f"test-{os.getpid()}-{next(_numbers)}"
    servers = [native.core().HelperServer("127.0.0.1", 0, SECRET, 0) for _ in range(num_helpers)]
    for server in servers:
        server.start()
    size = len(hosts)
    settings = EngineOptions(**options)
    engines = [
        Engine(rank=rank, size=size, group=name, secret=SECRET, address="127.0.0.1", options=settings)
        for rank in range(size)
    ]
    peers = [
        Peer(
            host=host,
            address="127.0.0.1",
            port=engine.port,
            global_rank=rank,
            pid=1000 + rank,
            key=engine.public_key,
        )
        for rank, (host, engine) in enumerate(zip(hosts, engines, strict=True))
    ]
    helpers = [Helper(address="127.0.0.1", port=s.port, name=f"helper{k}") for k, s in enumerate(servers)]
    order = list(pattern) if pattern is not None else chunk_pattern(hosts, [1.0] * num_helpers)
    group = Group(list(hosts), engines, servers)
    group.each(lambda _, engine: engine.connect(peers, helpers, order, segment=name, timeout_s=DEADLINE_S))
    try:
        yield group
    finally:
        group.each(lambda _, engine: engine.close())
        for server in servers:
            server.stop()


def submit(
    engine: Engine,
    kind: str,
    input: Array,
    output: Array,
    *,
    dtype: str = "",
    op: str = "sum",
    root: int = 0,
    timeout_s: float = DEADLINE_S,
) -> int:
    count = output.size if kind == "reduce_scatter" else input.size
    asked = Operation(
        kind=kind,
        input=input.ctypes.data,
        output=output.ctypes.data,
        count=count,
        dtype=dtype or str(input.dtype),
        op=op,
        root=root,
        shape=(count,),
        timeout_s=timeout_s,
    )
    return engine.submit(asked)


def wait(engine: Engine, handle: int) -> None:
    assert engine.wait(handle, 2 * DEADLINE_S), "an operation hangs"


# ---- values and their sums --------------------------------------------------------------------------------


def widen(values: Array, dtype: str) -> Array:
    """Return what is added: 16-bit floats in fp32, the rest as it is."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if dtype == "float16" else values


def narrow(values: Array, dtype: str) -> Array:
    """Round to nearest, ties to even, into the storage of ``dtype``. No NaN."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(STORAGE[dtype])


def random_values(count: int, dtype: str, seed: int, *, spread: int = 8) -> Array:
    """Finite values; floats over ``2 * spread`` powers of two, so that order and every rounding show."""
    rng = np.random.default_rng(seed)
    if dtype in INTEGERS:
        limits = np.iinfo(STORAGE[dtype])
        return rng.integers(limits.min, limits.max, count, STORAGE[dtype], endpoint=True)
    exact = np.ldexp(
        rng.uniform(1, 2, count) * rng.choice([-1, 1], count), rng.integers(-spread, spread, count)
    )
    return narrow(exact.astype(np.float32) if dtype == "bfloat16" else exact, dtype)


STEPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def operations_of(dtype: str) -> list[str]:
    return ["sum", "avg", "prod", "min", "max"] if dtype in FLOATS else [o for o in STEPS if o != "avg"]


def expected(
    hosts: Sequence[str],
    inputs: Sequence[Array],
    dtype: str,
    op: str = "sum",
    *,
    partial_dtype: str = "float32",
) -> Array:
    """Return the promised bits: ranks of a host in order, then hosts by their lowest rank, one rounding.

    With ``partial_dtype="input"`` each host's part is rounded too where hosts have several ranks.
    """
    by_host: dict[str, list[Array]] = {}
    for host, values in zip(hosts, inputs, strict=True):
        by_host.setdefault(host, []).append(widen(values, dtype))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        parts = []
        for values in by_host.values():
            part = values[0]
            for other in values[1:]:
                part = STEPS[op](part, other)
            parts.append(
                widen(narrow(part, dtype), dtype) if partial_dtype == "input" and len(by_host) > 1 else part
            )
        total = parts[0]
        for part in parts[1:]:
            total = STEPS[op](total, part)
        if op == "avg":
            total = total / total.dtype.type(len(hosts))
        return narrow(total, dtype)


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()
