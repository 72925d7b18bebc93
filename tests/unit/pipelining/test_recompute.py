"""Layers that a model of transformers computes again in the backward pass, in its stages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from stage_runs import Result, run_stages
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config

from pipeline_models import cases
from shoal.decide.cost import stage_costs
from shoal.models.causal import CausalLM, MeanLoss, new_causal
from shoal.models.padded_pretraining import PaddedPretraining
from shoal.models.pretraining import new_encoder
from shoal.models.t5 import T5
from shoal.models.text_config import AlbertModelConfig, BertModelConfig
from shoal.pipelining.export_graph import ExportedGraph, export_model
from shoal.pipelining.loss import loss_of
from shoal.pipelining.measure_cost import measure_cost
from shoal.pipelining.random_streams import streams
from shoal.pipelining.recompute import SegmentedRun, recomputed_layers, segments_of
from shoal.pipelining.roofline import DeviceRates, estimate_cost
from shoal.pipelining.split import split
from shoal.pipelining.units import units_of


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads are in no fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Counted(TorchDispatchMode):
    """Counts calls of an operation, and the bytes that are alive of what operations make."""

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self._operation, self.num_calls = operation, 0
        self._storages: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += func is self._operation
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in known:
                self._storages[each.untyped_storage()] = each.untyped_storage().nbytes()
        return outputs

    @property
    def alive_bytes(self) -> int:
        gc.collect()
        return sum(self._storages.values())


def assert_same_bits(found: Result, wanted: Result) -> None:
    assert torch.equal(found.loss, wanted.loss)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        mine = found.gradients[name]
        assert (mine is None and gradient is None) or torch.equal(mine, gradient), name
    assert all(torch.equal(buffer, wanted.buffers[name]) for name, buffer in found.buffers.items())


def causal() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(2)
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
    ids = torch.randint(0, 61, (2, 12))
    batch = {"input_ids": ids, "labels": ids.roll(-1), "position_ids": torch.arange(12).repeat(2, 1) % 7}
    model = MeanLoss(CausalLM(new_causal(GPT2Config(vocab_size=61, bos_token_id=1, eos_token_id=1, **sizes))))
    return model.train(), {**batch, "dropout_keys": torch.tensor([5, 9])}


def written() -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = cases(dropout=0.3)["t5"]()
    return T5(model).train(), {**batch, "dropout_keys": torch.arange(len(batch["labels"]))}


ENCODER: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 8, "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.2,
}  # fmt: skip


def pretraining(config: AlbertModelConfig | BertModelConfig) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(2)
    model = PaddedPretraining(new_encoder(config)).train()
    batch = {
        "input_ids": torch.randint(0, 61, (2, 8)),
        "token_type_ids": torch.arange(8).repeat(2, 1) // 4,
        "lengths": torch.tensor([8, 5]),
        "wanted": torch.tensor([[0, 3, 6], [0, 1, 4]]),
        "masked_ids": torch.randint(0, 61, (2, 2)),
        "masked_weights": torch.ones(2, 2),
        "weights": torch.ones(2),
        "labels": torch.tensor([1, 0]),
        "dropout_keys": torch.tensor([5, 9]),
        "samples_per_target": torch.tensor(0.5),
    }
    return model, batch


MODELS = {**cases(dropout=0.3), "causal": causal, "written": written}
LAYER_NORM, RMS_NORM = torch.ops.aten.native_layer_norm.default, torch.ops.aten.rsqrt.default
BITS = {
    "gpt2": LAYER_NORM,
    "t5": RMS_NORM,
    "causal": LAYER_NORM,
    "written": RMS_NORM,
    "llama": RMS_NORM,
    "bert": LAYER_NORM,
    "vit": LAYER_NORM,
    "bart": LAYER_NORM,
}
QUICK = ("gpt2", "t5", "causal")


@pytest.mark.parametrize("by_sample", [True, False])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BITS]
)
def test_recomputed_layers_have_the_bits_of_kept_ones(name: str, by_sample: bool) -> None:
    """Also where a stage begins inside a layer; dropout is by samples, or by torch's generator."""
    model, batch = MODELS[name]()
    batch = {key: value[:2] for key, value in batch.items()}
    found: dict[bool, list[Result]] = {False: [], True: []}
    calls: dict[bool, set[int]] = {False: set(), True: set()}
    for recomputes in (False, True):
        if recomputes:
            getattr(model, "weights", model).activation_checkpointing_enable()
        exported = export_model(model, batch, True)
        units = units_of(exported)
        for num_stages in (1, 3, 5):
            cuts = [index * len(units) // num_stages for index in range(1, num_stages)]
            stages = split(exported, cuts, units=units)
            torch.manual_seed(5)
            with streams(3, 7, range(4, 6)) if by_sample else nullcontext(), Counted(BITS[name]) as counted:
                found[recomputes].append(run_stages(model, stages, unflatten_of(exported), batch))
            calls[recomputes].add(counted.num_calls)
    for mine, wanted in zip(found[True], found[False], strict=True):
        assert_same_bits(mine, wanted)
    ((once,), (twice,)) = calls.values()
    layers = tuple(f"{layer}." for layer in recomputed_layers(model))
    norms = [n for n, module in model.named_modules() if "Norm" in type(module).__name__]
    assert twice == once + sum(n.startswith(layers) for n in norms)


@pytest.mark.parametrize("kind", [AlbertModelConfig, BertModelConfig])
def test_encoders_recompute_their_layers_with_the_same_bits(
    kind: type[AlbertModelConfig | BertModelConfig],
) -> None:
    """Those of ALBERT are one module that is called three times."""
    results = []
    for recomputes in (False, True):
        model, batch = pretraining(kind(**ENCODER, activation_checkpointing=recomputes))
        exported = export_model(model, batch, True)
        units = units_of(exported)
        flow = units.flow
        segments = segments_of(flow, 0, len(flow.body), recomputed_layers(model))
        assert sum(each.recomputes for each in segments) == (3 if recomputes else 0)
        for num_stages in (1, 3, 5):
            cuts = [index * len(units) // num_stages for index in range(1, num_stages)]
            stages = split(exported, cuts, units=units)
            with streams(3, 7, range(4, 6)):
                results.append(run_stages(model, stages, unflatten_of(exported), batch))
    for mine, wanted in zip(results[3:], results[:3], strict=True):
        assert_same_bits(mine, wanted)


def unflatten_of(exported: ExportedGraph) -> Any:
    """Return the function that ``run_stages`` needs; a model may return its loss in a dict."""

    def unflatten(outputs: Any) -> Any:
        return Output(loss=loss_of(exported.unflatten(outputs)))

    return unflatten


class Output(NamedTuple):
    loss: Tensor


class Block(nn.Module):
    gradient_checkpointing = True

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.linear(x))) + x


