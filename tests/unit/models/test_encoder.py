"""The packed encoder against transformers' padded models in float64: hidden states and every gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import (
    HIDDEN,
    LENGTHS,
    grads_of,
    inputs_of,
    packed,
    padded_batch,
    relative_errors,
    tiny_config,
)
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.activations import NewGELUActivation

from shoal.models.encoder import Encoder
from shoal.models.layers import ALBERTS, MODEL_TYPES, TransformerLayer, embed, fused_activation

architectures = pytest.mark.parametrize("model_type", MODEL_TYPES)


def base_model(model_type: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModel.from_config(tiny_config(model_type, **changes)).double().train()
    for parameter in model.parameters():  # norms and biases that are not their trivial initial values
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def their_hidden(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return transformers' hidden states of the tokens alone, ``[T, hidden]``."""
    hidden = model(**inputs_of(model.config.model_type, batch)).last_hidden_state
    return hidden[batch["attention_mask"].bool()]


def compare(
    model: PreTrainedModel, batch: dict[str, Tensor], wanted: Tensor | None, **switches: bool
) -> None:
    theirs = copy.deepcopy(model)
    expected = their_hidden(theirs, batch)
    found = Encoder(model, **switches)(**packed(batch), wanted=wanted)
    if wanted is not None:
        expected = expected[wanted]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)

    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    their_grads, our_grads = grads_of(theirs), grads_of(model)
    assert their_grads.keys() == our_grads.keys()
    errors = relative_errors(our_grads, their_grads)
    assert max(errors.values()) < 1e-10, errors
    in_pooler = sum(name.startswith("pooler") for name, _ in model.named_parameters())
    assert len(our_grads) == len(list(model.parameters())) - in_pooler


@architectures
@pytest.mark.parametrize(
    ("lengths", "some_rows"),
    [
        pytest.param(LENGTHS, True, id="mixed, wanted rows"),
        pytest.param((12, 12, 12), False, id="equal, all rows"),
        pytest.param(LENGTHS, False, id="mixed, all rows", marks=pytest.mark.slow),
        pytest.param((12, 12, 12), True, id="equal, wanted rows", marks=pytest.mark.slow),
    ],
)
def test_hidden_states_and_every_gradient(model_type: str, lengths: tuple[int, ...], some_rows: bool) -> None:
    wanted = torch.tensor([13, 0, 30, 5, sum(lengths) - 1, 2]) if some_rows else None
    compare(base_model(model_type), padded_batch(lengths), wanted)


@architectures
def test_activation_checkpointing_changes_nothing(model_type: str) -> None:
    compare(base_model(model_type), padded_batch(), torch.tensor([4, 1]), activation_checkpointing=True)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("bert", {"hidden_act": "gelu_new"}),
        ("bert", {"hidden_act": "relu", "type_vocab_size": 3}),
        ("albert", {"hidden_act": "gelu", "num_hidden_layers": 6, "num_hidden_groups": 3}),
        ("albert", {"inner_group_num": 2}),
        ("roberta", {"type_vocab_size": 2, "pad_token_id": 4}),
        ("distilbert", {"activation": "relu", "sinusoidal_pos_embds": True}),
    ],
    ids=str,
)
def test_other_forms_of_the_architectures(model_type: str, changes: dict[str, object]) -> None:
    model = base_model(model_type, **changes)
    batch = padded_batch()
    if changes.get("pad_token_id") is not None:
        batch["input_ids"].masked_fill_(batch["attention_mask"] == 0, changes["pad_token_id"])
    if model_type == "roberta":
        batch["token_type_ids"].zero_()  # transformers' side is called without segments
    compare(model, batch, None)


def test_roberta_with_two_segments_reads_them() -> None:
    model, batch = base_model("roberta", type_vocab_size=2), padded_batch()
    expected = model(**batch).last_hidden_state[batch["attention_mask"].bool()]
    torch.testing.assert_close(Encoder(model)(**packed(batch)), expected, rtol=1e-11, atol=1e-12)


@architectures
def test_sequences_do_not_see_each_other(model_type: str) -> None:
    encoder, batch = Encoder(base_model(model_type)), packed(padded_batch())
    before = encoder(**batch)
    first, second = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][first:second] = 3
    after = encoder(**changed)
    others = torch.ones(len(before), dtype=torch.bool)
    others[first:second] = False
    assert torch.equal(before[others], after[others])
    assert (before[~others] != after[~others]).any(dim=1).all()


