"""The cases of ``bert_step``: the models of both sides, with the same weights, and our side's batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.bert_step import CASES, VOCABULARY, Case
from shoal.data.squad.config import WindowConfig
from shoal.data.squad.dataset import read_squad
from shoal.data.squad.features import make_features
from shoal.data.steps import DataShard
from shoal.data.text.classify import MNLI_LABELS, Columns, make_pairs, read_classify
from shoal.data.text.examples import ExampleConfig, ExampleReader, packed
from shoal.data.text.prepare import PrepareConfig, prepare_text
from shoal.data.text.sequences import TaskData
from shoal.data.text.shards import TextShards
from shoal.data.text.task_batches import TaskSource
from shoal.data.text.tokenizer import read_tokenizer
from shoal.decide.order import ShuffledOrder
from shoal.env.settings import test_data_dir
from shoal.models.encoder import packed_inputs
from shoal.models.pretraining import AlbertPretraining, BertPretraining, transformers_config
from shoal.models.tasks import (
    QuestionAnswering,
    SequenceClassification,
    label_loss,
    load_task_model,
    span_loss,
)
from shoal.models.text_config import AlbertModelConfig, BertModelConfig

Arrays = dict[str, Any]
Batch = dict[str, Any]

SEED = 42


@dataclass(frozen=True, kw_only=True)
class Sides:
    """A model on both sides with the same weights, and its batches."""

    ours: nn.Module
    peer: PreTrainedModel
    loss: Callable[[nn.Module, Batch], Tensor]
    """Mean loss of our side's batch."""
    read: Callable[[int], Arrays]
    """Our side's packed batch of a step."""
    sentence_label: str = "next_sentence_label"
    """The peer's name of a pair's label."""


def pretraining(folder: Path, config: BertModelConfig, batch_size: int) -> Sides:
    ours = BertPretraining(config)
    peer = transformers.BertForPreTraining._from_config(
        transformers_config(config), attn_implementation="sdpa"
    )
    ours.weights.load_state_dict(peer.state_dict())
    read = pair_reader(folder, CASES["pretraining"], batch_size, pairs="next", max_ngram=1)
    return Sides(ours=ours, peer=peer, loss=pretraining_loss, read=read)


def albert(folder: Path, config: BertModelConfig, batch_size: int) -> Sides:
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    own = AlbertModelConfig(**{name: getattr(config, name) for name in sizes})
    ours = AlbertPretraining(own)
    peer = transformers.AlbertForPreTraining._from_config(
        transformers_config(own), attn_implementation="sdpa"
    )
    ours.weights.load_state_dict(peer.state_dict())
    read = pair_reader(folder, CASES["albert"], batch_size, pairs="order", max_ngram=3)
    label = "sentence_order_label"
    return Sides(ours=ours, peer=peer, loss=pretraining_loss, read=read, sentence_label=label)


def pair_reader(
    folder: Path, case: Case, batch_size: int, *, pairs: Literal["next", "order"], max_ngram: int
) -> Callable[[int], Arrays]:
    """Prepare a case's text and return what reads the pairs of segments of a step."""
    sources = tuple(str(test_data_dir() / name) for name in case.needs)
    tokenizer = str(test_data_dir() / case.tokenizer)
    # in this process: others would import torch and transformers first
    config = PrepareConfig(
        sources=sources, out=folder / "text", tokenizer=tokenizer, validation=0, processes=1
    )
    prepare_text(config, progress=False)
    reader = ExampleReader(
        TextShards(folder / "text", "train"),
        ExampleConfig(
            max_seq_length=case.max_seq_length,
            max_ngram=max_ngram,
            whole_words=False,
            pairs=pairs,
            seed=SEED,
        ),
    )
    order = ShuffledOrder(num_examples=reader.num_examples, seed=SEED)

    def read(step: int) -> Arrays:
        names = order.examples_of(range(step * batch_size, (step + 1) * batch_size))
        return packed(reader.batch(*names))

    return read


def pretraining_loss(model: nn.Module, batch: Batch) -> Tensor:
    names = ("masked_rows", "masked_ids", "labels")
    mlm_loss, _, sentence_loss, _ = model(**packed_inputs(batch), **{name: batch[name] for name in names})
    loss: Tensor = mlm_loss / len(batch["masked_ids"]) + sentence_loss / len(batch["labels"])
    return loss


def squad(folder: Path, config: BertModelConfig, batch_size: int) -> Sides:
    tokenizer = read_tokenizer(test_data_dir() / VOCABULARY, lowercase=True)
    data = read_squad(test_data_dir() / CASES["squad"].needs[0], purpose="train")
    windows = make_features(data, tokenizer, WindowConfig(max_seq_length=CASES["squad"].max_seq_length))
    peer = transformers.BertForQuestionAnswering._from_config(
        transformers_config(config), attn_implementation="sdpa"
    )
    peer.save_pretrained(folder / "model")
    return Sides(
        ours=load_task_model(QuestionAnswering, folder / "model"),
        peer=peer,
        loss=squad_loss,
        read=task_reader(windows, batch_size),
    )


def squad_loss(model: nn.Module, batch: Batch) -> Tensor:
    start_logits, end_logits = model(**packed_inputs(batch))
    loss = span_loss(start_logits, end_logits, batch, batch["start"], batch["end"])
    return loss / len(batch["start"])


def mnli(folder: Path, config: BertModelConfig, batch_size: int) -> Sides:
    tokenizer = read_tokenizer(test_data_dir() / VOCABULARY, lowercase=True)
    data = read_classify(test_data_dir() / CASES["mnli"].needs[0], Columns(), labels=MNLI_LABELS)
    pairs = make_pairs(data, tokenizer, max_seq_length=CASES["mnli"].max_seq_length)
    sizes = transformers_config(config)
    sizes.num_labels = len(MNLI_LABELS)
    peer = transformers.BertForSequenceClassification._from_config(sizes, attn_implementation="sdpa")
    peer.save_pretrained(folder / "model")
    return Sides(
        ours=load_task_model(SequenceClassification, folder / "model"),
        peer=peer,
        loss=mnli_loss,
        read=task_reader(pairs, batch_size),
    )


def mnli_loss(model: nn.Module, batch: Batch) -> Tensor:
    return label_loss(model(**packed_inputs(batch)), batch["labels"]) / len(batch["labels"])


def task_reader(data: TaskData, batch_size: int) -> Callable[[int], Arrays]:
    source = TaskSource(data=data, seed=SEED)
    shard = DataShard(global_batch_size=batch_size, micro_batch_size=batch_size)
    return lambda step: data.batch(source.micro_batches(shard, step)[0][1])


MAKERS = {"pretraining": pretraining, "albert": albert, "squad": squad, "mnli": mnli}
