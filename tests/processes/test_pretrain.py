"""Whole pretraining jobs: interrupted, killed, continued on other worlds, and what they leave behind."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
from pathlib import Path

import pretrain_jobs as jobs
import pytest
import torch

from shoal import record
from shoal.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, UsageError
from shoal.recipes.albert import AlbertConfig
from shoal.recipes.export import export_model
from shoal.record import read_record
from shoal.report.page import write_report


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 workers that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert jobs.run(jobs.small_config(data, run_dir)) == [EXIT_OK, EXIT_OK]
    return run_dir


def test_what_a_finished_run_leaves(whole_run: Path, data: Path) -> None:
    rows = read_record(whole_run)
    assert isinstance(rows[0], record.Start) and isinstance(rows[-1], record.End)
    assert rows[0].num_workers == 2 and rows[0].accumulation_steps * rows[0].micro_batch_size == 6
    assert 0 < rows[0].references["mlm_loss"] < math.log(96)
    steps = [row for row in rows if isinstance(row, record.Step)]
    assert [row.step for row in steps] == list(range(1, 13))
    assert [row.samples for row in steps] == [12 * step for step in range(1, 13)]
    for row in steps:
        assert sum(row.parts_s.values()) == pytest.approx(row.step_s)
    assert [row.step for row in rows if isinstance(row, record.Evaluation)] == [6, 12]
    assert [row.step for row in rows if isinstance(row, record.Checkpoint)] == [3, 6, 9, 12]
    assert {path.name for path in (whole_run / "checkpoints").iterdir()} == {
        "step-00000006",
        "step-00000009",
        "step-00000012",
    }


def test_tensorboard_reads_the_events(whole_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole_run / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("train/loss")}
    assert found == pytest.approx(jobs.losses(whole_run), rel=1e-6)
    tags = set(events.Tags()["scalars"])
    assert {"train/mlm_accuracy", "train/sop_accuracy", "optimizer/learning_rate"} <= tags
    assert {"optimizer/loss_scale", "optimizer/grad_norm", "optimizer/weight_norm"} <= tags
    assert {"speed/samples_per_s", "validation/mlm_loss"} <= tags
    plugin = json.dumps([str(value) for value in events.summary_metadata])
    assert "_hparams_" in plugin


def test_the_exported_model_scores_what_the_run_says(whole_run: Path, data: Path) -> None:
    from transformers import AlbertForPreTraining

    from shoal.data.steps import evenly_spread
    from shoal.recipes.masked_lm import open_text

    model = AlbertForPreTraining.from_pretrained(whole_run / "transformers").eval()
    config = jobs.small_config(data, whole_run)
    _, reader = open_text(config, config.data, pairs="order")
    batch = {
        name: torch.from_numpy(array)
        for name, array in reader.batch(0, evenly_spread(reader.num_examples, 32)).items()
    }
    with torch.no_grad():
        names = ("input_ids", "token_type_ids", "attention_mask")
        logits = model(**{name: batch[name] for name in names}).prediction_logits.log_softmax(-1)
    rows = torch.arange(len(logits))[:, None]
    found = logits[rows, batch["masked_positions"]].gather(2, batch["masked_ids"][..., None])[..., 0]
    total = -(found * batch["masked_weights"]).sum().item()
    count = batch["masked_weights"].sum().item()
    (last,) = [row for row in read_record(whole_run) if isinstance(row, record.End)]
    assert total / count == pytest.approx(last.metrics["mlm_loss"], rel=1e-5)
    assert (whole_run / "transformers" / "tokenizer.json").is_file()


def test_a_finished_run_says_so(whole_run: Path, data: Path) -> None:
    before = (whole_run / "record.jsonl").read_bytes()
    assert jobs.run(jobs.small_config(data, whole_run)) == [EXIT_OK, EXIT_OK]
    assert (whole_run / "record.jsonl").read_bytes() == before


@pytest.mark.parametrize("scores", [True, False])
def test_a_run_killed_before_its_end_is_scored_and_exported(
    data: Path, whole_run: Path, tmp_path: Path, scores: bool
) -> None:
    run_dir = jobs.copy_without_end(whole_run, tmp_path / "run", scores=scores)
    assert jobs.run(jobs.small_config(data, run_dir)) == [EXIT_OK, EXIT_OK]
    found, wanted = (read_record(run)[-1] for run in (run_dir, whole_run))
    assert isinstance(found, record.End) and isinstance(wanted, record.End)
    assert (found.step, found.metrics) == (wanted.step, wanted.metrics)
    assert (run_dir / "transformers" / "config.json").is_file()


@pytest.mark.parametrize(
    ("number", "victim"),
    [(signal.SIGTERM, 0), pytest.param(signal.SIGUSR1, 1, marks=pytest.mark.slow)],
)
def test_a_signal_to_any_worker_saves_and_the_run_continues_bitwise(
    data: Path, whole_run: Path, tmp_path: Path, number: signal.Signals, victim: int
) -> None:
    config = jobs.small_config(data, tmp_path / "run")
    workers = jobs.start(config, 2)
    jobs.wait_for_step(tmp_path / "run", 4, workers)
    pid = workers[victim].pid
    assert pid is not None
    os.kill(pid, number)
    assert jobs.wait(workers) == [EXIT_STOPPED, EXIT_STOPPED]
    rows = read_record(tmp_path / "run")
    assert isinstance(rows[-1], record.Stop)
    saved = [row.step for row in rows if isinstance(row, record.Checkpoint)]
    assert rows[-1].step == saved[-1] < 12
    assert jobs.run(config) == [EXIT_OK, EXIT_OK]
    assert jobs.losses(tmp_path / "run") == jobs.losses(whole_run)


@pytest.mark.slow
def test_kills_at_random_points_leave_no_trace_in_the_losses(
    data: Path, whole_run: Path, tmp_path: Path
) -> None:
    draw = random.Random(17)
    config = jobs.small_config(data, tmp_path / "run", run={"checkpoint_frequency": 1})
    for attempt in range(10):
        workers = jobs.start(config, 2)
        jobs.wait_for_step(tmp_path / "run", attempt // 2 + draw.randint(0, 3), workers)
        workers[0].join(draw.random() * 0.05)
        assert all(worker.is_alive() for worker in workers)
        jobs.kill(workers)
    assert jobs.run(config) == [EXIT_OK, EXIT_OK]
    assert any(isinstance(row, record.Resume) for row in read_record(tmp_path / "run"))
    assert jobs.losses(tmp_path / "run") == jobs.losses(whole_run)


def test_other_numbers_of_workers_continue_on_the_same_data(
    data: Path, whole_run: Path, tmp_path: Path
) -> None:
    """Dropout is on: its masks belong to samples, and nothing depends on how many workers there are."""
    model = {"classifier_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    whole = jobs.small_config(data, tmp_path / "whole", model=model)
    assert jobs.run(whole, 2) == [EXIT_OK] * 2
    for steps, num_workers in ((4, 3), (8, 1), (12, 2)):
        config = jobs.small_config(
            data,
            tmp_path / "parts",
            model=model,
            run={"checkpoint_frequency": 4},
        )
        workers = jobs.start(config, num_workers)
        if steps < 12:
            jobs.wait_for_step(tmp_path / "parts", steps, workers)
            jobs.kill(workers)
        else:
            assert jobs.wait(workers) == [EXIT_OK] * num_workers
    found, wanted = jobs.losses(tmp_path / "parts"), jobs.losses(tmp_path / "whole")
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=2e-5)


@pytest.mark.slow
def test_with_8_bit_gradients_a_run_continues_bitwise_and_with_other_workers(
    data: Path, whole_run: Path, tmp_path: Path
) -> None:
    def config(name: str, **run: int) -> AlbertConfig:
        return jobs.small_config(data, tmp_path / name, distributed={"wire": "int8"}, run=run)

    assert jobs.run(config("whole")) == [EXIT_OK] * 2
    whole = jobs.losses(tmp_path / "whole")
    assert whole != jobs.losses(whole_run) and whole == pytest.approx(jobs.losses(whole_run), rel=2e-2)
    workers = jobs.start(config("parts", checkpoint_frequency=1), 2)
    jobs.wait_for_step(tmp_path / "parts", 6, workers)
    jobs.kill(workers)
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    assert jobs.run(config("parts")) == [EXIT_OK] * 2
    assert jobs.losses(tmp_path / "parts") == whole
    assert jobs.run(config("other"), 3) == [EXIT_OK] * 3
    assert jobs.losses(tmp_path / "other") == pytest.approx(whole, rel=2e-2)


def test_the_newest_checkpoint_damaged_the_one_before_is_used(
    data: Path, whole_run: Path, tmp_path: Path
) -> None:
    config = jobs.small_config(data, tmp_path / "run")
    workers = jobs.start(config, 2)
    jobs.wait_for_checkpoint(tmp_path / "run", 6, workers)
    jobs.kill(workers)
    for unnamed in (tmp_path / "run" / "checkpoints").glob("*.tmp*"):  # whole ones would be adopted
        shutil.rmtree(unnamed)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-????????"))[-1]
    file = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert jobs.run(config) == [EXIT_OK, EXIT_OK]
    (resume,) = [row for row in read_record(tmp_path / "run") if isinstance(row, record.Resume)]
    assert len(resume.damaged) == 1 and newest.name in resume.damaged[0]
    assert jobs.losses(tmp_path / "run") == jobs.losses(whole_run)


def test_a_loss_that_stays_not_finite_stops_with_step_and_samples(data: Path, tmp_path: Path) -> None:
    config = jobs.small_config(
        data,
        tmp_path / "run",
        optim={"learning_rate": 1e38, "optimizer": "adamw", "warmup_steps": 0},
        train={"max_nonfinite_steps": 3},
    )
    assert jobs.run(config) == [EXIT_FAILURE, EXIT_FAILURE]
    message = (tmp_path / "run" / "worker-0.log").read_text()
    assert "not finite for 3 steps in a row, up to step" in message
    assert "samples of that step: 0:" in message and "--optim.learning-rate" in message
    assert "Traceback" not in message


def test_an_overflow_skips_the_step_on_all_workers_alike(data: Path, tmp_path: Path) -> None:
    config = jobs.small_config(
        data,
        tmp_path / "run",
        train={"precision": "fp16", "total_steps": 6, "loss_scale": 1e38},
    )
    assert jobs.run(config) == [EXIT_OK, EXIT_OK]
    steps = [row for row in read_record(tmp_path / "run") if isinstance(row, record.Step)]
    assert [row.num_skipped for row in steps] == [1] * 6
    assert len({row.weight_norm for row in steps}) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {
            "optim": {"clip": "worker"},
            "train": {"micro_batch_size": 2, "precision": "bf16"},
            "model": {"activation_checkpointing": True},
        },
        {
            "train": {"precision": "fp16"},
            "model": {"pre_layer_norm": True, "hidden_dropout_prob": 0.1},
        },
        {"data": {"loader_processes": 2}},
        pytest.param({"train": {"precision": "bf16"}}, marks=pytest.mark.slow),
        pytest.param({"train": {"precision": "fp16"}}, marks=pytest.mark.slow),
        pytest.param({"optim": {"clip": "worker"}}, marks=pytest.mark.slow),
        pytest.param({"model": {"activation_checkpointing": True}}, marks=pytest.mark.slow),
        pytest.param({"model": {"pre_layer_norm": True, "hidden_dropout_prob": 0.1}}, marks=pytest.mark.slow),
        pytest.param({"train": {"micro_batch_size": 2}}, marks=pytest.mark.slow),
        pytest.param({"train": {"compile": True}}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: ".".join(f"{k}-{'-'.join(v)}" for k, v in changes.items()),
)
def test_every_switch_trains(
    data: Path, whole_run: Path, tmp_path: Path, changes: dict[str, dict[str, object]]
) -> None:
    config = jobs.small_config(data, tmp_path / "run", **changes)
    assert jobs.run(config) == [EXIT_OK, EXIT_OK]
    found = jobs.losses(tmp_path / "run")
    assert len(found) == 12 and all(math.isfinite(loss) for loss in found.values())
    assert found[12] < found[1]
    if "loader_processes" in changes.get("data", {}):
        assert found == jobs.losses(whole_run)


@pytest.mark.parametrize("load_from", ["transformers", "checkpoint"])
def test_a_run_starts_from_the_weights_of_another(
    data: Path, whole_run: Path, tmp_path: Path, load_from: str
) -> None:
    source = whole_run / "transformers" if load_from == "transformers" else whole_run
    config = jobs.small_config(
        data,
        tmp_path / "run",
        model={"checkpoint_path": source},
        optim={"learning_rate": 0.0},
        train={"total_steps": 2},
    )
    assert jobs.run(config, 1) == [EXIT_OK]
    ends = [row for run in (whole_run, tmp_path / "run") for row in read_record(run)[-1:]]
    assert ends[1].metrics == pytest.approx(ends[0].metrics, rel=1e-5)  # type: ignore[union-attr]


def test_export_of_any_checkpoint(whole_run: Path, tmp_path: Path) -> None:
    from transformers import AlbertForPreTraining, AutoTokenizer

    newest = export_model(whole_run)
    assert newest.name == "transformers-12"
    final = AlbertForPreTraining.from_pretrained(whole_run / "transformers").state_dict()
    for name, tensor in AlbertForPreTraining.from_pretrained(newest).state_dict().items():
        assert torch.equal(tensor, final[name]), name
    half = AlbertForPreTraining.from_pretrained(
        export_model(whole_run, tmp_path / "half", precision="bf16"), dtype="auto"
    ).state_dict()
    assert all(torch.equal(tensor, final[name].bfloat16()) for name, tensor in half.items())
    older = export_model(whole_run / "checkpoints" / "step-00000006", tmp_path / "six")
    other = AlbertForPreTraining.from_pretrained(older).state_dict()
    assert any(not torch.equal(other[name], tensor) for name, tensor in final.items())
    tokenizer = AutoTokenizer.from_pretrained(older)
    assert tokenizer("the moon", "the sun").token_type_ids == [0, 0, 0, 0, 1, 1, 1]
    assert (
        tokenizer.model_max_length
        == AlbertForPreTraining.from_pretrained(older).config.max_position_embeddings
    )
    ids = tokenizer("the moon [MASK]", add_special_tokens=False)["input_ids"]
    assert tokenizer.mask_token_id == ids[-1] and tokenizer.unk_token_id not in ids
    with pytest.raises(UsageError, match=r"is not a run of shoal \(with config\.toml\)"):
        export_model(tmp_path)


def test_a_moved_run_is_exported_and_reported_from_elsewhere_without_its_data(
    whole_run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(whole_run, moved)
    settings = (moved / "config.toml").read_text()
    assert f'path = "{data}"' in settings
    (moved / "config.toml").write_text(settings.replace(str(data), "gone"))
    monkeypatch.chdir(tmp_path)
    out = export_model(Path("moved"), Path("out"))
    for name in ("tokenizer.json", "model.safetensors"):
        assert (out / name).read_bytes() == (whole_run / "transformers" / name).read_bytes()
    assert write_report([Path("moved")]) == Path("moved", "report.html")
    shutil.rmtree(moved / "data")
    with pytest.raises(UsageError, match=r"moved/data is missing.* copy the whole directory"):
        export_model(Path("moved"), Path("again"))


def test_a_shard_with_a_wrong_byte_is_named(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "text"
    shutil.copytree(data, copy)
    file = next(copy.glob("train-*.tokens"))
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)
    assert jobs.run(jobs.small_config(copy, tmp_path / "run"), 1) == [EXIT_FAILURE]
    message = (tmp_path / "run" / "worker-0.log").read_text()
    assert f"{file} has the wrong checksum" in message and "Traceback" not in message


def test_settings_that_the_state_depends_on_must_stay(data: Path, whole_run: Path) -> None:
    config = jobs.small_config(data, whole_run, train={"seed": 43, "total_steps": 14})
    assert jobs.run(config, 1) == [2]
    message = (whole_run / "worker-0.log").read_text()
    assert "has a run with train.seed = 42, and this command sets 43" in message
    assert "Traceback" not in message
