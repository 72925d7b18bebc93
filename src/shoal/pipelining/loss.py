"""Combines the losses of micro-batches into the loss of the global batch.

A model returns the mean over the targets of its micro-batch. The mean over the global batch is

    loss = sum over micro-batches m of  loss_m * count_m / count

where ``count`` is the number of targets of all micro-batches of all replicas. With these weights, the
gradients that backward accumulates are those of the one big batch, however it is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UsageError

Batch = Mapping[str, Tensor]
Count = Callable[[Batch], Tensor | int]
"""Returns the number of targets of a (micro-)batch."""

IGNORED_LABEL = -100


def default_count(batch: Batch) -> Tensor | int:
    """Return the number of ``labels`` that are not -100; without ``labels``, the number of rows."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return num_rows(batch)
    return (labels != IGNORED_LABEL).sum()


def num_rows(batch: Batch) -> int:
    """Return the size of the first dimension, which all tensors of a batch share.

    Raises:
        UsageError: they do not share it, or no tensor has a dimension.
    """
    rows = {name: len(tensor) for name, tensor in batch.items() if tensor.ndim}
    if not rows:
        raise UsageError(
            "the batch has no tensor with a dimension: micro-batches are slices of the first one"
        )
    name, number = next(iter(rows.items()))
    for other, others in rows.items():
        if others != number:
            raise UsageError(
                f"input {other!r} has {others} rows and {name!r} has {number}: micro-batches are slices of "
                "the first dimension, so all must have the same; one without dimensions is passed whole"
            )
    return number


def micro_batches(batch: Batch, number: int) -> list[dict[str, Tensor]]:
    """Divide a batch along its first dimension into ``number`` equal parts (views).

    Raises:
        UsageError: its rows do not divide by ``number``.
    """
    rows = num_rows(batch)
    if rows % number or not rows:
        raise UsageError(
            f"a batch of {rows} rows does not divide into {number} micro-batches of equal size; "
            f"use batches of a multiple of {number} rows, or another number of micro-batches"
        )
    size = rows // number
    return [
        {name: tensor[start : start + size] if tensor.ndim else tensor for name, tensor in batch.items()}
        for start in range(0, rows, size)
    ]


def check_inputs(batch: Batch, example: Batch) -> None:
    """Raise UsageError where names, shapes or dtypes differ from the example of the stages."""
    missing, unknown = sorted(set(example) - set(batch)), sorted(set(batch) - set(example))
    if missing or unknown:
        problems = [f"{', '.join(missing)} missing"] if missing else []
        problems += [f"{', '.join(unknown)} unknown"] if unknown else []
        raise UsageError(
            f"inputs: {' and '.join(problems)}; the pipeline was made for {', '.join(sorted(example))}. "
            "Pass the same names as in example_inputs"
        )
    for name, expected in example.items():
        tensor = batch[name]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise UsageError(
                f"input {name!r} is {_described(tensor)}; the pipeline was made for {_described(expected)}. "
                "Shapes are fixed when the model is exported: pad to them, or make a pipeline for each shape"
            )


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def loss_of(output: Any) -> Tensor:
    """Return the loss in a model's output: ``.loss``, key ``loss``, the first of a tuple, or the output
    itself.

    Raises:
        UsageError: the output has no single number.
    """
    loss = output
    if isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif isinstance(output, tuple | list) and output:
        loss = output[0]
    elif getattr(output, "loss", None) is not None:
        loss = output.loss
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss if loss.ndim == 0 else loss.sum()
    raise UsageError(
        f"the model returns {type(output).__name__} without a loss: it must return its own loss, a single "
        "number, as .loss, as key 'loss' or first in a tuple; give it the labels as an input"
    )


def weighted(outputs: Any, weight: Tensor) -> Tensor:
    """Return a micro-batch's part of the global loss; one without targets has none (its mean is NaN).

    It is float64, as the weight is: a large loss scale overflows in the gradients alone.
    """
    (loss,) = outputs
    return torch.where(weight > 0, loss * weight, torch.zeros_like(weight))
