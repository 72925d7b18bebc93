"""The nouns of a job: who takes part, where, in what role. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a process does for the job."""

    WORKER = "worker"
    SERVER = "server"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of the job.

    A host with workers and no servers is an ordinary worker host, one with servers only is a helper host.
    """

    name: str
    num_workers: int = 0
    num_servers: int = 0

    @property
    def is_helper(self) -> bool:
        return self.num_workers == 0 and self.num_servers > 0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts of a job in rank order: host 0 holds the first workers, and so on."""

    hosts: tuple[Host, ...]

    @property
    def num_workers(self) -> int:
        return sum(host.num_workers for host in self.hosts)

    @property
    def num_servers(self) -> int:
        return sum(host.num_servers for host in self.hosts)

    def host_of_worker(self, rank: int) -> Host:
        """Return the host that runs worker ``rank``.

        Raises:
            IndexError: there is no such worker.
        """
        first = 0
        for host in self.hosts:
            if first <= rank < first + host.num_workers:
                return host
            first += host.num_workers
        raise IndexError(f"worker {rank} does not exist: the cluster has {self.num_workers} workers")


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """Where this process stands in the job."""

    rank: int
    num_workers: int
    local_rank: int
    num_local_workers: int

    @property
    def is_main(self) -> bool:
        """Whether this worker prints, writes the record and owns the run directory."""
        return self.rank == 0
