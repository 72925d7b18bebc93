"""Demands of a step on a GPU: how often it is waited for, and how large its tensors are; all without one."""

from __future__ import annotations

import math
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
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from shoal import record
from shoal.env import alone
from shoal.errors import ShoalError
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
from shoal.train.config import LoopConfig, RunOutputConfig
from shoal.train.gradients import LossScale
from shoal.train.readback import Readback
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
    factor = 1.0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), self.factor * index)


class Steps:
    """Trains a small model with a real Run, in which tensors of the CPU stand for a GPU's.

    Attributes:
        waits: of each step, those of reading an earlier step's figures not counted.
        behind: by how many steps each step's figures were read late.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(moments, "_is_flat", lambda tensor: False)  # the norm is torch's, as on a GPU
        self.folder, self.patch = folder, monkeypatch
        self.waits: list[dict[str, int]] = []
        self.behind: list[int] = []

    def train(
        self, optimizer: Callable[[nn.Module], Optimizer], name: str, *, on_device: bool, bad: int = 0,
        average: bool = True, dynamic: bool = False, num_steps: int = 6,
    ) -> tuple[dict[str, Tensor], list[record.Step], dict[str, Any]]:  # fmt: skip
        """Return weights, rows and the optimizer's state; the gradient of step ``bad`` is not finite."""
        self._watch_reads()
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        settings = RunOutputConfig(dir=self.folder / name, log_frequency=3, save=False)
        loop = LoopConfig(precision="fp32", max_nonfinite_steps=3)
        (meeting := self.folder / f"meet-{name}").mkdir()
        worker = alone(meeting)
        with Run.open(settings.dir, settings=settings, loop=loop, worker=worker) as run:
            run._training.scale = LossScale(enabled=dynamic, growth_interval=2)
            run._training.update.on_device = on_device  # type: ignore[attr-defined]
            model = run.data_parallel(net, average=average)
            made = optimizer(net)
            run.keep(model=net, optimizer=made)
            for step in run.steps(Points(), Sizes(global_batch_size=8, micro_batch_size=4), until=num_steps):
                self.number = step.number
                with counting() as counts, step:
                    for points in step:
                        loss = model(points + 0.1 * step.number).square().sum() / step.num_samples
                        step.backward(loss * (math.inf if step.number == bad else 1.0))
                    step.update(made, max_norm=30.0)
                self.waits.append(dict(counts.waits))
        rows = [row for row in record.read_record(self.folder / name) if isinstance(row, record.Step)]
        return dict(net.named_parameters()), rows, made.state_dict()

    def _watch_reads(self) -> None:
        made: dict[int, int] = {}
        begin, read = Readback.__init__, Readback.read

        def watched_begin(one: Readback, *values: Tensor) -> None:
            made[id(one)] = self.number
            begin(one, *values)

        def watched_read(one: Readback) -> list[float]:
            self.behind.append(self.number - made.pop(id(one)))
            with torch._C.DisableTorchFunction(), _disable_current_modes():  # its event has passed
                return read(one)

        self.patch.setattr(Readback, "__init__", watched_begin)
        self.patch.setattr(Readback, "read", watched_read)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.05, fused=True),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9, nesterov=True, fused=True),
    "plain sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.002, fused=True),
    "lamb": lambda net: Lamb(net.parameters(), lr=0.1),
}


@pytest.mark.parametrize(
    ("name", "first", "later"), [("adamw", 0, 0), ("sgd", 2, 0), ("plain sgd", 0, 0), ("lamb", 2 + 2, 2 + 2)]
)
def test_waits_of_a_step_around_forward_and_backward(
    name: str, first: int, later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizers that skip on the device: none, and figures are read a step late. Others: norm and loss, one
    after the other; LAMB's step numbers are tensors of the host. SGD has no momenta in its first step."""
    steps = Steps(tmp_path, monkeypatch)
    steps.train(OPTIMIZERS[name], "run", on_device=True)
    found = [each.get("_local_scalar_dense", 0) for each in steps.waits]
    assert found[0] == first
    assert [found[k] for k in (1, 3, 4)] == [later] * 3, steps.waits  # after 2 and 5 a line is written
    assert all(set(each) <= {"_local_scalar_dense", "tolist", "cpu"} for each in steps.waits), steps.waits
    assert all(not steps.waits[k].keys() - {"_local_scalar_dense"} for k in (0, 1, 3, 4)), steps.waits
    if later == 0:  # late but before a line of the record
        assert steps.behind[-5:] == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd", "plain sgd"])
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_a_decision_on_the_device_has_the_bits_of_one_on_the_host(
    name: str, bad: int, average: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipped, not clipped and skipped steps; the record has the same losses, norms and skipped steps."""
    steps = Steps(tmp_path, monkeypatch)
    host, device = (
        steps.train(OPTIMIZERS[name], f"{on}", on_device=on, bad=bad, average=average) for on in (False, True)
    )
    assert all(torch.equal(host[0][key], device[0][key]) for key in host[0])
    assert all(torch.isfinite(weights).all() for weights in device[0].values())
    for key, state in host[2]["state"].items():
        assert all(torch.equal(value, device[2]["state"][key][part]) for part, value in state.items())
    for ours, theirs in zip(device[1], host[1], strict=True):
        same = ("step", "grad_norm", "weight_norm", "num_skipped")
        assert [getattr(ours, each) for each in same] == [getattr(theirs, each) for each in same]
        assert repr(ours.loss) == repr(theirs.loss)  # of a step that is skipped it is not finite
    assert sum(row.num_skipped for row in device[1]) == (bad > 0)
    norms = [row.grad_norm for row in device[1]]
    assert max(norms) > 29.9 or bad == 1  # clipped; per worker the norm is taken after that


def test_a_loss_scale_that_adapts_is_decided_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(tmp_path, monkeypatch)
    host, device = (
        steps.train(OPTIMIZERS["adamw"], f"{on}", on_device=on, bad=2, dynamic=True) for on in (False, True)
    )
    assert all(torch.equal(host[0][key], device[0][key]) for key in host[0])
    scales = [row.loss_scale for row in device[1]]
    assert scales == [row.loss_scale for row in host[1]] and scales[0] != scales[1]
    assert set(steps.behind) == {0}


def test_a_loss_that_stays_not_finite_ends_the_run_and_names_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's figures come a step later; step and samples are those of the host's."""
    steps, told = Steps(tmp_path, monkeypatch), []
    monkeypatch.setattr(Points, "factor", math.nan)
    for on_device in (False, True):
        with pytest.raises(ShoalError, match="3 steps in a row, up to step 3; samples") as raised:
            steps.train(OPTIMIZERS["adamw"], f"{on_device}", on_device=on_device)
        told.append(str(raised.value))
        assert steps.number == (4 if on_device else 3)
    assert told[0] == told[1]


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
