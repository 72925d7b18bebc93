"""Heads over packed batches against transformers' padded models: logits, losses and every gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_models import LENGTHS, grads_of, inputs_of, packed, padded_batch, relative_errors, tiny_config
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, PreTrainedModel

from shoal.models.encoder import packed_inputs
from shoal.models.layers import ALBERTS, MODEL_TYPES
from shoal.models.tasks import QuestionAnswering, SequenceClassification, label_loss, score_loss, span_loss

architectures = pytest.mark.parametrize("model_type", MODEL_TYPES)
START, END = torch.tensor([0, 7, 3, 16]), torch.tensor([2, 19, 3, 16])
LABELS = torch.tensor([2, 0, 1, 2])


def weights_of(model_class: type, model_type: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(1)
    model = model_class.from_config(tiny_config(model_type, **changes)).double().train()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def same_gradients(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    their_grads, our_grads = grads_of(theirs), grads_of(ours)
    assert their_grads.keys() == our_grads.keys() == {name for name, _ in theirs.named_parameters()}
    errors = relative_errors(our_grads, their_grads)
    assert max(errors.values()) < 1e-10, errors


@architectures
@pytest.mark.parametrize("checkpointing", [False, True])
def test_question_answering(model_type: str, checkpointing: bool) -> None:
    weights, batch = weights_of(AutoModelForQuestionAnswering, model_type), padded_batch()
    theirs, mask = copy.deepcopy(weights), batch["attention_mask"].bool()
    out = theirs(**inputs_of(model_type, batch))
    model = QuestionAnswering(weights, activation_checkpointing=checkpointing)
    sequences = packed(batch)
    start, end = model(**sequences)
    torch.testing.assert_close(start, out.start_logits[mask], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(end, out.end_logits[mask], rtol=1e-11, atol=1e-12)

    def in_sequence(logits: Tensor, target: Tensor) -> Tensor:
        rows = zip(logits, target, LENGTHS, strict=True)
        return sum((F.cross_entropy(row[:length], place) for row, place, length in rows), torch.tensor(0.0))

    expected = (in_sequence(out.start_logits, START) + in_sequence(out.end_logits, END)) / 2
    loss = span_loss(start, end, sequences, START, END)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    loss.backward()
    expected.backward()
    same_gradients(model.weights, theirs)


@architectures
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sequence_classification(model_type: str, checkpointing: bool) -> None:
    weights = weights_of(AutoModelForSequenceClassification, model_type, num_labels=3)
    theirs, batch = copy.deepcopy(weights), padded_batch()
    out = theirs(**inputs_of(model_type, batch), labels=LABELS)
    model = SequenceClassification(weights, activation_checkpointing=checkpointing)
    logits = model(**packed(batch))
    torch.testing.assert_close(logits, out.logits, rtol=1e-11, atol=1e-12)
    loss = label_loss(logits, LABELS) / len(LABELS)
    assert loss.item() == pytest.approx(out.loss.item(), rel=1e-12)
    loss.backward()
    out.loss.backward()
    same_gradients(model.weights, theirs)


@architectures
def test_scores_are_learnt_as_in_transformers(model_type: str) -> None:
    kind = {"num_labels": 1, "problem_type": "regression"}
    weights = weights_of(AutoModelForSequenceClassification, model_type, **kind)
    theirs, batch, scores = copy.deepcopy(weights), padded_batch(), torch.tensor([0.0, 2.5, 5, 3.2]).double()
    out = theirs(**inputs_of(model_type, batch), labels=scores)
    model = SequenceClassification(weights)
    loss = score_loss(model(**packed(batch)), scores) / len(scores)
    assert loss.item() == pytest.approx(out.loss.item(), rel=1e-12)
    loss.backward()
    out.loss.backward()
    same_gradients(model.weights, theirs)


DROPS_IN_THE_HEAD = {
    **dict.fromkeys(ALBERTS, "classifier_dropout_prob"),
    "distilbert": "seq_classif_dropout",
}


@architectures
def test_dropout_of_the_classifier(model_type: str) -> None:
    """All is dropped before the last layer, so that its bias alone is left."""
    name = DROPS_IN_THE_HEAD.get(model_type, "classifier_dropout")
    weights = weights_of(AutoModelForSequenceClassification, model_type, num_labels=3, **{name: 1.0})
    model, batch = SequenceClassification(weights), packed(padded_batch())
    last = weights.classifier.out_proj if model_type == "roberta" else weights.classifier
    assert torch.equal(model(**batch), last.bias.expand(4, 3))
    model.eval()
    assert not torch.equal(model(**batch), last.bias.expand(4, 3))


def test_dropout_of_distilberts_answers() -> None:
    weights = weights_of(AutoModelForQuestionAnswering, "distilbert", qa_dropout=1.0)
    model, batch = QuestionAnswering(weights), packed(padded_batch())
    start, end = model(**batch)
    assert torch.equal(torch.stack([start, end], 1), weights.qa_outputs.bias.expand(len(start), 2))


def test_padding_has_no_part_in_the_span_loss() -> None:
    batch = packed(padded_batch((2, 6)))
    logits = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    loss = span_loss(logits, logits, batch, torch.tensor([1, 5]), torch.tensor([0, 5]))
    assert loss.item() == pytest.approx(torch.tensor([2.0, 6.0]).double().log().sum().item(), rel=1e-12)
    loss.backward()
    assert logits.grad is not None
    expected = torch.tensor([0.0, 0.0] + [1 / 6] * 5 + [1 / 6 - 1]).double()
    torch.testing.assert_close(logits.grad, expected)


def test_losses_of_short_types_are_computed_in_fp32() -> None:
    batch, logits = packed(padded_batch()), torch.randn(sum(LENGTHS), dtype=torch.bfloat16)
    assert span_loss(logits, logits, batch, START, END).dtype == torch.float32
    assert label_loss(torch.randn(4, 3, dtype=torch.bfloat16), LABELS).dtype == torch.float32


def test_models_take_the_sequences_without_their_targets() -> None:
    batch = packed(padded_batch())
    assert packed_inputs({**batch, "labels": LABELS}).keys() == batch.keys()
