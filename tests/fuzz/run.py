"""Fuzzes the readers of files for some seconds: ``python -m fuzz.run --seconds 60 [--seed N] [TARGET...]``.

Each target is a process under Atheris, which keeps the inputs that reach new lines of shoal. It ends a target
that needs more than 10 s or 1 GiB for an input. What fails is written to ``build/fuzz/TARGET``: mend the
reader, and keep the input in ``tests/fuzz/corpus/TARGET``.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

LEAST_S = 5.0
"""Of a target, which needs some to begin; in less time for all some are drawn by the seed."""
START_S = 2.0
LIMITS = ("-timeout=10", "-rss_limit_mb=1024", "-malloc_limit_mb=512")


def fuzz(name: str, folder: Path, seconds: float, seed: int) -> None:
    """Fuzz a target in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["shoal"]):
        from fuzz import readers
    from fuzz.mutations import MOST_BYTES, change
    from shoal.env.settings import test_data_dir

    seeds = folder / "seeds"
    seeds.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(readers.seeds(name, test_data_dir() / "reports")):
        (seeds / f"{number:03}").write_bytes(data)
    form = readers.TARGETS[name].form

    def mutate(data: bytes, most: int, number: int) -> bytes:
        return change(data, form, random.Random(number))[:most]

    def read(data: bytes) -> None:  # what a target returns would be a verdict
        readers.check(name, data)

    options = [
        f"-max_total_time={max(1, round(seconds - START_S))}",
        f"-seed={seed}",
        f"-max_len={MOST_BYTES}",
        *LIMITS,
    ]
    command = [sys.argv[0], *options, f"-artifact_prefix={folder}/", str(seeds)]
    atheris.Setup(command, read, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    """Fuzz the targets one after the other; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        fuzz(options.targets[0], options.out / options.targets[0], options.seconds, options.seed)
    from fuzz.readers import TARGETS

    names = options.targets or list(TARGETS)
    most = max(1, int(options.seconds / LEAST_S))
    if len(names) > most:
        names = random.Random(options.seed).sample(names, most)
    each_s = options.seconds / len(names)
    print(f"fuzzing {len(names)} readers for {each_s:.1f} s each, seed {options.seed}", flush=True)
    failed = []
    for name in names:
        command = [sys.executable, "-m", "fuzz.run", "--inside", name, "--seconds", str(each_s)]
        command += ["--seed", str(options.seed), "--out", str(options.out.resolve())]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=dict(os.environ))
        counts = [line for line in done.stderr.splitlines() if line.startswith(("Done", "stat::"))]
        print(
            f"{name}: {counts[0] if counts and not done.returncode else f'exit {done.returncode}'}",
            flush=True,
        )
        if done.returncode:
            failed.append(name)
            print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}; the inputs are in {options.out}/TARGET", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
