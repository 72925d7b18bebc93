"""``shoal export --onnx``: ONNX Runtime computes what PyTorch does, for all sizes of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForQuestionAnswering,
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForMaskedLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from shoal.cli.app import app
from shoal.errors import UsageError
from shoal.models.albert_prelayernorm import (
    AlbertPreLayerNormConfig,
    AlbertPreLayerNormForQuestionAnswering,
)
from shoal.models.resnet import new_resnet
from shoal.models.resnet_config import ResNetConfig
from shoal.recipes.onnx_export import export_onnx
from shoal.recipes.resnet50 import ExportedNetwork, use

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
DISTILBERT = {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
ENCODERS: dict[str, Any] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)),
    "pretraining": lambda: BertForPreTraining(BertConfig(**SIZES)),
    "albert": lambda: AlbertForQuestionAnswering(AlbertConfig(**SIZES, embedding_size=16)),
    "albert, pre-norm": lambda: AlbertPreLayerNormForQuestionAnswering(
        AlbertPreLayerNormConfig(**SIZES, embedding_size=16)
    ),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**SIZES, type_vocab_size=1)),
    "distilbert": lambda: DistilBertForMaskedLM(DistilBertConfig(**DISTILBERT, initializer_range=0.2)),
}
OUTPUTS = {
    "bert": ["logits"],
    "pretraining": ["prediction_logits", "seq_relationship_logits"],
    "albert": ["start_logits", "end_logits"],
    "albert, pre-norm": ["start_logits", "end_logits"],
    "roberta": ["logits"],
    "distilbert": ["logits"],
}


def computed(file: Path, inputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return what ONNX Runtime makes of the inputs, by name."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return dict(zip(names, found, strict=True))


SLOW = {"albert", "bert", "roberta", "distilbert"}
"""Exported as the pretraining model is."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ENCODERS]
)
def test_an_encoder_computes_the_same(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model, file = ENCODERS[name]().eval(), tmp_path / "model.onnx"
    model.save_pretrained(tmp_path / "model")
    export_onnx(tmp_path / "model", file)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["precision"] == "fp32"
    for batch, length in ((3, 13), (1, 5)):
        lengths = torch.tensor([length, 4, 9])[:batch, None]
        inputs = {"input_ids": torch.randint(5, 99, (batch, length))}
        inputs["attention_mask"] = (torch.arange(length) < lengths).long()
        if name not in ("roberta", "distilbert"):  # what their tokenizers return
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
            inputs["token_type_ids"][:, 2:] = 1
        with torch.no_grad():
            wanted = model(**inputs)
        found = computed(file, inputs)
        assert list(found) == OUTPUTS[name]
        there = inputs["attention_mask"].bool().numpy()
        for output, values in found.items():
            theirs = wanted[output].numpy()
            if values.shape[:2] == there.shape and name != "bert":
                values, theirs = values[there], theirs[there]
            np.testing.assert_allclose(values, theirs, atol=1e-4)
            assert np.abs(theirs).max() > 1e-2


@pytest.mark.parametrize("network", ["resnet8", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_a_residual_network_computes_the_same(network: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = ResNetConfig(network=network, width=4 if network == "resnet8" else None)
    model = new_resnet(config, 4)
    model(torch.randn(8, 3, 32, 32))  # the norms' statistics
    classes, plain = ("a", "b", "c", "d"), (0.0, 0.0, 0.0)
    exported = ExportedNetwork(
        model=model.eval(),
        network=config,
        classes=classes,
        size=32,
        resize=32,
        mirror=False,
        mean=plain,
        std=(1.0, 1.0, 1.0),
    )
    use.write_export(exported, tmp_path / "model")
    words = ["export", str(tmp_path / "model"), "--onnx", str(tmp_path / "net.onnx")]
    app(words, result_action="return_value", exit_on_error=False, print_error=False)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        wanted = model(images).numpy()
    found = computed(tmp_path / "net.onnx", {"images": images})
    np.testing.assert_allclose(found["logits"], wanted, atol=1e-4)
    assert np.abs(wanted).max() > 1e-2


def test_models_without_a_form_in_onnx_are_named(tmp_path: Path) -> None:
    sizes = T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(sizes).save_pretrained(tmp_path / "t5")
    with pytest.raises(UsageError, match="model_type 't5' must be one of bert"):
        export_onnx(tmp_path / "t5", tmp_path / "model.onnx")
    with pytest.raises(UsageError, match="there is no folder"):
        export_onnx(tmp_path / "t5", tmp_path / "no" / "model.onnx")
    (tmp_path / "t5" / "config.json").write_text('{"format": "shoal-mask-rcnn"}')
    with pytest.raises(UsageError, match="shoal-mask-rcnn are not written as ONNX"):
        export_onnx(tmp_path / "t5", tmp_path / "model.onnx")
