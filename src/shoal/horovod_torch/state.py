"""Gives all ranks the weights, the optimizer's state or another object of one rank, without unpickling."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from shoal.comm.horovod import check_keywords, from_json, to_json
from shoal.errors import ShoalError, UsageError
from shoal.horovod_torch import process
from shoal.horovod_torch.ops import broadcast_, broadcast_async_
from shoal.json_text import parse_json


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Replace tensors by those of rank ``root_rank``.

    Parameters without a shape yet, of modules such as ``torch.nn.LazyLinear``, follow in the first forward
    pass: their module makes them, and they are sent before it computes anything.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or tensors; those of a dict are sent in
            the order of their names.
        root_rank: rank whose tensors are sent.

    Raises:
        CommError: a rank was lost, or ranks have other shapes.
        UsageError: something is no tensor, or a tensor has a shape on some ranks only.
    """
    tensors = [(name, each) for name, each in _named(params) if each is not None]
    for name, each in tensors:
        if not isinstance(each, Tensor):
            raise UsageError(
                f"{name} is a {type(each).__name__}, which broadcast_parameters does not send; give tensors, "
                "and send the rest by broadcast_object"
            )
    process.size()
    lazy = torch.tensor([is_lazy(each) for _, each in tensors], dtype=torch.int32)
    number = lazy.clone()
    dist.all_reduce(number)
    for (name, _), ranks in zip(tensors, number.tolist(), strict=True):
        if ranks % process.size():
            raise UsageError(
                f"{name} has no shape yet on {ranks} of {process.size()} ranks; run the first batch on all "
                "ranks, or on none, before broadcast_parameters"
            )
    for handle in [broadcast_async_(each, root_rank) for _, each in tensors if not is_lazy(each)]:
        handle.wait()
    if waiting := [each for _, each in tensors if is_lazy(each)]:
        _send_when_made(waiting, root_rank)


def _named(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if not isinstance(params, Iterable) or isinstance(params, Tensor):
        raise UsageError("broadcast_parameters needs model.state_dict(), or a list of tensors or pairs")
    pairs = (each if isinstance(each, tuple) else (f"tensor {n}", each) for n, each in enumerate(params))
    return [(str(name), each) for name, each in pairs]


def _send_when_made(waiting: Sequence[Tensor], root_rank: int) -> None:
    """Make the modules of parameters without a shape send them at the beginning of their first call."""
    left = {id(each) for each in waiting}

    def send(module: nn.Module, inputs: Any) -> None:
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        own = [(name, each) for name, each in tensors if id(each) in left]
        if own:
            module.initialize_parameters(*inputs)  # type: ignore[operator]  # of torch's lazy modules
            left.difference_update(id(each) for _, each in own)
            broadcast_parameters(own, root_rank)
        if not left:
            hook.remove()

    hook = register_module_forward_pre_hook(send)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None
) -> None:
    """Give an optimizer the state and the options, such as the learning rate, of rank ``root_rank``.

    The other ranks need no state before, as after a checkpoint that only rank ``root_rank`` has read.

    Args:
        optimizer: with the same parameters on all ranks.
        root_rank: rank whose state is sent.
        model: Horovod's; changes nothing.

    Raises:
        CommError: a rank was lost.
        TypeError: the state has objects that are neither numbers, strings, containers nor tensors.
    """
    state = broadcast_object(optimizer.state_dict(), root_rank)
    if process.rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: None = None) -> Any:
    """Return the object of rank ``root_rank`` on all ranks.

    Args:
        obj: numbers, strings, lists, tuples, dicts and tensors. Objects of other types are refused, as they
            would have to be unpickled.
        root_rank: rank whose object is sent.
        name: ignored.
        process_set: only ``None``.

    Returns:
        On other ranks an equal one, with tensors on the CPU.

    Raises:
        CommError: a rank was lost.
        TypeError: the object cannot be sent.
    """
    check_keywords("broadcast_object", {"process_set": process_set})
    is_root, tensors = process.rank() == root_rank, []
    text = b""
    if is_root:

        def describe(value: Any) -> Any:
            if isinstance(value, Tensor) and not is_lazy(value) and value.layout == torch.strided:
                tensors.append(value.detach().cpu().contiguous())
                return [str(value.dtype).removeprefix("torch."), list(value.shape)]
            return None

        text = json.dumps(to_json(obj, describe)).encode()
    sender = f"rank {root_rank}"
    encoded = parse_json(_broadcast_bytes(text, root_rank), sender)
    if not is_root:

        def restore(described: Any) -> Tensor:
            tensors.append(_empty(described, sender))
            return tensors[-1]

        obj = from_json(encoded, sender, restore)
    for handle in [broadcast_async_(each, root_rank) for each in tensors]:
        handle.wait()
    return obj


def _empty(described: Any, sender: str) -> Tensor:
    match described:
        case [str(name), list(shape)] if all(isinstance(each, int) and each >= 0 for each in shape):
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype) and math.prod(shape) < 1 << 48:
                return torch.empty(shape, dtype=dtype)
    raise ShoalError(f"{sender} sent {described!r:.60}, which is no tensor of broadcast_object")


def _broadcast_bytes(text: bytes, root_rank: int) -> bytes:
    length = broadcast_(torch.tensor([len(text)]), root_rank)
    data = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if text
        else torch.empty(int(length), dtype=torch.uint8)
    )
    return bytes(broadcast_(data, root_rank).numpy())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order; arguments and errors of :func:`broadcast_object`."""
    return [broadcast_object(obj, root) for root in range(process.size())]
