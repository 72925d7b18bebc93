"""Goes on with other workers when some of a run are lost, and takes in others between two steps.

The workers' steps are those of :class:`~shoal.train.step.Step`, with a last collective before the weights
move: it sums the loss and the figures of the step, so that nothing is left to sum when the step is done.
Whoever becomes the first worker writes the record and the checkpoints from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shoal import record
from shoal.train.checkpoint import Checkpointer
from shoal.train.gradients import ChangingWorkers
from shoal.train.members import Members, give_state, newest_state
from shoal.train.run_dir import own
from shoal.train.step import Step, Workers, seed_key_of


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
        self._leads = False
        members.on_change = self._changed

    @property
    def num_changes(self) -> int:
        return self._members.generation

    @property
    def num_waiting(self) -> int:
        return self._members.num_waiting() if self._members.is_first else 0

    def join(self) -> bool:
        if self._members.generation == 0:
            return self._members.ask()
        self._lead()
        return True

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

    def agree(self, step: Step) -> Exception | None:
        try:
            step.sum_figures(self._run.sum)
        except Exception as error:
            if not self._members.has_lost():
                raise
            return error
        return None

    def redo(self, step: Step, error: BaseException) -> bool:
        if not isinstance(error, Exception) or not self._members.has_lost():
            return False
        self._members.renew(error, self._run.step)
        step.is_done = self._run.step >= step.number  # others had done it, and gave their state
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
        step, source = newest_state(run.step if self._has_state else -1)
        if source is not None:
            self._has_state = self._has_state and run.step == step
            state = {
                **run._state(),
                "metrics": run._metrics.state(),
                "micro_batch": run.batch.micro_batch_size,
            }
            values = give_state(state, source, has_it=self._has_state)
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
            if run.directory is not None:
                self._members.put("owner", own(run.directory).token)
            if run.directory is not None and run._settings.output.save:
                keep = run._settings.output.keep_checkpoints
                run._checkpointer = Checkpointer(run.directory, keep=keep, is_alone=True)
