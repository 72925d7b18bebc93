"""Connects the ranks of a group, which exchange their addresses through the job's store.

Independent of torch: any :class:`~shoal.comm.store.Store` will do.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

from shoal.comm.engine import Engine, EngineOptions, Helper, Peer, fabric_providers
from shoal.comm.helpers import (
    MANY_CONNECTIONS,
    Probe,
    bandwidth_of,
    connections_help,
    helper_keys,
    measured_connections,
    name_of,
    reachable_helpers,
    remember_bandwidths,
    remember_connections,
)
from shoal.comm.server_shares import ServerShares
from shoal.comm.store import LOCATION, MAX_ERROR, RULES, PrefixStore, Records, Store
from shoal.decide.server_assignment import MIB, chunk_pattern, recommended_bucket_bytes
from shoal.env import settings
from shoal.env.launcher import has_other_hosts
from shoal.env.machine import host_identity, network_identity
from shoal.env.secret import job_secret
from shoal.errors import ShoalError, UsageError

LOOPBACK = "127.0.0.1"
MAX_INTERFACES = 8
_ELSEWHERE = "192.0.2.1"
"""An address for documentation, which no host has: the way there is the default route."""
_SIOCGIFADDR = 0x8915
_INTERFACE_NAME_BYTES = 15
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
    returning: Sequence[Peer] | None = None,
    verbose: bool = True,
) -> Engine:
    """Create this rank's engine and connect it to all others.

    Args:
        store: of the job, with keys that belong to this group alone.
        rank: of this process in the group.
        size: number of ranks.
        group: name of the group, the same on all ranks.
        global_rank: rank of this process in the job, for messages.
        timeout: limit for each rank's arrival, and for connecting.
        options: the same on all ranks.
        returning: as in :class:`Engine`.
        verbose: whether rank 0 prints the number of hosts and the bandwidths to stderr.

    Raises:
        CommError: a rank did not come in time or rejected the secret.
        UsageError: an environment variable is wrong.
    """
    records = Records(store, group, None, timeout)
    try:
        secret = job_secret()
        records = Records(store, group, secret, timeout)
        options = options or EngineOptions()
        options = replace(
            options,
            transport=options.transport or settings.transport(),
            network_threads=options.network_threads or settings.network_threads(),
            protection=options.protection or ("encrypt" if settings.encrypt() else None),
        )
        rules = _exchange_rules(records, rank, options, _address_of(store), timeout.total_seconds())
        member = _Member(
            store=store, rank=rank, size=size, group=group, global_rank=global_rank, timeout=timeout,
            options=options, address=local_address(store), rules=rules,
            job_secret=secret, returning=returning,
        )  # fmt: skip
        engine = member.listen(rules["connections"] or 1)
    except ShoalError as problem:
        for key in ("rules", f"peer/{rank}") if rank == 0 else (f"peer/{rank}",):
            records.put(key, {"error": f"rank {rank}: {problem}"[:MAX_ERROR]})
        raise
    hosts = member.connect(engine, records, rules["segment"])
    num_hosts = len(set(hosts))
    bandwidths = [each["bandwidth"] for each in rules["helpers"]] if num_hosts > 1 else []
    text = ""
    if not all(bandwidths):
        engine, rate, bandwidths = _measured(member, engine, records, num_hosts, len(bandwidths))
        engine.set_pattern(chunk_pattern(hosts, bandwidths))
        text = f", {rate * 8e-6:,.0f} Mbit/s each"
    if num_hosts > 1:
        names = [each["name"] for each in rules["helpers"]]
        engine.shares = ServerShares(engine, hosts, names, [b or 1.0 for b in bandwidths])
    if rank == 0 and num_hosts > 1 and verbose:
        _print_network(num_hosts, size, options.transport, text, bandwidths)
    return engine


@dataclass(frozen=True, kw_only=True)
class _Member:
    """This rank of a group, which makes another engine where the first one has too few connections."""

    store: Store
    rank: int
    size: int
    group: str
    global_rank: int
    timeout: timedelta
    options: EngineOptions
    address: str
    rules: dict[str, Any]
    job_secret: bytes | None
    returning: Sequence[Peer] | None

    def listen(self, connections: int, *, share: bool = True) -> Engine:
        """Return a new engine, with so many connections for data to each peer."""
        secret = self.job_secret
        return Engine(
            rank=self.rank, size=self.size, group=self.group, address=self.address,
            options=replace(self.options, connections_per_peer=connections), share_connections=share,
            returning=self.returning,
            secret=secret if secret is not None else bytes.fromhex(self.rules["secret"]),
        )  # fmt: skip

    def connect(self, engine: Engine, records: Records, segment: str) -> list[str]:
        """Connect an engine to those of the other ranks and to the helpers; return the host of each rank."""
        location = Peer(
            host=host_identity(), address=self.address, port=engine.port, global_rank=self.global_rank,
            pid=os.getpid(), key=engine.public_key,
        )  # fmt: skip
        peers = _exchange_locations(records, self.rank, self.size, location)
        helpers = self.rules["helpers"]
        if len({peer.host for peer in peers}) == 1:  # shared memory only
            helpers = []
        elif self.options.order == "rank":  # each rank counts as a host; servers add in rank order
            peers = [replace(peer, host=f"{peer.host}/{number}") for number, peer in enumerate(peers)]
        hosts = [peer.host for peer in peers]
        pattern = chunk_pattern(hosts, [each["bandwidth"] or 1.0 for each in helpers])
        endpoints = [
            Helper(address=each["address"], port=each["port"], name=each["name"], key=each["key"])
            for each in helpers
        ]
        engine.connect(peers, endpoints, pattern, segment=segment, timeout_s=self.timeout.total_seconds())
        return hosts

    def another(self, connections: int, purpose: str, *, share: bool) -> tuple[Engine, Records]:
        """Return a connected engine beside the first one, and records of its own."""
        part = f"{connections}-connections-{purpose}"
        records = Records(PrefixStore(f"{part}/", self.store), self.group, self.job_secret, self.timeout)
        engine = self.listen(connections, share=share)
        self.connect(engine, records, f"{self.rules['segment']}-{part}")
        return engine, records


def _measured(
    member: _Member, engine: Engine, records: Records, num_hosts: int, num_helpers: int
) -> tuple[Engine, float, list[float]]:
    """Measure the links; return the engine with as many connections as they need, a host's rate and the
    helpers' multiples of it."""
    probe = Probe(
        engine=engine, records=records, rank=member.rank, size=member.size, num_hosts=num_hosts,
        timeout_s=member.timeout.total_seconds(),
    )  # fmt: skip
    host = probe.host_rate()
    if not member.rules["connections"] and not fabric_providers(member.options.transport):
        trial, its_records = member.another(MANY_CONNECTIONS, "trial", share=False)
        other = replace(probe, engine=trial, records=its_records)
        several = connections_help(probe.host_rate, other.host_rate, host)
        trial.close()
        remember_connections(MANY_CONNECTIONS if several else 1)
        if several:
            engine.close()
            engine, records = member.another(MANY_CONNECTIONS, "group", share=True)
            probe = replace(probe, engine=engine, records=records)
            host = probe.host_rate()
    bandwidths = probe.helper_rates(host, num_helpers)
    remember_bandwidths([each["name"] for each in member.rules["helpers"]], bandwidths)
    return engine, host, bandwidths


