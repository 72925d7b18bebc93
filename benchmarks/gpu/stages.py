"""Lists the commands of the kit in order of worth, with time limits, in full and as a rehearsal.

A rehearsal runs the same programs on a CPU with tiny sizes: it shows that they start, end and write what the
kit reads. Its figures mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["exit", "train", "rows", "profile"]
PYTHON = sys.executable
SHOAL = (PYTHON, "-m", "shoal")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command of a stage."""

    title: str
    command: tuple[str, ...]
    """``{out}`` stands for the file that it writes; such files are read and then removed."""
    kind: Kind = "exit"
    """Kind of its output: none, the file of ``shoal bench train``, rows of a benchmark, or a profile."""
    target: float | None = None
    """Of samples a second; on an H200, or 0.9 of it on an H100."""
    limit_s: float = 180.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Jobs on one subject, which share a limit of time."""

    name: str
    limit_s: float
    jobs: tuple[Job, ...]


def stages(folder: Path, *, rehearsal: bool) -> tuple[Stage, ...]:
    """Return the stages in order of worth.

    Args:
        folder: of what the kit writes; ``data`` in it holds the input of ``make gpu-data``.
    """
    device = "cpu" if rehearsal else "cuda"
    return (
        Stage(name="build", limit_s=180, jobs=tuple(_build())),
        Stage(name="tests", limit_s=180, jobs=(_tests(rehearsal),)),
        Stage(name="comm", limit_s=180, jobs=(_comm(folder, rehearsal),)),
        Stage(name="bert", limit_s=360, jobs=tuple(_text(rehearsal, device))),
        Stage(name="vision", limit_s=300, jobs=tuple(_vision(rehearsal))),
        Stage(name="t5", limit_s=120, jobs=(_t5(rehearsal),)),
        Stage(name="profiles", limit_s=180, jobs=tuple(_profiles(rehearsal, device))),
    )


def _build() -> Iterator[Job]:
    """Build the core, unless one that works is there; without a network."""
    program = (
        "import importlib.util as u, subprocess, sys; from shoal import native; "
        "sys.exit(0 if native.is_built() else subprocess.call([sys.executable, '-m', 'pip', 'install', '-q', "
        "'--no-build-isolation', '--no-deps', '--editable', '.']))"
    )
    yield Job(title="the C++ core", command=(PYTHON, "-c", program))
    yield Job(title="shoal doctor", command=(*SHOAL, "doctor"))


def _tests(rehearsal: bool) -> Job:
    files = "tests/gpu" if not rehearsal else "tests/unit/benchmarks/test_gpu_kit.py"
    return Job(title="tests/gpu", command=(PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", files))


def _comm(folder: Path, rehearsal: bool) -> Job:
    options = ("--device", "memory") if rehearsal else ("--trace", str(folder / "comm-trace.json"))
    command = (PYTHON, "-m", "benchmarks.cuda_comm", "--quick", *options, "--json", "{out}")
    return Job(title="backend shoal", kind="rows", command=command)


def _bench(recipe: str, preset: str, *options: object, steps: int = 10) -> tuple[str, ...]:
    words = ("bench", "train", recipe, "--preset", preset, "--workers", 1, "--steps", steps, *options)
    return (*SHOAL, *map(str, words), "--json", "{out}")


def _text(rehearsal: bool, device: str) -> Iterator[Job]:
    if rehearsal:
        for recipe in ("bert", "albert"):
            command = _bench(recipe, "tiny", "--batch", 2, "--warm-up", 1, steps=2)
            yield Job(title=f"{recipe} tiny", kind="train", command=command)
    else:
        for title, phase, batch, target in (
            ("BERT-large, 512 tokens", 2, 64, 315.0),
            ("BERT-large, 128 tokens", 1, 256, 930.0),
        ):
            command = _bench("bert", "large", "--phase", phase, "--batch", batch, "--warm-up", 4)
            yield Job(title=title, kind="train", command=command, target=target)
        for preset in ("base", "large"):
            command = _bench("albert", preset, "--batch", 64, "--warm-up", 4)
            yield Job(title=f"ALBERT-{preset}, 512 tokens", kind="train", command=command)
    size = "tiny" if rehearsal else "base"
    for case in ("pretraining", "squad") if not rehearsal else ("squad",):
        command = (PYTHON, "-m", "benchmarks.bert_step", "--case", case, "--device", device, "--size", size)
        yield Job(
            title=f"{case} beside Trainer", kind="rows", command=(*command, "--quick", "--json", "{out}")
        )


def _vision(rehearsal: bool) -> Iterator[Job]:
    if rehearsal:
        command = _bench("resnet50", "tiny", "--batch", 2, "--warm-up", 1, steps=2)
    else:
        command = _bench("resnet50", "imagenet-16k", "--batch", 256, "--warm-up", 4)
    yield Job(
        title="ResNet-50, made JPEGs", kind="train", command=command, target=None if rehearsal else 3_079.0
    )
    if not rehearsal:
        options = ("--batch", 12, "--warm-up", 4, "--train.precision", "bf16")
        command = _bench("mask_rcnn", "coco-1x", *options)
        yield Job(title="Mask R-CNN, batch 12, made scenes", kind="train", command=command, target=42.0)


def _t5(rehearsal: bool) -> Job:
    if rehearsal:
        command = _bench("t5", "tiny", "--batch", 2, "--warm-up", 1, steps=2)
        return Job(title="T5 tiny", kind="train", command=command)
    command = _bench("t5", "base", "--batch", 64, "--warm-up", 4)
    return Job(title="T5 1.0 base, 512/114 tokens", kind="train", command=command, target=366.0)


def _profiles(rehearsal: bool, device: str) -> Iterator[Job]:
    for model in ("bert", "resnet50", "t5"):
        command = (PYTHON, "-m", "benchmarks.gpu.profile", model, "--device", device, "--json", "{out}")
        yield Job(
            title=f"{model}, time by kernel", kind="profile", command=(*command, *(["--tiny"] * rehearsal))
        )
