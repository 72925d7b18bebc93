"""Calibrates predictions with measurements: runs, and files of ``shoal bench train``, ``scaling``, ``comm``.

A training gives the FLOP/s that the accelerators achieve: the rate at which the model of a step reproduces
the measured throughput. Collectives give a host's NIC rate and the latency of a hop: an all-reduce of M
bytes takes ``a + b M``, where b follows from the scheme (``decide.server_assignment``) and a is a number of
hops.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.decide.layout import Layout
from shoal.decide.server_assignment import ring_seconds, two_hop_seconds
from shoal.decide.workload import Workload
from shoal.errors import UsageError
from shoal.json_text import parse_json
from shoal.planner.hardware import Instance, Machines
from shoal.planner.step_time import achieved_flops_of
from shoal.record import Phase, Start, Step, read_record

TRAIN_KIND = "shoal bench train"
SCALING_KIND = "shoal bench scaling"
_LENGTHS = ("max_seq_length", "input_length", "block_length")
"""Settings of ``data`` with the tokens of a sample."""
_FEWEST_LINES = 4
"""Lines of a run's record about steps, of which the first half warms up."""
_COMPUTATION = ("forward", "backward", "pipeline", "optimizer")
"""Parts of a step; a runner of stages, even of one, has forward and backward in one."""
_SAME_MODEL = 0.02
"""Two counts of a model's parameters differ by less: heads and position tables are counted differently."""
_ABOVE_THE_NIC = 1.25
"""A measured rate up to this much over the catalog's is noise, or bursts that a shaped link lets through."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTrain:
    """Throughput of one host, from a file of ``shoal bench train`` or the directory of a run."""

    path: Path
    recipe: str
    """Empty for a run, whose model is known by its size."""
    sequence_length: int
    num_parameters: int
    device: str
    num_devices: int
    global_batch: int
    micro_batch: int
    samples_per_s: float
    unit: str
    """Name of a sample, such as sequences."""
    num_stages: int
    """Devices that hold a part of the model each."""

    def achieved_flops(self, recipe: str, workload: Workload, instance: Instance) -> float:
        """Return the FLOP/s of an accelerator of ``instance`` at which the planner predicts this throughput.

        Args:
            workload: of ``recipe`` at :attr:`sequence_length`.

        Raises:
            UsageError: the file is of another recipe or model, or of hardware that cannot be this.
        """
        if self.recipe and self.recipe != recipe:
            raise UsageError(
                f"--measured {self.path} is of recipe {self.recipe}, not of {recipe}: measure that one with "
                "`shoal bench train`, or leave the file out; for a model of yours give --throughput"
            )
        if abs(self.num_parameters / workload.num_parameters - 1) > _SAME_MODEL:
            raise UsageError(
                f"--measured {self.path} is of a model of {self.num_parameters:,} parameters, but "
                f"{recipe} has {workload.num_parameters:,}: measure it with the preset's own sizes"
            )
        host = Machines(count=1, instance=replace(instance, num_accelerators=self.num_devices))
        layout = Layout(global_batch=self.global_batch, micro_batch=self.micro_batch, stages=self.num_stages)
        try:
            return achieved_flops_of(workload, host, layout, self.samples_per_s)
        except UsageError as error:
            raise UsageError(
                f"--measured {self.path} ({self.device}) is not of {instance.name}: {error}"
            ) from error

    @property
    def basis(self) -> str:
        tokens = f" of {self.sequence_length} tokens" if self.unit == "sequences" else ""
        return (
            f"measured: {self.samples_per_s:.4g} {self.unit}/s{tokens} on "
            f"{self.num_devices} × {self.device}, {self.path}"
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredComm:
    """Network of a host, from a file of ``shoal bench comm``."""

    path: Path
    backend: str
    num_hosts: int
    nic_bytes_per_s: float
    """In each direction, as the all-reduces of the backend use it."""
    latency_s: float
    """Per hop."""

    def applied(self, machines: Machines) -> Machines:
        """Return the machines with this network.

        Raises:
            UsageError: the measured rate exceeds that of their NIC.
        """
        instance = machines.instance
        if self.nic_bytes_per_s > _ABOVE_THE_NIC * instance.nic_bytes_per_s:
            gbits = [8e-9 * rate for rate in (self.nic_bytes_per_s, instance.nic_bytes_per_s)]
            raise UsageError(
                f"--measured {self.path}: its hosts carry {gbits[0]:.3g} Gbit/s and the NIC of "
                f"{instance.name} {gbits[1]:.3g}: it was measured on other hosts"
            )
        efficiency = min(self.nic_bytes_per_s / instance.nic_bytes_per_s, 1.0)
        network = replace(
            instance.network, efficiency=efficiency, latency_s=self.latency_s, source=self.basis
        )
        return replace(machines, instance=replace(instance, network=network))

    @property
    def basis(self) -> str:
        return (
            f"measured: {8e-9 * self.nic_bytes_per_s:.4g} Gbit/s a host, {1e6 * self.latency_s:.3g} µs a hop "
            f"({self.backend} on {self.num_hosts} hosts, {self.path})"
        )


def read_measured(path: Path) -> MeasuredTrain | MeasuredComm:
    """Read a run's directory, or a file that ``shoal bench train``, ``scaling`` or ``comm`` wrote.

    Of a file of ``shoal bench scaling`` the throughput of one host is taken.

    Raises:
        UsageError: it cannot be read, is neither, or lacks a needed figure.
    """
    if path.is_dir():
        return measured_run(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--measured {path} cannot be read: {error}") from error
    read = parse_json(data, f"--measured {path}", error=UsageError)
    try:
        if isinstance(read, dict) and read.get("kind") == TRAIN_KIND:
            return _train(path, read)
        if isinstance(read, dict) and read.get("kind") == SCALING_KIND:
            if read["one_host"] is None:
                raise UsageError(f"--measured {path} has no host alone: measure with --hosts 1,...")
            return _train(path, read["one_host"])
        if isinstance(read, dict) and {"network", "rows"} <= read.keys():
            return _comm(path, read)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--measured {path} is damaged or of another version: {error!r}") from error
    raise UsageError(
        f"--measured {path} is neither of `shoal bench train --json`, nor of `shoal bench scaling --json` or "
        "`shoal bench comm --json`"
    )


def measured_run(path: Path) -> MeasuredTrain:
    """Return the throughput that one host of a run would have alone.

    A step counts with its computation: forward, backward and optimizer, without waiting for gradients and
    data, which a plan adds for its own network. It is the median of the later half of the lines.

    Raises:
        UsageError: no run is there, it has too few steps, or its model is divided over workers.
    """
    start: Start | None = None
    computed: list[float] = []
    length = 1
    for row in read_record(path):
        if isinstance(row, Start):
            start, computed = row, []
        elif isinstance(row, Phase):
            length, computed = row.sequence_length, []
        elif isinstance(row, Step):
            computed.append(sum(row.parts_s.get(part, 0.0) for part in _COMPUTATION))
    if start is None or len(computed) < _FEWEST_LINES:
        raise UsageError(
            f"--measured {path}: its record has {len(computed)} lines about steps, and {_FEWEST_LINES} are "
            "needed; train longer, or with a smaller --run.log-frequency"
        )
    parallel = start.config.get("parallel", {})
    if any(parallel.get(name, 1) > 1 for name in ("pipeline", "tensor")) or parallel.get("shard"):
        raise UsageError(
            f"--measured {path} is of a model in stages or shards, whose workers wait for each other: "
            "measure with `shoal bench train`"
        )
    lengths = [start.config.get("data", {}).get(name) for name in _LENGTHS]
    num_local = start.num_workers // start.num_hosts
    global_batch = start.micro_batch_size * start.accumulation_steps * num_local
    return MeasuredTrain(
        path=path,
        recipe="",
        sequence_length=next(filter(None, lengths), length),
        num_parameters=start.num_parameters,
        device=start.device,
        num_devices=num_local,
        global_batch=global_batch,
        micro_batch=start.micro_batch_size,
        samples_per_s=global_batch / statistics.median(computed[len(computed) // 2 :]),
        unit=start.unit,
        num_stages=1,
    )


def _train(path: Path, read: dict[str, Any]) -> MeasuredTrain:
    types = {field.name: field.type for field in fields(MeasuredTrain) if field.name != "path"}
    casts: dict[Any, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}
    whole = {"num_stages": 1, **read}  # files of before have none
    values = {name: casts[kind](whole[name]) for name, kind in types.items()}
    for name, value in values.items():
        if types[name] != "str" and not value > 0:
            raise ValueError(f"{name} {value} is not positive")
    return MeasuredTrain(path=path, **values)


def _comm(path: Path, read: dict[str, Any]) -> MeasuredComm:
    """Return the network as measured by the backend that achieves the highest rate."""
    network = read["network"]
    num_hosts, num_workers = int(network["num_hosts"]), int(network["num_workers"])
    if num_hosts < 2 or num_workers != num_hosts:
        raise UsageError(
            f"--measured {path} is of {num_workers} workers on {num_hosts} hosts: what a network carries "
            "shows between several hosts of one worker each"
        )
    factors = [float(factor) for factor in network["helper_bandwidths"]]
    times: dict[str, list[tuple[float, float]]] = {}
    for row in read["rows"]:
        if row["collective"] == "all_reduce":
            times.setdefault(row["backend"], []).append((float(row["num_bytes"]), float(row["time_s"])))
    networks = []
    for backend, points in times.items():
        num_bytes, seconds = np.array(points).T
        if len(set(num_bytes)) < 2:
            continue
        # the line a + b M, by least squares of relative errors
        s_per_byte, fixed_s = map(float, np.polyfit(num_bytes, seconds, 1, w=1 / seconds))
        if s_per_byte <= 0:
            continue
        links = [1.0] * num_hosts
        if backend.startswith("shoal"):
            unit_s, hops = two_hop_seconds(1.0, links, factors if backend == "shoal" else []), 2
        else:
            unit_s, hops = ring_seconds(1.0, links), 2 * (num_hosts - 1)
        networks.append(
            MeasuredComm(
                path=path,
                backend=backend,
                num_hosts=num_hosts,
                nic_bytes_per_s=unit_s / s_per_byte,
                latency_s=max(fixed_s, 0.0) / hops,
            )
        )
    if not networks:
        raise UsageError(
            f"--measured {path} has no all-reduces whose time grows over several sizes: measure with "
            "--collectives all_reduce --sizes 64k,1m,16m"
        )
    return max(networks, key=lambda measured: measured.nic_bytes_per_s)
