"""Processes for tests, forked from one that has torch and the recipes loaded: each starts at once.

Loading them takes seconds of processor time, more than most tests need for what they look at. A process also
loads the module of tests whose function it calls: pytest and what else such modules import is loaded too. One
list for all, since a test session has one server to fork from, and the last list given to it counts.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = [
    "boto3",
    "faster_coco_eval.core",
    "pytest",
    "tensorboardX",
    "torch._dynamo",  # every optimizer imports it at its first step
    "torch.distributed.fsdp",
    "torch.export._trace",
    "torchvision.io",
    "torchvision.transforms.v2.functional",
    "shoal.cli.app",
    "shoal.cli.bench_train",
    "shoal.cli.submit",
    "shoal.cli.train",
    "shoal.cli.use",
    "shoal.comm.backend",
    "shoal.data.coco.drawing",
    "shoal.data.coco.reader",
    "shoal.data.coco.score",
    "shoal.data.images.gpu",
    "shoal.data.images.prepare",
    "shoal.data.text.examples",
    "shoal.data.text.prepare",
    "shoal.launch.emulated_job",
    "shoal.launch.host_rendezvous",
    "shoal.launch.local",
    "shoal.models.causal",
    "shoal.models.detection.mask_rcnn",
    "shoal.models.pretraining",
    "shoal.models.resnet",
    "shoal.models.t5",
    "shoal.pipelining.api",
    "shoal.recipes.export",
    "shoal.recipes.mask_rcnn",
    "shoal.recipes.resnet50",
    "shoal.report.page",
    "shoal.train.servers.log",
    "shoal.train.optimizers",
    "shoal.train.run",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "forked_programs",
    "preloaded",  # the last
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)
_any = random.SystemRandom()
_RENEWED = ("AWS_", "XDG_CACHE_HOME")


def fork_process(function: Callable[..., None], *args: Any, daemon: bool = False) -> BaseProcess:
    """Start ``function(*args)`` in a process of its own, which may have children unless it is a daemon.

    Its environment is that of the server, which began with the first such process; settings of S3 and the
    folder of caches are new.
    """
    start_server()
    settings = {name: value for name, value in os.environ.items() if name.startswith(_RENEWED)}
    process = _context.Process(target=_begin, args=(function, args, settings), daemon=daemon)
    process.start()
    return process


@functools.cache
def start_server() -> None:
    """Start the process that forks the others; it finds modules beside this one by PYTHONPATH only."""
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([given] if given else [])])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if given:
            os.environ["PYTHONPATH"] = given


def _begin(function: Callable[..., None], args: tuple[Any, ...], settings: dict[str, str]) -> None:
    import torch

    for name in [each for each in os.environ if each.startswith(_RENEWED)]:
        del os.environ[name]
    os.environ.update(settings)
    torch.set_num_threads(1)  # renews torch 2.11's pool, for which autograd's threads race after a fork
    function(*args)


def wait_for(processes: list[BaseProcess], deadline_s: float = 120) -> list[int | None]:
    """Return the exit codes; kill what is still there at the deadline."""
    end = time.monotonic() + deadline_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return exit_codes


def shoal(
    *arguments: str, cwd: Path | None = None, deadline_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run the command ``shoal ARGUMENTS`` and return its exit code and what it wrote, as on no terminal."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, "out"), Path(name, "err")]
        (code,) = wait_for([fork_process(command, arguments, files, cwd)], deadline_s)
        if code is None:
            raise TimeoutError(f"shoal {' '.join(arguments)} has no end: {files[1].read_text()}")
        return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in files))


def command(arguments: tuple[str, ...], files: list[Path], cwd: Path | None) -> None:
    """Run the command in this process, its output in two files."""
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    if cwd is not None:
        os.chdir(cwd)
    sys.argv = ["shoal", *arguments]
    from forked_programs import fork_programs
    from shoal.cli.app import main

    fork_programs()
    main()


def torchrun(
    *command: str, output: Path, deadline_s: float = 120, forks: bool = False
) -> tuple[int | None, str]:
    """Run ``torchrun --standalone --nproc-per-node 2 COMMAND``; return its exit code and what all wrote.

    Args:
        forks: its workers are forked, not started as programs.
    """
    process = fork_process(_torchrun, command, output, forks)
    (code,) = wait_for([process], deadline_s)
    return code, output.read_text()


def _torchrun(command: tuple[str, ...], output: Path, forks: bool) -> None:
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from torch.distributed.run import main

    if forks:
        from forked_programs import fork_workers_of_torchrun

        fork_workers_of_torchrun()
    main(["--standalone", "--nproc-per-node", "2", *command])


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    """Return a port of this host that nobody listens at, and that the system gives to nobody else.

    A port that the system has chosen and taken back is soon given to another process of another test.
    """
    while True:
        port = _any.randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
