# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
"""Computes the losses of tokens and the gradients of their logits on a GPU, in Triton.

Forward a program reads a row of logits once, with the running maximum and sum of the softmax. Rows without a
target are not read. Nothing of the logits' size is written but their gradient.

Only :mod:`shoal.models.token_losses` calls this module, and loads it when it is needed first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = tl.constexpr(4_096)
"""Logits that a program has in registers at a time."""
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
NUM_WARPS = 8


def forward(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, log Z and likeliest token of each row; without a target they are 0, 0 and -1.

    Args:
        logits: float32, float16 or bfloat16 ``[N, V]``.
        labels: int64 ``[N]``; of V and above the loss is not a number.
        z_loss: weight of log² Z.
    """
    losses, log_sums = (torch.empty(labels.shape, device=logits.device) for _ in range(2))
    likeliest = torch.empty_like(labels, memory_format=torch.contiguous_format)
    if labels.numel():
        with torch.cuda.device_of(logits):
            _forward[(len(labels),)](
                logits.contiguous(), labels.contiguous(), losses, log_sums, likeliest, logits.shape[1],
                z_loss, num_warps=NUM_WARPS,
            )  # fmt: skip
    return losses, log_sums, likeliest


def backward(grad: Tensor, logits: Tensor, labels: Tensor, log_sums: Tensor, z_loss: float) -> Tensor:
    """Return the gradient of the logits, in their type.

    Args:
        grad: float32 ``[N]``, of the losses.
        logits: as ``labels`` and ``z_loss``, of :func:`forward`.
        log_sums: log Z of each row.
    """
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if out.numel():
        with torch.cuda.device_of(logits):
            _backward[(len(labels), triton.cdiv(logits.shape[1], _COLUMNS.value))](
                grad.contiguous(), logits.contiguous(), labels.contiguous(), log_sums, out, logits.shape[1],
                z_loss, num_warps=NUM_WARPS,
            )  # fmt: skip
    return out


@triton.jit
def _forward(logits, labels, losses, log_sums, likeliest, num_columns, z_loss):
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    label = tl.load(labels + row)
    highest, total = tl.full((), _LOWEST, tl.float32), tl.full((), 0.0, tl.float32)
    best = tl.full((), -1, tl.int32)
    for begin in range(0, tl.where(label < 0, 0, num_columns), _COLUMNS):
        columns = begin + tl.arange(0, _COLUMNS)
        x = tl.load(logits + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
        top, place = tl.max(x, axis=0, return_indices=True)
        best = tl.where(top > highest, begin + place, best)
        top = tl.maximum(top, highest)
        total = total * tl.exp(highest - top) + tl.sum(tl.exp(x - top))
        highest = top
    log_sum = highest + tl.log(total)
    place = tl.minimum(tl.maximum(label, 0), num_columns - 1)
    of_label = tl.where(label < num_columns, tl.load(logits + place).to(tl.float32), float("nan"))
    loss = log_sum - of_label + z_loss * log_sum * log_sum
    tl.store(losses + row, tl.where(label < 0, 0.0, loss))
    tl.store(log_sums + row, tl.where(label < 0, 0.0, log_sum))
    tl.store(likeliest + row, best)


@triton.jit
def _backward(grads, logits, labels, log_sums, out, num_columns, z_loss):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    inside, at = columns < num_columns, row * num_columns + columns
    label, log_sum = tl.load(labels + row), tl.load(log_sums + row)
    is_read = columns < tl.where(label < 0, 0, num_columns)
    x = tl.load(logits + at, mask=is_read, other=0.0).to(tl.float32)
    change = tl.exp(x - log_sum) * (1.0 + 2.0 * z_loss * log_sum) - tl.where(columns == label, 1.0, 0.0)
    tl.store(out + at, tl.where(label < 0, 0.0, tl.load(grads + row) * change), mask=inside)
