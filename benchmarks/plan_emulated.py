"""The planner against real DDP steps on emulated hosts: gloo and shoal, with and without helpers.

    python -m benchmarks.plan_emulated --json FILE --markdown FILE

For each cluster (4, 8 and 12 hosts; links of 100 to 500 Mbit/s) the planner gets a catalog file of measured
facts, and nothing of the steps that it predicts:

- the time of a step without averaging, all hosts computing at once on this machine's cores;
- the memory's rate in an optimizer's step, all hosts at once;
- the latency of a hop, from all-reduces of 1 KiB by the same backend;
- the links' rate as shaped, and of that what Ethernet, IP and TCP leave for bytes.

Model, buckets and layout are those of the run. ``shoal.planner.prediction.predict`` does the rest. A row
compares the medians. Rows in which the processors are more than 85 % busy are marked and not scored: there
the cores are the limit, which emulated hosts share and real ones do not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.comm_runs import watched
from benchmarks.harness import Benchmark
from benchmarks.plan_emulated_worker import BATCH, COMPUTATION, MODELS
from benchmarks.worker import run_on_hosts
from shoal.decide.layout import Layout
from shoal.decide.workload import Workload
from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import parse_rate
from shoal.planner.convergence import Convergence
from shoal.planner.counting import workload_of_function
from shoal.planner.hardware import Catalog, Machines, require_accelerators
from shoal.planner.prediction import Part, Training, predict
from shoal.planner.step_time import MEMORY_EFFICIENCY, achieved_flops_for, step_time

MEDIAN_TARGET = 0.10
BUSY = 0.85
MIB = 1 << 20
ON_THE_WIRE = 1448 / 1514
"""Of 1,514 bytes that a link of Ethernet carries at most at once 66 are headers of Ethernet, IP and TCP."""
GLOO_THREADS = 2
"""Of torch's ProcessGroupGloo: collectives that are on their way at a time."""
SGD_BYTES = 12.0
"""Memory traffic a parameter of plain SGD in fp32: weight and gradient read, weight written."""


@dataclass(frozen=True)
class Setting:
    """A cluster and what is trained on it."""

    num_hosts: int
    nic: str
    cases: tuple[tuple[str, int], ...]
    """Models and MiB of a bucket."""
    in_quick: bool = False

    @property
    def backends(self) -> dict[str, int | None]:
        """Number of helpers of each backend; the fewer first, which no earlier group has measured."""
        half, whole = self.num_hosts // 2, self.num_hosts
        return {"gloo": None, "shoal": 0, f"{half} helpers": half, f"{whole} helpers": whole}


SETTINGS = (
    Setting(4, "100mbit", (("even", 1), ("front", 4))),
    Setting(4, "200mbit", (("even", 4), ("front", 25))),
    Setting(4, "500mbit", (("even", 1), ("even", 25)), in_quick=True),
    Setting(8, "100mbit", (("even", 25), ("front", 1))),
    Setting(8, "200mbit", (("even", 1), ("front", 4)), in_quick=True),
    Setting(8, "500mbit", (("even", 4), ("front", 4))),
    Setting(12, "100mbit", (("even", 4), ("front", 25)), in_quick=True),
    Setting(12, "200mbit", (("even", 1), ("even", 25))),
    Setting(12, "500mbit", (("even", 4), ("front", 1))),
)


def measure(setting: Setting, repeats: int) -> dict[str, Any]:
    """Train on the cluster; return the result of rank 0."""
    spec = {"cases": setting.cases, "backends": setting.backends, "repeats": repeats}
    with Cluster(
        hosts=setting.num_hosts, helpers=setting.num_hosts, nic=setting.nic, announce_rates=False
    ) as cluster:
        result: dict[str, Any] = run_on_hosts(cluster, "benchmarks.plan_emulated_worker:measure", spec)
    return result


# ---- the prediction --------------------------------------------------------------------------------------


