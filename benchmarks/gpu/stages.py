"""Lists the commands of the kit in order of worth, with time limits, in full and as a rehearsal.

A rehearsal runs the same programs on a CPU with tiny sizes: it shows that they start, end and write what the
kit reads. Its figures mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.bert_step import CASES
from shoal.env import ATTENTION_KERNEL

Kind = Literal["exit", "train", "peer", "rows", "profile"]
PYTHON = sys.executable
SHOAL = (PYTHON, "-m", "shoal")
BERT_TEXT, ALBERT_TEXT, IMAGES, QUESTION = "bert-text", "albert-text", "images", "question.json"
"""Input that the kit makes on the machine (``inputs``)."""
INPUT = "input"
"""Title of the job that makes it."""
GPU_TESTS = ("tests/gpu/test_cuda.py", "tests/gpu/test_cuda_comm.py")
ATTENTION_TESTS = "tests/gpu/test_cuda_attention.py"
"""Beside the figures of what they test: compiling its kernels takes a minute."""
MODELS = ("bert", "albert", "squad", "resnet50", "mask_rcnn", "t5")
"""Models that are profiled."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command of a stage."""

    title: str
    command: tuple[str, ...]
    """``{out}`` stands for the file that it writes; such files are read and then removed."""
    kind: Kind = "exit"
    """Kind of its output: none, a file of ``shoal bench train`` or of a peer, rows, or a profile."""
    beside: str | None = None
    """Of a peer: title of our job in this stage with which it is compared."""
    target: float | None = None
    """Of samples a second; on an H200, or 0.9 of it on an H100."""
    limit_s: float = 180.0
    is_first: bool = False
    """Ends before any other begins, in a rehearsal too."""
    after: str | None = None
    """Title of an earlier job whose files it reads."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Jobs on one subject, which share a limit of time; the first prepares the others."""

    name: str
    limit_s: float
    jobs: tuple[Job, ...]


def stages(folder: Path, data: Path, *, rehearsal: bool) -> tuple[Stage, ...]:
    """Return the stages in order of worth.

    Args:
        folder: of what the kit makes for itself; ``results`` in it holds what it writes.
        data: the test data that travels.
    """
    tiny, made = rehearsal, folder / "made"

    def stage(name: str, limit_s: float, jobs: Iterator[Job]) -> Stage:
        return Stage(name=name, limit_s=limit_s, jobs=tuple(_after_input(job, made) for job in jobs))

    return (
        stage("build", 180, _build(made, tiny)),
        stage("comm", 180, _comm(folder / "results", tiny)),
        stage("bert", 480, _text(made, data, tiny)),
        stage("vision", 300, _vision(made, tiny)),
        stage("t5", 120, _t5(tiny)),
        stage("profiles", 180, _profiles(tiny)),
    )


def _after_input(job: Job, made: Path) -> Job:
    reads = job.title != INPUT and any(word.startswith(str(made)) for word in job.command)
    return replace(job, after=INPUT) if reads else job


def _module(name: str, *options: object) -> tuple[str, ...]:
    return (PYTHON, "-m", name, *map(str, options))


def _device(tiny: bool) -> tuple[str, str]:
    return ("--device", "cpu" if tiny else "cuda")


def _build(made: Path, tiny: bool) -> Iterator[Job]:
    """Build the core and the process group, unless they are there, without a network; make the input."""
    yield Job(title="the C++ core", command=_module("benchmarks.gpu.core"), is_first=True)
    inputs = _module("benchmarks.gpu.inputs", made, *["--tiny"] * tiny)
    yield Job(title=INPUT, command=inputs, limit_s=60)
    yield Job(title="shoal doctor", command=(*SHOAL, "doctor"), limit_s=60)
    group = "from shoal.comm import native_group; native_group.build()"
    yield Job(title="the process group in C++", command=(PYTHON, "-c", group))
    files = ("tests/unit/benchmarks/test_gpu_kit.py",) if tiny else GPU_TESTS
    yield Job(title="tests" if tiny else "tests/gpu", command=_tests(made / "pytest", *files))


