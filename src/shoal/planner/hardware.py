"""The catalog of instance types, accelerators and networks; users add files of their own.

A file is TOML with tables ``accelerator``, ``network`` and ``instance``, each of named entries. Rates stand
there in the units of datasheets (Gbit/s, GB/s, TFLOP/s) and are bytes/s and FLOP/s from here on. Every entry
names its source; a figure that could not be confirmed says so there.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.errors import UsageError, did_you_mean

GIB = 1 << 30
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    clock_hz: float
    """Highest boost clock: what the time of the smallest kernels follows."""
    flops: Mapping[str, float]
    """Peak dense FLOP/s by precision."""
    source: str

    def peak(self, precision: str) -> float:
        """Return FLOP/s in ``precision``; in one that it does not have, those of the next wider.

        Raises:
            UsageError: no such precision is known.
        """
        wider = {"fp8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32"}
        wanted = precision
        while wanted not in self.flops:
            if wanted not in wider:
                raise UsageError(
                    f"precision {precision!r} is not known for {self.name}; choose one of "
                    f"{', '.join(self.flops)}.{did_you_mean(precision, PRECISIONS)}"
                )
            wanted = wider[wanted]
        return self.flops[wanted]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A kind of link: what of the line rate arrives, and how long the first byte takes."""

    name: str
    efficiency: float
    """Achieved bytes/s of long collectives over line rate."""
    latency_s: float
    """Of one hop, software included."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One kind of host."""

    name: str
    accelerator: Accelerator | None
    """None: a CPU host, which can carry summation servers."""
    num_accelerators: int
    local_network: Network
    local_bytes_per_s: float
    """Of one accelerator's link to the others of its host, in each direction, line rate."""
    network: Network
    nic_bytes_per_s: float
    """Of the host in each direction, line rate."""
    flow_bytes_per_s: float
    """The most that one flow (connection) carries; infinity without a cap."""
    memory_bytes: int
    """Of the host."""
    price_per_hour: float | None
    """US dollars; None: not rented by the hour."""
    price_source: str
    source: str

    @property
    def effective_nic(self) -> float:
        """Bytes/s in each direction that collectives see."""
        return self.nic_bytes_per_s * self.network.efficiency

    @property
    def effective_local(self) -> float:
        return self.local_bytes_per_s * self.local_network.efficiency


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Equal hosts: ``256xp3dn.24xlarge``."""

    count: int
    instance: Instance

    @property
    def num_accelerators(self) -> int:
        return self.count * self.instance.num_accelerators

    @property
    def price_per_hour(self) -> float | None:
        price = self.instance.price_per_hour
        return None if price is None else self.count * price

    def __str__(self) -> str:
        return f"{self.count}x{self.instance.name}"


class Catalog:
    """All entries by name, from our files and then from the user's, which may replace ours."""

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self.accelerators: dict[str, Accelerator] = {}
        self.networks: dict[str, Network] = {}
        self.instances: dict[str, Instance] = {}
        trees = list(_shipped())
        for path in paths:
            trees.append((str(path), _read(path)))
        for source, tree in trees:
            _check_keys(source, "the file", tree, {"accelerator", "network", "instance"}, set())
            for name, entry in tree.get("accelerator", {}).items():
                self.accelerators[name] = _accelerator(source, name, entry)
            for name, entry in tree.get("network", {}).items():
                self.networks[name] = _network(source, name, entry)
        for source, tree in trees:
            for name, entry in tree.get("instance", {}).items():
                self.instances[name] = self._instance(source, name, entry)

    def instance(self, name: str) -> Instance:
        """Return an instance type.

        Raises:
            UsageError: there is none of that name.
        """
        if name not in self.instances:
            raise UsageError(
                f"instance type {name!r} is not in the catalog.{did_you_mean(name, self.instances)} "
                f"Known: {', '.join(sorted(self.instances))}; add your own with --catalog FILE"
            )
        return self.instances[name]

    def machines(self, text: str) -> Machines:
        """Return the machines that ``64xc5n.18xlarge`` names; without a number, one.

        Raises:
            UsageError: the text is not of that form, or the instance type is not known.
        """
        match = re.fullmatch(r"(?:(\d+)\s*[x×*])?\s*([^\s]+)", text.strip())
        if not match:
            raise UsageError(f"{text!r} does not name machines; write it as 64xp3dn.24xlarge")
        count = int(match[1] or 1)
        if count < 1:
            raise UsageError(f"{text!r}: the number of hosts is {count}; it must be at least 1")
        return Machines(count=count, instance=self.instance(match[2]))

    def _instance(self, source: str, name: str, entry: dict[str, Any]) -> Instance:
        where = f"instance {name!r}"
        required = {"nic_gbit_per_s", "network", "memory_gib", "source"}
        optional = {
            "accelerator", "num_accelerators", "local_network", "local_gbyte_per_s", "flow_gbit_per_s",
            "price_per_hour", "price_source", "unpriced",
        }  # fmt: skip
        if "accelerator" in entry:
            required |= {"num_accelerators", "local_network", "local_gbyte_per_s"}
        if "unpriced" not in entry:
            required |= {"price_per_hour", "price_source"}
        _check_keys(source, where, entry, required | optional, required)
        price = None
        if "unpriced" not in entry:
            price = _number(source, where, entry, "price_per_hour", least=0.0)
        accelerator = None
        if "accelerator" in entry:
            accelerator = _named(source, where, self.accelerators, "accelerator", entry["accelerator"])
        none = Network(name="none", efficiency=1.0, latency_s=0.0, source="no accelerators")
        local = entry.get("local_network")
        return Instance(
            name=name,
            accelerator=accelerator,
            num_accelerators=int(_number(source, where, entry, "num_accelerators", above=0.0))
            if accelerator
            else 0,
            local_network=_named(source, where, self.networks, "local_network", local) if local else none,
            local_bytes_per_s=1e9 * _number(source, where, entry, "local_gbyte_per_s", above=0.0)
            if local
            else math.inf,
            network=_named(source, where, self.networks, "network", entry["network"]),
            nic_bytes_per_s=1e9 / 8 * _number(source, where, entry, "nic_gbit_per_s", above=0.0),
            flow_bytes_per_s=1e9 / 8 * _number(source, where, entry, "flow_gbit_per_s", above=0.0)
            if "flow_gbit_per_s" in entry
            else math.inf,
            memory_bytes=int(GIB * _number(source, where, entry, "memory_gib", above=0.0)),
            price_per_hour=price,
            price_source=entry.get("price_source", entry.get("unpriced", "")),
            source=entry["source"],
        )


