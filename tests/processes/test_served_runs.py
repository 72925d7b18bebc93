"""Trains recipes with weights on servers (``shoal.train.servers.update``): exact record, model and resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import job_workers
import pretrain_jobs as jobs
import pytest
import torch
from safetensors.torch import load_file

from forked import fork_process, free_port
from shoal.errors import EXIT_OK
from shoal.recipes.bert import BertConfig
from shoal.record import Step, read_record


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


def settings(
    data: Path, run_dir: Path, *, mode: str = "sync", weights: str = "fp32", **changes: Any
) -> BertConfig:
    servers = {"mode": mode, "weights": weights}
    return jobs.small_bert_config(data, run_dir, distributed={"backend": "shoal"}, servers=servers, **changes)


def _work(config: BertConfig, rank: int, num_workers: int, port: int) -> None:
    os.environ["SHOAL_HOST_ID"] = f"host-{rank}"
    job_workers.work(config, rank, num_workers, port)


def start(config: BertConfig, num_workers: int = 2) -> list[Any]:
    """Start a job of one worker per host."""
    port = free_port()
    return [fork_process(_work, config, rank, num_workers, port) for rank in range(num_workers)]


def steps(run_dir: Path) -> list[tuple[Any, ...]]:
    rows = {row.step: row for row in read_record(run_dir) if isinstance(row, Step)}
    return [(n, row.loss, row.grad_norm, row.weight_norm, row.learning_rate) for n, row in rows.items()]


def test_a_served_run_that_was_killed_ends_as_one_whose_workers_step(data: Path, tmp_path: Path) -> None:
    """BERT's two phases: the second begins with a fresh optimizer, whose state the servers then have."""
    whole, served = tmp_path / "whole", tmp_path / "served"
    assert jobs.wait(start(settings(data, whole, mode="off"))) == [EXIT_OK, EXIT_OK]
    workers = start(settings(data, served))
    jobs.wait_for_checkpoint(served, 9, workers)
    jobs.kill(workers)
    assert jobs.wait(start(settings(data, served))) == [EXIT_OK, EXIT_OK]
    assert steps(served) == steps(whole)
    model = Path("transformers") / "model.safetensors"
    assert (served / model).read_bytes() == (whole / model).read_bytes()


def test_weights_that_come_in_bf16_are_float32_in_checkpoints_and_exports(data: Path, tmp_path: Path) -> None:
    """A killed run goes on from the servers' weights, not from the rounded ones of workers."""
    whole, killed, full = (tmp_path / name for name in ("whole", "killed", "full"))
    assert jobs.wait(start(settings(data, whole, weights="bf16"))) == [EXIT_OK, EXIT_OK]
    workers = start(settings(data, killed, weights="bf16"))
    jobs.wait_for_checkpoint(killed, 9, workers)
    jobs.kill(workers)
    assert jobs.wait(start(settings(data, killed, weights="bf16"))) == [EXIT_OK, EXIT_OK]
    assert steps(killed) == steps(whole)
    model = Path("transformers") / "model.safetensors"
    assert (killed / model).read_bytes() == (whole / model).read_bytes()
    tensors = load_file(whole / model)
    assert any(not torch.equal(each, each.bfloat16().float()) for each in tensors.values())
    assert jobs.wait(start(settings(data, full))) == [EXIT_OK, EXIT_OK]
    assert steps(full)[1] != steps(whole)[1], "the second forward pass has rounded weights"


@pytest.mark.slow
def test_three_workers_and_servers_take_the_same_steps(data: Path, tmp_path: Path) -> None:
    """A third is rounded: dividing by 3 and multiplying by 1 / 3 have other bits."""
    for mode in ("off", "sync"):
        assert jobs.wait(start(settings(data, tmp_path / mode, mode=mode), 3)) == [EXIT_OK] * 3
    assert steps(tmp_path / "sync") == steps(tmp_path / "off")
