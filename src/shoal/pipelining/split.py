"""Splits an exported model into stages that communicate with their neighbours only.

1. A value that a later stage needs travels hop by hop (*relay*): every stage between passes it on.
2. Values of root inputs and tiny weights are computed again where they are needed (``dataflow``).
3. A weight that several stages use is one ``nn.Parameter`` in all of them; across processes its gradients
   must be summed (``tied_weights``).
4. Buffers stay in the stage that writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from shoal.errors import UsageError
from shoal.pipelining.dataflow import Dataflow
from shoal.pipelining.export_graph import Exported
from shoal.pipelining.random_streams import operation_of
from shoal.pipelining.stage import Body, StageModule, TensorSpec, owner_of
from shoal.pipelining.units import Units, module_path, units_of

Bounds = list[tuple[int, int]]


def split(
    exported: Exported, cuts: Sequence[int], *, evaluation: Exported | None = None, units: Units | None = None
) -> list[StageModule]:
    """Return the stages of a model that is cut before the units ``cuts``.

    Args:
        evaluation: the same model's other graph; its parts join the stages, on the same parameters, and
            ``stage.train()`` and ``stage.eval()`` choose between them.
        units: ``units_of(exported)``, if already computed.

    Raises:
        UsageError: cuts that do not divide the units, or an evaluation graph of another structure.
    """
    units = units or units_of(exported)
    flows = {exported.training: units.flow}
    bounds = {exported.training: units.bounds(cuts)}
    if evaluation is not None:
        if evaluation.training == exported.training or evaluation.model is not exported.model:
            raise UsageError("evaluation must be the same model, exported in the other mode")
        other = Dataflow(evaluation)
        flows[evaluation.training] = other
        bounds[evaluation.training] = _same_places(units.flow, units.bounds(cuts), other)
    return [_stage(index, len(cuts) + 1, flows, bounds) for index in range(len(cuts) + 1)]


def _stage(
    index: int, num_stages: int, flows: dict[bool, Dataflow], bounds: dict[bool, Bounds]
) -> StageModule:
    exported = next(iter(flows.values())).exported
    weights = _weights(index, flows, bounds)
    constants = nn.Module()
    bodies = {
        mode: _body(flow, bounds[mode][index], index == num_stages - 1, weights, constants)
        for mode, flow in flows.items()
    }
    return StageModule(
        index=index,
        num_stages=num_stages,
        weights=weights,
        constants=constants,
        bodies=bodies,
        output_spec=exported.output_spec,
        device=exported.device,
    )


def _body(
    flow: Dataflow, bounds: tuple[int, int], is_last: bool, weights: nn.Module, constants: nn.Module
) -> Body:
    begin, end = bounds
    received = flow.crossing(begin) if begin else []
    sent = [] if is_last else flow.crossing(end)
    results = flow.exported.outputs if is_last else sent
    run, input_names = assemble(
        flow, begin, end, given=received, results=results, weights=weights, constants=constants
    )
    return Body(
        run=run,
        input_names=input_names,
        relayed_in=tuple(_spec(node, flow) for node in received),
        relayed_out=tuple(_spec(node, flow) for node in sent),
    )


def _spec(node: fx.Node, flow: Dataflow) -> TensorSpec:
    value = node.meta["val"]
    assert isinstance(value, Tensor), "a cut where a tuple is alive is no unit boundary"
    needs_gradient = flow.exported.training and node in flow.gradient
    return TensorSpec(shape=tuple(value.shape), dtype=value.dtype, requires_grad=needs_gradient)


def _weights(index: int, flows: dict[bool, Dataflow], bounds: dict[bool, Bounds]) -> nn.Module:
    """Return the tensors that the stage's graphs read; the first stage also keeps those that no graph
    reads."""
    parameters: set[str] = set()
    buffers: set[str] = set()
    for mode, flow in flows.items():
        is_last = index == len(bounds[mode]) - 1
        read = _leaves(flow, bounds[mode][index], is_last)
        parameters |= {name for node, name in flow.exported.parameter_nodes.items() if node in read}
        buffers |= {name for node, name in flow.exported.buffer_nodes.items() if node in read}
    model = next(iter(flows.values())).exported.model
    if index == 0:
        read_names: set[str] = set()
        for flow in flows.values():
            everything = _leaves(flow, (0, len(flow.body)), True)
            names = {**flow.exported.parameter_nodes, **flow.exported.buffer_nodes}
            read_names |= {name for node, name in names.items() if node in everything}
        parameters |= {name for name, _ in model.named_parameters()} - read_names
        buffers |= {name for name, _ in model.named_buffers()} - read_names
    in_order = [name for name, _ in model.named_parameters() if name in parameters]
    return container_of(model, in_order, [name for name, _ in model.named_buffers() if name in buffers])


def _leaves(flow: Dataflow, bounds: tuple[int, int], is_last: bool) -> set[fx.Node]:
    begin, end = bounds
    results = flow.exported.outputs if is_last else []
    return flow.needed([*flow.body[begin:end], *results], flow.crossing(begin) if begin else [])


def _same_places(flow: Dataflow, bounds: Bounds, other: Dataflow) -> Bounds:
    """Return cuts of the other mode's graph such that every stage reads the same parameters in both modes.

    The two graphs differ where training does. The other graph is cut before the node that is nearest to the
    first node behind the cut here, at a legal place that divides the parameters in the same way.
    """
    labels = {label: position for position, label in enumerate(_labels(other))}
    places = [labels.get(label) for label in _labels(flow)]
    valid = [position for position, crossing in other.crossings() if other.may_cut(position, crossing)]
    owned = [_parameters(flow, *each, is_last=each is bounds[-1]) for each in bounds]
    starts = [0]
    for index, (begin, _) in enumerate(bounds[1:], start=1):
        aim = next((place for place in places[begin:] if place is not None), len(other.body) - 1)
        behind = set[str]().union(*owned[index:])
        for position in sorted(valid, key=lambda position: abs(position - aim)):
            if position <= starts[-1]:
                continue
            before = _parameters(other, starts[-1], position, is_last=False)
            rest = _parameters(other, position, len(other.body), is_last=True)
            if before <= owned[index - 1] and rest <= behind:
                starts.append(position)
                break
        else:
            raise UsageError(
                f"no cut of the evaluation graph gives stage {index} the parameters that it has in training: "
                "the model computes something else in evaluation; split it at another cut"
            )
    return list(zip(starts, [*starts[1:], len(other.body)], strict=True))


def _labels(flow: Dataflow) -> list[tuple[str, str, int]]:
    """Return a label of each body node that is the same in both graphs: module, operation, and its number
    there."""
    counts: dict[tuple[str, str], int] = {}
    labels = []
    for node in flow.body:
        kind = (module_path(node), str(operation_of(node)[0]))
        counts[kind] = counts.get(kind, -1) + 1
        labels.append((*kind, counts[kind]))
    return labels


def _parameters(flow: Dataflow, begin: int, end: int, *, is_last: bool) -> set[str]:
    names = flow.exported.parameter_nodes
    return {names[node] for node in _leaves(flow, (begin, end), is_last) if node in names}


# ---- modules from parts of a graph -----------------------------------------------------------------------


def assemble(
    flow: Dataflow,
    begin: int,
    end: int,
    *,
    given: Sequence[fx.Node],
    results: Sequence[Any],
    weights: nn.Module,
    constants: nn.Module,
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return a module that runs the body positions [begin, end), and the root inputs that it reads.

    The module takes the values of ``given``, then those root inputs; it returns ``results``. Rebuilt values
    are computed in it from leaves and ``given``. Parameters and buffers are read from ``weights``, which is
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
        owner, field = owner_of(container, name)
        owner.register_parameter(field, model.get_parameter(name))
    for name in buffers:
        owner, field = owner_of(container, name)
        original = model.get_submodule(name.rpartition(".")[0])
        persistent = field not in original._non_persistent_buffers_set
        owner.register_buffer(field, model.get_buffer(name), persistent=persistent)
    return container


def _copy(
    node: fx.Node, flow: Dataflow, graph: fx.Graph, root: nn.Module, made: dict[fx.Node, fx.Node]
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
