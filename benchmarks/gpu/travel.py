"""Collects what goes to a machine with a GPU and no network: tree, wheels, data, caches; checks the limits.

python -m benchmarks.gpu.travel data               # copy the test data that the kit reads
python -m benchmarks.gpu.travel check              # how many bytes travel
python -m benchmarks.gpu.travel copy FOLDER        # the tree with wheels and data, as that machine gets it
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bert_step import CASES, VOCABULARY
from shoal.env.settings import TEST_DATA, test_data_dir

FOLDER = Path("build/gpu")
WHEELS, DATA, MADE, CACHE, RESULTS = "wheels", "data", "made", "cache", "results"
"""Folders in it: what travels there, with input and compiled kernels that are made there unless they travel,
and what comes back.
"""
MOST_BYTES = 60 << 20
"""Of the tree, the wheels and the data together."""
MOST_DATA_BYTES = 20 << 20
MOST_RESULTS = 8
"""Files that come back."""

ALBERT_TOKENIZER = "tokenizers/albert_spiece.model"
DATA_FILES = (VOCABULARY, ALBERT_TOKENIZER, *CASES["pretraining"].needs, *CASES["squad"].needs)
JPEGS = "coco_tiny100/tiny_coco"
JPEG_FOLDERS = ("train2017", "val2017")
NUM_JPEGS = 40
"""Of each folder, which is a class to the kit: the test data has 50, and all of them would be above 20 MB."""


def data_files(source: Path) -> list[str]:
    """Return the names of the test data that the kit reads.

    Raises:
        SystemExit: some of it is not there.
    """
    names = list(DATA_FILES)
    for folder in JPEG_FOLDERS:
        found = sorted((source / JPEGS / folder).glob("*.jpg"))[:NUM_JPEGS]
        names += [path.relative_to(source).as_posix() for path in found] or [f"{JPEGS}/{folder}/*.jpg"]
    for name in names:
        if not (source / name).is_file():
            raise SystemExit(f"{source / name} is not there: name the folder of the test data in {TEST_DATA}")
    return names


def copy_data(source: Path, target: Path) -> int:
    """Copy the test data that the kit reads, and return its bytes.

    Raises:
        SystemExit: some of it is not there, or it is too much.
    """
    shutil.rmtree(target, ignore_errors=True)
    num_bytes = 0
    for name in data_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
        num_bytes += (source / name).stat().st_size
    if num_bytes > MOST_DATA_BYTES:
        raise SystemExit(
            f"{target} has {_mib(num_bytes)}, and may have {_mib(MOST_DATA_BYTES)}: drop some of it"
        )
    return num_bytes


def said_of_data(source: Path, num_bytes: int) -> str:
    """Return a line about the data that was copied."""
    copied = sum(name.endswith(".jpg") for name in data_files(source))
    there = sum(1 for folder in JPEG_FOLDERS for _ in (source / JPEGS / folder).glob("*.jpg"))
    return (
        f"{copied} JPEGs of the {there} in the test data, which training reads over and over; WikiText, "
        f"questions, vocabularies: {num_bytes / 1e6:.1f} MB"
    )


def tree_files(root: Path) -> list[Path]:
    """Return the files of the working tree that git knows or would add, relative to ``root``."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return [Path(name) for name in listed if name and (root / name).is_file()]


def what_travels(root: Path, folder: Path) -> dict[str, list[Path]]:
    """Return the files of the tree and of the folders that travel, relative to ``root``."""
    return {
        "tree": tree_files(root),
        **{
            name: [path.relative_to(root) for path in (root / folder / name).rglob("*") if path.is_file()]
            for name in (WHEELS, DATA, MADE, CACHE)
        },
    }


def check(root: Path, folder: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return a line with the sizes of what travels.

    Raises:
        SystemExit: it is more than ``most_bytes``.
    """
    sizes = {
        name: sum((root / path).stat().st_size for path in paths)
        for name, paths in what_travels(root, folder).items()
    }
    total = sum(sizes.values())
    said = ", ".join(f"{name} {_mib(size)}" for name, size in sizes.items())
    if total > most_bytes:
        raise SystemExit(
            f"{said}: {_mib(total)} travel, and at most {_mib(most_bytes)} may: leave some of it out"
        )
    return f"{said}: {_mib(total)} of {_mib(most_bytes)}"


def copy(root: Path, folder: Path, target: Path) -> None:
    """Copy what travels; the folders in ``folder`` lie in ``build/gpu`` there."""
    for name, paths in what_travels(root, folder).items():
        for path in paths:
            to = target / (path if name == "tree" else FOLDER / path.relative_to(folder))
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, to)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("data", "check", "copy"))
    parser.add_argument("target", type=Path, nargs="?", help="of copy")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of wheels and data")
    args = parser.parse_args(argv)
    root = Path.cwd()
    if not args.folder.resolve().is_relative_to(root.resolve()):
        parser.error(f"--folder {args.folder} is outside of the tree {root}, in which it travels")
    if args.what == "copy":
        if args.target is None:
            parser.error("copy needs a folder to copy to")
        copy(root, args.folder, args.target)
    elif args.what == "data":
        source = test_data_dir()
        num_bytes = copy_data(source, args.folder / DATA)
        print(said_of_data(source, num_bytes))
    print(check(root, args.folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
