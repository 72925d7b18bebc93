"""Estimates the memory of a worker: for dry runs, for the search of layouts, and for plans of other hosts.

Weights and gradients are fp32, whatever the precision of the computation. The optimizer's state depends on
its class, activations on the micro-batch and the precision.
"""

from __future__ import annotations

from dataclasses import dataclass

_ONE_MOMENT = frozenset({"sgd", "lars", "novograd"})


@dataclass(frozen=True, kw_only=True)
class Footprint:
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


def footprint(
    num_parameters: float, *, state_bytes: float, activations_bytes: float, trainable: float = 1.0
) -> Footprint:
    """Return the memory of a worker that holds ``num_parameters``.

    Args:
        state_bytes: of the optimizer, for each trained parameter (:func:`optimizer_state_bytes`).
        activations_bytes: kept for the backward pass.
        trainable: share of the parameters that have gradients.
    """
    trained = num_parameters * trainable
    return Footprint(
        weights_bytes=round(4 * num_parameters),
        gradients_bytes=round(4 * trained),
        optimizer_bytes=round(state_bytes * trained),
        activations_bytes=round(activations_bytes),
    )


def optimizer_state_bytes(optimizer: str) -> float:
    """Return the bytes of state that an optimizer keeps for each parameter, in fp32.

    Adafactor keeps a row and a column of a matrix, next to nothing; SGD, LARS and NovoGrad keep one moment of
    a weight, others two.

    Example:
        >>> optimizer_state_bytes("lamb"), optimizer_state_bytes("sgd")
        (8.0, 4.0)
    """
    if optimizer == "adafactor":
        return 0.04
    return 4.0 if optimizer in _ONE_MOMENT else 8.0


def activation_width(precision: str) -> int:
    """Return the bytes of an activation in a precision."""
    return 4 if precision == "fp32" else 2


def transformer_activations(
    *,
    micro_batch_size: int,
    sequence_length: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_logits: int,
    activation_bytes: int,
    activation_checkpointing: bool,
) -> int:
    """Return the bytes that a transformer keeps for the backward pass of a micro-batch.

    A layer keeps input, query, key, value, context, two sums and two norms (9 × hidden) and the feed-forward
    before and after its activation (2 × intermediate) for each token; fused attention keeps no matrix of
    weights. That is the count of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) without dropout
    masks. With activation checkpointing one layer's input is kept a layer, and one layer is computed again at
    a time.

    Args:
        num_logits: rows of logits times the vocabulary, of one micro-batch; kept in fp32 with their softmax.
        activation_bytes: bytes of an activation (:func:`activation_width`).
    """
    tokens = micro_batch_size * sequence_length
    layer = tokens * (9 * hidden_size + 2 * intermediate_size) * activation_bytes
    layer_input = tokens * hidden_size * activation_bytes
    layers = layer + num_layers * layer_input if activation_checkpointing else num_layers * layer
    return layers + 8 * num_logits
