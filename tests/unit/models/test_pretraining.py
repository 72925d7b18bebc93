"""Our pretraining models against transformers' own classes: same weights, same losses, same gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import LENGTHS, grads_of, packed, padded_batch, relative_errors
from torch import Tensor
from transformers import PreTrainedModel

from shoal.errors import UsageError
from shoal.models.pretraining import Pretraining, evaluate, new_encoder, transformers_config
from shoal.models.text_config import AlbertModelConfig, BertModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ALBERT = AlbertModelConfig(**SIZES, embedding_size=16, classifier_dropout_prob=0.0)
PRE_NORM = replace(ALBERT, pre_layer_norm=True)
BERT = BertModelConfig(**SIZES)
Config = AlbertModelConfig | BertModelConfig
ROBERTA = replace(BERT, family="roberta", pad_token_id=1)
DISTILBERT = replace(BERT, family="distilbert")
both = pytest.mark.parametrize("config", [ALBERT, BERT], ids=["albert", "bert"])
all_of_them = pytest.mark.parametrize(
    "config",
    [ALBERT, PRE_NORM, BERT, ROBERTA, DISTILBERT],
    ids=["albert", "albert, pre-norm", "bert", "roberta", "distilbert"],
)


def make(config: Config) -> Pretraining:
    torch.manual_seed(1)
    return new_encoder(config)


def example(lengths: tuple[int, ...] = LENGTHS) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a padded batch with its labels as transformers takes them, and the same packed."""
    padded, random = padded_batch(lengths), torch.Generator().manual_seed(5)
    wants = torch.zeros(padded["input_ids"].shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        wants[row, 1 + torch.randperm(length - 1, generator=random)[: row + 2]] = True
    targets = torch.randint(5, 97, wants.shape, generator=random)
    sentences = torch.tensor([0, 1, 1, 0])[: len(lengths)]
    in_tokens = wants[padded["attention_mask"].bool()]
    ours = {
        **packed(padded),
        "masked_rows": in_tokens.nonzero().squeeze(1),
        "masked_ids": targets[wants],
        "labels": sentences,
    }
    return {**padded, "labels": targets.masked_fill(~wants, -100), "sentences": sentences}, ours


def their_loss(model: PreTrainedModel, padded: dict[str, Tensor]) -> Tensor:
    names = {
        "albert": "sentence_order_label",
        "albert-prelayernorm": "sentence_order_label",
        "bert": "next_sentence_label",
    }
    inputs = {n: t for n, t in padded.items() if n != "sentences"}
    model_type = model.config.model_type
    if model_type in names:
        inputs[names[model_type]] = padded["sentences"]
    else:  # without segments
        del inputs["token_type_ids"]
    loss: Tensor = model(**inputs).loss
    return loss


def our_loss(model: Pretraining, batch: dict[str, Tensor]) -> Tensor:
    mlm_loss, _, sentence_loss, _ = model(**batch)
    loss: Tensor = mlm_loss / len(batch["masked_ids"]) + sentence_loss / len(batch["labels"])
    return loss


def theirs_with_weights_of(model: Pretraining) -> PreTrainedModel:
    theirs = type(model.weights)(transformers_config(model.config))
    theirs.load_state_dict(model.weights.state_dict())
    return theirs


@all_of_them
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, (15, 15, 15)], ids=["mixed", "equal"])
def test_loss_and_every_gradient_equal_transformers(
    config: Config, checkpointing: bool, lengths: tuple[int, ...]
) -> None:
    model = make(replace(config, activation_checkpointing=checkpointing)).double()
    theirs = theirs_with_weights_of(model).double().train()
    padded, ours = example(lengths)

    expected = their_loss(theirs, padded)
    loss = our_loss(model, ours)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)

    expected.backward()
    loss.backward()
    their_grads, our_grads = grads_of(theirs), grads_of(model.weights)
    assert their_grads.keys() == our_grads.keys() == {name for name, _ in theirs.named_parameters()}
    errors = relative_errors(our_grads, their_grads)
    assert max(errors.values()) < 1e-10, errors


