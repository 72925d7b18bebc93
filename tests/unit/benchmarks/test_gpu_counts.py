"""Demands of a step on a GPU: how often it is waited for, and how large its tensors are; all without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.gpu.counts import (
    CASES,
    CUDA,
    FEW_LAYERS,
    LAUNCH_S,
    as_on_a_gpu,
    counting,
    detector,
    suppression,
)
from smallest_models import MODELS, SMALL_DETECTOR, detection_batch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.data.images.normalise import Normalisation
from shoal.models.detection.mask_rcnn import MaskRCNN
from shoal.optim.adafactor import Adafactor
from shoal.optim.lamb import Lamb
from shoal.optim.lans import Lans
from shoal.optim.lars import Lars
from shoal.optim.novograd import Novograd
from shoal.recipes.mask_rcnn import LOSSES, mean_losses
from shoal.train.gradients import Update


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
            assert counts.waits == {}, step
    assert counts.num_operations >= 5


def test_adafactor_updates_tensors_of_one_shape_together() -> None:
    """Operations: a step of T5-base took 4,012, tensor by tensor."""
    found = []
    for num_alike in (1, 40):
        with FakeTensorMode():
            shapes = ((256, 128), (128, 256), (64,), (32, 12))
            weights = [nn.Parameter(torch.empty(shape, device=CUDA)) for shape in shapes * num_alike]
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            optimizer = Adafactor(weights, lr=0.1)
            optimizer.step()
            with counting() as counts:
                optimizer.step()
        found.append(counts.num_operations)
    assert found[0] == found[1] <= 4 * 31


def test_the_losses_of_mask_rcnn_stay_on_the_device_and_never_wait() -> None:
    """Fake tensors of ``cuda:0``, whose values nobody knows: no size depends on what is sampled."""
    pixels = torch.zeros(2, 3, 96, 128, dtype=torch.uint8)
    _, targets, keys = detection_batch()
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_a_gpu():
        with torch.device(CUDA):
            model = MaskRCNN(SMALL_DETECTOR, 5)
        targets = {name: value.to(CUDA) for name, value in targets.items()}
        images = Normalisation(torch.device(CUDA))(pixels.to(CUDA), targets["sizes"])
        model(images, targets, keys.to(CUDA))  # anchors come to the device
        with counting() as counts:
            losses = mean_losses(model(images, targets, keys.to(CUDA)))
    assert losses.device == torch.device(CUDA) and len(losses) == len(LOSSES)
    assert counts.waits == {}


def test_forward_and_backward_of_mask_rcnn_never_wait() -> None:
    """Fake tensors of the CPU stand for the GPU's."""
    with as_on_a_gpu():
        counts = detector(2, SMALL_DETECTOR)
    assert counts.waits == {} and counts.num_operations > 500


def test_an_update_on_the_device_never_waits() -> None:
    """Norm, clipping and the step that may be skipped, on fake tensors of ``cuda:0``."""
    with FakeTensorMode():
        weights = [nn.Parameter(torch.empty(shape, device=CUDA)) for shape in ((8, 4), (4,))]
        optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
        update = Update(on_device=True)
        for step in range(2):
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            with counting() as counts:
                norm = update.finish_gradients(optimizer, max_norm=1.0, per_worker=False, loss_scale=1.0)
                update.apply(optimizer)
            assert isinstance(norm, Tensor) and norm.device == torch.device(CUDA)
            assert counts.waits == {}, step


MOST = {
    "bert": (7.8, 0.14),
    "albert": (3.6, 0.077),
    "t5": (13.3, 0.13),
    "resnet50": (27.0, 0.11),
    "mask_rcnn": (22.5, 0.11),
    "matching": (1.0, 0.023),
    "masks": (0.0085, 0.0055),
    "pooling": (1.3, 0.16),
    "proposals": (0.09, 0.033),
    "detections": (0.11, 0.055),
    "lamb": (5.6, 0.14),
    "adafactor": (4.3, 0.14),
}
"""Of the first layers of full-size models: GB moved, and GB of the largest tensor; as counted, and a bit."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("albert", "t5", "adafactor", "detections")
        else name
        for name in MOST
    ],
)
def test_bytes_moved_and_the_largest_tensor_stay_within_their_budget(name: str) -> None:
    with as_on_a_gpu():
        counts = FEW_LAYERS[name]()
    moved, largest = MOST[name]
    found = counts.num_bytes / 1e9, counts.largest / 1e9
    assert found[0] <= moved and found[1] <= largest, found
    assert found[0] > 0.8 * moved and found[1] > 0.8 * largest, f"lower the budget of {name} to {found}"


def test_suppression_needs_a_bit_a_pair() -> None:
    """Overlaps of 20,000 boxes whole would take 3.2 GB for each temporary."""
    with as_on_a_gpu():
        counts = suppression(1, 20_000)
    assert counts.largest <= 20_000 * 20_032 / 8 and counts.waits == {}


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


STEPS: dict[str, tuple[tuple[str, ...], float]] = {
    "BERT-large, 64 × 512 tokens": (("bert", "lamb"), 64 / 315),
    "T5-base, 64 sequences": (("t5", "adafactor"), 64 / 366),
    "ResNet-50, 256 images": (("resnet50",), 256 / 3_079),
    "Mask R-CNN, 12 images": (("mask_rcnn", "proposals", "matching"), 12 / 42),
}
"""Parts of a step of one micro-batch, and the seconds that the first target of ``make gpu`` leaves for it."""


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_the_host_queues_a_step_in_a_third_of_its_time(step: str) -> None:
    """The number of operations does not depend on the batch; uncompiled, at 5 µs each."""
    parts, target_s = STEPS[step]
    with as_on_a_gpu():
        found = sum(CASES[part][1]().num_operations for part in parts)
    assert LAUNCH_S * found < target_s / 3, f"{found:,} operations"
