"""Causal models by the kernels of packed attention, against transformers' attention, in the interpreter."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
)

from interpreted import run_in_interpreter
from shoal import attention
from shoal.errors import UsageError
from shoal.models import transformers_attention
from shoal.models.causal import CausalLM, new_causal
from shoal.models.t5 import T5, new_t5
from shoal.models.text_config import T5ModelConfig

LENGTH = 70
DOCUMENTS = ((9, 1, 60), (70,))
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
}


def gpt2(dropout: float = 0.0) -> PreTrainedModel:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = GPT2Config(vocab_size=61, n_embd=48, n_layer=2, n_head=3, n_positions=LENGTH, **rates)
    return new_causal(sizes)


MODELS = {
    "gpt2": gpt2,
    "llama": lambda: new_causal(LlamaConfig(**SIZES)),
    "window": lambda: new_causal(MistralConfig(**SIZES, sliding_window=7)),
}


def packed() -> dict[str, Tensor]:
    """Return blocks of documents; the last token of each has no target."""
    ids = torch.randint(61, (len(DOCUMENTS), LENGTH), generator=torch.Generator().manual_seed(2))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    labels = ids.roll(-1, dims=1)
    labels[positions.roll(-1, dims=1) == 0] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def computed(
    model: nn.Module, batch: dict[str, Tensor], *, kernels: bool, num_attentions: int = 2
) -> list[Tensor]:
    """Return the loss and its gradients; kernels compute all attentions, or none."""
    calls = mock.Mock(wraps=attention.packed_attention)
    with (
        mock.patch("shoal.models.transformers_attention.has_kernels", lambda *_: kernels),
        mock.patch("shoal.models.transformers_attention.packed_attention", calls),
    ):
        loss = model(**batch)[0]
        assert isinstance(loss, Tensor)
        found = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    assert calls.call_count == num_attentions * kernels
    return found


def compare(found: list[Tensor], expected: list[Tensor], limit: float = 2e-6) -> None:
    assert torch.isclose(found[0], expected[0], rtol=limit)
    largest = max(float(each.abs().max()) for each in expected[1:])
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert float((ours - theirs).abs().max()) <= limit * largest


def check_losses_and_gradients() -> None:
    """Documents in blocks, by kernels and by transformers with its own look for documents."""
    for make in MODELS.values():
        torch.manual_seed(5)
        model = CausalLM(make())
        compare(computed(model, packed(), kernels=True), computed(model, packed(), kernels=False))


def check_dropout() -> None:
    """The masks are those of the explicit form, in all sites."""
    torch.manual_seed(5)
    model, batch = CausalLM(gpt2(0.3)).train(), {**packed(), "dropout_keys": torch.tensor([3, 4])}
    first = computed(model, batch, kernels=True)
    compare(first, computed(model, batch, kernels=False))
    other = computed(model, {**batch, "dropout_keys": torch.tensor([3, 5])}, kernels=True)
    assert not torch.isclose(first[0], other[0], rtol=1e-4)


def check_one_document_at_a_time() -> None:
    for make in (gpt2, MODELS["llama"]):
        torch.manual_seed(5)
        model, batch = CausalLM(make()).eval(), packed()
        with torch.no_grad(), mock.patch("shoal.models.transformers_attention.has_kernels", lambda *_: True):
            found = model.logits(batch["input_ids"], batch["position_ids"])
            for row, lengths in enumerate(DOCUMENTS):
                at = 0
                for length in lengths:
                    here = slice(at, at + length)
                    ids = batch["input_ids"][row, None, here]
                    alone = model.logits(ids, torch.arange(length)[None])[0]
                    torch.testing.assert_close(found[row, here], alone, rtol=1e-5, atol=1e-5)
                    at += length


def check_planted_leak() -> None:
    """Bounds that join the documents of a block are found before a run begins."""
    model = CausalLM(gpt2())
    with mock.patch("shoal.models.transformers_attention.has_kernels", lambda *_: True):
        model.check()
        bounds = attention.document_bounds
        with (
            mock.patch(
                "shoal.models.transformers_attention.document_bounds",
                lambda ids: bounds(torch.arange(ids.shape[1]).expand_as(ids)),
            ),
            pytest.raises(UsageError, match="does not keep the documents of a block apart"),
        ):
            model.check()


def t5(dropout: float = 0.0) -> T5:
    config = T5ModelConfig(
        vocab_size=61, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=3, dropout=dropout
    )
    return new_t5(config, pad_id=0, end_id=1)


def sentences() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(2, 61, (2, n), generator=random) for n in (70, 20))
    labels[1, 15:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(70) < 9).expand(2, 70).long()}


def check_t5() -> None:
    """Biases in the encoder and in the decoder, whose gradients are those of the embeddings; and padding."""
    torch.manual_seed(5)
    model, batch = t5(0.3).train(), {**sentences(), "dropout_keys": torch.tensor([3, 4])}
    batch["attention_mask"][1] = 1
    found = computed(model, batch, kernels=True, num_attentions=6)
    compare(found, computed(model, batch, kernels=False))


def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.mark.parametrize("name", ["llama", "window"])
def test_what_kernels_do_not_compute_has_a_mask(name: str) -> None:
    torch.manual_seed(5)
    model = CausalLM(MODELS[name]())
    expected = computed(model, packed(), kernels=False)[0]
    with (
        mock.patch.object(transformers_attention, "has_kernels", lambda *_: True),
        mock.patch.object(transformers_attention, "_takes", lambda *_: False),
    ):
        torch.testing.assert_close(model(**packed())[0], expected)
    one = torch.ones(1, 1, 2, 16).bfloat16()
    with mock.patch.object(transformers_attention, "has_kernels", lambda *_: True):
        assert transformers_attention._takes(one, one, one, 0.0, {"softcap": None})
        assert not transformers_attention._takes(one, one, one, 0.0, {"softcap": 50.0})


def test_models_without_the_interface_keep_their_own_attention() -> None:
    from transformers import BloomConfig

    bloom = new_causal(BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=2), "eager")
    assert bloom.config._attn_implementation == "eager"
    assert gpt2().config._attn_implementation == "shoal"
    assert "shoal" not in gpt2().config.to_json_string()


if __name__ == "__main__":
    importlib.import_module("shoal.attention_operators")
    check_losses_and_gradients()
    check_dropout()
    check_one_document_at_a_time()
    check_planted_leak()
    check_t5()
