"""Tests the refusals of tensor parallelism; ``tests/processes/test_tensor_parallel.py`` trains with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from shoal.errors import UsageError
from shoal.models.tensor_plan import check_tensor, divide_layers, keep_part

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 1,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("num_workers", "changes", "message"),
    [
        (5, {}, "parallel.tensor 5 does not divide the model's num_attention_heads 6"),
        (2, {}, "parallel.tensor 2 does not divide the model's num_key_value_heads 3"),
        (3, {"intermediate_size": 40}, "does not divide the model's intermediate_size 40"),
        (3, {"attention_dropout": 0.1}, "does not go with the model's attention_dropout 0.1"),
    ],
)
def test_sizes_that_do_not_divide(num_workers: int, changes: dict[str, Any], message: str) -> None:
    check_tensor(LlamaConfig(**SIZES | {"attention_dropout": 0.1}), 1)
    check_tensor(LlamaConfig(**SIZES), 3)
    with pytest.raises(UsageError, match=message):
        check_tensor(LlamaConfig(**SIZES | changes), num_workers)


@pytest.mark.usefixtures("group")
def test_plans_that_are_not_there_or_not_followed() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2))
        mixtral = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    with pytest.raises(UsageError, match=r"no plan \(tp_plan\) for GPT2LMHeadModel"):
        divide_layers(gpt2, mesh)
    with pytest.raises(UsageError, match=r"MixtralForCausalLM has moe_tp_experts for .*mlp\.experts "):
        divide_layers(mixtral, mesh)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("pad", [None, 0])
def test_tied_weights_are_divided_together_or_not_at_all(pad: int | None) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, pad_token_id=pad))
    divide_layers(model, init_device_mesh("cpu", (1,)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, DTensor) == (pad is None)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)


def test_the_first_worker_keeps_the_largest_parts() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    keep_part(model, 3)
    layer = model.model.layers[0]
    shapes = {
        tuple(module.weight.shape): module
        for module in (layer.self_attn.k_proj, layer.self_attn.o_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    }
    assert list(shapes) == [(4, 24), (24, 8), (12, 24), (24, 12)]
    assert [tuple(each.weight.shape) for each in (model.lm_head, layer.input_layernorm)] == [(11, 24), (24,)]
    with pytest.raises(UsageError, match="does not divide the model's num_key_value_heads 3"):
        keep_part(model, 2)
