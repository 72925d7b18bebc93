"""Tests the wheel that ``make wheels`` leaves in ``dist/``, in fresh environments where no compiler is found.

One environment has what installing the wheel brings and nothing else. The other borrows torch and the
packages of the extras from the environment of the tests: they are gigabytes, and not what is tested.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import BUILT_WITH_LIBFABRIC, ROOT, check_file, find_wheel, output_of

ADDS_TORCH = (
    "needs torch, which is not installed: pip install 'torch>=2.11' 'safetensors>=0.5' 'tensorboardX>=2.6.4'"
)
STEPS = 20
NOT_FOR_CHILDREN = ("CC", "CXX", "PYTHONPATH", "VIRTUAL_ENV")

ALL_REDUCE = """
import torch
import torch.distributed as dist

import shoal

dist.init_process_group("shoal")
values = torch.arange(1000.0) * (dist.get_rank() + 1)
dist.all_reduce(values)
assert torch.equal(values, torch.arange(1000.0) * 3), values
print(f"summed over {dist.get_world_size()} by {shoal.__file__}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Return the wheel for this Python."""
    own = "abi3" if sys.version_info >= (3, 12) else f"cp3{sys.version_info.minor}"
    return find_wheel("make wheels", own)


class Environment:
    """A virtual environment with the wheel and what it requires; PATH is its own folder alone."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self.python = folder, folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.run("-m", "pip", "install", "--quiet", str(wheel))

    def run(self, *argv: str, exit_code: int = 0) -> str:
        """Run Python with ``argv`` and return what it printed to both streams."""
        kept = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
        env = kept | {"PATH": str(self.python.parent), "COLUMNS": "200"}
        return output_of([self.python, *argv], exit_code=exit_code, cwd=self.folder, env=env)

    def shoal(self, *argv: str, exit_code: int = 0) -> str:
        """Run the command ``shoal``."""
        return self.run(str(self.folder / "bin" / "shoal"), *argv, exit_code=exit_code)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """Make the environment of the wheel alone."""
    return Environment(tmp_path_factory.mktemp("small"), wheel)


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """Make one that finds the packages of the tests too; their editable shoal is not among them."""
    made = Environment(tmp_path_factory.mktemp("with-torch"), wheel)
    site_packages = next((made.folder / "lib").glob("python*/site-packages"))
    borrowed = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return made


# ---- the wheel as a file -----------------------------------------------------------------------------------


def test_it_is_small_and_tagged_and_holds_its_notices(wheel: Path) -> None:
    names = check_file(wheel)
    assert {"shoal/lib/libshoal.so", "shoal/include/shoal.h", "shoal/py.typed", "shoal/commit.txt"} <= names
    assert {"shoal/comm/native/group.cc", "shoal/jax/native/ffi.cc", "shoal/lib/libshoal_mpi.so"} <= names


# ---- with numpy and cyclopts alone -------------------------------------------------------------------------


def test_it_requires_numpy_and_cyclopts_alone(small: Environment) -> None:
    listed = (
        "from importlib.metadata import requires; print(*(r for r in requires('shoal') if 'extra' not in r))"
    )
    assert [name.partition(">")[0] for name in small.run("-c", listed).split()] == ["numpy", "cyclopts"]
    assert "No module named 'torch'" in small.run("-c", "import shoal, torch", exit_code=1)


def test_the_version_names_the_commit(small: Environment, wheel: Path) -> None:
    said = small.shoal("--version")
    version = wheel.name.split("-")[1]
    if (ROOT / ".git").exists():
        assert re.fullmatch(rf"shoal {re.escape(version)}, built from commit [0-9a-f]{{40}}\n", said)
    else:
        assert said == f"shoal {version}\n"


def test_what_needs_no_torch_runs_without_it(small: Environment) -> None:
    assert "serve" in small.shoal("--help")
    assert "--port" in small.shoal("serve", "--help")
    assert "--cluster" in small.shoal("plan", "--help")
    said = small.shoal("plan", "bert-large", "--cluster", "8xp3dn.24xlarge")
    assert "bert-large on 8xp3dn.24xlarge" in said and "time to train" in said
    assert "--train.total-steps" in small.shoal("train", "albert", "--help")
    summed = "import numpy as np; from shoal import native; out = np.empty(3, np.float32); "
    summed += "native.sum_in_rank_order(out, [np.ones(3, np.float32)] * 2); print(out)"
    assert small.run("-c", summed) == "[2. 2. 2.]\n"


@pytest.mark.skipif(
    not Path("/usr/include/rdma/fi_endpoint.h").exists(), reason="libfabric's headers are not installed"
)
def test_it_is_built_with_libfabric_where_its_headers_are(small: Environment) -> None:
    """The gate installs them (``.ci/run``). The library itself is loaded when a transport asks for it."""
    assert small.run("-c", BUILT_WITH_LIBFABRIC) == "True\n"


def test_doctor_says_what_is_missing(small: Environment) -> None:
    said = small.shoal("doctor", exit_code=1)
    assert "pip install 'torch>=2.11' " in said
    assert "ok  native core" in said
    assert "C++ compiler  none found" in said
    assert "`shoal serve`, on helper hosts, needs none of them." in said


@pytest.mark.parametrize(
    "command",
    [
        ("train", "resnet50", "--preset", "tiny", "--data.made-images", "2000"),
        ("plan", "t5-3b", "--cluster", "256xp4d.24xlarge", "--sequence-length", "77"),
        ("plan", "--model", "x:y", "--global-batch", "64", "--cluster", "8xp3dn.24xlarge"),
    ],
)
def test_a_command_that_needs_torch_says_what_adds_it(small: Environment, command: tuple[str, ...]) -> None:
    assert small.shoal(*command, exit_code=2) == f"shoal: this command {ADDS_TORCH}\n"


def test_a_name_that_needs_torch_says_what_adds_it(small: Environment) -> None:
    said = small.run("-c", "import shoal; shoal.Lamb", exit_code=1)
    assert said.endswith(f"ModuleNotFoundError: shoal.Lamb {ADDS_TORCH}\n")
    said = small.shoal("prepare", "text", "builtin", "--out", "text", exit_code=2)
    assert said == (
        "shoal: this command needs tokenizers, which is not installed: pip install 'transformers>=5.0' "
        "'tokenizers>=0.22' 'sentencepiece>=0.2.1' 'protobuf>=5'\n"
    )


# ---- with torch --------------------------------------------------------------------------------------------


def test_the_backend_sums_over_two_ranks(with_torch: Environment, tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(ALL_REDUCE)
    said = with_torch.run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    assert said.count(f"summed over 2 by {with_torch.folder}/lib") == 2


def test_it_trains(with_torch: Environment, tmp_path: Path) -> None:
    assert "Training can run here." in with_torch.shoal("doctor")
    words = ["quick", "brown", "fox", "jumps", "over", "lazy", "dog", "seven", "small", "boats", "sail"]
    articles = [
        " ".join(
            " ".join(words[k * step % 11] for k in range(1, 9)) + "." for step in range(first, first + 9)
        )
        for first in range(400)
    ]
    text, data, run = tmp_path / "text.txt", str(tmp_path / "data"), str(tmp_path / "run")
    text.write_text("\n".join(articles) + "\n")
    with_torch.shoal("prepare", "text", str(text), "--format", "lines", "--out", data, "--vocab-size", "64")
    said = with_torch.shoal(
        *("train", "albert", "--preset", "tiny", "--data.path", data, "--run.dir", run),
        *("--train.total-steps", str(STEPS)),
    )
    assert f"finished {STEPS} steps" in said
    assert list(Path(run, "checkpoints").glob(f"*{STEPS}"))
