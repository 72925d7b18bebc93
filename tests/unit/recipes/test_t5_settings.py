"""T5's settings: presets, schedule, how workers and batches are divided, and what cannot be."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from shoal.decide.batch import BatchPlan
from shoal.decide.footprint import Numerics
from shoal.errors import UsageError
from shoal.models.text_config import T5ModelConfig
from shoal.optim.lr_schedules import learning_rate
from shoal.recipes.memory import MemoryCount, activations_of
from shoal.recipes.t5 import (
    PRESETS,
    DataConfig,
    T5Config,
    T5OptimConfig,
    check,
    find_layouts,
    sample,
    with_layout,
)
from shoal.train.config import (
    DistributedConfig,
    ParallelConfig,
    RunConfig,
    ServersConfig,
    TrainConfig,
)
from synthetic_text import prepare, random_documents


def preset(name: str, **sections: dict[str, Any]) -> T5Config:
    file = resources.files("shoal.recipes") / "presets" / "t5" / f"{name}.toml"
    tree = tomllib.loads(file.read_text(encoding="utf-8"))
    kinds = {
        "model": T5ModelConfig,
        "data": DataConfig,
        "train": TrainConfig,
        "optim": T5OptimConfig,
        "parallel": ParallelConfig,
        "run": RunConfig,
        "distributed": DistributedConfig,
        "servers": ServersConfig,
    }
    return T5Config(**{s: kind(**{**tree.get(s, {}), **sections.get(s, {})}) for s, kind in kinds.items()})


def plan(config: T5Config, num_workers: int) -> BatchPlan:
    return config.parallel.plan(config.train, num_workers)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_settings(name: str) -> None:
    config = preset(name)
    assert config.spans().num_spans <= 100
    if name != "tiny":
        spans = config.spans()
        assert (spans.num_tokens, spans.input_length, spans.target_length) == (568, 512, 114)
        assert config.train.total_steps * config.train.global_batch_size == 2_048_000_000


def test_the_rate_is_that_of_the_paper() -> None:
    schedule = preset("3b").optim.schedule
    assert [learning_rate(schedule, step) for step in (0, 9_999, 10_000)] == pytest.approx([0.01] * 3)
    assert learning_rate(schedule, 1_000_000) == pytest.approx(0.001)


def test_workers_are_stages_times_replicas() -> None:
    config = preset("3b", parallel={"pipeline": 8, "data": 256})
    batch = plan(config, 2_048)
    assert (batch.num_workers, batch.micro_batch_size, batch.accumulation_steps) == (256, 1, 8)
    assert plan(preset("3b", parallel={"pipeline": 8, "micro_batches": 4}), 2_048).micro_batch_size == 2
    assert plan(preset("base"), 16).micro_batch_size == 64


@pytest.mark.parametrize(
    ("sections", "num_workers", "message"),
    [
        ({"parallel": {"pipeline": 3}}, 8, "pipeline 3 does not divide the 8 workers"),
        ({"parallel": {"pipeline": 2, "data": 3}}, 8, "pipeline 2 × parallel.data 3 are 6 workers"),
        ({"parallel": {"micro_batches": 3}}, 8, "micro_batches 3 does not divide a replica's share of 256"),
        (
            {"parallel": {"micro_batches": 4}, "train": {"micro_batch_size": 2}},
            8,
            "make micro-batches of 64 sequences, but train.micro_batch_size is 2",
        ),
    ],
)
def test_layouts_that_cannot_be(sections: dict[str, Any], num_workers: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(preset("base", **sections), num_workers)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"train": {"precision": "fp16"}, "distributed": {"wire": "int8"}},
            r"wire int8 with train\.precision fp16",
        ),
        (
            {"distributed": {"shares": "by-speed"}},
            "by-speed: the stages of T5 are built for parts of one size",
        ),
        ({"servers": {"mode": "sync"}}, "servers.mode sync: T5 adds its gradients up itself"),
        (
            {"servers": {"mode": "bounded", "staleness": 1}, "parallel": {"pipeline": 2}},
            "mode bounded does not go with a model in stages or shards: each stage would have servers",
        ),
        (
            {"distributed": {"wire": "int8"}, "parallel": {"shard": True}},
            "wire int8: its residuals would take the memory that parallel.shard saves",
        ),
        ({"data": {"noise_density": 0.0}}, "noise_density 0.0 must lie between"),
        ({"parallel": {"pipeline": 0}}, "parallel.pipeline 0 must be at least 1"),
        ({"parallel": {"virtual_stages": 2}}, "virtual_stages 2 needs a pipeline"),
        ({"parallel": {"memory": "much"}}, "parallel.memory 'much' must be a number with a unit"),
        ({"optim": {"hold_steps": 0}}, "optim.hold_steps 0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        preset("tiny", **sections)


def test_sentinels_need_rows_of_the_embedding(tmp_path: Path) -> None:
    prepare(tmp_path, {"train": random_documents([900, 700], vocab_size=2_077)}, vocab_size=2_077)
    with pytest.raises(UsageError, match="2077 tokens and 100 sentinels, the model one of 2176"):
        check(preset("tiny", data={"path": tmp_path}), 1, dry_run=MemoryCount())


def test_a_dry_run_says_what_would_be(tmp_path: Path) -> None:
    prepare(tmp_path, {"train": random_documents([900, 700], vocab_size=2_000)}, vocab_size=2_000)
    config = preset("tiny", data={"path": tmp_path}, parallel={"pipeline": 2}, run={"dir": tmp_path / "run"})
    lines = check(config, 4, dry_run=MemoryCount())
    assert "layout       2 pipeline × 2 data" in lines
    assert "batch        4 sequences × 8 micro-batches × 2 replicas = 64 sequences a step" in lines
    assert any("70 tokens of text, 10 of them in 3 spans: inputs of 64, targets of 14" in s for s in lines)
    other = preset("tiny", data={"path": tmp_path}, parallel={"pipeline": 2, "devices": 8, "memory": "1GB"})
    lines = check(other, 4, dry_run=MemoryCount())
    assert "layout       2 pipeline × 4 data" in lines
    assert (
        "T5 on 8 A100-40GB of 1GB, by a cost model" in lines[-1] and "why: the fastest that fits" in lines[-1]
    )
    with pytest.raises(UsageError, match="--devices 8 plans for other devices than the 4 workers here"):
        check(other, 4, dry_run=None)


def test_a_layout_is_found_explained_and_settled() -> None:
    """A device that holds the whole model takes it whole; one that does not gets stages."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    parallel = {"layout": "auto", "memory": "40GB", "schedule": "1f1b"}
    sections = {"model": sizes, "train": {"micro_batch_size": 4, "global_batch_size": 32}}
    config = preset("tiny", **sections, parallel=parallel)
    whole = find_layouts(config, 2)
    assert (whole[0].layout.stages, whole[0].data) == (1, 2)
    counted = activations_of(sample(config), Numerics.FP32).of(4)  # the preset's precision, as in a plan
    assert sum(stage.saved_bytes for stage in whole[0].stages) == pytest.approx(counted, rel=1e-3)
    limit = int(0.9 * max(whole[0].choice.rank_bytes))
    tight = preset("tiny", **sections, parallel={**parallel, "memory": str(limit)})
    layouts = find_layouts(tight, 2)
    assert layouts[0].layout.stages == 2 and max(layouts[0].choice.rank_bytes) <= limit
    batch = plan(with_layout(tight, layouts[0]), 2)
    assert (batch.num_workers, batch.micro_batch_size, batch.accumulation_steps) == (1, 4, 8)
    with pytest.raises(UsageError, match="no layout of 2 devices"):
        find_layouts(preset("tiny", **sections, parallel={**parallel, "memory": "1MB"}), 2)
