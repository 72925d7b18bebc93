"""Reads the catalog of instance types, accelerators and networks; users add files of their own.

A file is TOML with tables ``accelerator``, ``network`` and ``instance``, each of named entries. Rates are in
the units of data sheets there (Gbit/s, GB/s, TFLOP/s) and in bytes/s and FLOP/s here. Every entry names its
source; a figure that could not be confirmed says so there.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.decide.cost import Link
from shoal.decide.footprint import KERNEL_SHARED_BYTES, Numerics
from shoal.errors import UsageError, cannot_read, did_you_mean

GIB = 1 << 30
_GBIT = 1e9 / 8
ON_DEMAND = "on-demand"
MARKETS = (ON_DEMAND, "spot", "capacity-block", "reserved")
_FILES = ("accelerators.toml", "networks.toml", "aws.toml", "dgx.toml", "cards.toml")


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
    capability: str = ""
    """Compute capability of a device for which current builds of torch have no kernels, such as 7.0."""
    is_cpu: bool = False
    """The processors of a host."""
    shared_bytes: int = 0
    """Most shared memory that a kernel can ask for per block; 0: unknown, taken as too little for ours."""

    def numerics(self, precision: str) -> Numerics:
        """Return those of a training in ``precision``."""
        has_kernels = self.shared_bytes >= KERNEL_SHARED_BYTES
        return Numerics.of(precision, is_cpu=self.is_cpu, has_kernels=has_kernels)

    @property
    def precision(self) -> str:
        """Type that ``--train.precision auto`` is on the device."""
        return next((each for each in ("bf16", "fp16") if each in self.flops), "fp32")

    def peak(self, precision: str) -> float:
        """Return FLOP/s in ``precision``; in one that the device lacks, those of the next wider."""
        while precision not in self.flops:
            precision = {"fp8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32"}[precision]
        return self.flops[precision]


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
    """None: a host that can only run summation servers."""
    num_accelerators: int
    local_network: Network
    local_bytes_per_s: float
    """Line rate of one accelerator's link to the others of its host, in each direction."""
    network: Network
    nic_bytes_per_s: float
    """Line rate of the host in each direction."""
    flow_bytes_per_s: float
    """Limit of one flow (connection); infinity without a cap."""
    price_per_hour: float | None
    """US dollars; None: not rented by the hour."""
    price_source: str
    source: str
    cores: int | None = None
    """Of the processors, which read samples; None: not known, and taken as enough."""
    local_hosts: int = 1
    """Hosts whose accelerators the local network connects."""

    @property
    def is_cpu(self) -> bool:
        """True of a host without a GPU, which can train on its processors and run summation servers."""
        return self.accelerator is None or self.accelerator.is_cpu

    def precision(self, *, refuses_fp16: bool) -> str:
        """Return the type in which ``shoal train`` computes on the host, of a model that may refuse fp16."""
        own = "fp32" if self.accelerator is None else self.accelerator.precision
        return "fp32" if refuses_fp16 and own == "fp16" else own

    @property
    def near(self) -> Link:
        """The link from one accelerator to another one of the host."""
        return Link(bytes_per_s=self.effective_local, latency_s=self.local_network.latency_s)

    @property
    def far(self) -> Link:
        """An accelerator's share of the link to other hosts."""
        share = self.effective_nic / max(self.num_accelerators, 1)
        return Link(bytes_per_s=share, latency_s=self.network.latency_s)

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
    def domains(self) -> Machines:
        """These accelerators as hosts of as many as the local network connects, spread evenly over them."""
        count = math.ceil(self.count / self.instance.local_hosts)
        if count == self.count:
            return self
        each, own = math.ceil(self.count / count), self.instance
        instance = replace(
            own,
            num_accelerators=each * own.num_accelerators,
            nic_bytes_per_s=each * own.nic_bytes_per_s,
            flow_bytes_per_s=each * own.flow_bytes_per_s,
            local_hosts=1,
        )
        return Machines(count=count, instance=instance)

    @property
    def price_per_hour(self) -> float | None:
        price = self.instance.price_per_hour
        return None if price is None else self.count * price

    def __str__(self) -> str:
        return f"{self.count}x{self.instance.name}"


