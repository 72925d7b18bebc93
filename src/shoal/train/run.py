"""Runs a training session: workers, checkpoints, signals and records around a loop of the user's script.

    with Run.open("runs/mine") as run:
        model = run.data_parallel(Net())
        optimizer = Lamb(model.parameters(), lr=1e-3)
        run.keep(model=model.module, optimizer=optimizer)      # restores if there is a checkpoint
        for step in run.steps(dataset, Sizes(global_batch_size=256), until=1_000):
            with step:
                for inputs, labels in step:
                    step.backward(F.cross_entropy(model(inputs), labels, reduction="sum") / step.num_samples)
                step.update(optimizer, max_norm=1.0)
            if run.due(every=100):
                run.evaluation("validation", {"accuracy": accuracy(model)}, num_samples=10_000)
        sys.exit(run.finish())

1. :meth:`Run.open` joins the workers that torchrun, mpirun or ``shoal train`` have started (or runs as the
   only one), locks the run directory and handles the signals that ask to stop.
2. :meth:`Run.keep` registers the state of checkpoints and restores the newest undamaged one.
3. :meth:`Run.steps` yields a :class:`Step` per optimizer step. Before each, all workers agree in one small
   collective on stops, losses that are not finite, and the number of targets of the global batch.
4. ``with step`` is a transaction. The block computes gradients; leaving it clips them, updates the weights
   and writes the log line if one is due. A block that raises leaves weights, optimizer state, loss scale,
   buffers and counters as they were; after :class:`~shoal.errors.RetryStep` the same batch is yielded again.
5. The scores of :meth:`Run.evaluation` may end the run before its last step (``until`` of the settings). All
   workers agree on this in the same collective.
6. A due checkpoint is saved when the loop requests the next step, after any evaluation. A run that was killed
   during an evaluation resumes before it and repeats it.

The loop, the loss and the update are in the script: ``Run`` never calls back into it during training.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal import record
from shoal.atomic_io import write_atomically
from shoal.data.loader import copies_to
from shoal.data.sources import IterableSource, StepSource, as_source, digest_of_rows
from shoal.data.steps import DataShard
from shoal.decide.batch import BatchPlan, BatchSizes, Shares, plan_batch
from shoal.decide.rng import Stream, random_keys
from shoal.env.launcher import worker_env
from shoal.env.machine import compiler_problem
from shoal.env.settings import progress_file
from shoal.env.worker import WorkerEnv, alone
from shoal.errors import EXIT_OK, EXIT_STOPPED, UsageError, is_out_of_memory
from shoal.train.checkpoint import Checkpointer, Restored
from shoal.train.checkpoint_state import flatten
from shoal.train.config import (
    DistributedConfig,
    LoopConfig,
    RunOutputConfig,
    ServersConfig,
    as_tree,
    check_wire,
    refuses_fp16,
    required,
)
from shoal.train.evaluations import Evaluations, as_numbers, load_weights
from shoal.train.gradients import (
    DataParallel,
    LossScale,
    Precision,
    Update,
    agree_on_precision,
    wrap_model,
)
from shoal.train.mlperf_log import MLPerfLog
from shoal.train.reporting import (
    Progress,
    RowWriter,
    RunLog,
    RunningMetrics,
    Speed,
    StepTimer,
    device_name,
    peak_memory_bytes,
    versions,
)
from shoal.train.run_dir import open_run_dir, owned
from shoal.train.step import Step, Training
from shoal.train.stopping import (
    StopRequest,
    Target,
    end_in_one_line,
    not_finite,
    out_of_memory,
    read_target,
)
from shoal.train.world import World, join_world, run_on_all

end_in_one_line()  # settings, which a script makes before it opens a run, are checked too

_MOST_GRAPHS = 64
"""Of one compiled function."""
_FEW_MICRO_BATCHES = 4
"""With fewer micro-batches per step, one more for a faster worker is a large change of its share."""
_FOLLOW_STEPS = 8
"""Steps between two adaptations of the shares of backend shoal's servers."""

Batch = Any
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a batch: in samples of one optimizer step over all workers, and per forward pass."""

    global_batch_size: int
    micro_batch_size: int | None = None
    """Default: the largest divisor of a worker's share up to 64."""