_random_secrets: dict[str, str] = {}
"""Secrets by the address of the groups' store. Later groups there use the same, and so share connections."""


def _exchange_rules(
    records: Records, rank: int, options: EngineOptions, store_address: str, timeout_s: float
) -> dict[str, Any]:
    """Return the settings that rank 0 decides, as in :data:`RULES`.

    Without ``SHOAL_SECRET`` the secret is random and in the store: any process that can read the store may
    join. ``store_address`` tells stores apart.
    """
    if rank == 0:
        if settings.helpers() and job_secret() is None:
            raise UsageError(
                "SHOAL_HELPERS is set but SHOAL_SECRET is not; helper hosts admit only who knows their "
                "secret: set SHOAL_SECRET or SHOAL_SECRET_FILE on all hosts"
            )
        helpers = reachable_helpers(workers_serve=options.workers_serve, timeout_s=timeout_s)
        keys = helper_keys(helpers)
        new_secret = secrets.token_hex(_SECRET_BYTES)
        rules = {
            "helpers": [
                {**asdict(each), "name": name_of(each), "bandwidth": bandwidth_of(each) or 0.0, "key": key}
                for each, key in zip(helpers, keys, strict=True)
            ],
            "options": asdict(options),
            "connections": options.connections_per_peer or measured_connections(),
            "segment": f"shoal-{os.getpid()}-{secrets.token_hex(8)}",
            "secret": "" if job_secret() is not None else _random_secrets.get(store_address) or new_secret,
        }
        records.put("rules", rules)
    rules = records.get("rules", 0, RULES)
    if rules["secret"] and store_address:
        _random_secrets.setdefault(store_address, str(rules["secret"]))
    if rules["options"] != asdict(options):
        raise UsageError(f"rank {rank} has other pg_options than rank 0: {options}; give all ranks the same")
    return rules


