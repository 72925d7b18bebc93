"""Our ALBERT against transformers' own class: same weights, same losses, same gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AlbertForPreTraining

from shoal.errors import UsageError
from shoal.models.albert import (
    AlbertPretraining,
    export_transformers,
    load_transformers_weights,
    transformers_config,
)
from shoal.models.albert_config import AlbertModelConfig, num_parameters

CONFIG = AlbertModelConfig(
    vocab_size=97,
    embedding_size=16,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=24,
    classifier_dropout_prob=0.0,
)
BATCH, LENGTH, PREDICTIONS = 4, 20, 5


def example(config: AlbertModelConfig = CONFIG) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(7)
    ids = torch.randint(5, config.vocab_size, (BATCH, LENGTH), generator=random)
    lengths = torch.tensor([LENGTH, 13, 17, 9])
    weights = torch.ones(BATCH, PREDICTIONS)
    weights[1, 3:] = 0
    positions = torch.stack(
        [1 + torch.randperm(8, generator=random)[:PREDICTIONS].sort().values for _ in range(BATCH)]
    )
    positions[weights == 0] = 0
    return {
        "input_ids": ids,
        "token_type_ids": (torch.arange(LENGTH) > 6).long().expand(BATCH, -1).contiguous(),
        "attention_mask": (torch.arange(LENGTH) < lengths[:, None]).long(),
        "masked_positions": positions,
        "masked_ids": torch.randint(5, config.vocab_size, (BATCH, PREDICTIONS), generator=random),
        "masked_weights": weights,
        "sop_labels": torch.tensor([0, 1, 1, 0]),
    }


def their_loss(model: AlbertForPreTraining, batch: dict[str, Tensor]) -> Tensor:
    labels = torch.full((BATCH, LENGTH), -100)
    for row in range(BATCH):
        for column in range(PREDICTIONS):
            if batch["masked_weights"][row, column]:
                labels[row, batch["masked_positions"][row, column]] = batch["masked_ids"][row, column]
    names = ("input_ids", "token_type_ids", "attention_mask")
    out = model(**{n: batch[n] for n in names}, labels=labels, sentence_order_label=batch["sop_labels"])
    return out.loss


def our_loss(model: AlbertPretraining, batch: dict[str, Tensor]) -> Tensor:
    mlm_loss, _, sop_loss, _ = model(**batch)
    return mlm_loss / batch["masked_weights"].sum() + sop_loss / BATCH


def relative_errors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference over the largest entry, a tensor; a gradient that is zero in theory has no scale."""
    errors = {}
    for name, grad in theirs.items():
        scale = grad.abs().max().item()
        errors[name] = (ours[name] - grad).abs().max().item() / scale if scale > 1e-15 else 0.0
    return errors


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_every_gradient_equal_transformers(checkpointing: bool) -> None:
    torch.manual_seed(1)
    model = AlbertPretraining(replace(CONFIG, activation_checkpointing=checkpointing)).double()
    theirs = AlbertForPreTraining(transformers_config(CONFIG)).double()
    theirs.load_state_dict(model.albert.state_dict())
    theirs.train()
    batch = example()

    expected = their_loss(theirs, batch)
    loss = our_loss(model, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)

    expected.backward()
    loss.backward()
    their_grads = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    our_grads = {n: p.grad for n, p in model.albert.named_parameters() if p.grad is not None}
    assert their_grads.keys() == our_grads.keys()
    errors = relative_errors(our_grads, their_grads)
    assert max(errors.values()) < 1e-10, errors


def test_counts_of_correct_predictions() -> None:
    model = AlbertPretraining(CONFIG).eval()
    theirs = AlbertForPreTraining(transformers_config(CONFIG)).eval()
    theirs.load_state_dict(model.albert.state_dict())
    batch = example()
    with torch.no_grad():
        names = ("input_ids", "token_type_ids", "attention_mask")
        out = theirs(**{n: batch[n] for n in names})
        rows = torch.arange(BATCH)[:, None]
        predicted = out.prediction_logits[rows, batch["masked_positions"]].argmax(-1)
        batch["masked_ids"][:, :3] = predicted[:, :3]
        _, mlm_correct, _, sop_correct = model(**batch)
    hits = ((predicted == batch["masked_ids"]) * batch["masked_weights"]).sum()
    assert hits >= 3 * BATCH
    assert mlm_correct == hits
    assert sop_correct == (out.sop_logits.argmax(-1) == batch["sop_labels"]).sum()


