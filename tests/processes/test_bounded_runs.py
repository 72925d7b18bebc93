"""Trains recipes whose steps do not wait for all workers: replay of the record's log, resume, refusals."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import job_workers
import pretrain_jobs as jobs
import pytest
import torch
from torch import nn

from forked import fork_process, free_port
from shoal.data.sources import ReaderSource
from shoal.data.steps import DataShard
from shoal.decide.rng import GOLDEN, Stream, random_keys
from shoal.errors import EXIT_OK, EXIT_STOPPED, EXIT_USAGE, UsageError
from shoal.models.pretraining import PRETRAINING_INPUTS, AlbertPretraining
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.optim.moments import clip_factor, norm_of, parameters_of, scale_all
from shoal.optim.sgd import SGD
from shoal.recipes import masked_lm
from shoal.recipes.albert import AlbertConfig
from shoal.record import Checkpoint, Contributions, Step, read_record
from shoal.report.page import write_report
from shoal.train import step as steps
from shoal.train.checkpoint_files import StoredTensor
from shoal.train.optim_config import schedule_of
from shoal.train.optimizers import build_optimizer
from shoal.train.servers import local, waiting
from shoal.train.servers.log import replay, replay_local, summary

WORKERS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


BACKUP = {"mode": "bounded", "wait_for": 2}
STALE = {"mode": "bounded", "staleness": 2}


def settings(
    data: Path, run_dir: Path, servers: dict[str, Any], *, backend: str = "shoal", **changes: Any
) -> AlbertConfig:
    return jobs.small_config(data, run_dir, distributed={"backend": backend}, servers=servers, **changes)


def _work(config: AlbertConfig, rank: int, num_workers: int, port: int) -> None:
    os.environ["SHOAL_HOST_ID"] = f"host-{rank}"
    job_workers.work(config, rank, num_workers, port)


def start(config: AlbertConfig) -> list[Any]:
    port = free_port()
    return [fork_process(_work, config, rank, WORKERS, port) for rank in range(WORKERS)]


def gradients_of(config: AlbertConfig, model: nn.Module) -> Callable[[int, int], None]:
    """Return what computes the gradient of a rank's part of a batch, as a worker of the recipe does."""
    train, _ = masked_lm.open_text(config, config.data, pairs="order")
    source, batch_size = ReaderSource(reader=train), config.train.global_batch_size

    def backward(rank: int, number: int) -> None:
        part = batch_size // WORKERS
        shard = DataShard(global_batch_size=batch_size, micro_batch_size=part, rank=rank, num_workers=WORKERS)
        key = int(random_keys(config.train.seed, Stream.DROPOUT, rank).item())
        torch.manual_seed((key + number * GOLDEN) & steps._MASK)
        (batches,) = source.open(shard, range(number - 1, number))
        for batch in batches:
            mlm_loss, _, sop_loss, _ = model(**{name: batch[name] for name in PRETRAINING_INPUTS})
            targets = WORKERS * len(batch["masked_ids"])
            ((mlm_loss / targets + sop_loss / batch_size) * float(WORKERS)).backward()

    return backward


def replayed(config: AlbertConfig, log: Path) -> nn.Module:
    """Take the steps of a recipe's log again, in this process."""
    torch.manual_seed(config.train.seed)
    model = AlbertPretraining(config.model)
    optimizer = build_optimizer(model.named_parameters(), config.optim)
    schedule = schedule_of(config.optim, config.optim, config.train.total_steps)
    taken = replay(
        log, model, optimizer, gradients_of(config, model), max_norm=config.optim.max_grad_norm,
        schedule=lambda number: set_learning_rate(optimizer, learning_rate(schedule, number - 1)),
        extrapolation=config.servers.extrapolation,
    )  # fmt: skip
    assert taken == config.train.total_steps
    return model


@pytest.mark.parametrize(
    "servers", [BACKUP, {**BACKUP, "late": "next"}, {**STALE, "extrapolation": 1.0}], ids=str
)
def test_the_log_of_a_run_that_was_killed_is_replayed_to_the_bit(
    data: Path, tmp_path: Path, servers: dict[str, Any]
) -> None:
    config = settings(data, tmp_path / "run", servers, run={"log_frequency": 3})
    workers = start(config)
    jobs.wait_for_checkpoint(tmp_path / "run", 6, workers)
    jobs.kill(workers)
    assert jobs.wait(start(config)) == [EXIT_OK] * WORKERS
    log = tmp_path / "run" / waiting.LOG
    counts = summary(log)  # replay() compares the weights at each checkpoint
    assert replayed(config, log) is not None
    assert counts.num_steps == config.train.total_steps
    assert max(counts.staleness) <= servers.get("staleness", int("late" in servers))
    if "late" not in servers:
        assert sum(counts.used) == servers.get("wait_for", WORKERS) * counts.num_steps
    rows = [row for row in read_record(tmp_path / "run") if isinstance(row, Contributions)]
    assert [row.step for row in rows] == [3, 6, 9, 12]
    assert [sum(column) for column in zip(*(row.used for row in rows), strict=True)] == counts.used
    lines = [row for row in read_record(tmp_path / "run") if isinstance(row, Step)]
    assert [row.step for row in lines] == [3, 6, 9, 12] and lines[-1].samples == 12 * 12
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "of the gradients used" in page and "Staleness" in page


