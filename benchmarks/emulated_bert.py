"""Trains BERT-base's weights on emulated hosts by turns: what ``priority`` and ``served`` share.

Computing is emulated, as an accelerator does it: time passes, in the proportions of BERT's layers and twice
as much backward as forward, and the processor is free for messages and sums. Workers that computed on the
cores of this machine would keep them busy all the time, and then there is nothing to gain from doing things
at once. Each turn has processes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.comm_runs import watched
from benchmarks.harness import Benchmark
from benchmarks.priority_shapes import bytes_of, parts_of_bert
from benchmarks.worker import run_on_hosts
from shoal.launch.emulated import Cluster

NIC, BITS_PER_S = "200mbit", 200e6


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Hosts, a model, and the function of their workers.

    Attributes:
        worker: function of ``benchmarks.worker``.
        num_hosts: with a worker each; as many helper hosts.
        compute: seconds of computing for each second of sums, as long as those take the link.
    """

    worker: str
    num_hosts: int
    num_layers: int
    compute: float

    @property
    def compute_s(self) -> float:
        return self.compute * bytes_of(parts_of_bert(self.num_layers)) * 8 / BITS_PER_S

    def __str__(self) -> str:
        size = bytes_of(parts_of_bert(self.num_layers)) / 1e6
        return f"BERT-base ({self.num_layers} layers, {size:.0f} MB), computing {self.compute_s:.1f} s a step"

    def measure(self, side: str, num_steps: int) -> dict[str, Any]:
        """Train on a cluster; return the worker's measurements."""
        spec = {
            "helpers": self.num_hosts, "layers": self.num_layers, "compute_s": self.compute_s,
            "steps": num_steps, "side": side,
        }  # fmt: skip
        hosts = self.num_hosts
        with Cluster(hosts=hosts, helpers=hosts, nic=NIC, announce_rates=False) as cluster:
            result: dict[str, Any] = run_on_hosts(cluster, self.worker, spec)
        return result


@dataclass
class Turns:
    """The results of each side, and what other processes did meanwhile."""

    results: dict[str, list[dict[str, Any]]]
    foreign_cores: list[float] = field(default_factory=list)
    num_retaken: int = 0

    def steps_per_s(self, side: str) -> list[float]:
        return [1 / seconds for result in self.results[side] for seconds in result["seconds"]]

    def add_row(
        self, bench: Benchmark, name: str, ours: str, peer: str, *, peer_name: str, target: float
    ) -> None:
        """Add the steps/s of one side beside those of another."""
        bench.add(
            name,
            ours=self.steps_per_s(ours),
            peer=self.steps_per_s(peer),
            peer_name=peer_name,
            unit="steps/s",
            better="higher",
            target=target,
            foreign_cores=self.foreign_cores,
            num_retaken=self.num_retaken,
        )

    def require_equal_weights(self, sides: Sequence[str]) -> None:
        weights = {result["weights"] for side in sides for result in self.results[side]}
        if len(weights) != 1:
            raise SystemExit(f"the weights of {', '.join(sides)} differ: {sorted(weights)}")


def by_turns(bench: Benchmark, setup: Setup, sides: Sequence[str]) -> Turns:
    num_turns, num_steps = (1, 2) if bench.quick else (3, 4)
    turns = Turns({side: [] for side in sides})
    for turn in range(num_turns):
        for side in sides if turn % 2 == 0 else reversed(sides):
            result, foreign, again = watched(partial(setup.measure, side, num_steps), most_retaken=0)
            turns.results[side].append(result)
            turns.foreign_cores.append(foreign)
            turns.num_retaken += again
    return turns
