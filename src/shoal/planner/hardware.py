"""Reads the catalog of instance types, accelerators and networks; users add files of their own.

A file is TOML with tables ``accelerator``, ``network`` and ``instance``, each of named entries. Rates are in
the units of data sheets there (Gbit/s, GB/s, TFLOP/s) and in bytes/s and FLOP/s here. Every entry names its
source; a figure that could not be confirmed says so there.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence, Set
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
    """Highest boost clock; the time of the smallest kernels follows it."""
    flops: Mapping[str, float]
    """Peak dense FLOP/s by precision."""
    source: str

    def peak(self, precision: str) -> float:
        """Return FLOP/s in ``precision``; in one that the device lacks, those of the next wider.

        Raises:
            UsageError: the precision is unknown.
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
    """A kind of link."""

    name: str
    efficiency: float
    """Bytes/s that long collectives achieve, over line rate."""
    latency_s: float
    """Per hop, software included."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One kind of host."""

    name: str
    accelerator: Accelerator | None
    """None: a CPU host, which can run summation servers."""
    num_accelerators: int
    local_network: Network
    local_bytes_per_s: float
    """Line rate of one accelerator's link to the others of its host, in each direction."""
    network: Network
    nic_bytes_per_s: float
    """Line rate of the host in each direction."""
    flow_bytes_per_s: float
    """Limit of one flow (connection); infinity without a cap."""
    memory_bytes: int
    """Of the host."""
    price_per_hour: float | None
    """US dollars; None: not rented by the hour."""
    price_source: str
    source: str

    @property
    def effective_nic(self) -> float:
        """Bytes/s in each direction that collectives achieve."""
        return self.nic_bytes_per_s * self.network.efficiency

    @property
    def effective_local(self) -> float:
        """Bytes/s in each direction that collectives achieve between accelerators of the host."""
        return self.local_bytes_per_s * self.local_network.efficiency


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Equal hosts, such as ``256xp3dn.24xlarge``."""

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


def require_accelerators(machines: Machines) -> Accelerator:
    """Return the accelerator of the machines.

    Raises:
        UsageError: they are CPU hosts, which can only help.
    """
    if machines.instance.accelerator is None:
        raise UsageError(
            f"{machines.instance.name} has no accelerators; give it with --helpers, and --cluster the "
            "machines that train"
        )
    return machines.instance.accelerator


class Catalog:
    """All entries by name: those of shoal, then those of the user's files, which may replace them.

    Raises:
        UsageError: a file cannot be read, or an entry is incomplete or out of range.
    """

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self.accelerators: dict[str, Accelerator] = {}
        self.networks: dict[str, Network] = {}
        self.instances: dict[str, Instance] = {}
        trees = [*_shipped(), *((str(path), _read(path)) for path in paths)]
        for source, tree in trees:
            _Entry(source, "the file", tree).check_keys({"accelerator", "network", "instance"})
            for name, values in tree.get("accelerator", {}).items():
                self.accelerators[name] = _accelerator(name, _Entry(source, f"accelerator {name!r}", values))
            for name, values in tree.get("network", {}).items():
                self.networks[name] = _network(name, _Entry(source, f"network {name!r}", values))
        for source, tree in trees:  # instances may name entries of later files
            for name, values in tree.get("instance", {}).items():
                self.instances[name] = self._instance(name, _Entry(source, f"instance {name!r}", values))

    def instance(self, name: str) -> Instance:
        """Return an instance type.

        Raises:
            UsageError: the name is unknown.
        """
        if name not in self.instances:
            raise UsageError(
                f"instance type {name!r} is not in the catalog.{did_you_mean(name, self.instances)} "
                f"Known: {', '.join(sorted(self.instances))}; add your own with --catalog FILE"
            )
        return self.instances[name]

    def machines(self, text: str) -> Machines:
        """Parse ``64xc5n.18xlarge``; without a number, one host.

        Raises:
            UsageError: the text is not of that form, or the instance type is unknown.
        """
        match = re.fullmatch(r"(?:(\d+)\s*[x×*])?\s*([^\s]+)", text.strip())
        if not match:
            raise UsageError(f"{text!r} does not name machines; write it as 64xp3dn.24xlarge")
        count = int(match[1] or 1)
        if count < 1:
            raise UsageError(f"{text!r}: the number of hosts is {count}; it must be at least 1")
        return Machines(count=count, instance=self.instance(match[2]))

    def _instance(self, name: str, entry: _Entry) -> Instance:
        required = {"nic_gbit_per_s", "network", "memory_gib", "source"}
        optional = {"flow_gbit_per_s", "unpriced"}
        on_device = {"accelerator", "num_accelerators", "local_network", "local_gbyte_per_s"}
        priced = {"price_per_hour", "price_source"}
        is_priced, has_device = "unpriced" not in entry.values, "accelerator" in entry.values
        required |= (on_device if has_device else set()) | (priced if is_priced else set())
        entry.check_keys(required | optional | on_device | priced, required)
        has_local, has_cap = "local_network" in entry.values, "flow_gbit_per_s" in entry.values
        gbit = 1e9 / 8
        return Instance(
            name=name,
            accelerator=entry.named("accelerator", self.accelerators) if has_device else None,
            num_accelerators=int(entry.positive("num_accelerators")) if has_device else 0,
            local_network=entry.named("local_network", self.networks) if has_local else _NO_NETWORK,
            local_bytes_per_s=1e9 * entry.positive("local_gbyte_per_s") if has_local else math.inf,
            network=entry.named("network", self.networks),
            nic_bytes_per_s=gbit * entry.positive("nic_gbit_per_s"),
            flow_bytes_per_s=gbit * entry.positive("flow_gbit_per_s") if has_cap else math.inf,
            memory_bytes=int(GIB * entry.positive("memory_gib")),
            price_per_hour=entry.at_least_0("price_per_hour") if is_priced else None,
            price_source=entry.values.get("price_source", entry.values.get("unpriced", "")),
            source=entry.values["source"],
        )


_NO_NETWORK = Network(name="none", efficiency=1.0, latency_s=0.0, source="no accelerators")


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


def _accelerator(name: str, entry: _Entry) -> Accelerator:
    keys = {"memory_gib", "memory_gbyte_per_s", "clock_ghz", "tflops", "source"}
    entry.check_keys(keys, keys)
    tflops = _Entry(entry.source, f"{entry.where}, tflops", entry.values["tflops"])
    if not tflops.values:
        raise UsageError(f"{tflops} must be a table of precisions, like {{ fp16 = 125 }}")
    tflops.check_keys(set(PRECISIONS))
    return Accelerator(
        name=name,
        memory_bytes=int(GIB * entry.positive("memory_gib")),
        memory_bytes_per_s=1e9 * entry.positive("memory_gbyte_per_s"),
        clock_hz=1e9 * entry.positive("clock_ghz"),
        flops={key: 1e12 * tflops.positive(key) for key in tflops.values},
        source=entry.values["source"],
    )


def _network(name: str, entry: _Entry) -> Network:
    keys = {"efficiency", "latency_us", "source"}
    entry.check_keys(keys, keys)
    if (efficiency := entry.positive("efficiency")) > 1:
        raise UsageError(f"{entry}: efficiency is {efficiency}; it must be at most 1")
    latency_s = 1e-6 * entry.at_least_0("latency_us")
    return Network(name=name, efficiency=efficiency, latency_s=latency_s, source=entry.values["source"])


@dataclass(frozen=True)
class _Entry:
    """A table of a catalog file, with its source and name for messages."""

    source: str
    where: str
    values: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.source}: {self.where}"

    def check_keys(self, allowed: Set[str], required: Set[str] = frozenset()) -> None:
        if not isinstance(self.values, dict):
            raise UsageError(f"{self} is {self.values!r}; it must be a table")
        for key in self.values:
            if key not in allowed:
                raise UsageError(f"{self} has an unknown key {key!r}.{did_you_mean(key, allowed)}")
        if missing := sorted(required - set(self.values)):
            raise UsageError(
                f"{self} lacks {', '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}"
            )

    def positive(self, key: str) -> float:
        if (value := self._number(key)) <= 0:
            raise UsageError(f"{self}: {key} is {value}; it must be above 0")
        return float(value)

    def at_least_0(self, key: str) -> float:
        if (value := self._number(key)) < 0:
            raise UsageError(f"{self}: {key} is {value}; it must be at least 0")
        return float(value)

    def _number(self, key: str) -> float:
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageError(f"{self}: {key} is {value!r}; it must be a number")
        return value

    def named(self, key: str, entries: Mapping[str, Any]) -> Any:
        """Return the entry of ``entries`` that ``key`` names."""
        name = self.values[key]
        if name not in entries:
            raise UsageError(f"{self}: {key} {name!r} is in no catalog.{did_you_mean(str(name), entries)}")
        return entries[name]
