"""Describes one training step of a model to the planner, as ``shoal.models.profile`` counts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shoal.decide.footprint import Activations, Numerics
from shoal.decide.ownership import largest_share
from shoal.errors import UsageError

LAMB_BYTES = 36.0
"""Memory traffic per parameter of Adam or LAMB in mixed precision: gradient and three fp32 states read, three
written, twice over weights and gradient for norms and the 16-bit copy."""
MOMENTUM_BYTES = 22.0
"""Memory traffic per parameter of SGD with momentum in mixed precision: gradient, weight and momentum read,
both written, in fp32, and the 16-bit copy."""

WIDTHS = (2, 4, 8)
"""Workers over which a plan divides each layer: few, since their sums cross the links of a host."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A module with parameters of its own, in the order of first use in the forward pass."""

    name: str
    num_parameters: int
    """A tied or shared parameter counts where it is used first: its gradient is complete when the backward
    pass arrives there."""
    forward_flops: float
    """Per sample; an addition and a multiplication count as two."""


def gathered_share(num_parameters: int, blocks: Sequence[int]) -> float:
    """Return the share of the parameters that are whole at a time in shards: of two blocks, and of none.

    Args:
        blocks: parameters of each block that is gathered alone.

    Example:
        >>> gathered_share(100, [20, 20, 20, 30])
        0.6
    """
    return 1 - sum(sorted(blocks)[:-2]) / num_parameters


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """Memory of one of the workers that divide each layer among them."""

    num_parameters: int
    activations: Mapping[Numerics, Activations]
    divided: tuple[tuple[int, ...], ...] = ()
    """Shapes of the whole weights of which a worker has some of the rows."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of a model, for any batch.

    Raises:
        UsageError: no layer, or one with a negative size.
    """

    name: str
    layers: tuple[Layer, ...]
    """In the order of the forward pass."""
    num_kernels: int
    """Device operations of the forward and backward pass of one micro-batch."""
    activations: Mapping[Numerics, Activations] = field(hash=False)
    """Kept from forward to backward."""
    relay_bytes: float = 0.0
    """Across a cut between two layers, per sample, with 16-bit activations; 0: unknown, and taken as free."""
    summed_bytes: float = 0.0
    """Of 16-bit activations and their gradients that the devices of a split layer sum, per sample and in all
    layers: twice forward and twice backward in a block of a transformer (Shoeybi et al. 2019, arXiv
    1909.08053, section 3); 0: unknown, and taken as free."""
    unit: str = "sequences"
    """Name of a sample, such as sequences."""
    tokens_per_sample: int = 1
    optimizer_bytes: float = LAMB_BYTES
    """Memory traffic of the optimizer's step per trained parameter."""
    state_bytes: float = 8.0
    """State of the optimizer per trained parameter."""
    trainable: float = 1.0
    """Share of the parameters that have gradients (LoRA trains few)."""
    weight_sizes: tuple[tuple[int, int], ...] = ()
    """(numbers in a weight, weights of this size) of those that have gradients; empty: each layer has one."""
    parts: Mapping[int, LayerPart] = field(default_factory=dict, hash=False)
    """By the number of workers that divide each layer; empty: layers cannot be divided."""
    gathered: float = 1.0
    """Share of the parameters that are whole at a time where all are sharded."""
    equal_shares: bool = False
    """All workers need parts of one size, as the stages of a pipeline do."""
    explicit_stages: bool = False
    """Stages of a pipeline have none of our kernels."""
    refuses_fp16: str = ""
    """The model whose activations overflow in fp16, if it is one."""
    work_spread: float = 0.0
    """Standard deviation of a sample's work over its mean; 0: all samples have one size."""
    input_s: float = 0.0
    """Time of one core of a host to read a sample; 0: next to nothing."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError(f"workload {self.name}: it has no layers")
        for layer in self.layers:
            if layer.num_parameters < 0 or layer.forward_flops < 0:
                raise UsageError(f"workload {self.name}: layer {layer.name} has a negative size")

    @cached_property
    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)

    @cached_property
    def forward_flops(self) -> float:
        return sum(layer.forward_flops for layer in self.layers)

    def owned(self, num_owners: int) -> float:
        """Return the share of the optimizer's state that the fullest of its owners keeps (ZeRO-1)."""
        sizes = [size for size, count in self.weight_sizes for _ in range(count)]
        return largest_share(sizes or [layer.num_parameters for layer in self.layers], num_owners)

    @property
    def training_flops(self) -> float:
        """Per sample: the backward pass has the gradients of inputs, and of the weights that are trained."""
        return (2 + self.trainable) * self.forward_flops

    @property
    def backward_share(self) -> float:
        """Share of the backward pass in the FLOPs."""
        return (1 + self.trainable) / (2 + self.trainable)


def gradient_buckets(
    layers: Sequence[Layer], bucket_bytes: float, bytes_per_element: float
) -> list[tuple[float, float]]:
    """Return (share of the backward pass after which it is ready, bytes) of each bucket, in that order.

    Buckets are filled in backward order as DistributedDataParallel fills them; a layer larger than a bucket
    has one of its own. A layer is ready when its part of the FLOPs is done.
    """
    total = sum(layer.forward_flops for layer in layers) or 1.0
    buckets: list[tuple[float, float]] = []
    done, held = 0.0, 0.0
    for layer in reversed(layers):
        done += layer.forward_flops / total
        held += layer.num_parameters * bytes_per_element
        if held >= bucket_bytes:
            buckets.append((min(done, 1.0), held))
            held = 0.0
    if held:
        buckets.append((1.0, held))
    return buckets
