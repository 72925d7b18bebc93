"""Splits an exported model into stages that communicate with their neighbours only.

1. A value that a later stage needs travels hop by hop (*relay*): every stage between passes it on.
2. Values of root inputs and tiny weights are computed again where they are needed (``dataflow``).
3. A weight that several stages use is one ``nn.Parameter`` in all of them; across processes its gradients
   must be summed (``tied_weights``).
4. Buffers stay in the stage that writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx, nn

from shoal.errors import UsageError
from shoal.pipelining.assemble import assemble, container_of
from shoal.pipelining.dataflow import Dataflow
from shoal.pipelining.export_graph import ExportedGraph
from shoal.pipelining.random_streams import operation_of
from shoal.pipelining.recompute import SegmentedRun, recomputed_layers, segments_of
from shoal.pipelining.stage import Body, StageModule, TensorSpec
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
    layers = recomputed_layers(exported.model)
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
                    flow.exported.training: _body(flow, *bounds[index], weights, constants, layers)
                    for flow, bounds in parts
                },
                output_spec=exported.output_spec,
                device=exported.device,
            )
        )
    return stages


def _body(
    flow: Dataflow, begin: int, end: int, weights: nn.Module, constants: nn.Module, layers: frozenset[str]
) -> Body:
    """Return the part [begin, end) of a graph; in training its nodes of ``layers`` are computed again."""
    is_last = end == len(flow.body)
    received, sent = flow.crossing(begin), [] if is_last else flow.crossing(end)
    results = flow.exported.outputs if is_last else sent
    segments = segments_of(flow, begin, end, layers) if flow.exported.training else []
    run: nn.Module
    if any(each.recomputes for each in segments):
        run = segmented = SegmentedRun(
            flow, segments, relayed=received, results=results, weights=weights, constants=constants
        )
        input_names = segmented.input_names
    else:
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
