"""Tests that settings with which workers cannot change are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.decide.batch import StagesConfig
from shoal.errors import UsageError
from shoal.recipes.albert import AlbertConfig
from shoal.recipes.t5 import T5Config
from shoal.train.config import (
    DistributedConfig,
    LoopConfig,
    RunOutputConfig,
    ServersConfig,
    check_combination,
)
from shoal.train.run import Settings, _check_features

ELASTIC = DistributedConfig(elastic="2:4")


@pytest.mark.parametrize("other", [{"wire": "int8"}, {"backend": "gloo"}, {"shares": "by-speed"}])
def test_other_ways_to_communicate(other: dict[str, Any]) -> None:
    ((name, value),) = other.items()
    with pytest.raises(UsageError, match=f"distributed.elastic does not go with distributed.{name} {value}"):
        DistributedConfig(elastic="2:4", **other)
    DistributedConfig(**other)


@pytest.mark.parametrize(
    ("loop", "servers", "named"),
    [
        (LoopConfig(shard_optimizer=True), ServersConfig(), "train.shard_optimizer"),
        (LoopConfig(), ServersConfig(mode="sync"), "servers.mode sync"),
    ],
)
def test_state_that_is_not_whole_on_each_worker(loop: LoopConfig, servers: ServersConfig, named: str) -> None:
    with pytest.raises(UsageError, match=f"distributed.elastic does not go with {named}"):
        check_combination(loop, ELASTIC, servers, clip="global")
    check_combination(LoopConfig(), ELASTIC, ServersConfig(), clip="global")


@pytest.mark.parametrize("parallel", [StagesConfig(pipeline=2), StagesConfig(shard=True)])
def test_stages_and_shards(parallel: StagesConfig) -> None:
    with pytest.raises(UsageError, match=r"distributed\.elastic 2:4 does not go with a model in stages"):
        AlbertConfig(parallel=parallel, distributed=ELASTIC)


def test_stages_of_t5() -> None:
    with pytest.raises(UsageError, match=r"distributed\.elastic 2:4: the stages of T5"):
        T5Config(distributed=ELASTIC)


@pytest.mark.parametrize(
    ("config", "output", "named"),
    [
        (
            SimpleNamespace(parallel=StagesConfig(pipeline=2)),
            RunOutputConfig(),
            "a model in stages or shards",
        ),
        (SimpleNamespace(finetune=SimpleNamespace(at=(5,))), RunOutputConfig(), "finetune.at"),
        (None, RunOutputConfig(validation_beside=1), "run.validation_beside"),
    ],
)
def test_other_work_of_a_run(config: Any, output: RunOutputConfig, named: str) -> None:
    def settings(distributed: DistributedConfig) -> Settings:
        return Settings(
            config=config,
            output=output,
            loop=LoopConfig(),
            distributed=distributed,
            servers=ServersConfig(),
        )

    _check_features(settings(DistributedConfig()))
    with pytest.raises(UsageError, match=f"does not go with {named}"):
        _check_features(settings(ELASTIC))


def test_a_patience_that_is_not_above_0() -> None:
    with pytest.raises(UsageError, match=r"distributed\.worker_patience_s"):
        DistributedConfig(worker_patience_s=0)