@pytest.mark.parametrize("fragments", [{}, {"fragments": 3, "delay": 1}], ids=str)
def test_local_steps_of_a_run_that_was_killed_end_as_those_of_one_that_was_not(
    data: Path, tmp_path: Path, fragments: dict[str, Any]
) -> None:
    """Each worker's own state is in the checkpoints. Exchanges come early at lines."""
    for name in ("whole", "killed"):
        options = {"mode": "local", "local_steps": 3, "outer_momentum": 0.8, **fragments}
        config = settings(data, tmp_path / name, options, run={"log_frequency": 2})
        workers = start(config)
        if name == "killed":
            jobs.wait_for_checkpoint(tmp_path / name, 6, workers)
            jobs.kill(workers)
            workers = start(config)
        assert jobs.wait(workers) == [EXIT_OK] * WORKERS
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    model = Path("transformers") / "model.safetensors"
    assert (whole / model).read_bytes() == (killed / model).read_bytes()
    assert jobs.losses(whole) == jobs.losses(killed)
    exchanges = [
        [(row["step"], row["weights"]) for row in map(json.loads, log.read_text().splitlines())]
        for log in (whole / local.LOG, killed / local.LOG)
    ]
    assert exchanges[0] == exchanges[1]
    write_report([whole], tmp_path / "report.html")
    more = ", in 3 fragments, 1 step late" if fragments else ""
    assert f"all, once in 3 steps{more}<" in (tmp_path / "report.html").read_text()
    if fragments:
        return
    assert [step for step, _ in exchanges[0]] == [2, 3, 4, 6, 8, 9, 10, 12]
    assert jobs.wait(start(settings(data, killed, {}))) == [EXIT_USAGE] * WORKERS
    assert (
        "the checkpoint holds no optimizer: it cannot be continued" in (killed / "worker-0.log").read_text()
    )


def replayed_rounds(config: AlbertConfig, log: Path) -> int:
    """Make the local steps of a recipe's log again, those that were dropped too, and the exchanges."""
    every = config.servers.local_steps
    assert every is not None
    torch.manual_seed(config.train.seed)
    model = AlbertPretraining(config.model)
    inner = [build_optimizer(model.named_parameters(), config.optim) for _ in range(WORKERS)]
    schedule = schedule_of(config.optim, config.optim, config.train.total_steps)
    backward, parameters = gradients_of(config, model), list(parameters_of(inner[0]))

    def take_step(rank: int, step: int) -> None:
        inner[rank].zero_grad()
        backward(rank, step)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        scale_all(gradients, clip_factor(norm_of(gradients), config.optim.max_grad_norm))
        set_learning_rate(inner[rank], learning_rate(schedule, step - 1))
        inner[rank].step()

    outer = SGD(parameters, lr=config.servers.outer_rate, momentum=0.9, nesterov=True)
    return replay_local(
        log, model, outer, take_step,
        every=every, fragments=config.servers.fragments, delay=config.servers.delay, mix=config.servers.mix,
    )  # fmt: skip


def test_the_log_of_an_asynchronous_run_that_was_killed_is_replayed_to_the_bit(
    data: Path, tmp_path: Path
) -> None:
    options = {"mode": "async", "compensation": 0.04}
    config = settings(data, tmp_path / "run", options, optim={"beta1": 0.0}, run={"log_frequency": 3})
    workers = start(config)
    jobs.wait_for_checkpoint(tmp_path / "run", 6, workers)
    jobs.kill(workers)
    assert jobs.wait(start(config)) == [EXIT_OK] * WORKERS
    torch.manual_seed(config.train.seed)
    model = AlbertPretraining(config.model)
    optimizer = build_optimizer(model.named_parameters(), config.optim)
    schedule = schedule_of(config.optim, config.optim, config.train.total_steps)
    gradient = gradients_of(config, model)

    def backward(rank: int, number: int) -> None:
        set_learning_rate(optimizer, learning_rate(schedule, number - 1))  # by the run's steps
        gradient(rank, number)

    log = tmp_path / "run" / waiting.LOG
    taken = replay(
        log, model, optimizer, backward, max_norm=config.optim.max_grad_norm, compensation=0.04
    )  # compares the weights at each checkpoint
    assert taken == 12 * WORKERS and summary(log).used == [12] * WORKERS
    with pytest.raises(UsageError, match="continue with 3 workers"):
        waiting.StepLog(log).require_workers(2)


