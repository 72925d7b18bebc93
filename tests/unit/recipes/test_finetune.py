"""``shoal finetune`` before any worker starts: what it prints, what it refuses; and the loss it trains on."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cyclopts import CycloptsError
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

import finetune_made as made
from shoal.cli.app import app
from shoal.data.loader import as_tensors
from shoal.data.squad.dataset import read_squad
from shoal.data.squad.features import make_features
from shoal.data.text.classify import Columns, make_pairs, read_classify
from shoal.data.text.tokenizer_files import tokenizer_json
from shoal.errors import UsageError
from shoal.models.directory import save
from shoal.models.encoder import packed_inputs
from shoal.models.pretraining import transformers_config
from shoal.models.t5 import read_t5
from shoal.models.tasks import QuestionAnswering, SequenceClassification, load_task_model, span_loss
from shoal.models.text_config import AlbertModelConfig, BertModelConfig
from shoal.recipes.finetuning import (
    FinetuneConfig,
    FinetuneOptimConfig,
    FinetuneTrainConfig,
    make_plan,
)
from shoal.recipes.prepared_text import tokenizer_files
from shoal.recipes.source_tokenizer import read_source_tokenizer
from shoal.recipes.squad import fitted


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_questions(tmp_path_factory.mktemp("data") / "made.json")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_pairs(tmp_path_factory.mktemp("data") / "pairs.tsv", 20, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_model(tmp_path_factory.mktemp("model") / "bert", max_position_embeddings=512)


def shoal(*arguments: object) -> int:
    words = [str(argument) for argument in arguments]
    return int(app(words, result_action="return_value", exit_on_error=False, print_error=False))


def squad(model: Path, questions: Path, *more: object) -> int:
    return shoal("finetune", "squad", "--model", model, "--data", questions, "--eval", questions, *more)


def classify(model: Path, pairs: Path, *more: object) -> int:
    return shoal("finetune", "classify", "--model", model, "--data", pairs, "--eval", pairs, *more)


@pytest.mark.parametrize("preset", ["bert", "albert", "tiny"])
def test_dry_run_says_what_the_settings_come_to(
    model: Path, questions: Path, pairs: Path, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert squad(model, questions, "--preset", preset, "--workers", 2, "--dry-run") == 0
    said = capsys.readouterr().out
    resolved = tomllib.loads(said.partition("\nbatch ")[0])
    assert resolved["window"] == {"max_seq_length": 384, "doc_stride": 128, "max_question_length": 64}
    steps = {"bert": "2 steps, 0 of", "albert": "8,144 steps, 814 of", "tiny": "45 steps, 4 of"}[preset]
    assert f"run          {steps} them warm-up" in said
    assert "SQuAD 2.0, 24 questions, 24 windows" in said and "nothing was started" in said
    assert classify(model, pairs, "--preset", preset, "--dry-run") == 0
    assert "labels       other, same" in capsys.readouterr().out


def test_a_dry_run_of_t5_shows_the_wording(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t5 = made.write_t5(tmp_path / "t5")
    files = ("--model", t5, "--data.path", pairs, "--eval", pairs)
    assert shoal("finetune", "t5", *files, "--preset", "tiny", "--task", "qqp", "--dry-run") == 0
    said = capsys.readouterr().out
    resolved = tomllib.loads(said.partition("\nbatch ")[0])
    assert resolved["run"]["name"] == "t5-qqp-tiny" and resolved["optim"]["optimizer"] == "adafactor"
    assert resolved["train"]["epochs"] == 20.0  # the preset's
    assert "worded as    qqp question1: {first} question2: {second}" in said


@pytest.mark.parametrize("source", ["--source-column", "--data.source-column"])
def test_options_that_need_one_another_may_be_short(
    source: str, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--model", made.write_t5(tmp_path / "t5"), "--data", pairs, "--eval", pairs, "--preset", "tiny")
    columns = (source, "sentence1", "--target-column", "sentence2")
    assert shoal("finetune", "t5", *files, "--task", "rephrase", *columns, "--dry-run") == 0
    said = capsys.readouterr().out
    resolved = tomllib.loads(said.partition("\nbatch ")[0])["data"]
    assert (resolved["source_column"], resolved["target_column"]) == ("sentence1", "sentence2")
    assert "worded as    rephrase: {first}" in said


def test_a_configuration_reads_back(
    model: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--labels", "same", "other", "--data.second", "", "--dry-run")
    assert classify(model, pairs, *more) == 0
    said = capsys.readouterr().out
    assert "labels       same, other" in said
    file = tmp_path / "mine.toml"
    file.write_text(said.partition("\nbatch ")[0])
    assert shoal("finetune", "classify", "--config", file, "--dry-run") == 0
    assert capsys.readouterr().out == said


def _without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def _of_another_vocabulary(model: Path) -> None:
    tree = json.loads((model / "config.json").read_text()) | {"vocab_size": 50}
    (model / "config.json").write_text(json.dumps(tree))


def _without_config(model: Path) -> None:
    (model / "config.json").unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_tokenizer, "holds no tokenizer (tokenizer.json, vocab.txt, spiece.model)"),
        (_of_another_vocabulary, "50 embeddings; they do not belong together"),
        (_without_config, "a directory of an exported model (with config.json) or a model of the hub"),
    ],
)
def test_models_that_cannot_be_used_are_refused(
    model: Path, questions: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    change(changed)
    with pytest.raises(UsageError) as refused:
        squad(changed, questions, "--run.dir", tmp_path / "run")
    assert message in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ('{"rows": []}', "must be an object with the key 'data'"),
        ("[]", "holds no question"),
        ('{"data": []}', "holds no question"),
    ],
)
def test_files_that_are_not_squad_are_refused(
    model: Path, questions: Path, tmp_path: Path, content: str, message: str
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(content)
    for data, held_out in ((wrong, questions), (questions, wrong)):
        with pytest.raises(UsageError) as refused:
            shoal("finetune", "squad", "--model", model, "--data", data, "--eval", held_out)
        assert message in str(refused.value) and str(wrong) in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--window.max-seq-length", 600), "window.max_seq_length 600 is more than the 512 positions"),
        (("--window.max-seq-length", 5), "has no room"),
        (("--workers", 3), "train.global_batch_size 32 does not divide over 3 workers"),
        (("--train.epochs", 0), "train.epochs 0.0 must be above 0"),
        (("--model.dropout", 1), "model.dropout 1.0 must be at least 0 and below 1"),
        (("--optim.warmup-steps", 99, "--train.total-steps", 9), "optim.warmup_steps 99 must lie between"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    model: Path, questions: Path, options: tuple[object, ...], message: str
) -> None:
    with pytest.raises((UsageError, CycloptsError)) as refused:
        squad(model, questions, *options, "--dry-run")
    assert message in str(refused.value)


def test_windows_fit_the_model_unless_a_length_is_given(
    questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert squad(made.write_model(tmp_path / "bert"), questions, "--dry-run") == 0
    assert "max_seq_length = 64\n" in capsys.readouterr().out
    pretrained = tmp_path / "run"  # refused by its settings: no checkpoint is exported, no folder made
    pretrained.mkdir()
    (pretrained / "config.toml").write_text("[model]\nmax_position_embeddings = 128\n")
    with pytest.raises(UsageError, match=r"129 is more than the 128 .*--window\.max-seq-length 128"):
        squad(pretrained, questions, "--window.max-seq-length", 129, "--run.dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for path, length in ((pretrained, 128), (Path("hub:some/name"), 384)):
        config = made.squad_config(path, questions, tmp_path / "out", window={"max_seq_length": None})
        assert fitted(config).window.max_seq_length == length


def test_what_must_be_named_is_asked_for(model: Path, questions: Path) -> None:
    for arguments, message in (
        ((), "model.path is not set"),
        (("--model", model), "data.path is not set"),
        (("--model", model, "--data", questions), "data.eval is not set"),
    ):
        with pytest.raises(UsageError, match=message):
            shoal("finetune", "squad", *arguments)


def test_a_label_outside_the_set_is_named(model: Path, pairs: Path) -> None:
    with pytest.raises(UsageError, match=r"line \d+: the label 'other' is not one of same, different"):
        classify(model, pairs, "--labels", "same", "different")


def test_steps_follow_from_epochs_and_warm_up_from_its_share() -> None:
    config = FinetuneConfig(
        train=FinetuneTrainConfig(epochs=2.0, global_batch_size=32),
        optim=FinetuneOptimConfig(warmup_share=0.1),
    )
    plan = make_plan(config, num_sequences=88_524, num_workers=4)
    assert (plan.total_steps, plan.schedule.warmup_steps) == (5_533, 553)  # 5,532.75 steps of SQuAD 1.1
    assert (plan.batch.micro_batch_size, plan.batch.accumulation_steps) == (8, 1)


def test_the_loss_is_that_of_transformers(model: Path, questions: Path, tmp_path: Path) -> None:
    """transformers' loss of each window alone, where there is no padding to compete, in float64."""
    config = made.squad_config(model, questions, tmp_path)
    torch.manual_seed(5)
    ours = load_task_model(QuestionAnswering, model, from_scratch=True)
    save(ours, tmp_path / "saved", tokenizer={})
    theirs = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "saved").double()
    ours.double()
    features = make_features(
        read_squad(questions, purpose="score"), read_source_tokenizer(model), config.window
    )
    wanted = torch.zeros((), dtype=torch.float64)
    for window in range(len(features)):
        inside = slice(features.bounds[window], features.bounds[window + 1])
        out = theirs(
            input_ids=torch.from_numpy(features.tokens[inside]).long()[None],
            token_type_ids=torch.from_numpy(features.types[inside]).long()[None],
            start_positions=torch.tensor([int(features.start[window])]),
            end_positions=torch.tensor([int(features.end[window])]),
        )
        wanted = wanted + out.loss
    assert features.start.any() and not features.start.all()  # windows with the answer and without
    batch = as_tensors(features.batch(torch.arange(len(features)).numpy()), pin_memory=False)
    logits = ours(**packed_inputs(batch))
    loss = span_loss(*logits, batch, batch["start"], batch["end"])
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    wanted.backward()
    loss.backward()
    for (name, own), reference in zip(ours.weights.named_parameters(), theirs.parameters(), strict=True):
        assert own.grad is not None and reference.grad is not None, name
        torch.testing.assert_close(own.grad, reference.grad, rtol=1e-9, atol=1e-12, msg=name)


