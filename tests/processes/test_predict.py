"""``shoal predict`` and ``evaluate``: the bits of the run's own evaluation on any workers; bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import image_jobs
import job_workers as jobs
import mask_rcnn_jobs
import numpy as np
import pretrain_jobs
import pytest
import use_jobs
from PIL import Image
from transformers import BertConfig, BertForMaskedLM

import finetune_made as made
from forked import shoal
from shoal.data.images.files import FileReader
from shoal.data.images.shards import ImageShards
from shoal.data.images.transform import CentreTransform
from shoal.data.text.classify import Columns, read_texts
from shoal.errors import EXIT_OK, UsageError
from shoal.models.t5 import read_t5
from shoal.models.tasks import QuestionAnswering
from shoal.recipes import t5_written, using
from shoal.record import Evaluation, read_record
from shoal.train.checkpoint_files import list_checkpoints
from shoal.train.run_dir import DESCRIPTION


@pytest.fixture(scope="module")
def t5_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    train = made.write_pairs(folder / "train.tsv", 24, seed=1)
    config = made.t5_config(
        made.write_t5(folder / "t5"), train, (train,), folder / "run", train={"total_steps": 30}
    )
    assert jobs.run(config) == [EXIT_OK], (folder / "run" / "worker-0.log").read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def resnet_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resnet")
    config = image_jobs.small_config(image_jobs.prepare_small(folder), folder / "run")
    assert pretrain_jobs.run(config, 1) == [EXIT_OK], (folder / "run" / "worker-0.log").read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def photos(resnet_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images on which the run evaluates, as files in their order."""
    shards = ImageShards(resnet_run.parent / "images", "validation")
    folder = tmp_path_factory.mktemp("photos")
    for number in range(len(shards)):
        (folder / f"{number:03}.jpg").write_bytes(shards.read(number))
    return folder


@pytest.fixture(scope="module")
def detector_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detector")
    scenes = mask_rcnn_jobs.prepare_small(folder)
    assert pretrain_jobs.run(mask_rcnn_jobs.small_config(scenes, folder / "run"), 1) == [EXIT_OK]
    return folder / "run"


Predicted = Callable[..., list[dict[str, Any]]]
ONE_TO_THREE = [
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(2, marks=pytest.mark.slow),
    3,
]
"""Numbers of workers; other tests here run the commands on one worker and on two."""


@pytest.fixture(scope="module")
def squad_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("squad")
    questions = made.write_questions(folder / "made.json")
    config = made.squad_config(made.write_model(folder / "bert"), questions, folder / "run")
    assert jobs.run(config) == [EXIT_OK], (folder / "run" / "worker-0.log").read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def classify_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classify")
    train = made.write_pairs(folder / "train.tsv", 60, seed=1)
    config = made.classify_config(made.write_model(folder / "bert"), train, (train,), folder / "run")
    assert jobs.run(config) == [EXIT_OK], (folder / "run" / "worker-0.log").read_text()
    return folder / "run"


@pytest.fixture
def predicted(tmp_path: Path) -> Predicted:
    """Return the lines that ``shoal predict`` prints on workers."""
    return partial(use_jobs.lines, tmp_path, "predict")


refused = partial(use_jobs.refused, "predict")


@pytest.mark.parametrize("workers", ONE_TO_THREE)
def test_answers_are_the_bits_of_the_run_on_any_number_of_workers(
    squad_run: Path, tmp_path: Path, predicted: Predicted, workers: int
) -> None:
    out = tmp_path / "answers.jsonl"
    arguments = ("squad", squad_run.parent / "made.json", "--model", squad_run, "--top", 20, "--out", out)
    assert predicted(*arguments, workers=workers) == []
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    predictions, nbest, odds = (
        json.loads((squad_run / f"{name}.json").read_text()) for name in ("predictions", "nbest", "null_odds")
    )
    assert {row["id"]: row["answer"] for row in rows} == predictions
    assert {row["id"]: row["nbest"] for row in rows} == {name: best[:20] for name, best in nbest.items()}
    assert {row["id"]: row["null_odds"] for row in rows} == odds


