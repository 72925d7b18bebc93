"""Adapters are peft's: the same outputs, files that peft reads, and the same merged weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from shoal.errors import UsageError
from shoal.models.causal import CausalLM
from shoal.models.directory import save
from shoal.models.lora import Adapters

peft = pytest.importorskip("peft", reason="needs the extra lora")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it

IDS = torch.arange(24).reshape(2, 12)


def tiny(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if name == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        sizes = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=24, **dropout, **ends)
        return GPT2LMHeadModel(sizes)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24,
        )
    )  # fmt: skip


def with_values(adapters: Adapters) -> Adapters:
    """Give the adapters values, as training does: one side of each is zero at first."""
    for parameter in adapters.trained().parameters():
        nn.init.normal_(parameter, std=0.1)
    return adapters


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters_are_read_and_merged_by_peft(name: str, tmp_path: Path) -> None:
    base = tiny(name)
    base.save_pretrained(tmp_path / "base")
    before = logits(base)
    adapters = Adapters(base, rank=4, alpha=8, dropout=0.0)
    assert torch.equal(logits(base), before)  # a new adapter changes nothing
    changed = logits(with_values(adapters).weights)
    assert not torch.allclose(changed, before, atol=0.05)
    save(adapters, tmp_path / "adapter", tokenizer={})
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    assert torch.equal(logits(theirs), changed)
    wanted = theirs.merge_and_unload().state_dict()
    save(SimpleNamespace(weights=adapters.merge()), tmp_path / "merged", tokenizer={})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert merged.keys() == wanted.keys()
    assert all(torch.equal(merged[key], wanted[key]) for key in wanted)


def test_only_adapters_are_trained_and_named() -> None:
    base = tiny("llama")
    model = CausalLM(base)
    trained = Adapters(base, rank=2, alpha=4, dropout=0.0, targets=["q_proj", "v_proj"]).trained()
    names = dict(trained.named_parameters())
    assert len(names) == 2 * 2 * 2 and all(".self_attn." in name and ".lora_" in name for name in names)
    assert set(names.values()) == {each for each in model.parameters() if each.requires_grad}
    with pytest.raises(UsageError, match=r"lora\.targets no_proj: Target modules .* not found"):
        Adapters(tiny("llama"), rank=2, alpha=4, dropout=0.0, targets=["no_proj"])


def test_dropout_of_adapters_belongs_to_rows() -> None:
    base = tiny("llama")
    with_values(Adapters(base, rank=2, alpha=4, dropout=0.5))
    model = CausalLM(base).train()
    positions = torch.arange(12).expand(2, 12)

    def loss(rows: list[int]) -> float:
        labels = IDS[rows].roll(-1, 1)
        keys = torch.tensor([5, 9])[rows]
        return float(model(IDS[rows], positions[rows], labels, dropout_keys=keys)[0].detach())

    assert loss([0]) + loss([1]) == pytest.approx(loss([0, 1]), rel=1e-5)
    assert loss([0]) == loss([0])
    model.eval()
    assert loss([0]) == loss([0])


def test_recomputed_layers_have_the_gradients_of_adapters() -> None:
    found = []
    for recomputes in (False, True):
        base = tiny("llama")
        torch.manual_seed(1)
        adapters = with_values(Adapters(base, rank=2, alpha=4, dropout=0.5))
        model = CausalLM(base).train()
        if recomputes:
            model.recompute_activations()
        total = model(IDS, torch.arange(12).expand(2, 12), IDS.roll(-1, 1), torch.tensor([5, 9]))[0]
        found.append(torch.autograd.grad(total, list(adapters.trained().parameters())))
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))
