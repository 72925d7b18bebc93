"""Takes optimizer steps locally on each worker, and averages the weight changes every H steps (DiLoCo).

    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    inner = AdamW(ddp.parameters(), lr=4e-4)  # of each worker
    outer = SGD(ddp.parameters(), lr=0.7, momentum=0.9, nesterov=True)  # its state is on the servers
    with local_steps(ddp, inner, outer, every=50):
        for inputs in loader:
            loss_of(ddp(inputs)).backward()
            inner.step()  # averages after every 50th; schedulers work as usual
            inner.zero_grad()

1.  A backward pass sends nothing, and ``inner.step()`` is the worker's own.
2.  After every H steps each worker sends the change of its weights since the last exchange.
3.  The servers use the mean over the workers as a gradient, step with ``outer``, and answer with the new
    weights, from which all workers continue. The inner state stays on its worker.

The result is bit-identical to that of one process which takes the workers' local steps one after the other,
adds the changes in rank order, and steps with :class:`shoal.optim.sgd.SGD`. The log has a checksum of the
weights after each exchange, which such a replay can compare.

With ``fragments=K``, fragment k of K is sent after step (k + 1) H / K of every H, and with ``delay`` it is
merged that number of steps later; until then the worker does not wait. Weights are then
``mix * own + (1 - mix) * servers'``. With ``wait_for`` an exchange does not wait for all workers, with
fragments or without (:mod:`shoal.train.servers.waiting`).

Sources: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
(arXiv 2311.08105), algorithm 1; Douillard et al., "Streaming DiLoCo with overlapping communication"
(arXiv 2501.18512), algorithm 2; its fragments are of transformer blocks, these of any layers; for a quorum
of each fragment, Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training"
(arXiv 2604.21428).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal import record
from shoal.comm.native_group import python_group
from shoal.decide.bounded_waiting import Late, Share
from shoal.decide.fragments import FragmentSchedule, TokenCounts, weights_of
from shoal.errors import UsageError
from shoal.formatting import plural
from shoal.optim.moments import clip_factor, norm_of, parameters_of, scale_all
from shoal.optim.sgd import SGD
from shoal.train.checkpoint_files import StoredTensor
from shoal.train.config import ServersConfig
from shoal.train.gradients import ManyWorkers, require_same
from shoal.train.servers.messages import MOST_TOKENS, gather
from shoal.train.servers.rules import check_buffers, check_model, check_outer
from shoal.train.servers.tensors import ServedTensors, Table, checksum, tables_of
from shoal.train.servers.update import RowLog, ServersUpdate
from shoal.train.servers.waiting import LOG as ROUNDS_LOG
from shoal.train.servers.waiting import BoundedSteps, LeftMoves
from shoal.train.weight_averaging import statistics_of, unite

LOG = "exchanges.jsonl"
"""Name of the log of exchanges in a run's directory."""

_Batch = TypeVar("_Batch")
TokensOf = Callable[[_Batch], int]
"""Counts the tokens, or samples, of a batch: the weight of a worker's steps in the mean of an exchange."""


def update_of_run(
    model: ManyWorkers,
    optimizer: Optimizer,
    config: ServersConfig,
    *,
    directory: Path,
    own: Sequence[Tensor],
) -> LocalSteps:
    """Return the update of a run in mode ``local``, with the outer optimizer of the settings.

    The arguments are those of :func:`shoal.train.servers.waiting.update_of_run`.
    """
    momentum = config.outer_momentum
    outer = SGD(parameters_of(optimizer), lr=config.outer_rate, momentum=momentum, nesterov=momentum > 0)
    kind, log = (LocalSteps, LOG) if config.wait_for is None else (RoundsOfLocalSteps, ROUNDS_LOG)
    return kind(model, optimizer, outer, config, log=directory / log, own=own)