@pytest.mark.parametrize(
    "more", [{}, {"late": "next"}, {"fragments": 3, "delay": 1}], ids=["drop", "next", "fragments"]
)
def test_local_steps_with_a_quorum_that_were_killed_are_replayed_to_the_bit(
    data: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    options = {"mode": "local", "local_steps": 3, "wait_for": 2, **more}
    config = settings(data, tmp_path / "run", options, run={"log_frequency": 3})
    workers = start(config)
    jobs.wait_for_checkpoint(tmp_path / "run", 6, workers)
    jobs.kill(workers)
    assert jobs.wait(start(config)) == [EXIT_OK] * WORKERS
    log = tmp_path / "run" / waiting.LOG
    taken = replayed_rounds(config, log)  # compares the weights at each checkpoint
    assert taken == summary(log).num_steps == config.train.total_steps / 3 * more.get("fragments", 1)
    rows = [row for row in read_record(tmp_path / "run") if isinstance(row, Contributions)]
    assert [row.step for row in rows] == [3, 6, 9, 12]
    assert sum(sum(row.used) for row in rows) >= 2 * taken


@pytest.mark.parametrize(
    "servers",
    [BACKUP, STALE, {"mode": "async"}, {"mode": "local", "local_steps": 2, "wait_for": 2}],
    ids=str,
)
def test_a_signal_ends_a_run_before_its_next_line(
    data: Path, tmp_path: Path, servers: dict[str, Any]
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "train": {"total_steps": 100_000},
        "run": {"log_frequency": 50_000, "validation_frequency": 50_000, "checkpoint_frequency": 50_000},
    }
    if servers["mode"] == "async":
        changes["optim"] = {"beta1": 0.0}
    workers = start(settings(data, tmp_path, servers, **changes))
    log = tmp_path / waiting.LOG
    while not log.exists() or len(log.read_text().splitlines()) < 5:
        assert all(worker.is_alive() for worker in workers)
    os.kill(workers[1].pid, signal.SIGTERM)
    assert jobs.wait(workers) == [EXIT_STOPPED] * WORKERS
    (saved,) = [row.step for row in read_record(tmp_path) if isinstance(row, Checkpoint)]
    rounds = saved // servers.get("local_steps", 1)
    assert summary(log).num_steps == (WORKERS if servers["mode"] == "async" else 1) * rounds


def test_fp16_with_stale_gradients_is_refused_where_settings_are_read(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape("mode bounded with train.precision fp16")):
        settings(data, tmp_path, STALE, train={"precision": "fp16"})


@pytest.mark.parametrize(
    ("servers", "changes", "message"),
    [
        ({"mode": "local", "local_steps": 2, "wait_for": 3}, {}, "wait_for 3 must be from 1 to 2 with 3"),
        (
            {"mode": "local", "local_steps": 5, "wait_for": 2},
            {},
            "servers.wait_for with run.log_frequency 1: all workers synchronize at",
        ),
        ({"mode": "bounded", "wait_for": 4}, {}, "wait_for 4 must be from 1 to 3 with 3 workers"),
    ],
)
def test_what_servers_cannot_do_is_named_by_all_workers(
    data: Path, tmp_path: Path, servers: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    config = settings(data, tmp_path, servers, **changes)
    assert jobs.wait(start(config)) == [EXIT_USAGE] * WORKERS
    assert message in (tmp_path / "worker-0.log").read_text()


def test_one_state_for_all_workers_is_none_of_local_steps() -> None:
    model = nn.Linear(2, 2)
    state = local.InnerState(SGD(model.parameters(), lr=0.1), model, rank=0)
    stored = StoredTensor(dtype="F32", size=(2, 2), chunks=())
    of_each = {f"{rank}.momentum_buffer.weight": stored for rank in (0, 1)}
    assert list(state.tensors_to_read(of_each)) == ["0.momentum_buffer.weight"]
    with pytest.raises(UsageError, match=r"continue without --servers\.mode local"):
        state.tensors_to_read({"state.weight.momentum_buffer": stored})