SIZES = {
    "vocab_size": made.VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "initializer_range": 0.2,
}
FAMILIES = {
    "bert": BertModelConfig(**SIZES),
    "roberta": BertModelConfig(**SIZES, family="roberta"),
    "distilbert": BertModelConfig(**SIZES, family="distilbert"),
    "albert": AlbertModelConfig(**SIZES, embedding_size=16),
    "albert, pre-norm": AlbertModelConfig(**SIZES, embedding_size=16, pre_layer_norm=True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_pairs_as_the_model_was_trained(
    family: str, model: Path, pairs: Path, tmp_path: Path
) -> None:
    """A source without tokenizer_config.json; a user's call, which says nothing of segments or lengths."""
    transformers_config(FAMILIES[family]).save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    tokenizer, out = read_source_tokenizer(tmp_path / "source"), tmp_path / "out"
    torch.manual_seed(5)
    ours = load_task_model(
        SequenceClassification, tmp_path / "source", labels=("same", "other"), from_scratch=True
    )
    save(ours.eval(), out, tokenizer=tokenizer_files(tokenizer, ours))

    data = read_classify(pairs, Columns(), labels=("same", "other"))
    batch = as_tensors(make_pairs(data, tokenizer, max_seq_length=24).batch(torch.arange(20).numpy()), False)
    with torch.no_grad():
        wanted = ours(**packed_inputs(batch)).softmax(1)
    theirs = pipeline("text-classification", model=str(out), top_k=None)
    assert (read_source_tokenizer(out).to_str(), theirs.tokenizer.model_max_length) == (
        tokenizer.to_str(),
        24,
    )
    rows = theirs([{"text": each.first, "text_pair": each.second} for each in data.examples])
    chances = [
        [{row["label"]: row["score"] for row in found}[name] for name in data.labels] for found in rows
    ]
    torch.testing.assert_close(torch.tensor(chances), wanted, rtol=0, atol=1e-6)

    auto = AutoTokenizer.from_pretrained(out)
    ids = auto("sun road", "hill")
    assert ("token_type_ids" in ids) == (family in ("bert", "albert", "albert, pre-norm"))
    long = auto("sun " * 30, "moon " * 30, truncation=True, return_tensors="pt")
    assert long.input_ids.shape == (1, 24)
    AutoModelForSequenceClassification.from_pretrained(out)(**long)  # it has positions for all of them


def test_transformers_ends_texts_of_a_finetuned_t5_as_it_was_trained(tmp_path: Path) -> None:
    source, out = made.write_t5(tmp_path / "t5"), tmp_path / "out"
    ours, tokenizer = read_t5(source, from_scratch=True), read_source_tokenizer(source)
    save(ours, out, tokenizer=tokenizer_files(tokenizer, ours, 32))
    auto, plain = (
        AutoTokenizer.from_pretrained(out),
        tokenizer.encode("sun moon", add_special_tokens=False).ids,
    )
    end = ours.weights.config.eos_token_id
    assert auto("sun moon") == {"input_ids": [*plain, end], "attention_mask": [1] * (len(plain) + 1)}
    assert auto.eos_token_id == end and auto.pad_token_id == ours.weights.config.pad_token_id
    long = auto("sun " * 60, truncation=True).input_ids
    assert len(long) == 32 and long[-1] == end
    assert (out / "tokenizer.json").read_bytes() != tokenizer_json(tokenizer)  # that one begins with [CLS]
