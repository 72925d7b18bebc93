"""Averages gradients over all ranks before an optimizer of torch applies them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from shoal.comm.horovod import Average, Reduction, Sum, check_keywords, check_reduction, check_wire
from shoal.errors import UsageError
from shoal.horovod_torch import process
from shoal.horovod_torch.ops import OPERATIONS, Handle, sparse_allreduce_async

BUCKET_BYTES = 25 << 20
"""As DistributedDataParallel's."""
_MARK = "_shoal_averaging"


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: None = None,
) -> Any:
    """Make an optimizer average the gradients over all ranks before each step.

    Gradients are sent in buckets while the backward pass runs. ``step()`` waits for them; a closure's
    gradients are averaged each time that it is called. The optimizer gets three methods of Horovod:
    ``synchronize()`` waits for the averages, as before a clipping of gradients;
    ``with optimizer.skip_synchronize():`` lets ``step()`` take them as they are then; and
    ``set_backward_passes_per_step(n)``. A parameter without a gradient on any rank stays without one.

    Args:
        optimizer: of torch; it stays of its type, with its state.
        named_parameters: ``model.named_parameters()``: names for messages.
        compression: one of :class:`~shoal.comm.horovod.Compression`: operands are rounded, added in float32,
            and the sum is rounded once more.
        backward_passes_per_step: number of backward passes whose gradients are added up before they are sent.
        op: ``Average``, or ``Sum`` for losses that are sums over the batch.
        gradient_predivide_factor: divides gradients before they are sent, and multiplies the averages.
        num_groups: changes nothing here, as the next one.
        groups: changes nothing here.
        sparse_as_dense: whether to send sparse gradients as dense tensors; else their elements are gathered.
        process_set: only ``None``.

    Returns:
        The optimizer.

    Raises:
        UsageError: it averages already, or a value is wrong. In ``step()`` and backward passes: gradients
            were changed, or computed again, after they were sent.

    Example:
        >>> import torch, shoal.horovod_torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> optimizer.step()
        >>> hvd.shutdown()
    """
    check_keywords("DistributedOptimizer", {"process_set": process_set})
    if hasattr(optimizer, _MARK):
        raise UsageError("this optimizer averages gradients already; call DistributedOptimizer once")
    if backward_passes_per_step < 1:
        raise UsageError(f"backward_passes_per_step {backward_passes_per_step} must be at least 1")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor is for op=Average; leave it out, or average")
    averaging = _Averaging(
        optimizer,
        {parameter: name for name, parameter in named_parameters or ()},
        check_reduction(op, allowed=(Average, Sum)),
        check_wire(compression),
        gradient_predivide_factor,
        sparse_as_dense,
    )
    averaging.passes = backward_passes_per_step
    added: Any = optimizer
    added.synchronize, added.skip_synchronize = averaging.synchronize, averaging.skip_synchronize
    added.set_backward_passes_per_step = averaging.set_passes
    setattr(optimizer, _MARK, averaging)
    return optimizer


class _Bucket:
    """Gradients that travel in one block, with a mark for each that this rank has."""

    def __init__(self, parameters: list[Tensor], wire: str | None) -> None:
        first = parameters[0]
        narrow = wire and first.dtype in (torch.float32, torch.float64)
        self.parameters, self.missing = parameters, len(parameters)
        sizes = [each.numel() for each in parameters]
        dtype = getattr(torch, str(wire)) if narrow else first.dtype
        self.block = torch.empty(sum(sizes) + len(sizes), dtype=dtype, device=first.device)
        *slots, self.marks = torch.split(self.block, [*sizes, len(sizes)])
        self.slots = [slot.view_as(each) for slot, each in zip(slots, parameters, strict=True)]
        self.sent: list[tuple[Tensor, int] | None] = []
        """Each gradient as it was sent, and its version."""
        self.works: list[Any] = []
        self.sparse: dict[int, Handle] = {}


