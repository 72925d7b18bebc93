"""The average of weights against its formula, torch's own, and a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal.errors import UsageError
from shoal.train.checkpoint import Checkpointer
from shoal.train.weight_averaging import WeightAverage, decay_after


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


def test_decays() -> None:
    assert [decay_after(0.999, step, warmup=False) for step in (1, 10, 10**6)] == [0.999] * 3
    assert [decay_after(0.9, step, warmup=True) for step in (1, 2, 35, 10**6)] == [2 / 11, 3 / 12, 0.8, 0.9]
    with pytest.raises(UsageError, match=r"decay=1.0 .* must be at least 0 and below 1"):
        WeightAverage(small_model(), 1.0)
    with pytest.raises(UsageError, match="step=0 must be at least 1"):
        decay_after(0.9, 0, warmup=True)


@pytest.mark.parametrize("warmup", [False, True])
def test_formula(warmup: bool) -> None:
    model = small_model()
    average = WeightAverage(model, 0.75, warmup=warmup)
    expected = {name: value.double() for name, value in values_of(model).items()}
    for step in range(1, 6):
        disturb(model, step)
        average.update(model, step)
        decay = min(0.75, (1 + step) / (10 + step)) if warmup else 0.75
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
    average = WeightAverage(model, 0.9, warmup=False)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
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
