"""T5's sizes against the published ones, its loss against transformers' and the formula, its writing."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from shoal.errors import ShoalError, UsageError
from shoal.models.directory import save
from shoal.models.t5 import T5, generate, new_t5, read_t5, shifted
from shoal.models.text_config import T5ModelConfig
from shoal.models.token_losses import IGNORED

PAD, END = 0, 1
TINY = T5ModelConfig(vocab_size=60, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, dropout=0.0)


def tiny(**changes: float) -> T5:
    torch.manual_seed(1)
    return new_t5(T5ModelConfig(**{**vars(TINY), **changes}), pad_id=PAD, end_id=END)


def made_batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    labels = torch.randint(3, 60, (3, 5), generator=draw)
    labels[1, 3:] = IGNORED
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[2, 6:] = 0
    ids = torch.randint(3, 60, (3, 8), generator=draw)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


PUBLISHED = {"small": 60_506_624, "base": 222_903_552, "large": 737_668_096, "3b": 2_851_598_336}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_sizes(name: str) -> None:
    file = resources.files("shoal.recipes") / "presets" / "t5" / f"{name}.toml"
    config = T5ModelConfig(**tomllib.loads(file.read_text(encoding="utf-8"))["model"])
    with torch.device("meta"):
        model = new_t5(config, pad_id=PAD, end_id=END)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == config.num_parameters == PUBLISHED[name]


def test_the_loss_is_that_of_transformers() -> None:
    model, batch = tiny().double().eval(), made_batch()
    theirs = model.weights(**batch)
    ours = model(**batch)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-12, atol=0)
    right = (theirs.logits.argmax(-1) == batch["labels"]).sum(1)
    assert ours.num_correct.tolist() == right.tolist()


def test_training_adds_the_z_loss() -> None:
    model, batch = tiny(z_loss=0.01).double(), made_batch()
    log_z = model.weights(**batch).logits.exp().sum(-1).log()
    is_target = batch["labels"] != IGNORED
    expected = model.eval()(**batch).loss + 0.01 * log_z[is_target].square().mean()
    torch.testing.assert_close(model.train()(**batch).loss, expected, rtol=1e-12, atol=0)


def test_the_decoder_reads_what_transformers_would_give_it() -> None:
    labels = made_batch()["labels"]
    assert torch.equal(shifted(labels, PAD, PAD), tiny().weights._shift_right(labels))


def test_generation_is_greedy_and_stops_at_the_end_token() -> None:
    model, batch = tiny().eval(), made_batch()
    with torch.no_grad():
        model.weights.shared.weight[END] *= 3  # so that some end early
    written = generate(model, batch["input_ids"], batch["attention_mask"], num_tokens=6)
    expected = torch.full((3, 7), PAD)
    for row in range(3):  # one token at a time, without a cache
        for place in range(6):
            logits = model.weights(
                input_ids=batch["input_ids"][row : row + 1],
                attention_mask=batch["attention_mask"][row : row + 1],
                decoder_input_ids=expected[row : row + 1, : place + 1],
            ).logits
            expected[row, place + 1] = logits[0, -1].argmax()
            if expected[row, place + 1] == END:
                break
    assert torch.equal(written, expected[:, 1:])
    assert GenerationConfig().max_new_tokens is None  # no setting of this package stays behind


def test_a_directory_and_back(tmp_path: Path) -> None:
    model, batch = tiny(), made_batch()
    save(model, tmp_path / "t5", tokenizer={})
    back = read_t5(tmp_path / "t5", dropout=0.25)
    assert back.weights.config.dropout_rate == 0.25
    torch.testing.assert_close(back.eval()(**batch).loss, model.eval()(**batch).loss)
    torch.manual_seed(5)
    fresh = read_t5(tmp_path / "t5", from_scratch=True)
    assert not torch.equal(fresh.weights.shared.weight, model.weights.shared.weight)


def test_directories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_t5(tmp_path / "nothing")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UsageError, match="model_type 'bert' must be one of t5"):
        read_t5(tmp_path)
    save(tiny(), tmp_path / "cut", tokenizer={})
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ShoalError, match="the weights cannot be read"):
        read_t5(tmp_path / "cut")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "model.num_heads 0 must be at least 1"),
        ({"dropout": 1.0}, "model.dropout 1.0 must be at least 0 and below 1"),
        ({"z_loss": -1.0}, "model.z_loss -1.0 must be at least 0"),
    ],
)
def test_sizes_that_cannot_be(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        T5ModelConfig(**changes)  # type: ignore[arg-type]
