"""Locates a rank: the host whose memory it shares, its address, and the network of that address."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shoal import env
from shoal.errors import UsageError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_INTERFACE_NAME_BYTES = 15


@dataclass(frozen=True)
class Endpoint:
    """The address at which a rank listens, and the network in which a loopback address means it."""

    node: str
    """name of its host, for messages"""
    address: str
    network: str
    """what :func:`network_identity` returns there"""


def host_identity() -> str:
    """Return a text that is the same for two processes exactly if they may share memory.

    It holds the boot id, the network namespace (a container or an emulated host has its own), the file system
    of ``/dev/shm`` and the node's name. ``SHOAL_HOST_ID`` overrides it.
    """
    if given := env.host_id():
        return given
    parts = [os.uname().nodename, _boot(), _network_namespace()]
    try:
        parts.append(str(Path("/dev/shm").stat().st_dev))
    except OSError:
        parts.append("?")
    return "/".join(parts)


def network_identity() -> str:
    """Return a text that is the same for two processes if they have the same loopback addresses.

    ``SHOAL_HOST_ID`` does not change it: the hosts that it makes of one machine share the loopback.
    """
    parts = [_boot(), _network_namespace()]
    return "/".join(parts if "?" not in parts else [os.uname().nodename, *parts])


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "?"


def _network_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:
        return "?"


def refuse_loopback(places: Sequence[Endpoint]) -> None:
    """See that ranks of other hosts do not have to reach a loopback address. ``places`` is in rank order.

    Raises:
        UsageError: they would have to.
    """
    for rank, place in enumerate(places):
        if not ipaddress.IPv4Address(place.address).is_loopback:
            continue
        for other, elsewhere in enumerate(places):
            if elsewhere.network != place.network:
                raise UsageError(
                    f"rank {rank} on host {place.node} listens at {place.address}, which rank {other} on "
                    f"host {elsewhere.node} cannot reach: there the host of MASTER_ADDR (or, without a "
                    "TCP store, its own name) has a loopback address or no IPv4 address; set SHOAL_INTERFACE "
                    f"on {place.node} to the name or the IPv4 address of the interface that the hosts share"
                )


def local_address(store: Store) -> str:
    """Return the IPv4 address on which this process is to listen.

    That is ``SHOAL_INTERFACE``, or else the address from which this host reaches the store.

    Raises:
        UsageError: there is no such interface.
    """
    if given := env.interface():
        return interface_address(given)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, TCPStore) else socket.gethostname()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only chooses a route
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def interface_address(given: str) -> str:
    """Return the address itself, or that of the interface of this name.

    Raises:
        UsageError: it is neither.
    """
    try:
        socket.inet_aton(given)
        return given
    except OSError:
        pass
    request = struct.pack("256s", given.encode()[:_INTERFACE_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as problem:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"SHOAL_INTERFACE={given}: no such address or interface with an IPv4 address "
                f"({problem.strerror}); this host has {names}"
            ) from None
