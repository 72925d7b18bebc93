"""Tests docs/moving.md and docs/from-horovod.md: others' programs, with changes and commands of the pages.

Checkouts are given: ``SHOAL_TEST_CHECKOUTS=DIR pytest -m slow tests/processes/test_moving.py``, where DIR has
``nanoGPT`` (karpathy), ``examples`` (pytorch) and ``horovod`` (horovod). Programs of the same shape run
without them, on 3 and 5 workers.
"""

from __future__ import annotations

import gzip
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shoal_workers import run_group
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

DOCS = Path(__file__).parents[2] / "docs"
GIVEN = os.environ.get("SHOAL_TEST_CHECKOUTS", "")
needs_checkouts = pytest.mark.skipif(
    not GIVEN, reason="give checkouts of nanoGPT, examples and horovod: SHOAL_TEST_CHECKOUTS=DIR"
)
DEADLINE_S = 400


# ---- what the pages say ---------------------------------------------------------------------------------


def section(page: str, title: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def commands(text: str) -> list[list[str]]:
    """Return the commands of a section, whose lines are indented."""
    lines = re.sub(r" \\\n +", " ", text).splitlines()
    return [shlex.split(line) for line in lines if line.startswith("    ")]


def changes(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the file of a section's diff, and the pairs of old and new lines."""
    block = text.split("```diff\n--- ")[1].split("```")[0]
    file, _, rest = block.partition("\n")
    pairs = []
    for hunk in rest.split("@@\n"):
        parts = {
            sign: "".join(line[1:] + "\n" for line in hunk.splitlines() if line[0] == sign) for sign in "-+"
        }
        pairs.append((parts["-"], parts["+"]))
    return file, pairs


def change(path: Path, pairs: list[tuple[str, str]]) -> None:
    text = path.read_text(encoding="utf-8")
    for old, new in pairs:
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def checkout(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(Path(GIVEN, name), folder / name, ignore=shutil.ignore_patterns(".git")))


def run(command: list[str], cwd: Path, **environment: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


# ---- programs of others ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_checkouts
def test_nanogpt_has_the_losses_of_gloo(tmp_path: Path) -> None:
    text = section("moving.md", "nanoGPT")
    repository = checkout("nanoGPT", tmp_path)
    file, pairs = changes(text)
    change(tmp_path / file, pairs)
    tokens = np.random.default_rng(0).integers(0, 65, 10_000).astype(np.uint16)
    for name in ("train.bin", "val.bin"):
        tokens.tofile(repository / "data/shakespeare_char" / name)
    (command,) = commands(text)
    said = {}
    for backend in ("shoal", "gloo"):
        words = [word.replace("=shoal", f"={backend}") for word in command]
        said[backend] = re.findall(r"(?:iter|step) \d+: [^,]*loss [\d.]+", run(words, repository))
    assert len(said["shoal"]) == 23 and said["shoal"] == said["gloo"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_checkouts
def test_fsdp2_has_the_weights_of_gloo_and_of_one_worker(tmp_path: Path) -> None:
    text = section("moving.md", "PyTorch's FSDP2 example")
    checkout("examples", tmp_path)
    file, pairs = changes(text)
    change(tmp_path / file, pairs)
    program = tmp_path / file
    reset = "        model.reset_parameters()\n"  # leaves out the layers, which keep what the memory held
    change(
        program,
        [(reset, f"{reset}        for layer in model.layers:\n            layer.reset_parameters()\n")],
    )
    plain, with_options = commands(text)
    saved = program.parent / "checkpoints"

    def weights(command: list[str]) -> dict[str, Tensor]:
        """Go on from the first checkpoint; return the weights of the next."""
        shutil.rmtree(saved)
        shutil.copytree(tmp_path / "first", saved)
        run(command, program.parent)
        found: dict[str, Tensor] = torch.load(max(saved.glob("*/*/model*.pt")), weights_only=True)
        return found

    run(plain, program.parent)
    shutil.copytree(saved, tmp_path / "first")
    ours = weights(plain)
    others = [
        weights([word.replace("=3", f"={size}") for word in plain]) for size in (1, 5)
    ]  # of equal batches
    change(program, [('("shoal")', '("gloo")')])
    others.append(weights(plain))
    change(program, [('("gloo")', '("shoal")')])
    for name, value in ours.items():
        for other in others:
            torch.testing.assert_close(value, other[name], rtol=0.0, atol=1e-4)
    run(with_options, program.parent)


def write_mnist(folder: Path, rows: int) -> None:
    """Write images of digits of random shades where torchvision looks for MNIST's files."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in ("train", "t10k"):
        labels = random.integers(0, 10, rows).astype(np.uint8)
        images = (labels[:, None, None] * 20 + random.integers(0, 20, (rows, 28, 28))).astype(np.uint8)
        for kind, magic, data in (("images-idx3", 2051, images), ("labels-idx1", 2049, labels)):
            content = struct.pack(f">{1 + data.ndim}i", magic, *data.shape) + data.tobytes()
            (raw / f"{name}-{kind}-ubyte").write_bytes(content)
            (raw / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


def horovod_example(folder: Path, name: str) -> Path:
    """Return Horovod's example with its imports changed as the page says."""
    program = checkout("horovod/examples/pytorch", folder) / name
    text = program.read_text(encoding="utf-8")
    change(program, [("import horovod.torch as hvd\n", "import shoal.horovod_torch as hvd\n")])
    if "\nimport horovod\n" in text:
        change(program, [("\nimport horovod\n", "\n")])
    return program


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_checkouts
def test_horovods_examples_for_torch(tmp_path: Path) -> None:
    mnist, benchmark = commands(section("from-horovod.md", "Horovod's examples"))
    program = horovod_example(tmp_path, "pytorch_mnist.py")
    write_mnist(tmp_path / "data", 600)
    for more in ([], ["--fp16-allreduce"], ["--gradient-predivide-factor", "2.0"]):
        given = [*mnist, "--data-dir", str(tmp_path / "data"), "--log-interval", "1", *more]
        said = run(given, program.parent, HOME=str(tmp_path))
        assert said.count("Loss: ") == 4 and said.count("Test set: Average loss: ") == 1
    shutil.rmtree(program.parent)
    program = horovod_example(tmp_path, "pytorch_synthetic_benchmark.py")
    said = run(benchmark, program.parent)
    assert "Number of CPUs: 3" in said and "Total img/sec on 3 CPU(s)" in said


# ---- programs of the same shape -------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def rows(step: int, micro: int, rank: int | None, size: int) -> Tensor:
    whole = torch.randn(3 * size, 7, generator=torch.Generator().manual_seed(10 * step + micro)).double()
    return whole if rank is None else whole[3 * rank : 3 * rank + 3]


def toggled(rank: int) -> None:
    """Accumulate as nanoGPT does, by DDP's attribute; compare with one process over the whole batches."""
    size = dist.get_world_size()
    found = []
    for of, model in ((rank, DistributedDataParallel(net())), (None, net())):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            for micro in range(2):
                model.require_backward_grad_sync = micro == 1
                (model(rows(step, micro, of, size)).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        found.append([each.detach() for each in model.parameters()])
    for ours, alone in zip(*found, strict=True):
        torch.testing.assert_close(ours, alone, rtol=0.0, atol=1e-9)


def sharded(rank: int) -> None:
    """Shard 16 and 4 rows over odd numbers of workers; compare with one process over the whole batches."""
    size = dist.get_world_size()
    model, alone = net(), net()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=dist.init_device_mesh("cpu", (size,)))
    for of, part in ((rank, model), (None, alone)):
        optimizer = torch.optim.Adam(part.parameters(), lr=1e-2)
        for step in range(3):
            part(rows(step, 0, of, size)).square().mean().backward()
            nn.utils.clip_grad_norm_(part.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for ours, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), other, rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("program", [toggled, sharded], ids=["toggled", "sharded"])
def test_odd_numbers_of_workers(program: object, size: int, tmp_path: Path) -> None:
    assert callable(program)
    run_group(program, size, tmp_path)