def test_answers_of_a_checkpoint_and_of_an_export_elsewhere(
    squad_run: Path, tmp_path: Path, predicted: Predicted
) -> None:
    questions, wanted = squad_run.parent / "made.json", (squad_run / "predictions.json").read_text()
    checkpoint = list_checkpoints(squad_run)[-1]
    found = predicted("squad", questions, "--model", checkpoint)
    assert {row["id"]: row["answer"] for row in found} == json.loads(wanted)
    export = shutil.copytree(squad_run / "transformers", tmp_path / "moved")
    window = ("--window.max-seq-length", 48, "--window.doc-stride", 16, "--window.max-question-length", 8)
    found = predicted("squad", questions, "--model", export, *window, "--batch-size", 8)
    assert {row["id"]: row["answer"] for row in found} == json.loads(wanted)
    assert len(predicted("squad", questions, "--model", export)) == len(found)  # windows of its 64 positions


def test_questions_without_answers_and_one_question(
    squad_run: Path, tmp_path: Path, predicted: Predicted
) -> None:
    tree = json.loads((squad_run.parent / "made.json").read_text())
    lines = []
    for paragraph in tree["data"][0]["paragraphs"]:
        for asked in paragraph["qas"]:
            del asked["answers"], asked["is_impossible"]
            lines.append({"id": asked["id"], "question": asked["question"], "context": paragraph["context"]})
    (tmp_path / "bare.json").write_text(json.dumps(tree))
    (tmp_path / "bare.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    wanted = predicted("squad", squad_run.parent / "made.json", "--model", squad_run)
    for name in ("bare.json", "bare.jsonl"):
        assert predicted("squad", tmp_path / name, "--model", squad_run) == wanted
    one = ("--question", lines[0]["question"], "--context", lines[0]["context"])
    (row,) = predicted("squad", *one, "--model", squad_run, "--rules", "1.1")
    assert row["answer"] in lines[0]["context"] and row["answer"] and row["id"] == "1"


def chances_by_transformers(run_dir: Path, file: Path) -> np.ndarray:
    """Return the probabilities of a file's pairs as a user of transformers gets them."""
    from transformers import pipeline

    classifier = pipeline("text-classification", model=str(run_dir / "transformers"), top_k=None)
    examples = read_texts(file, Columns(), labels=()).examples
    found = classifier([{"text": each.first, "text_pair": each.second} for each in examples])
    return np.array([[row["score"] for row in sorted(rows, key=itemgetter("label"))] for rows in found])


def chances_by_onnx(run_dir: Path, file: Path) -> np.ndarray:
    """Return the probabilities of a file's pairs as a user of ONNX Runtime gets them."""
    import onnxruntime
    from transformers import AutoTokenizer

    onnx_file = file.with_suffix(".onnx")
    assert shoal("export", str(run_dir), "--onnx", str(onnx_file)).returncode == EXIT_OK
    session = onnxruntime.InferenceSession(str(onnx_file), providers=["CPUExecutionProvider"])
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "transformers")
    examples = read_texts(file, Columns(), labels=()).examples
    texts, pairs = [each.first for each in examples], [each.second for each in examples]
    inputs = dict(tokenizer(texts, pairs, padding=True, return_tensors="np"))
    assert set(inputs) == {put.name for put in session.get_inputs()}
    return using.probabilities(session.run(None, inputs)[0])


@pytest.mark.parametrize("workers", ONE_TO_THREE)
def test_labels_are_the_bits_of_the_run_on_any_number_of_workers(
    classify_run: Path, predicted: Predicted, workers: int
) -> None:
    file = classify_run.parent / "train.tsv"
    rows = predicted("classify", file, "--model", classify_run, workers=workers)
    assert [row["id"] for row in rows] == list(range(1, 61))
    assert [row["label"] for row in rows] == (classify_run / "predictions-train.txt").read_text().split()
    assert rows == predicted("classify", file, "--model", list_checkpoints(classify_run)[-1])