def _tests(folder: Path, *files: str) -> tuple[str, ...]:
    """Return the command that runs tests, each set in a folder of its own.

    Removing those of other runs, pytest may leave one open, which is an error here.
    """
    return _module("pytest", "-q", "-p", "no:cacheprovider", "--basetemp", folder, *files)


def _comm(results: Path, tiny: bool) -> Iterator[Job]:
    device = "memory" if tiny else "cuda"
    options = ("--device", device, "--quick", "--trace", results / "comm-trace.json.gz", "--json", "{out}")
    yield Job(title="backend shoal", kind="rows", command=_module("benchmarks.cuda_comm", *options))
    pair = _module("benchmarks.gpu.pipeline_pair", *_device(tiny), "--quick", "--json", "{out}")
    yield Job(title="pipeline of two on one device", kind="rows", command=pair)


def _bench(recipe: str, preset: str, batch: int, *options: object, tiny: bool = False) -> tuple[str, ...]:
    steps = ("--warm-up", 1, "--steps", 2) if tiny else ("--warm-up", 5, "--steps", 15)
    words = ("--preset", preset, "--workers", 1, "--batch", batch, *steps, *options, "--json", "{out}")
    return _module("shoal", "bench", "train", recipe, *words)


def _peer(name: str, title: str, beside: str, *, tiny: bool) -> Job:
    words = (name, *_device(tiny), "--json", "{out}", *["--tiny"] * tiny)
    command = _module("benchmarks.gpu.peers", *words)
    return Job(title=title, kind="peer", command=command, beside=beside, limit_s=90)


def _squad(made: Path, data: Path, size: str, *, tiny: bool = False) -> tuple[str, ...]:
    questions = made / QUESTION if tiny else data / CASES["squad"].needs[0]
    files = ("--data.path", questions, "--data.eval", made / QUESTION)
    model = ("--model.path", made / f"bert-{size}", "--model.from-scratch")
    if tiny:
        short = ("--window.max-seq-length", 64, "--window.doc-stride", 16, "--window.max-question-length", 16)
        return _bench("squad", "tiny", 2, *files, *model, *short, tiny=True)
    window = ("--window.max-seq-length", 384, "--train.precision", "bf16")
    return _bench("squad", "bert", 32, *files, *model, *window)


def _text(made: Path, data: Path, tiny: bool) -> Iterator[Job]:
    """Time packed real text, and our steps by turns with those of peers on the same sequences."""
    bert, albert = ("--data.path", made / BERT_TEXT), ("--data.path", made / ALBERT_TEXT)
    if tiny:
        words = (*bert, "--model.vocab-size", 30_522)
        yield Job(title="bert tiny", kind="train", command=_bench("bert", "tiny", 2, *words, tiny=True))
        yield _peer("bert-512", "transformers' BERT in a plain loop", "bert tiny", tiny=True)
        yield Job(title="squad tiny", kind="train", command=_squad(made, data, "tiny", tiny=True))
        words = (*albert, "--model.vocab-size", 30_000)
        yield Job(title="albert tiny", kind="train", command=_bench("albert", "tiny", 2, *words, tiny=True))
    else:
        for title, phase, batch, target in (
            ("BERT-large, 512 tokens", 2, 64, 315.0),
            ("BERT-large, 128 tokens", 1, 256, 930.0),
        ):
            command = _bench("bert", "large", batch, "--phase", phase, *bert)
            yield Job(title=title, kind="train", command=command, target=target)
            peer = "bert-512" if phase == 2 else "bert-128"
            yield _peer(peer, f"transformers' BERT in a plain loop, {title[-10:]}", title, tiny=False)
        tests = _tests(made / "pytest-attention", ATTENTION_TESTS)
        yield Job(title="tests of attention's kernels", command=tests, limit_s=150)
        title = "BERT-large, 512 tokens, attention in kernels"
        command = ("env", f"{ATTENTION_KERNEL}=1", *_bench("bert", "large", 64, "--phase", 2, *bert))
        yield Job(title=title, kind="train", command=command, target=315.0)
        for size, target in (("large", 350.0), ("base", 932.0)):
            command = _squad(made, data, size)
            yield Job(title=f"SQuAD 384, {size}", kind="train", command=command, target=target)
    lamb = _module(
        "benchmarks.gpu.lamb_step", *_device(tiny), *["--tiny"] * tiny, "--quick", "--json", "{out}"
    )
    yield Job(title="LAMB's step", kind="rows", command=lamb)
    attention = _module(
        "benchmarks.gpu.attention_forms", *_device(tiny), *["--tiny"] * tiny, "--json", "{out}"
    )
    yield Job(title="attention with dropout", kind="rows", command=attention)
    sizes = ("tiny",) if tiny else ("base", "large")
    for case, size in [("albert", size) for size in sizes] + [("squad", size) for size in sizes]:
        options = ("--case", case, *_device(tiny), "--size", size, "--quick", "--json", "{out}")
        command = _module("benchmarks.bert_step", *options)
        yield Job(title=f"{case} {size} beside Trainer", kind="rows", command=command)


