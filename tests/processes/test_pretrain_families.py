"""RoBERTa and DistilBERT pretrained by the script of BERT, with masked LM alone."""

from __future__ import annotations

from pathlib import Path

import finetune_jobs
import pretrain_jobs as jobs
import pytest
import torch
from transformers import AutoModelForMaskedLM

import finetune_made as made
from shoal import record
from shoal.data.manifest import Manifest
from shoal.data.steps import evenly_spread
from shoal.errors import EXIT_OK, UsageError
from shoal.recipes import bert
from shoal.recipes.masked_lm import open_text
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
    _, reader = open_text(config, config.phase2, pairs="none", verify=False)
    arrays = reader.batch(0, evenly_spread(reader.num_examples, 32))
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    rows = torch.arange(len(logits))[:, None]
    chances = logits.log_softmax(-1)[rows, batch["masked_positions"]]
    found = chances.gather(2, batch["masked_ids"][..., None])[..., 0]
    loss = -(found * batch["masked_weights"]).sum() / batch["masked_weights"].sum()
    assert loss.item() == pytest.approx(last.metrics["mlm_loss"], rel=1e-5)

    train = made.write_pairs(tmp_path / "train.tsv", 12, seed=1)
    changes = {"train": {"total_steps": 2}, "model": {"from_scratch": False}}
    config = made.classify_config(tmp_path / "run", train, (train,), tmp_path / "fine", **changes)
    assert finetune_jobs.run(config) == [EXIT_OK], (tmp_path / "fine" / "worker-0.log").read_text()


def test_the_padding_is_that_of_the_text(data: Path, tmp_path: Path) -> None:
    other = Manifest.load(data).pad_id + 1
    config = jobs.small_bert_config(data, tmp_path, model={"family": "roberta", "pad_token_id": other})
    with pytest.raises(UsageError, match=rf"set --model.pad-token-id {other - 1}"):
        bert.check(config, 1, True)
