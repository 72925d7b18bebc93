"""Defines ``shoal plan``, which predicts a training run before a machine is rented."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from shoal.errors import UsageError, did_you_mean
from shoal.formatting import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shoal.planner.goal import Aim
    from shoal.planner.hardware import Accelerator
    from shoal.planner.prediction import Plan, StoredData
    from shoal.recipes.workloads import OwnSettings

_WITH_HELPERS = "two-hop-helpers"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of ``shoal plan``."""

    cluster: tuple[str, ...] = ()
    """The machines that train, like 256xp3dn.24xlarge or 1..64xp4d.24xlarge; several are compared in a
    table."""
    helpers: str | None = None
    """CPU hosts with summation servers, like 64xc5n.18xlarge; auto chooses them, or none."""
    goal: Literal["time", "cost"] | None = None
    """Rank plans by time, as by default, or by cost."""
    by: str | None = None
    """The longest time, like 12h or 1d6h; the cheapest of the clusters that keep it is chosen."""
    budget: float | None = None
    """The highest cost in dollars; the fastest of the clusters that keep it is chosen."""
    global_batch: int | None = None
    """Samples per step; default: the recipe's, or the largest divisible one known to reach the target."""
    sequence_length: int | None = None
    """Tokens per sample, for recipes with one phase."""
    model: str | None = None
    """Your own model instead of a recipe, as module:function; the function returns the model, a dict of its
    inputs and the number of samples in them. Needs --global-batch."""
    algorithm: str | None = None
    """Plan with this algorithm only: ring, hierarchical-ring, tree, two-hop or two-hop-helpers."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Precision of gradients on the network; `shoal train` sends fp32 unless --distributed.wire bf16 is
    set."""
    throughput: float | None = None
    """Samples per second, measured on one host of the cluster with this recipe."""
    measured: tuple[Path, ...] = ()
    """Files of `shoal bench train --json` or `scaling --json` (this recipe), or the directory of a run of it,
    and files of `shoal bench comm --json` (all-reduces between hosts), used instead of published figures."""
    start_s: float = 120.0
    """Seconds from starting the processes to the first step."""
    data_bytes: str | None = None
    """Size of data that the hosts read once together from a store, as with --data.cache-peers on, such as
    150GB; the time of that is added to the start. Default: they are on the hosts."""
    store_rate: str | None = None
    """Bytes a second that the store gives all hosts together, such as 5GB; default: what a host's network
    takes."""
    cache_bytes: str | None = None
    """Size of each host's cache for that data, as --data.cache-bytes; default: it holds all."""
    compare: bool = False
    """Add a table of all algorithms."""
    sweep: str | None = None
    """Numbers of hosts for the scaling curve, like nodes=1..256."""
    slow_hosts: tuple[str, ...] = ()
    """Hosts that are slower than the others, like 1x0.5: one at half their speed."""
    jitter: float = 0.0
    """Variation of a host's time from step to step: standard deviation of its logarithm; 0.3 is about ±30
    %."""
    page: Path | None = None
    """Write the plan, and the curve of --sweep, as an HTML page."""
    trace: Path | None = None
    """Write the predicted step as a Chrome trace."""
    json: Path | None = None
    """Write everything as JSON."""
    preset: str | None = None
    """Preset of the recipe, when the recipe alone is named: shoal plan bert --preset large-lans."""
    catalog: tuple[Path, ...] = ()
    """TOML files with your own instance types."""
    measure: Path | None = None
    """Measure this host, and write it as a catalog file whose instance is named as the file: mine.toml has
    mine. Nothing is planned."""
    price: str = "on-demand"
    """Market of the prices: on-demand, spot, capacity-block or reserved; or dollars an hour of one host."""


def plan(
    recipe: str = "",
    /,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True)],
    request: Annotated[Request, Parameter(name="*")] = Request(),
) -> int:
    """Predict time, cost, memory and scaling of a training run before a machine is rented.

    For example: shoal plan bert-large --cluster 256xp3dn.24xlarge --helpers 64xc5n.18xlarge

    Parameters
    ----------
    recipe
        Name of the model or preset: resnet50, mask-rcnn, bert-large, bert-large-lans, t5-3b, gpt-13b, ...;
        or hf: and the path of a config.json of transformers.
    settings
        Options of the recipe's command, such as --train.precision fp32.
    """
    from shoal.planner.comparison import clusters_of

    if request.measure is not None:
        return _measure(request.measure)
    _check(recipe, request)
    own = _own_settings(recipe, settings, request)
    if not request.cluster:
        raise UsageError("name the hosts that train, such as --cluster 8xp4d.24xlarge")
    aim, clusters = _aim(request), clusters_of(request.cluster)
    options = _options(request, aim)
    if own:
        recipe = own.name
        options |= {"presets": own.presets, "count": own.count}
    if len(clusters) > 1 or aim.is_limited:
        return _compare(request.model or recipe, clusters, aim, request, options)
    counts = _sweep_counts(request.sweep) if request.sweep else []
    from shoal.planner import answer, unequal_hosts
    from shoal.planner.hardware import require_accelerators
    from shoal.recipes import workloads

    plans = workloads.plan(request.model or recipe, clusters[0], request.helpers, **options)
    workers = plans[0].workers
    curve, refused = _curve(plans, counts, options)
    unequal = []
    if request.slow_hosts or request.jitter:
        speeds = unequal_hosts.host_speeds(workers.count, request.slow_hosts)
        unequal = unequal_hosts.divisions(plans[0], speeds, jitter=request.jitter)
    print("\n".join([answer.text_of(plans, curve, compare=request.compare, unequal=unequal), *refused]))
    if note := _build_note(require_accelerators(workers)):
        print(f"\n{note}")
    if request.json:
        _write(request.json, json.dumps(answer.json_of(plans, curve, unequal), indent=1) + "\n")
    if request.page:
        lines = _curves(plans, counts, options)
        _write(request.page, answer.page_of(plans, curve, lines, compare=request.compare, unequal=unequal))
    if request.trace:
        _write(request.trace, json.dumps(answer.trace_of(plans[0])) + "\n")
    return 0