@pytest.mark.parametrize(
    "computed", [chances_by_transformers, pytest.param(chances_by_onnx, marks=pytest.mark.slow)]
)
def test_the_export_gives_others_the_probabilities_of_the_run(
    classify_run: Path, predicted: Predicted, computed: Callable[[Path, Path], np.ndarray]
) -> None:
    file = classify_run.parent / "train.tsv"
    rows = predicted("classify", file, "--model", classify_run)
    chances = [[row["probabilities"][name] for name in ("other", "same")] for row in rows]
    np.testing.assert_allclose(computed(classify_run, file), chances, rtol=0, atol=1e-6)


def test_a_cpu_computes_in_fp32_unless_told(classify_run: Path, tmp_path: Path, predicted: Predicted) -> None:
    """Also the model of a run in bf16, such as a GPU's, so that a moved export gives the same outputs."""
    run = shutil.copytree(classify_run, tmp_path / "run")
    settings = (run / "config.toml").read_text()
    assert 'precision = "fp32"' in settings
    (run / "config.toml").write_text(settings.replace('precision = "fp32"', 'precision = "bf16"'))
    file, moved = run.parent / "pairs.tsv", shutil.copytree(run / "transformers", tmp_path / "moved")
    shutil.copy(classify_run.parent / "train.tsv", file)
    wanted = predicted("classify", file, "--model", classify_run)
    assert {row["precision"] for row in wanted} == {"fp32"}
    form = ("--data.max-seq-length", 32, "--batch-size", 8)
    assert predicted("classify", file, "--model", run) == wanted
    assert predicted("classify", file, "--model", moved, *form) == wanted
    told = predicted("classify", file, "--model", run, "--precision", "bf16")
    assert {row["precision"] for row in told} == {"bf16"}
    assert [row["probabilities"] for row in told] != [row["probabilities"] for row in wanted]


def test_texts_need_no_labels_and_one_pair_needs_no_file(
    classify_run: Path, tmp_path: Path, predicted: Predicted
) -> None:
    lines = (classify_run.parent / "train.tsv").read_text().splitlines()
    bare = tmp_path / "bare.tsv"
    bare.write_text("".join("\t".join(line.split("\t")[:2]) + "\n" for line in lines))
    wanted = predicted("classify", classify_run.parent / "train.tsv", "--model", classify_run)
    assert predicted("classify", bare, "--model", classify_run) == wanted
    first, second, label = lines[1].split("\t")
    (row,) = predicted("classify", "--text", first, "--second-text", second, "--model", classify_run)
    assert row["label"] == wanted[0]["label"] == label


@pytest.mark.parametrize("workers", [2])
def test_labels_of_t5_are_those_of_the_run(
    t5_run: Path, predicted: Predicted, tmp_path: Path, workers: int
) -> None:
    file, wanted = t5_run.parent / "train.tsv", (t5_run / "predictions-train.txt").read_text().splitlines()
    export = shutil.copytree(t5_run / "transformers", tmp_path / "moved")  # its wording is in config.json
    for model in (t5_run, list_checkpoints(t5_run)[-1], export):
        rows = predicted("t5", file, "--model", model, workers=workers)
        assert [row["label"] for row in rows] == wanted
        assert all(row["probabilities"][row["label"]] >= 0.5 for row in rows)
    assert len(set(wanted)) > 1


def test_a_t5_without_labels_writes_text(tmp_path: Path, predicted: Predicted) -> None:
    import torch
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    directory = made.write_t5(tmp_path / "t5")
    torch.manual_seed(3)
    model = T5ForConditionalGeneration(T5Config.from_pretrained(directory)).eval()
    model.save_pretrained(directory)
    (row,) = predicted(
        "t5", "--text", "sun moon river", "--model", directory, "--generation.max-new-tokens", 5
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    ids = [*tokenizer("sun moon river", add_special_tokens=False).input_ids, model.config.eos_token_id]
    written = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)[0, 1:]
    text = tokenizer.decode(written.tolist(), skip_special_tokens=True)
    assert row == {"id": 1, "text": text, "precision": "fp32"}
    with pytest.raises(UsageError, match="was not finetuned on labels"):
        t5_written.require_labels(tmp_path, read_t5(directory))


