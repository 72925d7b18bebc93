"""Assigns ranks to the hosts of a job: their launchers exchange signed records through a store.

torch's own rendezvous (``c10d``) unpickles values from a store to which everybody can write who reaches its
port. Here all values are JSON with an HMAC-SHA256 under the job's secret (:mod:`shoal.comm.store`). A
stranger at the port cannot take part and learns no secret.

The store is shoal's own (:mod:`shoal.comm.tcp_store`): clients first prove that they know the secret. Helpers
that were named in advance wait in it for the end of the workers. The workers' torch has a store of its own,
which the leader serves at any free port.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from shoal import __version__
from shoal.comm.engine import CommError
from shoal.comm.store import NAME, PORT, PrefixStore, Rule, SignedStore, Store
from shoal.comm.tcp_store import TcpStore, TcpStoreServer
from shoal.errors import EXIT_LOST, EXIT_OK, EXIT_STOPPED, ShoalError, UsageError

_NONCE_BYTES = 16
_END_DEADLINE_S = 300.0
_OTHERS_END_S = 12.0
"""Time for the other hosts to notice a failure, end their workers and report it."""
_TELL_S = 60.0
"""Time after which a host that waits for others says so again."""
_POLL_S = 0.1
_KEY_POLL_S = 0.02
_NAME_DEADLINE_S = 60.0
"""Time for a host's name to appear: a pod's comes after the pod."""
_MAX_TEXT = 4_000
_BACKLOG = 1024
_RELEASE_S = 5.0
"""Time for helpers to read the workers' exit code."""
_LONG = timedelta(days=1)

_TOKEN = rf"[0-9a-f]{{{2 * _NONCE_BYTES}}}"
_COUNT = range(1, 1 << 31)
_CODE = range(-255, 256)
_LEADER: Rule = {
    "challenge": _TOKEN, "master_port": PORT, "hosts": _COUNT, "workers": _COUNT, "version": NAME,
}  # fmt: skip
_ANSWER: Rule = {"challenge": _TOKEN, "nonce": _TOKEN, "name": NAME}
_RANKS: Rule = {"nonces": [_TOKEN]}
_END: Rule = {"code": _CODE, "text": rf"[\s\S]{{0,{_MAX_TEXT}}}", "name": NAME}
_WORKERS_END: Rule = {"code": _CODE}


@dataclass(frozen=True, kw_only=True)
class HostGroup:
    """The hosts of a job, as one of them has joined them.

    The launcher of rank 0 serves the stores, so it has to outlive the workers: call :meth:`leave` when those
    of this host have ended.
    """

    rank: int
    num_hosts: int
    master_port: int
    """Port of the store of the workers' torch on the leader's host; that of this store if it has no torch."""
    store: Store
    signed: _HostRecords
    resources: ExitStack
    """The connection, and on the leader's host the servers."""

    def all_values(
        self, name: str, value: dict[str, Any], rule: Rule, *, deadline_s: float
    ) -> list[dict[str, Any]]:
        """Publish a value of this host, and return those of all hosts, by rank.

        Args:
            name: not used before.
            rule: of a value.

        Raises:
            ShoalError: a value was not written by a launcher of this job, or did not come in time; or a
                signal asked to stop.
        """
        until, values = time.monotonic() + deadline_s, []
        prefix = f"{name}/{self.signed.challenge}"
        self.signed.put(f"{prefix}/{self.rank}", value)
        for rank in range(self.num_hosts):
            while not self.store.check([key := f"{prefix}/{rank}"]):
                _unless(self.signed.stopped)
                if time.monotonic() > until:
                    raise ShoalError(f"host {rank} of {self.num_hosts} gave no {name} in {deadline_s:g} s")
                time.sleep(_POLL_S)
            values.append(self.signed.read(key, rule, self.signed.name_of(key)))
        return values

    def cause(self, exit_code: int, text: str) -> tuple[int, str]:
        """Publish the end of this host, and return the exit code and text of the failure that caused it.

        They are the given ones, unless this host merely lost another (:data:`~shoal.errors.EXIT_LOST`) and
        that one publishes its failure within 12 s.
        """
        with suppress(RuntimeError, OSError):  # the store has gone with its host
            end: dict[str, Any] = {
                "code": exit_code,
                "text": text[:_MAX_TEXT],
                "name": os.uname().nodename,
            }
            self.signed.put(self._end_key(self.rank), end)
            until = time.monotonic() + _OTHERS_END_S
            while exit_code == EXIT_LOST and time.monotonic() < until:
                for other in range(self.num_hosts):
                    if not self.store.check([key := self._end_key(other)]):
                        continue
                    end = self.signed.get(key, _END)
                    if end["code"] not in (EXIT_OK, EXIT_STOPPED, EXIT_LOST):
                        message = "".join(c if c.isprintable() or c == "\n" else "?" for c in end["text"])
                        return int(end["code"]), f"on host {end['name']}: {message}"
                time.sleep(_POLL_S)
        return exit_code, text

    def leave(self, *, wait: bool, may_lack: bool = False, exit_code: int = EXIT_OK) -> None:
        """Announce the end of this host; with ``wait``, rank 0 waits for the other hosts.

        It waits up to 300 s, and 12 s if some may never come, as after a failure. Then it publishes
        ``exit_code`` for the waiting helpers.
        """
        with suppress(RuntimeError, OSError):  # the store has gone with its host
            self.store.add("num_left", 1)
            until = time.monotonic() + (_OTHERS_END_S if may_lack else _END_DEADLINE_S)
            while wait and self.rank == 0 and self.store.add("num_left", 0) < self.num_hosts:
                if time.monotonic() > until:
                    break
                time.sleep(_POLL_S)
            if self.rank == 0:
                self.signed.put(_workers_end(self.signed.challenge), {"code": exit_code})
                until = time.monotonic() + _RELEASE_S
                while self.store.add("num_released", 0) < self.store.add("num_helpers", 0):
                    if time.monotonic() > until:
                        break
                    time.sleep(_KEY_POLL_S)
        self.resources.close()

    def _end_key(self, rank: int) -> str:
        return f"end/{self.signed.challenge}/{rank}"


