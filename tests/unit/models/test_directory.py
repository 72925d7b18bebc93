"""Transformers directories: started from, written, and read back by transformers itself."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import HIDDEN, inputs_of, packed, padded_batch, tiny_config
from transformers import (
    AlbertForPreTraining,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    BertForPreTraining,
    PreTrainedModel,
)

from shoal.errors import ShoalError, UsageError
from shoal.models.directory import model_type_of, save
from shoal.models.layers import MODEL_TYPES, embedding_dropout
from shoal.models.tasks import QuestionAnswering, SequenceClassification, load_task_model

architectures = pytest.mark.parametrize("model_type", MODEL_TYPES)
LABELS = ("entailment", "neutral", "contradiction")


def write(model_class: Any, model_type: str, directory: Path, **changes: object) -> PreTrainedModel:
    torch.manual_seed(3)
    make = getattr(model_class, "from_config", None) or model_class
    model: PreTrainedModel = make(tiny_config(model_type, **changes)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return model


def same_base(ours: QuestionAnswering | SequenceClassification, theirs: PreTrainedModel) -> None:
    expected, found = theirs.base_model.state_dict(), ours.weights.base_model.state_dict()
    shared = [name for name in found if name in expected]
    assert {name for name in found if "pooler" not in name} <= set(shared)
    assert all(torch.equal(found[name], expected[name]) for name in shared)


# ------------------------------------------------------------------------------------- where one starts


@architectures
def test_finetuned_models_come_whole(model_type: str, tmp_path: Path) -> None:
    batch = padded_batch()
    theirs = write(AutoModelForQuestionAnswering, model_type, tmp_path / "qa")
    model = load_task_model(QuestionAnswering, tmp_path / "qa").eval()
    assert model_type_of(tmp_path / "qa") == model_type and model.new_parts == ()
    start, _ = model(**packed(batch))
    expected = theirs(**inputs_of(model_type, batch)).start_logits[batch["attention_mask"].bool()]
    torch.testing.assert_close(start, expected, rtol=1e-4, atol=1e-5)

    theirs = write(AutoModelForSequenceClassification, model_type, tmp_path / "classify", num_labels=3)
    classifier = load_task_model(SequenceClassification, tmp_path / "classify", labels=LABELS).eval()
    assert classifier.new_parts == ()
    logits = theirs(**inputs_of(model_type, batch)).logits
    torch.testing.assert_close(classifier(**packed(batch)), logits, rtol=1e-4, atol=1e-5)


@architectures
def test_from_a_base_model_whose_names_have_no_prefix(model_type: str, tmp_path: Path) -> None:
    theirs = write(AutoModel, model_type, tmp_path / "base")
    model = load_task_model(QuestionAnswering, tmp_path / "base")
    same_base(model, theirs)
    assert model.new_parts == ("qa_outputs.bias", "qa_outputs.weight")


@pytest.mark.parametrize(
    ("model_class", "model_type"),
    [
        (AlbertForPreTraining, "albert"),
        (BertForPreTraining, "bert"),
        *((AutoModelForMaskedLM, model_type) for model_type in MODEL_TYPES),
    ],
)
def test_from_pretraining(model_class: Any, model_type: str, tmp_path: Path) -> None:
    theirs = write(model_class, model_type, tmp_path / "pretrained")
    same_base(load_task_model(QuestionAnswering, tmp_path / "pretrained"), theirs)
    classifier = load_task_model(SequenceClassification, tmp_path / "pretrained", labels=LABELS)
    same_base(classifier, theirs)
    assert any(name.endswith("weight") for name in classifier.new_parts)
    assert all("pooler" in name or "classifier" in name for name in classifier.new_parts)


def test_new_heads_come_from_the_seed(tmp_path: Path) -> None:
    write(BertForPreTraining, "bert", tmp_path / "bert")

    def head(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return load_task_model(QuestionAnswering, tmp_path / "bert").weights.qa_outputs.weight

    assert torch.equal(head(1), head(1))
    assert not torch.equal(head(1), head(2))
    assert 0.01 < head(1).std() < 0.04  # initializer_range is 0.02


def test_from_scratch_takes_only_the_sizes(tmp_path: Path) -> None:
    theirs = write(BertForPreTraining, "bert", tmp_path / "bert")
    torch.manual_seed(1)
    model = load_task_model(QuestionAnswering, tmp_path / "bert", from_scratch=True)
    assert set(model.new_parts) == {name for name, _ in model.weights.named_parameters()}
    ours = model.weights.bert.embeddings.word_embeddings.weight
    assert ours.shape == theirs.bert.embeddings.word_embeddings.weight.shape
    assert not torch.equal(ours, theirs.bert.embeddings.word_embeddings.weight)


@architectures
def test_dropout_by_choice(model_type: str, tmp_path: Path) -> None:
    write(AutoModel, model_type, tmp_path / "base")
    model = load_task_model(QuestionAnswering, tmp_path / "base", dropout=0.25)
    assert {layer.attention_dropout for layer in model.encoder.layers} == {0.25}
    outputs = [(layer.dense_dropout, layer.output_dropout) for layer in model.encoder.layers]
    assert all(0.25 in pair for pair in outputs)
    assert embedding_dropout(model.weights.base_model) == 0.25
    assert {
        layer.attention_dropout
        for layer in load_task_model(QuestionAnswering, tmp_path / "base").encoder.layers
    } == {0.0}


def test_half_precision_weights_become_fp32(tmp_path: Path) -> None:
    write(AutoModel, "bert", tmp_path / "whole").half().save_pretrained(tmp_path / "half")
    model = load_task_model(QuestionAnswering, tmp_path / "half")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# --------------------------------------------------------------------------------------------- writing


@architectures
def test_transformers_reads_what_is_saved(model_type: str, tmp_path: Path) -> None:
    batch = padded_batch()
    write(AutoModel, model_type, tmp_path / "base")
    classifier = load_task_model(SequenceClassification, tmp_path / "base", labels=LABELS).eval()
    save(classifier, tmp_path / "out", tokenizer={"tokenizer.json": b"{}"})
    save(classifier, tmp_path / "out", tokenizer={"tokenizer.json": b"{}"})  # replaces the older
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    theirs, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values())
    assert theirs.config.id2label == dict(enumerate(LABELS))
    expected = theirs.eval()(**inputs_of(model_type, batch)).logits
    torch.testing.assert_close(classifier(**packed(batch)), expected, rtol=1e-4, atol=1e-5)

    answers = load_task_model(QuestionAnswering, tmp_path / "base").eval()
    save(answers, tmp_path / "answers", tokenizer={})
    theirs = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "answers").eval()
    expected = theirs(**inputs_of(model_type, batch)).end_logits[batch["attention_mask"].bool()]
    torch.testing.assert_close(answers(**packed(batch))[1], expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------- errors


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    write(AutoModelForSequenceClassification, "bert", tmp_path / "bert", num_labels=3)
    return tmp_path / "bert"


def one_line(error: pytest.ExceptionInfo[ShoalError]) -> bool:
    return "\n" not in str(error.value)


def test_a_model_without_room_is_one_error_and_leaves_what_was_there(bert: Path, tmp_path: Path) -> None:
    """The error of safetensors is neither an OSError nor a RuntimeError."""
    model = load_task_model(SequenceClassification, bert, labels=LABELS)
    save(model, tmp_path / "saved", tokenizer={})
    before = (tmp_path / "saved" / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(
            ShoalError, match=r"saved: the model cannot be written: .*File too large"
        ) as raised:
            save(model, tmp_path / "saved", tokenizer={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert one_line(raised) and "free some space" in str(raised.value)
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "saved.tmp").exists()


def test_not_a_transformers_directory(tmp_path: Path, bert: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json.*hub:NAME") as error:
        load_task_model(QuestionAnswering, tmp_path)
    assert one_line(error)
    with pytest.raises(UsageError, match="nowhere is not a transformers directory: it does not exist"):
        load_task_model(QuestionAnswering, tmp_path / "nowhere")
    config = (bert / "config.json").read_text()
    (bert / "config.json").write_text(config.replace('"bert"', '"gpt2"'))
    with pytest.raises(
        UsageError, match="model_type 'gpt2' must be one of bert, albert, albert-prelayernorm, roberta"
    ):
        load_task_model(QuestionAnswering, bert)
    for text in ("{", "[]", "{}"):
        (bert / "config.json").write_text(text)
        with pytest.raises(UsageError, match=r"config\.json(: is not JSON| names no model_type)") as error:
            load_task_model(QuestionAnswering, bert)
        assert one_line(error)
    (bert / "config.json").write_text(config.replace('"num_attention_heads": 4', '"num_attention_heads": 5'))
    with pytest.raises(ShoalError) as error:
        load_task_model(QuestionAnswering, bert)
    assert one_line(error)


def test_pickled_weights_are_not_read(bert: Path) -> None:
    torch.save({}, bert / "pytorch_model.bin")
    load_task_model(QuestionAnswering, bert)  # the safetensors are
    (bert / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"only as a pickle \(pytorch_model\.bin\).*safetensors") as error:
        load_task_model(QuestionAnswering, bert)
    assert one_line(error)
    (bert / "pytorch_model.bin").unlink()
    with pytest.raises(UsageError, match=r"has no weights.*--model\.from-scratch"):
        load_task_model(QuestionAnswering, bert)


def test_damaged_weights(bert: Path) -> None:
    whole = (bert / "model.safetensors").read_bytes()
    (bert / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShoalError, match="the weights cannot be read") as error:
        load_task_model(QuestionAnswering, bert)
    assert one_line(error)


def test_weights_of_other_sizes(bert: Path) -> None:
    config = (bert / "config.json").read_text()
    (bert / "config.json").write_text(config.replace('"vocab_size": 97', '"vocab_size": 98'))
    with pytest.raises(
        UsageError, match=rf"word_embeddings\.weight has shape \(97, {HIDDEN}\) there and \(98, {HIDDEN}\)"
    ) as error:
        load_task_model(QuestionAnswering, bert)
    assert one_line(error)
    (bert / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(UsageError, match=r"encoder\.layer\.3.* and 15 more of the encoder's weights"):
        load_task_model(QuestionAnswering, bert)


def test_labels_that_do_not_fit_the_head(bert: Path) -> None:
    with pytest.raises(UsageError, match=r"classifier\.bias has shape \(3,\) there and \(2,\) in the model"):
        load_task_model(SequenceClassification, bert, labels=("yes", "no"))
    save(load_task_model(SequenceClassification, bert, labels=LABELS), bert, tokenizer={})
    load_task_model(SequenceClassification, bert, labels=LABELS)
    load_task_model(SequenceClassification, bert)
    with pytest.raises(
        UsageError, match="labels there are entailment, neutral, contradiction, asked for are"
    ):
        load_task_model(SequenceClassification, bert, labels=LABELS[::-1])


def test_the_hub_is_asked_only_by_name(bert: Path, tmp_path: Path) -> None:
    """In a process of its own, whose hub is a closed port of this host."""
    program = (
        "from shoal.models.tasks import QuestionAnswering, load_task_model\n"
        f"print(load_task_model(QuestionAnswering, {str(bert)!r}).new_parts)\n"
        "load_task_model(QuestionAnswering, 'hub:nobody/nothing')\n"
    )
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "('qa_outputs.bias', 'qa_outputs.weight')\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("shoal.errors.ShoalError: hub:nobody/nothing: cannot be fetched"), done.stderr
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