def require_accelerators(machines: Machines) -> Accelerator:
    """Return the accelerator of the machines.

    Raises:
        UsageError: they can only help.
    """
    if machines.instance.accelerator is None:
        raise UsageError(
            f"{machines.instance.name} has no accelerators; give it with --helpers, and --cluster the "
            "machines that train"
        )
    return machines.instance.accelerator


def peak_flops_per_s(device: str, dtype: str) -> float | None:
    """Return the FLOP/s of a device by its data sheet; ``None`` if the catalog does not have it.

    Args:
        device: its name as the driver says it, such as ``NVIDIA H200``.
        dtype: ``fp32``, ``bf16`` or another that the catalog has.

    Example:
        >>> peak_flops_per_s("NVIDIA H100 80GB HBM3", "bf16")
        989000000000000.0
        >>> peak_flops_per_s("CPU, 2 threads per worker", "fp32")
    """
    words = re.split(r"[\s-]+", device)
    accelerators = (
        each for each in Catalog().accelerators.values() if set(each.name.split("-")[:-1]) <= set(words)
    )
    accelerator = next(accelerators, None)
    return accelerator.flops.get(dtype) if accelerator else None


class Catalog:
    """All entries by name: those of shoal, then those of the user's files, which may replace them.

    Args:
        paths: of the user's files.
        market: of :data:`MARKETS`, whose prices instances have.

    Raises:
        UsageError: a file cannot be read, an entry is incomplete or out of range, or the market is unknown.
    """

    def __init__(self, paths: Sequence[Path] = (), market: str = ON_DEMAND) -> None:
        if market not in MARKETS:
            raise UsageError(
                f"--price {market!r} is no market.{did_you_mean(market, MARKETS)} Choose one of "
                f"{', '.join(MARKETS)}, or give the dollars an hour of one host"
            )
        self.market = market
        self.accelerators: dict[str, Accelerator] = {}
        self.networks: dict[str, Network] = {}
        self.instances: dict[str, Instance] = {}
        shipped_files = [(name, shipped(f"hardware/{name}")) for name in _FILES]
        trees = [*shipped_files, *((str(path), _read(path)) for path in paths)]
        kinds: dict[str, tuple[dict[str, Any], Callable[[_Entry], Any]]] = {
            "accelerator": (self.accelerators, _accelerator),
            "network": (self.networks, _network),
            "instance": (self.instances, self._instance),  # may name the others' entries of any file
        }
        for source, tree in trees:
            _Entry("", f"{source}: the file", tree).check_keys(set(), kinds)
        for kind, (entries, read) in kinds.items():
            for source, tree in trees:
                for name, values in tree.get(kind, {}).items():
                    entries[name] = read(_Entry(name, f"{source}: {kind} {name!r}", values))

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

    def _instance(self, entry: _Entry) -> Instance:
        on_device = {"num_accelerators", "local_network", "local_gbyte_per_s"}
        priced = {"price_per_hour", "price_source"}
        accelerator = None
        if "accelerator" in entry.values:
            accelerator = entry.named("accelerator", self.accelerators)
        has_device, is_priced = accelerator and not accelerator.is_cpu, "unpriced" not in entry.values
        required = {"nic_gbit_per_s", "network", "source"}
        required |= (on_device if has_device else set()) | (priced if is_priced else set())
        optional = {"accelerator", "flow_gbit_per_s", "unpriced", "market", "cores", "local_hosts"}
        entry.check_keys(required, {*optional, *on_device, *priced})
        has_cap = "flow_gbit_per_s" in entry.values
        price, price_source = self._price(entry)
        return Instance(
            name=entry.name,
            accelerator=accelerator,
            num_accelerators=int(entry.number("num_accelerators"))
            if has_device
            else int(accelerator is not None),
            local_network=entry.named("local_network", self.networks) if has_device else _NO_NETWORK,
            local_bytes_per_s=entry.number("local_gbyte_per_s", 1e9) if has_device else math.inf,
            network=entry.named("network", self.networks),
            nic_bytes_per_s=entry.number("nic_gbit_per_s", _GBIT),
            flow_bytes_per_s=entry.number("flow_gbit_per_s", _GBIT) if has_cap else math.inf,
            price_per_hour=price,
            price_source=price_source,
            source=entry.values["source"],
            cores=int(entry.number("cores")) if "cores" in entry.values else None,
            local_hosts=int(entry.number("local_hosts")) if "local_hosts" in entry.values else 1,
        )

    def _price(self, entry: _Entry) -> tuple[float | None, str]:
        """Return the price of an instance in the catalog's market, and its source or why there is none."""
        markets = entry.values.get("market", {})
        _Entry("", f"{entry.label}, market", markets).check_keys(set(), MARKETS[1:])
        if self.market != ON_DEMAND and self.market in markets:
            entry = _Entry(entry.name, f"{entry.label}, market.{self.market}", markets[self.market])
            entry.check_keys({"price_per_hour", "price_source"})
        elif self.market != ON_DEMAND:
            return None, f"no {self.market} price in the catalog; give --price the dollars an hour of a host"
        elif "unpriced" in entry.values:
            return None, entry.values["unpriced"]
        return entry.number("price_per_hour", or_0=True), entry.values["price_source"]