def join_hosts(
    *,
    host: str,
    port: int,
    num_hosts: int,
    num_workers: int,
    secret: bytes,
    deadline_s: float,
    stopped: Callable[[], bool] = lambda: False,
    is_elastic: bool = False,
) -> HostGroup:
    """Join the launchers of the other hosts through a store at ``host:port``.

    The launcher on whose machine ``host`` is an address listens there and leads:

    1. The leader publishes a challenge, and the settings on which all launchers must agree.
    2. Each other launcher takes a number by the store's atomic add and answers under this number.
    3. The leader checks the answers and publishes the ranks, its own being 0. The others are in the order of
       their names, so that a host keeps its rank, and the data cached for it, in the next job.

    The challenge and a nonce in each answer reject values of an earlier job.

    Args:
        num_workers: workers per host.
        stopped: polled; true ends the wait. No call blocks inside the store's code, because the end of the
            process would abort there.
        is_elastic: a launcher that comes when all have met takes the place of one that has gone.

    Raises:
        ShoalError: a value in the store was not written by a launcher of this job, the launchers do not
            agree on the number of hosts or workers, ``host`` cannot be resolved, the others do not join in
            time, or it was stopped.
    """
    until = time.monotonic() + deadline_s
    listener = listen(host, port, backlog=_BACKLOG, until=until)
    if listener is None:
        _await_listener(host, port, until=until, stopped=stopped)
    with ExitStack() as resources:
        try:
            limit = timedelta(seconds=max(1.0, until - time.monotonic()))
            if listener is not None:
                resources.enter_context(closing(TcpStoreServer(listener, secret)))
            store = _launchers_store(host, port, secret, limit, resources)
            address = f"{host}:{port}"
            signed = _HostRecords(
                store, address=address, secret=secret, until=until, stopped=stopped, num_hosts=num_hosts
            )
            if listener is not None:
                master_port = _serve_workers(host, listener, limit, resources) or port
                rank = _lead(signed, num_hosts=num_hosts, num_workers=num_workers, master_port=master_port)
            else:
                rank, master_port = _follow(
                    signed, num_hosts=num_hosts, num_workers=num_workers, is_elastic=is_elastic
                )
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, ShoalError) and not isinstance(error, CommError):
                raise
            raise ShoalError(  # from the store
                f"the launchers of {num_hosts} hosts did not come together at {host}:{port} ({error}); start "
                "the same command with the same --nnodes and --rdzv on each, see that the port can be "
                f"reached, and that no other program on {host} listens there (ss -ltnp)"
            ) from error
        kept = resources.pop_all()
    return HostGroup(
        rank=rank,
        num_hosts=num_hosts,
        master_port=master_port,
        store=store,
        signed=signed,
        resources=kept,
    )


