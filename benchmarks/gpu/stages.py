"""Lists the commands of the kit in three parts of nine minutes, with time limits, in full and as a rehearsal.

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

Kind = Literal["exit", "train", "peer", "rows"]
PYTHON = sys.executable
SHOAL = (PYTHON, "-m", "shoal")
BERT_TEXT, ALBERT_TEXT, IMAGES, QUESTION = "bert-text", "albert-text", "images", "question.json"
"""Input that the kit makes on the machine (``inputs``)."""
INPUT = "input"
"""Title of the job that makes it."""
_WITH_TINY = ("benchmarks.gpu.attention_forms", "benchmarks.gpu.lamb_step", "benchmarks.gpu.peers")
GPU_TESTS = ("test_cuda_attention", "test_cuda_comm", "test_cuda")
"""Files of ``tests/gpu``, each a job of its own."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command of a stage."""

    title: str
    command: tuple[str, ...]
    """``{out}`` stands for the file that it writes; such files are read and then removed."""
    kind: Kind = "exit"
    """Kind of its output: none, a file of ``shoal bench train`` or of a peer, or rows."""
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
    """Jobs on one subject, which share a limit of time."""

    name: str
    part: int | None
    """Number of the call that runs it, from 1; ``None``: the first stage, which prepares the others."""
    limit_s: float
    jobs: tuple[Job, ...]


PARTS = (1, 2, 3)


def stages(made: Path, data: Path, results: Path, *, rehearsal: bool) -> tuple[Stage, ...]:
    """Return the stages, in each part in order of worth.

    Args:
        made: folder of the input that the kit makes.
        data: the test data that travels.
        results: folder of traces.
    """
    tiny = rehearsal

    def stage(name: str, part: int | None, limit_s: float, jobs: Iterator[Job]) -> Stage:
        return Stage(
            name=name, part=part, limit_s=limit_s, jobs=tuple(_after_input(job, made) for job in jobs)
        )

    return (
        stage("build", None, 180, _build(made, tiny)),
        stage("attention", 1, 240, _attention(made, tiny)),
        stage("bert", 1, 300, _bert(made, results, tiny)),
        stage("comm", 1, 100, _comm(results, tiny)),
        stage("peers", 2, 140, _peers(tiny)),
        stage("squad", 2, 130, _squad_rows(made, data, tiny)),
        stage("t5", 2, 170, _t5(results, tiny)),
        stage("trainer", 2, 110, _trainer(tiny)),
        stage("vision", 3, 300, _vision(made, results, tiny)),
        stage("tests", 3, 200, _gpu_tests(made, tiny)),
        stage("pair", 3, 60, _pair(tiny)),
    )


def smoked(stage: Stage) -> Stage:
    """Return a stage whose jobs only show that they start: two steps of an eighth of the batch, tiny sizes of
    benchmarks, and tests that are collected.
    """
    return replace(stage, jobs=tuple(replace(job, command=_smoked(job.command)) for job in stage.jobs))