@pytest.mark.parametrize("workers", ONE_TO_THREE)
def test_classes_of_images_are_those_of_the_evaluation(
    resnet_run: Path, photos: Path, predicted: Predicted, workers: int
) -> None:
    rows = predicted("resnet50", photos, "--model", resnet_run, "--top", 4, workers=workers)
    assert [Path(row["image"]).stem for row in rows] == [f"{number:03}" for number in range(23)]
    shards = ImageShards(resnet_run.parent / "images", "validation")
    labels = [shards.manifest.classes[label] for label in shards.labels]
    (last,) = [row for row in read_record(resnet_run) if isinstance(row, Evaluation) and row.step == 9]
    right = [row["label"] == label for row, label in zip(rows, labels, strict=True)]
    assert sum(right) / 23 == last.metrics["top1_accuracy"]
    chances = [{one["label"]: one["probability"] for one in row["top"]} for row in rows]
    losses = [-np.log(chance[label]) for chance, label in zip(chances, labels, strict=True)]
    assert np.mean(losses) == pytest.approx(last.metrics["loss"], rel=1e-5)
    assert rows == predicted("resnet50", photos, "--model", resnet_run / "model", "--top", 4)


@pytest.mark.parametrize("workers", ONE_TO_THREE)
def test_scores_of_images_are_the_bits_of_the_run(resnet_run: Path, tmp_path: Path, workers: int) -> None:
    out = tmp_path / "scores.json"
    options = ("--batch-size", 5, "--json", out)
    data = ("--data", resnet_run.parent / "images")
    said = use_jobs.said(tmp_path, "evaluate", "imagenet", resnet_run, *data, *options, workers=workers)
    (last,) = [row for row in read_record(resnet_run) if isinstance(row, Evaluation) and row.step == 9]
    found = json.loads(out.read_text())
    assert {name: found[name] for name in last.metrics} == last.metrics
    assert found["precision"] == "fp32" and said.endswith(", in fp32\n")


@pytest.mark.slow
def test_predictions_of_png_files_are_those_of_their_shards(
    resnet_run: Path, predicted: Predicted, tmp_path: Path
) -> None:
    """Noise, which a JPEG changes most; the probabilities give the accuracy and the loss of the shards."""
    classes = ImageShards(resnet_run.parent / "images", "validation").manifest.classes
    rng = np.random.default_rng(1)
    for name in (
        f"{split}/{label}/{number}.png"
        for split in ("train", "val")
        for label in classes
        for number in range(5)
    ):
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (26, 26, 3), dtype=np.uint8)).save(file)
    assert (
        shoal("prepare", "images", str(tmp_path / "in"), "--out", str(tmp_path / "out")).returncode == EXIT_OK
    )
    options = ("--data", tmp_path / "out", "--precision", "fp32", "--json", tmp_path / "scores.json")
    use_jobs.said(tmp_path, "evaluate", "imagenet", resnet_run, *options)
    scores = json.loads((tmp_path / "scores.json").read_text())
    rows = predicted("resnet50", tmp_path / "in" / "val", "--model", resnet_run, "--top", 4)
    labels = [Path(row["image"]).parent.name for row in rows]
    assert sum(row["label"] == label for row, label in zip(rows, labels, strict=True)) == scores["top1"]
    chances = [{one["label"]: one["probability"] for one in row["top"]} for row in rows]
    losses = [-np.log(chance[label]) for chance, label in zip(chances, labels, strict=True)]
    assert np.mean(losses) == pytest.approx(scores["loss"], rel=1e-6)


def test_bad_images_are_named(resnet_run: Path, tmp_path: Path) -> None:
    refused = partial(use_jobs.refused, "predict", "resnet50", "--model", resnet_run)
    assert "no image is named" in refused()
    assert "no.jpg does not exist" in refused(tmp_path / "no.jpg")
    (tmp_path / "empty").mkdir()
    assert "no file in this folder has the suffix of an image" in refused(tmp_path / "empty")
    (tmp_path / "bad.jpg").write_text("no image")
    reader = FileReader([tmp_path / "bad.jpg"], CentreTransform(8, 8), threads=1)
    with pytest.raises(UsageError, match=r"bad\.jpg"):
        reader.batch(0, [0])


