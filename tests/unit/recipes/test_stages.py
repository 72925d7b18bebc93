"""A T5 that no process holds whole: its loss, and its weights, read from files and written to one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from shoal.errors import UsageError
from shoal.models.t5 import T5
from shoal.pipelining.api import pipeline
from shoal.pipelining.state_dict import ModelPart
from shoal.recipes.stages import load_weights, write_stored
from shoal.train.checkpoint import Checkpointer

NAMES = ("weights.shared.weight", "weights.decoder.final_layer_norm.weight")
"""Of the part of the model that this process holds."""


def t5(*, width: int = 16) -> T5:
    sizes = T5Config(
        vocab_size=32,
        d_model=width,
        d_kv=4,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5(T5ForConditionalGeneration(sizes))


@pytest.mark.usefixtures("group")
def test_stages_under_bf16_compute_the_loss_in_fp32_as_the_model_does() -> None:
    torch.manual_seed(3)
    model, ids = t5().train(), torch.randint(2, 32, (2, 6))
    batch = {"input_ids": ids, "labels": ids[:, :4]}
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(**batch).loss.item()
    stage = pipeline(
        model, batch, microbatches=1, virtual_stages=1, schedule="1f1b", autocast=torch.bfloat16, device="cpu"
    )
    assert stage.step(**batch).item() == pytest.approx(wanted, rel=1e-6)
    stage.close()


def on_meta(*, width: int = 16) -> T5:
    with torch.device("meta"):
        return t5(width=width)


def part_of(model: nn.Module) -> ModelPart:
    named = dict(model.named_parameters())
    return ModelPart({name: nn.Parameter(torch.zeros(named[name].shape)) for name in NAMES})


@pytest.mark.parametrize("kind", ["directory", "run"])
def test_a_part_reads_its_weights_from(kind: str, tmp_path: Path) -> None:
    model, whole = t5(), on_meta()
    nn.init.normal_(model.weights.decoder.final_layer_norm.weight)
    if kind == "directory":
        model.weights.save_pretrained(tmp_path)
    else:
        Checkpointer(tmp_path).save(3, {"model": model}, wait=True)
    part = part_of(whole)
    load_weights(part, whole, tmp_path)
    wanted = dict(model.named_parameters())
    assert all(torch.equal(value, wanted[name]) for name, value in part.named_parameters())


def test_weights_of_other_sizes_are_refused(tmp_path: Path) -> None:
    t5().weights.save_pretrained(tmp_path)
    whole = on_meta(width=24)
    with pytest.raises(UsageError, match=r"shared.weight is \(32, 16\) there and \(32, 24\) in the model"):
        load_weights(part_of(whole), whole, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoint_is_written_as_transformers_writes_the_model(dtype: torch.dtype, tmp_path: Path) -> None:
    model = t5()
    Checkpointer(tmp_path).save(3, {"model": model}, wait=True)
    write_stored(tmp_path, on_meta().to(dtype), tmp_path / "ours", {})
    model.to(dtype).weights.save_pretrained(tmp_path / "theirs")
    names = [{path.name for path in (tmp_path / side).iterdir()} for side in ("ours", "theirs")]
    assert names[0] == names[1]
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {dtype}
    back = T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").state_dict()
    wanted = model.weights.state_dict()
    assert back.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in back.items())