def local_steps(
    model: DistributedDataParallel,
    inner: Optimizer,
    outer: Optimizer,
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.5,
    wait_for: int | None = None,
    late: Late = "drop",
    grace_s: float = 0.0,
    replicas: Literal[1, 2] = 1,
    log: Path | None = None,
) -> LocalSteps:
    """Update each worker's weights locally, and average them with an outer optimizer every few steps.

    All ranks enter the context before the first backward pass. The workers' copies of the weights become
    rank 0's. The options are those of :class:`shoal.train.config.ServersConfig`.

    Args:
        model: of float32 parameters on the CPU or on a GPU, where they stay, without a communication hook, on
            at least two hosts of backend ``"shoal"``; with buffers it needs ``broadcast_buffers=False``.
        inner: any optimizer over the model's parameters; each worker has its own state.
        outer: ``shoal.optim``'s SGD or AdamW, or torch's, over the same parameters. DiLoCo's is SGD with
            ``lr=0.7, momentum=0.9, nesterov=True``; SGD with ``lr=1.0`` averages the weights.
        every: local steps between exchanges, H.
        fragments: number of parts of the model, of whole layers and about equal size. Each is exchanged at
            its own time within the H steps, so that one exchange has about 1/``fragments`` of the bytes.
        delay: local steps that a worker takes while a fragment is exchanged; at most ``every // fragments``.
        mix: part of the worker's own weights in those after a delayed exchange; the rest are the servers'.
        wait_for: number of workers that an exchange waits for; the mean is over these. A late worker
            continues with the steps of the next round: ``for inputs in steps.batches(loader)``.
        late: ``"drop"`` drops the changes of late workers, ``"next"`` adds them to the next exchange, which
            needs ``fragments=1``. With ``"partial"`` an exchange that has enough workers takes from others
            the change of the steps that they have done, weighed by its tokens.
        grace_s: with ``wait_for``, seconds that an exchange with enough workers waits for the others; with
            ``late="partial"`` for the ends of their local steps, so give more than one takes.
        replicas: as in :func:`shoal.train.servers.update.update_on_servers`.
        log: file to which rank 0 appends a line of JSON for each exchange: its number, the number of local
            steps since the last one and in all, its bytes, and a checksum (CRC-32C) of the weights after it;
            of a fragment also its number and the step of the merge. With ``wait_for``, the log of
            :func:`shoal.train.servers.waiting.bound_waiting`, with exchanges for steps, which
            :func:`shoal.train.servers.log.replay_local` repeats.

    Returns:
        A context in which ``inner.step()`` counts the worker's steps, and averages after every few.

    Raises:
        UsageError: the model or the outer optimizer is not supported; the message says why.
        CommError: the ranks pass different options, or the servers lack memory.

    Example (needs two hosts)::

        model = DistributedDataParallel(nn.Linear(4, 2))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with local_steps(model, inner, SGD(model.parameters(), lr=1.0), every=2):
            for _ in range(4):
                model(torch.ones(3, 4)).sum().backward()
                inner.step()
                inner.zero_grad()
    """
    config = ServersConfig(
        mode="local", local_steps=every, fragments=fragments, delay=delay, mix=mix, wait_for=wait_for,
        late=late, grace_s=grace_s, replicas=replicas,
    )  # fmt: skip
    kind = LocalSteps if wait_for is None else RoundsOfLocalSteps
    return kind(model, inner, outer, config, log=log)