def test_dropout_is_drawn_where_the_architecture_has_it() -> None:
    """By hand, as the random draws of packed and padded tensors differ: a dropped half adds nothing."""
    model = base_model("bert", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.25)
    (first, *_) = Encoder(model).layers
    assert (first.attention_dropout, first.dense_dropout, first.output_dropout) == (0.25, 0.5, 0.5)
    model = base_model("albert", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.25)
    (first, *_) = Encoder(model).layers
    assert (first.attention_dropout, first.dense_dropout, first.output_dropout) == (0.25, 0.5, 0.0)
    model = base_model("distilbert", dropout=0.5, attention_dropout=0.25)
    (first, *_) = Encoder(model).layers
    assert (first.attention_dropout, first.dense_dropout, first.output_dropout) == (0.25, 0.0, 0.5)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_embeddings_are_dropped_where_transformers_drops_them(model_type: str) -> None:
    """All of them: ALBERT then still has the bias of its mapping to the hidden size."""
    names = ("dropout",) if model_type == "distilbert" else ("hidden_dropout_prob",)
    model, batch = base_model(model_type, **dict.fromkeys(names, 1.0)), packed(padded_batch())
    arguments = [batch[name] for name in ("input_ids", "token_type_ids", "position_ids")]
    Encoder(model)  # takes over the dropout
    assert embed(model, *arguments).count_nonzero()
    hidden = embed(model, *arguments, keys=torch.arange(len(arguments[0])))
    rest = torch.zeros(HIDDEN, dtype=torch.float64)
    if model_type in ALBERTS:
        rest = model.encoder.embedding_hidden_mapping_in.bias
    assert torch.equal(hidden, rest.expand_as(hidden))


def test_dropout_only_while_training() -> None:
    model = base_model("bert", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    encoder, batch = Encoder(model), packed(padded_batch())
    assert not torch.equal(encoder(**batch), encoder(**batch))
    model.eval()
    assert torch.equal(encoder(**batch), encoder(**batch))
    expected = their_hidden(model, padded_batch())
    torch.testing.assert_close(encoder(**batch), expected, rtol=1e-11, atol=1e-12)


def test_gelu_new_in_one_operation() -> None:
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    fused = fused_activation(NewGELUActivation())
    assert isinstance(fused, nn.GELU)
    torch.testing.assert_close(fused(x), NewGELUActivation()(x), rtol=1e-13, atol=1e-13)


def test_pre_layer_norm_normalises_before_each_half() -> None:
    model, batch = base_model("albert-prelayernorm"), padded_batch()
    encoder = Encoder(model)
    layer = encoder.layers[0]
    hidden = model.encoder.embedding_hidden_mapping_in(
        model.embeddings(batch["input_ids"], token_type_ids=batch["token_type_ids"])
    )
    bias = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)[:, None, None, :]
    bias.masked_fill_(batch["attention_mask"][:, None, None, :] == 0, -torch.inf)
    for _ in range(3):
        hidden = hidden + attention_by_hand(layer, layer.attention_norm(hidden), bias)
        hidden = hidden + layer.down(layer.activation(layer.up(layer.output_norm(hidden))))
    expected = model.encoder.final_norm(hidden)[batch["attention_mask"].bool()]
    torch.testing.assert_close(encoder(**packed(batch)), expected, rtol=1e-10, atol=1e-10)
    wanted = torch.tensor([40, 2, 19])
    found = encoder(**packed(batch), wanted=wanted)
    torch.testing.assert_close(found, expected[wanted], rtol=1e-10, atol=1e-10)


def attention_by_hand(layer: TransformerLayer, x: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (
        f(x).view(*x.shape[:2], layer.num_heads, -1).transpose(1, 2)
        for f in (layer.query, layer.key, layer.value)
    )
    context = torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + bias, -1) @ v
    return layer.dense(context.transpose(1, 2).reshape(*x.shape[:2], HIDDEN))


def test_bf16_autocast_is_near() -> None:
    model, batch = base_model("bert").float(), packed(padded_batch())
    expected = Encoder(model)(**batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = Encoder(model)(**batch, wanted=torch.arange(len(expected)))
    error = (found - expected).abs().max()
    assert 0 < error < 0.05 * expected.abs().max()


def compilations_of(model_type: str, batches: list[tuple[int, ...]]) -> int:
    model = base_model(model_type).float()
    encoder, compiled, count = Encoder(model), 0, 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal count
        count += 1
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(encoder.__call__, backend=backend, fullgraph=True)
    for lengths in batches:
        batch = packed(padded_batch(lengths, seed=len(lengths)))
        wanted = torch.arange(0, sum(lengths), 2)
        torch.testing.assert_close(compiled(**batch, wanted=wanted), encoder(**batch, wanted=wanted))
    torch._dynamo.reset()
    return count


@pytest.mark.parametrize("model_type", ["bert", pytest.param("albert", marks=pytest.mark.slow)])
def test_changing_lengths_are_one_graph_each_way(model_type: str) -> None:
    """Traced once for the first sizes, once for any, and once more for equal lengths."""
    mixed = [(13, 20, 9, 17), (7, 12, 11, 3), (20, 4, 19, 18), (8, 9, 10, 11), (5, 16, 6, 9), (3, 18, 2, 7)]
    equal = [(12,) * 4, (9,) * 4, (15,) * 4]
    assert compilations_of(model_type, mixed) <= 2
    assert compilations_of(model_type, [*mixed, *equal, *mixed]) <= 4
