"""Tests launchers whose workers come and go: one is lost early, EC2 takes a host, one comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pretrain_jobs import losses, prepare_small, run, small_config
from test_elastic import _before, changes

from forked_programs import FORKING
from instance_metadata import Service, serving
from shoal import record
from shoal.env.launcher import worker_env
from shoal.errors import EXIT_STOPPED
from shoal.launch import emulated, spot_notice
from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import INTERFACE, end_processes, identity
from shoal.launch.in_job import HostOptions, in_job
from shoal.launch.worker import run_worker
from shoal.recipes.albert import main
from shoal.train.run import Run
from shoal.train.step import Step

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="this torch has no groups whose members change"
)
DEADLINE_S = 120.0
NUM_WORKERS = 3
HELD, AWAITED = 4, 9
"""A step in which all wait for the test, and one before which they wait for a newcomer, if a file says so."""
PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
PROGRAM = f"""
import sys
sys.path[:0] = {PATHS!r}
from test_elastic_launch import be_launcher, be_worker
{{name}}(*sys.argv[1:])
"""
NOTICE = b'{"action": "terminate", "time": "2026-11-29T08:22:00Z"}'


def program(name: str, *words: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(name=name), *words]


def config_of(folder: Path) -> Any:
    distributed = {"elastic": "1:3", "worker_patience_s": 30}
    return small_config(folder / "text", folder / "run", distributed=distributed)


def be_worker(name: str, *_: str) -> None:
    """Train, from the variables of a launcher; do what the files of the folder say."""
    signal.alarm(int(DEADLINE_S))  # no worker outlives a test whose launcher was killed
    folder, worker = Path(name), worker_env()
    assert worker is not None
    rank, runs = worker.ranks.rank, []

    def die(place: str, of: Run, *_: Any) -> None:
        runs.append(of)
        order = folder / f"die-{rank}-{place}"
        if order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def hold(step: Step, *_: Any) -> None:
        members = step._training.world.members
        assert members is not None
        if step.number == HELD and members.generation == 1:
            (folder / f"held-{rank}").touch()
        while step.number == HELD and members.generation == 1 and (folder / "hold").exists():
            if runs[0].stop_request.requested:
                (folder / f"asked-{rank}").touch()
            time.sleep(0.01)
        while (folder / "await").exists() and step.number == AWAITED and not members.num_waiting():
            if not members.is_first:
                break
            time.sleep(0.01)

    for place in ("keep", "steps"):
        _before(Run, place, partial(die, place))
    _before(Step, "__enter__", hold)
    run_worker(lambda: main(config_of(folder), worker))


def be_launcher(name: str, text: str) -> None:
    """Start workers as ``shoal launch`` does; EC2 gives its notice when there is a file.

    On an emulated host its workers, which another process forks, enter the host by the words ``enter``.
    """
    signal.alarm(int(DEADLINE_S))
    folder, options = Path(name), json.loads(text)
    enter = options.pop("enter", [])
    host = options.get("node_rank", "joined")
    notice = folder / f"notice-{host}"
    spot_notice.POLL_S = 0.1

    def give(service: Service) -> None:
        while not notice.exists():
            time.sleep(0.01)
        service.notice = NOTICE

    with serving() as service:
        os.environ[spot_notice.ENDPOINT] = service.url
        threading.Thread(target=give, args=(service,), daemon=True).start()
        job = {"job": folder / "job", "log_dir": folder / f"logs-{host}"}
        command = [*enter, *program("be_worker", name, "--distributed.elastic", "1:3")]
        code = in_job(command, HostOptions(**options, **job))
    sys.exit(code)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_small(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def expected(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of a run whose workers stay."""
    config = small_config(text, tmp_path_factory.mktemp("fixed") / "run")
    assert run(config, 1) == [0]
    return losses(config.run.dir)


@pytest.fixture
def folder(text: Path, tmp_path: Path) -> Path:
    (tmp_path / "text").symlink_to(text)
    return tmp_path