@pytest.mark.parametrize("workers", ONE_TO_THREE)
def test_scores_are_the_bytes_of_the_run_on_any_number_of_workers(
    squad_run: Path, classify_run: Path, t5_run: Path, tmp_path: Path, workers: int
) -> None:
    said, out = partial(use_jobs.said, tmp_path, "evaluate", workers=workers), tmp_path / "out"
    asked = ("--data", squad_run.parent / "made.json", "--out", out, "--json", out / "again.json")
    text = said("squad", "--model", squad_run, *asked)
    scores = (squad_run / "scores.json").read_bytes()
    figures = json.loads(scores) | {"precision": "fp32"}
    assert json.loads(text) == json.loads((out / "again.json").read_text()) == figures
    for name in ("predictions.json", "nbest.json", "null_odds.json", "scores.json"):
        assert (out / name).read_bytes() == (squad_run / name).read_bytes()
    for task, run in (("classify", classify_run), ("t5", t5_run)):
        text = said(task, run.parent / "train.tsv", "--model", run, "--out", out)
        tree = json.loads((run / "scores-train.json").read_text())
        assert f"accuracy {tree['accuracy']:.2f} %" in text and "examples, in fp32\n" in text
        assert "recall %" in text
        for name in ("predictions-train.txt", "scores-train.json"):
            assert (out / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize("workers", ONE_TO_THREE)
def test_scores_of_detectors_are_the_bytes_of_the_run(
    detector_run: Path, tmp_path: Path, workers: int
) -> None:
    scenes = detector_run.parent / "scenes"
    options = ("--model", detector_run, "--data", scenes, "--out", "out")
    said = use_jobs.said(tmp_path, "evaluate", "mask_rcnn", *options, workers=workers)
    assert said.startswith("box, in fp32\n") and "\nmask, in fp32\n" in said
    assert "Average Precision" in said
    for name in ("results.json", "scores.json"):
        assert (tmp_path / "out" / name).read_bytes() == (detector_run / name).read_bytes()


def test_objects_are_the_same_bytes_on_two_workers(detector_run: Path, photos: Path, tmp_path: Path) -> None:
    arguments = ("predict", "mask_rcnn", photos, "--model", detector_run, "--min-score", 0.0)
    alone, both = (
        use_jobs.said(tmp_path, *arguments, "--out", f"{workers}", workers=workers) for workers in (1, 2)
    )
    assert both == alone.replace("(1/", "(2/") and len(alone.splitlines()) == 23
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(names) == 2 * 23
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_bad_pictures_are_named_before_a_worker_starts(detector_run: Path, tmp_path: Path) -> None:
    assert "no image is named" in refused("mask_rcnn", "--model", detector_run)
    assert "no.jpg does not exist" in refused("mask_rcnn", tmp_path / "no.jpg", "--model", detector_run)


def test_bad_evaluations_are_named(classify_run: Path, squad_run: Path, tmp_path: Path) -> None:
    evaluate, model = partial(use_jobs.refused, "evaluate"), ("--model", classify_run)
    assert "none is named" in evaluate("classify", *model)
    file = classify_run.parent / "train.tsv"
    assert "each of another name (train, train)" in evaluate("classify", file, file, *model)
    questions = squad_run.parent / "made.json"
    assert "give one of the two" in evaluate("squad", "--data", questions)
    both = ("--predictions", squad_run / "predictions.json", "--model", squad_run)
    assert "give one of the two" in evaluate("squad", "--data", questions, *both)


def test_bad_input_is_named_before_a_worker_starts(classify_run: Path, tmp_path: Path) -> None:
    model = ("--model", classify_run)
    assert "neither is" in refused("classify", *model)
    assert "both are given" in refused("classify", *model, tmp_path / "x.tsv", "--text", "sun")
    assert "no.tsv does not exist" in refused("classify", *model, tmp_path / "no.tsv")
    (tmp_path / "odd.tsv").write_text("sentence1\tsentense2\nsun\tmoon\n")
    assert "no column 'sentence2'" in refused("classify", *model, tmp_path / "odd.tsv")
    text = ("--text", "sun", "--second-text", "moon")
    assert "there is no folder" in refused("classify", *model, *text, "--out", tmp_path / "no" / "out.jsonl")
    with pytest.raises(UsageError, match="not trained for this task"):
        using.read_task_model(QuestionAnswering, classify_run)
    (tmp_path / "q.jsonl").write_text('{"question": "a"}\n')
    assert (
        "q.jsonl: nothing can be used; left out 1: entry of another form than SQuAD's: 1 (line 1:"
        in refused("squad", *model, tmp_path / "q.jsonl")
    )


@pytest.mark.slow
def test_the_command_starts_its_workers(classify_run: Path, predicted: Predicted, tmp_path: Path) -> None:
    arguments = ("predict", "classify", classify_run.parent / "train.tsv", "--model", classify_run)
    result = shoal(*map(str, arguments), "--workers", "2")
    assert result.returncode == EXIT_OK, result.stderr
    assert [json.loads(line) for line in result.stdout.splitlines()] == predicted(*arguments[1:])
    result = shoal(*map(str, arguments), "--workers", "2", "--dry-run")
    assert result.stdout.splitlines()[0] == "workers      2" and "60 texts" in result.stdout


def test_the_commands_of_the_page(
    squad_run: Path,
    classify_run: Path,
    t5_run: Path,
    resnet_run: Path,
    detector_run: Path,
    photos: Path,
    tmp_path: Path,
) -> None:
    filling = made.write_model(tmp_path / "filling")
    BertForMaskedLM(BertConfig.from_pretrained(filling)).save_pretrained(filling)
    (tmp_path / "runs").mkdir()
    (tmp_path / "photos").symlink_to(photos)
    for name, run in (
        ("squad", squad_run),
        ("pairs", classify_run),
        ("t5", t5_run),
        ("resnet50", resnet_run),
        ("first", filling),
        ("detector", detector_run),
        ("coco", detector_run.parent / "scenes"),
    ):
        (tmp_path / "runs" / name).symlink_to(run)
    asked = {"question": "sun moon", "context": "river stone bird"}
    (tmp_path / "questions.jsonl").write_text(json.dumps(asked))
    shutil.copy(classify_run.parent / "train.tsv", tmp_path / "pairs.tsv")
    shutil.copy(squad_run.parent / "made.json", tmp_path / "dev-v2.0.json")
    commands = use_jobs.commands_of_page("use.md")
    assert len(commands) >= 4
    for words in commands:
        found = use_jobs.said(tmp_path, *words)
        if words[0] == "predict":
            assert len(found.splitlines()) == (0 if "--out" in words else 1), words
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 1
    assert len((tmp_path / "labels.jsonl").read_text().splitlines()) == 60
    wanted = (squad_run / "predictions.json").read_bytes()
    assert (tmp_path / "scored" / "predictions.json").read_bytes() == wanted


def test_checkpoints_of_a_run_that_has_not_ended_predict_as_its_export(
    squad_run: Path, classify_run: Path, t5_run: Path, predicted: Predicted, tmp_path: Path
) -> None:
    pairs = (classify_run.parent / "train.tsv").read_text().splitlines()[:9]
    (tmp_path / "pairs.tsv").write_text("\n".join(pairs) + "\n")
    for task, run in (("squad", squad_run), ("classify", classify_run), ("t5", t5_run)):
        copy = shutil.copytree(run, tmp_path / task, ignore=shutil.ignore_patterns("transformers"))
        file = squad_run.parent / "made.json" if task == "squad" else tmp_path / "pairs.tsv"
        assert predicted(task, file, "--model", copy) == predicted(task, file, "--model", run)
    shutil.rmtree(tmp_path / "classify" / DESCRIPTION)  # as before its first step
    with pytest.raises(UsageError, match="not of a finetuning that has begun"):
        using.find_trained(tmp_path / "classify")
