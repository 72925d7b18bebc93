"""Trains on processes that come and go: a step is a transaction of those that are there.

For scripts of their own, whose every process has the whole model. :class:`Crew` agrees on the members through
the job's store, changes the group by torch's interface of 2.14, gives the state to who lacks it, and repeats
a step that lost a member.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.comm import native_group
from shoal.comm.engine import CommError
from shoal.errors import UsageError
from shoal.json_text import parse_json
from shoal.optim.moments import parameters_of
from shoal.train.checkpoint_files import DTYPE_NAMES, DTYPES, StoredTensor
from shoal.train.checkpoint_state import flatten, local_state, restore

_log = logging.getLogger(__name__)
_POLL_S = 0.01


class ExcludedError(CommError):
    """The others go on without this process, for which they have waited."""


class Crew:
    """The members of a training that goes on when one is lost, and takes in others.

    All processes of the first group make it at the same time. One that is made later, with a store whose crew
    is at work, waits until the members take it in, at their next step. Its ``init_process_group`` may name
    any rank below its ``world_size``.

    Args:
        models: by name; all parameters are trained here as a whole.
        optimizer: of these parameters.
        at_least: fewer members do not go on.
        patience_s: how long survivors wait for a member that is not known to be lost and does not come.

    Attributes:
        step: steps done.
        history: ``(step, number of members)`` of each step done here.
        generation: number of the present members, from 1; it grows when they change.

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
        if not hasattr(c10d, "_reconfigure"):
            raise UsageError(
                f"torch {torch.__version__} has no groups whose members change: install torch 2.14 or later"
            )
        self.step = 0
        self.history: list[tuple[int, int]] = []
        self._state: dict[str, Any] = {**models, "optimizer": optimizer}
        self._optimizer = optimizer
        self._at_least, self._patience_s = at_least, patience_s
        self._models: list[CrewParallel] = []
        self._group = native_group.python_group(dist.group.WORLD)
        self._store = PrefixStore("crew/", self._group.store)
        self._handle = c10d._get_reconfigure_handle()
        self.generation = self._num_admitted = 0
        self._members: list[str] = []
        if self._store.check(["newest"]):
            self._ask()
        else:
            self._begin()

    @property
    def rank(self) -> int:
        """Return the rank of this process among the present members."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        """Return the number of present members."""
        return dist.get_world_size()

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

    # ---- members ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Meet the processes with which the group was made."""
        size = dist.get_world_size()
        self._store.set(f"first/{dist.get_rank()}", self._handle)
        self._become(1, [self._store.get(f"first/{rank}").decode() for rank in range(size)])
        _give_state(self._state, 0, has_it=self.rank == 0)
        self._store.set("newest", "1")

    def _ask(self) -> None:
        """Wait until the members take this process in."""
        while True:
            number = self._store.add("num_waiting", 1)
            self._store.set(f"waiting/{number}", self._handle)
            generation = int(self._store.get(f"welcome/{number}").decode())
            try:
                return self._follow(generation)
            except CommError as error:  # one of the others was lost meanwhile
                _log.warning("not taken in, asks again: %s", error)

    def _admit(self) -> bool:
        """Take in who waits; return whether somebody did. A collective of the members."""
        waiting = torch.tensor(self._num_waiting() if self.rank == 0 else 0)
        dist.broadcast(waiting, group_src=0)
        if int(waiting) <= self._num_admitted:
            return False
        generation = self.generation + 1
        if self.rank == 0:
            numbers = range(self._num_admitted + 1, int(waiting) + 1)
            new = [self._store.get(f"waiting/{number}").decode() for number in numbers]
            self._decide(generation, [*self._members, *new], int(waiting))
            for number in numbers:
                self._store.set(f"welcome/{number}", str(generation))
        self._follow(generation)
        return True

    def _num_waiting(self) -> int:
        """Return how many processes have asked so far; without the store nobody new can come."""
        try:
            return int(self._store.add("num_waiting", 0))
        except dist.DistError:
            return self._num_admitted

    def _renew(self, cause: Exception) -> None:
        """Go on with those that are left. All of them call it.

        Raises:
            CommError: too few are left, or they went on without this process.
        """
        self._optimizer.zero_grad()
        while True:
            _log.warning("a member was lost after step %d: %s", self.step, cause)
            generation = self.generation + 1
            self._store.set(f"present/{generation}/{self._handle}", "1")
            self._store.add(f"num_present/{generation}", 1)
            self._await(generation)
            try:
                return self._follow(generation)
            except ExcludedError:
                raise
            except CommError as error:
                self.generation, cause = generation, error

    def _await(self, generation: int) -> None:
        """Wait until the next members are decided: those that are present once no other can come."""
        deadline = time.monotonic() + self._patience_s
        while not self._store.check([f"plan/{generation}"]):
            num_left = len(self._members) - len(set(self._group.engine.lost_ranks()))
            num_present = self._store.add(f"num_present/{generation}", 0)
            if num_present >= num_left or time.monotonic() > deadline:
                present = [
                    each for each in self._members if self._store.check([f"present/{generation}/{each}"])
                ]
                if len(present) < self._at_least:
                    raise CommError(
                        f"{len(present)} of {len(self._members)} members are left after step {self.step}, "
                        f"and at_least={self._at_least}: start the job again"
                    )
                self._decide(generation, present, self._num_admitted)
            time.sleep(_POLL_S)

    def _decide(self, generation: int, members: list[str], num_admitted: int) -> None:
        """Propose the next members; the first proposal counts."""
        proposal = json.dumps({"members": members, "num_admitted": num_admitted})
        self._store.compare_set(f"plan/{generation}", "", proposal)

    def _follow(self, generation: int) -> None:
        """Become what was decided, and get the state of who has taken the most steps."""
        plan = parse_json(
            self._store.get(f"plan/{generation}"), "the crew's plan in the job's store", error=CommError
        )
        self._num_admitted = plan["num_admitted"]
        if self._handle not in plan["members"]:
            raise ExcludedError(
                f"the others went on without this process after step {self.step}, which did not answer for "
                f"patience_s={self._patience_s:g} s: start it again, and it will be taken in"
            )
        self._become(generation, plan["members"])
        self._share_state()

    def _become(self, generation: int, members: list[str]) -> None:
        c10d._reconfigure(generation, members, timeout=timedelta(seconds=self._patience_s)).wait()
        self.generation, self._members = generation, members
        for wrapped in self._models:
            wrapped.renew()

    # ---- state ------------------------------------------------------------------------------------------

    def _share_state(self) -> None:
        """Bring all members to the state of the one that has taken the most steps."""
        steps = torch.empty(self.size, dtype=torch.int64)
        dist.all_gather_into_tensor(steps, torch.tensor([self.step]))
        if steps.min() == steps.max():
            return
        most = int(steps.max())
        _give_state(self._state, int(steps.argmax()), has_it=self.step == most)
        self.step = most


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
        if not isinstance(error, Exception) or crew._group.engine.error() is None:
            return False
        crew._renew(error)
        return True