def _smoked(command: tuple[str, ...]) -> tuple[str, ...]:
    words = list(command)
    for option, value in (("--warm-up", 1), ("--steps", 2)):
        if option in words:
            words[words.index(option) + 1] = str(value)
    if "--batch" in words:
        at = words.index("--batch") + 1
        words[at] = str(max(int(words[at]) // 8, 1))
    if "pytest" in words:
        words.append("--collect-only")
    if words[2] in _WITH_TINY and "--tiny" not in words:
        words.append("--tiny")
    return tuple(words)


def _after_input(job: Job, made: Path) -> Job:
    reads = job.title != INPUT and any(word.startswith(str(made)) for word in job.command)
    return replace(job, after=INPUT) if reads else job


def _module(name: str, *options: object) -> tuple[str, ...]:
    return (PYTHON, "-m", name, *map(str, options))


def _device(tiny: bool) -> tuple[str, ...]:
    """Return the options of a benchmark: its device, and whether its sizes are tiny."""
    return ("--device", "cpu", "--tiny") if tiny else ("--device", "cuda")


def _build(made: Path, tiny: bool) -> Iterator[Job]:
    """Build the core and the process group, unless they are there, without a network; make the input."""
    yield Job(title="the C++ core", command=_module("benchmarks.gpu.core"), is_first=True)
    inputs = _module("benchmarks.gpu.inputs", made, *["--tiny"] * tiny)
    yield Job(title=INPUT, command=inputs, limit_s=60)
    yield Job(title="shoal doctor", command=(*SHOAL, "doctor"), limit_s=60)


def _tests(folder: Path, file: str) -> tuple[str, ...]:
    """Return the command that runs a file of tests.

    Plug-ins that the machine has beside ours stay off. The folder is the file's own: removing those of other
    runs, pytest may leave one open, which is an error here.
    """
    off = ("-p", "no:benchmark", "-p", "no:xdist", "-p", "no:cacheprovider")
    return _module("pytest", "-q", *off, "--basetemp", folder, file)


def _attention(made: Path, tiny: bool) -> Iterator[Job]:
    if not tiny:
        yield _test_job(made, GPU_TESTS[0], 170)
    command = _module("benchmarks.gpu.attention_forms", *_device(tiny), "--json", "{out}")
    yield Job(title="attention with dropout", kind="rows", command=command, limit_s=90)


def _test_job(made: Path, name: str, limit_s: float) -> Job:
    return Job(
        title=f"tests/gpu/{name}.py", limit_s=limit_s,
        command=_tests(made / f"pytest-{name}", f"tests/gpu/{name}.py"),
    )  # fmt: skip


def _gpu_tests(made: Path, tiny: bool) -> Iterator[Job]:
    if tiny:
        yield Job(title="tests", command=_tests(made / "pytest", "tests/unit/benchmarks/test_gpu_kit.py"))
        return
    group = "from shoal.comm import native_group; native_group.build()"
    yield Job(title="the process group in C++", command=(PYTHON, "-c", group), limit_s=60)
    for name in GPU_TESTS[1:]:
        yield _test_job(made, name, 110)


def _comm(results: Path, tiny: bool) -> Iterator[Job]:
    device = "memory" if tiny else "cuda"
    options = ("--device", device, "--quick", "--trace", results / "comm-trace.json.gz", "--json", "{out}")
    yield Job(title="backend shoal", kind="rows", command=_module("benchmarks.cuda_comm", *options))


def _pair(tiny: bool) -> Iterator[Job]:
    device = "cpu" if tiny else "cuda"
    pair = _module("benchmarks.gpu.pipeline_pair", "--device", device, "--quick", "--json", "{out}")
    yield Job(title="pipeline of two on one device", kind="rows", command=pair)


def _bench(recipe: str, preset: str, batch: int, *options: object, tiny: bool = False) -> tuple[str, ...]:
    warm_up, timed = (1, 2) if tiny else (5, 60 if "--data.decode" in options else 15)
    steps = ("--warm-up", warm_up, "--steps", timed)
    words = ("--preset", preset, "--workers", 1, "--batch", batch, *steps, *options, "--json", "{out}")
    return _module("shoal", "bench", "train", recipe, *words)


def _peer(name: str, title: str, beside: str | None = None, *, tiny: bool) -> Job:
    command = _module("benchmarks.gpu.peers", name, *_device(tiny), "--json", "{out}")
    return Job(title=title, kind="peer", command=command, beside=beside, limit_s=90)


def _bert(made: Path, results: Path, tiny: bool) -> Iterator[Job]:
    """Time BERT-large on packed real text, and LAMB's step alone."""
    text, trace = ("--data.path", made / BERT_TEXT), ("--trace", results / "bert-trace.json.gz")
    lamb = _module("benchmarks.gpu.lamb_step", *_device(tiny), "--quick", "--json", "{out}")
    if tiny:
        bert = _bench("bert", "tiny", 2, *text, "--model.vocab-size", 30_522, *trace, tiny=True)
        yield Job(title="bert tiny", kind="train", command=bert)
        other = ("--data.path", made / ALBERT_TEXT, "--model.vocab-size", 30_000)
        yield Job(title="albert tiny", kind="train", command=_bench("albert", "tiny", 2, *other, tiny=True))
        yield Job(title="LAMB's step", kind="rows", command=lamb)
        return
    long = _bench("bert", "large", 64, "--phase", 2, *text, *trace)
    short = _bench("bert", "large", 256, "--phase", 1, *text)
    for title, timed, target in (
        ("BERT-large, 512 tokens", long, 315.0),
        ("BERT-large, 128 tokens", short, 1_457.0),
    ):
        yield Job(title=title, kind="train", command=timed, target=target, limit_s=110)
    yield Job(title="LAMB's step", kind="rows", command=lamb, limit_s=60)


def _peers(tiny: bool) -> Iterator[Job]:
    """Time transformers' BERT on the same numbers of tokens."""
    for name in ("bert-512",) if tiny else ("bert-512", "bert-128"):
        yield _peer(name, f"transformers' BERT in a plain loop, {name[5:]} tokens", tiny=tiny)


def _squad(made: Path, data: Path, size: str, *, tiny: bool = False) -> tuple[str, ...]:
    questions = made / QUESTION if tiny else data / CASES["squad"].needs[0]
    files = ("--data.path", questions, "--data.eval", made / QUESTION)
    model = ("--model.path", made / f"bert-{size}", "--model.from-scratch")
    if tiny:
        short = ("--window.max-seq-length", 64, "--window.doc-stride", 16, "--window.max-question-length", 16)
        return _bench("squad", "tiny", 2, *files, *model, *short, tiny=True)
    window = ("--window.max-seq-length", 384, "--train.precision", "bf16")
    return _bench("squad", "bert", 32, *files, *model, *window)


def _squad_rows(made: Path, data: Path, tiny: bool) -> Iterator[Job]:
    """Time finetuning, compiled as by default, and the smaller model without, which the host limits."""
    if tiny:
        yield Job(title="squad tiny", kind="train", command=_squad(made, data, "tiny", tiny=True))
        return
    for size, target in (("large", 350.0), ("base", 932.0)):
        title = f"SQuAD 384, {size}, compiled"
        yield Job(title=title, kind="train", command=_squad(made, data, size), target=target, limit_s=70)
    command = (*_squad(made, data, "base"), "--train.no-compile")
    yield Job(title="SQuAD 384, base", kind="train", command=command, limit_s=40)


def _trainer(tiny: bool) -> Iterator[Job]:
    """Time ALBERT and SQuAD by turns with transformers' Trainer."""
    cases = (("albert", "tiny"), ("squad", "tiny")) if tiny else (("albert", "base"), ("albert", "large"))
    for case, size in cases:
        options = ("--case", case, *_device(tiny)[:2], "--size", size, "--quick", "--json", "{out}")
        command = _module("benchmarks.bert_step", *options)
        yield Job(title=f"{case} {size} beside Trainer", kind="rows", command=command, limit_s=100)


def _vision(made: Path, results: Path, tiny: bool) -> Iterator[Job]:
    """Time ResNet on made and on real JPEGs, and Mask R-CNN on made scenes."""
    real = ("--data.path", made / IMAGES)
    if tiny:
        yield Job(title="resnet tiny", kind="train", command=_bench("resnet50", "tiny", 2, *real, tiny=True))
        small = ("--augment.shorter", 64, "--augment.longer", 96, "--train.precision", "fp32")
        yield Job(
            title="mask_rcnn tiny", kind="train", command=_bench("mask_rcnn", "tiny", 1, *small, tiny=True)
        )
        return
    title = "Mask R-CNN, batch 12, made scenes"
    trace = ("--trace", results / "mask-rcnn-trace.json.gz")
    command = _bench("mask_rcnn", "coco-1x", 12, "--train.precision", "bf16", *trace)
    yield Job(title=title, kind="train", command=command, target=42.0, limit_s=110)
    yield _peer("mask_rcnn", "torchvision's Mask R-CNN in a plain loop", title, tiny=False)
    title = "ResNet-50, one batch over and over"
    bf16 = ("--train.precision", "bf16")
    command = _bench("resnet50", "imagenet-16k", 256, *bf16, "--train.overfit-steps", 1)
    yield Job(title=title, kind="train", command=command, limit_s=80)
    yield _peer("resnet50", "torchvision's ResNet-50 in a plain loop", title, tiny=False)
    plain = [
        word for name in ("brightness", "saturation", "hue", "lighting") for word in (f"--augment.{name}", 0)
    ]
    for decode in ("host", "device"):
        command = _bench("resnet50", "imagenet-16k", 256, *bf16, *plain, *real, "--data.decode", decode)
        title = f"ResNet-50, JPEGs of COCO over and over, decoded by the {decode}"
        yield Job(title=title, kind="train", command=command, target=3_079.0, limit_s=80)


def _t5(results: Path, tiny: bool) -> Iterator[Job]:
    """Time T5 1.0, whose products are as large as those of T5 1.1 (d_ff 3,072, or 2,048 gated)."""
    if tiny:
        yield Job(title="T5 tiny", kind="train", command=_bench("t5", "tiny", 2, tiny=True))
        return
    title, trace = "T5 1.0 base, 512/114 tokens", ("--trace", results / "t5-trace.json.gz")
    command = _bench("t5", "base", 64, *trace)
    yield Job(title=title, kind="train", command=command, target=366.0, limit_s=110)
    yield _peer("t5", "transformers' T5 in a plain loop", title, tiny=False)
