"""Analyses the exported graph: legal cut points and the values that cross them.

The nodes of a graph fall into

- *leaves*: root inputs, parameters, buffers, constants;
- *body*: the nodes that units and stages are made of, in order;
- *rebuilt* nodes, computed again in every stage that needs them instead of being sent: *glue* (masks,
  positions: no parameter among its ancestors), views of a value that is no larger, and large values of a
  tiny weight (T5's position bias: 33 MB of a 4 KB table in the 3B model; the table becomes a tied weight).

A cut is legal where every body value that is needed behind it is a tensor, and where it does not separate
the operations on a storage that is written in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from shoal.errors import UsageError
from shoal.pipelining.export_graph import ExportedGraph
from shoal.pipelining.random_streams import draws, named_arguments, operation_of

_TINY_BYTES = 256 << 10
_TINY_FACTOR = 4
_CONTRACTIONS = ("mm", "bmm", "addmm", "linear", "matmul", "conv", "attention", "lstm", "gru", "einsum")


class Dataflow:
    """Dataflow analysis of one graph. Positions are indices into ``body``; a cut at p is before ``body[p]``.

    Raises:
        UsageError: the model writes into one of its inputs.
    """

    def __init__(self, exported: ExportedGraph) -> None:
        self.exported = exported
        self.nodes: list[fx.Node] = [n for n in exported.module.graph.nodes if n.op != "output"]
        self._writers = self._find_writers()
        self.glue = self._find_glue()
        self.gradient = self._find_gradients()
        self._tiny = self._find_tiny()
        views = {node for node in self.nodes if self._is_view(node)}
        self.rebuilt = self.glue | set(self._tiny) | views
        self.body = [n for n in self.nodes if n.op == "call_function" and n not in self.rebuilt]
        self.position = {node: index for index, node in enumerate(self.body)}
        self._sources = self._find_sources()
        self.last_use = self._find_last_uses()
        self._uncut = self._find_uncut()

    # ---- nodes of a stage --------------------------------------------------------------------------------

    def crossing(self, position: int) -> list[fx.Node]:
        """Return the body values that are produced before a position and needed at or behind it, in order."""
        return [node for node in self.body[:position] if self.last_use[node] >= position]

    def crossings(self) -> Iterator[tuple[int, list[fx.Node]]]:
        """Yield each position between two body nodes with the values that cross it."""
        alive: dict[fx.Node, int] = {}
        for position in range(1, len(self.body)):
            node = self.body[position - 1]
            alive[node] = self.last_use[node]
            alive = {node: last for node, last in alive.items() if last >= position}
            yield position, list(alive)

    def may_cut(self, position: int, crossing: Iterable[fx.Node]) -> bool:
        """Return whether a cut is legal at a position that these values cross."""
        if any(begin < position <= end for begin, end in self._uncut):
            return False
        return all(isinstance(node.meta.get("val"), Tensor) for node in crossing)

    def needed(self, targets: Iterable[Any], known: Iterable[fx.Node] = ()) -> set[fx.Node]:
        """Return the nodes, leaves included, that are needed to compute ``targets`` from ``known``."""
        nodes: set[fx.Node] = set(known)
        stack = [node for node in targets if isinstance(node, fx.Node)]
        while stack:
            node = stack.pop()
            if node not in nodes:
                nodes.add(node)
                stack += node.all_input_nodes
                stack += self._companions(node)
        return nodes

    def leaves(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the placeholders that the nodes read, directly or through rebuilt nodes."""
        sources: set[fx.Node] = set()
        for node in nodes:
            for each in (node, *node.all_input_nodes):
                if each not in self.position:
                    sources |= self._sources[each]
        return sources - self.position.keys()

    # ---- in-place operations ----------------------------------------------------------------------------

    def _find_writers(self) -> dict[int, list[fx.Node]]:
        """Return storage -> the nodes that write into it, in order."""
        writers: dict[int, list[fx.Node]] = {}
        for node in self.nodes:
            for target in _written(node):
                for storage in _storages(target):
                    writers.setdefault(storage, []).append(node)
        for node, name in self.exported.input_nodes.items():
            if any(storage in writers for storage in _storages(node)):
                raise UsageError(
                    f"the model writes into its input {name!r}, which later stages and micro-batches read: "
                    "let it write into a copy"
                )
        return writers

    def is_written(self, node: fx.Node) -> bool:
        return any(storage in self._writers for storage in _storages(node))

    def changes(self, node: fx.Node, position: int) -> bool:
        """Return whether a value is changed in place at or behind a position, or is of a changing buffer."""
        return any(
            storage in self._kept or self.position.get(writer, -1) >= position
            for storage in _storages(node)
            for writer in self._writers.get(storage, ())
        )

    def _touches_written(self, node: fx.Node) -> bool:
        """Return whether a value depends on something that is written in place and so cannot be rebuilt."""
        return any(self.is_written(n) for n in (node, *node.all_input_nodes) if n not in self.glue)

    def _companions(self, node: fx.Node) -> list[fx.Node]:
        """Return the writers of a glue value's storage, which must run before the value is rebuilt."""
        if node not in self.glue:
            return []
        return [writer for storage in _storages(node) for writer in self._writers.get(storage, ())]

    def _find_uncut(self) -> list[tuple[int, int]]:
        """Return (first, last) positions that no cut may separate, one pair for each written storage."""
        spans: dict[int, tuple[int, int]] = {}
        for position, node in enumerate(self.body):
            touched = {s for each in (node, *node.all_input_nodes) for s in _storages(each)}
            for storage in touched & self._writers.keys():
                last_write = max(self.position.get(writer, -1) for writer in self._writers[storage])
                is_buffer = storage in self._kept
                if position <= last_write or is_buffer:
                    first, _ = spans.get(storage, (position, position))
                    spans[storage] = (first, max(position, last_write))
            if "as_strided" in str(operation_of(node)[0]):  # reads strides that a relayed copy may not have
                source = node.all_input_nodes[0]
                spans[id(node)] = (self.position.get(source, position), position)
        return list(spans.values())

    # ---- rebuilt nodes ----------------------------------------------------------------------------------

    def _find_glue(self) -> set[fx.Node]:
        exported = self.exported
        self._kept = {
            s for node in (*exported.parameter_nodes, *exported.buffer_nodes) for s in _storages(node)
        }
        spoiled = {storage for storage in self._writers if storage in self._kept}
        while True:
            glue: set[fx.Node] = set()
            for node in self.nodes:
                if node in exported.parameter_nodes or spoiled & _storages(node):
                    continue
                plain = node.op in ("placeholder", "get_attr")
                if plain or not (_is_random(node) or any(n not in glue for n in node.all_input_nodes)):
                    glue.add(node)
            # a storage written by any other node is not glue, from its first node on
            changed = {s for s, writers in self._writers.items() if any(w not in glue for w in writers)}
            if changed <= spoiled:
                return glue
            spoiled |= changed

    def _find_tiny(self) -> dict[fx.Node, int]:
        """Return large values that depend on tiny weights alone -> the bytes of those weights."""
        parameters = self.exported.parameter_nodes
        tiny: dict[fx.Node, int] = {}
        for node in self.nodes:
            if node.op != "call_function" or node in self.glue or self._touches_written(node):
                continue
            inputs = [n for n in node.all_input_nodes if n not in self.glue]
            if not all(n in tiny or n in parameters for n in inputs) or draws(node) or _is_contraction(node):
                continue
            weights = sum(tiny[n] if n in tiny else num_bytes(n) for n in inputs)
            if weights <= _TINY_BYTES and weights * _TINY_FACTOR <= num_bytes(node):
                tiny[node] = weights
        return tiny

    def _is_view(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node in self.glue or self._touches_written(node):
            return False
        sources = node.all_input_nodes
        if not sources or not isinstance(node.meta.get("val"), Tensor) or "as_strided" in str(node.target):
            return False
        base = sources[0]
        same = isinstance(base.meta.get("val"), Tensor) and _storages(base) == _storages(node)
        others_glue = all(other in self.glue for other in sources[1:])
        return same and others_glue and num_bytes(base) <= num_bytes(node)

    # ---- liveness and gradients -------------------------------------------------------------------------

    def _find_sources(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """Return node -> the body values and placeholders from which the node's value can be computed."""
        sources: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.nodes:
            if node.op != "call_function" or node in self.position:
                sources[node] = frozenset([node])
            else:
                sources[node] = frozenset[fx.Node]().union(*(sources[n] for n in node.all_input_nodes))
        return sources

    def _find_last_uses(self) -> dict[fx.Node, int]:
        """Return body node -> the last position that needs it; the outputs are behind all positions."""
        last = dict(self.position)
        users: list[tuple[int, Iterable[fx.Node]]] = [
            (position, node.all_input_nodes) for node, position in self.position.items()
        ]
        users.append((len(self.body), [n for n in self.exported.outputs if isinstance(n, fx.Node)]))
        for position, inputs in users:
            for source in inputs:
                for value in self._sources[source] & last.keys():
                    last[value] = max(last[value], position)
        return last

    def _find_gradients(self) -> set[fx.Node]:
        """Return a superset of the nodes whose values need a gradient."""
        parameters = dict(self.exported.model.named_parameters())
        differentiated = {
            node for node, name in self.exported.parameter_nodes.items() if parameters[name].requires_grad
        }
        for node in self.nodes:
            if node.op != "call_function" or node.target is torch.ops.aten.detach.default:
                continue
            no_grad = "wrap_with_set_grad_enabled" in str(node.target) and node.args[0] is False
            values = _tensors(node.meta.get("val"))
            differentiable = any(value.is_floating_point() or value.is_complex() for value in values)
            if not no_grad and differentiable and any(n in differentiated for n in node.all_input_nodes):
                differentiated.add(node)
        return differentiated


def num_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's value as it is sent or kept (an expanded one in full)."""
    return sum(value.numel() * value.element_size() for value in _tensors(node.meta.get("val")))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []


def _storages(node: fx.Node) -> frozenset[int]:
    """Return the storages of a node's value; the traced values of views share them."""
    cached: frozenset[int] | None = node.meta.get("shoal_storages")
    if cached is None:
        cached = frozenset(value.untyped_storage()._cdata for value in _tensors(node.meta.get("val")))
        node.meta["shoal_storages"] = cached
    return cached


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values an operation changes in place."""
    operation, _ = operation_of(node)
    if node.op != "call_function" or not isinstance(operation, torch._ops.OpOverload):
        return []
    values = named_arguments(node)
    names = [
        argument.name
        for argument in operation._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if values.get("training", values.get("use_input_stats")) is True:  # normalisations do not declare these
        names += ["running_mean", "running_var"]
    written: list[fx.Node] = []
    for name in names:
        value = values.get(name)
        written += [
            v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, fx.Node)
        ]
    return written


def _is_random(node: fx.Node) -> bool:
    """Return whether a node, or a nested graph that it calls, draws random numbers."""
    if draws(node):
        return True
    owner = node.graph.owning_module
    nested = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    graphs = [getattr(owner, str(name), None) for name in nested]
    return any(draws(n) for g in graphs if isinstance(g, fx.GraphModule) for n in g.graph.nodes)


def _is_contraction(node: fx.Node) -> bool:
    operation, _ = operation_of(node)
    if not isinstance(operation, torch._ops.OpOverload):
        return True
    return any(word in operation._schema.name for word in _CONTRACTIONS)
