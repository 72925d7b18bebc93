"""Measures once, when a group with helper hosts begins, how fast the helpers' links are beside the workers'.

Rank 0's clock decides and the store carries what it says, so that all ranks cut the same way. It takes about
half a second and a fifth for each helper; ``SHOAL_HELPERS=address:port*2.0`` says it without measuring.
"""

from __future__ import annotations

import time

import torch

from shoal.comm.engine import Engine, Operation
from shoal.comm.records import Records
from shoal.decide.server_assignment import assign_chunks

_HOST_S = 0.15
_ALL_HELPERS_S = 0.25
_ONE_HELPER_S = 0.04
_FIRST_BYTES = 128 << 10
_MOST_BYTES = 64 << 20
_MOST_PROBED = 12
_ALIKE = 1.3  # a short measurement tells no finer difference between helpers
_STEPS = 20  # multiples are rounded to a twentieth: no better is measured, and the pattern stays short
_DEADLINE_S = 30.0


def measure_helpers(
    engine: Engine, records: Records, *, rank: int, size: int, num_hosts: int, num_helpers: int
) -> tuple[float, list[float]]:
    """Return a worker host's bandwidth in bytes/s and each helper's as a multiple of it. All ranks call it.

    First the workers' links, then each of the first dozen helpers for a moment, to compare them, and at last
    all helpers together, for their sum.

    Raises:
        CommError: the group failed meanwhile.
    """
    engine.set_pattern(list(range(size)))
    num_bytes, took_s = _FIRST_BYTES, 0.0
    for attempt in range(32):
        took_s = _timed(engine, num_bytes)
        enough = took_s >= _HOST_S or num_bytes >= _MOST_BYTES
        told = _from_rank_0(records, rank, f"probe/{attempt}", 0 if enough else num_bytes * 2)
        if not told:
            break
        num_bytes = int(told)
    host = _from_rank_0(records, rank, "probe/host", 2 * (num_hosts - 1) / num_hosts * num_bytes / took_s)
    alone = []
    for helper in range(min(num_helpers, _MOST_PROBED)):
        engine.set_pattern([size + helper])
        share = max(int(host * _ONE_HELPER_S / num_hosts), _FIRST_BYTES)
        _timed(engine, share // 2)  # lets the connections find their pace
        alone.append(_from_rank_0(records, rank, f"probe/helper/{helper}", share / _timed(engine, share)))
    weights = compare(alone) + [1.0] * (num_helpers - len(alone))
    engine.set_pattern([size + helper for helper in assign_chunks(_PATTERN, weights)])
    num_bytes = min(int(host * _ALL_HELPERS_S), _MOST_BYTES)
    together = num_hosts * num_bytes / _timed(engine, num_bytes) / host
    together = _from_rank_0(records, rank, "probe/together", together)
    return host, multiples(weights, together, num_hosts)


_PATTERN = 240


def compare(rates: list[float]) -> list[float]:
    """Return the helpers' rates as multiples of their mean, all 1 where they are much alike."""
    mean = sum(rates) / len(rates)
    alike = max(rates) <= _ALIKE * min(rates)
    return [1.0 if alike else rate / mean for rate in rates]


def multiples(weights: list[float], together: float, num_hosts: int) -> list[float]:
    """Return each helper's bandwidth as a multiple of a worker host's.

    ``together`` is that of all helpers. From about ``num_hosts`` on the workers' links were the limit: then
    the helpers can take everything, and are not measured any finer.
    """
    if together > 0.8 * num_hosts:
        together = max(float(num_hosts), together)
    scale = together / sum(weights)
    return [max(round(weight * scale * _STEPS), 1) / _STEPS for weight in weights]


def _timed(engine: Engine, num_bytes: int) -> float:
    """Return the seconds of an all-reduce that everybody begins together."""
    values = torch.zeros(num_bytes // 4, dtype=torch.float32)
    handle = engine.submit(Operation(kind="barrier", timeout_s=_DEADLINE_S))
    engine.wait(handle)
    asked = Operation(
        kind="all_reduce", input=values.data_ptr(), output=values.data_ptr(), count=values.numel(),
        dtype="float32", shape=tuple(values.shape), timeout_s=_DEADLINE_S,
    )  # fmt: skip
    begin = time.perf_counter()
    engine.wait(engine.submit(asked))
    return time.perf_counter() - begin


def _from_rank_0(records: Records, rank: int, key: str, value: float) -> float:
    if rank == 0:
        records.put(key, {"value": float(value)})
    found = records.get(key, 0)
    value = found.number("value")
    found.end()
    return value
