"""Finds the largest micro-batch that fits into memory, by running ``shoal bench train`` with several.

For ``shoal bench train RECIPE --fill-memory``, and for recipes with ``--train.micro-batch-size auto``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import formatting
from shoal.bench.step_timing import TrainBench
from shoal.comm.store import NAME, Rule
from shoal.decide.batch import StagesConfig, largest_divisor
from shoal.decide.largest import MOST, largest_that_fits
from shoal.env.machine import num_gpus
from shoal.env.settings import MEMORY, worker_memory
from shoal.errors import ShoalError, UsageError
from shoal.formatting import parse_bytes
from shoal.json_text import parse_json
from shoal.recipes.start import Launch
from shoal.train.config import as_tree, load_toml, to_toml
from shoal.train.run_dir import CONFIG_FILE

if TYPE_CHECKING:
    from shoal.launch.host_rendezvous import HostGroup

SPARE = 0.1
"""Part of the memory that stays free: for fragments, and for longer samples than the trial's."""
_OUT_OF_MEMORY = "out of memory"
"""In the message of a run that lacked memory (:func:`shoal.train.stopping.out_of_memory`)."""
_OPTIONS = ("--json", "--memory", "--batch", "--steps", "--warm-up", "--nnodes", "--rdzv")
_MEMORY_NEEDED = f"--fill-memory without a GPU needs the memory of a worker: --memory 8GB, or {MEMORY}=8GB"
_LAST_LINES = 8


def find_largest(
    command: Sequence[str],
    bench: TrainBench,
    *,
    unit: str,
    on_cpu: bool = False,
    sample_bytes: Callable[[], float] = lambda: 0.0,
) -> int:
    """Return the largest micro-batch that fits, by trials of ``command`` on this host alone.

    Args:
        command: of this process, with its options ``bench``.
        unit: plural name of the samples.
        on_cpu: the workers use no GPU, so their memory must be named; else a first trial tells it.
        sample_bytes: counts the memory that a sample adds, from which the second trial follows.

    Raises:
        UsageError: no memory is named, and there is no GPU.
        ShoalError: a trial failed for another reason, or not even one sample fits.
    """
    memory, name = (bench.memory, "--memory") if bench.memory else (worker_memory(), MEMORY)
    memory_bytes = None if memory is None else parse_bytes(memory, name)
    if memory_bytes is None and on_cpu:
        raise UsageError(_MEMORY_NEEDED)
    trials = _Trials(without(command, *_OPTIONS, flag="--fill-memory"), memory_bytes, unit)
    limit_bytes = trials.limit_bytes()
    largest = largest_that_fits(
        trials.peak_bytes, limit_bytes, most=bench.batch or MOST, sample_bytes=sample_bytes()
    )
    if not largest:
        raise ShoalError(
            f"not one of the {unit} fits into {formatting.size(limit_bytes)}, {1 - SPARE:.0%} of the memory: "
            "name more --memory, or make the model or its samples smaller"
        )
    print(f"largest micro-batch: {largest} {unit}", flush=True)
    return largest


def with_batch(command: Sequence[str], size: int) -> list[str]:
    """Return ``command`` with a micro-batch in place of ``--fill-memory``."""
    return [*without(command, "--memory", "--batch", flag="--fill-memory"), "--batch", str(size)]


def is_on_cpu(config: Any) -> bool:
    """Return whether the workers of these settings use no GPU."""
    return bool(config.distributed.device == "cpu") or num_gpus() == 0


def without(command: Sequence[str], *options: str, flag: str = "") -> list[str]:
    """Return a command without options that have a value each, and without ``flag``.

    Example:
        >>> without(["bench", "--json", "x", "--memory=4GB", "--go"], "--json", "--memory", flag="--go")
        ['bench']
    """
    kept: list[str] = []
    words = iter(command)
    for word in words:
        if word in options:
            next(words, None)
        elif word != flag and word.split("=", 1)[0] not in options:
            kept.append(word)
    return kept


