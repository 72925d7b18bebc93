"""Rendezvous of a job's launchers: without a port on one host, by authenticated values on several.

torch's own rendezvous (``c10d``) unpickles what lies in a store that anybody who reaches its port can write
to. Here all is JSON, and each value carries an HMAC-SHA256 of key and value under the job's secret. A
stranger at the port can keep a job from starting. He cannot choose who takes part, and finds no secret.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json

_NONCE_BYTES = 16
_MAC_CHARACTERS = 64
_VALUE_BYTES = 1_024
"""No value needs more, apart from a nonce of each host."""
_HOST_BYTES = 64


class _OneMeeting(RendezvousHandler):
    """A rendezvous of a known number of hosts: they meet once, nobody joins later and nothing restarts."""

    def get_backend(self) -> str:
        return "shoal"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "shoal"

    def shutdown(self) -> bool:
        return True


class OneHost(_OneMeeting):
    """The launcher is alone and its store is in its own memory. Its workers meet in a file."""

    def next_rendezvous(self) -> RendezvousInfo:
        # An empty MASTER_ADDR: a worker that looks for a port is told so, and waits at none.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("", 0))


class SeveralHosts(_OneMeeting):
    """The launchers of ``num_hosts`` hosts meet in a store at ``host:port``; their workers use it after them.

    The launcher that finds ``host`` to be an address of its own machine listens there and leads:

    1. The leader publishes a challenge and what all launchers must agree on.
    2. Each other launcher takes a number by the store's atomic add and answers under this number.
    3. The leader checks the answers and publishes the ranks, its own being 0. The others are in the order of
       their names, so that a host keeps its rank, and what it has cached for it, in the next job.

    The challenge and a nonce in each answer make sure that no value is one of an earlier job.
    """

    def __init__(
        self, *, host: str, port: int, num_hosts: int, num_workers: int, secret: bytes, deadline_s: float
    ) -> None:
        self._host, self._port = host, port
        self._num_hosts, self._num_workers = num_hosts, num_workers
        self._secret = secret
        self._deadline_s = deadline_s
        self._until = 0.0
        self._store: Store | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other launchers.

        Raises:
            ShoalError: a value in the store was not written by a launcher of this job, the launchers do not
                agree on the number of hosts or workers, or ``host`` is none.
            Exception: whatever torch raises when the others do not come in time.
        """
        self._until = time.monotonic() + self._deadline_s
        listener = listen(self._host, self._port, backlog=2 * self._num_hosts * (1 + self._num_workers))
        store = TCPStore(
            self._host,
            self._port,
            is_master=listener is not None,
            timeout=timedelta(seconds=self._deadline_s),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        self._store = PrefixStore("shoal/launch", store)
        rank = self._follow() if listener is None else self._lead()
        meeting = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(PrefixStore("shoal/agent", store), rank, self._num_hosts, meeting)

    def shutdown(self) -> bool:
        self._store = None
        return True

    def _lead(self) -> int:
        challenge = secrets.token_hex(_NONCE_BYTES)
        self._put("leader", {"challenge": challenge, "hosts": self._num_hosts, "workers": self._num_workers})
        answers = []
        for number in range(1, self._num_hosts):
            answer = self._get(key := f"host/{number}", {"challenge": str, "nonce": str, "name": str})
            if answer["challenge"] != challenge:
                raise self._forged(key)
            answers.append((answer["name"], number, answer["nonce"]))
        self._put("ranks", {"nonces": [nonce for _, _, nonce in sorted(answers)]})
        return 0

    def _follow(self) -> int:
        assert self._store is not None
        leader = self._get("leader", {"challenge": str, "hosts": int, "workers": int})
        for name, key, mine in (
            ("--nnodes", "hosts", self._num_hosts),
            ("--workers", "workers", self._num_workers),
        ):
            if leader[key] != mine:
                raise UsageError(
                    f"{name} is {mine} here and {leader[key]} on {self._host}: give all hosts the same"
                )
        number = self._store.add("num_hosts", 1)
        if not 0 < number < self._num_hosts:
            raise ShoalError(
                f"{self._num_hosts} hosts have met at {self._host}:{self._port} already and this is one "
                "more: end the launchers on all hosts and start one on each, or choose another port"
            )
        nonce = secrets.token_hex(_NONCE_BYTES)
        answer = {"challenge": leader["challenge"], "nonce": nonce, "name": os.uname().nodename}
        self._put(f"host/{number}", answer)
        nonces = self._get("ranks", {"nonces": list})["nonces"]
        if nonce not in nonces:
            raise self._forged("ranks")
        return 1 + int(nonces.index(nonce))

    def _put(self, key: str, value: dict[str, Any]) -> None:
        assert self._store is not None
        text = json.dumps(value)
        self._store.set(key, self._mac(key, text.encode()) + text)

    def _get(self, key: str, fields: dict[str, type]) -> dict[str, Any]:
        """Wait for a value and return it.

        Raises:
            ShoalError: it is not signed with the job's secret, or has not these fields.
        """
        assert self._store is not None
        self._store.wait([key], timedelta(seconds=max(0.001, self._until - time.monotonic())))
        data = self._store.get(key)
        if len(data) > _VALUE_BYTES + _HOST_BYTES * self._num_hosts:
            raise self._forged(key)
        mac, text = data[:_MAC_CHARACTERS], data[_MAC_CHARACTERS:]
        if not hmac.compare_digest(mac, self._mac(key, text).encode()):
            raise self._forged(key)
        value = parse_json(text, f"the value {key!r} in the store")
        if not isinstance(value, dict) or {name: type(field) for name, field in value.items()} != fields:
            raise self._forged(key)
        return value

    def _mac(self, key: str, text: bytes) -> str:
        message = f"shoal launch\0{key}\0".encode() + text
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    def _forged(self, key: str) -> ShoalError:
        return ShoalError(
            f"the value {key!r} in the store at {self._host}:{self._port} was not written by a launcher of "
            "this job: that host's secret differs from this one's (compare sha256sum of SHOAL_SECRET_FILE), "
            "or a stranger reaches that port; admit only the job's hosts to it"
        )


def listen(host: str, port: int, *, backlog: int) -> socket.socket | None:
    """Return a socket that listens at ``host:port``, or ``None`` on another machine than ``host``.

    It listens on that one address, unless the name of this machine stands for its loopback interface
    (Debian's /etc/hosts has it so): the other hosts come by another address then. ``None`` too if somebody
    listens there already: the launcher of another "host" on this machine.

    Raises:
        ShoalError: there is no such host, or the port may not be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ShoalError(f"--rdzv: the host {host!r} cannot be found: {error}") from error
    for family, _, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        name = str(address[0])
        is_loopback = ip_address(name).is_loopback
        if not is_loopback and _source_towards(family, address) != name:
            continue
        if is_loopback and host not in (name, "localhost"):
            name = ""
        try:
            return socket.create_server((name, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise ShoalError(f"--rdzv: cannot listen at {host}:{port}: {error.strerror}") from error
    return None


def _source_towards(family: int, address: Any) -> str | None:
    """Return the address from which this machine would reach ``address``: the same if it is its own."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])
