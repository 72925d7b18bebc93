"""Kills a process at a random moment of its uploads of checkpoints, and resumes on an empty disk, 50 times.

The process saves one step after the other to moto's server over HTTP: 40 MB in three parts, whose values
depend on the step. After each kill the server is asked for the newest step that has ``complete.json``, and a
new process with an empty run directory has to find exactly that, with its bits.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import boto3
import torch

from benchmarks.harness import Benchmark
from shoal.train.checkpoint import Checkpointer
from shoal.train.checkpoint_uploads import Uploads

BUCKET, LOCATION = "bucket", "s3://bucket/runs/killed"
NUM_VALUES = 10_000_000
LONGEST_S = 1.5
_COPY = re.compile(r"runs/killed/checkpoints/step-(\d+)\.[0-9a-f]+/(.+)")


def values_of(step: int) -> torch.Tensor:
    return torch.arange(NUM_VALUES, dtype=torch.int32) * (2 * step + 1)


def resumed(folder: Path) -> tuple[Checkpointer, int, bool]:
    """Return the step that a process with an empty disk finds, and whether its bits are right."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    checkpointer = Checkpointer(run_dir, keep=2, uploads=Uploads(LOCATION, run_dir))
    values = torch.zeros(NUM_VALUES, dtype=torch.int32)
    found = checkpointer.restore({"values": values, "note": {}})
    step = found.step if found else 0
    return checkpointer, step, not found or torch.equal(values, values_of(step))


def save_for_ever(folder: Path, began: int) -> NoReturn:
    """Resume and save until killed; write a byte when the first save begins."""
    checkpointer, step, _ = resumed(folder)
    os.write(began, b"x")
    while True:
        step += 1
        checkpointer.save(step, {"values": values_of(step), "note": {"step": step}}, wait=True)


def check(folder: Path, expected: int) -> NoReturn:
    _, step, is_same = resumed(folder)
    os._exit(0 if (step, is_same) == (expected, True) else 1)


def forked(function: Callable[..., NoReturn], *args: Any) -> int:
    """Return the number of a process that runs a function."""
    if pid := os.fork():
        return pid
    try:
        function(*args)
    finally:
        os._exit(1)


def found_in_store() -> tuple[int, bool]:
    """Return the newest complete step, and whether there is one that is not complete."""
    copies: dict[int, set[str]] = {}
    for entry in boto3.resource("s3").Bucket(BUCKET).objects.all():
        if match := _COPY.fullmatch(entry.key):
            copies.setdefault(int(match[1]), set()).add(match[2])
    uploads = boto3.client("s3").list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    complete = [step for step, names in copies.items() if "complete.json" in names]
    return max(complete, default=0), len(complete) < len(copies) or bool(uploads)


def kill_once(folder: Path, draw: random.Random) -> tuple[bool, bool]:
    """Return whether the resume found the newest one with its bits, and whether an upload was under way."""
    read, write = os.pipe()
    pid = forked(save_for_ever, folder, write)
    os.read(read, 1)
    time.sleep(draw.uniform(0.1, LONGEST_S))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    newest, is_partial = found_in_store()
    is_found = os.waitstatus_to_exitcode(os.waitpid(forked(check, folder, newest), 0)[1]) == 0
    return is_found, is_partial


def main() -> None:
    """Measure, and exit with 1 if a target does not hold."""
    bench = Benchmark("upload_kills")
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    names = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "made")
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "NO_PROXY": "*", **names}
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1"}
    argv = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        draw, found = random.Random(1), []
        number = 5 if bench.args.quick else 50
        for _ in range(number):
            with tempfile.TemporaryDirectory() as folder:
                found.append(kill_once(Path(folder), draw))
    finally:
        server.terminate()
        server.wait()
    found_all, during = (sum(each) for each in zip(*found, strict=True))
    bench.limit(
        "resumes that found the newest complete checkpoint, bits equal",
        float(found_all),
        float(number),
        unit="kills",
        formula="all",
        better="higher",
    )
    bench.limit(
        "kills that left an upload unfinished",
        float(during),
        1.0,
        unit="kills",
        formula="some",
        better="higher",
    )
    raise SystemExit(bench.finish())


if __name__ == "__main__":
    main()