class _Trials:
    """Runs two steps of a command with a micro-batch, in processes that end with it."""

    def __init__(self, command: list[str], memory_bytes: int | None, unit: str) -> None:
        self._command, self._memory_bytes, self._unit = command, memory_bytes, unit
        self._results: dict[int, dict[str, Any] | None] = {}

    def limit_bytes(self) -> float:
        """Return the memory that a run may use."""
        if self._memory_bytes is None:
            first = self._run(1)
            if first is None:
                raise ShoalError(
                    f"out of memory with one of the {self._unit}: make the model or them smaller"
                )
            if first["device_memory_bytes"] is None:
                raise UsageError(_MEMORY_NEEDED)
            self._memory_bytes = int(first["device_memory_bytes"])
        return (1 - SPARE) * self._memory_bytes

    def peak_bytes(self, samples: int) -> int | None:
        """Return the memory of a run with micro-batches of ``samples``; ``None`` if it was too little."""
        result = self._run(samples)
        peak = None if result is None else int(result["peak_memory_bytes"])
        outcome = _OUT_OF_MEMORY if peak is None else formatting.size(peak)
        print(f"micro-batch of {samples}: {outcome}", flush=True)
        return peak

    def _run(self, samples: int) -> dict[str, Any] | None:
        if samples in self._results:
            return self._results[samples]
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            out = Path(folder) / "result.json"
            options = ("--batch", str(samples), "--steps", "1", "--warm-up", "1", "--json", str(out))
            done = subprocess.run(
                [*self._command, *options],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode and _OUT_OF_MEMORY not in done.stdout:
                last = "\n".join(done.stdout.strip().splitlines()[-_LAST_LINES:])
                raise ShoalError(f"a trial with a micro-batch of {samples} failed:\n{last}")
            self._results[samples] = None if done.returncode else parse_json(out.read_bytes(), str(out))
        return self._results[samples]


# ---- recipes ---------------------------------------------------------------------------------------------

AUTO = "auto"
_SIZE: Rule = {"size": range(1 << 31), "begun": range(2), "name": NAME}
_TRIALS_DEADLINE_S = 3600.0
"""Time for the slowest host to find its size."""


def with_known_batches(
    recipe: str,
    config: Any,
    launch: Launch,
    preset: str,
    command: list[str],
    check: Callable[[Any, int], object] = lambda config, num_workers: None,
) -> tuple[Any, list[str]]:
    """Return settings and command of a recipe with numbers in place of each micro-batch size ``auto``.

    A run that continues keeps its size. A dry run measures nothing and takes the default. On several hosts
    the settings have the largest sizes, and the command keeps ``auto``: :func:`settle_for` has the rest.

    Args:
        check: raises if the settings, here with the largest micro-batches, cannot train on so many workers;
            called before any trial.

    Raises:
        UsageError: emulated hosts; a layout that is searched for, or with more stages than a host has
            workers; no GPU, and no memory is named.
        ShoalError: a trial failed, or not even one sample fits.
    """
    sections = _open_sections(config)
    if not sections:
        return config, command
    parallel, num_hosts, num_local = getattr(config, "parallel", None), *launch.counts(config.run.hosts_apart)
    if launch.on != "local":
        raise UsageError(
            f"{sections[0]}.micro_batch_size auto does not go with --on {launch.on}, whose hosts share one "
            f"memory: give the number that `shoal bench train {recipe} --fill-memory` finds"
        )
    if parallel and parallel.is_searched:
        raise UsageError(
            f"parallel.layout auto chooses the micro-batch too: leave {sections[0]}.micro_batch_size out"
        )
    if parallel and parallel.pipeline > num_local:
        raise UsageError(
            f"{sections[0]}.micro_batch_size auto tries sizes on each host alone, which has {num_local} of "
            f"the {parallel.pipeline} workers of a pipeline: give a number"
        )
    changes = {name: _with_default(getattr(config, name)) for name in sections}
    if launch.dry_run:
        print(f"{', '.join(sections)}: the micro-batch is found when the run starts; below is the default")
        return replace(config, **changes), command
    num_workers = num_hosts * num_local
    for name, section in changes.items():
        _, most = share_and_limit(section.global_batch_size, parallel, num_workers)
        changes[name] = replace(section, micro_batch_size=most)
    check(replace(config, **changes), num_workers)
    known = replace(config, **changes)
    is_new = any(_size_before(config.run.dir, section) is None for section in sections)
    if is_new and worker_memory() is None and is_on_cpu(config):
        raise UsageError(
            f"{sections[0]}.micro_batch_size auto without a GPU needs the memory of a worker: set "
            f"{MEMORY}=8GB, or give a number"
        )
    if num_hosts > 1:
        return known, command
    for section in sections:
        size = _size_before(config.run.dir, section) or _largest_size(
            recipe, known, preset, section, num_workers=num_workers, num_local=num_local
        )
        changes[section] = replace(changes[section], micro_batch_size=size)
        known, command = replace(config, **changes), _with_size(command, section, size)
    return known, command


def settle_for(
    recipe: str, config: Any, known: Any, launch: Launch, preset: str, command: list[str]
) -> Callable[[HostGroup], list[str]] | None:
    """Return the function by which several hosts agree on micro-batch sizes that are ``auto``, if any are.

    It tries sizes on this host, and returns the command with the least size of all hosts. A run that
    continues keeps its size, which only the hosts that see its folder know.

    Args:
        config: the settings as given.
        known: those of :func:`with_known_batches`.
    """
    sections = _open_sections(config)
    if launch.nnodes == 1 or not sections:
        return None
    num_hosts, num_local = launch.counts(config.run.hosts_apart)

    def settle(group: HostGroup) -> list[str]:
        settled, settings = command, known
        for section in sections:
            largest = partial(
                _largest_size,
                recipe,
                settings,
                preset,
                section,
                num_workers=num_hosts * num_local,
                num_local=num_local,
            )
            size = least_of_hosts(group, section, largest, begun=_size_before(config.run.dir, section))
            print(f"{section}.micro_batch_size {size}: the least of {num_hosts} hosts", flush=True)
            changed = replace(getattr(settings, section), micro_batch_size=size)
            settings, settled = replace(settings, **{section: changed}), _with_size(settled, section, size)
        return settled

    return settle


def least_of_hosts(
    group: HostGroup, section: str, largest: Callable[[], int], *, begun: int | None = None
) -> int:
    """Return the least of the sizes that hosts find.

    Args:
        section: of the settings, for the group's values and for messages.
        largest: finds the size of this host.
        begun: the size of the run that continues here, which is kept.

    Raises:
        ShoalError: this host, or another one, found none.
    """
    error = None
    try:
        size = begun or largest()
    except ShoalError as caught:  # the others end too
        size, error = 0, caught
    own = {"size": size, "begun": int(begun is not None), "name": os.uname().nodename}
    sizes = group.all_values(f"micro-batch/{section}", own, _SIZE, deadline_s=_TRIALS_DEADLINE_S)
    if error is not None:
        raise error
    return least_size(sizes, section)


def least_size(sizes: Sequence[Mapping[str, Any]], section: str) -> int:
    """Return the size of a run that continues, if a host knows it, else the least of all hosts.

    Args:
        sizes: of each host its name, its ``size`` (0: none was found), and whether the run there has it.

    Raises:
        ShoalError: a host found none.
    """
    begun = [int(each["size"]) for each in sizes if each["begun"]]
    least = min(sizes, key=lambda each: int(each["size"]))
    if not begun and not least["size"]:
        raise ShoalError(
            f"the largest micro-batch of {section} could not be found on host {least['name']}, see its output"
        )
    return min(begun) if begun else int(least["size"])


def _open_sections(config: Any) -> list[str]:
    """Return the sections of the settings whose micro-batch is ``auto``."""
    return [
        field.name
        for field in fields(config)
        if getattr(getattr(config, field.name), "micro_batch_size", None) == AUTO
    ]


def _with_size(command: Sequence[str], section: str, size: int) -> list[str]:
    option = f"--{section}.micro-batch-size"
    return [*without(command, option), option, str(size)]


def _with_default(section: Any) -> Any:
    """Return the section with the recipe's own micro-batch, or none."""
    default = next(field.default for field in fields(section) if field.name == "micro_batch_size")
    return replace(section, micro_batch_size=default)


def _size_before(run_dir: Path, section: str) -> int | None:
    """Return the micro-batch of the run that is there, if one is."""
    path = run_dir / CONFIG_FILE
    size = load_toml(path).get(section, {}).get("micro_batch_size") if path.is_file() else None
    return size if isinstance(size, int) else None


def share_and_limit(
    global_batch_size: int, parallel: StagesConfig | None, num_workers: int
) -> tuple[int, int]:
    """Return a worker's (or replica's) samples of a step, and those of the largest micro-batch to try.

    A pipeline gets no more than by default, since it needs several micro-batches to keep its stages busy.

    Example:
        >>> share_and_limit(64, None, 2), share_and_limit(64, StagesConfig(pipeline=2), 2)
        ((32, 32), (64, 8))
    """
    share = global_batch_size // (parallel.replicas(num_workers) if parallel else num_workers)
    limit = (parallel.micro_batch_size(share, None) if parallel else None) or share
    return share, max(limit, 1)


def _largest_size(
    recipe: str, config: Any, preset: str, section: str, *, num_workers: int, num_local: int
) -> int:
    """Return the largest divisor of a worker's share that fits into memory.

    Args:
        num_workers: of the whole job.
        num_local: workers of this host, with which sizes are tried.
    """
    parallel, sizes = getattr(config, "parallel", None), getattr(config, section)
    share, limit = share_and_limit(sizes.global_batch_size, parallel, num_workers)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        settings, out = Path(folder) / "settings.toml", Path(folder) / "result.json"
        settings.write_text(to_toml(as_tree(config)), encoding="utf-8")
        options = ["--preset", preset, "--config", str(settings), "--json", str(out), "--steps", "1"]
        options += ["--workers", str(num_local), "--fill-memory", "--batch", str(limit)]
        if not parallel or parallel.pipeline == 1:
            options += ["--accumulate", "2"]
        if section.startswith("phase"):
            options += ["--phase", section.removeprefix("phase")]
        print(f"{section}.micro_batch_size auto: trying sizes", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "bench", "train", recipe, *options], check=False
        )
        if done.returncode:
            raise ShoalError(
                f"{section}.micro_batch_size auto could not be found, see above: give a number instead"
            )
        most = int(parse_json(out.read_bytes(), str(out))["micro_batch"])
    even = bool(getattr(sizes, "mixup", 0.0))  # which pairs neighbours
    size = largest_divisor(share, most, even=even)
    print(
        f"{section}.micro_batch_size {size}: the largest divisor of a worker's {share} up to {most}",
        flush=True,
    )
    return size