def await_workers_end(
    host: str, port: int, secret: bytes, *, deadline_s: float, reached: Callable[[], None] = lambda: None
) -> int | None:
    """Wait, on a helper's host, for the end of the workers; return their exit code.

    ``None``: the leader or its host has ended without publishing one.

    Args:
        reached: called when connected to the leader's store.

    Raises:
        ShoalError: the leader did not answer before the deadline, or has another secret.
    """
    with ExitStack() as resources:
        try:
            store = _launchers_store(host, port, secret, timedelta(seconds=deadline_s), resources)
        except CommError as problem:
            raise ShoalError(
                f"the launcher of the first worker host did not answer at {host}:{port} ({problem})"
            ) from None
        with suppress(CommError):
            until = time.monotonic() + deadline_s
            signed = _HostRecords(
                store, address=f"{host}:{port}", secret=secret, until=until, stopped=lambda: False
            )
            store.add("num_helpers", 1)
            reached()
            end = _workers_end(signed.get("leader", _LEADER)["challenge"])
            while not store.check([end]):
                with suppress(TimeoutError):
                    store.wait([end], _LONG)
            code = int(signed.get(end, _WORKERS_END)["code"])
            store.add("num_released", 1)
            return code
    return None


def _workers_end(challenge: str) -> str:
    return f"workers/{challenge}"


def _launchers_store(
    host: str, port: int, secret: bytes, limit: timedelta, resources: ExitStack
) -> PrefixStore:
    return PrefixStore("shoal/launch/", resources.enter_context(closing(TcpStore(host, port, secret, limit))))


def _serve_workers(host: str, beside: socket.socket, limit: timedelta, resources: ExitStack) -> int | None:
    """Serve torch's store for the workers at the address of a socket; return its port, or ``None``."""
    try:
        from torch._C._distributed_c10d import TCPStore
    except ModuleNotFoundError:
        return None
    listener = socket.create_server((beside.getsockname()[0], 0), family=beside.family, backlog=_BACKLOG)
    port = int(listener.getsockname()[1])
    served = TCPStore(
        host, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    resources.callback(lambda store: None, served)  # keeps it
    return port


def _await_listener(host: str, port: int, *, until: float, stopped: Callable[[], bool]) -> None:
    """Return when somebody listens, or at the time ``until``: the store then raises an error of its own."""
    tell_at = time.monotonic() + _TELL_S
    while time.monotonic() < until:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=1.0).close()
            return
        _unless(stopped)
        tell_at = _tell(tell_at, lambda: f"nobody listens at {host}:{port}: start the same command there")
        time.sleep(_POLL_S)


