"""Outputs of a model for all sequences, computed by all workers and put in order on the main one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shoal.data.loader import Batch, to_device
from shoal.data.text.special_tokens import Int64Array, ranges
from shoal.data.text.task_batches import Sequences, evaluation_batches, evaluation_parts
from shoal.recipes.finetune.job import Job
from shoal.train.gather import Float32Array, gather_rows


def outputs_of(
    job: Job, data: Sequences, compute: Callable[[Batch], Tensor], *, per_token: bool
) -> Float32Array | None:
    """Return the model's outputs in the order of ``data`` on the main worker, ``None`` on the others.

    Micro-batches are the same whatever the number of workers, and so is each output, bit for bit.

    Args:
        compute: runs the model on a micro-batch; returns ``[T, columns]``, a row for each token, or
            ``[B, columns]``, one for each sequence.
        per_token: which of the two.
    """
    size, num_workers = job.config.run.evaluation_batch_size, job.world.num_workers
    own: list[Tensor] = []
    with torch.inference_mode():
        for _, batch in evaluation_batches(
            data, batch_size=size, rank=job.world.place.rank, num_workers=num_workers
        ):
            with job.precision.autocast():
                own.append(compute(to_device(batch, job.world.device)).float().cpu())
    rows_of = [
        _rows(data, evaluation_parts(data, batch_size=size, rank=rank, num_workers=num_workers), per_token)
        for rank in range(num_workers)
    ]
    return gather_rows(job.world, torch.cat(own) if own else torch.empty(0, 1), rows_of)


def _rows(data: Sequences, parts: list[Int64Array], per_token: bool) -> Int64Array:
    sequences = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    if not per_token or not len(sequences):
        return sequences
    return ranges(data.bounds[sequences], data.lengths[sequences])
