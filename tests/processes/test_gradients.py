"""The gradient of a global batch is the same however it is divided over workers and micro-batches.

With dropout everywhere: its masks belong to samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_workers import run_workers
from torch import Tensor

from shoal.data.loader import Batch, as_tensors, copies_to
from shoal.data.steps import DataShard
from shoal.data.text.examples import packed
from shoal.decide.rng import dropout_keys
from shoal.env.worker import WorkerRanks
from shoal.models.pretraining import PRETRAINING_INPUTS, AlbertPretraining
from shoal.models.text_config import AlbertModelConfig
from shoal.train.config import DistributedConfig
from shoal.train.gradients import LossScale, ManyWorkers, Update
from shoal.train.model_setup import choose_precision, wrap_model
from shoal.train.reporting import StepTimer
from shoal.train.step import Step, StepState
from shoal.train.world import World, all_gather_json

CONFIG = AlbertModelConfig(
    vocab_size=61,
    embedding_size=16,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.2,
    classifier_dropout_prob=0.1,
)
GLOBAL_BATCH, LENGTH, PREDICTIONS = 24, 16, 4


def model(dtype: torch.dtype) -> AlbertPretraining:
    torch.manual_seed(3)
    return AlbertPretraining(CONFIG).to(dtype)


def global_batch() -> dict[str, Tensor]:
    """24 sequences of 9 to 16 tokens; the first half have one masked token each and the others up to four."""
    random = torch.Generator().manual_seed(11)
    counts = torch.tensor([1] * 12 + [4, 3, 2] * 4)
    weights = (torch.arange(PREDICTIONS) < counts[:, None]).float()
    positions = torch.arange(1, PREDICTIONS + 1).expand(GLOBAL_BATCH, -1) * weights.long()
    lengths = torch.randint(9, LENGTH + 1, (GLOBAL_BATCH, 1), generator=random)
    return {
        "input_ids": torch.randint(5, 61, (GLOBAL_BATCH, LENGTH), generator=random),
        "token_type_ids": (torch.arange(LENGTH) > 7).long().expand(GLOBAL_BATCH, -1),
        "attention_mask": (torch.arange(LENGTH) < lengths).long(),
        "masked_positions": positions,
        "masked_ids": torch.randint(5, 61, (GLOBAL_BATCH, PREDICTIONS), generator=random),
        "masked_weights": weights,
        "labels": torch.randint(0, 2, (GLOBAL_BATCH,), generator=random),
        "epoch": torch.zeros(GLOBAL_BATCH, dtype=torch.long),
        "index": torch.arange(GLOBAL_BATCH),
        "dropout_keys": torch.from_numpy(dropout_keys(7, 0, np.arange(GLOBAL_BATCH))),
    }


def micro_batch(rows: Tensor) -> Batch:
    """Return some sequences of the global batch, packed for the model."""
    arrays = packed({name: tensor[rows].numpy() for name, tensor in global_batch().items()})
    batch = as_tensors(arrays, pin_memory=False)
    return {name: batch[name] for name in PRETRAINING_INPUTS}


def a_world(rank: int, num_workers: int) -> World:
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    ranks = WorkerRanks(rank=rank, num_workers=num_workers, local_rank=rank, num_local_workers=num_workers)
    return World(ranks=ranks, device=torch.device("cpu"), backend="gloo", control=control)


def compute(
    rank: int, num_workers: int, num_steps: int, dtype: torch.dtype, settings: dict[str, Any], out: Path
) -> None:
    """Compute this worker's part of the global batch in ``num_steps`` micro-batches; rank 0 saves."""
    world = a_world(rank, num_workers)
    timer = StepTimer(world.device)
    module = model(dtype)
    precision = choose_precision("fp32", world.device)
    ddp = wrap_model(module, world, DistributedConfig(bucket_mb=0.01), precision, timer.lap)
    ddp.average = not settings["per_worker"]
    rows = torch.arange(GLOBAL_BATCH).chunk(num_workers)[rank].chunk(num_steps)
    batches = [micro_batch(part) for part in rows]
    num_masked = sum(all_gather_json(world.control, sum(len(batch["masked_ids"]) for batch in batches)))
    training = StepState(
        world=world,
        timer=timer,
        copies=copies_to(world.device),
        scale=LossScale(enabled=True, static=settings["loss_scale"]),
        update=Update(on_device=world.device.type == "cuda"),
        seed_key=1,
        models=[ddp],
    )
    shard = DataShard(
        global_batch_size=GLOBAL_BATCH, micro_batch_size=len(rows[0]), rank=rank, num_workers=num_workers
    )
    step = Step(training, 1, batches, shard, num_targets=num_masked, commit=lambda step: None)
    with step:
        for batch in step:
            mlm_loss, _, sop_loss, _ = ddp(**batch)
            step.backward(mlm_loss / step.num_targets + sop_loss / step.num_samples)
        step.update(torch.optim.SGD(module.parameters(), lr=0.0), max_norm=settings["max_norm"])
        if rank == 0:
            grads = {name: p.grad.numpy() for name, p in module.named_parameters()}
            np.savez(out, norm=step.grad_norm, **grads)


