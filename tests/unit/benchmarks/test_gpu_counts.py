"""Demands of a step on a GPU: how often it is waited for, and how large its tensors are; all without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.gpu.counts import CUDA, as_on_a_gpu, counting, packed_batch, suppression
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.env import alone
from shoal.models.detection.config import MaskRCNNConfig
from shoal.models.detection.mask_rcnn import MaskRCNN
from shoal.models.encoder import packed_inputs
from shoal.models.pretraining import AlbertPretraining, BertPretraining
from shoal.models.resnet import new_resnet
from shoal.models.resnet_config import ResNetConfig
from shoal.models.t5 import new_t5
from shoal.models.tasks import QuestionAnswering, span_loss
from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig
from shoal.optim import moments
from shoal.optim.adafactor import Adafactor
from shoal.optim.lamb import Lamb
from shoal.optim.lans import Lans
from shoal.optim.lars import Lars
from shoal.optim.novograd import Novograd
from shoal.recipes.mask_rcnn import LOSSES, mean_losses
from shoal.train.config import LoopConfig
from shoal.train.run import Run, Sizes

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
SMALL_DETECTOR = MaskRCNNConfig(
    backbone="resnet18", anchor_sizes=(8, 16, 32, 64, 128), proposals_a_level=60, proposals=100,
    proposal_samples=40, region_samples=32,
)  # fmt: skip
BERT, ALBERT = BertModelConfig(**SIZES), AlbertModelConfig(**SIZES, embedding_size=16)

Made = tuple[nn.Module, Callable[[str], Callable[[], Tensor]]]
"""A model, and what computes its loss on a device."""


def pretraining(model: Any) -> Made:
    def loss(device: str) -> Callable[[], Tensor]:
        batch = packed_batch(4, 20, num_masked=2, device=device)
        return lambda: (lambda sums: sums[0] + sums[2])(model(**batch))

    return model, loss


def squad() -> Made:
    from transformers import BertConfig, BertForQuestionAnswering

    model = QuestionAnswering(BertForQuestionAnswering(BertConfig(**SIZES)))

    def loss(device: str) -> Callable[[], Tensor]:
        batch = packed_inputs(packed_batch(4, 20, num_masked=2, device=device))
        where = torch.ones(4, dtype=torch.int64, device=device)
        return lambda: span_loss(*model(**batch), batch, where, where)

    return model, loss


def resnet() -> Made:
    model = new_resnet(ResNetConfig(network="resnet18"), 10)

    def loss(device: str) -> Callable[[], Tensor]:
        images, labels = (
            torch.zeros(2, 3, 32, 32, device=device),
            torch.zeros(2, dtype=torch.int64).to(device),
        )
        return lambda: nn.functional.cross_entropy(model(images).float(), labels)

    return model, loss


def t5() -> Made:
    config = T5ModelConfig(vocab_size=97, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)
    model = new_t5(config, pad_id=0, end_id=1)

    def loss(device: str) -> Callable[[], Tensor]:
        ids = {
            n: torch.ones(2, k, dtype=torch.int64, device=device)
            for n, k in (("input_ids", 9), ("labels", 5))
        }
        return lambda: model(**ids).loss

    return model, loss


MODELS: dict[str, Callable[[], Made]] = {
    "albert": lambda: pretraining(AlbertPretraining(ALBERT)),
    "bert": lambda: pretraining(BertPretraining(BERT)),
    "squad": squad,
    "resnet50": resnet,
    "t5": t5,
}


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_never_wait_for_the_gpu(name: str) -> None:
    """Real tensors of the CPU stand for the GPU's."""
    _, loss = MODELS[name]()
    compute = loss("cpu")
    with torch.autocast("cpu", torch.bfloat16), counting() as counts:
        value = compute()
        value.backward()  # type: ignore[no-untyped-call]
    assert counts.waits == {}
    assert counts.num_operations > 50


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_loss_stay_on_the_device(name: str) -> None:
    """Fake tensors of ``cuda:0``: what mixes devices fails, and what reads a tensor does."""
    with FakeTensorMode(), torch.device(CUDA):
        model, loss = MODELS[name]()
        with torch.device("cpu"):  # what the code itself creates must name its device
            value = loss(CUDA)()
    assert value.device == torch.device(CUDA)
    assert {parameter.device for parameter in model.parameters()} == {torch.device(CUDA)}


@pytest.mark.parametrize("make", [Lamb, Lans, Lars, Novograd, Adafactor])
def test_optimizers_never_wait_for_the_gpu(make: Any) -> None:
    with FakeTensorMode():
        weights = [nn.Parameter(torch.empty(shape, device=CUDA)) for shape in ((8, 4), (4,), (3, 2, 1, 1))]
        optimizer = make(weights, lr=0.1)
        for step in range(3):
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            if step == 0:  # NovoGrad looks at the first gradients
                optimizer.step()
                continue
            with counting() as counts:
                optimizer.step()
            # Adafactor copies the rates of its tensors to the device in every step
            assert counts.waits == ({"tensor(device=…)": 1} if make is Adafactor else {}), step
    assert counts.num_operations >= 5


