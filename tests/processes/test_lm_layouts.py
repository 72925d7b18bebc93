"""Causal language models in stages, in shards and in parts of layers: the runs of one worker."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pretrain_jobs as jobs
import pytest
from safetensors.torch import load_file
from test_pretrain_lm import COMMON, WIDE
from test_pretrain_lm import MODELS as CAUSAL
from transformers import LlamaConfig

from shoal import record
from shoal.errors import EXIT_OK, UsageError
from shoal.recipes.export import export_model
from shoal.recipes.lm import LmConfig
from shoal.record import read_record
from shoal.train.checkpoint_files import step_of

SAME = 1e-6
PLAIN = LlamaConfig(**COMMON, **WIDE, num_key_value_heads=2)
MODELS = {"gpt2": CAUSAL["gpt2"], "llama": CAUSAL["llama"], "plain": PLAIN}
"""Two with dropout, and one whose layers divide: its attention has none."""


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
    folder = tmp_path_factory.mktemp("whole")
    for name in MODELS:
        assert jobs.run(lm(name, data, models, folder / name), 1) == [EXIT_OK]
    return {name: folder / name for name in MODELS}


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
    ("2 stages x 2 replicas", "gpt2"),
    ("2 x 2 shards", "llama"),
    ("2 shards", "gpt2"),
    ("2 shards", "llama"),
    ("2 parts", "plain"),
}
"""Each layout with one of the models, each model in stages; layouts do not look at the kind of model."""
CASES = [
    (layout, name)
    for layout, (_, parallel) in LAYOUTS.items()
    for name in (("plain",) if "tensor" in parallel else ("gpt2", "llama"))
]


@pytest.mark.parametrize(
    ("layout", "name"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_every_layout_trains_what_one_worker_trains(
    layout: str, name: str, data: Path, models: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    num_workers, parallel = LAYOUTS[layout]
    train = {"micro_batch_size": None} if "micro_batches" in parallel else {}
    config = lm(name, data, models, tmp_path / "run", parallel=parallel, train=train)
    codes = jobs.run(config, num_workers)
    assert codes == [EXIT_OK] * num_workers, (tmp_path / "run" / "worker-0.log").read_text()
    assert_same_run(tmp_path / "run", whole[name])


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
    layout: str, data: Path, models: Path, tmp_path: Path
) -> None:
    num_workers, parallel = LAYOUTS[layout]
    name = "plain" if "tensor" in parallel else "gpt2"
    often = {"checkpoint_frequency": 1, "keep_checkpoints": 20}
    first = lm(name, data, models, tmp_path / "undisturbed", parallel=parallel, run=often)
    assert jobs.run(first, num_workers) == [EXIT_OK] * num_workers
    run_dir = tmp_path / "killed"
    killed = lm(name, data, models, run_dir, parallel=parallel, run=often)
    jobs.copy_without_end(tmp_path / "undisturbed", run_dir, scores=False)
    for left in (run_dir / "checkpoints").iterdir():
        if step_of(left) > 3:
            shutil.rmtree(left)
    workers = jobs.start(killed, num_workers)
    jobs.wait_for_checkpoint(run_dir, 6, workers)
    jobs.kill(workers)
    assert not (run_dir / "transformers").exists()
    assert jobs.run(killed, num_workers) == [EXIT_OK] * num_workers
    assert sum(isinstance(row, record.Resume) for row in read_record(run_dir)) == 2
    assert jobs.losses(run_dir) == jobs.losses(tmp_path / "undisturbed")
    files = [run / "transformers" / "model.safetensors" for run in (run_dir, tmp_path / "undisturbed")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("muon", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_goes_on_in_other_layouts(
    muon: bool, data: Path, models: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    """One worker, then stages, then shards, then one worker again."""
    optim = {"z_loss": 1e-3, **({"optimizer": "muon"} if muon else {})}
    wanted = whole["gpt2"]
    if muon:
        wanted = tmp_path / "whole"
        assert jobs.run(lm("gpt2", data, models, wanted, optim=optim), 1) == [EXIT_OK]
    make = partial(lm, "gpt2", data, models, tmp_path / "run", optim=optim)
    go_through(((3, 1, {}), (6, 2, {"pipeline": 2}), (9, 2, {"shard": True}), (12, 1, {})), make)
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


def go_through(layouts: Iterable[tuple[int, int, dict[str, Any]]], make: Callable[..., LmConfig]) -> None:
    """Run to each last step in a layout, kill the workers, and go on in the next one."""
    for last, num_workers, parallel in layouts:
        config = make(parallel=parallel, run={"checkpoint_frequency": 3})
        run_dir = config.run.dir
        assert run_dir is not None
        if last == 12:
            assert jobs.run(config, num_workers) == [EXIT_OK] * num_workers
            return
        workers = jobs.start(config, num_workers)
        jobs.wait_for_step(run_dir, last, workers)
        jobs.kill(workers)
        for left in sorted((run_dir / "checkpoints").iterdir())[1:]:
            if step_of(left) > last:
                shutil.rmtree(left)


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


@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"shard": True}, {"tensor": 2}])
def test_stages_start_with_the_weights_of_a_directory(
    parallel: dict[str, Any], data: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    """The frequencies of Llama's positions are no weights: stages on meta compute them."""
    source = export_model(whole["plain" if "tensor" in parallel else "llama"], tmp_path / "model")
    warm = {"optim": {"warmup_steps": 1}, "train": {"total_steps": 1}}  # all of it warm-up: the rate is 0
    config = jobs.small_lm_config(data, source, tmp_path / "run", parallel=parallel, **warm)
    assert jobs.run(config, 2) == [EXIT_OK] * 2
    one = jobs.small_lm_config(data, source, tmp_path / "one", **warm)
    assert jobs.run(one, 1) == [EXIT_OK]
    assert_same_run(tmp_path / "run", tmp_path / "one")


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