class Run:
    """A training session; made by :meth:`open`.

    Example (one process; under torchrun the workers share each batch of 8):

        >>> dataset = [(torch.randn(4), torch.tensor(number % 2)) for number in range(32)]
        >>> with Run.open("runs/session") as run:
        ...     model = run.data_parallel(nn.Linear(4, 2))
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     run.keep(model=model.module, optimizer=optimizer)
        ...     for step in run.steps(dataset, Sizes(global_batch_size=8), until=10):
        ...         with step:
        ...             for inputs, labels in step:
        ...                 loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        ...                 step.backward(loss / step.num_samples)
        ...             step.update(optimizer, max_norm=1.0)
        ...     run.finish()
        0

    Attributes:
        world: rank, number of workers, device and the process groups.
        directory: the run directory; ``None`` for an inner run, which writes nothing.
        seed: of weights, data order and dropout.
        step: optimizer steps done, counted over the whole run.
        log: writes the record; ``None`` on all workers but the first.
        timer: times the parts of a step.
        stop_request: the signal that asked to stop, if any.
        stopped: whether a signal asked to stop; :meth:`steps` then yields nothing more.
        is_over: whether an earlier process group has ended the run; known once :meth:`steps` has begun.
        reached: whether the last evaluations reached the target of the settings; known once the steps have
            ended.
        to_device: returns a micro-batch, or a part of it, with its tensors on the device, for loops with
            ``on_host``; copies from pinned memory run concurrently with the queued kernels of a GPU.
        lines: steps that have a line in the record besides those of the settings, such as ends of epochs.
        num_parameters: for the record; :meth:`keep` counts those of ``model``, or else of all models.
        epoch_samples: samples of an epoch, for a run that is defined in epochs.
    """

    def __init__(
        self,
        world: World,
        directory: Path | None,
        *,
        config: object | None,
        settings: RunOutputConfig,
        loop: LoopConfig,
        distributed: DistributedConfig,
        servers: ServersConfig,
        precision: Precision,
        recipe: str,
        stop: StopRequest,
        target: Target | None = None,
    ) -> None:
        self.world, self.directory, self.seed = world, directory, loop.seed
        self.recipe, self.unit = recipe, getattr(config, "unit", "samples")
        self._precision, self._is_autocast = precision, False
        self.timer = StepTimer(world.device)
        self.log: RunLog | None = None
        self.step = 0
        self.stopped = self.is_over = self.reached = False
        self.lines: Sequence[int] = ()
        self._evaluations = Evaluations(directory, world, target)
        self._config, self._settings, self._loop = config, settings, loop
        self._distributed, self._servers = distributed, servers
        self.stop_request, self._tree = stop, _tree(config, precision)
        self._checkpointer: Checkpointer | None = None
        if directory is not None and settings.save:
            self._checkpointer = Checkpointer(directory, keep=settings.keep_checkpoints)
        self._progress_file = progress_file() if world.is_main else None
        self._nonfinite_steps = self._own_bad_steps = 0
        self._metrics = RunningMetrics(self.sum)
        self._speed = Speed()
        self._mlperf_log: RowWriter | None = None
        self.to_device = copies_to(world.device)
        self._kept: dict[str, Any] = {}
        self._training = Training(
            world=world,
            timer=self.timer,
            copies=self.to_device,
            scale=self._fresh_scale(),
            update=Update(on_device=world.device.type == "cuda"),
            seed_key=int(random_keys(loop.seed, Stream.DROPOUT, world.place.rank).item()),
            kept=self._kept,
            saves=self._checkpointer is not None,
        )
        self._notes = [precision.note] if precision.note else []
        self._restored: Restored | None = None
        self._samples, self._until, self._total = 0, 0, 0
        self._batch: BatchPlan | None = None
        self._shares: Shares | None = None
        self._checked: StepSource | None = None  # its first micro-batches were looked at
        self._section = "train"
        self.num_parameters, self.epoch_samples = 0, 0
        self._unread: list[Step] = []  # done, but their losses and norms are not counted yet
        self._current: Step | None = None
        self._stack = ExitStack()
        self._began = self._last_end = time.monotonic()

    @classmethod
    @contextmanager
    def open(
        cls,
        directory: Path | str | None = None,
        *,
        config: object | None = None,
        settings: RunOutputConfig | None = None,
        loop: LoopConfig | None = None,
        distributed: DistributedConfig | None = None,
        servers: ServersConfig | None = None,
        recipe: str = "script",
        immutable: Sequence[str] = (),
        scores: Mapping[str, Sequence[str]] | None = None,
        worker: WorkerEnv | None = None,
    ) -> Iterator[Run]:
        """Join the workers and open or continue the run in ``directory``.

        Args:
            directory: on a file system that all hosts share; the same directory continues the run. Default:
                ``dir`` of the settings.
            config: a dataclass of dataclasses to write beside the run and into checkpoints. Its sections
                ``run``, ``train``, ``distributed`` and ``servers`` are the next four arguments by default.
                Messages use its attributes ``unit`` (what samples are called, such as ``images``),
                ``memory_remedy`` (an option to name beside the micro-batch size when memory runs out),
                ``longer`` (the option that makes a finished run longer) and ``scores``, where it has them.
            settings: how often to write lines and checkpoints.
            loop: seed, precision, loss scale.
            distributed: backend, device, timeouts, wire format.
            servers: updates by servers; default: each worker runs the optimizer.
            recipe: written into the record.
            immutable: dotted names of settings that must not differ when a run continues.
            scores: names of the scores passed to :meth:`evaluation`, by split; ``until`` of the settings may
                name them.
            worker: rank and hosts of this process; default: from the launcher's environment variables.

        Raises:
            UsageError: the directory cannot be written, another job uses it, an immutable setting differs,
                ``until`` names a score that the run will not have, or workers differ in their precision.
            ShoalError: a worker was lost, or memory ran out.
        """
        settings = settings or _section(config, "run", RunOutputConfig)
        if settings.evaluate is not None:
            settings = replace(settings, save=False, until=None, validation_beside=0, mlperf_log=None)
        loop = loop or _section(config, "train", LoopConfig)
        distributed = distributed or _section(config, "distributed", DistributedConfig)
        servers = servers or _section(config, "servers", ServersConfig)
        check_wire(distributed, servers, precision=loop.precision, clip="global")
        scores = getattr(config, "scores", {}) if scores is None else scores
        target = read_target(settings.until, scores)
        directory = Path(directory or required(settings.dir))
        stop = StopRequest()
        with ExitStack() as stack:
            worker = worker or worker_env() or alone(Path(stack.enter_context(TemporaryDirectory())))
            world = stack.enter_context(join_world(worker, distributed))
            end_in_one_line()
            precision = agree_on_precision(
                loop.precision, world, no_fp16=refuses_fp16(config, loop, distributed, servers)
            )
            stack.enter_context(owned(directory, world))
            tree = _tree(config, precision)
            run_on_all(
                world.control, lambda: open_run_dir(directory, tree, immutable) if world.is_main else None
            )
            run = cls(
                world, directory, config=config, settings=settings, loop=loop, distributed=distributed,
                servers=servers, precision=precision, recipe=recipe, stop=stop, target=target,
            )  # fmt: skip
            stack.enter_context(run._stack)
            if (path := settings.mlperf_log) is not None:
                names = target.names if target is not None else frozenset()
                run_on_all(world.control, lambda: run._log_for_mlperf(path, names))
            try:
                yield run
            except (RuntimeError, MemoryError) as error:
                if run._batch is None or not is_out_of_memory(error):
                    raise
                remedy = getattr(config, "memory_remedy", "a smaller model")
                section = run._section if run._has(run._section, "micro_batch_size") else None
                raise out_of_memory(error, run._batch, remedy, section=section) from error
            finally:  # what has threads of its own ends before the process groups do
                run._evaluations.close()
                run._kept.clear()
                run._training.models.clear()
                run._checkpointer = run._current = None

    @property
    def batch(self) -> BatchPlan:
        """The arithmetic of the batch, once :meth:`steps` has begun."""
        assert self._batch is not None, "run.steps() has not begun"
        return self._batch

    @property
    def precision(self) -> Precision:
        """The autocast type, the same on all workers; models of :meth:`data_parallel` apply it themselves.

        A run that has no such model, and has not asked for this before its first step, computes as the script
        says; so does its record.
        """
        self._is_autocast = True
        return self._precision

    # ---- what is trained --------------------------------------------------------------------------------

    def data_parallel(self, model: nn.Module, *, average: bool = True) -> DataParallel:
        """Move ``model`` to the device and wrap it so that backward averages its gradients over all workers.

        Args:
            average: whether backward averages. Otherwise each worker clips its own gradient, and
                :meth:`Step.update` averages.

        Raises:
            UsageError: 8-bit gradients on a GPU.
        """
        ddp = wrap_model(
            model.to(self.world.device), self.world, self._distributed, self.precision, self.timer.lap
        )
        ddp.average = average
        ddp.settle_buckets()
        self._training.models.append(ddp)
        return ddp

    def compile(self, module: nn.Module, *, dynamic: bool | None = None, by_default: bool = True) -> None:
        """Compile ``module`` in place with ``torch.compile`` if the settings ask for it.

        Args:
            module: the model that :meth:`data_parallel` has wrapped, or a part of it.
            dynamic: whether shapes vary; default: torch detects it.
            by_default: if the settings have no value, compile on a GPU if there is a C compiler.
        """
        wanted = self._loop.compile
        if wanted is None and by_default and self.world.device.type == "cuda":
            problem = compiler_problem()
            wanted = not problem
            if problem:
                self._notes.append(f"not compiled: {problem}")
        if not wanted:
            return
        # Dynamo cuts a graph at DDP's buckets, so that sums begin early. One worker sums nothing, and of a
        # model that compiles its layers one by one they begin early anyway.
        if self.world.num_workers == 1 or type(module).compile is not nn.Module.compile:
            torch._dynamo.config.optimize_ddp = False
        # The layers of a text model share one function, with a graph for each kind of layer and of batch.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
        module.compile(dynamic=dynamic)

    def keep(self, **stateful: Any) -> None:
        """Register the state of checkpoints, and restore it if the run has a checkpoint.

        A second call replaces the named objects without restoring them, for example to use a new optimizer in
        the middle of a run. It also resets the loss scale.

        Args:
            stateful: models (not wrapped), optimizers, tensors, plain values.

        Raises:
            ShoalError: there are checkpoints and all are damaged.
            UsageError: the model or the optimizer is not the one that was saved; a later call has a new name;
                or steps are taken elsewhere (served, bounded, local) and there is not one optimizer.
        """
        first = not self._kept
        if not first and (late := sorted(stateful.keys() - self._kept.keys())):
            raise UsageError(
                f"run.keep() was called before without {', '.join(late)}, and restores what its first call "
                "is given: give all to one call"
            )
        self._kept.update(stateful)
        if first and self._settings.evaluate is None:
            self._choose_update()
        named = {"model": stateful["model"]} if "model" in stateful else stateful
        models = [each for each in named.values() if isinstance(each, nn.Module)]
        self.num_parameters = self.num_parameters or sum(p.numel() for m in models for p in m.parameters())
        if self._settings.evaluate is not None:
            self.step, self._samples = load_weights(self._settings.evaluate, self._kept, self.world)
            return
        if not first:
            self._training.scale = self._fresh_scale()
        elif self._checkpointer is not None:
            self._restored = self._checkpointer.restore(self._state())
        if first and self._restored:
            self.step, self._samples = self._restored.step, int(self._restored.values["samples"])
            self._training.scale.load_state_dict(self._restored.values["loss_scale"])
        update = self._training.update
        if first:
            update.open(self.step)
            self._notes += [update.note] if update.note else []
        elif isinstance(optimizer := stateful.get("optimizer"), Optimizer):
            update.renew(optimizer)

    def _choose_update(self) -> None:
        """Use the update of the settings, if they name one."""
        from shoal.train.servers.choice import choose_update

        update = choose_update(
            self._servers, self._kept, self._training.models, scale=self._training.scale,
            directory=self.directory,
        )  # fmt: skip
        if update is not None:
            self.use(update)

    def use(self, update: Update) -> None:
        """Replace how a step's gradients are measured and become new weights (:class:`Update`)."""
        self._training.update = update

    # ---- the loop ---------------------------------------------------------------------------------------

    def steps(
        self,
        data: Any,
        batch: BatchPlan | BatchSizes,
        *,
        until: int,
        since: int = 0,
        total: int | None = None,
        targets: Callable[[Batch], int] | None = None,
        replica: tuple[int, int] | None = None,
        on_host: bool = False,
        section: str = "train",
        phase: tuple[str, int] | None = None,
        references: Mapping[str, float] | None = None,
        notes: Sequence[str] = (),
    ) -> Iterator[Step]:
        """Yield the remaining optimizer steps, up to step ``until``.

        Args:
            data: a :class:`~shoal.data.sources.StepSource`; an indexable dataset, whose order is then exact
                at any number of workers; or a DataLoader or another iterable of micro-batches, each worker
                its own.
            batch: sizes of the global batch and the micro-batch, or a finished plan.
            until: number of the last step, counted over the whole run from 1.
            since: number of the last step before this data.
            total: last step of the whole run; default: ``until``.
            targets: counts the targets of a micro-batch, for :attr:`Step.num_targets`.
            replica: (index, number of replicas) of this worker's data-parallel replica, if a replica has
                several workers (pipelines).
            on_host: leave micro-batches on the host; the loop moves what it needs to the device.
            section: where the batch stands in the settings, for messages.
            phase: (name, sequence length) for the record, where the loop is one of several.
            references: lines to draw in the plots of evaluation metrics.
            notes: lines to print at the beginning.

        Raises:
            UsageError: the batch does not divide; nothing is kept; the first micro-batch of an iterable has
                another size, or is the same on all workers.
            ShoalError: the loss was not finite too often in a row; damaged data; a lost worker.
        """
        if self._checkpointer is not None and not flatten(self._kept).tensors:
            raise UsageError(
                "checkpoints would be empty: call run.keep(model=model, optimizer=optimizer) before "
                "run.steps, or train without, Run.open(settings=RunOutputConfig(save=False))"
            )
        index, num_replicas = replica or (self.world.place.rank, self.world.num_workers)
        if not isinstance(batch, BatchPlan):
            batch = plan_batch(batch, num_replicas, section=section, unit=self.unit)
        if self._settings.evaluate is not None:
            until = total = self.step
        self._batch, self._section, self._until, self._total = batch, section, until, total or until
        self._training.update.check_synchronized(self._settings, [*self.lines, until])
        self._count_steps()
        if (restored := self._restored) is not None and self.step == restored.step:
            self.is_over = self._evaluations.has_ended(self.step, self._total)
        if self.is_over:
            return
        source = as_source(data, seed=self.seed)
        self._shares = self._open_shares(source, replace(batch, replicas=replica is not None))
        self._evaluations.open_beside(self._settings.validation_beside, self.step)
        if self.directory is not None and not self.stopped:
            self._begin(batch, references or {}, [f"batch: {batch}", *self._notes, *notes])
        if phase is not None and self.log and self.step == since:
            self.log.write(
                record.Phase(
                    step=since + 1,
                    last_step=until,
                    name=phase[0],
                    sequence_length=phase[1],
                    global_batch_size=batch.global_batch_size,
                    micro_batch_size=batch.micro_batch_size,
                    accumulation_steps=batch.accumulation_steps,
                )
            )
        self.timer.reset()
        while self.step < until and not self.stopped and not self.reached:
            left = range(self.step - since, until - since)
            shard = DataShard(
                global_batch_size=batch.global_batch_size,
                micro_batch_size=batch.micro_batch_size,
                rank=index,
                num_workers=num_replicas,
                shares=self._shares.current if self._shares else (),
            )
            yield from self._attempt(source, shard, left, targets, on_host)
        if (
            self.step == until
            and self._evaluations.has_target
            and self.sum([self._evaluations.is_reached()])[0]
        ):
            self._reach()

    def _attempt(
        self,
        source: StepSource,
        shard: DataShard,
        steps: range,
        targets: Callable[[Batch], int] | None,
        on_host: bool,
    ) -> Iterator[Step]:
        """Yield steps until all are done, a stop is asked for, one has to be repeated, or shares change."""
        pin_memory, begin = self.world.device.type == "cuda", self.step
        with closing(source.open(shard, steps, pin_memory=pin_memory)) as batches:
            for index, micro_batches in zip(steps, batches, strict=False):
                number = begin + index - steps.start + 1
                if number <= self.step:
                    continue  # its step was taken while this worker was late
                own_targets = sum(map(targets, micro_batches)) if targets else 0
                self.timer.lap("data")
                self._evaluations.poll(self.log)
                num_targets = own_targets * self.world.num_workers  # the mean is over this worker's part
                update = self._training.update
                if not update.runs_ahead(asks=self._wants_to_end()):
                    self._require_own_rows(source, micro_batches, shard, index)
                    total = self._agree(own_targets, source, shard, index)
                    if total is None:
                        return
                    if update.is_synchronous:
                        num_targets = total
                step = self._current = Step(
                    self._training,
                    number,
                    micro_batches,
                    shard,
                    num_targets=max(num_targets, 1),
                    commit=self._commit,
                    on_host=on_host,
                )
                yield step
                if not step.is_done:
                    return
                if self.due(self._settings.checkpoint_frequency):
                    self.save()
                self._report_checkpoints()
                self.timer.begin_step()

    def _require_own_rows(self, source: StepSource, batches: Any, shard: DataShard, index: int) -> None:
        """Check the first micro-batches of an iterable; all workers call it."""
        if not isinstance(source, IterableSource) or not source.checked or source is self._checked:
            return
        self._checked = source
        size = shard.micro_batch_size if index == 0 else None  # later one may be the last of an epoch
        found = run_on_all(self.world.control, lambda: digest_of_rows(batches, size))
        if 1 < self.world.num_workers == shard.num_workers and found[0] and len(set(found)) == 1:
            raise UsageError(
                f"all {len(found)} workers were given the same rows by the {type(source.batches).__name__} "
                "of run.steps: give each its own part, as DataLoader(..., sampler=DistributedSampler(...)) "
                "or datasets.distributed.split_dataset_by_node do, or an indexable dataset, which run.steps "
                "divides; data that has to be the same: IterableSource(batches=..., checked=False) of "
                "shoal.data.sources"
            )

    def _agree(self, num_targets: int, source: StepSource, shard: DataShard, index: int) -> int | None:
        """Agree with all workers before a step; return the targets of its global batch.

        ``None``: the step is not to come, or not from these batches.
        """
        most, update = self._loop.max_nonfinite_steps, self._training.update
        counted = 1 if update.is_synchronous else most  # steps of this worker since the last agreement
        bad = self._own_bad_steps >= counted
        stops = self.stop_request.requested is not None
        sums = self.sum([num_targets, bad, stops, self._evaluations.is_reached(), *self._busy_s()])
        self.timer.lap("other")
        total, num_bad, num_stops, num_reached = map(int, sums[:4])
        self._nonfinite_steps = self._nonfinite_steps + counted if num_bad else 0
        if self._nonfinite_steps >= most:
            rates = "optim" if self._section == "train" else self._section
            section = rates if self._has(rates, "learning_rate") else None
            behind = 1 + len(self._unread)  # the step whose loss it is
            names = source.names(shard, index - behind)
            raise not_finite(self._nonfinite_steps, self.step + 1 - behind, names, section=section)
        if num_reached:
            self._reach()
            return None
        if num_stops:
            self._save_and_stop()
            return None
        if self._shares is not None and self._shares.observe(self.step + 1, sums[4:]):
            self._tell_shares(self._shares)
            return None
        if not update.on_servers and self.step % _FOLLOW_STEPS == 0:
            self.world.follow_rates()
        return total

    def _has(self, section: str, field: str) -> bool:
        """Return whether the settings have it, and so the command an option; a script has its own."""
        return hasattr(getattr(self._config, section, None), field)

    def _wants_to_end(self) -> bool:
        """Return whether this worker has a reason to end the run."""
        is_bad = self._own_bad_steps >= self._loop.max_nonfinite_steps
        return is_bad or self.stop_request.requested is not None

    def _settle(self) -> None:
        """Wait until all workers have taken the same steps. A collective."""
        if self._training.update.settle():
            self.timer.lap("gradient_wait")

    def due(self, every: int | Sequence[int] | None, *, evaluation: bool = False) -> bool:
        """Return whether the last step is a multiple of ``every``, or one of the listed steps.

        If ``every`` is a number or ``None``, the last step of the loop is due too. After a step that will be
        repeated nothing is due.

        Args:
            every: a number of steps, or a list of steps.
            evaluation: whether the loop evaluates the model if the result is true. If evaluations run beside
                training, the call requests one there and returns true only for the last step.
        """
        if (self._current is not None and not self._current.is_done) or not self._is_due(every):
            return False
        self._settle()
        if not evaluation or self.step == self._until:
            return True
        if not self._evaluations.request(self.step, self._kept, self._samples):
            return True
        self.timer.lap("other")
        return False

    def _is_due(self, every: int | Sequence[int] | None) -> bool:
        if isinstance(every, Sequence):
            return self.step in every
        return self.step == self._until or bool(every and self.step % every == 0)

    def evaluation(self, split: str, metrics: Mapping[str, float | Tensor], *, num_samples: int) -> None:
        """Write scores of the step just done to the record and the terminal.

        Their time counts from the end of the step, or from the last evaluation.

        Args:
            split: what was evaluated, such as ``validation``.
            metrics: numbers or tensors of one element by name; only those of the first worker are used.
            num_samples: number of samples that were evaluated.

        Raises:
            UsageError: a score is no number.
        """
        now = time.monotonic()
        row = record.Evaluation(
            step=self.step, split=split, num_samples=num_samples, metrics=as_numbers(metrics),
            seconds=now - self._last_end, samples=self._samples,
        )  # fmt: skip
        if self.log:
            self.log.write(row)
        self._evaluations.scores[split] = row.metrics
        self._last_end = now
        self.timer.begin_step()

    def lacks_scores(self, split: str | None = None) -> bool:
        """Return whether the last step has no scores after the loop. A collective: all workers call it.

        This happens if an earlier process did that step and was stopped before its evaluation.

        Args:
            split: the split of the scores; default: any.
        """
        if self.directory is None or self.stopped or self.is_over:
            return False
        if self._settings.evaluate is not None:
            return not self._evaluations.scores
        self._settle()
        return self._evaluations.lacks(self.step, split)

    def sum(self, values: Sequence[float] | Tensor) -> list[float]:
        """Return each value summed over all workers, in float64."""
        total = torch.as_tensor(values, dtype=torch.float64).cpu()
        dist.all_reduce(total, group=self.world.control)
        return [float(value) for value in total]

    def _note(self, text: str) -> None:
        """Print lines above the progress bar, on the first worker."""
        if self.log:
            self.log.progress.say(text)

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint of the last step, in addition to those that :meth:`steps` saves when due.

        Args:
            wait: return when the checkpoint is complete on disk.

        Raises:
            ShoalError: this save failed, or the previous one. Without ``wait`` that of this one comes with a
                later step.
        """
        if self._checkpointer is None:
            return
        self._training.update.bring_state()
        self._checkpointer.save(self.step, self._state(), wait=wait)
        self._report_checkpoints()

    def finish(
        self,
        export: Callable[[Path], None] | None = None,
        summary: Callable[[Mapping[str, record.Evaluation]], str] | None = None,
    ) -> int:
        """End the run: wait for the last checkpoint, export, write the summary. Return the exit code.

        Args:
            export: writes the trained model; called with the run directory, on the first worker.
            summary: returns lines about the last step's evaluations, by split.
        """
        if self.stopped:
            return EXIT_STOPPED
        assert self.directory is not None, "an inner run has no end of its own"
        if self.is_over:
            if self.world.is_main:
                ended, longer = "is finished", f"raise {getattr(self._config, 'longer', 'until')}"
                if reached := self._evaluations.end_of_run():
                    ended, longer = reached, "raise --run.until or leave it out"
                other = "--run.dir" if self._has("run", "dir") else "directory"
                print(
                    f"{self.directory} {ended}: {self.step:,} of {self._total:,} steps. To train longer, "
                    f"{longer}; to begin again, name another {other} or remove {self.directory}"
                )
            return EXIT_OK
        self._evaluations.finish(self.log)
        self._evaluations.report_target(self.step, self.log)
        if self._checkpointer is not None:
            self._checkpointer.finish()
        self._report_checkpoints()
        if self.log:
            if export and self._settings.save:
                export(self.directory)
            last = self._evaluations.last(self.step)
            found = {split: row.metrics for split, row in last.items()}
            if "validation" in found:
                found = {"validation": found["validation"]}
            metrics = {
                name if len(found) == 1 else f"{split}/{name}": value
                for split, values in found.items()
                for name, value in values.items()
            }
            self._note(self._speed.line(self.world.num_workers, self.unit))
            self.log.write(
                record.End(step=self.step, seconds=time.monotonic() - self._began, metrics=metrics)
            )
            if summary:
                self._note(summary(last))
        return EXIT_OK

    # ---- inside -----------------------------------------------------------------------------------------

    def _fresh_scale(self) -> LossScale:
        return LossScale(enabled=self._precision.name == "fp16", static=self._loop.loss_scale)

    def _log_for_mlperf(self, path: Path, watched: frozenset[str]) -> None:
        """Begin the log lines of MLPerf on the first worker."""
        if self.world.is_main:
            log = MLPerfLog(path, watched)
            self._stack.callback(log.close)
            self._mlperf_log = log

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint holds; the state of the data is the one integer ``samples``."""
        wires = [ddp.wire for ddp in self._training.models if ddp.wire is not None]
        return {
            **self._training.update.state_of(self._kept),
            **({"wire": wires[-1]} if wires else {}),
            "loss_scale": self._training.scale.state_dict(),
            "samples": self._samples,
            "config": self._tree,
        }

    def _reach(self) -> None:
        """End the steps because the last evaluations reached the target."""
        self.reached = True
        self.save()
        self._evaluations.report_target(self.step, self.log)

    def _begin(self, batch: BatchPlan, references: Mapping[str, float], notes: Sequence[str]) -> None:
        """Begin the record on the first worker, once: the settings, the arithmetic, where it goes on from."""
        if not self.world.is_main:
            return
        if self.log is None:  # the first phase
            assert self.directory is not None
            precision = self._precision.name if self._is_autocast else "the script's own types"
            notes = [*self._changes_precision(precision), *notes]
            progress = Progress(self._total, self.step, unit=self.unit)
            self.log = self._stack.enter_context(RunLog(self.directory, progress, self._mlperf_log))
            self.log.write(
                record.Start(
                    run=self._settings.name or self.directory.name,
                    recipe=self.recipe,
                    command=sys.orig_argv,
                    config=self._tree,
                    num_workers=self.world.num_workers,
                    num_hosts=self.world.num_hosts,
                    backend=self.world.backend,
                    device=device_name(self.world.device),
                    precision=precision,
                    versions=versions(),
                    num_parameters=self.num_parameters,
                    total_steps=self._total,
                    global_batch_size=batch.global_batch_size,
                    micro_batch_size=batch.micro_batch_size,
                    accumulation_steps=batch.accumulation_steps,
                    unit=batch.unit,
                    epoch_samples=self.epoch_samples,
                    references=dict(references),
                )
            )
        for note in notes:
            self.log.progress.say(note)
        if (restored := self._restored) and self.step == restored.step:
            self.log.write(
                record.Resume(
                    step=restored.step,
                    path=str(restored.path),
                    damaged=restored.damaged,
                    samples=self._samples,
                )
            )

    def _changes_precision(self, precision: str) -> list[str]:
        """Return a line if a run that continues has computed in another precision until now."""
        directory = required(self.directory)
        if self._restored is None or not (directory / record.FILE_NAME).is_file():
            return []
        rows = record.read_record(directory)
        before = next((row.precision for row in reversed(rows) if isinstance(row, record.Start)), precision)
        if before == precision:
            return []
        return [
            f"precision: {before} up to step {self.step:,}, {precision} from here on, so the results are not "
            f"those of one run in {before} (--train.precision)"
        ]

    def _open_shares(self, source: StepSource, batch: BatchPlan) -> Shares | None:
        """Return how the global batch is divided, unless equally; all workers call it."""
        setting = self._distributed.shares
        if setting == "equal" or self.world.num_workers == 1 or self.directory is None:
            return None
        if batch.accumulation_steps < _FEW_MICRO_BATCHES:
            self._notes.append(
                f"shares {setting}: a part that grows takes one more micro-batch, and a step has "
                f"{batch.accumulation_steps}: with --{self._section}.micro-batch-size of at most "
                f"{max(1, batch.worker_batch_size // _FEW_MICRO_BATCHES)} it costs less"
            )
        from shoal.train.shares import open_shares

        return open_shares(
            setting, directory=self.directory, world=self.world, step=self.step, batch=batch, source=source,
            models=self._training.models,
        )  # fmt: skip

    def _busy_s(self) -> list[float]:
        """Return the times of the workers, by rank, as far as this one knows: its own, if shares need it."""
        if self._shares is None:
            return []
        times = [0.0] * self.world.num_workers
        times[self.world.place.rank] = self.timer.busy_s
        return times

    def _tell_shares(self, shares: Shares) -> None:
        """Write that the workers have other parts of the batch from the next step on, on the first worker."""
        if self.log:
            row = record.Shares(step=self.step + 1, samples=list(shares.current), seconds=shares.seconds)
            self.log.write(row)

    def _save_and_stop(self) -> None:
        """Save because a signal asked some worker to stop."""
        self.stopped = True
        self.save(wait=True)
        if self.log and self.directory is not None:
            reason = (
                f"{self.stop_request.requested or 'a signal to another worker'}; the same command continues"
            )
            self.log.write(record.Stop(step=self.step, reason=reason, exit_code=EXIT_STOPPED))

    def _report_checkpoints(self) -> None:
        if self._checkpointer is not None:
            for row in self._checkpointer.poll():
                if self.log:
                    self.log.write(row)
                if self._progress_file:
                    write_atomically(self._progress_file, f"{row.step}\n".encode())

    def _commit(self, step: Step) -> None:
        """Count a step that was done, and write its line if one is due."""
        before, self.step = self.step, self._training.update.step_after(step.number)
        self._evaluations.scores.clear()
        self._samples += step.num_samples * (self.step - before)
        self._unread.append(step)
        self._count_steps(all_but=int(step.is_unread))  # a GPU has passed the step before
        writes_line = self._is_due(self._settings.log_frequency) or self.step in self.lines
        if writes_line:
            self._settle()
        self.timer.end_step(self.step - before)
        if self.log:
            self.log.progress.advance(self.step)
        if writes_line:
            self._write_line(step)
        self._last_end = time.monotonic()

    def _count_steps(self, all_but: int = 0) -> None:
        """Read and count losses and norms of the steps that were done, without the ``all_but`` newest."""
        while len(self._unread) > all_but:
            step = self._unread.pop(0)
            self._own_bad_steps = 0 if math.isfinite(step.loss) else self._own_bad_steps + 1
            self._metrics.add_step(step.loss, step.sums, step.counts, step.grad_norm)

    def _write_line(self, step: Step) -> None:
        self._count_steps()
        update = self._training.update
        loss, figures = self._metrics.means(uneven=0 if update.is_synchronous else self.world.num_workers)
        weight_norm = update.weight_norm(*step.optimizers)
        if len(step.optimizers) > 1:
            figures |= self._learning_rates(step.optimizers)
        step_s, parts_s, num_steps = self.timer.step_s(), self.timer.parts_s(), self.timer.num_steps
        self._speed.seconds += num_steps * step_s
        self._speed.waited_s += num_steps * parts_s["gradient_wait"]
        self._speed.samples += num_steps * step.num_samples
        if self.log:
            self.log.write(
                record.Step(
                    step=self.step,
                    samples=self._samples,
                    loss=loss,
                    metrics=figures,
                    learning_rate=step.learning_rate,
                    loss_scale=self._training.scale.value,
                    grad_norm=self._metrics.mean_grad_norm(),
                    weight_norm=weight_norm,
                    samples_per_s=step.num_samples / step_s,
                    step_s=step_s,
                    parts_s=parts_s,
                    num_skipped=self._metrics.num_skipped(),
                    peak_memory_bytes=peak_memory_bytes(self.world.device),
                )
            )
            if (row := update.row()) is not None:
                self.log.write(row)
        self._metrics.reset()
        self.timer.reset()

    def _learning_rates(self, optimizers: Sequence[Optimizer]) -> dict[str, float]:
        """Return the learning rates of several optimizers, by the names under which they are kept."""
        names = {id(kept): name for name, kept in self._kept.items()}
        return {
            f"learning_rate_{names.get(id(each), number)}": float(each.param_groups[0]["lr"])
            for number, each in enumerate(optimizers, start=1)
        }


def _section(config: object, name: str, kind: type[T]) -> T:
    """Return a section of the settings, or the defaults where there is none of this kind."""
    found = getattr(config, name, None)
    return found if isinstance(found, kind) else kind()


def _tree(config: object | None, precision: Precision) -> dict[str, Any]:
    """Return the settings with the precision that ``auto`` has become."""
    tree = {} if config is None else as_tree(config)
    if "precision" in tree.get("train", {}):
        tree["train"]["precision"] = precision.name
    return tree


def inner_run(run: Run, config: Any) -> Run:
    """Return a run on the workers of another that writes nothing, for a short training inside that one."""
    return Run(
        run.world, None, config=config, settings=run._settings, loop=config.train,
        distributed=config.distributed, servers=config.servers, precision=run.precision,
        recipe=run.recipe, stop=run.stop_request,
    )  # fmt: skip
