"""Graphs that dynamo makes of the models: how many, and that nothing breaks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.gpu.counts import packed_batch
from smallest_models import ALBERT, BERT, MODELS, SIZES, SMALL_DETECTOR, pretraining
from torch import Tensor, nn

from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.env.worker import alone
from shoal.models.causal import CausalLM, new_causal
from shoal.models.detection.mask_rcnn import MaskRCNN
from shoal.models.encoder import packed_inputs
from shoal.models.pretraining import AlbertPretraining, BertPretraining
from shoal.models.t5 import T5, new_t5
from shoal.models.tasks import SequenceClassification
from shoal.models.text_config import T5ModelConfig
from shoal.train.config import LoopConfig
from shoal.train.run import Run


@contextmanager
def compiled_graphs(model: Any, dynamic: bool | None = None) -> Iterator[list[int]]:
    """Compile ``model`` by a backend that notes the operations of each graph and runs it as it is."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(len(graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    model.compile(backend=backend, dynamic=dynamic, fullgraph=True)
    yield graphs
    torch._dynamo.reset()
    _leave_autocasts()


def _leave_autocasts() -> None:
    """Leave what a graph entered and recomputation stopped in: no context manager leaves it there."""
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()


@pytest.mark.parametrize(
    "name", [name if name == "resnet50" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_forward_is_one_graph_in_training_and_one_in_evaluation(name: str) -> None:
    """Of a text model one for each kind of layer, first, others and last; of T5 two."""
    model, loss = MODELS[name]()
    compute = loss("cpu")
    kinds = 3 if isinstance(model, T5) or hasattr(model, "encoder") else 1
    with compiled_graphs(model) as graphs:
        compute()
        assert 1 <= len(graphs) <= kinds
        with torch.no_grad():
            model.eval()
            compute()
        assert 2 <= len(graphs) <= 2 * kinds


@pytest.mark.parametrize("recomputes", [False, True])
def test_more_layers_are_not_more_graphs(recomputes: bool) -> None:
    """The first layer and the others."""
    found = []
    for num_layers in (3, 6):
        config = replace(BERT, activation_checkpointing=recomputes, num_hidden_layers=num_layers)
        model, loss = pretraining(BertPretraining(config))
        with compiled_graphs(model) as graphs:
            loss("cpu")().backward()  # type: ignore[no-untyped-call]
        found.append(len(graphs))
    assert found == [2, 2]


def test_the_blocks_of_t5_are_two_graphs_whatever_is_dropped() -> None:
    """Blocks of encoder and decoder; all have their own dropout, which a step changes. The loss has none."""
    found = []
    for num_layers in (2, 4):
        config = T5ModelConfig(
            vocab_size=97, d_model=32, d_kv=16, d_ff=48, num_layers=num_layers, num_heads=2, dropout=0.3
        )
        torch.manual_seed(num_layers)
        model = new_t5(config, pad_id=0, end_id=1)
        batch = {"input_ids": torch.ones(2, 9, dtype=torch.int64), "labels": torch.ones(2, 5).long()}
        keys = torch.arange(12).view(6, 2)
        weights = list(model.parameters())
        eager = [model(**batch, dropout_keys=each).loss for each in keys]
        expected = torch.autograd.grad(eager[0], weights)
        with compiled_graphs(model) as graphs:
            losses = [model(**batch, dropout_keys=each).loss for each in keys]
            gradients = torch.autograd.grad(losses[0], weights)
        assert losses == eager and len({loss.item() for loss in eager}) == 6
        torch.testing.assert_close(gradients, expected)
        found.append(len(graphs))
    assert found == [2, 2]


class Chain(nn.Module):
    """Modules one after another; dynamo of torch 2.11 does not begin a graph in ``nn.Sequential``."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.chain = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Any:
        for module in self.chain:
            x = module(x)
        return x


HEADS: dict[str, tuple[tuple[int, ...], Callable[[Any], nn.Module]]] = {
    "boxes": ((256, 7, 7), lambda heads: Chain(heads.box_head, heads.box_predictor)),
    "masks": ((256, 14, 14), lambda heads: Chain(heads.mask_head, heads.mask_predictor)),
}
"""Shape of a region's features, and the layers that see it."""


@pytest.mark.parametrize("name", ["boxes", pytest.param("masks", marks=pytest.mark.slow)])
def test_each_head_of_mask_rcnn_is_two_graphs_for_any_number_of_regions(name: str) -> None:
    """The second has a number of regions that may change. Between the heads, the host counts regions."""
    shape, layers = HEADS[name]
    head = layers(MaskRCNN(SMALL_DETECTOR, 5).roi_heads)
    with compiled_graphs(head) as graphs:
        for number in (3, 2, 5, 4, 7):
            out = head(torch.randn(number, *shape))
            assert {len(one) for one in (out if isinstance(out, tuple) else (out,))} == {number}
    assert len(graphs) == 2


def test_the_region_proposals_of_mask_rcnn_are_one_graph() -> None:
    head = MaskRCNN(SMALL_DETECTOR, 5).rpn.head
    with compiled_graphs(head) as graphs:
        logits, deltas = head([torch.randn(2, 256, side, side) for side in (8, 4, 2)])
    assert [len(logits), len(deltas), len(graphs)] == [3, 3, 1]


def test_the_backbone_of_mask_rcnn_is_one_graph_for_each_size_of_batches() -> None:
    backbone = MaskRCNN(SMALL_DETECTOR, 5).backbone
    canvases = DetectionAugmentConfig(shorter=(64,), longer=128).canvases
    assert len(canvases) == 4
    with compiled_graphs(backbone, dynamic=False) as graphs:
        for _ in range(2):
            for height, width in canvases[::2]:  # two suffice: each graph takes 2 s
                assert len(backbone(torch.randn(1, 3, height, width))) == 5
        with torch.compiler.set_stance("force_eager"):
            backbone.eval()(torch.randn(1, 3, 32, 32))
    assert len(graphs) == 2


def packed_mix(number: int, random: torch.Generator) -> dict[str, Any]:
    size = 16 + int(torch.randint(1, 16, (1,), generator=random))
    return packed_batch(3 + number % 5, size, num_masked=2 + number % 3, device="cpu")


def classified() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return SequenceClassification(BertForSequenceClassification(BertConfig(**SIZES)))


def language_model() -> nn.Module:
    from transformers import GPT2Config

    return CausalLM(new_causal(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=32)))


def documents(number: int, random: torch.Generator) -> dict[str, Any]:
    """Return blocks of one length, in which documents begin anywhere."""
    begins = torch.rand(2, 32, generator=random) < 0.2
    index = torch.arange(32).expand(2, 32)
    position_ids = index - torch.where(begins, index, 0).cummax(1).values
    ids = torch.randint(97, (2, 32), generator=random)
    return {
        "input_ids": ids,
        "position_ids": position_ids,
        "labels": ids,
        "dropout_keys": torch.arange(2) + number,
    }


def answers(number: int, random: torch.Generator) -> dict[str, Any]:
    """Return rows of a document each, padded to the longest, as finetuning has them without packing."""
    size = 16 + int(torch.randint(1, 16, (1,), generator=random))
    ids = torch.randint(97, (2 + number % 3, size), generator=random)
    positions = torch.arange(size).expand(ids.shape)
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": ids,
        "dropout_keys": torch.arange(len(ids)),
    }