def test_pre_layer_norm_normalises_before_each_half() -> None:
    torch.manual_seed(2)
    config = replace(CONFIG, pre_layer_norm=True, num_hidden_layers=2)
    model = AlbertPretraining(config).double()
    batch = example()
    layer = model.albert.albert.encoder.albert_layer_groups[0].albert_layers[0]
    hidden = model.albert.albert.encoder.embedding_hidden_mapping_in(
        model.albert.albert.embeddings(batch["input_ids"], token_type_ids=batch["token_type_ids"])
    )
    bias = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.float64)
    bias.masked_fill_(batch["attention_mask"][:, None, None, :] == 0, -torch.inf)
    for _ in range(2):
        attention = layer.attention
        x = attention.LayerNorm(hidden)
        q, k, v = (
            f(x).view(BATCH, LENGTH, 4, 8).transpose(1, 2)
            for f in (attention.query, attention.key, attention.value)
        )
        context = torch.softmax(q @ k.transpose(2, 3) / 8**0.5 + bias, -1) @ v
        hidden = hidden + attention.dense(context.transpose(1, 2).reshape(BATCH, LENGTH, 32))
        hidden = hidden + layer.ff_chunk(layer.full_layer_layer_norm(hidden))
    assert model.final_norm is not None
    wanted = torch.tensor([[0, 3], [0, 5], [0, 1], [0, 8]])
    expected = model.final_norm(hidden)[torch.arange(BATCH)[:, None], wanted]
    found = model.encode(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], wanted)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("switch", "kept"), [("skip_sop", 0), ("skip_mlm", 2)])
def test_a_skipped_task_has_no_loss_and_leaves_no_gradient_out(switch: str, kept: int) -> None:
    model = AlbertPretraining(replace(CONFIG, **{switch: True}))
    sums = model(**example())
    assert [value.item() > 0 for value in (sums[0], sums[2])] == [kept == 0, kept == 2]
    sums[kept].backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)  # DistributedDataParallel waits for all of them
    assert len(trained) < len(list(model.parameters()))


@pytest.mark.parametrize("pre_layer_norm", [False, True])
def test_number_of_parameters(pre_layer_norm: bool) -> None:
    config = replace(CONFIG, pre_layer_norm=pre_layer_norm)
    assert num_parameters(config) == sum(p.numel() for p in AlbertPretraining(config).parameters())


def test_base_has_the_published_number_of_parameters() -> None:
    """12 M in Lan et al. 2019, table 1; both heads included here."""
    with torch.device("meta"):
        model = AlbertPretraining(AlbertModelConfig())
    assert sum(p.numel() for p in model.parameters()) == num_parameters(AlbertModelConfig()) == 11_813_810


def test_export_is_read_by_transformers_and_back(tmp_path: Path) -> None:
    model = AlbertPretraining(CONFIG)
    export_transformers(model, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.bin"))
    theirs, report = AlbertForPreTraining.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    batch = example()
    with torch.no_grad():
        expected = their_loss(theirs.eval(), batch)
        assert our_loss(model.eval(), batch).item() == pytest.approx(expected.item(), rel=1e-5)

    other = AlbertPretraining(CONFIG)
    load_transformers_weights(other, tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_other_sizes_are_named(tmp_path: Path) -> None:
    export_transformers(AlbertPretraining(CONFIG), tmp_path / "out")
    with pytest.raises(
        UsageError, match=r"word_embeddings\.weight has shape \(97, 16\) there and \(98, 16\)"
    ):
        load_transformers_weights(AlbertPretraining(replace(CONFIG, vocab_size=98)), tmp_path / "out")
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_transformers_weights(AlbertPretraining(CONFIG), tmp_path)


def test_pre_layer_norm_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be exported"):
        export_transformers(AlbertPretraining(replace(CONFIG, pre_layer_norm=True)), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "hidden_size 32 must be a multiple"),
        ({"skip_sop": True, "skip_mlm": True}, "leave nothing to train"),
        ({"load_from": "transformers"}, "do not go together"),
        ({"checkpoint_path": Path("x")}, "do not go together"),
    ],
)
def test_impossible_settings(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **changes)