_NO_NETWORK = Network(name="none", efficiency=1.0, latency_s=0.0, source="no accelerators")


@cache
def shipped(name: str) -> dict[str, Any]:
    """Return a file of the catalog that ships with shoal."""
    file = resources.files("shoal.planner") / "catalog" / name
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the catalog {cannot_read(path, error)}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the catalog {path} is not TOML: {error}") from error


def _accelerator(entry: _Entry) -> Accelerator:
    entry.check_keys(
        {"memory_gib", "memory_gbyte_per_s", "clock_ghz", "tflops", "source"},
        {"capability", "cpu", "shared_kib"},
    )
    tflops = _Entry("", f"{entry.label}, tflops", entry.values["tflops"])
    tflops.check_keys({"fp32"}, {"tf32", "fp16", "bf16", "fp8"})
    return Accelerator(
        name=entry.name,
        memory_bytes=int(entry.number("memory_gib", GIB)),
        memory_bytes_per_s=entry.number("memory_gbyte_per_s", 1e9),
        clock_hz=entry.number("clock_ghz", 1e9),
        flops={key: tflops.number(key, 1e12) for key in tflops.values},
        source=entry.values["source"],
        capability=entry.values.get("capability", ""),
        is_cpu=bool(entry.values.get("cpu", False)),
        shared_bytes=int(entry.number("shared_kib", 1 << 10)) if "shared_kib" in entry.values else 0,
    )


def _network(entry: _Entry) -> Network:
    entry.check_keys({"efficiency", "latency_us", "source"})
    if (efficiency := entry.number("efficiency")) > 1:
        raise UsageError(f"{entry.label}: efficiency is {efficiency}; it must be at most 1")
    return Network(
        name=entry.name,
        efficiency=efficiency,
        latency_s=entry.number("latency_us", 1e-6, or_0=True),
        source=entry.values["source"],
    )


@dataclass(frozen=True)
class _Entry:
    """A table of a catalog file; ``label`` names it in messages."""

    name: str
    label: str
    values: dict[str, Any]

    def check_keys(self, required: Set[str], optional: Iterable[str] = ()) -> None:
        if not isinstance(self.values, dict):
            raise UsageError(f"{self.label} is {self.values!r}; it must be a table")
        allowed = {*required, *optional}
        for key in self.values:
            if key not in allowed:
                raise UsageError(f"{self.label} has an unknown key {key!r}.{did_you_mean(key, allowed)}")
        if missing := sorted(required - set(self.values)):
            raise UsageError(
                f"{self.label} lacks {', '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}"
            )

    def number(self, key: str, unit: float = 1.0, *, or_0: bool = False) -> float:
        """Return a number above 0 (or 0) times ``unit``."""
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageError(f"{self.label}: {key} is {value!r}; it must be a number")
        if value < 0 or (value == 0 and not or_0):
            rule = "at least 0" if or_0 else "above 0"
            raise UsageError(f"{self.label}: {key} is {value}; it must be {rule}")
        return unit * value

    def named(self, key: str, entries: Mapping[str, Any]) -> Any:
        """Return the entry of ``entries`` that ``key`` names."""
        name = self.values[key]
        if name not in entries:
            near = did_you_mean(str(name), entries)
            raise UsageError(f"{self.label}: {key} {name!r} is in no catalog.{near}")
        return entries[name]