def _exchange_locations(records: Records, rank: int, size: int, location: Peer) -> list[Peer]:
    """Return the location of every rank, in rank order."""
    record = {**asdict(location), "node": os.uname().nodename, "network": network_identity()}
    records.put(f"peer/{rank}", record)
    locations = [records.get(f"peer/{other}", other, LOCATION) for other in range(size)]
    endpoints = [Endpoint(each.pop("node"), each["address"], each.pop("network")) for each in locations]
    try:
        refuse_loopback(endpoints)
    except UsageError:
        records.wait_for_readers(rank, size)
        raise
    return [Peer(**each) for each in locations]


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


# ---- hosts and addresses --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """Address on which a rank listens, and the network in which a loopback address reaches it."""

    node: str
    """host name, for messages"""
    address: str
    """or several, separated by commas"""
    network: str
    """the rank's :func:`~shoal.env.machine.network_identity`"""


def refuse_loopback(endpoints: Sequence[Endpoint]) -> None:
    """Refuse a loopback address that a rank in another network would have to reach.

    Args:
        endpoints: of all ranks, in rank order.

    Raises:
        UsageError: there is one.
    """
    for rank, endpoint in enumerate(endpoints):
        if not any(map(_is_loopback, endpoint.address.split(","))):
            continue
        for other, elsewhere in enumerate(endpoints):
            if elsewhere.network != endpoint.network:
                raise UsageError(
                    f"rank {rank} on host {endpoint.node} listens at {endpoint.address}, which rank {other} "
                    f"on host {elsewhere.node} cannot reach: there the host of MASTER_ADDR (or, without a "
                    "TCP store, its own name) has a loopback address or none; set SHOAL_INTERFACE on "
                    f"{endpoint.node} to the name or the address of an interface that the hosts share"
                )


def _is_loopback(address: str) -> bool:
    try:
        return bool(ipaddress.ip_address(address).is_loopback)
    except ValueError:  # another rank's, which nobody will reach
        return False


def local_address(store: Store) -> str:
    """Return the address on which this process listens: IPv4 where there is one, else IPv6.

    That is ``SHOAL_INTERFACE`` if set, where several interfaces give as many addresses, separated by commas;
    else the address from which this host reaches the store's ``host``, if it has one, or its own name. Where
    such a name stands for the loopback interface (``localhost``, or Debian's 127.0.1.1) and the launcher says
    that there are other hosts, it is that of the default route or of the only other interface.

    Raises:
        UsageError: there is no such interface.
    """
    if interfaces := settings.interface():
        return interface_addresses(interfaces)
    host = getattr(_without_prefix(store), "host", "") or socket.gethostname()
    address = _address_towards(host) or LOOPBACK
    if _is_loopback(address) and address != host and has_other_hosts():
        return _outgoing_address() or address
    return address


def _address_towards(host: str) -> str | None:
    """Return the address from which this host reaches another, or ``None`` if it is unreachable."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((host, 9))  # sends nothing, only selects a route
            return str(probe.getsockname()[0])
    return None


def _outgoing_address() -> str | None:
    """Return this host's address on the default route, or that of its only interface beside loopback."""
    if address := _address_towards(_ELSEWHERE):
        return address
    addresses = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(UsageError):
            addresses.append(interface_address(name))
    others = [address for address in addresses if not _is_loopback(address)]
    return others[0] if len(others) == 1 else None


def _without_prefix(store: Any) -> Any:
    """Return the store inside torch's ``PrefixStore``."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def _address_of(store: Store) -> str:
    """Return a string that is equal for stores with the same server or file; empty if they have neither."""
    inner = _without_prefix(store)
    if path := getattr(inner, "path", ""):
        return str(path)
    host = getattr(inner, "host", "")
    return f"{host}:{getattr(inner, 'port', '')}" if host else ""


def interface_addresses(names: str) -> str:
    """Return the addresses of interfaces, both separated by commas.

    Raises:
        UsageError: there is no such interface, they are too many, or two are the same.
    """
    addresses = [interface_address(each) for each in names.split(",")]
    if len(set(addresses)) < len(addresses) or len(addresses) > MAX_INTERFACES:
        raise UsageError(
            f"SHOAL_INTERFACE={names} stands for {', '.join(addresses)}: give up to {MAX_INTERFACES} "
            "interfaces, each once"
        )
    return ",".join(addresses)


def interface_address(name_or_address: str) -> str:
    """Return an address unchanged, or the IPv4 address of the interface of this name.

    Raises:
        UsageError: it is neither.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(name_or_address))
    request = struct.pack("256s", name_or_address.encode()[:_INTERFACE_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as problem:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"SHOAL_INTERFACE={name_or_address}: no such address or interface with an IPv4 address "
                f"({problem.strerror}); this host has {names}"
            ) from None
