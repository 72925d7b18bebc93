"""Tests the settings of updates by servers: what each mode takes, and which gradients its steps take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.optim import SGD

from shoal.decide.bounded_waiting import WaitingRule
from shoal.errors import UsageError
from shoal.optim.lans import Lans
from shoal.recipes.bert import BertConfig
from shoal.train import optim_config
from shoal.train.config import (
    _MODES,
    _MODES_OF,
    DistributedConfig,
    LoopConfig,
    ServersConfig,
    check_combination,
)
from shoal.train.gradients import DataParallel
from shoal.train.optim_config import PhasesOptimConfig
from shoal.train.servers import choice, rules

BOUNDED: dict[str, Any] = {"mode": "bounded"}
LOCAL: dict[str, Any] = {"mode": "local", "local_steps": 4}


def test_every_option_says_which_modes_have_it() -> None:
    assert set(_MODES_OF) == {field.name for field in fields(ServersConfig)} - {"mode"}
    assert {mode for modes in _MODES_OF.values() for mode in modes} == set(_MODES) - {"off"}


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"mode": "asynchronous"}, "mode 'asynchronous' must be one of off, sync, bounded, async, local"),
    ({"wait_for": 2}, "wait_for 2 is for --servers.mode bounded or local, not for mode off"),
    ({"late": "next"}, "late next is for"),
    ({"grace_s": 1.0}, "grace_s 1.0 is for"),
    ({"replicas": 2}, "replicas 2 is for --servers.mode sync or bounded or async or local"),
    ({"mode": "sync", "weights": "fp16"}, "weights 'fp16' must be one of fp32, bf16"),
    ({**BOUNDED, "staleness": 1, "weights": "bf16"}, "weights bf16 is for --servers.mode sync, not for"),
    ({"mode": "sync", "replicas": 3}, "replicas 3 must be one of 1, 2"),
    ({"mode": "sync", "staleness": 1}, "staleness 1 is for --servers.mode bounded, not for mode sync"),
    ({"mode": "async", "staleness": 1}, "staleness 1 is for"),
    ({"mode": "async", "wait_for": 2}, "wait_for 2 is for"),
    ({**BOUNDED, "staleness": 1, "compensation": 0.04}, "compensation 0.04 is for --servers.mode async"),
    (BOUNDED, "set --servers.wait-for or --servers.staleness; mode sync waits for all"),
    ({**BOUNDED, "wait_for": 0}, "wait_for 0 must be at least 1"),
    ({**BOUNDED, "wait_for": 2, "late": "soon"}, "late 'soon' must be one of drop, next"),
    ({**BOUNDED, "wait_for": 2, "grace_s": -1.0}, "grace_s -1.0 must be at least 0"),
    ({**BOUNDED, "staleness": 1, "late": "next"}, "no gradient is late"),
    ({**BOUNDED, "staleness": 1, "grace_s": 1.0}, "no gradient is late"),
    ({**BOUNDED, "wait_for": 2, "staleness": 1}, "gradients that are dropped have none"),
    ({**BOUNDED, "wait_for": 2, "late": "partial"}, "partial is for local steps"),
    ({**LOCAL, "wait_for": 2, "late": "partial"}, "late partial with grace_s 0"),
    ({**BOUNDED, "staleness": -1}, "at least 0"),
    ({**BOUNDED, "staleness": 0}, "each step would wait for all workers; give at least 1"),
    ({**BOUNDED, "wait_for": 2, "extrapolation": 1.0}, "set --servers.staleness, without wait-for"),
    ({"mode": "local"}, "set --servers.local-steps"),
    ({**LOCAL, "staleness": 1}, "staleness 1 is for --servers.mode bounded, not for mode local"),
    ({**LOCAL, "outer_momentum": 1.0}, "below 1"),
    ({"fragments": 2}, "fragments 2 is for --servers.mode local"),
    (
        {**LOCAL, "fragments": 2, "wait_for": 2, "late": "next"},
        "late next with fragments 2: the next exchange is of another fragment than the late change",
    ),
    ({**LOCAL, "fragments": 0}, "at least 1"),
    ({**LOCAL, "fragments": 5}, "fragments 5 in every 4 local steps: .* give 1 to 4"),
    ({**LOCAL, "fragments": 2, "delay": 3}, "give 0 to 2"),
    ({**LOCAL, "delay": 1, "mix": 1.0}, "mix 1.0 must be at least 0 and below 1"),
]


@pytest.mark.parametrize(("given", "message"), CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ServersConfig(**given)


@pytest.mark.parametrize("given", [given for given, _ in CONTRADICTIONS])
def test_no_other_module_checks_the_options_of_a_mode(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServersConfig, "__post_init__", lambda self: None)
    servers = ServersConfig(**given)
    BertConfig(servers=servers, optim=PhasesOptimConfig(optimizer="adafactor"))
    choice._check_run(servers, {"optimizer": SGD([torch.ones(1)])}, [Averaging()])


class Averaging(DataParallel):
    """Stands for a wrapped model, whose gradients are averaged or not."""

    def __init__(self, average: bool = True) -> None:
        self.average = average


MODE = ServersConfig(mode="async")


@pytest.mark.parametrize(
    ("rule", "of_settings", "of_objects"),
    [
        (
            ("check_clip", choice),
            lambda: BertConfig(servers=MODE, optim=PhasesOptimConfig(clip="worker", beta1=0.0)),
            lambda: choice._check_run(MODE, {"optimizer": SGD([torch.ones(1)])}, [Averaging(False)]),
        ),
        (
            ("check_delayed_momentum", rules),
            lambda: BertConfig(servers=MODE, optim=PhasesOptimConfig(beta1=0.5)),
            lambda: rules.check_momentum(SGD([torch.ones(1)], momentum=0.5), MODE),
        ),
        (
            ("check_normalised", rules),
            lambda: BertConfig(servers=MODE, optim=PhasesOptimConfig(optimizer="lans", beta1=0.0)),
            lambda: rules.check_max_norm(Lans([torch.ones(1)], lr=0.1), 1.0),
        ),
    ],
)
def test_settings_and_objects_meet_the_same_rule(
    rule: tuple[str, Any],
    of_settings: Callable[[], object],
    of_objects: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, second = rule
    for check in (of_settings, of_objects):
        with pytest.raises(UsageError):
            check()
    for module in (optim_config, second):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    of_settings()
    of_objects()


def test_the_wire_and_the_shares_go_with_the_mode() -> None:
    backup, sync = ServersConfig(mode="bounded", wait_for=2), ServersConfig(mode="sync")
    for servers in (backup, sync):
        with pytest.raises(UsageError, match="gradients go to the servers in fp32"):
            check_combination(
                LoopConfig(precision="fp32"), DistributedConfig(wire="bf16"), servers, clip="global"
            )
        with pytest.raises(UsageError, match=r"distributed\.backend gloo: servers belong to backend shoal"):
            check_combination(LoopConfig(), DistributedConfig(backend="gloo"), servers, clip="global")
        check_combination(
            LoopConfig(), DistributedConfig(backend="cpu:gloo,cuda:shoal"), servers, clip="global"
        )
    for servers in (sync, backup):
        static = LoopConfig(precision="fp16", loss_scale=1024.0)
        check_combination(static, DistributedConfig(), servers, clip="global")
    check_combination(LoopConfig(precision="fp16"), DistributedConfig(), sync, clip="global")
    with pytest.raises(UsageError, match="a dynamic loss scale follows each step of all workers"):
        check_combination(LoopConfig(precision="fp16"), DistributedConfig(), backup, clip="global")
    by_speed = DistributedConfig(shares="by-speed")
    check_combination(LoopConfig(precision="fp32"), by_speed, sync, clip="global")
    with pytest.raises(UsageError, match="have equal parts"):
        check_combination(LoopConfig(precision="fp32"), by_speed, backup, clip="global")


@pytest.mark.parametrize(
    ("given", "optim", "message"),
    [
        ({"mode": "sync"}, {"clip": "worker"}, "servers.mode sync with optim.clip worker"),
        (LOCAL, {"clip": "worker"}, "servers.mode local with optim.clip worker"),
        (
            {"mode": "sync"},
            {"optimizer": "lans"},
            r"max_grad_norm 1.0 with LANS.*--optim\.max-grad-norm none",
        ),
        ({**BOUNDED, "staleness": 1}, {"optimizer": "lans"}, "mode bounded with optim.max_grad_norm 1.0"),
        ({"mode": "async"}, {}, r"with optim\.beta1 0\.9: with momentum.*set it to 0, or"),
        ({"mode": "async"}, {"optimizer": "adamw", "beta1": 0.5}, r"with optim\.beta1 0\.5"),
    ],
)
def test_optimizers_that_servers_cannot_step_are_named_before_the_start(
    given: dict[str, Any], optim: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        BertConfig(servers=ServersConfig(**given), optim=PhasesOptimConfig(**optim))


@pytest.mark.parametrize(
    ("given", "optim"),
    [
        ({"mode": "sync"}, {"optimizer": "adafactor"}),
        ({"mode": "sync"}, {"optimizer": "lans", "max_grad_norm": None}),
        ({"mode": "async"}, {"optimizer": "adafactor"}),
        ({"mode": "async"}, {"beta1": 0.0}),
        (LOCAL, {"optimizer": "lans"}),
        ({}, {"clip": "worker", "optimizer": "lans"}),
    ],
)
def test_optimizers_that_servers_can_step(given: dict[str, Any], optim: dict[str, Any]) -> None:
    BertConfig(servers=ServersConfig(**given), optim=PhasesOptimConfig(**optim))


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"mode": "async"}, WaitingRule(3, 1, "next", asynchronous=True)),
        ({**BOUNDED, "wait_for": 2}, WaitingRule(3, 2)),
        ({**BOUNDED, "wait_for": 3}, WaitingRule(3, 3)),
        ({**BOUNDED, "wait_for": 2, "late": "next"}, WaitingRule(3, 2, "next", 1)),
        ({**BOUNDED, "wait_for": 2, "late": "next", "staleness": 3}, WaitingRule(3, 2, "next", 3)),
        ({**BOUNDED, "staleness": 2}, WaitingRule(3, 3, staleness=2)),
        ({**LOCAL, "wait_for": 2, "grace_s": 0.5}, WaitingRule(3, 2, grace_s=0.5)),
    ],
)
def test_the_gradients_that_a_step_takes(given: dict[str, Any], rule: WaitingRule) -> None:
    assert ServersConfig(**given).rule(3) == rule


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**BOUNDED, "wait_for": 4}, "wait_for 4 must be from 1 to 3 with 3 workers"),
        ({**LOCAL, "wait_for": 3}, "wait_for 3 must be from 1 to 2 with 3 workers"),
        ({**BOUNDED, "wait_for": 3, "late": "next"}, "no gradient of 3 workers is late"),
        ({**BOUNDED, "wait_for": 3, "grace_s": 1.0}, "no gradient of 3 workers is late"),
    ],
)
def test_rules_that_the_number_of_workers_forbids(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ServersConfig(**given).rule(3)