@cache
def _shipped() -> tuple[tuple[str, dict[str, Any]], ...]:
    folder = resources.files("shoal.planner") / "catalog" / "hardware"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda f: f.name)
    return tuple((file.name, tomllib.loads(file.read_text(encoding="utf-8"))) for file in files)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the catalog {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the catalog {path} is not TOML: {error}") from error


def _accelerator(source: str, name: str, entry: dict[str, Any]) -> Accelerator:
    where = f"accelerator {name!r}"
    keys = {"memory_gib", "memory_gbyte_per_s", "clock_ghz", "tflops", "source"}
    _check_keys(source, where, entry, keys, keys)
    tflops = entry["tflops"]
    if not isinstance(tflops, dict) or not tflops:
        raise UsageError(f"{source}: {where}: tflops must be a table of precisions, like {{ fp16 = 125 }}")
    _check_keys(source, f"{where}, tflops", tflops, set(PRECISIONS), set())
    return Accelerator(
        name=name,
        memory_bytes=int(GIB * _number(source, where, entry, "memory_gib", above=0.0)),
        memory_bytes_per_s=1e9 * _number(source, where, entry, "memory_gbyte_per_s", above=0.0),
        clock_hz=1e9 * _number(source, where, entry, "clock_ghz", above=0.0),
        flops={key: 1e12 * _number(source, where, tflops, key, above=0.0) for key in tflops},
        source=entry["source"],
    )


def _network(source: str, name: str, entry: dict[str, Any]) -> Network:
    where = f"network {name!r}"
    keys = {"efficiency", "latency_us", "source"}
    _check_keys(source, where, entry, keys, keys)
    efficiency = _number(source, where, entry, "efficiency", above=0.0)
    if efficiency > 1:
        raise UsageError(f"{source}: {where}: efficiency is {efficiency}; it must be at most 1")
    latency_us = _number(source, where, entry, "latency_us", least=0.0)
    return Network(name=name, efficiency=efficiency, latency_s=latency_us * 1e-6, source=entry["source"])


def _check_keys(source: str, where: str, entry: Any, allowed: set[str], required: set[str]) -> None:
    if not isinstance(entry, dict):
        raise UsageError(f"{source}: {where} is {entry!r}; it must be a table")
    for key in entry:
        if key not in allowed:
            raise UsageError(f"{source}: {where} has an unknown key {key!r}.{did_you_mean(key, allowed)}")
    if missing := sorted(required - set(entry)):
        raise UsageError(
            f"{source}: {where} lacks {', '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}"
        )


def _number(
    source: str,
    where: str,
    entry: Mapping[str, Any],
    key: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
) -> float:
    value = entry[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{source}: {where}: {key} is {value!r}; it must be a number")
    if value < least:
        raise UsageError(f"{source}: {where}: {key} is {value}; it must be at least {least:g}")
    if value <= above:
        raise UsageError(f"{source}: {where}: {key} is {value}; it must be above {above:g}")
    return float(value)


def _named(source: str, where: str, entries: Mapping[str, Any], key: str, name: Any) -> Any:
    if name not in entries:
        raise UsageError(
            f"{source}: {where}: {key} {name!r} is in no catalog.{did_you_mean(str(name), entries)}"
        )
    return entries[name]


def require_accelerators(machines: Machines) -> Accelerator:
    """Return what the machines compute with.

    Raises:
        UsageError: they are CPU hosts, which only help.
    """
    if machines.instance.accelerator is None:
        raise UsageError(
            f"{machines.instance.name} has no accelerators; give it with --helpers, and --cluster the "
            "machines that train"
        )
    return machines.instance.accelerator
