"""Whole trainings of a small network: what they leave, interrupted, on other worlds, with other loaders."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import image_jobs
import pretrain_jobs as jobs
import pytest
import torch
import use_jobs

from shoal import record
from shoal.data.images.shards import ImageShards
from shoal.data.images.transform import CentreTransform
from shoal.errors import EXIT_OK, EXIT_STOPPED, EXIT_USAGE, UsageError
from shoal.models.resnet8 import Patches
from shoal.recipes.export import export_model
from shoal.recipes.resnet50 import use
from shoal.record import read_record


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_jobs.prepare_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole_run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 workers that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert jobs.run(image_jobs.small_config(images, run_dir)) == [EXIT_OK, EXIT_OK]
    return run_dir


@pytest.fixture(scope="module")
def run_alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run of one worker with accumulation, whose norms are taken again before each score."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    assert jobs.run(image_jobs.small_config(images, run_dir, train={"norm_images": 20}), 1) == [EXIT_OK]
    return run_dir


def scores(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the scores of each evaluation in the record, by step."""
    return {row.step: row.metrics for row in read_record(run_dir) if isinstance(row, record.Evaluation)}


def test_what_a_finished_run_leaves(whole_run: Path) -> None:
    rows = read_record(whole_run)
    assert isinstance(rows[0], record.Start) and isinstance(rows[-1], record.End)
    assert (rows[0].unit, rows[0].epoch_samples, rows[0].total_steps) == ("images", 50, 9)
    assert (rows[0].micro_batch_size, rows[0].accumulation_steps, rows[0].num_workers) == (4, 2, 2)
    assert [row.samples for row in rows if isinstance(row, record.Step)] == [16 * i for i in range(1, 10)]
    assert [row.step for row in rows if isinstance(row, record.Checkpoint)] == [3, 6, 9]
    evaluations = [row for row in rows if isinstance(row, record.Evaluation)]
    assert [(row.step, row.num_samples) for row in evaluations] == [(3, 23), (6, 23), (9, 23)]
    for row in evaluations:  # the fifth likeliest of four classes is always among them
        assert row.metrics["top5_accuracy"] == 1.0 and 0 <= row.metrics["top1_accuracy"] <= 1


def test_the_exported_network_scores_what_the_run_says(whole_run: Path, images: Path) -> None:
    found = use.read_export(whole_run / "model")
    shards = ImageShards(images, "validation")
    assert found.classes == shards.manifest.classes
    centre = CentreTransform(found.size, found.resize, mean=found.mean, std=found.std)
    inputs = torch.empty(len(shards), 3, found.size, found.size)
    for number in range(len(shards)):
        centre(shards.read(number), inputs[number].numpy())
    with torch.no_grad():
        model = found.model.eval()
        logits = (model(inputs) + model(inputs.flip(3))) / 2
    labels = torch.from_numpy(shards.labels)
    last = scores(whole_run)[9]
    assert float((logits.argmax(1) == labels).sum()) / 23 == last["top1_accuracy"]
    assert torch.nn.functional.cross_entropy(logits, labels).item() == pytest.approx(last["loss"], rel=1e-5)
    assert not torch.equal(found.model.get_buffer("stem.filters"), Patches().filters)  # of the images


