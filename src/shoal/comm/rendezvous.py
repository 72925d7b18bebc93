"""How the ranks of a group find each other: each puts its address into torch's store and reads all."""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import asdict, replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from shoal import env
from shoal.comm.addresses import host_identity, local_address, network_identity, refuse_loopback
from shoal.comm.engine import Engine, EngineOptions, Helper, Operation, fabric_providers
from shoal.comm.helpers import bandwidth_of, name_of, reachable_helpers, remember_bandwidths
from shoal.comm.store import Records, Rules, parse_peer, parse_rules
from shoal.decide.server_assignment import MIB, assign_chunks, chunk_pattern, recommended_bucket_bytes
from shoal.errors import ShoalError, UsageError

_SECRET_BYTES = 32


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
    """Make this rank's engine and connect it to all others. All ranks call it, with the same ``options``.

    Rank 0 prints what was found, if ``verbose``.

    Raises:
        CommError: a rank did not come in time or refused the secret.
        UsageError: an environment variable is wrong.
    """
    records = Records(store, group, None, timeout)
    try:
        records = Records(store, group, env.secret(), timeout)
        options = options or EngineOptions()
        options = replace(options, transport=options.transport or env.transport())
        rules = _common_rules(records, rank, options)
        engine, address = _listen(store, rules, rank, size, group, options)
    except ShoalError as problem:
        for key in ("rules", f"peer/{rank}") if rank == 0 else (f"peer/{rank}",):
            records.put_error(key, f"rank {rank}: {problem}")
        raise
    me = {
        "host": host_identity(),
        "address": address,
        "port": engine.port,
        "global_rank": global_rank,
        "pid": os.getpid(),
        "node": os.uname().nodename,
        "network": network_identity(),
    }
    records.put(f"peer/{rank}", me)
    found = [parse_peer(records.get(f"peer/{other}", other)) for other in range(size)]
    peers = [peer for peer, _ in found]
    try:
        refuse_loopback([place for _, place in found])
    except UsageError:
        records.wait_for_readers(rank, size)
        raise
    hosts = [peer.host for peer in peers]
    num_hosts = len(set(hosts))
    helpers, bandwidths = rules.helpers, rules.bandwidths
    if num_hosts == 1:  # shared memory does it all
        helpers, bandwidths = [], []
    elif options.order == "rank":  # each rank's tensor travels by itself; servers add in rank order
        peers = [replace(peer, host=f"{peer.host}/{number}") for number, peer in enumerate(peers)]
        hosts = [peer.host for peer in peers]
    start = chunk_pattern(hosts, [bandwidth or 1.0 for bandwidth in bandwidths])
    engine.connect(peers, helpers, start, segment=rules.segment, timeout_s=timeout.total_seconds())
    if not all(bandwidths):
        rate, measured = measure_helpers(
            engine, records, rank=rank, size=size, num_hosts=num_hosts, num_helpers=len(helpers)
        )
        remember_bandwidths([helper.name for helper in helpers], measured)
        engine.set_pattern(chunk_pattern(hosts, measured))
        if rank == 0 and verbose:
            _report(num_hosts, size, options.transport, f", {rate * 8e-6:,.0f} Mbit/s each", measured)
    elif rank == 0 and num_hosts > 1 and verbose:
        _report(num_hosts, size, options.transport, "", bandwidths)
    return engine


def _listen(
    store: Store, rules: Rules, rank: int, size: int, group: str, options: EngineOptions
) -> tuple[Engine, str]:
    address = local_address(store)
    given = env.secret()
    secret = given if given is not None else bytes.fromhex(rules.secret)
    return Engine(rank=rank, size=size, group=group, secret=secret, address=address, options=options), address


# What has been told: further groups of the same shape are not worth a line.
_reported: set[str] = set()


def _report(num_hosts: int, size: int, transport: str | None, rate: str, helpers: list[float]) -> None:
    bucket = recommended_bucket_bytes(num_hosts, ranks_per_host=-(-size // num_hosts))
    links = (
        f"; {len(helpers)} helpers with {', '.join(f'{ratio:g}' for ratio in helpers)} times that"
        if helpers
        else ""
    )
    over = f"libfabric ({providers})" if (providers := fabric_providers(transport)) else "TCP"
    line = f"shoal: {num_hosts} hosts over {over}{rate}{links}; bucket_cap_mb={bucket // MIB} suits"
    if line not in _reported:
        _reported.add(line)
        print(line, file=sys.stderr)


def _common_rules(records: Records, rank: int, options: EngineOptions) -> Rules:
    """Return what rank 0 decides for all.

    Without ``SHOAL_SECRET`` the secret is random and lies in the store: all who can read the store may join.
    """
    if rank == 0:
        if env.helpers() and env.secret() is None:
            raise UsageError(
                "SHOAL_HELPERS is set but SHOAL_SECRET is not; helper hosts admit only who knows their "
                "secret: set SHOAL_SECRET or SHOAL_SECRET_FILE on all hosts"
            )
        helpers = reachable_helpers(workers_serve=options.workers_serve)
        rules = Rules(
            helpers=[Helper(address=each.address, port=each.port, name=name_of(each)) for each in helpers],
            bandwidths=[bandwidth_of(each) or 0.0 for each in helpers],
            options=asdict(options),
            segment=f"shoal-{os.getpid()}-{secrets.token_hex(8)}",
            secret="" if env.secret() is not None else secrets.token_hex(_SECRET_BYTES),
        )
        records.put("rules", rules.record())
        return rules
    rules = parse_rules(records.get("rules", 0))
    if rules.options != asdict(options):
        raise UsageError(f"rank {rank} has other pg_options than rank 0: {options}; give all ranks the same")
    return rules


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
