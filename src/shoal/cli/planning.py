"""What ``shoal plan`` does: the job from the recipe's real model, the search, the answer, the files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.cli.plan_files import as_json, trace_of
from shoal.cli.plan_job import make_job, measured_files, with_network
from shoal.cli.plan_page import page_of
from shoal.cli.plan_request import Request
from shoal.cli.plan_text import answer, helpers_line, limits_line
from shoal.errors import ShoalError, UsageError
from shoal.planner.hardware import Catalog, Machines, require_accelerators
from shoal.planner.prediction import Job, Plan
from shoal.planner.search import search


def run(recipe: str, request: Request) -> int:
    """Print the answer, write the files, return the exit status.

    Raises:
        UsageError: something asked for is not known or cannot be.
        ShoalError: a file cannot be written.
    """
    catalog = Catalog(request.catalog)
    workers = catalog.machines(request.cluster)
    helpers = catalog.machines(request.helpers) if request.helpers else None
    require_accelerators(workers)
    trained, networks = measured_files(request)
    if networks:
        workers, helpers = with_network(networks[-1], workers, helpers)
    counts = sweep_counts(request.sweep) if request.sweep else []
    job = make_job(recipe, request, workers, catalog, trained)
    plans = _search(job, request, workers, helpers)
    curve = [_on_so_many(job, request, workers, helpers, count) for count in counts]
    print("\n".join(answer(job, plans, curve, has_helpers=helpers is not None, compare=request.compare)))
    notes = [*([helpers_line(plans)] if helpers else []), limits_line(job, plans[0])]
    if request.json:
        _write(request.json, json.dumps(as_json(job, plans, curve), indent=1) + "\n")
    if request.page:
        _write(request.page, page_of(job, plans, curve, notes))
    if request.trace:
        _write(request.trace, json.dumps(trace_of(plans[0])) + "\n")
    return 0


def sweep_counts(text: str) -> list[int]:
    """Return the numbers of hosts of ``nodes=1..256``: doublings, and the last.

    Raises:
        UsageError: the text is not of that form.
    """
    match = re.fullmatch(r"(?:nodes|hosts)=(\d+)\.\.(\d+)", text.replace(" ", ""))
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--sweep {text!r} is not of the form nodes=1..256, the smaller number first")
    first, last = int(match[1]), int(match[2])
    counts = [first]
    while counts[-1] * 2 < last:
        counts.append(counts[-1] * 2)
    return [*counts, last] if last > first else counts


def _search(job: Job, request: Request, workers: Machines, helpers: Machines | None) -> list[Plan]:
    algorithms: Sequence[str] | None = [request.algorithm] if request.algorithm else None
    return search(
        job,
        workers,
        helpers,
        goal=request.goal,
        algorithms=algorithms,
        wire_bytes=4 if request.wire == "fp32" else 2,
    )


def _on_so_many(job: Job, request: Request, workers: Machines, helpers: Machines | None, count: int) -> Plan:
    """Return the best plan on ``count`` hosts, with as many helpers a host."""
    fewer = replace(workers, count=count)
    if helpers is not None:
        helpers = replace(helpers, count=max(1, round(helpers.count * count / workers.count)))
    return _search(job, request, fewer, helpers)[0]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShoalError(f"{path} cannot be written: {error.strerror}") from error
    print(f"\n{path}")
