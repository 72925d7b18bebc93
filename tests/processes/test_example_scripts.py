"""Runs every script of ``examples/`` as a reader would, on one worker or on two."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

import shoal.comm
from forked import fork_process, free_port, wait_for
from synthetic_text import prepare, random_documents

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# name: (workers, options, a part of what the first worker prints)
SCRIPTS = {
    "plan_my_model": (1, ["--helpers", "4xc5n.18xlarge"], "the best layouts"),
    "ddp": (2, [], "step 60: loss 0."),
    "fsdp2": (2, [], "step 60: loss 0."),
    "transformers_trainer": (2, [], "shoal, 2 workers: loss 0."),
    "accelerate_loop": (2, [], "shoal, 2 workers: last loss 0."),
    "lightning_trainer": (2, [], "shoal, 2 workers: loss 0."),
    "pipeline_gpt2": (2, [], "step 30: loss "),
    "own_loop": (1, ["--text", "text"], "step 30: loss "),
    "own_recipe": (2, [], "finished 200 steps"),
    "gan": (2, [], "finished 200 steps"),
    "muon_adamw": (1, [], "finished 150 steps"),
    "lstm_language_model": (1, [], "finished 60 steps"),
}
OF_FRAMEWORKS = {"jax_optax", "keras_fit", "tensorflow_tape"}
"""Scripts that ``real/test_framework_launch.py`` runs, in their own environments."""


def _script(path: str, arguments: list[str], folder: str, rank: int, size: int, port: int) -> None:
    os.chdir(folder)
    shoal.comm.register()  # torch was imported before this test's entry points were read
    if size > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="test",
            ACCELERATE_USE_CPU="true",
        )
    torch.set_num_threads(1)
    sys.argv = [path, *arguments]
    with Path(f"output-{rank}").open("w", encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        runpy.run_path(path, run_name="__main__")


def run(name: str, folder: Path, num_workers: int, *arguments: str) -> str:
    """Run an example to its end and return what the first worker has printed."""
    return run_script(EXAMPLES / f"{name}.py", folder, num_workers, *arguments)


def run_script(path: Path, folder: Path, num_workers: int, *arguments: str) -> str:
    """Run a script in ``folder`` to its end and return what the first worker has printed."""
    port = free_port()
    processes = [
        fork_process(_script, str(path), list(arguments), str(folder), rank, num_workers, port)
        for rank in range(num_workers)
    ]
    exit_codes = wait_for(processes)
    output = (folder / "output-0").read_text(encoding="utf-8")
    assert exit_codes == [0] * num_workers, output
    return output


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SCRIPTS) | OF_FRAMEWORKS


@pytest.mark.parametrize("name", SCRIPTS)
def test_example(name: str, tmp_path: Path) -> None:
    num_workers, arguments, expected = SCRIPTS[name]
    if name == "own_loop":
        prepare(tmp_path / "text", {"train": random_documents([400] * 20, vocab_size=100)}, vocab_size=100)
    assert expected in run(name, tmp_path, num_workers, *arguments)


@pytest.mark.slow
def test_the_recipe_sees_the_same_batches_on_other_workers(tmp_path: Path) -> None:
    from shoal.record import Step, read_record

    losses = []
    for num_workers in (1, 3):
        folder = tmp_path / str(num_workers)
        folder.mkdir()
        run("own_recipe", folder, num_workers)
        rows = read_record(folder / "runs" / "digits")
        losses.append([row.loss for row in rows if isinstance(row, Step)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