def until(folder: Path, condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, said(folder)
        time.sleep(0.02)


def num_files(folder: Path, names: str) -> int:
    return len(list(folder.glob(names)))


def said(folder: Path) -> str:
    files = sorted([*folder.glob("launcher-*"), *folder.glob("logs-*/*.err")])
    return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in files)


def launched(folder: Path) -> tuple[int, str]:
    """Run a launcher with all workers to its end; return its exit code and what it has printed."""
    options = {"workers": NUM_WORKERS, "node_rank": 0}
    done = FORKING.run(program("be_launcher", str(folder), json.dumps(options)), capture_output=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("order", ["die-1-keep", pytest.param("die-0-steps", marks=pytest.mark.slow)])
def test_a_worker_is_lost_before_the_first_step(order: str, folder: Path, expected: dict[int, float]) -> None:
    (folder / order).touch()
    code, text = launched(folder)
    assert code == 0, text + said(folder)
    assert "before the first step; all start again (start 2 of 3)" in text
    assert losses(folder / "run") == pytest.approx(expected, rel=1e-6)
    assert changes(config_of(folder)) == []


def test_ec2_takes_the_host_of_all_workers(folder: Path, expected: dict[int, float]) -> None:
    (folder / "hold").touch()

    def give_notice() -> None:
        until(folder, lambda: num_files(folder, "held-*") == NUM_WORKERS)
        (folder / "notice-0").touch()
        until(folder, lambda: num_files(folder, "asked-*") == NUM_WORKERS)
        (folder / "hold").unlink()

    notice = threading.Thread(target=give_notice)
    notice.start()
    code, text = launched(folder)
    notice.join()
    assert code == EXIT_STOPPED, text + said(folder)
    assert "shoal: EC2 takes this instance back (terminate at 2026-11-29T08:22:00Z)" in text
    stops = [row.step for row in record.read_record(folder / "run") if isinstance(row, record.Stop)]
    assert stops == [HELD]
    (folder / "notice-0").unlink()
    code, text = launched(folder)
    assert code == 0, text + said(folder)
    assert losses(folder / "run") == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)
@pytest.mark.parametrize("by", ["notice", "power"])
def test_a_host_leaves_and_comes_back(
    by: str, folder: Path, expected: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "subprocess", FORKING)
    (folder / "hold").touch()
    (folder / "await").touch()
    with Cluster(hosts=NUM_WORKERS) as cluster:

        def start(host: int, **how: Any) -> subprocess.Popen[str]:
            options = {"interface": INTERFACE, "enter": cluster.enter(host), **how}
            argv = program("be_launcher", str(folder), json.dumps(options))
            with (folder / f"launcher-{host}").open("a") as log:
                return cluster.start(host, argv, stdout=log, stderr=log)

        place = {"workers": 1, "nnodes": NUM_WORKERS, "rdzv": f"{cluster.address(0)}:29400"}
        launchers = [start(host, **place, node_rank=host) for host in range(NUM_WORKERS)]
        until(folder, lambda: num_files(folder, "held-*") == NUM_WORKERS)
        if by == "notice":
            (folder / "notice-1").touch()
            until(folder, lambda: num_files(folder, "asked-*"))
            (folder / "notice-1").unlink()
        else:
            end_processes({identity(cluster.enter(1)[1].removeprefix("--net="))}, grace_s=0)
        (folder / "hold").unlink()
        code = launchers[1].wait(DEADLINE_S)
        assert code == (EXIT_STOPPED if by == "notice" else -signal.SIGKILL), said(folder)
        until(folder, lambda: changes(config_of(folder)) == [(3, 2)])
        launchers[1] = start(1, join=True) if by == "power" else start(1, **place, node_rank=1)
        codes = [each.wait(DEADLINE_S) for each in launchers]
    assert codes == [0, 0, 0], said(folder)
    assert losses(folder / "run") == pytest.approx(expected, rel=1e-6)
    assert changes(config_of(folder)) == [(3, 2), (2, 3)]
