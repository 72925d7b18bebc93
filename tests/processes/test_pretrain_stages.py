"""ALBERT and BERT pretrained in stages and shards: the same runs as those of one worker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pretrain_jobs as jobs
import pytest
from safetensors.torch import load_file

from shoal import record
from shoal.errors import EXIT_OK, UsageError
from shoal.recipes.albert import AlbertConfig
from shoal.recipes.bert import BertConfig
from shoal.record import read_record

LAST = 6
SAME = {"rel": 1e-6}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


def albert(data: Path, run_dir: Path, **parallel: Any) -> AlbertConfig:
    return jobs.small_config(
        data,
        run_dir,
        model={"hidden_dropout_prob": 0.1},
        train={"total_steps": LAST, "micro_batch_size": 3},
        run={"validation_samples": 20},
        parallel=parallel,
    )


def bert(data: Path, run_dir: Path, **parallel: Any) -> BertConfig:
    return jobs.small_bert_config(
        data,
        run_dir,
        phase1={"total_steps": LAST, "micro_batch_size": 3},
        phase2={"total_steps": 0},
        run={"validation_samples": 20},
        parallel=parallel,
    )


MAKERS = {"albert": albert, "bert": bert}


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one worker that has the whole model."""
    folder = tmp_path_factory.mktemp("whole")
    for name, make in MAKERS.items():
        assert jobs.run(make(data, folder / name), 1) == [EXIT_OK]
    return {name: folder / name for name in MAKERS}


def assert_same_run(found: Path, wanted: Path) -> None:
    assert jobs.losses(found) == pytest.approx(jobs.losses(wanted), **SAME)
    scores = [
        {row.step: row.metrics for row in read_record(run) if isinstance(row, record.Evaluation)}
        for run in (found, wanted)
    ]
    assert scores[0].keys() == scores[1].keys()
    for step, metrics in scores[0].items():
        assert metrics == pytest.approx(scores[1][step], rel=2e-6)
    weights, others = (load_file(run / "transformers" / "model.safetensors") for run in (found, wanted))
    least = 1e-3 * max(float(value.abs().max()) for value in others.values())  # the bias of keys is rounding
    for name, value in others.items():
        if name in weights:  # of a tied weight each has one name
            assert (weights[name] - value).abs().max() <= 1e-5 * max(float(value.abs().max()), least), name
    assert len(weights.keys() & others.keys()) > 10


@pytest.mark.parametrize(
    ("name", "num_workers", "parallel"),
    [
        pytest.param("albert", 4, {"pipeline": 2}, id="albert, 2 stages × 2 replicas"),
        pytest.param("bert", 4, {"pipeline": 2}, id="bert, 2 stages × 2 replicas", marks=pytest.mark.slow),
        pytest.param("albert", 2, {"shard": True}, id="albert, 2 shards", marks=pytest.mark.slow),
        pytest.param("bert", 2, {"shard": True}, id="bert, 2 shards"),
        pytest.param(
            "bert", 4, {"pipeline": 2, "shard": True}, id="bert, 2 × 2 shards", marks=pytest.mark.slow
        ),
    ],
)
def test_every_layout_trains_what_one_worker_trains(
    name: str, num_workers: int, parallel: dict[str, Any], data: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    config = MAKERS[name](data, tmp_path / "run", **parallel)
    assert jobs.run(config, num_workers) == [EXIT_OK] * num_workers
    assert_same_run(tmp_path / "run", whole[name])


def num_norms(run: Path) -> int:
    """Return the layer norms that the first worker computed forward in the profiled step."""
    (trace,) = run.glob("profile-steps-*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    return sum(event["name"] == "aten::native_layer_norm" for event in events)


def test_shards_recompute_activations(data: Path, whole: dict[str, Path], tmp_path: Path) -> None:
    config = MAKERS["bert"](data, tmp_path / "run", shard=True)
    config = jobs.changed(config, {"model": {"activation_checkpointing": True}, "run": {"profile": 1}})
    assert jobs.run(config, 2) == [EXIT_OK] * 2
    assert_same_run(tmp_path / "run", whole["bert"])
    assert num_norms(tmp_path / "run") == 2 * (
        2 + 2 * 4
    )  # of 2 micro-batches: embeddings, head, and 2 layers twice


@pytest.mark.parametrize("name", ["albert", pytest.param("bert", marks=pytest.mark.slow)])
def test_stages_recompute_activations(name: str, data: Path, whole: dict[str, Path], tmp_path: Path) -> None:
    config = MAKERS[name](data, tmp_path / "run", pipeline=2)
    config = jobs.changed(config, {"model": {"activation_checkpointing": True}})
    assert jobs.run(config, 2) == [EXIT_OK] * 2
    assert_same_run(tmp_path / "run", whole[name])


@pytest.mark.slow
def test_a_run_goes_on_in_stages(data: Path, whole: dict[str, Path], tmp_path: Path) -> None:
    run_dir = jobs.copy_without_end(whole["albert"], tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints" / f"step-{LAST:08}")
    assert jobs.run(albert(data, run_dir, pipeline=2), 2) == [EXIT_OK] * 2
    assert_same_run(run_dir, whole["albert"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"pipeline": 2}}, "train each phase as a run of its own"),
        ({"phase2": {"total_steps": 0}, "parallel": {"micro_batches": 2}}, "micro_batches needs a pipeline"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        jobs.small_bert_config(tmp_path, tmp_path / "run", **changes)
