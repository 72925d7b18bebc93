"""Runs ``shoal bench train`` on several numbers of hosts, for ``shoal bench scaling``.

On emulated hosts the reference of each number is measured on as many hosts at the same time, each training by
itself: hosts share this machine's cores, and both sides of a comparison share them alike. On real hosts the
reference is the smallest number of hosts.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from shoal import formatting
from shoal.bench.comm_options import COLOCATED, split_list
from shoal.bench.scaling import Scaling, ScalingBench, ScalingRow
from shoal.bench.step_timing import KIND as TRAIN_KIND
from shoal.env.settings import HELPERS, helpers
from shoal.env.variables import without
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import MASTER_PORT
from shoal.launch.supervision import POLL_S, worker_variables

_TAIL_LINES = 15

TRAIN = (sys.executable, "-m", "shoal", "bench", "train")

Trained = dict[str, Any]
"""A result of ``shoal bench train --json``."""


def measure(
    options: ScalingBench,
    recipe: str,
    arguments: Sequence[str],
    folder: Path,
    *,
    hourly: Callable[[int, int], float | None],
    report: Callable[[str], None] = print,
    program: Sequence[str] = TRAIN,
) -> Scaling:
    """Measure every number of hosts, accumulation and backend; report each row when it is known.

    Args:
        arguments: further options of ``shoal bench train``.
        folder: for results and output of the runs.
        hourly: returns the dollars per hour of (hosts, helper hosts).
        program: command of ``shoal bench train``.

    Raises:
        UsageError: ``shoal bench train`` refuses its options, or this machine cannot emulate hosts.
        ShoalError: a worker failed, or a run took too long.
    """
    command = [*program, recipe, *arguments]
    _check(command)
    command += ["--steps", str(options.steps), "--warm-up", str(options.warm_up)]
    runner = (_Emulated if options.on == "emulated" else _Launcher)(options, command, folder)
    scaling: Scaling | None = None
    for accumulate in options.accumulations():
        references: dict[str, tuple[int, Trained]] = {}
        for hosts in options.host_counts():
            for backend, num_helpers, joined in runner.trained(hosts, accumulate):
                if backend == "":  # hosts that train by themselves
                    references = dict.fromkeys(split_list(options.backends), (1, joined))
                    continue
                references.setdefault(backend, (hosts, joined))
                reference_hosts, reference = references[backend]
                row = ScalingRow(
                    backend=backend,
                    accumulate=accumulate,
                    hosts=hosts,
                    helpers=num_helpers,
                    global_batch=int(joined["global_batch"]),
                    step_s=tuple(joined["samples_s"]),
                    reference_hosts=reference_hosts,
                    reference_batch=int(reference["global_batch"]),
                    reference_s=tuple(reference["samples_s"]),
                    dollars_per_hour=hourly(hosts, num_helpers),
                )
                if scaling is None:
                    scaling = _new_scaling(options, joined, arguments, hosts)
                    report(scaling.header())
                scaling.rows.append(row)
                if hosts == 1 and scaling.one_host is None:
                    scaling.one_host = joined
                report(scaling.line(row))
    assert scaling is not None, "hosts, accumulations and backends are not empty"
    return scaling


def _new_scaling(options: ScalingBench, result: Trained, arguments: Sequence[str], hosts: int) -> Scaling:
    per_host = result["num_devices"] // hosts
    unit = result["unit"]
    tokens = f" of {result['sequence_length']} tokens" if unit == "sequences" else ""
    network = f"links of {options.nic or 'any rate'}, emulated" if options.on == "emulated" else "real hosts"
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
    }
    return Scaling(
        title=(
            f"{result['recipe']}, {result['precision']}, {result['micro_batch']} {unit}{tokens} per "
            f"micro-batch, {formatting.plural(per_host, 'worker')} per host; {network}"
        ),
        unit=unit,
        emulated=options.on == "emulated",
        settings=settings | {"arguments": list(arguments)},
    )


def _check(command: Sequence[str]) -> None:
    """Run the checks of ``shoal bench train`` before a host is made.

    Raises:
        UsageError: it refuses them.
    """
    done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        text = (done.stderr.strip() or done.stdout.strip()).removeprefix("shoal: ")
        raise UsageError(f"options for shoal bench train: {text}")


class _Emulated:
    """Emulated hosts, made for each run."""

    def __init__(self, options: ScalingBench, command: Sequence[str], folder: Path) -> None:
        self._options, self._command, self._folder = options, command, folder

    def trained(self, hosts: int, accumulate: int) -> Iterator[tuple[str, int, Trained]]:
        """Yield ("", 0, result) of hosts by themselves, then (backend, helpers, result) of each backend.

        One host alone is the same on every backend.
        """
        alone = self._alone(hosts, accumulate)
        yield "", 0, alone
        for backend in split_list(self._options.backends):
            num_helpers = self._options.helpers if backend == "shoal" and hosts > 1 else 0
            if hosts == 1:
                yield backend, 0, alone
            else:
                yield backend, num_helpers, self._joined(hosts, accumulate, backend, num_helpers)

    def _command_of(self, accumulate: int, backend: str, file: Path) -> list[str]:
        settings = ["--accumulate", str(accumulate), "--distributed.backend", backend, "--json", str(file)]
        return [*self._command, *settings]

    def _alone(self, hosts: int, accumulate: int) -> Trained:
        """Return the result of one host, with the steps of all."""
        files = [self._folder / f"alone-{hosts}-{accumulate}-{host}.json" for host in range(hosts)]
        with Cluster(hosts=hosts, nic=self._options.nic) as cluster, ExitStack() as opened:
            processes, logs = [], []
            for host in range(hosts):
                for rank in range(self._options.workers):
                    logs.append(self._folder / f"alone-{hosts}-{accumulate}-{host}-{rank}.log")
                    log = opened.enter_context(logs[-1].open("w"))
                    variables = worker_variables(
                        rank,
                        num_hosts=1,
                        workers_per_host=self._options.workers,
                        master=(cluster.address(host), MASTER_PORT),
                    )
                    command = self._command_of(accumulate, "gloo", files[host])
                    process = cluster.start(
                        host, command, env=variables, stdout=log, stderr=subprocess.STDOUT
                    )
                    processes.append(process)
            self._wait(processes, logs)
        results = [_read(file) for file in files]
        return results[0] | {"samples_s": [second for each in results for second in each["samples_s"]]}

    def _joined(self, hosts: int, accumulate: int, backend: str, num_helpers: int) -> Trained:
        options, name = self._options, f"{backend}-{hosts}-{accumulate}"
        file = self._folder / f"{name}.json"
        cluster = Cluster(
            hosts=hosts,
            helpers=num_helpers,
            nic=options.nic,
            helper_nic=options.helper_nic if num_helpers else None,
            log_dir=self._folder / f"{name}-helpers",
        )
        logs = [self._folder / f"{name}-{rank}.log" for rank in range(hosts * options.workers)]
        with cluster, ExitStack() as opened:

            def outputs(rank: int) -> tuple[IO[str], int]:
                return opened.enter_context(logs[rank].open("w")), subprocess.STDOUT

            cluster.start_helpers()
            torch_name = "shoal" if backend == COLOCATED else backend
            command = self._command_of(accumulate, torch_name, file)
            self._wait(
                cluster.start_workers(command, workers_per_host=options.workers, outputs=outputs), logs
            )
        return _read(file)

    def _wait(self, processes: Sequence[subprocess.Popen[str]], logs: Sequence[Path]) -> None:
        until = time.monotonic() + self._options.timeout
        while any(process.poll() is None for process in processes):
            for process, log in zip(processes, logs, strict=True):
                if process.poll():
                    raise _failed(f"a worker ended with exit code {process.returncode}", log)
            if time.monotonic() > until:
                raise _failed(f"the workers did not end within {self._options.timeout:g} s", logs[0])
            time.sleep(POLL_S)
        for process, log in zip(processes, logs, strict=True):
            if process.returncode:
                raise _failed(f"a worker ended with exit code {process.returncode}", log)


class _Launcher:
    """Real hosts, on which a command of the user starts the workers."""

    def __init__(self, options: ScalingBench, command: Sequence[str], folder: Path) -> None:
        self._options, self._command, self._folder = options, command, folder

    def trained(self, hosts: int, accumulate: int) -> Iterator[tuple[str, int, Trained]]:
        """Yield (backend, helpers, result) of each backend."""
        for backend in split_list(self._options.backends):
            file = self._folder / f"{backend}-{hosts}-{accumulate}.json"
            torch_name = "shoal" if backend == COLOCATED else backend
            settings = ["--accumulate", str(accumulate), "--distributed.backend", torch_name]
            prefix = [
                part.replace("{hosts}", str(hosts)) for part in shlex.split(self._options.launcher or "")
            ]
            command, num_helpers = [*prefix, *self._command, *settings, "--json", str(file)], len(helpers())
            if backend == "shoal":
                self._run(command, file.with_suffix(".log"))
            else:
                num_helpers = 0
                with without(HELPERS):
                    self._run(command, file.with_suffix(".log"))
            yield backend, num_helpers, _read(file)

    def _run(self, command: Sequence[str], log: Path) -> None:
        with log.open("w") as output:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=self._options.timeout,
                    check=False,
                )
            except FileNotFoundError:
                raise UsageError(f"--launcher: the command {command[0]!r} is not found") from None
            except subprocess.TimeoutExpired:
                raise _failed(f"{command[0]} did not end within {self._options.timeout:g} s", log) from None
        if done.returncode != 0:
            raise _failed(f"{command[0]} ended with exit code {done.returncode}", log)


def _failed(cause: str, log: Path) -> ShoalError:
    tail = log.read_text("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    output = "".join(f"\n  {line}" for line in tail) or " none"
    return ShoalError(f"shoal bench train on these hosts: {cause}; its last output:{output}")


def _read(file: Path) -> Trained:
    """Return a file of ``shoal bench train``.

    Raises:
        ShoalError: the run wrote none, as when the first worker has no common folder with this process.
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise ShoalError(
            f"{file} is not there: the first worker writes it, so it needs a folder that its host shares "
            "with this one; set TMPDIR to one"
        ) from None
    read = parse_json(data, str(file))
    if not isinstance(read, dict) or read.get("kind") != TRAIN_KIND:
        raise ShoalError(f"{file} is not a result of shoal bench train")
    return read
