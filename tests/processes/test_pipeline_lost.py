"""A process of a pipeline dies or fails: all others say which, also those that do not talk to it."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from pipeline_world import Made, Shared, Worker, run_worlds

from shoal.errors import ShoalError

MANY = 100_000


def make_models() -> Shared:
    return {"bert": Made("bert")}


def train_until_lost(victim: int, layout: dict[str, int], worker: Worker) -> str:
    """Train until somebody is lost; the victim is killed in the middle of it."""
    stage, batch = worker.pipeline(worker.shared["bert"], **layout)
    stage.step(**batch)
    if worker.rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for _ in range(MANY):
        try:
            stage.step(**batch)
        except ShoalError as error:
            return str(error)
    return "nobody was lost"


@pytest.mark.parametrize(
    ("victim", "layout", "said"),
    [
        pytest.param(3, {"ranks": 4}, "rank 3 (stage 3) died", id="the last of four"),
        pytest.param(
            2, {"ranks": 2, "replicas": 2}, "rank 2 (stage 0 of replica 1) died", id="of a replica",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_killed_process_is_named_by_all_others(
    tmp_path: Path, victim: int, layout: dict[str, int], said: str
) -> None:
    (found,) = run_worlds(
        tmp_path, make_models, [(4, partial(train_until_lost, victim, layout))], killed=[victim]
    )
    assert len(found) == 3
    for message in found:
        assert "another worker was lost" in message and said in message, found


def fail_in_the_middle(worker: Worker) -> str:
    """Let the last rank's stage raise in its second step."""
    stage, batch = worker.pipeline(worker.shared["bert"], ranks=2)
    stage.step(**batch)
    if worker.rank == 1:
        (runner,) = stage._runners.values()
        runner.register_forward_pre_hook(refuse)
    try:
        stage.step(**batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nobody failed"


def refuse(module: torch.nn.Module, args: object) -> None:
    raise ArithmeticError("a fault of the model's own")


def test_a_failing_stage_keeps_its_error_and_the_others_quote_it(tmp_path: Path) -> None:
    ((first, second),) = run_worlds(tmp_path, make_models, [(2, fail_in_the_middle)])
    assert second == "ArithmeticError: a fault of the model's own"
    assert first.startswith(
        "ShoalError: another worker was lost: rank 1 (stage 1) failed with ArithmeticError"
    )