def _measure(path: Path) -> int:
    """Write this host as a catalog file."""
    from shoal.bench.host_entry import measure_host

    text = measure_host().toml(path.stem, time.strftime("%Y-%m-%d"))
    print(text, end="")
    _write(path, text)
    print(f"plan with it: shoal plan RECIPE --cluster 1x{path.stem} --catalog {path}")
    return 0


def _check(recipe: str, request: Request) -> None:
    """Check options that need one another, or do not go together.

    Raises:
        UsageError: they do not.
    """
    if bool(recipe) == bool(request.model):
        raise UsageError("name a recipe (shoal plan bert-large ...) or your own model with --model, not both")
    if recipe.startswith("hf:") and request.global_batch is None:
        raise UsageError("hf: needs --global-batch: a configuration says nothing of the training")
    if request.model and request.global_batch is None:
        raise UsageError("--model needs --global-batch: the planner cannot know the batch of your recipe")
    if request.model and ":" not in request.model:
        raise UsageError(f"--model {request.model!r} is not of the form module:function")
    if request.helpers and request.algorithm not in (None, _WITH_HELPERS):
        raise UsageError(
            f"--algorithm {request.algorithm} does not use helper hosts, and --helpers {request.helpers} are "
            f"named: leave one of them out, or use --algorithm {_WITH_HELPERS}"
        )


_CHOSEN = {
    "parallel": "the plan chooses stages and shards",
    "distributed": "for the wire give --wire, for the algorithm --algorithm",
    "servers": "plans are of plain training; see --slow-hosts",
}
"""Sections whose options are no input of a plan, and what to do instead."""


def _own_settings(recipe: str, settings: Sequence[str], request: Request) -> OwnSettings | None:
    """Return the recipe with ``--preset`` and options of its command, if there are any.

    Raises:
        UsageError: a word that is no option of a recipe's command, or one that a plan chooses itself.
    """
    names = [word.partition("=")[0] for word in settings if word.startswith("--")]
    if settings and not settings[0].startswith("--"):
        raise UsageError(f"{settings[0]!r} is not understood: shoal plan takes one recipe, and options")
    for name in names:
        section, dot, _ = name.removeprefix("--").partition(".")
        if not dot:
            known = [f"--{each.name.replace('_', '-')}" for each in fields(Request)]
            raise UsageError(f"Unknown option: {name}.{did_you_mean(name, known)}")
        if section in _CHOSEN:
            raise UsageError(f"{name} is no input of a plan: {_CHOSEN[section]}")
    if request.model or (not settings and request.preset is None and recipe.startswith("hf:")):
        if settings or request.preset:
            raise UsageError("--model is not a recipe: leave --preset and its options out")
        return None
    from shoal.cli.train import settings_of
    from shoal.recipes.workloads import own_settings

    return own_settings(recipe, request.preset, settings, settings_of)


def _aim(request: Request) -> Aim:
    """Return the goal of a request, and its limits."""
    from shoal.planner.goal import Aim, seconds_of

    by_s = None if request.by is None else seconds_of(request.by, "--by")
    return Aim(goal=request.goal, by_s=by_s, budget=request.budget)


def _curve(
    plans: Sequence[Plan], counts: Sequence[int], options: Mapping[str, Any]
) -> tuple[list[Plan], list[str]]:
    """Return the best plan on each number of hosts, and why others have none.

    Helpers grow with the hosts. Refused are numbers on which ``shoal train`` would not start either.
    """
    from shoal.planner.search import search

    curve, refused = [], []
    training, workers = plans[0].training, plans[0].workers
    helpers = next((plan.helpers for plan in plans if plan.helpers), None)
    chosen = {name: options[name] for name in ("goal", "algorithms", "wire_bytes")}
    for count in counts:
        fewer = replace(workers, count=count)
        share = helpers and max(1, round(helpers.count * count / workers.count))
        helping = [replace(helpers, count=share)] if helpers and share else []
        try:
            curve += search(training, fewer, helping, **chosen)[:1]
        except UsageError as error:
            refused.append(f"{fewer}: {error}")
    return curve, refused


