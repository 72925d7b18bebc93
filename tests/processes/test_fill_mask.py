"""``shoal predict fill-mask``: transformers' probabilities, the same bits on any workers; and bad texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pretrain_jobs
import pytest
import torch
import use_jobs
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

import finetune_made as made
from shoal.data.text.fill_mask import make_masked_texts, read_lines
from shoal.errors import EXIT_OK, UsageError
from shoal.models.albert_prelayernorm import AlbertPreLayerNormConfig, AlbertPreLayerNormForMaskedLM
from shoal.models.tasks import MaskedLM, load_task_model
from shoal.recipes.fill_mask import read_masked_lm
from shoal.recipes.source_tokenizer import read_source_tokenizer

SIZES = {
    "vocab_size": made.VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,
}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "initializer_range": 0.3}
MODELS: dict[str, Any] = {
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "albert": lambda: AlbertForMaskedLM(AlbertConfig(**SIZES, embedding_size=16)),
    "albert, pre-norm": lambda: AlbertPreLayerNormForMaskedLM(
        AlbertPreLayerNormConfig(**SIZES, embedding_size=16)
    ),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**SIZES, type_vocab_size=2)),
    "distilbert": lambda: DistilBertForMaskedLM(DistilBertConfig(vocab_size=made.VOCAB, **DISTILBERT)),
}
TEXTS = ["sun [MASK] river", "[MASK] bird tree [MASK] wind light", "stone road [MASK]"]


@pytest.mark.parametrize("name", MODELS)
def test_masks_are_filled_as_by_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    directory = made.write_model(tmp_path / "model")
    model = MODELS[name]().eval()
    model.save_pretrained(directory)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    arguments = ("predict", "fill-mask", "texts.txt", "--model", directory, "--top", 3, "--batch-size", 2)
    rows = use_jobs.lines(tmp_path, *arguments)
    assert rows == use_jobs.lines(tmp_path, *arguments, workers=3)
    assert [row["text"] for row in rows] == TEXTS and [len(row["masks"]) for row in rows] == [1, 2, 1]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    mask = tokenizer.convert_tokens_to_ids("[MASK]")
    for row in rows:
        ids = tokenizer(row["text"], return_tensors="pt").input_ids
        with torch.no_grad():
            chances = model(input_ids=ids).logits.softmax(2)[ids == mask]
        for own, found in zip(chances, row["masks"], strict=True):
            best = own.topk(3)
            tokens = [tokenizer.convert_ids_to_tokens(token) for token in best.indices.tolist()]
            assert [one["token"] for one in found["top"]] == tokens
            assert [one["probability"] for one in found["top"]] == pytest.approx(
                best.values.tolist(), abs=1e-5
            )


def test_a_run_fills_masks_as_its_export_does(tmp_path: Path) -> None:
    config = pretrain_jobs.small_config(
        pretrain_jobs.prepare_small(tmp_path), tmp_path / "run", train={"total_steps": 2}
    )
    assert pretrain_jobs.run(config, 1) == [EXIT_OK]
    text = ("--text", "[MASK] [UNK] [MASK]")
    (row,) = use_jobs.lines(tmp_path, "predict", "fill-mask", "--model", "run", *text)
    assert use_jobs.said(tmp_path, "export", "run", "--out", "export")
    (other,) = use_jobs.lines(tmp_path, "predict", "fill-mask", "--model", "export", *text)
    assert len(row["masks"]) == 2
    for ours, theirs in zip(row["masks"], other["masks"], strict=True):
        assert ours["token"] == theirs["token"]
        assert ours["probability"] == pytest.approx(theirs["probability"], rel=1e-5)


def test_bad_texts_and_models_are_named(tmp_path: Path) -> None:
    directory = made.write_model(tmp_path / "model")
    tokenizer = read_source_tokenizer(directory)
    with pytest.raises(UsageError, match=r"text 2, 'sun', has no mask: put \[MASK\]"):
        make_masked_texts(["[MASK]", "sun"], tokenizer, max_seq_length=8)
    with pytest.raises(UsageError, match="has 4 tokens, more than max_seq_length 3"):
        make_masked_texts(["sun [MASK]"], tokenizer, max_seq_length=3)
    with pytest.raises(UsageError, match=r"texts\.tsv: is known by the end of its name"):
        read_lines(tmp_path / "texts.tsv")
    refused = use_jobs.refused("predict", "fill-mask", "--model", directory)
    assert "give one input with --text: neither is" in refused
    torch.manual_seed(1)
    MODELS["bert"]().bert.save_pretrained(directory)
    assert load_task_model(MaskedLM, directory).new_parts
    with pytest.raises(UsageError, match="has no masked-LM head"):
        read_masked_lm(directory)
