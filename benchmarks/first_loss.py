"""The size of what a newcomer installs beside torch, and the time to the first line with a loss.

A fresh environment gets the wheel of ``make wheels`` and finds torch and the other packages in this one. Then
the two commands of the README's first run are timed to the first loss. Torch's build for CPUs is on an index
of its own; its wheel is not in the size.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Benchmark
from benchmarks.machine import ForeignCores

ROOT = Path(__file__).resolve().parents[1]
MOST_MB, MOST_S = 200.0, 60.0
UV = str(Path(sys.executable).with_name("uv"))


def find_wheel() -> Path:
    """Return the wheel for this Python; ``make wheels`` builds it."""
    return next((ROOT / "dist").glob(f"shoal-*-cp3{sys.version_info.minor}-*.whl"))


def megabytes_beside_torch(folder: Path) -> float:
    """Return the size of the wheels that ``shoal[torch,text]`` needs besides torch's."""
    wanted = folder / "wanted.in"
    wanted.write_text(f"shoal[torch,text] @ file://{find_wheel()}\n")
    command = [UV, "pip", "compile", "--quiet", "--no-annotate", str(wanted)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if re.match(r"[a-z]", line)]
    besides = [
        line for line in lines if not re.match(r"(torch|triton|nvidia-\S+|cuda-\S+|shoal)(==| @)", line)
    ]
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(wheels), *besides], check=True)
    files = [find_wheel(), *wheels.iterdir()]
    return sum(file.stat().st_size for file in files) / 1e6


def make_environment(folder: Path) -> None:
    """Make an environment with the wheel, which borrows the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run(
        [UV, "pip", "install", "--quiet", "--python", python, "--no-deps", find_wheel()], check=True
    )
    site_packages = next((folder / "lib").glob("python*/site-packages"))
    borrowed = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")


def seconds_to_loss(folder: Path, number: int) -> float:
    """Return the seconds from the first command to the first line with a loss."""
    shoal, text = str(folder / "venv" / "bin" / "shoal"), str(folder / f"text-{number}")
    begin_s = time.perf_counter()
    prepare = [shoal, "prepare", "text", "builtin", "--out", text, "--vocab-size", "2048"]
    subprocess.run(prepare, check=True, capture_output=True)
    train = [shoal, "train", "albert", "--preset", "tiny", "--data.path", text, "--workers", "2"]
    train += ["--run.dir", str(folder / f"run-{number}"), "--run.log-frequency", "10"]
    with subprocess.Popen(train, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step ") and "loss" in line:
                break
        seconds = time.perf_counter() - begin_s
        process.terminate()
        process.stdout.read()
    assert lines and "loss" in lines[-1], "".join(lines)
    return seconds


def main() -> int:
    bench = Benchmark("first_loss")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        megabytes = megabytes_beside_torch(folder)
        make_environment(folder / "venv")
        seconds: list[float] = []
        foreign: list[float] = []
        for number in range(1 if bench.quick else 3):
            with ForeignCores() as watch:
                seconds.append(seconds_to_loss(folder, number))
            foreign.append(watch.cores or 0.0)
    size = "wheels of shoal[torch,text] besides torch"
    bench.limit(
        size, megabytes, MOST_MB, unit="MB", formula="400 MB with torch for CPUs, which has about 200"
    )
    first = "from the first command to the first loss, 2 workers"
    bench.limit(first, seconds, MOST_S, unit="s", formula="60 s", foreign_cores=foreign)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
