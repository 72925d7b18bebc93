"""Causal language models in stages, in shards and in parts of layers: the runs of one worker."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import job_workers
import pretrain_jobs as jobs
import pytest
from safetensors.torch import load_file
from test_elastic import _before as before
from test_pretrain_lm import COMMON, WIDE
from test_pretrain_lm import MODELS as CAUSAL
from transformers import LlamaConfig

from forked import fork_process, free_port
from shoal import record
from shoal.errors import EXIT_OK, UsageError
from shoal.recipes.export import export_model
from shoal.recipes.lm import LmConfig
from shoal.record import read_record
from shoal.train.checkpoint_files import checkpoint_path, step_of
from shoal.train.step import Step

SAME = 1e-6
PLAIN = LlamaConfig(**COMMON, **WIDE, num_key_value_heads=2)
NEWER = ("qwen3", "gemma3")
MODELS = {name: CAUSAL[name] for name in ("gpt2", "llama", *NEWER)} | {"plain": PLAIN}
"""Two with dropout, and three whose layers divide: their attention has none."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json of each kind."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        MODELS[name].save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def whole(data: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one worker that has the whole model."""
    return WholeRuns(data, models, tmp_path_factory.mktemp("whole"))


class WholeRuns(dict[str, Path]):
    """Run directories by the name of the model, trained as they are looked up."""

    def __init__(self, data: Path, models: Path, folder: Path) -> None:
        super().__init__()
        self._data, self._models, self._folder = data, models, folder

    def __missing__(self, name: str) -> Path:
        run_dir = self[name] = self._folder / name
        assert jobs.run(lm(name, self._data, self._models, run_dir, run=ALL), 1) == [EXIT_OK]
        return run_dir


Runs = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def in_layout(data: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return what gives the run of a model in a layout, which is made once and keeps all checkpoints."""

    @functools.cache
    def run(layout: str, name: str) -> Path:
        (num_workers, parallel), run_dir = LAYOUTS[layout], tmp_path_factory.mktemp("layout") / "run"
        train = {"micro_batch_size": None} if "micro_batches" in parallel else {}
        config = lm(name, data, models, run_dir, parallel=parallel, train=train, run=OFTEN)
        assert jobs.run(config, num_workers) == [EXIT_OK] * num_workers, said(run_dir)
        return run_dir

    return run


ALL = {"keep_checkpoints": 20}
OFTEN = {"checkpoint_frequency": 1, **ALL}


def said(run_dir: Path) -> str:
    return (run_dir / "worker-0.log").read_text()


def lm(name: str, data: Path, models: Path, run_dir: Path, **changes: dict[str, Any]) -> LmConfig:
    """Return the settings of a model with its own dropout, whose last held-out batch is not full."""
    changes = {"model": {"dropout": None}, "optim": {"z_loss": 1e-3}, **changes}
    changes["run"] = {"validation_samples": 20, "layer_norms": True, **changes.get("run", {})}
    return jobs.small_lm_config(data, models / name / "config.json", run_dir, **changes)


def layer_norms(run: Path) -> dict[int, dict[str, float]]:
    return {row.step: row.layer_norms for row in read_record(run) if isinstance(row, record.Step)}


def assert_same_run(found: Path, wanted: Path, *, most: float = SAME) -> None:
    assert jobs.losses(found) == pytest.approx(jobs.losses(wanted), rel=most)
    norms, others = layer_norms(found), layer_norms(wanted)
    assert norms.keys() == others.keys()
    for step, layers in others.items():
        assert norms[step] == pytest.approx(layers, rel=100 * most)
    scores = [
        {row.step: row.metrics for row in read_record(run) if isinstance(row, record.Evaluation)}
        for run in (found, wanted)
    ]
    assert scores[0].keys() == scores[1].keys()
    for step, metrics in scores[0].items():
        assert metrics == pytest.approx(scores[1][step], rel=2 * most)
    weights, others = (load_file(run / "transformers" / "model.safetensors") for run in (found, wanted))
    assert weights.keys() == others.keys()
    for name, value in others.items():
        error = (weights[name] - value).abs()
        if name.endswith("c_attn.bias"):  # of queries, keys and values; the gradient of the keys' is rounding
            error.view(3, -1)[1] = 0
        assert error.max() <= 10 * most * value.abs().max(), name


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 stages": (2, {"pipeline": 2}),
    "2 stages x 2 replicas": (4, {"pipeline": 2}),
    "2 shards": (2, {"shard": True}),
    "2 x 2 shards": (4, {"pipeline": 2, "shard": True}),
    "2 x 2 virtual stages": (2, {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved"}),
    "8 workers, 2 stages x 4 shards": (8, {"pipeline": 2, "shard": True, "micro_batches": 3}),
    "6 shards": (6, {"shard": True}),
    "2 parts": (2, {"tensor": 2}),
    "2 parts x 3 replicas": (6, {"tensor": 2}),
    "2 parts x 2 shards": (4, {"tensor": 2, "shard": True}),
    "2 stages x 2 parts": (4, {"pipeline": 2, "tensor": 2}),
    "8 workers, 2 stages x 2 parts x 2 shards": (8, {"pipeline": 2, "tensor": 2, "shard": True}),
}
QUICK = {
    ("2 stages", "gpt2"),
    ("2 x 2 shards", "llama"),
    ("2 shards", "gpt2"),
    ("2 parts", "plain"),
}
"""Each division of a model with one of the models, each model in stages; layouts do not look at its kind.

Replicas of stages are in the quick tests of ``test_pretrain_stages.py``, Llama's shards here with stages.
"""
CASES = [
    (layout, name)
    for layout, (_, parallel) in LAYOUTS.items()
    for name in (("plain",) if "tensor" in parallel else ("gpt2", "llama"))
] + [(layout, name) for layout in ("2 stages", "2 shards", "2 parts") for name in NEWER]


@pytest.mark.parametrize(
    ("layout", "name"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_every_layout_trains_what_one_worker_trains(
    layout: str, name: str, in_layout: Runs, whole: dict[str, Path]
) -> None:
    assert_same_run(in_layout(layout, name), whole[name])


def num_norms(run: Path) -> int:
    """Return the layer norms that the first worker computed forward in the profiled step."""
    (trace,) = run.glob("profile-steps-*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    return sum(event["name"] == "aten::native_layer_norm" for event in events)


def test_shards_recompute_activations(
    data: Path, models: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    config = lm(
        "gpt2", data, models, tmp_path / "run",
        parallel={"shard": True}, run={"profile": 1},
        model={"dropout": None, "activation_checkpointing": True},
    )  # fmt: skip
    assert jobs.run(config, 2) == [EXIT_OK] * 2
    assert_same_run(tmp_path / "run", whole["gpt2"])
    assert num_norms(tmp_path / "run") == 3 * (
        1 + 2 * 4
    )  # of 3 micro-batches: the last norm, and those of 2 layers twice


def test_stages_recompute_activations(
    data: Path, models: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    config = lm(
        "gpt2", data, models, tmp_path / "run",
        parallel={"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved"},
        model={"dropout": None, "activation_checkpointing": True},
    )  # fmt: skip
    assert jobs.run(config, 2) == [EXIT_OK] * 2
    assert_same_run(tmp_path / "run", whole["gpt2"])


@pytest.mark.parametrize(
    "layout",
    [
        "2 stages",
        "2 shards",
        "2 parts",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("2 stages x 2 replicas", "2 x 2 shards", "2 parts x 2 shards", "2 stages x 2 parts")
        ),
    ],
)
def test_a_killed_run_in_parts_continues_bitwise(
    layout: str, data: Path, models: Path, in_layout: Runs, tmp_path: Path
) -> None:
    num_workers, parallel = LAYOUTS[layout]
    name = "plain" if "tensor" in parallel else "gpt2"
    undisturbed, run_dir = in_layout(layout, name), tmp_path / "killed"
    killed = lm(name, data, models, run_dir, parallel=parallel, run=OFTEN)
    copy_until(3, undisturbed, run_dir)
    workers = jobs.start(killed, num_workers)
    jobs.wait_for_checkpoint(run_dir, 6, workers)
    jobs.kill(workers)
    assert not (run_dir / "transformers").exists()
    assert jobs.run(killed, num_workers) == [EXIT_OK] * num_workers
    assert sum(isinstance(row, record.Resume) for row in read_record(run_dir)) == 2
    assert jobs.losses(run_dir) == jobs.losses(undisturbed)
    files = [run / "transformers" / "model.safetensors" for run in (run_dir, undisturbed)]
    assert files[0].read_bytes() == files[1].read_bytes()


def copy_until(step: int, run: Path, out: Path) -> None:
    """Copy a run as a kill after the checkpoint of ``step`` leaves it."""
    jobs.copy_without_end(run, out, scores=False)
    for left in (out / "checkpoints").iterdir():
        if step_of(left) > step:
            shutil.rmtree(left)


@pytest.mark.parametrize("muon", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_goes_on_in_other_layouts(
    muon: bool, data: Path, models: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    """One worker, then stages, then shards, then one worker again."""
    optim = {"z_loss": 1e-3, **({"optimizer": "muon"} if muon else {})}
    wanted = whole["gpt2"]
    if muon:
        wanted = tmp_path / "whole"
        assert jobs.run(lm("gpt2", data, models, wanted, optim=optim, run=ALL), 1) == [EXIT_OK]
    make = partial(lm, "gpt2", data, models, tmp_path / "run", optim=optim)
    copy_until(3, wanted, tmp_path / "run")
    go_through(((6, 2, {"pipeline": 2}), (9, 2, {"shard": True}), (12, 1, {})), make)
    assert_same_run(tmp_path / "run", wanted, most=2e-3 if muon else 2 * SAME)  # Muon rounds to bf16


def test_a_run_goes_on_with_parts_of_its_layers(
    data: Path, models: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    """Stages, then stages of parts, then shards of parts, then one worker."""
    layouts = (
        (3, 2, {"pipeline": 2}),
        (6, 4, {"pipeline": 2, "tensor": 2}),
        (9, 4, LAYOUTS["2 parts x 2 shards"][1]),
        (12, 1, {}),
    )
    go_through(layouts, partial(lm, "plain", data, models, tmp_path / "run"))
    assert_same_run(tmp_path / "run", whole["plain"], most=2 * SAME)


def _work_until(config: LmConfig, last: int, rank: int, num_workers: int, port: int) -> None:
    """Be a worker that is killed when its job has the checkpoint of its last step."""

    def die(step: Step, *_: Any) -> None:
        if step.number > last:
            while not checkpoint_path(config.run.dir, last).is_dir():
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)

    before(Step, "__enter__", die)
    job_workers.work(config, rank, num_workers, port)


def go_through(layouts: Sequence[tuple[int, int, dict[str, Any]]], make: Callable[..., LmConfig]) -> None:
    """Go on to each last step in a layout, kill the workers, and go on in the next one, to the end."""
    for last, num_workers, parallel in layouts[:-1]:
        config, port = make(parallel=parallel, run=ALL), free_port()
        workers = [
            fork_process(_work_until, config, last, rank, num_workers, port) for rank in range(num_workers)
        ]
        assert jobs.wait(workers) == [-signal.SIGKILL] * num_workers, said(config.run.dir)
    last, num_workers, parallel = layouts[-1]
    config = make(parallel=parallel, run=ALL)
    assert jobs.run(config, num_workers) == [EXIT_OK] * num_workers, said(config.run.dir)
    begins = [row.step for row in read_record(config.run.dir) if isinstance(row, record.Resume)]
    assert begins == [3, 6, 9]


@pytest.mark.slow
@pytest.mark.parametrize("muon", [False, True])
def test_parts_divide_the_state_of_optimizers(
    muon: bool, data: Path, models: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    """Muon's over parts and shards; AdamW's over the replicas of parts."""
    make, wanted = partial(lm, "plain", data, models), whole["plain"]
    if muon:
        optim, wanted = {"z_loss": 1e-3, "optimizer": "muon"}, tmp_path / "whole"
        assert jobs.run(make(wanted, optim=optim), 1) == [EXIT_OK]
        config = make(tmp_path / "run", optim=optim, parallel={"tensor": 2, "shard": True})
    else:
        config = make(tmp_path / "run", parallel={"tensor": 2}, train={"shard_optimizer": True})
    assert jobs.run(config, 4) == [EXIT_OK] * 4
    assert_same_run(tmp_path / "run", wanted, most=2e-3 if muon else SAME)  # Muon rounds to bf16


WARM: dict[str, Any] = {"optim": {"warmup_steps": 1}, "train": {"total_steps": 1}}
"""A step that is all warm-up: the rate is 0."""


@pytest.fixture(scope="module")
def from_directory(
    data: Path, whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Runs of one worker from the directories beside them, exports of other runs."""
    folder = tmp_path_factory.mktemp("directories")
    for name in ("llama", "plain"):
        source = export_model(whole[name], folder / name / "model")
        assert jobs.run(jobs.small_lm_config(data, source, folder / name / "run", **WARM), 1) == [EXIT_OK]
    return {name: folder / name / "run" for name in ("llama", "plain")}


@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"shard": True}, {"tensor": 2}])
def test_stages_start_with_the_weights_of_a_directory(
    parallel: dict[str, Any], data: Path, from_directory: dict[str, Path], tmp_path: Path
) -> None:
    """The frequencies of Llama's positions are no weights: stages on meta compute them."""
    one = from_directory["plain" if "tensor" in parallel else "llama"]
    source = one.parent / "model"
    config = jobs.small_lm_config(data, source, tmp_path / "run", parallel=parallel, **WARM)
    assert jobs.run(config, 2) == [EXIT_OK] * 2
    assert_same_run(tmp_path / "run", one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"micro_batches": 2}}, "micro_batches needs a pipeline"),
        ({"parallel": {"tensor": 2}, "distributed": {"wire": "int8"}}, "wire int8: .* parallel.tensor saves"),
        (
            {"parallel": {"shard": True}, "train": {"shard_optimizer": True}},
            "shard_optimizer True does not go with a model in stages or shards",
        ),
        (
            {"parallel": {"pipeline": 2}, "model": {"attention": "flash_attention_2"}},
            "attention flash_attention_2 does not go with parallel.pipeline",
        ),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        jobs.small_lm_config(tmp_path, tmp_path, tmp_path / "run", **changes)
