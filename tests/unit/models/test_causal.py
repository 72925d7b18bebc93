"""Packed causal models have the losses and gradients of one document at a time, and of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from shoal.errors import UsageError
from shoal.models.causal import CausalLM, SeededSampling, generate, open_causal

VOCAB, LENGTH = 61, 24
DOCUMENTS = ((9, 1, 14), (24,), (2, 3, 19))
"""Lengths of the documents in each block."""


def tiny(name: str, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(5)
    if name == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, **dropout)
        model: PreTrainedModel = GPT2LMHeadModel(sizes)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
            )
        )  # fmt: skip
    model.set_attn_implementation(attention)
    return model.double()


def packed() -> dict[str, Tensor]:
    """Return blocks of documents; the last token of each has no target."""
    ids = torch.randint(VOCAB, (len(DOCUMENTS), LENGTH), generator=torch.Generator().manual_seed(2))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    labels = ids.roll(-1, dims=1)
    labels[positions.roll(-1, dims=1) == 0] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def alone(batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the token ids of each document."""
    return [d for row, n in zip(batch["input_ids"], DOCUMENTS, strict=True) for d in row.split(list(n))]


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packed_is_one_document_at_a_time_by_transformers_own_loss(name: str, attention: str) -> None:
    model, batch = tiny(name, attention), packed()
    total, loss, num_correct = CausalLM(model)(**batch)
    theirs, correct = torch.zeros((), dtype=torch.float64), 0
    for document in alone(batch):
        if len(document) > 1:
            out = model(input_ids=document[None], labels=document[None], use_cache=False)
            theirs = theirs + out.loss * (len(document) - 1)  # their mean is over the targets
            correct += int((out.logits[0, :-1].argmax(-1) == document[1:]).sum())
    assert float(loss) == pytest.approx(float(theirs.detach()), rel=1e-6)
    assert float(total.detach()) == float(loss)
    assert int(num_correct) == correct
    for ours, wanted in zip(gradients(model, total), gradients(model, theirs), strict=True):
        assert float((ours - wanted).norm()) <= 1e-6 * float(wanted.norm())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packed_in_fp64_is_one_document_at_a_time_to_twelve_digits(name: str) -> None:
    """transformers rounds logits to fp32 for its own loss, so here its logits are compared."""
    model, batch = tiny(name), packed()
    total = CausalLM(model)(**batch)[0]
    logits = [model(input_ids=each[None], use_cache=False).logits[0, :-1] for each in alone(batch)]
    targets = torch.cat([document[1:] for document in alone(batch)])
    wanted = torch.nn.functional.cross_entropy(torch.cat(logits), targets, reduction="sum")
    assert total.dtype == torch.float64
    assert float(total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    for ours, theirs in zip(gradients(model, total), gradients(model, wanted), strict=True):
        assert float((ours - theirs).norm()) <= 1e-12 * float(theirs.norm())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_planted_leak_is_found_only_across_documents(name: str) -> None:
    """Another token in the first document of a block changes what the others see only if positions run on."""
    model, batch = tiny(name), packed()
    planted = {**batch, "input_ids": batch["input_ids"].clone()}
    planted["input_ids"][0, 3] = (planted["input_ids"][0, 3] + 1) % VOCAB
    behind = slice(DOCUMENTS[0][0], None)

    def seen(inputs: dict[str, Tensor], positions: Tensor) -> Tensor:
        logits: Tensor = model(
            input_ids=inputs["input_ids"], position_ids=positions, attention_mask=None, use_cache=False
        ).logits
        return logits[0, behind]

    within, across = batch["position_ids"], torch.arange(LENGTH).expand(len(DOCUMENTS), LENGTH)
    assert torch.equal(seen(batch, within), seen(planted, within))
    assert not torch.equal(seen(batch, across), seen(planted, across))


def test_z_loss_is_the_mean_square_of_the_softmax_sum_over_targets() -> None:
    model, batch = tiny("llama"), packed()
    total, loss, _ = CausalLM(model, z_loss=0.01)(**batch)
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    ).logits.float()
    squares = logits.exp().sum(-1).log().square()[batch["labels"] >= 0]
    assert float((total - loss).detach()) == pytest.approx(0.01 * float(squares.sum().detach()), rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_directory_has_its_weights_and_a_config_random_ones(name: str, tmp_path: Path) -> None:
    model = tiny(name).float()
    model.save_pretrained(tmp_path / "model")
    ids = packed()["input_ids"]
    opened = open_causal(tmp_path / "model")
    assert torch.equal(opened.eval()(ids).logits, model.eval()(ids).logits)
    torch.manual_seed(1)
    fresh = open_causal(tmp_path / "model" / "config.json")
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(model.config)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), theirs.parameters(), strict=True))


def test_what_is_no_causal_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere does not exist: name a transformers directory"):
        open_causal(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UsageError, match="is no causal language model"):
        open_causal(tmp_path / "config.json")


def test_a_model_that_does_not_keep_documents_apart_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

    for name in ("gpt2", "llama"):
        CausalLM(tiny(name)).check()
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2))
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1))
    for model in (bloom, mamba):
        with pytest.raises(UsageError, match=r"does not keep the documents of a block apart"):
            CausalLM(model).check()


def test_recomputed_layers_have_the_gradients_and_the_dropout_of_kept_ones() -> None:
    batch = packed()
    keys = torch.arange(len(DOCUMENTS))
    found = []
    for recomputes in (False, True):
        weights = tiny("gpt2")
        weights.config.resid_pdrop = 0.5
        for module in weights.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
        model = CausalLM(weights).train()
        if recomputes:
            model.recompute_activations()
        total, *_ = model(**batch, dropout_keys=keys)
        found.append([total.detach(), *gradients(weights, total)])
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))
    without = CausalLM(tiny("gpt2"))(**batch)[0]
    assert not torch.equal(found[0][0], without.detach())


PROMPTS = [[5, 9, 2], [7], [11, 3, 8, 1, 30]]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padded_prompts_are_continued_as_each_alone_by_transformers(name: str) -> None:
    model = tiny(name).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    found = generate(model, PROMPTS, end_id=0, max_new_tokens=9)
    for prompt, row in zip(PROMPTS, found.tolist(), strict=True):
        ids = torch.tensor([prompt])
        for _ in range(9):  # without a cache, one token at a time
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
        wanted = ids[0, len(prompt) :].tolist()
        length = wanted.index(0) if 0 in wanted else 9
        assert row == wanted[:length] + [0] * (9 - length)


def test_draws_depend_on_the_seed_of_a_prompt_alone() -> None:
    model = tiny("llama").eval()
    model.generation_config.eos_token_id = 0
    options = {"end_id": 0, "max_new_tokens": 8, "temperature": 1.5}
    together = generate(model, PROMPTS, seeds=[1, 2, 3], **options)
    assert torch.equal(generate(model, PROMPTS[1:2], seeds=[2], **options)[0], together[1])
    assert not torch.equal(generate(model, PROMPTS[1:2], seeds=[4], **options)[0], together[1])
    assert torch.equal(
        generate(model, PROMPTS, seeds=[1, 2, 3], **options, top_p=0.0),
        generate(model, PROMPTS, end_id=0, max_new_tokens=8),
    )


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    draws = SeededSampling([5], temperature=2.0, top_p=1.0, device=torch.device("cpu"))
    picked = torch.stack([draws(torch.zeros(1, 1).long(), logits).argmax() for _ in range(20_000)])
    found = picked.bincount(minlength=4) / len(picked)
    assert found.tolist() == pytest.approx((logits[0] / 2).softmax(0).tolist(), abs=0.015)
