"""Runs the pages' commands as they stand, and the parts that docs/run-more.md adds to a script.

A block of commands with a word in capitals, an ellipsis, a path of a cluster's file system or a comment that
begins with ``needs`` waits for what the reader has; all others are run. ``make`` and ``pip`` are the gate's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
import torch
from test_example_scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SUDO = re.compile(r"sudo (?:-E env PATH=\"\$PATH\" |\.venv/bin/)")
YOURS = re.compile(r"# needs |…|(?<![-\w])[A-Z][A-Z0-9_]+|/data/|/fsx/|\b(?:make|pip|kill) |\b10\.0\.")


def _blocks(page: str) -> list[str]:
    """Return a page's blocks of commands that need nothing but this package, in the order of the page."""
    text = SUDO.sub("", (ROOT / page).read_text(encoding="utf-8"))
    text = re.sub(r"^```bash\n(.*?)^```", lambda block: indent(block[1], "    "), text, flags=re.M | re.S)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    blocks = [re.sub("^    ", "", block, flags=re.M) for block in re.findall(r"(?:^ {4}.*\n)+", text, re.M)]
    return [
        block
        for block in blocks
        if re.match("(shoal|python|torchrun|sha256sum) ", block) and not YOURS.search(block)
    ]


PAGES = {
    page: blocks
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if not {"_build", "log", "design"} & set(path.parts)
    and (blocks := _blocks(page := path.relative_to(ROOT).as_posix()))
}


def _run(block: str, folder: Path) -> None:
    """Run a block of commands in a folder with the examples, as a reader at the repository's root does."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    environment = {
        "XDG_CACHE_HOME": str(Path.home() / ".cache"),
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
    }
    done = subprocess.run(
        ["bash", "-euc", block], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"


needs_emulation = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_emulation
@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/tutorial.md"])
def test_the_commands_of_a_page_run_as_they_stand(page: str, tmp_path: Path) -> None:
    for block in PAGES[page]:
        _run(block, tmp_path)


@pytest.mark.slow
@needs_emulation
def test_the_tutorials_commands_end_with_the_same_weights(tmp_path: Path) -> None:
    commands = "".join(PAGES["docs/tutorial.md"]).splitlines()
    assert len(commands) == 9
    for command in commands:
        _run(command, tmp_path)
    weights = [path.read_bytes() for path in sorted(tmp_path.glob("runs/*/model.pt"))]
    assert len(weights) == 4 and len(set(weights)) == 1
    assert (tmp_path / "runs" / "one-host" / "report.html").is_file()
    assert "--helpers=2" in (tmp_path / "job" / "job.sbatch").read_text()


BEFORE = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from shoal import Run
from shoal.train.config import RunOutputConfig
from shoal.train.run import Sizes

inputs = torch.randn(4_000, 20, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
with Run.open(sys.argv[1], settings=RunOutputConfig(log_frequency=20, checkpoint_frequency=100)) as run:
    torch.manual_seed(run.seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 2))
"""
REPLICAS = """
    ddp = run.data_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
PLAIN = """
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(dataset, Sizes(global_batch_size=96), until=200):
        with step:
            for features, labels in step:
                step.backward(F.cross_entropy(ddp(features), labels, reduction="sum") / step.num_samples)
            step.update(optimizer, max_norm=1.0)
"""
AFTER = """
    weights = MODEL.state_dict()
    for name, each in weights.items():
        weights[name] = each.full_tensor() if hasattr(each, "full_tensor") else each
    code = run.finish(lambda directory: torch.save(weights, directory / "model.pt"))
sys.exit(code)
"""


def _weights(folder: Path, *parts: str, model: str = "model") -> dict[str, torch.Tensor]:
    """Run a script made of ``parts`` on two workers; return the weights that it exports."""
    folder.mkdir()
    (folder / "script.py").write_text("".join((BEFORE, *parts, AFTER.replace("MODEL", model))))
    run_script(folder / "script.py", folder, 2, "run")
    loaded: dict[str, torch.Tensor] = torch.load(folder / "run" / "model.pt", weights_only=True)
    return loaded


def _part(heading: str) -> str:
    """Return the code below a heading of the page, inside ``with Run.open``."""
    page = (ROOT / "docs" / "run-more.md").read_text(encoding="utf-8")
    code = page.partition(f"## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]
    return indent(code, "    ")


def test_parts_that_the_page_adds_train_as_a_script_without_them(tmp_path: Path) -> None:
    plain = _weights(tmp_path / "plain", REPLICAS, PLAIN)
    shards = _weights(tmp_path / "shards", _part("Shards (FSDP2)"))
    averages = _weights(
        tmp_path / "averages", REPLICAS, _part("Averages of the weights"), model="average.model"
    )
    assert plain.keys() == shards.keys() == averages.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(shards[name], weight, rtol=1e-4, atol=1e-5)
        assert 0 < (averages[name] - weight).norm() < 0.3 * weight.norm()
