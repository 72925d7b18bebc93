"""Checks this machine's software and hardware for training, and names what is missing: ``shoal doctor``.

It works as far as possible where torch or the native core is missing or broken: everything but the standard
library is imported by the check that needs it. ``python -m torch.utils.collect_env`` has more about torch and
the drivers, for bug reports; it names no remedies, and starts pip, compilers and drivers for it.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import shoal
from shoal import native
from shoal.env.launcher import worker_env
from shoal.env.machine import compiler_problem, cpu_quota, num_cores, num_scheduled
from shoal.errors import EXIT_FAILURE, EXIT_OK, ShoalError, install_command
from shoal.formatting import parse_bytes, size, size_setting
from shoal.json_text import json_document

OLDEST_PYTHON = (3, 11)
EXTRAS = {
    "torch": "for the backend, the optimizers, pipelines and training",
    "jax": "for collectives in JAX programs",
    "keras": "for model.fit of several processes",
    "tensorflow": "for collectives in TensorFlow programs",
    "text": "to train ALBERT and to prepare text",
    "corpora": "to prepare text from Parquet, .zst and MediaWiki's dumps",
    "report": "to write reports",
    "watch": "to watch runs with TensorBoard",
    "vision": "to train on images",
    "aws": "to start runs on AWS, and for s3://",
    "objects": "for data and checkpoints at gs://, and data at https://",
    "mlperf": "to log as MLPerf asks",
    "scores": "to score texts by ROUGE and BLEU",
    "onnx": "to export models to ONNX",
    "lora": "to finetune by adapters (LoRA)",
    "wandb": "to report to Weights & Biases",
    "mlflow": "to report to MLflow",
}
"""The optional dependencies and their use."""
NEEDED_EXTRAS = frozenset({"torch", "text"})
LITTLE_DISK_BYTES = 5 * 2**30
"""A few checkpoints of a large model."""
LITTLE_SHARED_BYTES = 128 * 2**20
_MARKS = {"ok": "ok", "note": "--", "missing": "!!"}


State = Literal["ok", "note", "missing"]


class Check(NamedTuple):
    """A line of the report; with the state ``missing``, training cannot run."""

    name: str
    finding: str
    state: State = "ok"
    remedy: str = ""


def _judged(name: str, finding: str, is_well: bool, remedy: str, otherwise: State = "note") -> Check:
    """Return a check with its remedy unless all is well."""
    return Check(name, finding) if is_well else Check(name, finding, otherwise, remedy)


def doctor(
    *,
    bundle: Path | None = None,
    run: Path | None = None,
    cache: Path | None = None,
    cache_bytes: str = "64GB",
    json: bool = False,
) -> int:
    """Print all checks and return 0 if training can run here, else 1.

    Args:
        bundle: FILE.tar.gz to write for a bug report: these checks, versions, settings, ends of logs, and no
            secrets.
        run: Run directory whose settings, record and logs to put into the bundle.
        cache: Folder for a cache of shards, as --data.cache, whose room is compared with cache_bytes.
        cache_bytes: Size of that cache, as --data.cache-bytes.
        json: Print the checks as JSON: version, can_train, and of each check topic, name, state (ok, note or
            missing), finding and remedy.

    Raises:
        UsageError: the bundle's name has another ending, the run does not exist, there is a run without a
            bundle, or cache_bytes is no size.
        ShoalError: the bundle cannot be written.
    """
    if bundle is not None or run is not None:
        from shoal import bug_report

        bug_report.check(bundle, run)
    topics = examine()
    if cache is not None:
        topics["Training"].append(cache_check(cache, parse_bytes(cache_bytes, "cache_bytes")))
    text = report(topics)
    print(json_document(_as_json(topics)) if json else text)
    if bundle is not None:
        written = bug_report.write_bundle(bundle, text, run)
        print(f"\n{bundle} has:\n{written}", file=sys.stderr if json else sys.stdout)
    return EXIT_FAILURE if _missing(topics) else EXIT_OK


def report(topics: Mapping[str, list[Check]]) -> str:
    """Return all checks in lines, and whether training can run."""
    lines = []
    for topic, checks in topics.items():
        lines += ["", topic]
        for check in checks:
            lines.append(f"  {_MARKS[check.state]}  {check.name:<14}{check.finding}")
            if check.remedy:
                lines.append(f"      {'':<14}> {check.remedy}")
    if not (missing := _missing(topics)):
        return "\n".join([*lines, "", "Training can run here."])
    lines += ["", f"Training cannot run here until these are put right: {', '.join(missing)}"]
    if not {"native core", "packages"} & set(missing):
        lines.append("`shoal serve`, on helper hosts, needs none of them.")
    return "\n".join(lines)


def _as_json(topics: Mapping[str, list[Check]]) -> dict[str, Any]:
    checks = [{"topic": topic, **check._asdict()} for topic, checks in topics.items() for check in checks]
    return {"version": shoal.__version__, "can_train": not _missing(topics), "checks": checks}


def _missing(topics: Mapping[str, list[Check]]) -> list[str]:
    return [check.name for checks in topics.values() for check in checks if check.state == "missing"]


def version_text() -> str:
    """Return the version, and the commit that it was built from if git was there."""
    written = Path(shoal.__file__).with_name("commit.txt")  # by the build, as [tool.setuptools_scm] says
    commit = written.read_text(encoding="utf-8").strip().removeprefix("g") if written.is_file() else "None"
    return f"shoal {shoal.__version__}" + (f", built from commit {commit}" if commit != "None" else "")


def examine() -> Mapping[str, list[Check]]:
    """Return all checks by topic; prints nothing and raises nothing."""
    gpus: list[Check] = []
    training: list[Check] = []
    startup: list[Check] = []
    try:
        import torch
    except Exception as error:  # noqa: BLE001  # a broken installation raises any exception
        finding = f"cannot be imported ({type(error).__name__}: {error})"
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        remedy = install_command("torch") if is_absent else "pip install --force-reinstall torch"
        torch_check = Check("torch", finding, "missing", remedy)
    else:
        cuda = torch.version.cuda
        torch_check = Check("torch", f"imports, built for {f'CUDA {cuda}' if cuda else 'CPU only'}")
        startup = _startup(torch)
        gpus += [_gpus(torch), *_kernels(torch)]
        gpus.append(_instructions(torch))
        training += [_precision(torch), _backends(torch)]
        training += [_default_backend(torch)] if native.is_built() else []
    shoal_check = Check("shoal", version_text().removeprefix("shoal "))
    training.append(_transports())
    if native.is_built():
        training.append(fabric_check(native.fabric("127.0.0.1")))
    return {
        "Software": [
            _python(),
            shoal_check,
            *_packages(),
            torch_check,
            *startup,
            _native_core(),
            _compiler(),
        ],
        "Machine": [_processor(), _memory(), *gpus],
        "Training": [*training, _launcher(), _disk(Path.cwd())],
    }


# ---- software ----------------------------------------------------------------------------------------------


def _startup(torch: Any) -> list[Check]:
    """Return a check if every process compiles torch's modules because no compiled ones are kept."""
    compiled = torch.__spec__.cached
    if compiled is None or Path(compiled).exists():
        return []
    finding = "every process compiles torch's Python files, which takes seconds of processor time"
    reason = "unset PYTHONDONTWRITEBYTECODE, or run" if sys.dont_write_bytecode else "run once"
    command = f"{sys.executable} -m compileall -q {Path(torch.__file__).parent}"
    return [Check("start-up", finding, "note", f"{reason}: {command}")]