class LocalSteps(ServersUpdate):
    """Each worker steps on its own, and all exchange every few steps (mode ``local``; DiLoCo).

    In a run, exchanges come early where all workers need the same weights: at lines of the record,
    evaluations and checkpoints.

    Args:
        model: as in :func:`local_steps`.
        inner: as there.
        outer: as there.
        config: the number of local steps, and the options of exchanges.
        log: as there.
        own: tensors that each worker changes on its own, besides the statistics of batch norms: averaged, as
            those, in each exchange of all weights.

    Attributes:
        num_exchanges: exchanges so far; with fragments, each of a fragment counts.
        num_local: local steps since the last exchange of all weights.
        is_settled: whether this worker has waited for all others since its last step.
        step: of a run: the steps done.

    Raises:
        UsageError: the model or the outer optimizer is not supported.
    """

    is_synchronous = False

    def __init__(
        self,
        model: DistributedDataParallel,
        inner: Optimizer,
        outer: Optimizer,
        config: ServersConfig,
        *,
        log: Path | None = None,
        own: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(model, inner)
        check_model(model)
        check_outer(outer, model)
        check_buffers(model)
        assert config.local_steps is not None
        self._config, self._outer, self._own = config, outer, own
        self._every, self._group = config.local_steps, python_group(model.process_group)
        self.step, self._is_away = 0, False
        self._weighs, self._batch_tokens = False, 0  # of the batches since the last step
        self._prepare(log)

    def _prepare(self, log: Path | None) -> None:
        """Check what depends on the kind of exchanges, and describe them."""
        self._log = RowLog(log if self._group.rank() == 0 else None)
        self.note = (
            f"each worker steps on its own, and all exchange every {self._every} "
            f"steps{_streaming(self._config)}, and at lines, evaluations and checkpoints; the exchanges are "
            f"in {LOG}"
        )

    def _begin(self, step: int) -> None:
        config = self._config
        self._statistics = statistics_of(self.model)
        self._servers = ServedTensors(self._group, self._outer, replicas=config.replicas)
        self._fragments = fragments_of(self.model.module, self._servers.tables, config.fragments)
        self._ends = [self._every * (k + 1) // config.fragments for k in range(config.fragments)]
        self.num_exchanges = self.num_local = 0
        self._tokens = TokenCounts(config.fragments)
        self.is_settled = True
        self.step = self._exchanged_at = step
        self._configure()
        self._servers.load(self._outer)
        self._outer.state.clear()
        # the weights after the last exchange; while one is under way, the moves
        self._begun = [table.parameter.detach().clone() for table in self._servers.tables]
        self._sent_at = [0] * config.fragments  # local steps, as num_local
        self._under_way: _UnderWay | None = None
        self.model.require_backward_grad_sync = False  # DDP then neither sends nor waits

    def _hook_steps(self) -> None:
        self._hooks.append(self.optimizer.register_step_post_hook(lambda *_: self._end_step()))

    def _end_step(self) -> None:
        """Count a step that the worker has taken or skipped, and exchange the weights that are due after it.

        Raises:
            CommError: a rank or a server was lost.
        """
        self.step += 1
        self._count_tokens()
        self.num_local, self.is_settled = self.num_local + 1, False
        if not self._config.streams:
            if self.num_local == self._every:
                self.exchange()
            return
        self._merge_due()
        position = (self.num_local - 1) % self._every + 1
        if position in self._ends:
            self._send(self._ends.index(position))
            self._merge_due()

    def batches(
        self, loader: Iterable[_Batch], *, tokens_of: TokensOf[_Batch] | None = None
    ) -> Iterator[_Batch]:
        """Yield the loader's batches, without those of rounds that were exchanged while this worker was late.

        All workers' loaders have as many batches.

        Args:
            loader: of this worker.
            tokens_of: counts the tokens, or samples, of a batch, a number of at least 0; on all workers or
                none. The mean of an exchange weighs each worker's change by its tokens. By default by steps.
        """
        self._weighs = tokens_of is not None
        for batch in loader:
            if not self._has_turn():
                continue
            if tokens_of is not None:
                tokens = operator.index(tokens_of(batch))
                if not 0 <= tokens <= MOST_TOKENS:
                    raise UsageError(f"tokens_of(batch) has returned {tokens}; give 0 to {MOST_TOKENS:,}")
                self._batch_tokens += tokens
            yield batch

    def away(self, *, keep: bool = True) -> AbstractContextManager[None]:
        """Leave the exchanges of ``wait_for`` workers for a block, in which this worker takes no steps.

        Exchanges do not wait for this worker meanwhile. Its process stays, and receives weights. After the
        block it continues from the newest weights, with the batches of the steps after the newest exchange.

        Args:
            keep: hand over the change of the steps since the last exchange; the worker then comes back when
                an exchange has taken or dropped it. False drops these steps, as when their weights are lost.

        Raises:
            UsageError: without ``wait_for``, between a batch and its step, or within another such block.

        Example::

            for inputs in rounds.batches(loader):
                ...
                inner.step()
                if host_is_needed_elsewhere():
                    with rounds.away():
                        wait_for_host()
        """
        raise UsageError("away(): all workers wait for each other; give local_steps wait_for=N")

    def _has_turn(self) -> bool:
        """Tell whether the next batch is for this worker: all wait for each other, so none is late."""
        return True

    def _count_tokens(self) -> None:
        """Count the tokens of a step, or the step."""
        self._tokens.add(self._batch_tokens if self._weighs else 1)
        self._batch_tokens = 0

    def bring_state(self) -> None:
        """Average the remaining local steps and fetch the outer optimizer's state. A collective.

        The weights of all workers are then equal. A script that is to continue saves ``inner.state_dict()``
        of each worker.
        """
        self.exchange()
        self._servers.dump(self._outer)

    # ---- of a run ---------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        self._log.go_back(step)
        self._begin(step)

    def state_of(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return what checkpoints hold: each worker's optimizer, and the outer one."""
        inner = InnerState(self.optimizer, self.model.module, self._group.rank())
        return {**kept, "optimizer": inner, "outer": self._outer}

    def runs_ahead(self, *, asks: bool) -> bool:
        return not self.is_settled

    def settle(self) -> bool:
        self.exchange()
        return True

    def step_after(self, number: int) -> int:
        return self.step

    def renew(self, optimizer: Optimizer) -> None:
        """Continue with another optimizer on each worker; the outer one stays. A collective."""
        self.settle()
        self.optimizer = optimizer

    def finish_gradients(
        self, *optimizers: Optimizer, max_norm: float | None, per_worker: bool, loss_scale: float
    ) -> Tensor:
        """Clip this worker's gradients; return their norm."""
        require_same(self.optimizer, optimizers)
        gradients = [p.grad for p in parameters_of(*optimizers) if p.grad is not None]
        self.grad_norm = norm_of(gradients) / loss_scale
        if math.isfinite(self.grad_norm):
            scale_all(gradients, clip_factor(self.grad_norm, max_norm) / loss_scale)
        return torch.tensor(self.grad_norm)

    def apply(self, *optimizers: Optimizer) -> None:
        """Take this worker's step, unless its norm is not finite, and exchange the weights that are due."""
        if math.isfinite(self.grad_norm):
            self.optimizer.step()
        self._end_step()

    # ---- exchanges --------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Exchange all weights, if there were local steps since the last time; all ranks call it.

        With fragments, the one that is under way is merged first.

        Raises:
            CommError: a rank or a server was lost.
        """
        if not self.num_local:
            return
        self._merge()
        left = [k for k, sent_at in enumerate(self._sent_at) if sent_at < self.num_local]
        indices = [index for k in left for index in self._fragments[k]]
        self._configure()
        for work in self._take_moves(left):
            work.wait()
        torch._foreach_copy_([table.parameter.data for table in self._servers.tables], self._begun)
        unite([*self._statistics, *self._own], self.model.process_group)
        self._exchanged_at, local_steps = self._exchanged_at + self.num_local, self.num_local
        self.num_local, self.is_settled, self._sent_at = 0, True, [0] * len(self._fragments)
        self._write(self._exchanged_at, local_steps, indices)

    def _send(self, number: int) -> None:
        """Begin the exchange of a fragment's moves."""
        self._configure()
        works = self._take_moves([number])
        self._under_way = _UnderWay(number, self.num_local, works)

    def _merge_due(self) -> None:
        """Merge the fragment under way, if its delay is over."""
        under_way = self._under_way
        if under_way is not None and self.num_local - under_way.sent_at == self._config.delay:
            self._merge()

    @torch.no_grad()
    def _merge(self) -> None:
        """Wait for the fragment under way, if there is one, and mix its weights with this worker's own."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        for work in under_way.works:
            work.wait()
        self.is_settled = True
        indices = self._fragments[under_way.number]
        parameters = [table.parameter for table in self._servers.tables]
        mix_into(parameters, self._begun, indices, kept_of(self._config))
        number, sent_at = under_way.number, under_way.sent_at
        since, self._sent_at[number] = sent_at - self._sent_at[number], sent_at
        self._write(self._exchanged_at + sent_at, since, indices, fragment=number)

    @torch.no_grad()
    def _take_moves(self, numbers: Sequence[int]) -> list[Any]:
        """Send the moves of these fragments since they were last sent; return works for the weights."""
        works = []
        for number, weight in zip(numbers, self._weights(numbers), strict=True):
            tables = [self._servers.tables[index] for index in self._fragments[number]]
            moves = [self._begun[table.index] for table in tables]
            torch._foreach_sub_(moves, [table.parameter.data for table in tables])
            torch._foreach_mul_(moves, weight)
            works += [self._servers.update(*each) for each in zip(tables, moves, strict=True)]
            for table in tables:
                table.step, table.has_state = table.step + 1, True
        return works

    def _weights(self, numbers: Sequence[int]) -> list[float]:
        """Return the weights of this worker's updates of the fragments, and reset their token counters."""
        if not self._weighs:  # all have taken as many steps
            return [1.0 / self._group.size()] * len(numbers)
        tokens = gather(self._group, self._tokens.take(numbers))
        return [weights_of(each)[self._group.rank()] for each in zip(*tokens, strict=True)]

    def _configure(self) -> None:
        more = f", after {self._every} local steps{_streaming(self._config)}"
        self._servers.configure(self._outer, more)

    def _write(
        self, step: int, local_steps: int, indices: Sequence[int], *, fragment: int | None = None
    ) -> None:
        """Write a line about an exchange of these tensors, after ``step``."""
        self.num_exchanges += 1
        if self._log.path is None:
            return
        sent = [self._begun[index] for index in indices]
        row = {"exchange": self.num_exchanges, "step": step, "local_steps": local_steps}
        row["bytes"] = sum(tensor.nbytes for tensor in sent)
        if fragment is None:
            row["weights"] = checksum(self._begun)
            if self._statistics:
                row["norms"] = checksum(self._statistics)
        else:
            row |= {
                "fragment": fragment,
                "merged": self._exchanged_at + self.num_local,
                "weights": checksum(sent),
            }
        self._log.write(row)


@dataclass
class _UnderWay:
    """A fragment's exchange that has begun: its number, after how many local steps, and works to wait for."""

    number: int
    sent_at: int
    works: list[Any]


class RoundsOfLocalSteps(LocalSteps):
    """Local steps with exchanges that wait for some workers only (``wait_for``).

    An exchange is what a step is in :mod:`shoal.train.servers.waiting`, and the change of the weights, or of
    a fragment of them, is its gradient: a late worker merges the newest weights, and goes on with the local
    steps after the newest exchange. So does one that has handed over a part of its steps. All workers
    synchronize at ends of rounds only, so a run has its lines, evaluations, checkpoints and last step there.
    What no exchange has then, such as the steps of a round that is not whole, all exchange at once.
    """

    def _prepare(self, log: Path | None) -> None:
        config = self._config
        self._schedule = FragmentSchedule(self._every, config.fragments)
        self._fragments = fragments_of(self.model.module, tables_of(self._outer), config.fragments)
        self._rounds = BoundedSteps(
            self.model, self._outer, config, log=log, own=self._own, fragments=self._fragments
        )
        self._parameters: list[Tensor] = [p for p in parameters_of(self._outer) if p.requires_grad]
        self.note = (
            f"each worker steps on its own, and exchanges come every {self._every} steps"
            f"{_streaming(config)}, with {config.rule(self._group.size()).text}; the moves of each are in "
            f"{ROUNDS_LOG}"
        )

    @property
    def num_dropped(self) -> int:
        """Moves of this worker that no exchange has taken."""
        return self._rounds.num_dropped

    def _has_turn(self) -> bool:
        self._passed += 1
        return self._passed == self.step + 1

    @contextmanager
    def away(self, *, keep: bool = True) -> Iterator[None]:
        if self._is_away:
            raise UsageError("away() within away(): this worker has left the exchanges already")
        if self._passed == self.step + 1:
            raise UsageError("away() with a batch under way: it belongs after inner.step()")
        has_steps = self.step > self._schedule.end_of(self._rounds.next_step - 1)
        if keep and has_steps and self._waits_since is None:
            self._send_moves()
        self._rounds.leave()
        self._is_away = True
        yield
        self._is_away = False
        self._come_back()

    def open(self, step: int) -> None:
        self._rounds.open(step // self._every * self._config.fragments)
        self._begin_rounds(step)

    def _begin(self, step: int) -> None:
        self._rounds._begin(0)
        self._begin_rounds(step)

    def _begin_rounds(self, step: int) -> None:
        self.step = self._passed = step  # batches of the loader
        self._tokens = TokenCounts(self._config.fragments)
        self._waits_since: int | None = None  # the step after which the exchange under way was begun
        self.is_settled, self._asks = True, False
        self._is_away = False
        # the weights of the last exchanges that this worker has merged
        self._begun = [parameter.detach().clone() for parameter in self._parameters]

    def check_synchronized(self, frequencies: Mapping[str, int], steps: Sequence[int]) -> None:
        for name, frequency in frequencies.items():
            self._require_end(f"run.{name}", frequency)
        for step in steps:
            self._require_end("the end of an epoch or of the run at step", step)

    def _require_end(self, name: str, step: int) -> None:
        if step % self._every:
            raise UsageError(
                f"servers.wait_for with {name} {step}: all workers synchronize at ends of rounds only; give "
                f"a multiple of servers.local_steps {self._every}"
            )

    def runs_ahead(self, *, asks: bool) -> bool:
        self._asks = asks
        last = -(-(self._rounds.until or 0) // self._config.fragments) * self._config.fragments
        if self.step == self._schedule.end_of(last):
            self.settle()
        return not self.is_settled

    def settle(self) -> bool:
        if not self.is_settled:
            self._require_end("an evaluation or a checkpoint after step", self.step)
            self._finish_exchange()
            self._rounds.synchronize(left=self._left())
            self._restart()
        return True

    def _end_step(self) -> None:
        if self._is_away:
            raise UsageError("inner.step() within away(): a worker that is away takes no steps")
        self.step, self.is_settled = self.step + 1, False
        self._count_tokens()
        if self._waits_since is not None and self.step == self._waits_since + self._config.delay:
            self._merge()
        if self._waits_since is None and self._is_due():
            self._send_moves()
            if not self._config.delay:
                self._merge()

    def bring_state(self) -> None:
        self._bring_state(ends=False)

    def _end(self) -> None:
        self._bring_state(ends=True)

    def row(self) -> record.Contributions:
        """Return the counts of moves since the last such row."""
        return self._rounds.take_row(self.step)

    def _bring_state(self, *, ends: bool) -> None:
        self._finish_exchange()
        self._rounds.bring_state(ends=ends, left=None if self.is_settled else self._left())
        self._restart()

    def _is_due(self) -> bool:
        """Tell whether this worker hands over its moves now."""
        return self.step == self._schedule.end_of(self._rounds.next_step) or self._rounds.is_closing

    def _send_moves(self) -> None:
        """Hand over this worker's moves of the fragment that is next."""
        self._waits_since = self.step
        number = self._schedule.fragment_of(self._rounds.next_step)
        (tokens,) = self._tokens.take([number])
        moves = self._moves(self._fragments[number])
        self._rounds.send(moves, None, asks=self._asks, share=Share(self.step, tokens))

    @torch.no_grad()
    def _merge(self) -> None:
        """Wait for the exchange under way, and mix the newest weights with this worker's own.

        A worker that was late leaves out the local steps up to the newest exchange.
        """
        after, self._waits_since = self._rounds.next_step - 1, None
        self._rounds.wait_for_step()
        self._rounds.take_newest(into=self._begun)
        newest = self._rounds.next_step - 1
        merged = [self._schedule.fragment_of(each) for each in self._schedule.changed(after, newest)]
        indices = itertools.chain(*(self._fragments[number] for number in merged))
        mix_into(self._parameters, self._begun, indices, kept_of(self._config))
        sent = self._schedule.fragment_of(after + 1)
        self._tokens.take([number for number in merged if number != sent])
        self.step = max(self.step, self._schedule.end_of(newest))

    @torch.no_grad()
    def _come_back(self) -> None:
        """Go on from the newest weights, once the moves that were handed over are settled."""
        if self._waits_since is not None:
            self._waits_since = None
            self._rounds.wait_for_step()
        self._rounds.come_back(self.step)
        self._rounds.take_newest(into=self._begun)
        torch._foreach_copy_(self._parameters, self._begun)
        self._tokens.take(range(self._config.fragments))
        self.is_settled = False
        self.step = max(self.step, self._schedule.end_of(self._rounds.next_step - 1))

    def _finish_exchange(self) -> None:
        if self._is_away:
            raise UsageError("bring_state() within away(): all workers take part in it")
        if self._waits_since is not None:
            self._merge()

    def _left(self) -> LeftMoves:
        """Return the moves that no exchange has, where all workers have taken the same steps."""
        left = self._schedule.left_at(self._rounds.next_step - 1, self.step)
        indices = [index for number in left for index in self._fragments[number]]
        return LeftMoves(self.step, left, self._moves(indices), self._tokens.take(left))

    @torch.no_grad()
    def _moves(self, indices: Sequence[int]) -> list[Tensor]:
        return [self._begun[index] - self._parameters[index].detach() for index in indices]

    @torch.no_grad()
    def _restart(self) -> None:
        """Go on from the weights that all workers have."""
        self._rounds.copy_all(self._begun)
        torch._foreach_copy_(self._parameters, self._begun)
        self._tokens.take(range(self._config.fragments))
        self.is_settled = True


@torch.no_grad()
def mix_into(
    parameters: Sequence[Tensor], begun: Sequence[Tensor], indices: Iterable[int], kept: float
) -> None:
    """Mix the servers' weights into a worker's own, in place.

    Args:
        parameters: the worker's.
        begun: the servers' weights.
        indices: of the tensors that are mixed.
        kept: part of the own weights in the result.
    """
    chosen = list(indices)
    if not chosen:
        return
    own, theirs = [parameters[index].detach() for index in chosen], [begun[index] for index in chosen]
    if kept:
        torch._foreach_lerp_(own, theirs, 1.0 - kept)
    else:
        torch._foreach_copy_(own, theirs)


def kept_of(config: ServersConfig) -> float:
    """Return the part of a worker's own weights that a merge keeps: without a delay none."""
    return config.mix if config.delay else 0.0


def _streaming(config: ServersConfig) -> str:
    """Return words that follow "exchange every 50 steps"; empty if all weights are exchanged at once."""
    if not config.streams:
        return ""
    mixed = f" ({config.mix:g} of the own weights kept)" if config.delay else ""
    return f" in {config.fragments} fragments, each merged {plural(config.delay, 'step')} later{mixed}"


class InnerState:
    """State of each worker's own optimizer in checkpoints, named ``RANK.ENTRY.PARAMETER``.

    A worker that continues reads the state of its rank; a rank without one begins without state.

    Args:
        optimizer: of this worker.
        model: whose parameters it steps.
        rank: of this worker.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, rank: int) -> None:
        self._optimizer, self._rank = optimizer, rank
        self._parameters = dict(model.named_parameters())

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this worker's tensors, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
                tensors[f"{self._rank}.{key}.{name}"] = tensor
        return tensors

    def tensors_to_read(self, saved: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Return empty tensors for those that the worker of this rank has saved.

        Those of a parameter's shape have its memory layout, as the optimizer expects.

        Raises:
            UsageError: the checkpoint has one state for all workers.
        """
        targets = {}
        for full, stored in saved.items():
            rank, _, name = full.split(".", 2)
            if not rank.isdecimal():
                raise UsageError(
                    "servers.mode local: the checkpoint was written without, and holds one state of the "
                    "optimizer for all workers; continue without --servers.mode local, or start a new run "
                    "from its model"
                )
            if int(rank) == self._rank and name in self._parameters:
                parameter = self._parameters[name]
                if stored.size == tuple(parameter.shape):
                    targets[full] = torch.empty_like(parameter)
                else:  # a count of steps, or the rows and columns of Adafactor
                    dtype = parameter.dtype if stored.size else torch.float32
                    targets[full] = torch.empty(stored.size, dtype=dtype, device=parameter.device)
        return targets

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the optimizer's state."""
        self._optimizer.state.clear()
        for full, tensor in tensors.items():
            _, key, name = full.split(".", 2)
            self._optimizer.state[self._parameters[name]][key] = tensor


def fragments_of(model: nn.Module, tables: Sequence[Table], count: int) -> list[list[int]]:
    """Divide tensors into fragments of whole layers, in the order of the model, of about equal size.

    Args:
        model: the module that DDP has wrapped. The parameters of one of its modules are a layer.
        tables: of its parameters.
        count: number of fragments. The sum of their squared sizes is as small as possible.

    Returns:
        Indices of the tensors of each fragment.

    Raises:
        UsageError: there are fewer layers.
    """
    if count == 1:
        return [list(range(len(tables)))]
    index_of = {id(table.parameter): table.index for table in tables}
    named = [(name, index_of[id(p)]) for name, p in model.named_parameters() if id(p) in index_of]
    grouped = itertools.groupby(named, key=lambda each: each[0].rpartition(".")[0])
    layers = [[index for _, index in group] for _, group in grouped]
    if count > len(layers):
        raise UsageError(
            f"local steps in {count} fragments: a fragment has whole layers, and the model has "
            f"{len(layers)}; take at most {len(layers)} fragments"
        )
    sizes = [sum(tables[index].parameter.numel() for index in layer) for layer in layers]
    ranges = itertools.pairwise(_even_cuts(sizes, count))
    return [[index for layer in layers[begin:end] for index in layer] for begin, end in ranges]


def _even_cuts(sizes: Sequence[int], count: int) -> list[int]:
    """Return the bounds of ``count`` ranges, of which the sum of squared sizes is the least (by dynamic
    programming)."""
    sums = np.array([0.0, *sizes]).cumsum()
    squares = (sums[None, :] - sums[:, None]) ** 2
    squares[np.tril_indices(len(sums))] = np.inf  # of ranges that are empty
    best, choices = squares[0], []
    for _ in range(count - 1):
        totals = best[:, None] + squares
        choices.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    cuts = [len(sizes)]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return [0, *reversed(cuts)]