def catalog_text(setting: Setting, *, memory_bytes_per_s: float, latency_s: float) -> str:
    """Return the catalog file of a cluster of emulated hosts, as a user would write it."""
    return f"""
[accelerator.core]
memory_gib = 16
memory_gbyte_per_s = {memory_bytes_per_s / 1e9 / MEMORY_EFFICIENCY}
clock_ghz = 1.41
tflops = {{ fp32 = 1.0 }}
source = "a share of this machine's cores; its FLOP/s are calibrated"

[network.emulated]
efficiency = {ON_THE_WIRE}
latency_us = {latency_s * 1e6}
source = "1,448 of 1,514 bytes are payload; all-reduces of 1 KiB"

[instance.emulated]
accelerator = "core"
num_accelerators = 1
local_network = "nvlink"
local_gbyte_per_s = 10
network = "emulated"
nic_gbit_per_s = {parse_rate(setting.nic, option="nic") / 1e9}
unpriced = "emulated"
source = "tc"

[instance.helper]
network = "emulated"
nic_gbit_per_s = {parse_rate(setting.nic, option="nic") / 1e9}
unpriced = "emulated"
source = "tc"
"""


def machines_of(
    setting: Setting, num_helpers: int | None, *, memory_bytes_per_s: float, small_s: float
) -> tuple[Machines, Machines | None]:
    """Return workers and helpers by way of a catalog file."""
    hops = 2 * (setting.num_hosts - 1) if num_helpers is None else 2
    text = catalog_text(setting, memory_bytes_per_s=memory_bytes_per_s, latency_s=small_s / hops)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emulated.toml"
        path.write_text(text, encoding="utf-8")
        catalog = Catalog([path])
    workers = catalog.machines(f"{setting.num_hosts}xemulated")
    return workers, catalog.machines(f"{num_helpers}xhelper") if num_helpers else None


def predicted_s(
    model: Workload,
    workers: Machines,
    helpers: Machines | None,
    *,
    is_ring: bool,
    bucket_bytes: int,
    computation_s: float,
) -> float:
    """Return the planner's seconds of a step of this model on these machines."""
    algorithm = "hierarchical-ring" if is_ring else "two-hop-helpers" if helpers else "two-hop"
    layout = Layout(
        global_batch=BATCH * workers.count,
        algorithm=algorithm,
        bucket_bytes=bucket_bytes,
        wire_bytes=4,
        collectives_at_once=GLOO_THREADS,
    )
    alone = replace(workers, count=1)
    flops = achieved_flops_for(
        computation_s,
        lambda flops: (
            step_time(model, alone, replace(layout, global_batch=BATCH), achieved_flops=flops).total_s
        ),
        peak=require_accelerators(workers).peak("fp32"),
    )
    part = Part(
        workload=model,
        convergence=Convergence(name="a step", source="", points=((1, 1.0),)),
        global_batch=layout.global_batch,
        achieved_flops=flops,
        basis="measured",
    )
    return predict(Training(recipe="ddp", parts=(part,)), workers, [layout], helpers).steps[0].total_s


# ---- the rows --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A prediction beside what was measured."""

    backend: str
    error: float
    """Of predicted over measured."""
    is_scored: bool


def add_rows(bench: Benchmark, setting: Setting, models: dict[str, Workload]) -> list[Compared]:
    """Measure a cluster, and add a row a model and backend."""
    result, foreign, num_retaken = watched(partial(measure, setting, 3 if bench.quick else 5), most_retaken=1)
    compared = []
    for (name, bucket_mib), case in zip(setting.cases, result["cases"], strict=True):
        for backend, num_helpers in setting.backends.items():
            workers, helpers = machines_of(
                setting,
                num_helpers,
                memory_bytes_per_s=result["memory_bytes_per_s"],
                small_s=statistics.median(result["small_s"][backend]),
            )
            seconds = predicted_s(
                models[name],
                workers,
                helpers,
                is_ring=num_helpers is None,
                bucket_bytes=bucket_mib * MIB,
                computation_s=statistics.median(case["samples"][COMPUTATION]),
            )
            measured = case["samples"][backend]
            busy = statistics.median(case["busy"][backend])
            error = seconds / statistics.median(measured) - 1
            kind = "with helpers" if num_helpers else backend
            compared.append(Compared(backend=kind, error=error, is_scored=busy <= BUSY))
            bench.add(
                f"{setting.num_hosts} hosts, {setting.nic}, {name}, {bucket_mib} MiB, {backend}",
                ours=[seconds],
                peer=measured,
                peer_name=f"measured: the prediction is {100 * error:+.1f} % off; processors "
                f"{100 * busy:.0f} % busy" + ("" if busy <= BUSY else ", not scored"),
                unit="s",
                foreign_cores=[foreign],
                num_retaken=num_retaken,
            )
    return compared


