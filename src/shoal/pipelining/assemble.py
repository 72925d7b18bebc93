"""Makes modules from parts of an exported graph, on the parameters of the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.fx.node import map_arg

from shoal.pipelining.dataflow import Dataflow
from shoal.pipelining.stage import own_part, owner_of


def assemble(
    flow: Dataflow,
    begin: int,
    end: int,
    *,
    relayed: Sequence[fx.Node],
    results: Sequence[Any],
    weights: nn.Module,
    constants: nn.Module,
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return a module that runs the body positions [begin, end), and the root inputs that it reads.

    The module takes the values of ``relayed``, then those root inputs; it returns ``results``. Rebuilt values
    are computed in it from leaves and ``relayed``. Parameters and buffers are read from ``weights``, which is
    shared, not copied; constants that it needs are added to ``constants``.
    """
    exported = flow.exported
    needed = flow.needed([*flow.body[begin:end], *results], relayed)
    outside = [n for n in needed - set(relayed) if not begin <= flow.position.get(n, begin) < end]
    assert not outside, f"values of other stages are neither given nor rebuilt: {outside}"

    graph, root = fx.Graph(), nn.Module()
    root.weights, root.constants = weights, constants
    copies = {node: graph.placeholder(f"relayed_{node.name}") for node in relayed}
    inputs = {node: name for node, name in exported.input_nodes.items() if node in needed}
    copies |= {node: graph.placeholder(name) for node, name in inputs.items()}
    for node in flow.nodes:
        if node in needed and node not in copies:
            copies[node] = _copy(node, flow, graph, root, copies)
    graph.output(tuple(copies[each] if isinstance(each, fx.Node) else each for each in results))
    module = fx.GraphModule(root, graph, "Stage")
    module.weights, module.constants = weights, constants  # GraphModule had copied the parts that it reads
    return module, tuple(inputs.values())


def container_of(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Return a module that holds parameters and buffers of a model, the same objects, by canonical names."""
    container = nn.Module()
    for name, parameter in model.named_parameters():
        if name in names:
            owner, field = owner_of(container, name)
            owner.register_parameter(field, parameter)
    for name, buffer in model.named_buffers():
        if name in names:
            owner, field = owner_of(container, name)
            original = model.get_submodule(name.rpartition(".")[0])
            persistent = field not in original._non_persistent_buffers_set
            owner.register_buffer(field, buffer, persistent=persistent)
    return container


def _copy(
    node: fx.Node, flow: Dataflow, graph: fx.Graph, root: nn.Module, copies: dict[fx.Node, fx.Node]
) -> fx.Node:
    exported = flow.exported
    if node.op == "call_function":
        args: Any = map_arg(node.args, copies.__getitem__)
        kwargs: Any = map_arg(node.kwargs, copies.__getitem__)
        return graph.create_node("call_function", node.target, args, kwargs, name=node.name)
    if node.op == "get_attr":
        root.add_module(str(node.target), exported.module.get_submodule(str(node.target)))
        return graph.get_attr(str(node.target))
    if node in exported.constant_nodes:
        return graph.get_attr(f"constants.{_add_constant(root.constants, exported.constant_nodes[node])}")
    names = exported.parameter_nodes if node in exported.parameter_nodes else exported.buffer_nodes
    copy = graph.get_attr(f"weights.{names[node]}")
    is_divided = isinstance(getattr(*owner_of(exported.model, names[node])), DTensor)
    return graph.call_function(own_part, (copy,)) if is_divided else copy


def _add_constant(constants: Any, value: Tensor) -> str:
    for name, other in constants.named_buffers():
        if other is value:
            return str(name)
    name = f"constant_{len(constants._buffers)}"
    constants.register_buffer(name, value, persistent=False)
    return name
