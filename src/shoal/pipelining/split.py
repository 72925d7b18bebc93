"""Splits an exported model into stages that communicate with their neighbours only.

1. A value that a later stage needs travels hop by hop (*relay*): every stage between passes it on.
2. Values of root inputs and tiny weights are computed again where they are needed (``dataflow``).
3. A weight that several stages use is one ``nn.Parameter`` in all of them; across processes its gradients
   must be summed (``tied_weights``).
4. Buffers stay in the stage that writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.fx.node import map_arg

from shoal.errors import UsageError
from shoal.pipelining.dataflow import Dataflow
from shoal.pipelining.export_graph import ExportedGraph
from shoal.pipelining.random_streams import operation_of
from shoal.pipelining.stage import Body, StageModule, TensorSpec, own_part, owner_of
from shoal.pipelining.units import Units, module_path, units_of

Bounds = list[tuple[int, int]]


def split(
    exported: ExportedGraph,
    cuts: Sequence[int],
    *,
    evaluation: ExportedGraph | None = None,
    units: Units | None = None,
) -> list[StageModule]:
    """Return the stages of a model that is cut before the units ``cuts``.

    Args:
        exported: the graph of training mode, unless only one mode is run.
        cuts: units, which grow.
        evaluation: the same model's graph of evaluation mode; its parts join the stages, on the same
            parameters, and ``stage.train()`` and ``stage.eval()`` choose between them.
        units: ``units_of(exported)``, if already computed.

    Raises:
        UsageError: an evaluation graph of another structure.
    """
    units = units or units_of(exported)
    parts = [(units.flow, units.bounds(cuts))]
    if evaluation is not None:
        other = Dataflow(evaluation)
        parts.append((other, _same_places(units.flow, units.bounds(cuts), other)))
    stages = []
    for index in range(len(cuts) + 1):
        weights = container_of(exported.model, _tensors_of(index, parts))
        constants = nn.Module()
        stages.append(
            StageModule(
                index=index,
                num_stages=len(cuts) + 1,
                weights=weights,
                constants=constants,
                bodies={
                    flow.exported.training: _body(flow, *bounds[index], weights, constants)
                    for flow, bounds in parts
                },
                output_spec=exported.output_spec,
                device=exported.device,
            )
        )
    return stages


def _body(flow: Dataflow, begin: int, end: int, weights: nn.Module, constants: nn.Module) -> Body:
    is_last = end == len(flow.body)
    received, sent = flow.crossing(begin), [] if is_last else flow.crossing(end)
    results = flow.exported.outputs if is_last else sent
    run, input_names = assemble(
        flow, begin, end, relayed=received, results=results, weights=weights, constants=constants
    )
    return Body(
        run=run,
        input_names=input_names,
        relayed_in=tuple(_spec(node, flow) for node in received),
        relayed_out=tuple(_spec(node, flow) for node in sent),
    )


def _spec(node: fx.Node, flow: Dataflow) -> TensorSpec:
    value = node.meta["val"]
    assert isinstance(value, Tensor), "a cut where a tuple is alive is not a unit boundary"
    needs_gradient = flow.exported.training and node in flow.gradient
    return TensorSpec(shape=tuple(value.shape), dtype=value.dtype, requires_grad=needs_gradient)


def _tensors_of(index: int, parts: Sequence[tuple[Dataflow, Bounds]]) -> set[str]:
    """Return the tensors that a stage's graphs read; the first stage also keeps those that no graph reads."""
    names = set[str]()
    for flow, bounds in parts:
        names |= _read(flow, *bounds[index])
    if index == 0:
        model = parts[0][0].exported.model
        names |= {name for name, _ in (*model.named_parameters(), *model.named_buffers())}.difference(
            *(_read(flow, 0, len(flow.body)) for flow, _ in parts)
        )
    return names


def _read(flow: Dataflow, begin: int, end: int, *, buffers: bool = True) -> set[str]:
    """Return the parameters and buffers that the body positions [begin, end) and their results need."""
    results = flow.exported.outputs if end == len(flow.body) else []
    needed = flow.needed([*flow.body[begin:end], *results], flow.crossing(begin))
    names = flow.exported.parameter_nodes | (flow.exported.buffer_nodes if buffers else {})
    return {name for node, name in names.items() if node in needed}


def _same_places(flow: Dataflow, bounds: Bounds, other: Dataflow) -> Bounds:
    """Return cuts of the other mode's graph with which every stage reads the same parameters in both modes.

    The two graphs differ where training does. The other graph is cut before the node that is nearest to the
    first node behind the cut here, at a legal place that divides the parameters in the same way. A stage of
    which the other graph has nothing, such as the dropout inside an attention, passes its values on there.
    """
    labels = {label: position for position, label in enumerate(_labels(other))}
    positions = [labels.get(label) for label in _labels(flow)]
    valid = [position for position, crossing in other.crossings() if other.may_cut(position, crossing)]
    owned = [_read(flow, *each, buffers=False) for each in bounds]
    starts = [0]
    for index, (begin, _) in enumerate(bounds[1:], start=1):
        aim = next((cut for cut in positions[begin:] if cut is not None), len(other.body) - 1)
        behind = set[str]().union(*owned[index:])
        for position in sorted(valid, key=lambda position: abs(position - aim)):
            if position < starts[-1]:
                continue
            before = _read(other, starts[-1], position, buffers=False)
            rest = _read(other, position, len(other.body), buffers=False)
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


# ---- modules from parts of a graph -----------------------------------------------------------------------


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