def sentences(number: int, random: torch.Generator, *, padded: bool) -> dict[str, Any]:
    """Return inputs and targets of a T5, of any lengths, or padded to one."""
    num_inputs, num_labels = (int(torch.randint(3, 9, (1,), generator=random)) for _ in range(2))
    ids = torch.ones(3, 9 if padded else num_inputs, dtype=torch.int64)
    labels = torch.ones(3, 9 if padded else num_labels, dtype=torch.int64)
    if padded:
        ids[:, num_inputs:], labels[:, num_labels:] = 0, -100
    return {"input_ids": ids, "labels": labels, "dropout_keys": torch.arange(3) + number}


MIXES: dict[str, tuple[Callable[[], Any], Callable[[int, torch.Generator], dict[str, Any]], bool, int]] = {
    "bert": (lambda: BertPretraining(BERT), packed_mix, True, 2),
    "albert": (lambda: AlbertPretraining(ALBERT), packed_mix, True, 2),
    "squad": (lambda: MODELS["squad"]()[0], lambda *given: packed_inputs(packed_mix(*given)), True, 2),
    "classify": (classified, lambda *given: packed_inputs(packed_mix(*given)), True, 2),
    "t5": (lambda: MODELS["t5"]()[0], partial(sentences, padded=True), False, 2),
    "t5_classify": (lambda: MODELS["t5"]()[0], partial(sentences, padded=False), True, 2),
    "lm": (language_model, documents, False, 1),
    "lm_finetune": (language_model, answers, True, 1),
}
"""Model, batch, whether the recipe compiles it for any sizes, and its graphs.

Those of an encoder are at most two of its layers; those of T5 are the blocks of its encoder and those of its
decoder.
"""


@pytest.mark.parametrize(
    "name",
    # those have the layers of BERT, which are all that is compiled
    [pytest.param(name, marks=pytest.mark.slow) if name in ("squad", "classify") else name for name in MIXES],
)
def test_fifty_mixes_of_lengths_compile_nothing_after_five_steps(name: str) -> None:
    make, batch, dynamic, num_graphs = MIXES[name]
    model, random = make(), torch.Generator().manual_seed(3)
    counts = []
    with compiled_graphs(model, dynamic=dynamic) as graphs:
        for number in range(50):
            model(**batch(number, random))
            counts.append(len(graphs))
    assert counts[4] == counts[-1] == num_graphs, counts


def test_fifty_mixes_of_lengths_are_few_graphs_inside_ddp(tmp_path: Path) -> None:
    """One worker: the graphs are not cut, though DDP has many buckets."""
    before = torch._dynamo.config.optimize_ddp
    config = replace(BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertPretraining(config)
    random = torch.Generator().manual_seed(3)
    try:
        with Run.open(tmp_path / "run", loop=LoopConfig(compile=True), worker=alone(tmp_path)) as run:
            ddp: Any = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
            run.compile(model, dynamic=True)
            with compiled_graphs(model, dynamic=True) as graphs:
                for mix in range(50):
                    size = 16 + int(torch.randint(1, 16, (1,), generator=random))
                    batch = packed_batch(3 + mix % 5, size, num_masked=2 + mix % 3, device="cpu")
                    ddp(**batch)
            dist.barrier()
        assert len(graphs) <= 2, graphs
    finally:
        torch._dynamo.config.optimize_ddp = before
