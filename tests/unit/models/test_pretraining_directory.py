"""Pretraining models from and to transformers directories."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AlbertForPreTraining, BertForPreTraining

from shoal.errors import ShoalError, UsageError
from shoal.models.albert_prelayernorm import AlbertPreLayerNormForPreTraining
from shoal.models.directory import copy_weights
from shoal.models.pretraining import AlbertPretraining, BertPretraining
from shoal.models.text_config import AlbertModelConfig, BertModelConfig

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}
ALBERT = AlbertModelConfig(**SIZES, embedding_size=16)
MODELS = {
    "albert": (lambda: AlbertPretraining(ALBERT), AlbertForPreTraining),
    "albert, pre-norm": (
        lambda: AlbertPretraining(replace(ALBERT, pre_layer_norm=True)),
        AlbertPreLayerNormForPreTraining,
    ),
    "bert": (lambda: BertPretraining(BertModelConfig(**SIZES)), BertForPreTraining),
}


@pytest.mark.parametrize("name", MODELS)
def test_their_weights_come_whole(tmp_path: Path, name: str) -> None:
    make, their_class = MODELS[name]
    source = make()
    source.weights.save_pretrained(tmp_path)
    theirs, report = their_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    theirs.save_pretrained(tmp_path / "again")
    other = make()
    copy_weights(other, tmp_path / "again")
    for key, tensor in source.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    AlbertPretraining(ALBERT).weights.save_pretrained(tmp_path / "there")
    larger = AlbertPretraining(replace(ALBERT, vocab_size=98))
    with pytest.raises(
        UsageError, match=r"word_embeddings\.weight has shape \(97, 16\) there and \(98, 16\)"
    ):
        copy_weights(larger, tmp_path / "there")
    with pytest.raises(UsageError, match="holds a model of type albert, not bert"):
        copy_weights(BertPretraining(BertModelConfig(**SIZES)), tmp_path / "there")
    with pytest.raises(UsageError, match=r"no config\.json"):
        copy_weights(larger, tmp_path)
    (tmp_path / "there" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ShoalError, match="there: the weights cannot be read"):
        copy_weights(AlbertPretraining(ALBERT), tmp_path / "there")


def test_a_pre_norm_model_is_refused_by_transformers_alone(tmp_path: Path) -> None:
    """Its weights would fit a post-norm ALBERT, which computes something else."""
    AlbertPretraining(replace(ALBERT, pre_layer_norm=True)).weights.save_pretrained(tmp_path)
    program = (
        "import sys, transformers\n"
        "load = lambda: transformers.AutoModelForPreTraining.from_pretrained(sys.argv[1])\n"
        "try:\n"
        "    load()\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "import shoal.models.albert_prelayernorm\n"
        "load()\n"
    )
    found = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert not found.returncode, found.stderr
    assert "albert-prelayernorm" in found.stdout
