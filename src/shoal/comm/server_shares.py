"""Moves chunks away from servers that answer late, between steps.

A group's pattern of servers follows their bandwidths (``decide.server_assignment``), which are given,
measured once when the group starts, or assumed to be equal. A link that is slower than assumed fills the
window of every rank with chunks that wait for it. Its chunks then take several times as long from sending to
result as those of the other servers: 230 ms and 30 ms for a helper with half the bandwidth at 200 Mbit/s.

:meth:`ServerShares.follow` adds up these times over all ranks and lowers the assumed bandwidth of a late
server by a fifth, until it is no longer late. It raises it again by little and rarely. All ranks compute the
same pattern from the same sums. Servers add in the same order whatever the pattern is: the bits of a sum do
not depend on it.
"""

from __future__ import annotations

import ctypes
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.comm.engine import CommError, Engine, Operation
from shoal.decide.server_assignment import chunk_pattern

_LATE = 3.0  # multiple of the median time; means over all ranks of equal links differ by a half
_LATE_S = 1e-3  # shorter times are those of processors
_FEWEST_CHUNKS = 16
_SLOWER, _FASTER = 0.8, 1.05
_LEAST = 0.05  # of the assumed bandwidth of the start
_FIRST_CALM, _LONGEST_CALM = 8, 256  # calls without a late server before a bandwidth is raised

_log = logging.getLogger(__name__)


@dataclass
class _Server:
    """A host's colocated servers, or a helper."""

    name: str
    ranks: list[int]  # in the pattern
    start: float  # bandwidth
    bandwidth: float
    calm: int = 0
    patience: int = _FIRST_CALM

    def was_late(self) -> None:
        if self.bandwidth > self.start * _LEAST:
            self.bandwidth = max(self.bandwidth * _SLOWER, self.start * _LEAST)
        if self.calm:  # it was raised too early
            self.patience = min(2 * self.patience, _LONGEST_CALM)
        self.calm = 0

    def was_in_time(self) -> None:
        if self.bandwidth == self.start:
            return
        self.calm += 1
        if self.calm % self.patience == 0:
            self.bandwidth = min(self.bandwidth * _FASTER, self.start)


class ServerShares:
    """The assumed bandwidths of a group's servers, the same on all ranks.

    Args:
        engine: of the group.
        hosts: the host of each rank, in rank order.
        helpers: names of the helpers.
        bandwidths: of the helpers, as multiples of a host's.
    """

    def __init__(
        self, engine: Engine, hosts: Sequence[str], helpers: Sequence[str], bandwidths: Sequence[float]
    ) -> None:
        self._engine, self._hosts = engine, list(hosts)
        names = list(dict.fromkeys(hosts))
        ranks = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
        self._servers = [_Server(name, own, 1.0, 1.0) for name, own in zip(names, ranks, strict=True)]
        self._num_hosts = len(names)
        for index, (name, bandwidth) in enumerate(zip(helpers, bandwidths, strict=True)):
            self._servers.append(_Server(name, [len(hosts) + index], bandwidth, bandwidth))
        self._before = engine.server_times()

    @property
    def bandwidths(self) -> list[float]:
        """Believed bandwidths: those of the hosts by their lowest rank, then those of the helpers."""
        return [server.bandwidth for server in self._servers]

    def follow(self, timeout_s: float) -> bool:
        """Adapt the shares to the times of the chunks since the last call. All ranks call it, between steps.

        Returns:
            Whether the shares have changed.

        Raises:
            CommError: the group failed, or a rank did not call it within ``timeout_s``.
        """
        now = self._engine.server_times()
        since = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(now, self._before, strict=True)]
        self._before = now
        own = [[sum(since[at][k] for at in server.ranks) for k in (0, 1)] for server in self._servers]
        num_chunks, ns = self._sums(own, timeout_s)
        before = self.bandwidths
        self._judge(num_chunks, ns)
        if self.bandwidths == before:
            return False
        hosts, helpers = self.bandwidths[: self._num_hosts], self.bandwidths[self._num_hosts :]
        self._engine.set_pattern(chunk_pattern(self._hosts, helpers, hosts))
        return True

    def _sums(self, own: list[list[int]], timeout_s: float) -> tuple[list[int], list[int]]:
        """Return the sum over all ranks of each server's chunks and nanoseconds."""
        values = (ctypes.c_int64 * (2 * len(own)))(*(value for pair in own for value in pair))
        operation = Operation(
            kind="all_reduce", input=ctypes.addressof(values), output=ctypes.addressof(values),
            count=len(values), dtype="int64", shape=(len(values),), timeout_s=timeout_s,
        )  # fmt: skip
        if not self._engine.wait(self._engine.submit(operation), timeout_s):
            raise CommError(f"a rank did not send the times of its servers within {timeout_s:g} s")
        return list(values[::2]), list(values[1::2])

    def _judge(self, num_chunks: Sequence[int], ns: Sequence[int]) -> None:
        timed = [
            (server, time / count * 1e-9)
            for server, count, time in zip(self._servers, num_chunks, ns, strict=True)
            if count >= _FEWEST_CHUNKS
        ]
        if len(timed) < 2:
            return
        typical_s = statistics.median_low(seconds for _, seconds in timed)
        late = [(server, s) for server, s in timed if s > max(_LATE * typical_s, _LATE_S)]
        for server, seconds in late:
            server.was_late()
            _log.info(
                "server %s answers after %.1f ms, others after %.1f ms; its bandwidth is now taken for %.2f",
                server.name, 1e3 * seconds, 1e3 * typical_s, server.bandwidth,
            )  # fmt: skip
        if not late:
            for server, _ in timed:
                server.was_in_time()
