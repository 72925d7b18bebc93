"""The average of weights against its formula, torch's own, and a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal.train.checkpoint import Checkpointer
from shoal.train.weight_averaging import WeightAverage


def small_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2)).to(
        memory_format=torch.channels_last
    )


def disturb(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor += torch.randn(tensor.shape, generator=generator)
            else:
                tensor += seed


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_formula() -> None:
    model = small_model()
    average = WeightAverage(model, 0.35)
    expected = {name: value.double() for name, value in values_of(model).items()}
    for step in range(1, 6):
        disturb(model, step)
        average.update(model, step)
        decay = min(0.35, (1 + step) / (10 + step))
        for name, value in values_of(model).items():
            whole = not value.is_floating_point()
            expected[name] = value.double() if whole else decay * expected[name] + (1 - decay) * value
    for name, value in values_of(average.model).items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)
    assert int(average.model[1].num_batches_tracked) == 15
    assert average.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not average.model.training
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


def test_torchs_average_is_the_same_from_the_first_weights_on() -> None:
    model = small_model()
    average = WeightAverage(model, 0.1)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.1), use_buffers=True)
    theirs.update_parameters(model)  # its first update copies
    for step in range(1, 4):
        disturb(model, step)
        average.update(model, step)
        theirs.update_parameters(model)
    for ours, other in zip(average.model.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-7)


def test_it_goes_on_from_a_checkpoint_as_if_uninterrupted(tmp_path: Path) -> None:
    model = small_model()
    average = WeightAverage(model, 0.9)
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3, 4):
        disturb(model, step)
        average.update(model, step)
        if step == 2:
            checkpointer.save(step, {"model": model, "average": average.model}, wait=True)
    again = small_model()
    average_again = WeightAverage(again, 0.9)
    restored = Checkpointer(tmp_path).restore({"model": again, "average": average_again.model})
    assert restored is not None
    for step in (3, 4):
        disturb(again, step)
        average_again.update(again, step)
    expected = values_of(average.model)
    assert all(torch.equal(value, expected[name]) for name, value in values_of(average_again.model).items())


def test_shards_and_whole_tensors_are_averaged_together(group: dist.ProcessGroup) -> None:
    model = nn.Linear(4, 3)
    mesh = dist.init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(3, 4), mesh))
    average = WeightAverage(model, decay=0.0)
    with torch.no_grad():
        model.weight.copy_(distribute_tensor(torch.ones(3, 4), mesh))
        model.bias.fill_(2.0)
    average.update(model, step=1)
    weight = average.model.weight
    assert isinstance(weight, DTensor) and weight.full_tensor().tolist() == [[1.0] * 4] * 3
    assert average.model.bias.tolist() == [2.0] * 3
