"""Published rows for ``plan_published``: which belong together, on what and with which batch they ran.

A row is a line of a CSV file with the columns system, model, hardware, nic_gbps, nodes, gpus, global_batch,
metric, value, source, notes. Nothing here looks at a row's value, except :func:`contradicts`.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import UsageError
from shoal.planner.hardware import Accelerator, Catalog, Instance, Machines, require_accelerators

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

_RECIPES = (
    # pattern of the model column -> recipe of the planner
    (r"resnet50", "resnet50"),
    (r"mask-?rcnn", "mask-rcnn"),
    (r"faster-?rcnn", "faster-rcnn"),
    (r"(?<!al)bert-large", "bert-large"),
    (r"(?<!al)bert-base", "bert-base"),
    (r"albert-base", "albert-base"),
    (r"albert-large", "albert-large"),
    (r"t5-3b", "t5-3b"),
    (r"gpt-?3", "gpt3-175b"),
    (r"llama2-70b-lora", "llama2-70b-lora"),
    (r"llama3\.1-(8b|70b|405b)", "llama3.1-{0}"),
)
_ACCELERATORS = (
    (r"A100.*PCI-?E.*80|A100.*80.*PCI-?E", "A100-PCIE-80GB"),
    (r"A100.*PCI-?E", "A100-PCIE-40GB"),
    (r"A100.*80", "A100-80GB"),
    (r"A100", "A100-40GB"),
    (r"H200", "H200-141GB"),
    (r"H100", "H100-80GB"),
    (r"B200", "B200-180GB"),
    (r"DGX-2|SXM3|16xV100", "V100-SXM3-32GB"),
    (r"V100.*32", "V100-32GB"),
    (r"V100", "V100-16GB"),
    (r"P100", "P100-16GB"),
    (r"T4", "T4-16GB"),
)
_LINKS = {"P100": 20.0, "V100": 150.0, "A100": 300.0, "H100": 450.0, "H200": 450.0, "B200": 900.0}
"""GB/s of an accelerator's NVLink in each direction, by generation; PCIe cards have 25, a T4 12."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure."""

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

    @property
    def kind(self) -> str | None:
        return _KIND_OF_METRIC.get(self.metric)

    @property
    def is_mlperf(self) -> bool:
        return self.system.startswith("MLPerf")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a CSV file.

    Raises:
        UsageError: it is not there, or lacks a column.
    """
    if not path.is_file():
        raise UsageError(
            f"{path} is not there: published rows do not ship with shoal; name your copy with --rows FILE "
            "or SHOAL_PUBLISHED_SCALING=FILE (columns: see benchmarks/plan_rows.py)"
        )
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                rows.append(
                    Row(
                        number=number,
                        system=line["system"],
                        model=line["model"],
                        hardware=line["hardware"],
                        nic_gbps=float(line["nic_gbps"]) if line["nic_gbps"] else None,
                        nodes=int(line["nodes"]),
                        gpus=int(line["gpus"]),
                        global_batch=int(line["global_batch"]) if line["global_batch"] else None,
                        metric=line["metric"],
                        value=float(line["value"]),
                        source=line["source"],
                    )
                )
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(f"{path}, line {number}: {error!r}; see benchmarks/plan_rows.py") from error
    return rows


def family_of(row: Row) -> tuple[str, ...]:
    """Return what rows must share to be compared: model, hardware, NIC, metric, publication."""
    match = re.match(r"(MLPerf v[\d.]+) (\S+) (.*)", row.system)
    if match:
        # A submission round and its submitter; of its systems, the DGX model where one is named, because a
        # DGX-2 and a DGX-2H share the hardware column.
        chassis = re.search(r"dgx-?(1|2h|2|a100|h100)(?![0-9])", match[3], re.IGNORECASE)
        publication = f"{match[1]} {match[2]}"
        hardware = f"{row.hardware} {chassis[0].upper() if chassis else ''}".strip()
        hardware += f" x{row.gpus // row.nodes}"
    else:
        publication, hardware = row.system, row.hardware
    nic = "" if row.nic_gbps is None else f"{row.nic_gbps:g} Gbit/s"
    return (row.model, hardware, nic, row.metric, publication)


def contradicts(row: Row, others: list[Row]) -> bool:
    """Say whether a throughput is more than twice the per-device one of the family's smallest scale.

    No physics makes a device twice as fast by giving it companions at a smaller batch: such a row is an error
    of its log (MLPerf v2.0, 527 DGX A100: 43 M images/s, while its time to train says about 6 M).
    """
    if row.kind == TIME or row.metric in PER_GPU_METRICS:
        return False
    smallest = min(others, key=lambda other: other.gpus)
    return row.value / row.gpus > 2 * smallest.value / smallest.gpus


def recipe_of(row: Row) -> str | None:
    """Return the planner's recipe for a row's model, or None."""
    for pattern, recipe in _RECIPES:
        if match := re.search(pattern, row.model, re.IGNORECASE):
            return recipe.format(*match.groups())
    return None


def sequence_length_of(row: Row) -> int | None:
    """Return the sequence length that the row names; None: the recipe's own."""
    match = re.search(r"seq(\d+)", row.model)
    return int(match[1]) if match else None