@both
def test_counts_of_correct_predictions(config: Config) -> None:
    model = make(config).eval()
    theirs = theirs_with_weights_of(model).eval()
    padded, ours = example()
    with torch.no_grad():
        out = theirs(**{n: padded[n] for n in ("input_ids", "token_type_ids", "attention_mask")})
        predicted = out.prediction_logits[padded["labels"] != -100].argmax(-1)
        ours["masked_ids"][:6] = predicted[:6]
        _, mlm_correct, _, sentence_correct = model(**ours)
    hits = (predicted == ours["masked_ids"]).sum()
    assert 6 <= hits < len(predicted)
    assert mlm_correct == hits
    assert sentence_correct == (out[1].argmax(-1) == ours["labels"]).sum()


@both
def test_a_batch_without_masked_tokens_has_finite_gradients(config: Config) -> None:
    model, (_, batch) = make(config), example()
    batch["masked_rows"], batch["masked_ids"] = batch["masked_rows"][:0], batch["masked_ids"][:0]
    mlm_loss, mlm_correct, sentence_loss, _ = model(**batch)
    assert mlm_loss == mlm_correct == 0
    (mlm_loss + sentence_loss).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("config", [ALBERT, BERT, PRE_NORM, ROBERTA, DISTILBERT])
def test_number_of_parameters(config: Config) -> None:
    assert config.num_parameters == sum(p.numel() for p in make(config).parameters())


def test_base_has_the_published_number_of_parameters() -> None:
    """12 M (Lan et al. 2019, table 1) and 110 M (Devlin et al. 2018, section 3); heads included here."""
    with torch.device("meta"):
        albert, bert = make(AlbertModelConfig()), make(BertModelConfig())
    assert sum(p.numel() for p in albert.parameters()) == 11_813_810
    assert sum(p.numel() for p in bert.parameters()) == 110_106_428
    assert AlbertModelConfig().num_parameters == 11_813_810
    assert BertModelConfig().num_parameters == 110_106_428


def test_models_without_a_sentence_task_have_two_scores() -> None:
    model, (_, batch) = make(DISTILBERT), example()
    with torch.no_grad():
        mlm_loss, mlm_correct, *rest = model.eval()(**batch)
    assert rest == [0, 0]
    scores, count = evaluate(model, [{"dropout_keys": None, **batch}], torch.device("cpu"), list, None)
    assert set(scores) == {"mlm_loss", "mlm_accuracy"} and count == len(LENGTHS)
    assert scores["mlm_loss"] == pytest.approx(float(mlm_loss) / len(batch["masked_ids"]), rel=1e-6)
    assert scores["mlm_accuracy"] == pytest.approx(float(mlm_correct) / len(batch["masked_ids"]))


@all_of_them
def test_weights_have_transformers_names_and_no_others(config: Config) -> None:
    model = make(config)
    (prefix,) = {name.split(".")[0] for name in model.state_dict()}
    assert {f"{prefix}.{name}" for name in model.weights.state_dict()} == set(model.state_dict())


def test_heads_divide_the_hidden_size() -> None:
    with pytest.raises(UsageError, match="hidden_size 32 must be a multiple"):
        replace(BERT, num_attention_heads=5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@both
def test_compiled_steps_of_changing_lengths_have_the_same_gradients(config: Config, backend: str) -> None:
    """Backward included; as many graphs as there are kinds of batch, not as many as batches."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = replace(config, num_hidden_layers=2)
    plain, compiled = make(config), make(config)
    compiled.compile(fullgraph=True, backend=backend)
    batches = [LENGTHS, (7, 12, 11, 3), (15, 15, 15, 15), (20, 4, 19, 18), (6, 6, 6, 6)]
    for lengths in [*batches, *batches]:
        _, batch = example(lengths)
        for model in (plain, compiled):
            model.zero_grad()
            our_loss(model, batch).backward()
        errors = relative_errors(grads_of(compiled), grads_of(plain))
        # those of key biases are zero in theory
        assert max(e for name, e in errors.items() if not name.endswith("key.bias")) < 1e-3, errors
    assert 2 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6
    torch._dynamo.reset()
