"""Builds modules from parts of an exported graph: stages, and the units that are measured one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from shoal.pipelining.dataflow import Flow


def assemble(
    flow: Flow,
    begin: int,
    end: int,
    *,
    given: Sequence[fx.Node],
    results: Sequence[Any],
    weights: nn.Module,
    constants: nn.Module,
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return a module that runs the body positions [begin, end), and the root inputs that it reads.

    The module takes the values of ``given``, then those root inputs; it returns ``results``. What is rebuilt
    is computed in it from leaves and ``given``. Parameters and buffers are read from ``weights``, which is
    shared, not copied; constants that it needs are added to ``constants``.
    """
    exported = flow.exported
    needed = flow.needed([*flow.body[begin:end], *results], given)
    outside = [n for n in needed - set(given) if not begin <= flow.position.get(n, begin) < end]
    assert not outside, f"values of other stages are neither given nor rebuilt: {outside}"

    graph, root = fx.Graph(), nn.Module()
    root.weights, root.constants = weights, constants
    made = {node: graph.placeholder(f"relayed_{node.name}") for node in given}
    inputs = {node: name for node, name in exported.input_nodes.items() if node in needed}
    made |= {node: graph.placeholder(name) for node, name in inputs.items()}
    for node in flow.nodes:
        if node in needed and node not in made:
            made[node] = _copy(node, flow, graph, root, made)
    graph.output(tuple(made[each] if isinstance(each, fx.Node) else each for each in results))
    module = fx.GraphModule(root, graph, "Stage")
    module.weights, module.constants = weights, constants  # GraphModule had copied the parts that it reads
    return module, tuple(inputs.values())


def container_of(model: nn.Module, parameters: Iterable[str], buffers: Iterable[str]) -> nn.Module:
    """Return a module that holds some parameters and buffers of a model, the same objects, by their names."""
    container = nn.Module()
    for name in parameters:
        owner, field = _owner(container, name)
        owner.register_parameter(field, model.get_parameter(name))
    for name in buffers:
        owner, field = _owner(container, name)
        original = model.get_submodule(name.rpartition(".")[0])
        persistent = field not in original._non_persistent_buffers_set
        owner.register_buffer(field, model.get_buffer(name), persistent=persistent)
    return container


def put_module(container: nn.Module, name: str, module: nn.Module) -> None:
    """Register a module below ``container`` under its dotted name."""
    owner, field = _owner(container, name)
    owner.add_module(field, module)


def _copy(
    node: fx.Node, flow: Flow, graph: fx.Graph, root: nn.Module, made: dict[fx.Node, fx.Node]
) -> fx.Node:
    exported = flow.exported
    if node.op == "call_function":
        args: Any = map_arg(node.args, made.__getitem__)
        kwargs: Any = map_arg(node.kwargs, made.__getitem__)
        return graph.create_node("call_function", node.target, args, kwargs, name=node.name)
    if node.op == "get_attr":
        root.add_module(str(node.target), exported.module.get_submodule(str(node.target)))
        return graph.get_attr(str(node.target))
    if node in exported.constant_nodes:
        return graph.get_attr(f"constants.{_add_constant(root.constants, exported.constant_nodes[node])}")
    names = exported.parameter_nodes if node in exported.parameter_nodes else exported.buffer_nodes
    return graph.get_attr(f"weights.{names[node]}")


def _add_constant(constants: Any, value: Tensor) -> str:
    for name, other in constants.named_buffers():
        if other is value:
            return str(name)
    name = f"constant_{len(constants._buffers)}"
    constants.register_buffer(name, value, persistent=False)
    return name


def _owner(container: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module below ``container`` that holds the named tensor, made where missing."""
    *path, field = name.split(".")
    for part in path:
        if part not in container._modules:
            container.add_module(part, nn.Module())
        container = container.get_submodule(part)
    return container, field
