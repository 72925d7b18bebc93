"""Computes the losses of tokens from logits over a vocabulary; on a GPU by kernels of this package.

torch's operations write the logits, and their gradients, several times over in float32. The kernels
(:mod:`shoal.models.token_loss_kernel`) read them once forward and once backward, as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.attention import runs_kernels

IGNORED = -100
"""Label of positions without a target."""


def token_losses(logits: Tensor, labels: Tensor, *, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy + ``z_loss`` · log² Z of each target, and whether it was the likeliest token.

    Z is the sum of exp(logits) (Shazeer et al., Mesh-TensorFlow's ``softmax_cross_entropy_with_logits``).

    Args:
        logits: ``[..., vocabulary]``.
        labels: int64 ``[...]``, below 0 where there is no target.

    Returns:
        Losses, at least float32, 0 where there is no target; and bools, false there.

    Example:
        >>> losses, is_right = token_losses(torch.tensor([[0.0, 3.0], [9.0, 9.0]]), torch.tensor([1, -100]))
        >>> is_right.tolist(), round(losses[0].item(), 3), losses[1].item()
        ([True, False], 0.049, 0.0)
    """
    if _has_kernel(logits):
        rows = torch.ops.shoal.token_losses(logits.flatten(0, -2), labels.flatten(), z_loss)
        losses, likeliest = (each.view(labels.shape) for each in (rows[0], rows[2]))
        return losses, likeliest == labels
    logits = at_least_fp32(logits)
    log_z = logits.logsumexp(-1)
    losses = log_z - logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    if z_loss:
        losses = losses + z_loss * log_z.square()
    return losses * (labels >= 0), logits.argmax(-1) == labels


def summed_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross-entropies of rows, and how many targets were the likeliest, as float32.

    Args:
        logits: ``[N, classes]``.
        labels: int64 ``[N]``, of at least 0.
    """
    if _has_kernel(logits):
        losses, is_right = token_losses(logits, labels)
        return losses.sum(), is_right.sum(dtype=torch.float32)
    logits = at_least_fp32(logits)
    # A maximum is vectorised where argmax is not.
    is_right = logits.detach().gather(1, labels[:, None]).squeeze(1) >= logits.detach().amax(dim=1)
    return F.cross_entropy(logits, labels, reduction="sum"), is_right.sum(dtype=torch.float32)


def at_least_fp32(logits: Tensor) -> Tensor:
    """Return ``logits`` in fp32; fp64 stays fp64.

    fp32 is converted too, so that a graph exported without autocast has the conversion when it runs under it.
    """
    return logits if logits.dtype == torch.float64 else logits.float()


def _has_kernel(logits: Tensor) -> bool:
    return logits.dtype != torch.float64 and not torch.compiler.is_exporting() and runs_kernels(logits.device)


@torch.library.custom_op(
    "shoal::token_losses",
    mutates_args=(),
    schema="(Tensor logits, Tensor labels, float z_loss) -> (Tensor, Tensor, Tensor)",
)
def _token_losses(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`shoal.models.token_loss_kernel.forward`; few processes need Triton."""
    from shoal.models.token_loss_kernel import forward

    return forward(logits, labels, z_loss)


@_token_losses.register_fake
def _(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    losses, log_sums = (logits.new_empty(labels.shape, dtype=torch.float32) for _ in range(2))
    return losses, log_sums, labels.new_empty(labels.shape)


@torch.library.custom_op(
    "shoal::token_losses_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor logits, Tensor labels, Tensor log_sums, float z_loss) -> Tensor",
)
def _token_losses_backward(grad: Tensor, logits: Tensor, *others: Any) -> Tensor:
    """Compute :func:`shoal.models.token_loss_kernel.backward`."""
    from shoal.models.token_loss_kernel import backward

    return backward(grad, logits, *others)


@_token_losses_backward.register_fake
def _(grad: Tensor, logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, ctx.z_loss = inputs
    ctx.save_for_backward(logits, labels, output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    return torch.ops.shoal.token_losses_backward(grad, *ctx.saved_tensors, ctx.z_loss), None, None


_token_losses.register_autograd(_differentiate, setup_context=_keep_for_backward)
