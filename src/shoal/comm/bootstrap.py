"""How the ranks of a group find each other: each puts its address into torch's store and reads all."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import asdict, replace
from datetime import timedelta

from torch._C._distributed_c10d import Store

from shoal import env
from shoal.comm.addresses import host_identity, local_address, network_identity, refuse_loopback
from shoal.comm.engine import Engine, EngineOptions, Helper, fabric_providers
from shoal.comm.helpers import bandwidth_of, name_of, note_bandwidths, usable_helpers
from shoal.comm.probe import measure_helpers
from shoal.comm.records import Records, Rules, parse_peer, parse_rules
from shoal.decide.server_assignment import MIB, chunk_pattern, recommended_bucket_bytes
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
    tell: bool = True,
) -> Engine:
    """Make this rank's engine and connect it to all others. All ranks call it, with the same ``options``.

    Rank 0 prints what was found, unless it is not to ``tell``.

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
        records.await_readers(rank, size)
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
        note_bandwidths([helper.name for helper in helpers], measured)
        engine.set_pattern(chunk_pattern(hosts, measured))
        if rank == 0 and tell:
            _tell(num_hosts, size, options.transport, f", {rate * 8e-6:,.0f} Mbit/s each", measured)
    elif rank == 0 and num_hosts > 1 and tell:
        _tell(num_hosts, size, options.transport, "", bandwidths)
    return engine


def _listen(
    store: Store, rules: Rules, rank: int, size: int, group: str, options: EngineOptions
) -> tuple[Engine, str]:
    address = local_address(store)
    given = env.secret()
    secret = given if given is not None else bytes.fromhex(rules.secret)
    return Engine(rank=rank, size=size, group=group, secret=secret, address=address, options=options), address


# What has been told: further groups of the same shape are not worth a line.
_told: set[str] = set()


def _tell(num_hosts: int, size: int, transport: str | None, rate: str, helpers: list[float]) -> None:
    bucket = recommended_bucket_bytes(num_hosts, ranks_per_host=-(-size // num_hosts))
    links = (
        f"; {len(helpers)} helpers with {', '.join(f'{ratio:g}' for ratio in helpers)} times that"
        if helpers
        else ""
    )
    over = f"libfabric ({providers})" if (providers := fabric_providers(transport)) else "TCP"
    line = f"shoal: {num_hosts} hosts over {over}{rate}{links}; bucket_cap_mb={bucket // MIB} suits"
    if line not in _told:
        _told.add(line)
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
        helpers = usable_helpers(workers_serve=options.workers_serve)
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
