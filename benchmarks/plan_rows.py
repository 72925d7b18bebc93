"""Published rows for ``plan_published``: which belong together, on what and with which batch they ran.

A row is a line of ``published_scaling.csv``; its columns are the fields of :class:`Row`. Nothing here
looks at a row's value, except :func:`contradicts`.
"""

from __future__ import annotations

import csv
import math
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.planner.hardware import Catalog, Instance, Machines, require_accelerators

ROWS = Path(__file__).with_name("published_scaling.csv")
THROUGHPUT, INCLUDING_EVALUATION, TIME = "throughput", "throughput incl. evaluation", "time to train"
KINDS = (THROUGHPUT, INCLUDING_EVALUATION, TIME)
_KIND_OF_METRIC = {
    "images_per_s": THROUGHPUT,
    "sequences_per_s": THROUGHPUT,
    "tokens_per_s": THROUGHPUT,
    "iterations_per_s": THROUGHPUT,
    "tokens_per_s_per_gpu": THROUGHPUT,
    "mfu": THROUGHPUT,
    "images_per_s_avg_incl_eval": INCLUDING_EVALUATION,
    "sequences_per_s_avg_incl_eval": INCLUDING_EVALUATION,
    "time_to_train_min": TIME,
    "time_to_train_days": TIME,
}
PER_GPU_METRICS = frozenset({"tokens_per_s_per_gpu", "mfu"})


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure, with what is known of its run; empty or None: not known."""

    number: int
    system: str
    model: str
    hardware: str
    nic_gbps: float | None
    nodes: int
    gpus: int
    global_batch: int | None
    metric: str
    value: float
    source: str
    publisher: str = ""
    """Who ran and published it; of MLPerf the submitter."""
    publication: str = ""
    host: str = ""
    """Name of the host type; rows of a publication with the same name ran on the same hardware."""
    recipe: str = ""
    """Of the planner; empty: it knows none for the model."""
    accelerator: str = ""
    """In the catalog; empty: none."""
    network: str = "infiniband"
    local_gbyte_per_s: float = 12.0
    """Of an accelerator's link to the others of its host, in each direction."""
    flow_gbps: float | None = None
    """Limit of one connection."""
    software: str = ""
    precision: str = ""
    """In which the model computes; not known: the 16-bit type of the device."""
    overlap: bool | None = None
    """True if the gradients' all-reduce overlaps with the backward pass; none: not stated."""
    connections: int | None = None
    """To one other host."""
    two_hops: bool = False
    """The sums are made on servers, not in a ring or tree."""
    cuda_graphs: bool = False
    """A step is launched as CUDA graphs; empty: kernels are launched one by one."""
    tensor: int = 1
    context: int = 1
    """Devices that share the tokens of a sequence."""
    pipeline: int = 1
    virtual: int = 1
    micro_batch: int | None = None
    shard: bool = False
    """The optimizer's state is divided over the replicas, and gradients are scattered to them."""
    updates_by_host: bool = False
    """Each accelerator of a host updates its part of the parameters."""
    layout_source: str = ""
    sequence_length: int | None = None
    """Not known: the recipe's own."""
    length: str = ""
    """``target``: until a score; ``preset``: the steps of the recipe's preset; ``N epochs``."""
    evaluation_gpus: int = 0
    """Devices that evaluate while the others train."""
    clock: str = ""
    """When a time to train begins: ``after set-up`` or ``from the start`` of the processes."""
    training: bool = False
    """Constants of the planner were settled on the row."""

    @property
    def kind(self) -> str | None:
        return _KIND_OF_METRIC.get(self.metric)

    @property
    def per_replica(self) -> int:
        """Return the devices that hold one copy of the model."""
        return self.tensor * self.context * self.pipeline

    @property
    def family(self) -> tuple[str, ...]:
        """Return the scaling family of the row: model, host, NIC, metric and publication."""
        nic = "" if self.nic_gbps is None else f"{self.nic_gbps:g} Gbit/s"
        return (self.model, self.host, nic, self.metric, self.publication)


_FLAGS = {"": None, "yes": True, "no": False}