def _give_state(state: Mapping[str, Any], source: int, *, has_it: bool) -> None:
    """Give one member's models and optimizer to all that do not have its state yet."""
    flat = flatten(state) if dist.get_rank() == source else None
    description: Any = None
    if flat is not None:
        types = {name: [DTYPE_NAMES[each.dtype], list(each.shape)] for name, each in flat.tensors.items()}
        description = [types, flat.all_values()]
    types, values = _broadcast_json(description, source)
    stored = {
        name: StoredTensor(dtype=dtype, size=tuple(size), chunks=()) for name, (dtype, size) in types.items()
    }

    def read(targets: Mapping[str, Tensor]) -> None:
        for name, each in stored.items():
            buffer = torch.empty(each.size, dtype=DTYPES[each.dtype])
            if flat is not None:
                buffer.copy_(flat.tensors[name])
            dist.broadcast(buffer, group_src=source)
            if name in targets:
                targets[name].copy_(buffer)

    if has_it:
        read({})
    else:
        restore(state, stored, values, read, [local_state(state)], parameters_of)


def _broadcast_json(value: Any, source: int) -> Any:
    """Return the JSON value of one member on all."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor(len(data))
    dist.broadcast(size, group_src=source)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group_src=source)
    return parse_json(bytes(data.numpy()), f"the state of rank {source}", error=CommError)