def _vision(made: Path, tiny: bool) -> Iterator[Job]:
    """Time ResNet on made and on real JPEGs, and Mask R-CNN on made scenes."""
    real = ("--data.path", made / IMAGES)
    if tiny:
        yield Job(title="resnet tiny", kind="train", command=_bench("resnet50", "tiny", 2, *real, tiny=True))
        small = ("--augment.shorter", 64, "--augment.longer", 96, "--train.precision", "fp32")
        yield Job(
            title="mask_rcnn tiny", kind="train", command=_bench("mask_rcnn", "tiny", 1, *small, tiny=True)
        )
        return
    title = "ResNet-50, made JPEGs"
    command = _bench("resnet50", "imagenet-16k", 256)
    yield Job(title=title, kind="train", command=command, target=3_079.0)
    yield _peer("resnet50", "torchvision's ResNet-50 in a plain loop", title, tiny=False)
    command = _bench("resnet50", "imagenet-16k", 256, *real)
    yield Job(title="ResNet-50, JPEGs of COCO over and over", kind="train", command=command)
    title = "Mask R-CNN, batch 12, made scenes"
    command = _bench("mask_rcnn", "coco-1x", 12, "--train.precision", "bf16")
    yield Job(title=title, kind="train", command=command, target=42.0)
    yield _peer("mask_rcnn", "torchvision's Mask R-CNN in a plain loop", title, tiny=False)


def _t5(tiny: bool) -> Iterator[Job]:
    """Time T5 1.0, whose products are as large as those of T5 1.1 (d_ff 3,072, or 2,048 gated)."""
    title = "T5 tiny" if tiny else "T5 1.0 base, 512/114 tokens"
    command = _bench("t5", "tiny", 2, tiny=True) if tiny else _bench("t5", "base", 64)
    yield Job(title=title, kind="train", command=command, target=None if tiny else 366.0, limit_s=90)
    if not tiny:
        yield _peer("t5", "transformers' T5 in a plain loop", title, tiny=False)


def _profiles(tiny: bool) -> Iterator[Job]:
    """Profile each model, in a process of its own where one may fill the device's memory."""
    for models in (MODELS,) if tiny else tuple((model,) for model in MODELS):
        command = _module(
            "benchmarks.gpu.profile", *models, *_device(tiny), "--json", "{out}", *["--tiny"] * tiny
        )
        title = "all models" if tiny else models[0]
        yield Job(title=f"{title}, time by kernel", kind="profile", command=command)
