"""Trains on processes that come and go: a step is a transaction of those that are there.

For scripts of their own, whose every process has the whole model. :class:`Crew` agrees on the members through
the job's store, changes the group by torch's interface of 2.14, gives the state to who lacks it, and repeats
a step that lost a member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.comm.engine import CommError
from shoal.train.members import Members, give_state, newest_state


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
        step, source = newest_state(self.step if has_it else -1)
        if source is not None:
            self._has_state = has_it and self.step == step
            give_state(self._state, source, has_it=self._has_state)
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
