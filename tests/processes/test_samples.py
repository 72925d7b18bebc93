"""Samples at evaluations: outputs of the step's weights, computed beside training, in record and report."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from subprocess import Popen
from typing import Any

import job_workers
import pretrain_jobs as jobs
import pytest
import torch
import use_jobs
from torch import nn
from transformers import GPT2Config

import finetune_made as made
from forked import fork_process, free_port, wait_for
from shoal import record
from shoal.errors import EXIT_OK, UsageError
from shoal.recipes.using import check_samples
from shoal.record import read_record
from shoal.report.page import render
from shoal.report.runs import load_runs
from shoal.train import beside
from shoal.train.beside import LOG, SAMPLES, Samples, SideProcess
from shoal.train.checkpoint_files import checkpoint_path, list_checkpoints
from shoal.train.config import RunOutputConfig
from shoal.train.reporting import RunLog
from shoal.train.run import Run
from shoal.train.run_dir import DESCRIPTION

PROMPTS = ["The river", "The moon and the stone"]
SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared text, and beside it a model's sizes and prompts."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 96, **SIZES}))
    return jobs.prepare_small(folder)


def run_patiently(config: Any) -> list[int | None]:
    """Run a recipe on two workers; its end waits for the samples however busy the machine is."""
    port = free_port()
    return wait_for([fork_process(_work_patiently, config, rank, port) for rank in range(2)], 500.0)


def _work_patiently(config: Any, rank: int, port: int) -> None:
    beside._SAMPLES_END_S = 1e9
    job_workers.work(config, rank, 2, port)


def run_lm(
    data: Path, run_dir: Path, num_workers: int = 2, **changes: dict[str, Any]
) -> list[record.Samples]:
    """Run a language model whose files of prompts ``changes`` name, and return its samples."""
    config = jobs.small_lm_config(data, data.parent / "config.json", run_dir, **changes)
    assert run_patiently(config) == [EXIT_OK] * 2, said(run_dir)
    assert list_checkpoints(run_dir / SAMPLES) == []
    return [row for row in read_record(run_dir) if isinstance(row, record.Samples)]


def said(run_dir: Path) -> str:
    return (run_dir / "worker-0.log").read_text()


@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}], ids=["replicas", "stages"])
def test_samples_are_those_of_the_weights_and_change_no_bit(
    data: Path, tmp_path: Path, parallel: dict[str, int]
) -> None:
    plain, run_dir, prompts = tmp_path / "plain", tmp_path / "run", data.parent / "prompts.txt"
    assert run_lm(data, plain, parallel=parallel) == []
    if parallel:  # stages are cut by measured times: with the same plan the sums have the same order
        (run_dir / DESCRIPTION).mkdir(parents=True)
        shutil.copy(plain / DESCRIPTION / "pipeline.json", run_dir / DESCRIPTION)
    first, *_ = run_lm(data, run_dir, parallel=parallel, run={"samples": (prompts,)})
    assert jobs.losses(run_dir) == jobs.losses(plain)
    options = ("--model", checkpoint_path(run_dir, 6))
    wanted = use_jobs.lines(tmp_path, "predict", "lm", prompts, *options)
    assert (first.step, first.rows, first.num_rows) == (6, wanted, 2)
    assert [json.loads(line) for line in Path(first.path).read_text().splitlines()] == wanted
    assert "step 6 samples" in said(run_dir) and f"prompt '{PROMPTS[0]}'" in said(run_dir)
    page = render(load_runs([run_dir]))
    assert "after step 6" in page and f"<td>{PROMPTS[1]}</td>" in page


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapters"])
def test_conversations_are_answered_by_a_checkpoint_as_by_the_export(tmp_path: Path, rank: int) -> None:
    if rank:
        pytest.importorskip("peft", reason="needs the extra lora")
    made.write_causal(tmp_path / "model", GPT2Config(**SIZES | {"n_positions": 256}))
    made.write_chats(tmp_path / "train.jsonl", 90, seed=1)
    chat = [{"role": "user", "content": "sun moon"}, {"role": "assistant", "content": "moon"}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"prompt": "sun moon"}) + "\n")
    config = made.lm_config(
        tmp_path / "model", tmp_path / "train.jsonl", (), tmp_path / "run",
        lora={"rank": rank}, run={"samples": (prompts,)},
    )  # fmt: skip
    assert run_patiently(config) == [EXIT_OK] * 2
    (row,) = [row for row in read_record(tmp_path / "run") if isinstance(row, record.Samples)]
    wanted = use_jobs.lines(tmp_path, "predict", "lm", prompts, "--model", tmp_path / "run")
    assert (row.step, row.rows) == (12, wanted)
    assert row.rows[0]["ended"] == "end token"  # that of a turn


def test_samples_that_fail_are_named_and_training_goes_on(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_lm(data, run_dir, run={"samples": (tmp_path / "none.txt",)}) == []
    assert "the samples of step 6 failed (exit code 2)" in said(run_dir)
    assert "none.txt" in (run_dir / SAMPLES / LOG).read_text()


def test_samples_that_are_not_ready_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They leave the next ones out, end with the run, and the run waits for them no longer than it says."""
    started: list[Popen[bytes]] = []

    def stuck(process: SideProcess, words: list[object]) -> None:
        process._child = Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        started.append(process._child)

    monkeypatch.setattr(SideProcess, "start", stuck)
    monkeypatch.setattr(beside, "_SAMPLES_END_S", 0.0)
    model = nn.Linear(2, 2)
    with Run.open(tmp_path / "run") as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.keep(model=model, optimizer=optimizer)
        for _ in run.steps([torch.zeros(2)] * 4, _sizes(), until=1):
            log = run.log
            assert isinstance(log, RunLog)
            samples = Samples(tmp_path / "run", (), run.world)
            samples.ask(1, {"model": model}, log)
            samples._checkpointer.finish()
            samples.ask(2, {"model": model}, log)
            samples.finish(log)
            (child,) = started
            assert child.poll() is None
            samples.close()
            assert child.poll() is not None
            break
    text = capsys.readouterr()
    assert "no samples of step 2: those of step 1 are not ready" in text.out + text.err
    assert "no samples of step 1: they were not ready 0 s after the end" in text.out + text.err
    assert list_checkpoints(tmp_path / "run" / SAMPLES) == []