# ---- calibrated as a user does it ------------------------------------------------------------------------

RECIPE, HOSTS, RATE, SAMPLES = "albert", 4, "100mbit", 32


def add_measured_row(bench: Benchmark, num_steps: int) -> None:
    """Compare ``shoal plan --measured`` with a recipe's own steps on emulated hosts, by commands alone."""
    setting = Setting(HOSTS, RATE, ())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train, comm, plan, real = (folder / f"{what}.json" for what in ("train", "comm", "plan", "real"))
        catalog = folder / "emulated.toml"
        catalog.write_text(catalog_text(setting, memory_bytes_per_s=1e10, latency_s=0.0), encoding="utf-8")
        steps = ("--preset", "tiny", "--batch", str(SAMPLES), "--steps", str(num_steps))
        emulated = ("--hosts", str(HOSTS), "--nic", RATE)
        _shoal("bench", "train", RECIPE, *steps, "--workers", str(HOSTS), "--json", str(train))
        _shoal("bench", "comm", *emulated, "--backends", "gloo", "--sizes", "1m,2m,4m", "--json", str(comm))
        _shoal(
            *("plan", f"{RECIPE}-tiny", "--cluster", f"{HOSTS}xemulated", "--catalog", str(catalog)),
            *("--measured", str(train), "--measured", str(comm), "--algorithm", "hierarchical-ring"),
            *("--global-batch", str(SAMPLES * HOSTS), "--json", str(plan)),
        )
        (predicted_step_s,) = json.loads(plan.read_text())["best"]["step_s"]
        _shoal("bench", "train", RECIPE, *steps, "--on", "emulated", *emulated, "--json", str(real))
        samples_s = json.loads(real.read_text())["samples_s"]
    error = predicted_step_s / statistics.median(samples_s) - 1
    bench.add(
        f"{RECIPE}-tiny, {HOSTS} hosts, {RATE}, by shoal plan --measured",
        ours=[predicted_step_s],
        peer=samples_s,
        peer_name=f"its own steps: the prediction is {100 * error:+.1f} % off; calibrated by shoal bench",
        unit="s",
    )


def _shoal(*words: str) -> None:
    """Run a command of shoal.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"shoal {' '.join(words)} failed:\n{done.stderr[-4000:]}")


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--hosts", type=int, action="append", help="only clusters of so many")
    bench = Benchmark("plan_emulated", options=options)
    models = {
        name: replace(
            workload_of_function(f"benchmarks.plan_emulated_worker:{name}"), optimizer_bytes=SGD_BYTES
        )
        for name in MODELS
    }
    compared: list[Compared] = []
    for setting in SETTINGS:
        chosen = setting.in_quick or not bench.quick
        if chosen and setting.num_hosts in (bench.args.hosts or [setting.num_hosts]):
            compared += add_rows(bench, setting, models)
    if not bench.quick:
        add_measured_row(bench, num_steps=12)
    scored = [row for row in compared if row.is_scored]
    if not scored:
        raise SystemExit(f"the processors were more than {100 * BUSY:.0f} % busy in every row")
    bench.limit(
        f"median error of {len(scored)} rows",
        statistics.median(abs(row.error) for row in scored),
        MEDIAN_TARGET,
        unit="",
        formula=f"10 %; {len(compared) - len(scored)} more rows have processors above {100 * BUSY:.0f} %",
    )
    for backend in dict.fromkeys(row.backend for row in scored):
        errors = [abs(row.error) for row in scored if row.backend == backend]
        bench.add(
            f"median error of {len(errors)} rows, {backend}",
            ours=errors,
            peer=[MEDIAN_TARGET],
            peer_name="10 %",
            unit="",
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
