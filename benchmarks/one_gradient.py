"""Count the files and the crossings of file borders on the way of one gradient through group and core.

Both are compiled with a call at each function's begin and end, and an all_reduce of one chunk is recorded
between two hosts (``one_gradient.cc``): from torch's call of the process group through both hops, the server
included, until its work's wait returns.

A crossing is a call from a function of one file to one of another, counted once for each caller, callee and
thread: the connection's write for the contribution and for the sum are two. A header and its source are one
file. Not counted: what the standard library, torch and ``csrc/base`` do, constructors and destructors, and
accessors: functions of a header with at most five lines.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shoal.comm import native_group

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
GROUP = native_group.library()
SOURCES = ("base", "transport", "engine", "device", "c_api", "optim")
LEFT_OUT = ("ofi", "libfabric")
FLAGS = (
    "-std=c++20",
    "-O0",
    "-g1",
    "-fPIC",
    "-pthread",
    "-finstrument-functions",
    "-finstrument-functions-exclude-file-list=/site-packages/,/include/c++/",
    "-ffp-contract=off",
    "-w",
    f"-I{CSRC}",
)
GROUP_FLAGS = (
    f"-I{CSRC / 'c_api'}",
    f"-I{GROUP.sources}",
    *(flag for path in GROUP.includes for flag in ("-isystem", str(path))),
    *GROUP.flags,
)
LINK = (*GROUP.links, "-lcrypto", "-ldl", "-lrt", "-Wl,-Bsymbolic-functions")
"""The last: libc has functions of the recorder's names, which do nothing."""
RECORD = "import ctypes, sys, torch; ctypes.CDLL(sys.argv[1]).record_gradient()"
NOT_THE_GRADIENT = re.compile(r"TcpTransport::tick|Channel::tick")
"""Calls that recur on a timer, with or without a gradient; they are not counted."""
NO_STATION = re.compile(
    r"(\w+)::\1\([^{]*$|::~\w+\(\)$|::operator=\(|^shoal::(size_of|name_of)\(|^TLS (wrapper|init) function"
)
"""Constructors, destructors (those of lambdas too), assignments, two tables of constants, and what the
compiler makes to read a thread's variables."""
ACCESSOR = 5
OWN_GRADIENT = re.compile(r"^shoal::(ChunkPath::deliver|OpTable::complete)\(")
"""On the server's thread: the server's own gradient, not the one that is followed."""


@dataclass(frozen=True)
class Function:
    name: str
    path: str

    @property
    def file(self) -> str:
        return str(Path(self.path).with_suffix(""))


def build(directory: Path) -> Path:
    """Compile the core, and the recorder with the group; return their library."""
    sources = [each for part in SOURCES for each in sorted((CSRC / part).glob("*.cc"))]
    sources = [each for each in sources if not each.name.startswith(LEFT_OUT)]
    recorder = Path(__file__).with_suffix(".cc")

    def compiled(source: Path) -> str:
        to = directory / f"{source.parent.name}-{source.stem}.o"
        of_group = GROUP_FLAGS if source == recorder else ()
        subprocess.run(["c++", *FLAGS, *of_group, "-c", str(source), "-o", str(to)], check=True)
        return str(to)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, [recorder, *sources]))
    library = directory / "one_gradient.so"
    subprocess.run(["c++", "-shared", "-pthread", *objects, "-o", str(library), *LINK], check=True)
    return library


def functions(library: Path, addresses: list[str]) -> dict[str, Function | None]:
    """Look up functions by address; None for those that do not count."""
    names_and_lines = subprocess.run(
        ["addr2line", "-f", "-C", "-e", str(library)],
        input="\n".join(addresses),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    known: dict[str, Function | None] = {}
    for address, name, location in zip(addresses, names_and_lines[::2], names_and_lines[1::2], strict=True):
        path, _, line = location.split(" ")[0].rpartition(":")
        inside = path.startswith((f"{CSRC}/", f"{GROUP.sources}/")) and not path.startswith(
            f"{CSRC / 'base'}/"
        )
        counts = (
            inside
            and not NO_STATION.search(name)
            and not (path.endswith(".h") and is_short(Path(path), int(line)))
        )
        known[address] = Function(name, str(Path(path).relative_to(ROOT))) if counts else None
    return known


def is_short(header: Path, line: int) -> bool:
    """Return whether the function that begins at a line of a header has at most ``ACCESSOR`` lines."""
    depth = 0
    for text in header.read_text().splitlines()[line - 1 : line - 1 + ACCESSOR]:
        depth += text.count("{") - text.count("}")
        if "}" in text and depth <= 0:
            return True
    return False


def crossings(library: Path) -> tuple[list[str], list[tuple[int, Function, Function]]]:
    """Run the recorder; return the files in their order, and the calls between files."""
    command = [sys.executable, "-c", RECORD, str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    events = [line.split() for line in lines if line]
    known = functions(library, sorted({address for _, address, _ in events}))
    stacks: dict[int, list[Function | None]] = {}
    files: dict[str, None] = {}
    calls: dict[tuple[int, Function, Function], None] = {}
    server = None
    for number, address, called in events:
        thread, function = int(number), known[address]
        stack = stacks.setdefault(thread, [])
        if called == "0":
            if stack:
                stack.pop()
            continue
        stack.append(function)
        seen = [each for each in stack if each]
        if function is None or any(NOT_THE_GRADIENT.search(each.name) for each in seen):
            continue
        if function.name.startswith("shoal::SumServer::"):
            server = thread
        if thread == server and any(OWN_GRADIENT.match(each.name) for each in seen):
            continue
        files[function.file] = None
        if len(seen) > 1 and seen[-2].file != function.file:
            calls[(thread, seen[-2], function)] = None
    return list(files), list(calls)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", action="store_true", help="print each crossing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        files, calls = crossings(build(Path(directory)))
    if arguments.calls:
        for thread, caller, callee in calls:
            print(f"thread {thread}: {caller.file}: {caller.name}  ->  {callee.file}: {callee.name}")
    print(f"{len(files)} files, {len(calls)} crossings: {', '.join(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