_PUBLISHERS = (
    # pattern of the source column -> who ran and published it
    (r"aws|AWS", "AWS"),
    (r"deepspeed", "Microsoft"),
    (r"whitefiber", "WhiteFiber"),
    (r"torchtitan", "Meta"),
    (r"NVIDIA", "NVIDIA"),
)


def publisher_of(row: Row) -> str:
    """Return who ran and published it; of MLPerf the submitter."""
    if match := re.match(r"MLPerf v[\d.]+ (\S+)", row.system):
        return match[1]
    return next((name for pattern, name in _PUBLISHERS if re.search(pattern, row.source)), row.source)


def generation_of(machines: Machines) -> str:
    """Return the generation of the accelerators, such as A100."""
    return require_accelerators(machines).name.split("-")[0]


def accelerator_of(row: Row, catalog: Catalog) -> Accelerator | None:
    for pattern, name in _ACCELERATORS:
        if re.search(pattern, row.hardware, re.IGNORECASE):
            return catalog.accelerators[name]
    return None


def machines_of(row: Row, catalog: Catalog) -> Machines | None:
    """Return the hosts of a row, or None where its accelerator is in no catalog."""
    accelerator = accelerator_of(row, catalog)
    if accelerator is None:
        return None
    pcie = "PCIE" in accelerator.name or accelerator.name.startswith("T4")
    link = 25.0 if pcie else _LINKS.get(accelerator.name.split("-")[0], 12.0)
    on_ec2 = re.search(r"\b(p\d\w*|g4dn)\.\d*xlarge", row.system) or "p3dn" in row.system
    if on_ec2:
        network = "efa" if "p4d" in row.system or "p5" in row.system else "ethernet"
    elif re.search(r"RoCE|BM\.GPU|Oracle", row.system):
        network = "roce"
    else:
        network = "infiniband"
    per_host = row.gpus // row.nodes
    nic = (row.nic_gbps or 100.0) * 1e9 / 8
    instance = Instance(
        name=row.hardware,
        accelerator=accelerator,
        num_accelerators=per_host,
        local_network=catalog.networks["pcie" if pcie else "nvlink"],
        local_bytes_per_s=link * 1e9,
        network=catalog.networks[network],
        nic_bytes_per_s=nic,
        flow_bytes_per_s=10e9 / 8 if on_ec2 else math.inf,
        price_per_hour=None,
        price_source="",
        source=row.source,
    )
    return Machines(count=row.nodes, instance=instance)


def with_batch(row: Row, given: Row, recipe: str) -> Row:
    """Return the row with a global batch: its own, or what follows from the family's given row.

    Where a publication names none: images per device as at the smallest scale; and for detectors without any,
    four images a device up to 128, then one a device, as MLPerf's references of the time had them.
    """
    if row.global_batch:
        return row
    if given.global_batch:
        return replace(row, global_batch=max(given.global_batch * row.gpus // given.gpus, 1))
    if recipe.endswith("rcnn"):
        return replace(row, global_batch=max(row.gpus, min(4 * row.gpus, 128)))
    return replace(row, global_batch=65536)