def expected(dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradient of the one big batch, without any of the code under test."""
    module, batch = model(dtype), micro_batch(torch.arange(GLOBAL_BATCH))
    mlm_loss, _, sop_loss, _ = module(**batch)
    (mlm_loss / len(batch["masked_ids"]) + sop_loss / GLOBAL_BATCH).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def result(
    tmp_path: Path, num_workers: int, num_steps: int, dtype: torch.dtype = torch.float64, **settings: Any
) -> dict[str, Any]:
    settings = {"max_norm": None, "per_worker": False, "loss_scale": 1.0, **settings}
    out = tmp_path / "grads.npz"
    codes = run_workers(compute, num_workers, tmp_path / "meet", num_workers, num_steps, dtype, settings, out)
    assert codes == [0] * num_workers
    with np.load(out) as saved:
        return dict(saved)


def check_equal(found: dict[str, Any], wanted: dict[str, Tensor], factor: float = 1.0) -> None:
    """In float64 each tensor to 1e-11 of its largest entry; in float32 1e-6 of the gradient's largest."""
    scale = max(grad.abs().max().item() for grad in wanted.values())
    for name, grad in wanted.items():
        error = np.abs(found[name] - factor * grad.numpy()).max()
        if grad.dtype == torch.float32:
            assert error < 1e-6 * scale, (name, error / scale)
        else:  # the bias of the keys has no gradient but rounding
            assert error < 1e-11 * max(grad.abs().max().item(), 1e-4 * scale), (name, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_workers", "num_steps"), [(2, 4), (3, 2)])
def test_any_division_gives_the_gradient_of_the_big_batch(
    tmp_path: Path, num_workers: int, num_steps: int, dtype: torch.dtype
) -> None:
    wanted = expected(dtype)
    found = result(tmp_path, num_workers, num_steps, dtype)
    check_equal(found, wanted)
    norm = torch.cat([grad.flatten() for grad in wanted.values()]).norm().item()
    assert found["norm"] == pytest.approx(norm, rel=1e-5)


def test_a_loss_scale_leaves_no_trace_and_the_average_is_clipped(tmp_path: Path) -> None:
    wanted = expected(torch.float64)
    norm = torch.cat([grad.flatten() for grad in wanted.values()]).norm().item()
    found = result(tmp_path, 2, 2, loss_scale=1024.0, max_norm=norm / 3)
    check_equal(found, wanted, factor=1 / 3)
    assert found["norm"] == pytest.approx(norm, rel=1e-5)


def test_each_worker_clips_its_own_gradient_before_the_average(tmp_path: Path) -> None:
    module = model(torch.float64)
    num_masked = len(micro_batch(torch.arange(GLOBAL_BATCH))["masked_ids"])
    averaged: dict[str, Tensor] = {}
    for part in torch.arange(GLOBAL_BATCH).chunk(2):
        module.zero_grad()
        mlm_loss, _, sop_loss, _ = module(**micro_batch(part))
        (2 * mlm_loss / num_masked + 2 * sop_loss / GLOBAL_BATCH).backward()
        norm = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
        assert norm > 0.5
        for name, p in module.named_parameters():
            averaged[name] = averaged.get(name, 0) + p.grad * (0.5 / norm) / 2
    found = result(tmp_path, 2, 3, per_worker=True, max_norm=0.5)
    check_equal(found, averaged)


def settle_as_on_a_gpu(rank: int, num_workers: int) -> None:
    world = a_world(rank, num_workers)
    module = torch.nn.Linear(3, 2)
    precision = choose_precision("fp32", world.device)
    ddp = wrap_model(module, world, DistributedConfig(), precision, StepTimer(world.device).lap)
    assert isinstance(ddp, ManyWorkers)
    ddp.device_ids, ddp.use_side_stream_for_tensor_copies = [0], False  # DDP moves the inputs of forward
    ddp.settle_buckets()
    assert module.weight.grad is None


def test_buckets_are_settled_where_inputs_are_moved_to_a_device(tmp_path: Path) -> None:
    assert run_workers(settle_as_on_a_gpu, 2, tmp_path / "meet", 2) == [0, 0]


def settle_after_a_failure(rank: int, num_workers: int) -> None:
    world = a_world(rank, num_workers)
    module = torch.nn.Linear(3, 2)

    def wrapped() -> ManyWorkers:
        precision = choose_precision("fp32", world.device)
        ddp = wrap_model(module, world, DistributedConfig(), precision, StepTimer(world.device).lap)
        assert isinstance(ddp, ManyWorkers)
        return ddp

    def lose(*_: object) -> None:
        raise RuntimeError("rank 1 was lost")

    first = wrapped()
    first.hook = lose
    with pytest.raises(RuntimeError, match="rank 1 was lost") as kept:
        first.settle_buckets()
    second = wrapped()
    second(torch.ones(4, 3) * (rank + 1)).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((2, 3), 4 * (num_workers + 1) / 2))
    assert kept.value  # whose traceback has kept the first wrapper


def test_parameters_of_a_wrapper_that_failed_are_averaged_by_another(tmp_path: Path) -> None:
    assert run_workers(settle_after_a_failure, 2, tmp_path / "meet", 2) == [0, 0]