def _sizes() -> Any:
    from shoal.train.run import Sizes

    return Sizes(global_batch_size=4)


def test_samples_have_the_columns_of_the_run(tmp_path: Path) -> None:
    rows, lines = made.write_texts(tmp_path / "rows.tsv", 4, seed=1), tmp_path / "lines.txt"
    lines.write_text("sun moon\n")
    config = made.texts_config(tmp_path, rows, tmp_path / "run", run={"samples": (rows, lines)})
    check_samples("t5_classify", config)
    with pytest.raises(UsageError, match="sentence1"):
        check_samples("classify", made.classify_config(tmp_path, rows, (), rows, run={"samples": (rows,)}))


def test_what_has_no_samples_is_refused(data: Path, tmp_path: Path) -> None:
    assert "no checkpoint of mask_rcnn before the run ends" in use_jobs.refused(
        "train", "mask_rcnn", "--run.samples", data.parent / "prompts.txt", "--run.dir", tmp_path / "found"
    )
    none = ("--run.samples", tmp_path / "none.txt", "--data.path", data, "--run.dir", tmp_path / "lm")
    refused = use_jobs.refused("train", "lm", *none)
    assert "none.txt" in refused
    with pytest.raises(UsageError, match="is for shoal's recipes"):
        with Run.open(tmp_path / "run", settings=RunOutputConfig(samples=(Path("prompts.txt"),))):
            pass
    with pytest.raises(UsageError, match=r"run\.samples needs weights on disk"):
        RunOutputConfig(samples=(Path("prompts.txt"),), save=False)