def _python() -> Check:
    finding, oldest = f"{platform.python_version()}, {sys.executable}", ".".join(map(str, OLDEST_PYTHON))
    remedy = f"shoal needs Python {oldest} or newer"
    return _judged("Python", finding, sys.version_info[:2] >= OLDEST_PYTHON, remedy, "missing")


def _packages() -> list[Check]:
    try:
        requirements = metadata.requires("shoal") or []
    except metadata.PackageNotFoundError:
        finding = "shoal is not installed in this Python, so its requirements are unknown"
        return [Check("packages", finding, "missing", "pip install . in the source folder")]
    return package_checks(requirements, _installed_version)


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def package_checks(requirements: Sequence[str], installed: Callable[[str], str | None]) -> list[Check]:
    """Compare a distribution's requirements with the installed packages: a check of the core and each extra.

    Args:
        requirements: as in package metadata, e.g. ``matplotlib>=3.9; extra == "report"``.
        installed: returns the installed version of a package, or ``None``.
    """
    groups: dict[str, list[tuple[str, bool]]] = {}
    for requirement in requirements:
        match = re.match(r"\s*([\w.-]+)(?:\[[^]]*\])?\s*(?:\(?>=\s*([\d.]+))?", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", requirement)
        if not match:
            continue
        package, oldest = match.groups(default="")
        version = installed(package)
        is_old = version is not None and _numbers(version) < _numbers(oldest)
        text = f"{package} {version or 'not installed'}{f' (too old, needs {oldest})' if is_old else ''}"
        groups.setdefault(extra[1] if extra else "", []).append((text, version is not None and not is_old))
    return [_group_check(extra, groups[extra]) for extra in ("", *EXTRAS) if extra in groups]


def _group_check(extra: str, packages: Sequence[tuple[str, bool]]) -> Check:
    finding, is_well = ", ".join(text for text, _ in packages), all(is_well for _, is_well in packages)
    if not extra:
        return _judged("packages", finding, is_well, install_command(), "missing")
    remedy = f"{EXTRAS[extra]}: {install_command(extra)}"
    return _judged(f"[{extra}]", finding, is_well, remedy, "missing" if extra in NEEDED_EXTRAS else "note")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version: (2, 15, 0) of ``2.15.0+cu132``."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _native_core() -> Check:
    try:
        levels, features = native.simd_levels(), native.cpu_features()
    except (ImportError, OSError, RuntimeError, SystemError, AttributeError) as error:  # built for another
        remedy = "install a C++20 compiler, then shoal again, from its source folder or wheel"
        return Check("native core", str(error), "missing", remedy)
    has = ", ".join(name for name, there in features.items() if there) or "no known vector units"
    return Check("native core", f"{levels[-1]} kernels; processor has {has}")


def _compiler() -> Check:
    path = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if path is None:
        users = "torch.compile on the CPU needs one, and so do shoal.jax and shoal.tensorflow"
        remedy = f"{users}: install g++ or clang++"
        return Check("C++ compiler", "none found", "note", remedy)
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    return Check("C++ compiler", answer.stdout.partition("\n")[0].strip() or path)


# ---- machine -----------------------------------------------------------------------------------------------


def _processor() -> Check:
    name = cpu_name(Path("/proc/cpuinfo"))
    quota = f", by the quota of its container ({cpu_quota():.3g})" if cpu_quota() < num_scheduled() else ""
    return Check("processor", f"{name}, {num_cores()} cores for this process{quota}")


def cpu_name(cpuinfo: Path) -> str:
    """Return the processor's name from Linux's ``/proc/cpuinfo``, else from Python."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _memory() -> Check:
    memory = memory_bytes(Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max"))
    return Check("memory", size(memory) if memory else "size unknown")


def memory_bytes(meminfo: Path, cgroup_limit: Path) -> int:
    """Return the memory that this process may use: the machine's or its container's; 0 if unknown."""
    text = meminfo.read_text() if meminfo.is_file() else ""
    match = re.search(r"^MemTotal:\s*(\d+) kB", text, re.MULTILINE)
    total = int(match[1]) * 1024 if match else 0
    limit = cgroup_limit.read_text().strip() if cgroup_limit.is_file() else "max"
    return min(total, int(limit)) if limit.isdecimal() and total else total


def _gpus(torch: Any) -> Check:
    if torch.cuda.is_available():
        from shoal.train.world import not_built_for

        numbers = range(torch.cuda.device_count())
        gpus = map(torch.cuda.get_device_properties, numbers)
        finding = "; ".join(
            f"{gpu.name} ({size(gpu.total_memory)}, capability {gpu.major}.{gpu.minor})" for gpu in gpus
        )
        if missing := next(filter(None, map(not_built_for, numbers)), ""):
            return Check("GPUs", finding, "missing", missing)
    elif torch.version.cuda:
        finding = (
            f"none: no NVIDIA driver for this torch's CUDA {torch.version.cuda}; training runs on the CPU"
        )
    else:
        finding = "none"
    return Check("GPUs", finding)


def _kernels(torch: Any) -> list[Check]:
    """Return whether kernels for a GPU can be compiled, on a machine with one."""
    if not torch.cuda.is_available():
        return []
    problem = compiler_problem()
    summary, _, remedy = problem.partition(": ")
    return [_judged("kernels", summary or "torch.compile can make them", not problem, remedy)]


def _instructions(torch: Any) -> Check:
    """Return the instruction sets that torch's kernels may use, with those that are absent."""
    probes = {"AVX2": "avx2", "AVX-512": "avx512", "AVX-512 BF16": "avx512_bf16", "AMX": "amx_tile"}
    has = {name: getattr(torch.cpu, f"_is_{probe}_supported", bool)() for name, probe in probes.items()}
    finding = ", ".join(name if there else f"no {name}" for name, there in has.items())
    return Check(
        "instructions", f"{finding}; torch's own kernels use {torch.backends.cpu.get_cpu_capability()}"
    )


# ---- training ----------------------------------------------------------------------------------------------


def _precision(torch: Any) -> Check:
    from shoal.train.model_setup import choose_precision

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device_words = {"cuda": "this GPU", "cpu": "processors"}[device.type]
    return Check("precision", f"auto is {choose_precision('auto', device).name} on {device_words}")


def _backends(torch: Any) -> Check:
    dist = torch.distributed
    backends = []
    if dist.is_available():
        backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
        if "shoal" in dist.Backend.backend_list and native.is_built():
            backends.append("shoal")
    remedy = "shoal needs gloo: install a torch built with it"
    return _judged("backends", ", ".join(backends) or "none", "gloo" in backends, remedy, "missing")


def _default_backend(torch: Any) -> Check:
    """Return the backend of several workers on hosts like this one."""
    from shoal.comm import native_group
    from shoal.decide.backend import Situation, planned_backend
    from shoal.env.settings import helpers

    try:
        known = Situation(
            on_gpu=torch.cuda.is_available(), num_workers=2, num_hosts=2, num_helpers=len(helpers()),
            unloaded=native_group.obstacle(),
        )  # fmt: skip
        finding = f"auto is {planned_backend(known)}"
    except ShoalError as error:
        return Check("backend", str(error), "missing", "correct the variable, or the installation")
    remedy = f"shoal's process group in C++ does not load: {known.unloaded}"
    return _judged("backend", finding, not known.unloaded, remedy)


def _transports() -> Check:
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free if shared.is_dir() else 0
    finding = f"shared memory in a host ({size(room)} free in {shared}), TCP between hosts"
    remedy = "backend shoal needs about 3 MiB per worker and group there: docker run --shm-size 1g"
    return _judged("transports", finding, room >= LITTLE_SHARED_BYTES, remedy)


def fabric_check(fabric: native.Fabric) -> Check:
    """Return the usable providers of libfabric; only hosts with EFA or a similar network need it."""
    if not fabric.built:
        remedy = "for EFA and the like: apt-get install libfabric-dev, then install shoal again"
        return Check("libfabric", "not built in", "note", remedy)
    if not fabric.version:
        remedy = "for EFA and the like: apt-get install libfabric1, or set LD_LIBRARY_PATH to where it is"
        return Check("libfabric", f"cannot be loaded: {fabric.problem}", "note", remedy)
    usable = [name for name, problem in fabric.providers.items() if not problem]
    broken = [f"{name} does not open ({problem})" for name, problem in fabric.providers.items() if problem]
    finding = "; ".join([f"{fabric.version}, usable providers: {', '.join(usable) or 'none'}", *broken])
    return _judged("libfabric", finding, bool(usable), "fi_info lists what it finds; TCP needs none of it")


def _launcher() -> Check:
    try:
        worker = worker_env()
    except ShoalError as error:
        remedy = "correct the variable, or unset RANK and WORLD_SIZE to let shoal start the workers"
        return Check("launcher", str(error), "missing", remedy)
    if worker is None:
        return Check("launcher", "none: shoal starts the workers itself")
    number = f"worker {worker.ranks.rank} of {worker.ranks.num_workers}"
    return Check("launcher", f"{worker.launcher}: {number}, meeting at {worker.init_method}")


def cache_check(folder: Path, num_bytes: int) -> Check:
    """Return whether a cache of shards fits into a folder, with the copies that are there already."""
    from shoal.data.cache import OWN_FOLDER

    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    kept = sum(path.stat().st_size for path in (folder / OWN_FOLDER).glob("*") if path.is_file())
    finding = f"{size(free)} free for {folder}" + (f", besides {size(kept)} of copies" if kept else "")
    remedy = f"the cache wants {size(num_bytes)}: set --data.cache-bytes {size_setting(free + kept)} at most"
    if there.is_relative_to("/dev/shm"):
        remedy += ", or make it larger: docker run --shm-size, or mount -o remount,size=… /dev/shm"
    return _judged("cache", finding, free + kept >= num_bytes, remedy)


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    finding = f"{size(free)} free in {folder}"
    remedy = "checkpoints need room: free some, or keep the run on another disk with --run.dir"
    return _judged("disk", finding, free >= LITTLE_DISK_BYTES, remedy)