class Blocks(nn.Module):
    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(norm=False), Block(norm=norm), Block(norm=False)])

    def forward(self, x: Tensor) -> Output:
        for block in self.blocks:
            x = block(x)
        return Output(loss=x.square().mean())


def test_statistics_of_a_recomputed_norm_are_updated_once() -> None:
    torch.manual_seed(1)
    model, batch = Blocks(norm=True).train(), {"x": torch.randn(6, 4)}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    exported = export_model(model, batch, True)
    (stage,) = split(exported, [])
    run = stage.body.run
    assert isinstance(run, SegmentedRun) and len(run.graphs) > 2
    found = run_stages(model, [stage], exported.unflatten, batch)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    assert int(model.blocks[1].norm.num_batches_tracked) == 1
    for name, buffer in model.named_buffers():
        assert torch.equal(found.buffers[name], buffer), name
    assert all(torch.equal(found.gradients[name], p.grad) for name, p in model.named_parameters())


def test_layers_are_the_entries_of_lists(caplog: pytest.LogCaptureFixture) -> None:
    model = Blocks(norm=False)
    assert recomputed_layers(model) == {"blocks.0", "blocks.1", "blocks.2"}
    model.blocks[1].gradient_checkpointing = False  # every second layer
    assert recomputed_layers(model) == {"blocks.0", "blocks.2"}
    for block in model.blocks:
        block.gradient_checkpointing = False
    assert recomputed_layers(model) == frozenset()
    model.gradient_checkpointing = True  # the model itself calls its layers
    assert recomputed_layers(model) == {"blocks.0", "blocks.1", "blocks.2"}
    assert not caplog.records
    alone = Block(norm=False)
    assert recomputed_layers(alone) == frozenset()
    (warning,) = caplog.records
    assert "Block has activation checkpointing on" in warning.message


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_costs_are_those_of_recomputed_layers(name: str) -> None:
    model, batch = cases(dropout=0.1)[name]()
    rates = DeviceRates(flops_per_s=1e9, bytes_per_s=1e30, launch_s=0.0)
    plain = export_model(model, batch, True)
    (before,), (whole,) = (
        stage_costs(cost, []) for cost in (measure_cost(plain, repetitions=1), estimate_cost(plain, rates))
    )
    model.activation_checkpointing_enable()
    exported = export_model(model, batch, True)
    measured, estimated = measure_cost(exported, repetitions=1), estimate_cost(exported, rates)
    (kept,), (guess,) = (stage_costs(cost, []) for cost in (measured, estimated))
    (stage,) = split(exported, [])
    with Counted(None) as counted, streams(3, 7, range(8)):
        loss = exported.unflatten(stage(**batch)).loss
        assert counted.alive_bytes == pytest.approx(kept.saved_bytes, rel=0.1)
    del loss
    # all but the layers' inputs, of four alike or two and two
    assert before.saved_bytes / 5 < measured.recomputed_bytes < before.saved_bytes / 3
    assert (guess.saved_bytes, estimated.recomputed_bytes) == pytest.approx(
        (kept.saved_bytes, measured.recomputed_bytes), rel=0.3
    )
    assert guess.forward_s == whole.forward_s
    assert whole.backward_s + 0.9 * whole.forward_s < guess.backward_s < whole.backward_s + whole.forward_s
