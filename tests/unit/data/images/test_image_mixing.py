"""Mixup of images and labels: the same at any number of workers, the right distribution, the right loss."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from shoal.data.images.mixing import mix, mixup_weight
from shoal.decide.order import micro_batches, worker_part


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_weights_are_distributed_as_beta(alpha):
    num = 1000
    ours = torch.tensor([mixup_weight(alpha, 5, step) for step in range(num)], dtype=torch.float64)
    torch.manual_seed(0)
    one = torch.tensor(alpha, dtype=torch.float64)
    theirs = torch.distributions.Beta(one, one).sample((num,))
    places = torch.cat([ours, theirs]).sort().values
    below = [torch.searchsorted(sample.sort().values, places, right=True) / num for sample in (ours, theirs)]
    assert (below[0] - below[1]).abs().max() < 2.23 * math.sqrt(2 / num)


def test_a_weight_is_a_function_of_seed_and_step():
    assert mixup_weight(0.2, 5, 3) == mixup_weight(0.2, 5, 3)
    assert len({mixup_weight(0.2, seed, step) for seed in range(3) for step in range(10)}) == 30
    assert {mixup_weight(0.0, 5, step) for step in range(5)} == {1.0}


def test_neighbours_are_mixed():
    images = (
        torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    )
    mixed = mix(images, 0.75)
    assert mixed[:, 0, 0, 0].tolist() == [0.25, 0.75, 2.25, 2.75]
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert mix(images, 1.0) is images


@pytest.mark.parametrize(
    ("num_workers", "micro_batch_size"), [(1, 24), (1, 10), (2, 12), (3, 4), (4, 6), (6, 2)]
)
def test_workers_and_micro_batches_do_not_change_what_is_mixed(num_workers, micro_batch_size):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(24, 3, 4, 4, generator=generator)
    labels = torch.randint(10, (24,), generator=generator)
    cuts = [
        cut
        for rank in range(num_workers)
        for cut in micro_batches(worker_part(24, rank, num_workers), micro_batch_size)
    ]
    parts = [slice(cut.start, cut.stop) for cut in cuts]
    assert torch.equal(torch.cat([mix(images[part], 0.3) for part in parts]), mix(images, 0.3))
    targets = one_hot(labels, 10).float()
    assert torch.equal(torch.cat([mix(targets[part], 0.3) for part in parts]), mix(targets, 0.3))


@pytest.mark.parametrize(("weight", "smoothing"), [(1.0, 0.0), (1.0, 0.1), (0.3, 0.0), (0.3, 0.1)])
def test_the_loss_is_that_of_both_labels(weight, smoothing):
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 10), torch.randint(10, (8,))
    partners = labels.reshape(4, 2).flip(1).flatten()
    loss = cross_entropy(logits, mix(one_hot(labels, 10).float(), weight), label_smoothing=smoothing)
    expected = weight * cross_entropy(logits, labels, label_smoothing=smoothing)
    expected += (1 - weight) * cross_entropy(logits, partners, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)