def _curves(
    plans: Sequence[Plan], counts: Sequence[int], options: Mapping[str, Any]
) -> dict[str, list[Plan]]:
    """Return the best plans of each algorithm on each number of hosts."""
    from shoal.planner.network import COMPARED

    curves = {name: _curve(plans, counts, {**options, "algorithms": [name]})[0] for name in COMPARED}
    return {name: curve for name, curve in curves.items() if curve}


def _options(request: Request, aim: Aim) -> dict[str, Any]:
    """Return the arguments of the planner."""
    return {
        "global_batch": request.global_batch,
        "sequence_length": request.sequence_length,
        "samples_per_s": request.throughput,
        "measured": request.measured,
        "goal": aim.ranks_by,
        "algorithms": [request.algorithm] if request.algorithm else None,
        "wire_bytes": 4 if request.wire == "fp32" else 2,
        "start_s": request.start_s,
        "data": _stored(request),
        "catalog": request.catalog,
        "price": request.price,
    }


def _stored(request: Request) -> StoredData | None:
    """Return the data in a store that the request names.

    Raises:
        UsageError: a size is not one, or the store's rate or the cache is given without data.
    """
    from shoal.planner.prediction import StoredData

    given = {"--store-rate": request.store_rate, "--cache-bytes": request.cache_bytes}
    numbers: dict[str, float] = dict.fromkeys(given, math.inf)
    for option, text in given.items():
        if text is None:
            continue
        if request.data_bytes is None:
            raise UsageError(f"{option} is for data in a store: give their size with --data-bytes")
        numbers[option] = parse_bytes(text, option)
        if numbers[option] < 1:
            raise UsageError(f"{option} {text} must be at least one byte")
    if request.data_bytes is None:
        return None
    return StoredData(
        num_bytes=parse_bytes(request.data_bytes, "--data-bytes"),
        store_bytes_per_s=numbers["--store-rate"],
        cache_bytes=numbers["--cache-bytes"],
    )


def _compare(
    model: str, clusters: Sequence[str], aim: Aim, request: Request, options: Mapping[str, Any]
) -> int:
    """Print a table of several clusters.

    Raises:
        UsageError: an option that describes one plan, or no cluster keeps the limits.
    """
    for option, value in (
        ("--compare", request.compare),
        ("--sweep", request.sweep),
        ("--slow-hosts", request.slow_hosts),
        ("--jitter", request.jitter),
        ("--page", request.page),
        ("--trace", request.trace),
    ):
        if value:
            raise UsageError(f"{option} describes one plan: give one --cluster, or leave {option} out")
    from shoal.planner import answer
    from shoal.recipes import workloads

    compared = workloads.compare(model, clusters, request.helpers, aim=aim, **options)
    print(answer.comparison_text(compared))
    if request.json:
        _write(request.json, json.dumps(answer.comparison_json(compared), indent=1) + "\n")
    return 0


_FIRST_WITHOUT_OLD = (12, 8)
"""CUDA of the first builds of torch (2.8) that begin at compute capability 7.5."""


def _build_note(device: Accelerator) -> str:
    """Return that the torch here has no kernels for a device that current builds lack, if there is one."""
    version, cuda = _torch_build() if device.capability else ("", ())
    if cuda < _FIRST_WITHOUT_OLD:
        return ""
    return (
        f"the torch here, {version}, has no kernels for {device.name}: builds for CUDA "
        f"{'.'.join(map(str, _FIRST_WITHOUT_OLD))} and later begin at compute capability 7.5"
    )


def _torch_build() -> tuple[str, tuple[int, ...]]:
    """Return the version of torch and of its CUDA, ``()`` without one, from its file, which is fast."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "", ()
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '(.+)'", text, re.M)
    cuda = re.search(r"^cuda.* = '(\d+)\.(\d+)", text, re.M)
    return version[1] if version else "", tuple(map(int, cuda.groups())) if cuda else ()


def _sweep_counts(text: str) -> list[int]:
    """Return the numbers of hosts of ``nodes=1..256``: doublings, and the last.

    Raises:
        UsageError: the text is not of that form.
    """
    match = re.fullmatch(r"(?:nodes|hosts)=(\d+)\.\.(\d+)", text.replace(" ", ""))
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--sweep {text!r} is not of the form nodes=1..256, the smaller number first")
    from shoal.planner.comparison import doublings

    return doublings(int(match[1]), int(match[2]))


def _write(path: Path, text: str) -> None:
    from shoal.atomic_io import write_atomically

    write_atomically(path, text.encode())
    print(f"\n{path}")