def _unless(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise ShoalError("a signal asked to stop before all hosts had come")


def _tell(at: float, missing: Callable[[], str]) -> float:
    """Say who is missing if it is time for it; return when it is next."""
    if time.monotonic() < at:
        return at
    print(f"shoal launch: waiting: {missing()}", file=sys.stderr, flush=True)
    return time.monotonic() + _TELL_S


class _HostRecords(SignedStore):
    """Records of the launchers, signed with the job's secret."""

    error = ShoalError

    def __init__(
        self,
        store: Store,
        *,
        address: str,
        secret: bytes,
        until: float,
        stopped: Callable[[], bool],
        num_hosts: int = 1,
    ) -> None:
        super().__init__(store, "shoal launch", secret)
        self.store, self.address = store, address
        self.challenge = ""
        """The leader's, once it is known."""
        self._until, self.stopped, self._num_hosts = until, stopped, num_hosts

    def get(self, key: str, rule: Rule) -> dict[str, Any]:
        """Wait for a record and return it.

        Raises:
            ShoalError: it is not signed with the job's secret, or is malformed.
        """
        tell_at = time.monotonic() + _TELL_S
        while not self.store.check([key]):
            _unless(self.stopped)
            tell_at = _tell(tell_at, self._missing)
            if time.monotonic() > self._until:
                self.store.wait([key], timedelta(milliseconds=1))  # raises
            time.sleep(_KEY_POLL_S)
        return self.read(key, rule, self.name_of(key))

    def _missing(self) -> str:
        keys = [key for number in range(1, self._num_hosts) if self.store.check([key := f"host/{number}"])]
        names = [self.read(key, _ANSWER, self.name_of(key))["name"] for key in keys]
        come = f"{1 + len(names)} of {self._num_hosts} hosts have come to {self.address}"
        beside = f", beside the first one {', '.join(sorted(names))}" if names else ""
        return f"{come}{beside}; start the same command on the others, or end it on all"

    def name_of(self, key: str) -> str:
        """Return the name of a record in errors."""
        return f"the value {key!r} in the store at {self.address}"

    def forged(self, name: str, *, is_signed: bool = True) -> ShoalError:
        """Return the error for a record that no launcher of this job has written."""
        return ShoalError(
            f"{name} was not written by a launcher of this job: that host's secret differs from this one's "
            "(compare sha256sum of SHOAL_SECRET_FILE), or a stranger reaches that port; admit only the job's "
            "hosts to it"
        )


def _lead(records: _HostRecords, *, num_hosts: int, num_workers: int, master_port: int) -> int:
    challenge = records.challenge = secrets.token_hex(_NONCE_BYTES)
    settings = {"hosts": num_hosts, "workers": num_workers, "version": __version__}
    records.put("leader", {"challenge": challenge, "master_port": master_port, **settings})
    answers = []
    for number in range(1, num_hosts):
        answer = records.get(key := f"host/{number}", _ANSWER)
        if answer["challenge"] != challenge:
            raise records.forged(records.name_of(key))
        answers.append((answer["name"], number, answer["nonce"]))
    records.put("ranks", {"nonces": [nonce for _, _, nonce in sorted(answers)]})
    return 0


def _follow(records: _HostRecords, *, num_hosts: int, num_workers: int, is_elastic: bool) -> tuple[int, int]:
    """Return the rank of this host, and the port of the store of the workers' torch."""
    leader = records.get("leader", _LEADER)
    records.challenge = leader["challenge"]
    for name, key, mine in (
        ("--nnodes", "hosts", num_hosts),
        ("--workers", "workers", num_workers),
        ("shoal's version", "version", __version__),
    ):
        if leader[key] != mine:
            raise UsageError(
                f"{name} is {mine} here and {leader[key]} on {records.address.rpartition(':')[0]}: give all "
                f"hosts the same (here: {os.uname().nodename})"
            )
    number = records.store.add("num_hosts", 1)
    if is_elastic and number >= num_hosts:
        return _free_rank(records, num_hosts), int(leader["master_port"])
    if not 0 < number < num_hosts:
        raise ShoalError(
            f"{num_hosts} hosts have met at {records.address} already and this is one "
            "more: end the launchers on all hosts and start one on each, or choose another port"
        )
    nonce = secrets.token_hex(_NONCE_BYTES)
    answer = {"challenge": leader["challenge"], "nonce": nonce, "name": os.uname().nodename}
    records.put(f"host/{number}", answer)
    nonces = records.get("ranks", _RANKS)["nonces"]
    if nonce not in nonces:
        raise records.forged(records.name_of("ranks"))
    return 1 + int(nonces.index(nonce)), int(leader["master_port"])


def _free_rank(records: _HostRecords, num_hosts: int) -> int:
    """Return the rank that this host had before; for a new host, that of any but the first.

    Workers that come later may have any rank.
    """
    nonces = records.get("ranks", _RANKS)["nonces"]
    answers = [records.get(f"host/{number}", _ANSWER) for number in range(1, num_hosts)]
    own = [answer["nonce"] for answer in answers if answer["name"] == os.uname().nodename]
    return 1 + int(nonces.index((own or nonces)[0]))


def listen(host: str, port: int, *, backlog: int, until: float = 0.0) -> socket.socket | None:
    """Return a socket that listens at ``host:port``, or ``None`` on another machine than ``host``.

    It listens on that one address, unless the name of this machine resolves to its loopback interface (as in
    Debian's /etc/hosts): the other hosts then connect to another address. ``None`` too if the port is
    taken, by the launcher of another emulated host on this machine.

    Args:
        until: time of ``time.monotonic()`` at which a name that cannot be resolved is an error, at most 60 s
            from now.

    Raises:
        ShoalError: there is no such host, or the port may not be used.
    """
    addresses = _addresses(host, port, min(until, time.monotonic() + _NAME_DEADLINE_S))
    for family, _, _, _, address in sorted(addresses, key=lambda entry: entry[0] != socket.AF_INET):
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


def _addresses(host: str, port: int, until: float) -> list[Any]:
    """Return the result of ``getaddrinfo`` for a name; try again until the deadline."""
    pause_s = _POLL_S
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if time.monotonic() + pause_s > until:
                raise ShoalError(f"--rdzv: the host {host!r} cannot be found: {error}") from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)


def _source_towards(family: int, address: Any) -> str | None:
    """Return the address of this machine towards ``address``; the same one if that is its own."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])
