"""Connects the ranks of a group, which exchange addresses through torch's store; probes helper bandwidths."""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from shoal import env
from shoal.comm.addresses import Endpoint, host_identity, local_address, network_identity, refuse_loopback
from shoal.comm.engine import Engine, EngineOptions, Helper, Operation, Peer, fabric_providers
from shoal.comm.helpers import bandwidth_of, name_of, reachable_helpers, remember_bandwidths
from shoal.comm.single_process import SingleProcessEngine
from shoal.comm.store import LOCATION, MAX_ERROR, RULES, Records
from shoal.decide.server_assignment import MIB, assign_chunks, chunk_pattern, recommended_bucket_bytes
from shoal.errors import ShoalError, UsageError

_SECRET_BYTES = 32

_PROBE_HOST_S = 0.15
_PROBE_ALL_HELPERS_S = 0.25
_PROBE_HELPER_S = 0.04
_PROBE_MIN_BYTES = 128 << 10
_PROBE_MAX_BYTES = 64 << 20
_PROBE_TIMEOUT_S = 30.0
_MAX_PROBED_HELPERS = 12
_PATTERN_LENGTH = 240
_SAME_RATE = 1.3  # a short probe does not resolve smaller ratios between helpers
_RESOLUTION = 20  # multiples are rounded to 1/20: the probe is no more accurate, and patterns stay short


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A rank of a process group and its engine."""

    store: Store
    rank: int
    size: int
    name: str
    global_rank: int
    engine: Engine | SingleProcessEngine
    options: EngineOptions


def connect_engine(
    store: Store,
    rank: int,
    size: int,
    group: str,
    global_rank: int,
    timeout: timedelta,
    options: EngineOptions | None = None,
    *,
    verbose: bool = True,
) -> Engine:
    """Create this rank's engine and connect it to all others.

    All ranks call it with the same ``options``. If ``verbose``, rank 0 prints the number of hosts and the
    bandwidths to stderr.

    Raises:
        CommError: a rank did not come in time or rejected the secret.
        UsageError: an environment variable is wrong.
    """
    records = Records(store, group, None, timeout)
    try:
        records = Records(store, group, env.secret(), timeout)
        options = options or EngineOptions()
        options = replace(options, transport=options.transport or env.transport())
        rules = _exchange_rules(records, rank, options)
        address = local_address(store)
        secret = env.secret()
        engine = Engine(
            rank=rank, size=size, group=group, address=address, options=options,
            secret=secret if secret is not None else bytes.fromhex(rules["secret"]),
        )  # fmt: skip
    except ShoalError as problem:
        for key in ("rules", f"peer/{rank}") if rank == 0 else (f"peer/{rank}",):
            records.put(key, {"error": f"rank {rank}: {problem}"[:MAX_ERROR]})
        raise
    location = {
        "host": host_identity(),
        "address": address,
        "port": engine.port,
        "global_rank": global_rank,
        "pid": os.getpid(),
        "node": os.uname().nodename,
        "network": network_identity(),
    }
    records.put(f"peer/{rank}", location)
    found = [records.get(f"peer/{other}", other, LOCATION) for other in range(size)]
    endpoints = [Endpoint(each.pop("node"), each["address"], each.pop("network")) for each in found]
    peers = [Peer(**each) for each in found]
    try:
        refuse_loopback(endpoints)
    except UsageError:
        records.wait_for_readers(rank, size)
        raise
    hosts = [peer.host for peer in peers]
    num_hosts = len(set(hosts))
    bandwidths = [each.pop("bandwidth") for each in rules["helpers"]]
    helpers = [Helper(**each) for each in rules["helpers"]]
    if num_hosts == 1:  # shared memory only
        helpers, bandwidths = [], []
    elif options.order == "rank":  # each rank counts as a host; servers add in rank order
        peers = [replace(peer, host=f"{peer.host}/{number}") for number, peer in enumerate(peers)]
        hosts = [peer.host for peer in peers]
    pattern = chunk_pattern(hosts, [bandwidth or 1.0 for bandwidth in bandwidths])
    engine.connect(peers, helpers, pattern, segment=rules["segment"], timeout_s=timeout.total_seconds())
    rate_text = ""
    if not all(bandwidths):
        rate, bandwidths = measure_helpers(
            engine, records, rank=rank, size=size, num_hosts=num_hosts, num_helpers=len(helpers)
        )
        remember_bandwidths([helper.name for helper in helpers], bandwidths)
        engine.set_pattern(chunk_pattern(hosts, bandwidths))
        rate_text = f", {rate * 8e-6:,.0f} Mbit/s each"
    if rank == 0 and num_hosts > 1 and verbose:
        _print_network(num_hosts, size, options.transport, rate_text, bandwidths)
    return engine


def _print_network(
    num_hosts: int, size: int, transport: str | None, rate: str, bandwidths: list[float]
) -> None:
    bucket = recommended_bucket_bytes(num_hosts, ranks_per_host=-(-size // num_hosts))
    ratios = ", ".join(f"{bandwidth:g}" for bandwidth in bandwidths)
    links = f"; {len(bandwidths)} helpers with {ratios} times that" if bandwidths else ""
    over = f"libfabric ({providers})" if (providers := fabric_providers(transport)) else "TCP"
    _print_once(f"shoal: {num_hosts} hosts over {over}{rate}{links}; bucket_cap_mb={bucket // MIB} suits")


@cache
def _print_once(line: str) -> None:
    """Print a line to stderr; further groups of the same shape do not repeat it."""
    print(line, file=sys.stderr)


def _exchange_rules(records: Records, rank: int, options: EngineOptions) -> dict[str, Any]:
    """Return the settings that rank 0 decides, as in :data:`RULES`.

    Without ``SHOAL_SECRET`` the secret is random and in the store: any process that can read the store may
    join.
    """
    if rank == 0:
        if env.helpers() and env.secret() is None:
            raise UsageError(
                "SHOAL_HELPERS is set but SHOAL_SECRET is not; helper hosts admit only who knows their "
                "secret: set SHOAL_SECRET or SHOAL_SECRET_FILE on all hosts"
            )
        helpers = reachable_helpers(workers_serve=options.workers_serve)
        rules = {
            "helpers": [
                {**asdict(each), "name": name_of(each), "bandwidth": bandwidth_of(each) or 0.0}
                for each in helpers
            ],
            "options": asdict(options),
            "segment": f"shoal-{os.getpid()}-{secrets.token_hex(8)}",
            "secret": "" if env.secret() is not None else secrets.token_hex(_SECRET_BYTES),
        }
        records.put("rules", rules)
    rules = records.get("rules", 0, RULES)
    if rules["options"] != asdict(options):
        raise UsageError(f"rank {rank} has other pg_options than rank 0: {options}; give all ranks the same")
    return rules


# ---- bandwidth probe ------------------------------------------------------------------------------------
# Runs once, when a group with helper hosts starts. Rank 0's clock decides, and the store carries its
# readings, so that all ranks use the same pattern. It takes about 0.5 s, and 0.2 s per helper;
# SHOAL_HELPERS=address:port*2.0 gives the bandwidth and avoids it.


def measure_helpers(
    engine: Engine, records: Records, *, rank: int, size: int, num_hosts: int, num_helpers: int
) -> tuple[float, list[float]]:
    """Measure a worker host's bandwidth, and each helper's as a multiple of it. All ranks call it.

    It measures the workers' links first, then each of the first 12 helpers for a moment, to compare them, and
    last all helpers together, for their sum.

    Returns:
        The bandwidth of a worker host in bytes/s, and the multiple of each helper.

    Raises:
        CommError: the group failed.
    """
    engine.set_pattern(list(range(size)))
    num_bytes, took_s = _PROBE_MIN_BYTES, 0.0
    for attempt in range(32):
        took_s = _timed(engine, num_bytes)
        enough = took_s >= _PROBE_HOST_S or num_bytes >= _PROBE_MAX_BYTES
        next_bytes = _from_rank_0(records, rank, f"probe/{attempt}", 0 if enough else num_bytes * 2)
        if not next_bytes:
            break
        num_bytes = int(next_bytes)
    host = _from_rank_0(records, rank, "probe/host", 2 * (num_hosts - 1) / num_hosts * num_bytes / took_s)
    rates = []
    for helper in range(min(num_helpers, _MAX_PROBED_HELPERS)):
        engine.set_pattern([size + helper])
        share = max(int(host * _PROBE_HELPER_S / num_hosts), _PROBE_MIN_BYTES)
        _timed(engine, share // 2)  # warms up the connections
        rates.append(_from_rank_0(records, rank, f"probe/helper/{helper}", share / _timed(engine, share)))
    weights = _relative_rates(rates) + [1.0] * (num_helpers - len(rates))
    engine.set_pattern([size + helper for helper in assign_chunks(_PATTERN_LENGTH, weights)])
    num_bytes = min(int(host * _PROBE_ALL_HELPERS_S), _PROBE_MAX_BYTES)
    together = num_hosts * num_bytes / _timed(engine, num_bytes) / host
    together = _from_rank_0(records, rank, "probe/together", together)
    return host, _multiples(weights, together, num_hosts)


def _relative_rates(rates: list[float]) -> list[float]:
    """Return rates as multiples of their mean; all 1 if they differ little."""
    mean = sum(rates) / len(rates)
    same = max(rates) <= _SAME_RATE * min(rates)
    return [1.0 if same else rate / mean for rate in rates]


def _multiples(weights: list[float], together: float, num_hosts: int) -> list[float]:
    """Return each helper's bandwidth as a multiple of a worker host's.

    ``together`` is the multiple of all helpers. From about ``num_hosts`` on, the workers' links were the
    limit: the helpers can then take everything, and are not measured more precisely.
    """
    if together > 0.8 * num_hosts:
        together = max(float(num_hosts), together)
    scale = together / sum(weights)
    return [max(round(weight * scale * _RESOLUTION), 1) / _RESOLUTION for weight in weights]


def _timed(engine: Engine, num_bytes: int) -> float:
    """Return the seconds of an all_reduce that all ranks begin together."""
    values = torch.zeros(num_bytes // 4, dtype=torch.float32)
    engine.wait(engine.submit(Operation(kind="barrier", timeout_s=_PROBE_TIMEOUT_S)))
    operation = Operation(
        kind="all_reduce", input=values.data_ptr(), output=values.data_ptr(), count=values.numel(),
        dtype="float32", shape=tuple(values.shape), timeout_s=_PROBE_TIMEOUT_S,
    )  # fmt: skip
    begin = time.perf_counter()
    engine.wait(engine.submit(operation))
    return time.perf_counter() - begin


def _from_rank_0(records: Records, rank: int, key: str, value: float) -> float:
    """Return rank 0's value."""
    if rank == 0:
        records.put(key, {"value": float(value)})
    return float(records.get(key, 0, {"value": float})["value"])
