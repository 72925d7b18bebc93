"""Exports an unmodified model as one graph of aten operations, ready to be split.

``torch.export`` traces the model without running it, also on the meta device, so that a model is split before
a byte of it is allocated. The graph keeps the operations of eager execution, in-place ones included: nothing
is decomposed, so a stage has the bits of the model.
"""

from __future__ import annotations

import operator
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.fx import config
from torch.utils import _pytree as pytree

from shoal.errors import UsageError
from shoal.pipelining.own_gradients import traced_gradients
from shoal.pipelining.random_streams import number_draws
from shoal.pipelining.stage import replace_tensors

_TORCH_AND_OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}", "<")
_STDLIB = sysconfig.get_paths()["stdlib"]
_REASON_LENGTH = 200

CHECKPOINTS = "gradient_checkpointing"
"""The attribute of transformers' modules that are computed again in the backward pass."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportedGraph:
    """A model's graph for one mode and one shape of inputs, with the meaning of its placeholders.

    Parameters and buffers have canonical names: the first of ``model.named_parameters()`` for a tied one.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    """The example: one micro-batch, by the names of the model's ``forward``."""
    training: bool
    module: fx.GraphModule
    """Holds the graph, with nested graphs (such as regions without gradients) as children."""
    input_nodes: dict[fx.Node, str]
    parameter_nodes: dict[fx.Node, str]
    buffer_nodes: dict[fx.Node, str]
    constant_nodes: dict[fx.Node, Tensor]
    outputs: tuple[Any, ...]
    """The flattened outputs: nodes, and plain values that do not depend on the inputs."""
    output_spec: Any
    aliases: dict[str, str]
    """Every other name of a tied parameter or buffer -> its canonical name."""

    @property
    def device(self) -> torch.device:
        """The device that the model was on when it was exported."""
        tensors = [*self.model.parameters(), *self.inputs.values()]
        return tensors[0].device if tensors else torch.device("cpu")

    def unflatten(self, outputs: tuple[Any, ...] | list[Any]) -> Any:
        """Return the model's own output type from its flattened outputs."""
        return pytree.tree_unflatten(list(outputs), self.output_spec)


def export_model(model: nn.Module, inputs: Mapping[str, Tensor], training: bool) -> ExportedGraph:
    """Trace a model in training or evaluation mode; its modes, parameters and buffers stay as they are.

    Args:
        inputs: an example micro-batch, which fixes the shapes. On the meta device if the model is.
        training: trace a model that is in training mode as it is, frozen (``eval``) modules included.

    Raises:
        UsageError: an input is not a tensor, or the model cannot be exported; the message has the line of the
            model and the reason.
    """
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"input {name!r} is a {type(value).__name__}, and a pipeline takes tensors only: "
                "set what does not change in the model itself"
            )
    try:
        with (
            in_mode(model, training), _own_parts(model), _without_caches(model), _without_checkpoints(model),
            _without_stack_traces(), traced_gradients() if training else nullcontext(),
        ):  # fmt: skip
            program = torch.export.export(model, (), dict(inputs), strict=False)
    except Exception as error:
        raise UsageError(_refusal(model, error)) from error
    return _read(program, model, dict(inputs), training)


def alias_names(model: nn.Module) -> dict[str, str]:
    """Return every other name of the model's shared parameters and buffers -> the first, canonical one."""
    aliases: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        first: dict[int, str] = {}
        for name, tensor in named(remove_duplicate=False):
            canonical = first.setdefault(id(tensor), name)
            if canonical != name:
                aliases[name] = canonical
    return aliases


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model in training or evaluation mode; one in that mode keeps its frozen (``eval``) modules."""
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def _own_parts(model: nn.Module) -> Iterator[None]:
    """Give a model whose layers are divided over workers this worker's parts as plain parameters."""
    whole: dict[int, nn.Parameter] = {}

    def part_of(tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, DTensor):
            return None
        part = nn.Parameter(tensor.to_local().detach(), tensor.requires_grad)
        whole[id(part)] = cast(nn.Parameter, tensor)
        return part

    replace_tensors(model, part_of)
    try:
        yield
    finally:
        replace_tensors(model, lambda tensor: whole.get(id(tensor)))


@contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Switch off key-value caches of transformers' decoders, which training never uses."""
    configs = {id(each): each for m in model.modules() if (each := getattr(m, "config", None))}
    caching = [each for each in configs.values() if getattr(each, "use_cache", False) is True]
    for each in caching:
        each.use_cache = False
    try:
        yield
    finally:
        for each in caching:
            each.use_cache = True