def detection_batch() -> tuple[Tensor, dict[str, Tensor], Tensor]:
    random = torch.Generator().manual_seed(1)
    boxes = torch.tensor([[[10.0, 10, 60, 50], [60, 20, 100, 70]], [[5, 5, 40, 80], [50, 30, 90, 60]]])
    places = torch.tensor([[[0, 10, 10, 40, 50], [2000, 20, 60, 50, 40]]]).expand(2, 2, 5)
    targets = {
        "sizes": torch.tensor([[96, 128], [96, 128]]),
        "boxes": boxes,
        "labels": torch.ones(2, 2, dtype=torch.int64),
        "num_objects": torch.tensor([2, 2]),
        "masks": torch.ones(2, 4000, dtype=torch.uint8),
        "mask_places": places,
    }
    return torch.randn(2, 3, 96, 128, generator=random), targets, torch.tensor([1, 2])


def test_waits_of_a_step_of_mask_rcnn() -> None:
    """Today's number: sampled anchors, regions and masks are tensors whose sizes the host has to know."""
    torch.manual_seed(0)
    model = MaskRCNN(SMALL_DETECTOR, 5)
    with as_on_a_gpu(), counting() as counts:
        losses = mean_losses(model(*detection_batch()))
        losses.sum().backward()  # type: ignore[no-untyped-call]
    assert len(losses) == len(LOSSES)
    assert counts.waits.pop("equal") <= 3  # every fourth round of a suppression
    assert counts.waits == {
        "nonzero": 12, "tensor(device=…)": 3, "bincount": 1, "tolist": 1, "_local_scalar_dense": 1,
    }  # fmt: skip


def test_suppression_needs_little_memory_at_a_time() -> None:
    """Overlaps of 20,000 boxes whole would take 3.2 GB for each temporary."""
    counts = suppression(1, 20_000)
    assert counts.largest <= 1 << 30 and counts.waits == {"equal": 1}
    whole, by_level = suppression(2, 8_819), suppression(10, 2_000)
    assert by_level.num_bytes < whole.num_bytes / 3


class Points:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


def test_a_step_waits_for_the_norm_of_its_gradients_and_reads_the_loss_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "_is_flat", lambda tensor: False)  # the norm is torch's, as on a GPU
    waits = []
    with Run.open(tmp_path / "run", loop=LoopConfig(precision="fp32"), worker=alone(tmp_path)) as run:
        net = nn.Linear(4, 1)
        model = run.data_parallel(net)
        optimizer = Lamb(net.parameters(), lr=0.1)
        run.keep(model=net, optimizer=optimizer)
        for step in run.steps(Points(), Sizes(global_batch_size=8, micro_batch_size=4), until=4):
            with counting() as counts, step:
                for points in step:
                    step.backward(model(points).square().sum() / step.num_samples)
                step.update(optimizer, max_norm=1.0)
            waits.append(dict(counts.waits))
    # the norm and the loss, one after the other; LAMB's step numbers are tensors of the host
    assert [each["_local_scalar_dense"] for each in waits[:3]] == [2 + 2] * 3, waits
    assert all(set(each) <= {"_local_scalar_dense", "tolist", "cpu"} for each in waits[:3]), waits


def test_what_is_counted() -> None:
    x, flags = torch.arange(6.0), torch.tensor([True, False, True, True, False, False])
    for call, waits in (
        (lambda: x.sum().item(), {"_local_scalar_dense": 1}),
        (lambda: float(x[0]), {"_local_scalar_dense": 1}),
        (lambda: x.tolist(), {"tolist": 1}),
        (lambda: x[flags], {"index": 1}),
        (lambda: x.nonzero(), {"nonzero": 1}),
        (lambda: torch.tensor([1.0], device="cpu"), {"tensor(device=…)": 1}),
        (lambda: x.repeat_interleave(torch.tensor([1, 2, 1, 1, 1, 1])), {"repeat_interleave": 1}),
        (lambda: x.repeat_interleave(torch.tensor([1, 2, 1, 1, 1, 1]), output_size=7), {}),
        (lambda: x[torch.tensor([0, 1])] + 1, {}),
    ):
        with counting() as counts:
            call()  # type: ignore[no-untyped-call]
        assert counts.waits == waits
    with FakeTensorMode(), counting() as counts:
        (torch.empty(3, 5, device=CUDA) + 1).to("cpu")
    assert counts.waits == {"_to_copy": 1}
    assert (counts.num_operations, counts.num_bytes, counts.largest) == (2, 4 * 60, 60)


# ---- compilation ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "name", [name if name == "resnet50" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_forward_is_one_graph_in_training_and_one_in_evaluation(name: str) -> None:
    model, loss = MODELS[name]()
    compute = loss("cpu")
    with compiled_graphs(model) as graphs:
        compute()
        assert len(graphs) == 1
        with torch.no_grad():
            model.eval()
            compute()
        assert len(graphs) == 2


def test_forward_with_recomputed_layers_is_one_graph() -> None:
    model, loss = pretraining(BertPretraining(replace(BERT, activation_checkpointing=True)))
    with compiled_graphs(model) as graphs:
        loss("cpu")().backward()  # type: ignore[no-untyped-call]
    assert len(graphs) == 1


def test_the_backbone_of_mask_rcnn_is_one_graph() -> None:
    """Its heads are not compiled: they sample as many regions as the host finds."""
    backbone = MaskRCNN(SMALL_DETECTOR, 5).backbone
    with compiled_graphs(backbone) as graphs:
        assert len(backbone(torch.randn(1, 3, 64, 96))) == 5
    assert len(graphs) == 1


def test_fifty_mixes_of_lengths_are_two_graphs_inside_ddp(tmp_path: Path) -> None:
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
