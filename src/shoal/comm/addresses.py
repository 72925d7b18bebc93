"""Identifies the host of a rank, its address, and the network in which that address is valid."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Sequence
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
    """Address on which a rank listens, and the network in which a loopback address reaches it."""

    node: str
    """host name, for messages"""
    address: str
    network: str
    """the rank's :func:`network_identity`"""


def host_identity() -> str:
    """Return a string that is equal for two processes exactly if they may share memory.

    It contains the node name, the boot id, the network namespace (a container or an emulated host has its
    own) and the file system of ``/dev/shm``. ``SHOAL_HOST_ID`` overrides it.
    """
    if given := env.host_id():
        return given
    shared_memory = _or_unknown(lambda: Path("/dev/shm").stat().st_dev)
    return "/".join([os.uname().nodename, *_boot_and_network(), shared_memory])


def network_identity() -> str:
    """Return a string that is equal for two processes if they share their loopback interface.

    ``SHOAL_HOST_ID`` does not affect it: the hosts into which it divides a machine share the loopback.
    """
    parts = _boot_and_network()
    return "/".join(parts if "?" not in parts else [os.uname().nodename, *parts])


def _boot_and_network() -> list[str]:
    return [
        _or_unknown(lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip()),
        _or_unknown(lambda: Path("/proc/self/ns/net").stat().st_ino),
    ]


def _or_unknown(read: Callable[[], object]) -> str:
    try:
        return str(read())
    except OSError:
        return "?"


def refuse_loopback(endpoints: Sequence[Endpoint]) -> None:
    """Refuse a loopback address that a rank in another network would have to reach.

    Args:
        endpoints: of all ranks, in rank order.

    Raises:
        UsageError: there is one.
    """
    for rank, endpoint in enumerate(endpoints):
        if not ipaddress.IPv4Address(endpoint.address).is_loopback:
            continue
        for other, elsewhere in enumerate(endpoints):
            if elsewhere.network != endpoint.network:
                raise UsageError(
                    f"rank {rank} on host {endpoint.node} listens at {endpoint.address}, which rank {other} "
                    f"on host {elsewhere.node} cannot reach: there the host of MASTER_ADDR (or, without a "
                    "TCP store, its own name) has a loopback address or no IPv4 address; set SHOAL_INTERFACE "
                    f"on {endpoint.node} to the name or the IPv4 address of an interface that the hosts share"
                )


def local_address(store: Store) -> str:
    """Return the IPv4 address on which this process listens.

    That is ``SHOAL_INTERFACE`` if set, else the address from which this host reaches the store.

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
            probe.connect((host, 9))  # sends nothing, only selects a route
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def interface_address(given: str) -> str:
    """Return an IPv4 address unchanged, or the address of the interface of this name.

    Raises:
        UsageError: it is neither.
    """
    with contextlib.suppress(OSError):
        socket.inet_aton(given)
        return given
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
