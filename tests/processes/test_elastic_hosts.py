"""Tests a recipe on emulated hosts of which one is cut off and comes back."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pretrain_jobs import losses, prepare_small, run, small_config, wait_for_step
from test_elastic import changes

from forked_programs import FORKING
from shoal.env.settings import INTERFACE as INTERFACE_VARIABLE
from shoal.env.settings import LAUNCH_DIR
from shoal.env.worker import STORE_FILE
from shoal.errors import EXIT_LOST
from shoal.launch import emulated
from shoal.launch.emulated import Cluster
from shoal.launch.emulated_job import Failures, read_events
from shoal.launch.emulated_network import INTERFACE

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
    ),
    pytest.mark.skipif(
        not hasattr(dist, "_reconfigure"), reason="this torch has no groups whose members change"
    ),
]
DEADLINE_S = 120.0
PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_elastic_hosts import work
work(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def work(text: Path, run_dir: Path) -> None:
    """Be a worker, from the variables of its launcher; wait in the last steps for the one that comes back."""
    from test_elastic import _before

    from shoal.env.launcher import worker_env
    from shoal.launch.worker import run_worker
    from shoal.recipes.albert import main
    from shoal.train.step import Step

    def before(step: Step, *_: Any) -> None:
        members = step._training.world.members
        assert members is not None
        while step.number == 3 and members.generation == 1 and not (run_dir / "cut").exists():
            time.sleep(0.01)
        while step.number == 9 and members.is_first and not members.num_waiting():
            time.sleep(0.01)

    _before(Step, "__enter__", before)
    config = small_config(text, run_dir, distributed={"elastic": "1:3", "worker_patience_s": 30})
    run_worker(lambda: main(config, worker_env()))


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_small(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def expected(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of a run whose workers stay."""
    fixed = small_config(text, tmp_path_factory.mktemp("fixed") / "run")
    assert run(fixed, 1) == [0]
    return losses(fixed.run.dir)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_is_cut_off_and_comes_back(
    lost: int, text: Path, expected: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "subprocess", FORKING)
    config = small_config(text, tmp_path / "run")
    config.run.dir.mkdir()
    program = PROGRAM.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", program, str(text), str(config.run.dir)]
    env = {
        LAUNCH_DIR: str(tmp_path),
        STORE_FILE: str(tmp_path / "store"),
        INTERFACE_VARIABLE: INTERFACE,
    }
    with ExitStack() as stack, Cluster(hosts=3) as cluster:

        def outputs(rank: int) -> tuple[Any, Any]:
            log = stack.enter_context((config.run.dir / f"worker-{rank}.log").open("a"))
            return log, log

        options: Any = {"workers_per_host": 1, "env": env, "outputs": outputs}
        workers = cluster.start_workers(command, **options)
        wait_for_step(config.run.dir, 2, [_Alive(each) for each in workers])  # type: ignore[misc]
        failures = Failures(read_events(f"{lost}@0s", 3), workers_per_host=1)
        with failures.of(cluster):
            until(lambda: not failures.has_host_of(lost))
            (config.run.dir / "cut").touch()
            assert workers[lost].wait(DEADLINE_S) == EXIT_LOST
            until(lambda: changes(config) == [(3, 2)])
            cluster.link(lost, up=True)
            workers[lost] = cluster.start_worker(lost, command, **options)
            assert [each.wait(DEADLINE_S) for each in workers] == [0, 0, 0]
    assert losses(config.run.dir) == pytest.approx(expected, rel=1e-6)
    assert changes(config) == [(3, 2), (2, 3)]


class _Alive:
    """A program with the name that processes have for whether they run."""

    def __init__(self, process: Any) -> None:
        self.is_alive = lambda: process.poll() is None