class _Averaging:
    """Sends the gradients of an optimizer's parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[Tensor, str],
        op: Reduction,
        wire: str | None,
        predivide: float,
        sparse_as_dense: bool,
    ) -> None:
        process.size()
        self.passes = 1
        self._optimizer, self._names, self._op, self._wire = optimizer, names, op, wire
        self._predivide, self._sparse_as_dense = predivide, sparse_as_dense
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._num_sent = 0
        """Of the buckets, which are sent in their order on all ranks."""
        self._passed: dict[Tensor, int] = {}
        self._skips = False
        self._adopt()
        optimizer.register_step_pre_hook(self._before_step)

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes before gradients are sent."""
        if passes < 1:
            raise UsageError(f"backward_passes_per_step {passes} must be at least 1")
        self.passes = passes

    def _adopt(self) -> None:
        """Give parameters that are new, or have a shape or need gradients only now, buckets of their own."""
        groups = self._optimizer.param_groups
        every = [each for group in groups for each in group["params"] if each.requires_grad]
        new = [each for each in every if each not in self._bucket_of and not is_lazy(each)]
        open_: dict[Any, list[Tensor]] = {}
        full: list[list[Tensor]] = []
        for parameter in reversed(new):  # the order in which the backward pass comes to them
            part = open_.setdefault((parameter.dtype, parameter.device), [])
            part.append(parameter)
            if sum(each.nbytes for each in part) >= BUCKET_BYTES:
                full.append(open_.pop((parameter.dtype, parameter.device)))
            parameter.register_post_accumulate_grad_hook(self._has_gradient)
        for part in (*full, *open_.values()):
            self._buckets.append(bucket := _Bucket(part, self._wire))
            self._bucket_of.update(dict.fromkeys(part, bucket))

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(parameter) or f"a parameter of shape {tuple(parameter.shape)}"

    def _has_gradient(self, parameter: Tensor) -> None:
        """Send the buckets that are complete now, in their order."""
        passed = self._passed[parameter] = self._passed.get(parameter, 0) + 1
        if passed > self.passes:
            raise UsageError(
                f"{self._name(parameter)} got a gradient {passed} times since the last step(), more than "
                f"backward_passes_per_step={self.passes}: give a larger one to add up gradients"
            )
        if passed == self.passes:
            self._bucket_of[parameter].missing -= 1
            while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
                self._send(self._buckets[self._num_sent])

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        self._num_sent += 1
        bucket.block.zero_()
        marks = [0.0] * len(bucket.slots)
        for index, (parameter, slot) in enumerate(zip(bucket.parameters, bucket.slots, strict=True)):
            gradient = parameter.grad
            bucket.sent.append(None if gradient is None else (gradient, gradient._version))
            if gradient is None:
                continue
            if gradient.is_sparse and not self._sparse_as_dense:
                bucket.sparse[index] = sparse_allreduce_async(gradient, op=self._op)
                continue
            slot.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            marks[index] = 1.0
        bucket.marks.copy_(torch.tensor(marks))
        if self._predivide != 1.0:
            bucket.block.div_(self._predivide)
        bucket.works = [dist.all_reduce(bucket.block, op=OPERATIONS[self._op], async_op=True)]

    def synchronize(self) -> None:
        """Send the remaining buckets, and replace the gradients by the averages.

        Raises:
            CommError: a rank was lost, or ranks differ.
            UsageError: a gradient was changed after it was sent.
        """
        self._adopt()
        for bucket in self._buckets[self._num_sent :]:
            self._send(bucket)
        for bucket in self._buckets:
            for work in bucket.works:
                work.wait()
            self._receive(bucket)
            bucket.works, bucket.sent, bucket.sparse = [], [], {}
            bucket.missing = len(bucket.parameters)
        self._num_sent = 0
        self._passed.clear()

    @torch.no_grad()
    def _receive(self, bucket: _Bucket) -> None:
        if self._predivide != 1.0:
            bucket.block.mul_(self._predivide)
        has_any = bucket.marks.ne(0).tolist()
        for index, (parameter, slot) in enumerate(zip(bucket.parameters, bucket.slots, strict=True)):
            gradient, sent = parameter.grad, bucket.sent[index]
            if sent and (gradient is not sent[0] or gradient._version != sent[1]):
                raise UsageError(
                    f"the gradient of {self._name(parameter)} was changed between the backward pass and the "
                    "average: call optimizer.synchronize() before clipping, unscaling or zeroing, and step() "
                    "inside `with optimizer.skip_synchronize():`"
                )
            if index in bucket.sparse:
                parameter.grad = bucket.sparse[index].wait()
            elif not has_any[index]:
                continue
            elif gradient is None:
                parameter.grad = slot.to(parameter.dtype, copy=True)
            elif gradient.is_sparse:
                parameter.grad = slot.to(gradient.dtype).to_sparse(gradient.sparse_dim())
            else:
                gradient.copy_(slot)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step()`` take the gradients as they are: after :meth:`synchronize`."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def _before_step(self, _: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        closure = options.get("closure") or (arguments[1] if len(arguments) > 1 else None)
        if closure is not None:
            return (arguments[0],), {**options, "closure": self._averaged(closure)}
        if not self._skips:
            self.synchronize()
        elif self._num_sent:
            raise UsageError("step() in skip_synchronize() without optimizer.synchronize() before it")
        return None

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def compute() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return compute
