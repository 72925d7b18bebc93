"""RoBERTa and DistilBERT pretrained by the script of BERT, and ALBERT with pre-layer-norm."""

from __future__ import annotations

from pathlib import Path

import job_workers
import pretrain_jobs as jobs
import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

import finetune_made as made
from shoal import record
from shoal.data.manifest import Manifest
from shoal.data.steps import evenly_spread
from shoal.data.text.examples import ExampleReader
from shoal.errors import EXIT_OK, UsageError
from shoal.models.albert_prelayernorm import (
    AlbertPreLayerNormForMaskedLM,
    AlbertPreLayerNormForSequenceClassification,
)
from shoal.recipes import bert
from shoal.recipes.masked_lm import open_text
from shoal.recipes.memory import MemoryCount
from shoal.record import read_record


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("family", ["roberta", pytest.param("distilbert", marks=pytest.mark.slow)])
def test_the_exported_model_scores_what_the_run_says_and_is_finetuned(
    family: str, data: Path, tmp_path: Path
) -> None:
    pad_id = Manifest.load(data).pad_id
    sizes = {"family": family, "pad_token_id": pad_id}
    config = jobs.small_bert_config(data, tmp_path / "run", model=sizes)
    assert jobs.run(config) == [EXIT_OK] * 2, (tmp_path / "run" / "worker-0.log").read_text()
    (last,) = [row for row in read_record(tmp_path / "run") if isinstance(row, record.End)]
    assert set(last.metrics) == {"mlm_loss", "mlm_accuracy"}

    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "transformers").eval()
    assert model.config.model_type == family
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "transformers")
    assert set(tokenizer("the sun")) == {"input_ids", "attention_mask"}
    assert tokenizer.model_max_length == config.model.max_position_embeddings
    _, reader = open_text(config, config.phase2, pairs="none")
    loss = masked_lm_loss(model, reader, "input_ids", "attention_mask")
    assert loss == pytest.approx(last.metrics["mlm_loss"], rel=1e-5)
    assert_finetuned(tmp_path)


def test_a_pre_norm_albert_scores_what_the_run_says_and_is_finetuned(data: Path, tmp_path: Path) -> None:
    sizes = {"pre_layer_norm": True}
    config = jobs.small_config(data, tmp_path / "run", model=sizes, train={"total_steps": 4})
    assert jobs.run(config) == [EXIT_OK] * 2, (tmp_path / "run" / "worker-0.log").read_text()
    (last,) = [row for row in read_record(tmp_path / "run") if isinstance(row, record.End)]
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "transformers").eval()
    assert isinstance(model, AlbertPreLayerNormForMaskedLM)
    _, reader = open_text(config, config.data, pairs="order")
    loss = masked_lm_loss(model, reader, "input_ids", "attention_mask", "token_type_ids")
    assert loss == pytest.approx(last.metrics["mlm_loss"], rel=1e-5)
    assert_finetuned(tmp_path)
    source = AutoModelForPreTraining.from_pretrained(tmp_path / "fine" / "start")
    finetuned = AutoModelForSequenceClassification.from_pretrained(tmp_path / "fine" / "transformers")
    assert isinstance(finetuned, AlbertPreLayerNormForSequenceClassification)
    norm, before = (each.albert.encoder.final_norm.weight for each in (finetuned, source))
    assert not torch.equal(norm, before)  # it is trained
    torch.testing.assert_close(norm, before, rtol=0.1, atol=0.1)  # from where the pretraining left it


@torch.no_grad()
def masked_lm_loss(model: PreTrainedModel, reader: ExampleReader, *inputs: str) -> float:
    """Return transformers' mean loss over the masked tokens of the held-out examples of a run."""
    arrays = reader.batch(0, evenly_spread(reader.num_examples, 32))
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    logits = model(**{name: batch[name] for name in inputs}).logits
    rows = torch.arange(len(logits))[:, None]
    chances = logits.log_softmax(-1)[rows, batch["masked_positions"]]
    found = chances.gather(2, batch["masked_ids"][..., None])[..., 0]
    return float(-(found * batch["masked_weights"]).sum() / batch["masked_weights"].sum())


def assert_finetuned(tmp_path: Path) -> None:
    """Finetune the run's model for two steps, in ``fine``."""
    train = made.write_pairs(tmp_path / "train.tsv", 12, seed=1)
    changes = {"train": {"total_steps": 2}, "model": {"from_scratch": False}}
    config = made.classify_config(tmp_path / "run", train, (train,), tmp_path / "fine", **changes)
    assert job_workers.run(config) == [EXIT_OK], (tmp_path / "fine" / "worker-0.log").read_text()


def test_the_padding_is_that_of_the_text(data: Path, tmp_path: Path) -> None:
    other = Manifest.load(data).pad_id + 1
    config = jobs.small_bert_config(data, tmp_path, model={"family": "roberta", "pad_token_id": other})
    with pytest.raises(UsageError, match=rf"set --model.pad-token-id {other - 1}"):
        bert.check(config, 1, MemoryCount())