@contextmanager
def _without_checkpoints(model: nn.Module) -> Iterator[None]:
    """Switch off transformers' activation checkpointing, which :mod:`shoal.pipelining.recompute` has."""
    modules = [each for each in model.modules() if getattr(each, CHECKPOINTS, False) is True]
    for each in modules:
        setattr(each, CHECKPOINTS, False)
    try:
        yield
    finally:
        for each in modules:
            setattr(each, CHECKPOINTS, True)


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Disable stack traces of graph nodes: they are unused and take a fifth of the export."""
    before = getattr(config, "do_not_emit_stack_traces", False)  # torch 2.11 has no such switch
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def _read(program: Any, model: nn.Module, inputs: dict[str, Tensor], training: bool) -> ExportedGraph:
    """Take the graph out of the exported program, with the values that a split needs."""
    signature, module = program.graph_signature, program.graph_module
    if signature.inputs_to_lifted_custom_objs:
        raise UsageError(f"{type(model).__name__} uses TorchScript objects, which a pipeline cannot split")
    aliases = alias_names(model)
    placeholders = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    _, kwargs = pytree.tree_unflatten(list(signature.user_inputs), program.call_spec.in_spec)
    exported = ExportedGraph(
        model=model,
        inputs=inputs,
        training=training,
        module=module,
        input_nodes={placeholders[node]: name for name, node in kwargs.items()},
        parameter_nodes=_merged(placeholders, signature.inputs_to_parameters, aliases),
        buffer_nodes=_merged(placeholders, signature.inputs_to_buffers, aliases),
        constant_nodes={
            placeholders[node]: _constant(program.constants[name], name)
            for node, name in signature.inputs_to_lifted_tensor_constants.items()
        },
        outputs=tuple(module.graph.output_node().args[0]),
        output_spec=program.call_spec.out_spec,
        aliases=aliases,
    )
    _clean(module.graph)
    number_draws(module)
    return exported


def _merged(
    placeholders: Mapping[str, fx.Node], names: Mapping[str, str], aliases: Mapping[str, str]
) -> dict[fx.Node, str]:
    """Return node -> canonical name, one node per tensor: all uses of a tied one go to its first node."""
    nodes: dict[str, fx.Node] = {}
    for placeholder, name in names.items():
        node = placeholders[placeholder]
        first = nodes.setdefault(aliases.get(name, name), node)
        if first is not node:
            node.replace_all_uses_with(first)
    return {node: name for name, node in nodes.items()}


def _constant(value: Tensor, name: str) -> Tensor:
    if value.is_meta or isinstance(value, torch._subclasses.FakeTensor):
        raise UsageError(
            f"the model makes the constant {name} while it runs on the meta device, where values are lost: "
            "register it as a buffer, or export the model on the cpu"
        )
    return value


def _clean(graph: fx.Graph) -> None:
    """Remove checks of fixed values, and unused nodes without side effects."""
    for node in reversed(graph.nodes):
        if node.op not in ("call_function", "get_attr") or node.users:
            continue
        is_check = str(node.target).startswith(("aten._assert", "aten.sym_constrain_range"))
        if node.op == "get_attr" or is_check or not _changes_something(node):
            graph.erase_node(node)


def _changes_something(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is not operator.getitem  # a nested graph may
    arguments = schema.arguments
    declared = any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)
    return declared or any(argument.name == "running_mean" for argument in arguments)


def _refusal(model: nn.Module, error: Exception) -> str:
    """Describe in one line where and why a model cannot be exported, and the remedy."""
    frame = _model_frame(model, error)
    location = f" at {frame.filename}:{frame.lineno} ({frame.line})" if frame else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = (lines[0] if lines else type(error).__name__)[:_REASON_LENGTH]
    children = [name for name, _ in model.named_children()]
    half = max(1, len(children) // 2)
    return (
        f"{type(model).__name__} cannot be exported{location}: {reason}. Give the modules of each stage by "
        f"name instead, e.g. modules={[children[:half], children[half:]]}"
    )


def _model_frame(model: nn.Module, error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost line in a file that defines one of the model's modules, else outside torch."""
    files = {
        getattr(sys.modules.get(type(module).__module__), "__file__", None) for module in model.modules()
    }
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for each in reversed(chain):
        frames = [
            frame
            for frame in traceback.extract_tb(each.__traceback__)
            if not frame.filename.startswith(_TORCH_AND_OURS)
            and (not frame.filename.startswith(_STDLIB) or "-packages" in frame.filename)
        ]
        if frames:
            return ([f for f in frames if f.filename in files] or frames)[-1]
    return None
