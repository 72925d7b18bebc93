"""Makes random operations draw the same numbers however a model is split.

A model's dropout draws from one generator, in the order in which the operations run: with another number of
stages, or micro-batches in another order, it draws others. Here every random operation of an exported graph
is numbered before the graph is split. Dropout and attention with dropout are then keyed by sample
(:mod:`shoal.dropout`), so that other micro-batches and replicas drop the same elements. Any other random
operation seeds the generator from (seed, step, first sample, its number), which takes about 5 µs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from shoal.decide.rng import Stream, dropout_keys, random_keys
from shoal.dropout import SampleDropout

_CHANCES = ("p", "dropout_p", "dropout")
_SWITCHES = ("train", "training")
_STRIDE = 1 << 20
"""Between the sites of two random operations."""


@dataclass
class _Streams:
    """The streams of one stage's pass, and the generators' states before it."""

    run_seed: int
    step: int
    samples: range
    states: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)
    seen: set[torch.device] = field(default_factory=set)
    sample_keys: dict[torch.device, Tensor] = field(default_factory=dict)

    def seed(self, key: int, device: torch.device) -> None:
        generator = _generator_of(device)
        if device not in self.seen:
            self.seen.add(device)
            self.states.append((generator, generator.get_state()))
        counters = (self.step, self.samples.start, key)
        generator.manual_seed(int(random_keys(self.run_seed, Stream.STAGE_OPERATIONS, *counters)[0]))

    def dropout(self, key: int, device: torch.device) -> SampleDropout:
        """Return dropout by the keys of the samples; ``key`` is the number of its first call in the model."""
        if device not in self.sample_keys:
            keys = dropout_keys(self.run_seed, self.step, np.asarray(self.samples))
            self.sample_keys[device] = torch.from_numpy(keys).to(device)
        return SampleDropout(self.sample_keys[device], site=key * _STRIDE, stride=_STRIDE)


_current: ContextVar[_Streams | None] = ContextVar("shoal_streams", default=None)


@contextmanager
def streams(seed: int, step: int, samples: range) -> Iterator[None]:
    """Set the streams of a step and micro-batch, from which stages that run inside draw.

    The generators are restored on leaving. Backward passes may run outside: what they compute again draws in
    :func:`recomputation`. Without this
    context a stage draws from the default generator as any model does.

    Args:
        samples: the rows of the global batch that the micro-batch holds.
    """
    current = _Streams(seed, step, samples)
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)
        for generator, state in current.states:
            generator.set_state(state)


def are_set() -> bool:
    """Return whether :func:`streams` are around."""
    return _current.get() is not None


def recomputation() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpointed forward pass and of its repetition in the backward pass.

    For the argument ``context_fn`` of ``torch.utils.checkpoint.checkpoint``: both draw the same numbers.
    """
    current = _current.get()
    if current is None:
        return nullcontext(), nullcontext()
    return nullcontext(), streams(current.run_seed, current.step, current.samples)


def draw(operation: Any, key: int, *args: Any, **kwargs: Any) -> Any:
    """Run a random operation on its own stream; :func:`number_draws` substitutes it for the operation."""
    current = _current.get()
    if current is not None:
        device = _device_of(args, kwargs)
        current.seed(key, device)
        if operation is torch.ops.aten.dropout.default:
            return current.dropout(key, device).dropout(*args, **kwargs)
        if operation is torch.ops.aten.scaled_dot_product_attention.default:
            return current.dropout(key, device).attention(*args, **kwargs)
    return operation(*args, **kwargs)


def dropout_of_streams(device: torch.device) -> AbstractContextManager[object]:
    """Return a context for a whole model, whose dropout draws what :func:`draw` draws in its graph."""
    current = _current.get()
    return nullcontext() if current is None else current.dropout(0, device)


@contextmanager
def own_stream(key: int, device: torch.device) -> Iterator[None]:
    """Draw all random numbers inside from one stream, the ``key``-th of the step and micro-batch."""
    current = _current.get()
    if current is not None:
        current.seed(key, device)
    yield


def number_draws(module: fx.GraphModule) -> None:
    """Substitute :func:`draw` for all random operations of a graph, those of nested graphs included."""
    key = 0
    graphs = [child for child in module.modules() if isinstance(child, fx.GraphModule)]
    for graph_module in graphs:
        for node in graph_module.graph.nodes:
            if draws(node):
                node.args = (node.target, key, *node.args)
                node.target = draw
                key += 1
        graph_module.recompile()


def draws(node: fx.Node) -> bool:
    """Return whether a node draws random numbers: dropout with probability 0 or outside training does not."""
    if node.target is draw:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    values = named_arguments(node)
    if any(values.get(name) is False for name in _SWITCHES):
        return False
    return not any(name in values and values[name] == 0 for name in _CHANCES)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an aten operation by the names of its schema, defaults included."""
    operation, args = operation_of(node)
    if not isinstance(operation, torch._ops.OpOverload):
        return {}
    schema = operation._schema.arguments
    values = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    values.update(zip((argument.name for argument in schema), args, strict=False))
    return {**values, **node.kwargs}


def operation_of(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the operation of a node and its positional arguments, without :func:`draw` around them."""
    if node.target is draw:
        return node.args[0], tuple(node.args[2:])
    return node.target, tuple(node.args)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
    return torch.device(kwargs.get("device") or "cpu")


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
