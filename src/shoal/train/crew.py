"""Trains on processes that come and go: a step is a transaction of those that are there.

:class:`~shoal.comm.members.Members` agrees on the processes. Those that lack the state are given it
(:func:`give_state`), and a step that lost a member is repeated.

- :class:`Crew` is for a loop of a script's own, whose every process has the whole model.
- :class:`ChangingMembers` is for a :class:`~shoal.train.run.Run`. Before the weights move, a last collective
  sums the loss and the figures of the step, so that nothing is left to sum when the step is done. Whoever
  becomes the first worker writes the record and the checkpoints from then on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal import record
from shoal.comm.engine import CommError
from shoal.comm.members import Members
from shoal.decide.batch import BatchPlan
from shoal.decide.members import shares_of_members
from shoal.errors import ShoalError
from shoal.json_text import parse_json
from shoal.native import crc32c
from shoal.optim.moments import parameters_of
from shoal.train.checkpoint import open_checkpointer
from shoal.train.checkpoint_files import DTYPE_NAMES, DTYPES, StoredTensor
from shoal.train.checkpoint_state import flatten, local_state, restore
from shoal.train.gradients import ChangingWorkers
from shoal.train.step import Step, Workers, seed_key_of

T = TypeVar("T")


class Crew:
    """The members of a training that goes on when one is lost, and takes in others.

    All processes of the first group make it at the same time. One that is made later, with a store whose crew
    is at work, waits until the members take it in, at their next step. Its ``init_process_group`` may name
    any rank below its ``world_size``.

    Args:
        models: by name; all parameters are trained here as a whole.
        optimizer: of these parameters.
        at_least: fewer members do not go on.
        patience_s: a member that stands still for so long is lost.

    Attributes:
        step: steps done.
        history: ``(step, number of members)`` of each step done here.

    Raises:
        CommError: the members did not come in time.
        UsageError: the group was made without ``enable_reconfigure``, or torch is older than 2.14.

    Example::

        dist.init_process_group("shoal", enable_reconfigure=True)
        crew = Crew({"model": model}, optimizer, at_least=2)
        ddp = crew.data_parallel(model)
        for step in crew.steps(until=1000):
            with step:
                rows = slice(*crew.share(global_batch_size))
                loss = loss_of(ddp(inputs(step.number, rows)), reduction="sum")
                (loss * crew.size / global_batch_size).backward()
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizer: Optimizer,
        *,
        at_least: int = 1,
        patience_s: float = 60.0,
    ) -> None:
        self.step = 0
        self.history: list[tuple[int, int]] = []
        self._state: dict[str, Any] = {**models, "optimizer": optimizer}
        self._optimizer = optimizer
        self._models: list[CrewParallel] = []
        self._has_state = False
        self._members = Members(at_least=at_least, patience_s=patience_s)
        self._members.on_change = self._changed
        if self._members.has_begun:
            self._members.ask()
        else:
            self._members.begin()

    @property
    def generation(self) -> int:
        """Return the number of the present members, from 1; it grows when they change."""
        return self._members.generation

    @property
    def rank(self) -> int:
        """Return the rank of this process among the present members."""
        return self._members.rank

    @property
    def size(self) -> int:
        """Return the number of present members."""
        return self._members.size

    def share(self, num_samples: int) -> tuple[int, int]:
        """Return begin and end of this member's part of a step's samples; parts differ by one at most."""
        first, last = (num_samples * rank // self.size for rank in (self.rank, self.rank + 1))
        return first, last

    def data_parallel(self, model: nn.Module, **options: Any) -> CrewParallel:
        """Wrap a model in a ``DistributedDataParallel`` of the present members; ``options`` are its own."""
        wrapped = CrewParallel(model, options)
        self._models.append(wrapped)
        return wrapped

    def steps(self, until: int) -> Iterator[CrewStep]:
        """Yield the remaining steps; one that lost a member comes again, for those that are left.

        Raises:
            CommError: too few members are left, or the others went on without this one.
        """
        while self.step < until:
            try:
                if self._admit():
                    continue  # newcomers begin here too
            except CommError as error:
                self._renew(error)
                continue
            yield CrewStep(self, self.step + 1)

    def _admit(self) -> bool:
        """Take in who waits; return whether somebody did. A collective of the members."""
        waiting = torch.tensor(self._members.num_waiting() if self.rank == 0 else 0)
        dist.broadcast(waiting, group_src=0)
        return self._members.admit(int(waiting))

    def _renew(self, cause: Exception) -> None:
        """Go on with those that are left. All of them call it."""
        self._optimizer.zero_grad()
        self._members.renew(cause, self.step)

    def _changed(self) -> None:
        """Go on with other members: average over them, and bring all to the newest state."""
        for wrapped in self._models:
            wrapped.renew()
        has_it = self._has_state or (self.generation == 1 and self.rank == 0)
        step, have_it = newest_state(self.step if has_it else -1)
        if not all(have_it):
            self._has_state = have_it[self.rank]
            give_state(self._state, have_it)
        self.step, self._has_state = step, True


class CrewParallel(nn.Module):
    """A model in a ``DistributedDataParallel`` of the present members of a :class:`Crew`.

    :meth:`renew` constructs a new wrapper when the members change, since DDP reorders the buckets of a
    trained model.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self._options = options
        self._parallel: list[DistributedDataParallel] = []  # as a list it is no submodule
        self.renew()

    def renew(self) -> None:
        for old in self._parallel:
            cast("Any", old)._remove_autograd_hooks()
        # without init_sync: all have the same weights, and not all make it at the same time
        self._parallel = [DistributedDataParallel(self.module, init_sync=False, **self._options)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._parallel[0](*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward adds gradients up and exchanges none."""
        context: AbstractContextManager[None] = self._parallel[0].no_sync()
        return context


class CrewStep:
    """A step of a :class:`Crew`: the block computes gradients, leaving it applies them.

    Attributes:
        number: of the step, from 1.
        is_done: whether the weights have moved; else the step comes again.
    """

    def __init__(self, crew: Crew, number: int) -> None:
        self._crew, self.number, self.is_done = crew, number, False

    def __enter__(self) -> CrewStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        crew = self._crew
        try:
            if error is None:
                dist.barrier()  # all have the sums of all gradients
        except CommError as failure:
            error = failure
        if error is None:
            crew._optimizer.step()
            crew._optimizer.zero_grad()
            crew.step, self.is_done = self.number, True
            crew.history.append((self.number, crew.size))
            return False
        if not isinstance(error, Exception) or not crew._members.has_lost():
            return False
        crew._renew(error)
        return True


# ---- the workers of a run -------------------------------------------------------------------------------


class ChangingMembers(Workers):
    """The workers of a run that goes on when one is lost, and takes in others.

    Args:
        run: the :class:`~shoal.train.run.Run` whose workers they are.
        members: its processes.
        take_over: opens the record in a worker that has become the first one, given the owner's token before.
    """

    def __init__(self, run: Any, members: Members, take_over: Callable[[str], None]) -> None:
        self._run, self._members, self._take_over = run, members, take_over
        self._has_state = members.generation > 0
        self._leads = self._is_together = False
        self._num_together = 0
        members.on_change = self._changed

    @property
    def num_changes(self) -> int:
        return self._members.generation

    @property
    def num_waiting(self) -> int:
        return self._members.num_waiting() if self._members.is_first else 0

    def join(self, until: int) -> bool:
        if self._members.generation == 0:
            return self._members.ask(until)
        self._members.enter(until)
        self._lead()
        return True

    @property
    def are_done(self) -> bool:
        return self._members.are_done

    def together(self, action: Callable[[], T]) -> T:
        if self._is_together or self._members.generation == 0:
            return action()
        number = self._num_together + 1
        while True:
            with self.survive():
                self._is_together = True
                try:
                    result = action()
                    self._run.world.barrier()
                    self._num_together = number
                finally:
                    self._is_together = False
            if self._num_together >= number:  # here, or where others were past it: all have a result then
                return result

    def shares(self, batch: BatchPlan) -> tuple[int, ...]:
        sizes = batch.global_batch_size, batch.micro_batch_size
        return shares_of_members(*sizes, self._run.world.num_workers)

    @contextmanager
    def survive(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._members.has_lost():
                raise
            self._members.renew(error, self._run.step)

    def admit(self, num_waiting: int) -> bool:
        return self._members.admit(num_waiting)

    def release(self, num_leaving: int, *, leaves: bool) -> bool:
        run = self._run
        if not self._members.can_spare(num_leaving):
            return False
        if leaves:
            if run._checkpointer is not None:
                run._checkpointer.finish()
            self._members.leave()
            run.world.forget_ranks()
        else:
            self._members.renew(f"{num_leaving} were asked to stop", run.step)
        return True

    def agree(self, step: Step) -> Exception | None:
        try:
            step.sum_figures(self._run.sum)
        except Exception as error:
            if not self._members.has_lost():
                raise
            return error
        self._members.tell_launcher()
        return None

    def redo(self, step: Step, error: BaseException) -> bool:
        if not isinstance(error, Exception) or not self._members.has_lost():
            return False
        self._members.renew(error, self._run.step)
        step.is_done = step.is_given = self._run.step >= step.number
        return True

    def end(self) -> None:
        if self._members.is_first:
            self._members.end()

    def _changed(self) -> None:
        """Average over the present members, bring all to the newest state, and name the first one."""
        run = self._run
        run.world.forget_ranks()
        for ddp in run._training.models:
            assert isinstance(ddp, ChangingWorkers)
            ddp.renew()
        run._training.seed_key = seed_key_of(run.seed, self._members.rank)
        step, have_it = newest_state(run.step if self._has_state else -1)
        together = torch.tensor(self._num_together if self._has_state else 0)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        self._num_together = int(together)
        if not all(have_it):
            self._has_state = have_it[self._members.rank]
            state = {
                **run._state(),
                "metrics": run._metrics.state(),
                "micro_batch": run.batch.micro_batch_size,
            }
            values = give_state(state, have_it)
            if not self._has_state:
                self._take(step, values)
        self._has_state = True
        self._lead()
        if run.log:
            members = record.Members(
                step=step, num_workers=self._members.size, num_before=self._members.num_before
            )
            run.log.write(members)

    def _take(self, step: int, values: Mapping[str, Any]) -> None:
        """Go on after a step whose models and optimizers are here."""
        run = self._run
        run.step, run._samples = step, int(values["samples"])
        run._training.scale.load_state_dict(values["loss_scale"])
        run._metrics.load_state(values["metrics"])
        run._batch = replace(run.batch, micro_batch_size=int(values["micro_batch"]))

    def _lead(self) -> None:
        """Write the record and checkpoints if this is the first worker, which has the whole state."""
        run = self._run
        if not self._members.is_first:
            run._checkpointer = None
        elif not self._leads:
            self._leads = True
            if run.log is None:
                self._take_over(self._members.get("owner"))
            if run.directory is not None and run._settings.output.save:
                output = run._settings.output
                run._checkpointer = open_checkpointer(output, run.directory, is_alone=True)
                if self._members.generation > 1 and run.step:
                    run.save()  # the former first worker may not have ended its last one


# ---- state ------------------------------------------------------------------------------------------------

_PIECE_BYTES = 4 << 20
_MOST_UNDER_WAY = 8


def newest_state(step: int) -> tuple[int, list[bool]]:
    """Return the most steps that a member has taken, and which members have that state. A collective.

    Args:
        step: steps done; -1: this member has no whole state.

    Raises:
        ShoalError: no member has one.
    """
    steps = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(steps, torch.tensor([step]))
    most = int(steps.max())
    if most < 0:
        raise ShoalError(
            "the last member with a whole state was lost while it gave it to others: start the job again"
        )
    return most, [bool(each) for each in steps == most]


def give_state(state: Mapping[str, Any], has_it: Sequence[bool]) -> dict[str, Any]:
    """Give the state of some members to the others; return its JSON values to these. A collective.

    Each of the members that have it gives a part. A member that this raises in may have a part of the state.

    Args:
        state: by name: models, optimizers, tensors, and JSON values.
        has_it: whether the member of each rank has it.

    Raises:
        ShoalError: the members' states differ afterwards.
    """
    first, is_giver = has_it.index(True), has_it[dist.get_rank()]
    flat = flatten(state) if is_giver else None
    description: Any = None
    if flat is not None:
        types = {name: [DTYPE_NAMES[each.dtype], list(each.shape)] for name, each in flat.tensors.items()}
        description = [types, flat.all_values()]
    types, values = _broadcast_json(description, first)
    stored = {
        name: StoredTensor(dtype=dtype, size=tuple(size), chunks=()) for name, (dtype, size) in types.items()
    }
    if flat is not None:
        _exchange({name: _bytes_of(each) for name, each in flat.tensors.items()}, has_it)
        return {}

    def read(targets: Mapping[str, Tensor]) -> None:
        buffers = {
            name: each
            for name, each in targets.items()
            if each.device.type == "cpu" and each.is_contiguous() and each.dtype == DTYPES[stored[name].dtype]
        }
        for name in stored.keys() - buffers.keys():
            buffers[name] = torch.empty(stored[name].size, dtype=DTYPES[stored[name].dtype])
        _exchange({name: _bytes_of(buffers[name]) for name in stored}, has_it)
        for name, target in targets.items():
            if target is not buffers[name]:
                target.copy_(buffers[name])

    return restore(state, stored, values, read, [local_state(state)], parameters_of)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, of a contiguous one on the CPU without a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _exchange(tensors: Mapping[str, Tensor], has_it: Sequence[bool]) -> None:
    """Send pieces to the members that lack them, from all that have them in turn; compare all checksums.

    Raises:
        ShoalError: they differ.
    """
    rank = dist.get_rank()
    givers, takers = ([each for each, has in enumerate(has_it) if has is which] for which in (True, False))
    pieces = [
        (name, piece)
        for name, each in tensors.items()
        for piece in torch.split(each, _PIECE_BYTES)
        if len(piece)
    ]
    under_way: list[Any] = []
    for number, (_, piece) in enumerate(pieces):
        giver = givers[number % len(givers)]
        if rank == giver:
            under_way += [dist.isend(piece, taker) for taker in takers]
        elif rank in takers:
            under_way.append(dist.irecv(piece, giver))
        while len(under_way) > _MOST_UNDER_WAY:
            under_way.pop(0).wait()
    for work in under_way:
        work.wait()
    own = torch.tensor([crc32c(piece.numpy().tobytes()) for _, piece in pieces], dtype=torch.int64)
    everywhere = torch.empty(len(has_it), len(own), dtype=torch.int64)
    dist.all_gather_into_tensor(everywhere, own)
    for other, checksums in enumerate(everywhere):
        if not torch.equal(checksums, everywhere[0]):
            name, _ = pieces[int((checksums != everywhere[0]).nonzero()[0])]
            raise ShoalError(
                f"rank {other} has another {name} than rank 0 after the members changed: start the job "
                "again, which continues from its last checkpoint"
            )


def _broadcast_json(value: Any, source: int) -> Any:
    """Return the JSON value of one member on all."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor(len(data))
    dist.broadcast(size, group_src=source)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group_src=source)
    return parse_json(bytes(data.numpy()), f"the state of rank {source}", error=CommError)
