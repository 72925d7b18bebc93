"""Measures groups of many ranks: time to the end of the first all_reduce, private memory, files and sockets.

python -m benchmarks.size [--quick] [--ranks 8 64 512] [--json FILE] [--markdown FILE]      (root)

Ranks are processes of the C++ engine without Python (``size_rank.c``, by the C interface), on at most 64
emulated hosts. They meet by two messages each: their port, and the list of all. The time begins with the
first process. Files and sockets are counted in ``/proc`` and compared with :func:`sockets_of`; the last row
is its number for 16,384 ranks. ``--quick`` measures 8 and 64.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Benchmark
from shoal import native
from shoal.launch.emulated import Cluster

SOURCE = Path(__file__).with_name("size_rank.c")
HEADERS = Path(__file__).parent.parent / "csrc" / "c_api"
MOST_HOSTS = 64
RANKS, QUICK_RANKS, PLANNED_RANKS = (8, 64, 512), (8, 64), 16_384
TARGET_S, TARGET_MIB = 20.0, 12.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A group, as seen from outside. Lists have an entry for each rank."""

    took_s: float
    processor_s: float
    private_mib: list[float]
    files: list[int]
    sockets: list[int]


def sockets_of(size: int, per_host: int) -> int:
    """Return the sockets of a rank: one that listens, one for control to each other rank of its host, one for
    control and one for data to the one in the same place of each other host."""
    return 1 + (per_host - 1) + 2 * (size // per_host - 1)


def compiled(folder: Path) -> Path:
    """Compile the rank; return its program."""
    program, library = folder / "size_rank", Path(str(native.core().__file__)).parent / "lib"
    command = ["cc", "-O1", f"-I{HEADERS}", str(SOURCE), f"-L{library}", f"-Wl,-rpath,{library}", "-lshoal"]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def _private_mib(pid: int) -> float:
    """Return the memory that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def _processor_s(pid: int) -> float:
    """Return the processor time of a process, with the kernel's for it."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _count_files(pid: int) -> tuple[int, int]:
    """Return the number of a process's open files, and that of sockets among them."""
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(each.readlink()))
    return len(links), sum(link.startswith("socket:") for link in links)


def _answer(process: subprocess.Popen[str], rank: int) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"rank {rank} ended with {process.wait()}")
    return line.strip()


def run(program: Path, size: int) -> Seen:
    """Run a group of this size."""
    hosts = min(size, MOST_HOSTS)
    per_host = size // hosts
    with Cluster(hosts=hosts) as cluster:
        places = [rank // per_host for rank in range(size)]
        begin = time.monotonic()
        ranks = [
            subprocess.Popen(
                [*cluster.enter(host), str(program), str(rank), str(size), cluster.address(host)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank, host in enumerate(places)
        ]  # fmt: skip
        table = "".join(
            f"h{host} {cluster.address(host)} {_answer(process, rank)} {process.pid}\n"
            for rank, (host, process) in enumerate(zip(places, ranks, strict=True))
        )
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(table)
            process.stdin.flush()
        for rank, process in enumerate(ranks):
            _answer(process, rank)
        took_s = time.monotonic() - begin
        processor_s = sum(_processor_s(process.pid) for process in ranks)
        counts = [_count_files(process.pid) for process in ranks]
        private_mib = [_private_mib(process.pid) for process in ranks]
        for process in ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in ranks:
            process.wait()
    files, sockets = zip(*counts, strict=True)
    return Seen(
        took_s=took_s,
        processor_s=processor_s,
        private_mib=private_mib,
        files=list(files),
        sockets=list(sockets),
    )


def measure(bench: Benchmark, program: Path, size: int) -> None:
    seen = run(program, size)
    per_host = size // min(size, MOST_HOSTS)
    case = f"{size} ranks on {size // per_host} hosts"
    most = sockets_of(size, per_host)
    bench.limit(f"{case}: the first all_reduce has ended", seen.took_s, TARGET_S, unit="s", formula="20 s")
    bench.limit(
        f"{case}: private memory of a rank", max(seen.private_mib), TARGET_MIB, unit="MiB", formula="12"
    )
    bench.limit(f"{case}: sockets of a rank", max(seen.sockets), most, unit="", formula="sockets_of()")
    print(f"{case}: {seen.processor_s:.1f} s of processor time")
    print(f"{case}: {min(seen.sockets)} to {max(seen.sockets)} sockets, {most} expected")
    print(f"{case}: {min(seen.files)} to {max(seen.files)} files; 2 messages a rank to meet")


def main() -> None:
    """Measure, and exit with 1 if a target does not hold."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (default: 8 64 512)")
    bench = Benchmark("size", options=options)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        for size in bench.args.ranks or (QUICK_RANKS if bench.quick else RANKS):
            measure(bench, program, size)
    planned = sockets_of(PLANNED_RANKS, PLANNED_RANKS // 2048)
    print(f"{PLANNED_RANKS:,} ranks on 2,048 hosts: {planned:,} sockets of a rank")
    raise SystemExit(bench.finish())


if __name__ == "__main__":
    main()