def test_a_signal_in_the_middle_of_an_epoch_and_the_run_continues_bitwise(
    images: Path, whole_run: Path, tmp_path: Path
) -> None:
    config = image_jobs.small_config(images, tmp_path / "run")
    workers = jobs.start(config, 2)
    jobs.wait_for_step(tmp_path / "run", 4, workers)
    assert workers[1].pid is not None
    os.kill(workers[1].pid, signal.SIGTERM)
    assert jobs.wait(workers) == [EXIT_STOPPED, EXIT_STOPPED]
    (stop,) = [row for row in read_record(tmp_path / "run") if isinstance(row, record.Stop)]
    assert 4 <= stop.step < 9
    assert jobs.run(config) == [EXIT_OK, EXIT_OK]
    assert jobs.losses(tmp_path / "run") == jobs.losses(whole_run)
    assert scores(tmp_path / "run") == scores(whole_run)
    ours, theirs = (
        use.read_export(run / "model").model.state_dict() for run in (tmp_path / "run", whole_run)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_kill_before_the_end_loses_neither_scores_nor_the_network(
    images: Path, whole_run: Path, tmp_path: Path
) -> None:
    run_dir = jobs.copy_without_end(whole_run, tmp_path / "run")
    assert jobs.run(image_jobs.small_config(images, run_dir)) == [EXIT_OK, EXIT_OK]
    assert isinstance(read_record(run_dir)[-1], record.End)
    assert scores(run_dir) == scores(whole_run)
    for name in ("model.safetensors", "config.json"):
        assert (run_dir / "model" / name).read_bytes() == (whole_run / "model" / name).read_bytes()


def test_the_number_of_workers_changes_no_loss_but_in_rounding(whole_run: Path, run_alone: Path) -> None:
    """Norms see the same micro-batches of 4 images on one worker with accumulation."""
    assert jobs.losses(run_alone) == pytest.approx(jobs.losses(whole_run), rel=1e-5)
    assert scores(run_alone) != scores(whole_run)  # the norms' statistics are other ones


def test_the_end_of_an_epoch_has_a_line_however_rare_lines_are(
    images: Path, run_alone: Path, tmp_path: Path
) -> None:
    config = image_jobs.small_config(images, tmp_path / "run", run={"log_frequency": 4})
    assert jobs.run(config, 1) == [EXIT_OK]
    each = jobs.losses(run_alone)
    windows = {3: (1, 2, 3), 4: (4,), 6: (5, 6), 8: (7, 8), 9: (9,)}
    means = {step: sum(each[one] for one in steps) / len(steps) for step, steps in windows.items()}
    assert jobs.losses(tmp_path / "run") == pytest.approx(means, rel=1e-6)


def test_images_decoded_on_the_device_train_alike(images: Path, run_alone: Path, tmp_path: Path) -> None:
    """Here on the CPU; pixels are at most one step of 255 from those that the host's threads make."""
    config = image_jobs.small_config(
        images, tmp_path / "run", train={"norm_images": 20}, data={"decode": "device"}
    )
    assert jobs.run(config, 1) == [EXIT_OK]
    found, wanted = jobs.losses(tmp_path / "run"), jobs.losses(run_alone)
    assert found.keys() == wanted.keys()
    assert found[1] == pytest.approx(wanted[1], rel=0.02) and found[1] != wanted[1]


def test_another_number_of_workers_takes_up_the_same_images(
    images: Path, whole_run: Path, run_alone: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole_run, run_dir)
    for step in (6, 9):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08}")
    config = image_jobs.small_config(images, run_dir, train={"norm_images": 20})
    assert jobs.run(config, 4) == [EXIT_OK] * 4
    assert jobs.losses(run_dir) == pytest.approx(jobs.losses(whole_run), rel=1e-5)
    for step in (6, 9):
        assert scores(run_dir)[step] == pytest.approx(scores(run_alone)[step], rel=1e-4)


def test_what_must_stay_is_refused_and_a_finished_run_says_so(images: Path, whole_run: Path) -> None:
    before = (whole_run / "record.jsonl").read_bytes()
    config = image_jobs.small_config(images, whole_run)
    assert jobs.run(config) == [EXIT_OK, EXIT_OK]
    assert jobs.run(jobs.changed(config, {"augment": {"flip": 0.0}}), 1) == [EXIT_USAGE]
    assert "augment.flip" in (whole_run / "worker-0.log").read_text()
    assert (whole_run / "record.jsonl").read_bytes() == before


def test_a_checkpoint_is_exported_with_the_average_of_its_weights(whole_run: Path, tmp_path: Path) -> None:
    out = export_model(whole_run / "checkpoints" / "step-00000006", tmp_path / "six")
    found, step = use.read_checkpoint(whole_run / "checkpoints" / "step-00000006")
    assert step == 6
    exported = use.read_export(out).model.state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in found.model.state_dict().items())
    last = use.read_export(whole_run / "model").model.state_dict()
    assert not torch.equal(last["fc.weight"], exported["fc.weight"])
    tree = json.loads((out / "config.json").read_text())
    assert tree["dtype"] == "float32"
    half = export_model(whole_run, tmp_path / "half", precision="bf16")
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    weight = use.read_export(half).model.state_dict()["fc.weight"]
    assert torch.equal(weight, last["fc.weight"].bfloat16().float())
    (out / "config.json").write_text(json.dumps({**tree, "format": "another"}))
    with pytest.raises(UsageError, match="not that of a network"):
        use.read_export(out)


def test_scores_are_the_same_counts_on_any_number_of_workers(
    images: Path, whole_run: Path, tmp_path: Path
) -> None:
    options = ("--data", images, "--split", "train", "--batch-size", 8, "--precision", "fp32", "--json")
    score = partial(use_jobs.said, tmp_path, "evaluate", "imagenet", whole_run, *options)
    found = []
    for num_workers in (1, 2, 3):
        out = tmp_path / f"{num_workers}.json"
        score(out, workers=num_workers)
        tree = json.loads(out.read_text())
        found.append((tree["num_images"], tree["top1"], tree["top5"]))
    assert found[0][0] == image_jobs.NUM_TRAIN and 0 < found[0][1] <= found[0][0]
    assert found == [found[0]] * 3
    losses = []
    for mirror in ((), ("--mirror",), ("--no-mirror",)):  # the run's is True
        score(tmp_path / "scores.json", *mirror)
        losses.append(json.loads((tmp_path / "scores.json").read_text())["loss"])
    assert losses[0] == losses[1] != losses[2]
