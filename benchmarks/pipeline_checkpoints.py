"""A checkpoint of 2 x 2 (pipeline x data) opened as 4 x 1, 1 x 4 and 1 x 1: do the losses go on alike?

A small T5 with dropout and tied embeddings, Adafactor with factored moments, worker processes over gloo. The
reference is the uninterrupted run in the layout that saved.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import peer_module
from shoal.optim.adafactor import Adafactor
from shoal.pipelining import make_mesh, pipeline
from shoal.train.checkpoint import Checkpointer

Layout = tuple[int, int]
"""Pipeline ranks, replicas."""

SAVED_BY: Layout = (2, 2)
OPENED_AS: tuple[Layout, ...] = ((4, 1), (1, 4), (1, 1))
_SAVED_STEP = 3
_LAST_STEP = 6
_ROWS, _SOURCE_LENGTH, _TARGET_LENGTH, _VOCABULARY = 16, 12, 8, 256
_MICRO_BATCH_ROWS = 2
_DEADLINE_S = 300.0


def loss_differences(*, shard: bool = False) -> dict[str, float]:
    """Return for each layout the largest relative difference of its losses from the uninterrupted run's.

    Args:
        shard: divide parameters and optimizer state over the replicas (FSDP2), when saving and when opening.

    Raises:
        RuntimeError: a worker failed; its traceback is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        reference = _run(run_dir, SAVED_BY, 0, shard)[_SAVED_STEP:]
        differences = {}
        for layout in OPENED_AS:
            losses = _run(run_dir, layout, _SAVED_STEP, shard)
            differences[f"{layout[0]} x {layout[1]}"] = max(
                abs(loss - wanted) / abs(wanted) for loss, wanted in zip(losses, reference, strict=True)
            )
        return differences


def _run(run_dir: Path, layout: Layout, steps_before: int, shard: bool) -> list[float]:
    """Train in worker processes up to the last step; return the loss of each step."""
    out = run_dir / f"losses-{layout[0]}-{layout[1]}.json"
    meeting = run_dir / f"meet-{layout[0]}-{layout[1]}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shoal.pipelining", "transformers", "torch._dynamo"])
    workers = [
        context.Process(target=_work, args=(rank, run_dir, layout, steps_before, shard, meeting, out))
        for rank in range(math.prod(layout))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(_DEADLINE_S)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    if any(codes):
        raise RuntimeError(f"workers of the layout {layout[0]} x {layout[1]} left with {codes}")
    losses: list[float] = json.loads(out.read_text())
    return losses


def _work(
    rank: int, run_dir: Path, layout: Layout, steps_before: int, shard: bool, meeting: Path, out: Path
) -> None:
    torch.set_num_threads(1)
    num_ranks, num_replicas = layout
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=math.prod(layout))
    mesh = make_mesh("cpu", pipeline=num_ranks, data=num_replicas)
    replica = mesh.get_local_rank("dp")
    stage = pipeline(
        _model(),
        _batch(0, replica, num_replicas),
        mesh=mesh["pp"],
        data_parallel=mesh["dp"],
        microbatches=_ROWS // num_replicas // _MICRO_BATCH_ROWS,
        schedule="1f1b",
        virtual_stages=1,
        shard=shard,
    )
    optimizer = Adafactor([{"params": list(stage.module.parameters())}], lr=1e-2)  # a stage may have none
    checkpointer = Checkpointer(run_dir)
    state = {"model": stage.module, "optimizer": optimizer}
    if steps_before:
        restored = checkpointer.restore(state)
        assert restored is not None, "the first layout saves"
        stage.step_number = restored.step
    losses = []
    for step in range(steps_before + 1, _LAST_STEP + 1):
        losses.append(float(stage.step(**_batch(step, replica, num_replicas))))
        optimizer.step()
        if step == _SAVED_STEP:
            checkpointer.save(step, state, wait=True)
    if rank == 0:
        out.write_text(json.dumps(losses))
    stage.close()
    dist.destroy_process_group()


def _model() -> torch.nn.Module:
    transformers = peer_module("transformers")
    torch.manual_seed(1)
    config = transformers.T5Config(
        vocab_size=_VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model: torch.nn.Module = transformers.T5ForConditionalGeneration(config)
    return model.train()


def _batch(step: int, replica: int, num_replicas: int) -> dict[str, Tensor]:
    """Return this replica's rows of a step's global batch; rows have different numbers of targets."""
    generator = torch.Generator().manual_seed(step)
    source = torch.randint(2, _VOCABULARY, (_ROWS, _SOURCE_LENGTH), generator=generator)
    labels = torch.randint(2, _VOCABULARY, (_ROWS, _TARGET_LENGTH), generator=generator)
    lengths = torch.randint(3, _TARGET_LENGTH + 1, (_ROWS, 1), generator=generator)
    labels[torch.arange(_TARGET_LENGTH) >= lengths] = -100
    rows = torch.arange(_ROWS).chunk(num_replicas)[replica]
    return {"input_ids": source[rows], "labels": labels[rows]}


if __name__ == "__main__":
    for sharded in (False, True):
        print("sharded" if sharded else "replicated", loss_differences(shard=sharded))
