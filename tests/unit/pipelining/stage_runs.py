"""Runs the stages of a split model one after the other in one process, as a pipeline would, and compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.pipelining.stage import StageModule

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results of a forward and backward pass."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def run_eager(model: nn.Module, batch: Batch) -> Result:
    """Run the unsplit model itself."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return _result(model, loss)


def run_stages(model: nn.Module, stages: Sequence[StageModule], unflatten: Any, batch: Batch) -> Result:
    """Run the stages forward, then backward; what travels is detached, as if it had been sent."""
    model.zero_grad()
    received: list[tuple[Tensor, ...]] = [()]
    sent: list[tuple[Tensor, ...]] = []
    for stage in stages:
        outputs = stage(*received[-1], **{name: batch[name] for name in stage.body.input_names})
        sent.append(outputs)
        if stage.index < stage.num_stages - 1:
            check_specs(stage, outputs)
            received.append(tuple(send(value) for value in outputs))
    loss = unflatten(sent[-1]).loss
    loss.backward()
    for stage in reversed(stages[:-1]):
        leaves = received[stage.index + 1]
        pairs = [
            (out, leaf) for out, leaf in zip(sent[stage.index], leaves, strict=True) if leaf.requires_grad
        ]
        assert all(leaf.grad is None or leaf.grad.is_contiguous() for _, leaf in pairs)
        outputs = [out for out, _ in pairs]
        torch.autograd.backward(
            outputs, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, leaf in pairs]
        )
    return _result(model, loss)


def send(value: Tensor) -> Tensor:
    """Return what the next stage receives: the same numbers in memory of its own."""
    copy = value.detach().clone()
    return copy.requires_grad_() if value.requires_grad else copy


def check_specs(stage: StageModule, outputs: Sequence[Tensor]) -> None:
    """Check that what a stage sends is what it says it sends."""
    for value, spec in zip(outputs, stage.body.relayed_out, strict=True):
        assert (tuple(value.shape), value.dtype) == (spec.shape, spec.dtype)
        assert value.is_contiguous() and value.requires_grad == (
            spec.requires_grad and torch.is_grad_enabled()
        )


def largest_error(ours: Result, theirs: Result) -> float:
    """Return the largest error of the loss, a gradient or a buffer, each over its largest entry."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    pairs: list[tuple[Tensor, Tensor]] = [(ours.loss, theirs.loss)]
    pairs += [(ours.buffers[name], buffer) for name, buffer in theirs.buffers.items()]
    for name, gradient in theirs.gradients.items():
        mine = ours.gradients[name]
        assert (mine is None) == (gradient is None), name
        if mine is not None and gradient is not None:
            pairs.append((mine, gradient))
    # gradients that are zero in theory (a key's bias) are noise beside the largest of all
    noise = 1e-7 * max(g.abs().max().item() for g in theirs.gradients.values() if g is not None)
    return max(_error(mine, reference, noise) for mine, reference in pairs)


def _error(ours: Tensor, theirs: Tensor, noise: float) -> float:
    if not theirs.numel():
        return 0.0
    difference = (ours.double() - theirs.double()).abs().max().item()
    scale = theirs.double().abs().max().item()
    return difference / max(scale, noise) if difference else 0.0


def _result(model: nn.Module, loss: Tensor) -> Result:
    return Result(
        loss=loss.detach().clone(),
        gradients={n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
    )
