"""Tests the choice of a run's update: each mode has one, and only the chosen one is imported."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any, get_args, get_type_hints

import pytest
import torch

from shoal.errors import UsageError
from shoal.train.config import ServersConfig
from shoal.train.gradients import Update
from shoal.train.servers.choice import _MODES
from shoal.train.servers.update import update_of_run


def test_each_mode_has_an_update() -> None:
    modes = set(get_args(get_type_hints(ServersConfig)["mode"]))
    assert set(_MODES) == modes - {"off"}
    for mode, text in _MODES.items():
        module, _, function = text.partition(":")
        update = get_type_hints(getattr(import_module(module), function))["return"]
        assert issubclass(update, Update), mode


def test_a_run_without_servers_imports_no_mode() -> None:
    program = "import sys, shoal.train.run; print(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name for name in child.stdout.split() if name.startswith("shoal.train.servers.")}
    assert loaded == {"shoal.train.servers.choice"}


def test_rounded_weights_are_not_averaged() -> None:
    config, model = ServersConfig(mode="sync", weights="bf16"), Any
    with pytest.raises(UsageError, match=r"servers\.weights bf16 with an average of weights"):
        update_of_run(model, model, config, directory=None, own=[torch.ones(1)])  # type: ignore[arg-type]
