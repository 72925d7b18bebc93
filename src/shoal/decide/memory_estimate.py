"""Estimates the memory of a worker's training step before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on a worker's device."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes

    def __str__(self) -> str:
        return (
            f"about {_size(self.total_bytes)} a worker: weights {_size(self.weights_bytes)}, gradients "
            f"{_size(self.gradients_bytes)}, optimizer {_size(self.optimizer_bytes)}, activations "
            f"{_size(self.activations_bytes)}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def estimate_memory(
    *,
    num_parameters: int,
    micro_batch_size: int,
    sequence_length: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_logits: int,
    activation_bytes: int,
    activation_checkpointing: bool,
) -> MemoryEstimate:
    """Estimate a data-parallel worker that trains a transformer in fp32 weights with two moments.

    A layer keeps for the backward pass: input, query, key, value, context, two sums and two norms (9 ×
    hidden) and the feed-forward before and after its activation (2 × intermediate) for each token; fused
    attention keeps no matrix of weights. That is the count of Korthikanti et al. 2022 (arXiv 2205.05198,
    section 4.1) without dropout masks. With activation checkpointing one layer's input is kept a layer, and
    one layer is computed again at a time.

    Args:
        num_logits: rows of logits times the vocabulary, of one micro-batch; kept in fp32 with their softmax.
        activation_bytes: bytes of an activation: 4 in fp32, 2 in bf16 and fp16.
    """
    tokens = micro_batch_size * sequence_length
    layer = tokens * (9 * hidden_size + 2 * intermediate_size) * activation_bytes
    layer_input = tokens * hidden_size * activation_bytes
    layers = layer + num_layers * layer_input if activation_checkpointing else num_layers * layer
    return MemoryEstimate(
        weights_bytes=4 * num_parameters,
        gradients_bytes=4 * num_parameters,
        optimizer_bytes=8 * num_parameters,
        activations_bytes=layers + 8 * num_logits,
    )