def read_rows(path: Path = ROWS) -> list[Row]:
    """Return the rows of a CSV file.

    Raises:
        UsageError: it is not there, or lacks a column.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not there: name a file of published rows with --rows FILE")
    with path.open(encoding="utf-8", newline="") as file:
        rows = []
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                rows.append(Row(number=number, **{f.name: _value(f, line[f.name]) for f in _COLUMNS}))
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(f"{path}, line {number}: {error!r}; see benchmarks/plan_rows.py") from error
    return rows


_COLUMNS = [field for field in fields(Row) if field.name != "number"]


def _value(column: Field[Any], text: str) -> Any:
    """Return the value of a cell by the type of its column; of an empty one the default."""
    if "bool" in str(column.type):
        return _FLAGS[text] if text else column.default
    if text == "":
        return None if column.default is MISSING and "None" in str(column.type) else _default(column)
    return {"int": int, "float": float}.get(str(column.type).partition(" ")[0], str)(text)


def _default(column: Field[Any]) -> Any:
    if column.default is MISSING:
        raise ValueError(f"{column.name} is empty")
    return column.default


def contradicts(row: Row, others: list[Row]) -> bool:
    """Say whether a throughput is more than twice the per-device one of the family's smallest scale.

    No physics makes a device twice as fast by giving it companions at a smaller batch: such a row is an error
    of its log (MLPerf v2.0, 527 DGX A100: 43 M images/s, while its time to train says about 6 M).
    """
    if row.kind == TIME or row.metric in PER_GPU_METRICS:
        return False
    smallest = min(others, key=lambda other: other.gpus)
    return row.value / row.gpus > 2 * smallest.value / smallest.gpus


def generation_of(machines: Machines) -> str:
    """Return the generation of the accelerators, such as A100."""
    return require_accelerators(machines).name.split("-")[0]


def machines_of(row: Row, catalog: Catalog) -> Machines | None:
    """Return the hosts that train, or None where the accelerator is in no catalog."""
    if not row.accelerator:
        return None
    accelerator = catalog.accelerators[row.accelerator]
    pcie = "PCIE" in accelerator.name or accelerator.name.startswith("T4")
    instance = Instance(
        name=row.hardware,
        accelerator=accelerator,
        num_accelerators=row.gpus // row.nodes,
        local_network=catalog.networks["pcie" if pcie else "nvlink"],
        local_bytes_per_s=row.local_gbyte_per_s * 1e9,
        network=catalog.networks[row.network],
        nic_bytes_per_s=(row.nic_gbps or 100.0) * 1e9 / 8,  # of no weight on one host
        flow_bytes_per_s=math.inf if row.flow_gbps is None else row.flow_gbps * 1e9 / 8,
        price_per_hour=None,
        price_source="",
        source=row.source,
    )
    per_host = row.gpus // row.nodes
    return Machines(count=row.nodes - row.evaluation_gpus // per_host, instance=instance)


OVERLAPS = ((True, 0.8), (False, 0.2))
"""The prior of a row that does not say whether gradients travel during the backward pass: most software
does that, and what clips or scales gradients by a norm before they are averaged does not."""
GBITS_A_GPU = (12.5, 25.0, 50.0, 100.0, 200.0, 400.0)
"""The prior of a network that is not stated: each as likely."""


SPEEDS_OF_16_BITS = (1.0, 0.71, 0.5)
"""The prior of the rate in 16 bits over that in fp8 of the same model: products alone take half, and what
part of a model is products in fp8 nobody states. Each is as likely."""


def speeds(row: Row, given: Row) -> tuple[float, ...]:
    """Return the rates of computation, over the given row's, that a row in another precision may have."""
    narrower = given.precision == "fp8" and row.precision in ("fp16", "bf16")
    return SPEEDS_OF_16_BITS if narrower else (1.0,)


def splits(row: Row, given: Row) -> list[Row]:
    """Return the row with each division of its samples that it may have had, each as likely.

    Where the devices of a sample follow from a rule, they share layers or tokens, and layers at least as many
    as at the smallest scale, which hold one copy of the model.
    """
    if not row.layout_source.startswith("rule") or row.context > 1:
        return [row]
    widths = [width for width in range(given.tensor, row.tensor + 1) if row.tensor % width == 0]
    return [replace(row, tensor=width, context=row.tensor // width) for width in widths]


def possible(row: Row) -> list[tuple[float, Row]]:
    """Return the row with each combination of what it does not state and a step depends on, and its prior."""
    if row.nodes == 1:
        return [(1.0, row)]
    found = [(1.0, row)]
    if row.overlap is None:
        found = [(weight, replace(row, overlap=overlap)) for overlap, weight in OVERLAPS]
    if row.nic_gbps is None:
        per_host = row.gpus // row.nodes
        found = [
            (weight / len(GBITS_A_GPU), replace(each, nic_gbps=gbits * per_host))
            for weight, each in found
            for gbits in GBITS_A_GPU
        ]
    return found


def with_batch(row: Row, given: Row) -> Row:
    """Return the row with a global batch: its own, or what follows from the family's given row.

    Where a publication names none: images per device as at the smallest scale; and for detectors without any,
    four images a device up to 128, then one a device, as MLPerf's references of the time had them.
    """
    if row.global_batch:
        return row
    if given.global_batch:
        return replace(row, global_batch=max(given.global_batch * row.gpus // given.gpus, 1))
    if row.recipe.endswith("rcnn"):
        return replace(row, global_batch=max(row.gpus, min(4 * row.gpus, 128)))
    return replace(row, global_batch=65536)
