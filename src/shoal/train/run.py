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

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal import record
from shoal.data.loader import copies_to
from shoal.data.sources import FirstSteps, IterableSource, StepSource, as_source, digest_of_rows
from shoal.data.steps import DataShard
from shoal.decide.batch import BatchPlan, BatchSizes, WorkerShares, plan_batch
from shoal.env.launcher import worker_env
from shoal.env.settings import progress_file
from shoal.env.worker import WorkerEnv, alone
from shoal.errors import EXIT_OK, EXIT_STOPPED, UsageError, is_out_of_memory
from shoal.optim.optimizer_shards import OptimizerShards
from shoal.train.backends import Purpose
from shoal.train.checkpoint import Checkpointer, Restored, open_checkpointer
from shoal.train.checkpoint_state import flatten
from shoal.train.config import (
    DistributedConfig,
    LoopConfig,
    RunOutputConfig,
    ServersConfig,
    as_tree,
    check_combination,
    refuses_fp16,
    required,
)
from shoal.train.evaluations import Best, Evaluations, as_numbers, final_scores, load_weights
from shoal.train.gradients import DataParallel, LossScale, Precision, Update
from shoal.train.model_setup import agree_on_precision, compile_model, wrap_model
from shoal.train.reporting import (
    CheckpointNotice,
    Progress,
    RowWriter,
    RunLog,
    Speed,
    StepProfiler,
    StepTimer,
    changed_backend,
    changed_precision,
    device_name,
    peak_memory_bytes,
    versions,
)
from shoal.train.run_dir import Ownership, open_run_dir, own, recorded_backend, require_writable
from shoal.train.servers.choice import choose_update
from shoal.train.step import (
    LayerNorms,
    RunningMetrics,
    Step,
    StepState,
    Workers,
    before_clipping,
    seed_key_of,
)
from shoal.train.stopping import (
    StopRequest,
    Target,
    end_in_one_line,
    not_finite,
    out_of_memory,
    read_best,
    read_target,
)
from shoal.train.world import World, join_world, run_on_all

end_in_one_line()  # settings, which a script makes before it opens a run, are checked too

_FOLLOW_STEPS = 8
"""Steps between two adaptations of the shares of backend shoal's servers."""

_NOTHING_BUT_SCORES: Mapping[str, Any] = {
    "save": False, "until": None, "keep_best": None, "patience": 0, "validation_beside": 0, "report_to": (),
    "mlperf_log": None, "samples": (), "validation_hosts": 0, "upload_to": None,
}  # fmt: skip
"""Settings of a run that evaluates a checkpoint."""

Batch = Any
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a batch: in samples of one optimizer step over all workers, and per forward pass."""

    global_batch_size: int
    micro_batch_size: int | None = None
    """Default: the largest divisor of a worker's share up to 64."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run: the sections that it reads itself, and the whole that it stores."""

    config: object | None
    """A dataclass of dataclasses."""
    output: RunOutputConfig
    loop: LoopConfig
    distributed: DistributedConfig
    servers: ServersConfig
    recipe: str = "script"

    @property
    def unit(self) -> str:
        """Name of the samples."""
        return getattr(self.config, "unit", "samples")

    @property
    def frequencies(self) -> dict[str, int]:
        """Steps between lines, checkpoints and validations, by their settings; 0 where there are none."""
        names = ("log_frequency", "checkpoint_frequency", "validation_frequency")
        return {name: getattr(self.output, name, None) or 0 for name in names}

    def section_with(self, section: str, field: str) -> str | None:
        """Return the section if the settings have the field there, which makes it an option of a command."""
        return section if hasattr(getattr(self.config, section, None), field) else None

    def has_line(self, step: int, last: int, more: Sequence[int]) -> bool:
        """Return whether a step has a line in the record: also the ``last`` one, and those in ``more``."""
        return _is_due(self.output.log_frequency, step, last) or step in more

    def start_row(self, directory: Path, world: World, batch: BatchPlan, **more: Any) -> record.Start:
        """Return the row with which a record begins.

        Args:
            more: its other fields.
        """
        plan = self.output.plan
        return record.Start(
            run=self.output.name or directory.name,
            recipe=self.recipe,
            command=sys.orig_argv,
            num_workers=world.num_workers,
            num_hosts=world.num_hosts,
            backend=world.backend,
            backend_reason=world.backend_reason,
            device=device_name(world.device),
            versions=versions(),
            unit=batch.unit,
            planned={} if plan is None else record.read_planned(plan),
            **(more | batch.sizes),
        )

    def ended(self, directory: Path, steps: str, reached: str) -> str:
        """Return that a run has ended before, for the command that starts it again.

        Args:
            steps: the steps that were done.
            reached: the target as its end; may be empty.
        """
        longer = "--run.until or leave it out" if reached else getattr(self.config, "longer", "until")
        other = "--run.dir" if self.section_with("run", "dir") else "directory"
        return (
            f"{directory} {reached or 'is finished'}: {steps}. To train longer, raise {longer}; to begin "
            f"again, name another {other} or remove {directory}"
        )

    def tree(self, precision: Precision) -> dict[str, Any]:
        """Return the settings with the precision that ``auto`` stands for, as nested dictionaries."""
        tree = {} if self.config is None else as_tree(self.config)
        if "precision" in tree.get("train", {}):
            tree["train"]["precision"] = precision.name
        return tree


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
        workers: what all do together; with ``distributed.elastic`` they go on without one that is lost.
        directory: the run directory; ``None`` for an inner run, which writes nothing.
        seed: of weights, data order and dropout.
        step: optimizer steps done, counted over the whole run.
        log: writes the record; ``None`` on all workers but the first.
        timer: times the parts of a step.
        stop_request: the signal that asked to stop, if any.
        stopped: whether a signal asked to stop; :meth:`steps` then yields nothing more.
        is_over: whether an earlier process group has ended the run; known once :meth:`steps` has begun.
        reached: whether the scores ended the run: they reached the target of the settings, or became no
            better for too long; known once the steps have ended.
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
        settings: Settings,
        *,
        precision: Precision,
        stop: StopRequest,
        target: Target | None = None,
        best: Best | None = None,
    ) -> None:
        self.world, self.directory, self.seed = world, directory, settings.loop.seed
        self._settings, self._tree = settings, settings.tree(precision)
        self._precision, self._is_autocast = precision, False
        self.timer = StepTimer(world.device)
        self.log: RunLog | None = None
        self.step = 0
        self.stopped = self.is_over = self.reached = False
        self.lines: Sequence[int] = ()
        self._evaluations = Evaluations(directory, world, target, best)
        self.stop_request = stop
        self._checkpointer: Checkpointer | None = None
        if directory is not None and settings.output.save and not world.is_late:
            self._checkpointer = open_checkpointer(settings.output, directory)
        self._nonfinite_steps = 0
        self._metrics = RunningMetrics(self.sum if world.members is None else Tensor.tolist)
        self._speed = Speed()
        self._writers: list[RowWriter] = []
        self.to_device = copies_to(world.device)
        self._kept: dict[str, Any] = {}
        self._training = _state_of_steps(self)
        if world.members is not None and directory is not None:
            from shoal.train.crew import ChangingMembers

            members = ChangingMembers(self, world.members, lambda owner: take_over(self, target, owner))
            self._training.workers = members
        self.workers: Workers = self._training.workers
        self._notes = [note for note in (precision.note, world.note) if note]
        self._restored: Restored | None = None
        self._samples, self._until, self._total = 0, 0, 0
        self._batch: BatchPlan | None = None
        self._shares: WorkerShares | None = None
        self._checked: StepSource | None = None  # its first micro-batches were looked at
        self._section = "train"
        self.num_parameters, self.epoch_samples = 0, 0
        self._current: Step | None = None
        self._stack = ExitStack()
        self._profiler: StepProfiler | None = None
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
        everything = _settings(config, settings, loop, distributed, servers, recipe)
        output, loop, distributed = everything.output, everything.loop, everything.distributed
        check_combination(loop, distributed, everything.servers, clip="global")
        _check_features(everything)
        known = getattr(config, "scores", {}) if scores is None else scores
        target, score = read_target(output.until, known), read_best(output.keep_best, known)
        best = None if score is None else Best(score, output.patience)
        directory = Path(directory or required(output.dir))
        stop = StopRequest()
        with ExitStack() as stack:
            worker = worker or worker_env() or alone(Path(stack.enter_context(TemporaryDirectory())))
            purpose = Purpose(servers=everything.servers.option, recorded=lambda: recorded_backend(directory))
            world = stack.enter_context(join_world(worker, distributed, purpose))
            end_in_one_line()
            no_fp16 = refuses_fp16(config, loop, distributed, everything.servers)
            precision = agree_on_precision(loop.precision, world, no_fp16=no_fp16)
            stack.enter_context(owned(directory, world))
            tree = everything.tree(precision)

            def open_directory() -> None:
                if output.upload_to is not None:
                    from shoal.train.checkpoint_uploads import Uploads

                    Uploads(output.upload_to, directory).fetch_run_files()
                open_run_dir(directory, tree, immutable)

            run_on_all(world.control, lambda: open_directory() if world.is_main else None)
            run = cls(world, directory, everything, precision=precision, stop=stop, target=target, best=best)
            stack.enter_context(run._stack)

            run_on_all(world.control, lambda: add_writers(run, target) if world.is_main else None)
            try:
                with named_out_of_memory(run):
                    yield run
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
    def shards_optimizer(self) -> bool:
        """True if the settings divide the optimizer's state over the data-parallel workers."""
        return self._settings.loop.shard_optimizer

    @property
    def precision(self) -> Precision:
        """The autocast type, the same on all workers; models of :meth:`data_parallel` apply it themselves.

        A run that has no such model, and has not asked for this before its first step, computes as the script
        says; so does its record.
        """
        self._is_autocast = True
        return self._precision

    # ---- model and state --------------------------------------------------------------------------------

    def data_parallel(self, model: nn.Module, *, average: bool = True) -> DataParallel:
        """Move ``model`` to the device and wrap it so that backward averages its gradients over all workers.

        Args:
            average: whether backward averages. Otherwise each worker clips its own gradient, and
                :meth:`Step.update` averages.
        """
        ddp = wrap_model(
            model.to(self.world.device),
            self.world,
            self._settings.distributed,
            self.precision,
            self.timer.lap,
            on_servers=self._settings.servers.mode != "off",
        )
        ddp.average = average
        self._training.models.append(ddp)
        return ddp

    def compile(self, module: nn.Module, *, dynamic: bool | None = None, by_default: bool = True) -> None:
        """Compile ``module`` in place with ``torch.compile`` if the settings ask for it.

        Args:
            module: the model that :meth:`data_parallel` has wrapped, or a part of it.
            dynamic: whether shapes vary; default: torch detects it.
            by_default: if the settings have no value, compile on a GPU if there is a C compiler.
        """
        if self._settings.loop.compile is not None or by_default:
            self._notes += compile_model(module, self.world, self._settings.loop.compile, dynamic=dynamic)

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
        if first and self._settings.output.evaluate is None:
            servers, training = self._settings.servers, self._training
            chosen = choose_update(servers, self._kept, training.models, directory=self.directory)
            self.use(chosen or training.update)
        named = {"model": stateful["model"]} if "model" in stateful else stateful
        models = [each for each in named.values() if isinstance(each, nn.Module)]
        self.num_parameters = self.num_parameters or sum(p.numel() for m in models for p in m.parameters())
        if self._settings.output.evaluate is not None:
            self.step, self._samples = load_weights(self._settings.output.evaluate, self._kept, self.world)
            return
        if not first:
            self._training.scale = _loss_scale(self._precision, self._settings.loop)
        elif self._checkpointer is not None:
            self._restored = self._checkpointer.restore(self._state(), held=self._training.update.held)
        if first and self._restored:
            self.step, self._samples = self._restored.step, int(self._restored.values["samples"])
            self._training.scale.load_state_dict(self._restored.values["loss_scale"])
        update = self._training.update
        if first:
            update.open(self.step)
            self._notes += [update.note] if update.note else []
        elif isinstance(optimizer := stateful.get("optimizer"), Optimizer):
            update.renew(optimizer)

    def use(self, update: Update) -> None:
        """Replace how a step's gradients are measured and become new weights (:class:`Update`).

        Raises:
            UsageError: the settings divide the optimizer's state, and ``update`` has no shards.
        """
        if self.shards_optimizer and update.shards is None:
            raise UsageError(
                f"train.shard_optimizer: {type(update).__name__} was made without shards; give it "
                "shards=OptimizerShards(group of the replicas), or leave the setting out"
            )
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
        if self._checkpointer is not None:
            _check_kept(self._kept)
        if not isinstance(batch, BatchPlan):
            num_replicas = self.world.ranks.num_workers if replica is None else replica[1]
            batch = plan_batch(batch, num_replicas, section=section, unit=self._settings.unit)
        if replica is not None and self.world.members is not None:
            raise UsageError(
                "distributed.elastic is for replicas of the whole model, and run.steps was given a replica "
                "of several workers: leave one of them out"
            )
        if self._settings.output.evaluate is not None:
            until = total = self.step
        self._batch, self._section, self._until, self._total = batch, section, until, total or until
        self._training.update.check_synchronized(self._settings.frequencies, [*self.lines, until])
        self._metrics.read()
        if (restored := self._restored) is not None and self.step == restored.step:
            self.is_over = self._evaluations.has_ended(self.step, self._total)
        if self.is_over:
            return
        source = _source_of(data, self.seed, self.world)
        advice = _open_shares(self, source, replace(batch, replicas=replica is not None))
        if num_steps := self._settings.loop.overfit_steps:
            source = FirstSteps(source=source, num_steps=num_steps)
        self._evaluations.open_beside(self._settings.output, self.step)
        if self.directory is not None and not self.stopped:
            self._begin(batch, references or {}, [f"batch: {batch}", *self._notes, *advice, *notes])
        if phase is not None and self.log and self.step == since:
            self.log.write(_row_of_phase(phase, since, until, batch))
        self._profiler = self._profiler or _open_profiler(self)
        if not self.workers.join(until):
            self.is_over = self.workers.are_done
            return
        self.timer.reset()
        while self.step < until and not self.stopped and not self.reached:
            left = range(self.step - since, until - since)
            index, num_replicas = replica or (self.world.rank, self.world.num_workers)
            shard = DataShard(
                global_batch_size=batch.global_batch_size,
                micro_batch_size=self.batch.micro_batch_size,
                rank=index,
                num_workers=num_replicas,
                shares=self._shares.current if self._shares else self.workers.shares(self.batch),
            )
            yield from self._attempt(source, shard, left, targets, on_host)
        if self.step == until and self.workers.together(self._evaluations.have_reached):
            self._end_early(is_reached=True)
        if self.step == self._total or self.stopped or self.reached:
            self.workers.end()

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
        workers = self.workers
        num_changes = workers.num_changes
        with closing(source.open(shard, steps, pin_memory=pin_memory)) as batches:
            for index, micro_batches in zip(steps, batches, strict=False):
                number = begin + index - steps.start + 1
                if number <= self.step:
                    continue  # its step was taken while this worker was late
                if self._profiler is not None:
                    self._profiler.before(number)
                own_targets = sum(map(targets, micro_batches)) if targets else 0
                self.timer.lap("data")
                self._evaluations.poll(self.log)
                num_targets = own_targets * self.world.num_workers  # the mean is over this worker's part
                update = self._training.update
                is_bad = self._metrics.num_nonfinite >= self._settings.loop.max_nonfinite_steps
                if not update.runs_ahead(asks=is_bad or self.stop_request.requested is not None):
                    total: int | None = None
                    with workers.survive():
                        if source is not self._checked:
                            check_own_rows(source, micro_batches, shard, self.world, is_first=index == 0)
                            self._checked = source
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
                if self._profiler is not None:
                    self._profiler.after(number)
                if self.due(self._settings.output.checkpoint_frequency):
                    self.save()
                self._report_checkpoints()
                if workers.num_changes != num_changes:
                    return
                self.timer.begin_step()

    def _agree(self, num_targets: int, source: StepSource, shard: DataShard, index: int) -> int | None:
        """Agree with all workers before a step; return the targets of its global batch.

        ``None``: the step is not to come, or not from these batches.
        """
        most, update = self._settings.loop.max_nonfinite_steps, self._training.update
        counted = 1 if update.is_synchronous else most  # steps of this worker since the last agreement
        bad = self._metrics.num_nonfinite >= counted
        stops = self.stop_request.requested is not None
        times = self.world.by_rank(self.timer.busy_s) if self._shares is not None else []
        scores = self._evaluations
        workers, is_best = self.workers, scores.is_best(self.step)
        sums = self.sum([num_targets, bad, stops, scores.end_run(), is_best, workers.num_waiting, *times])
        self.timer.lap("other")
        total, num_bad, num_stops, num_reached, num_best, num_waiting = map(int, sums[:6])
        self._nonfinite_steps = self._nonfinite_steps + counted if num_bad else 0
        if self._nonfinite_steps >= most:
            rates = "optim" if self._section == "train" else self._section
            section = self._settings.section_with(rates, "learning_rate")
            behind = 1 + self._metrics.num_unread  # the step whose loss it is
            names = source.names(shard, index - behind)
            raise not_finite(self._nonfinite_steps, self.step + 1 - behind, names, section=section)
        if num_best:
            scores.best_step(self.step)
            self.save()
        if num_stops and not num_reached and workers.release(num_stops, leaves=stops):
            self.stopped = stops
            return None
        if num_reached or num_stops:
            self._end_early(is_reached=num_reached > 0)
            return None
        if self._shares is not None and self._shares.observe(self.step + 1, sums[6:]):
            if self.log:
                samples, seconds = list(self._shares.current), self._shares.seconds
                self.log.write(record.Shares(step=self.step + 1, samples=samples, seconds=seconds))
            return None
        if workers.admit(num_waiting):
            return None
        if not update.on_servers and self.step % _FOLLOW_STEPS == 0:
            self.world.follow_rates()
        return total

    def _settle(self) -> None:
        """Wait until all workers have taken the same steps. A collective."""
        if self._training.update.settle():
            self.timer.lap("gradient_wait")

    def _end_early(self, *, is_reached: bool) -> None:
        """Save the last step and take no more: it reached the target, or a signal asked some worker to stop.

        A collective.
        """
        self.reached, self.stopped = is_reached, not is_reached
        self.save(wait=self.stopped)
        if self.reached:
            self._evaluations.report_target(self.step, self.log)
            self._evaluations.report_stale(self.log)
        elif self.log:
            signal = self.stop_request.requested or "a signal to another worker"
            reason = f"{signal}; the same command continues"
            self.log.write(record.Stop(step=self.step, reason=reason, exit_code=EXIT_STOPPED))

    def due(self, every: int | Sequence[int] | None, *, evaluation: bool = False) -> bool:
        """Return whether the last step is a multiple of ``every``, or one of the listed steps.

        If ``every`` is a number or ``None``, the last step of the loop is due too. After a step that will be
        repeated nothing is due.

        Args:
            every: a number of steps, or a list of steps.
            evaluation: whether the loop evaluates the model if the result is true. If evaluations run beside
                training, the call requests one there and returns true only for the last step.
        """
        if self._current is not None and not self._current.is_done:
            return False
        if not _is_due(every, self.step, self._until):
            return False
        self._settle()
        if evaluation:
            self._evaluations.sample(self.step, self._kept, self.log)
        if not evaluation or self.step == self._until:
            return True
        if not self._evaluations.request(self.step, self._kept, self._samples):
            return True
        self.timer.lap("other")
        return False

    def evaluation(self, split: str, metrics: Mapping[str, float | Tensor], *, num_samples: int) -> None:
        """Write scores of the step just done to the record and the terminal.

        Their time counts from the end of the step, or from the last evaluation.

        Args:
            split: name of the data, such as ``validation``.
            metrics: numbers or tensors of one element by name; only those of the first worker are used.
            num_samples: number of samples that were evaluated.

        Raises:
            UsageError: a score is not a number.
        """
        now = time.monotonic()
        row = record.Evaluation(
            step=self.step, split=split, num_samples=num_samples, metrics=as_numbers(metrics),
            seconds=now - self._last_end, samples=self._samples,
        )  # fmt: skip
        if self.log:
            self.log.write(row)
        self._evaluations.add(self.step, split, row.metrics)
        self._last_end = now
        self.timer.begin_step()

    def lacks_scores(self, split: str | None = None) -> bool:
        """Return whether the last step has no scores after the loop. A collective: all workers call it.

        This happens if an earlier process did that step and was stopped before its evaluation.

        Args:
            split: the split of the scores; default: any.
        """
        if self.directory is None or self.stopped or self.is_over or self.world.is_late:
            return False
        if self._settings.output.evaluate is not None:
            return not self._evaluations.scores
        self._settle()
        return self.workers.together(lambda: self._evaluations.lacks(self.step, split))

    def sum(self, values: Sequence[float] | Tensor) -> list[float]:
        """Return each value summed over all workers, in float64."""
        total = torch.as_tensor(values, dtype=torch.float64).cpu()
        dist.all_reduce(total, group=self.world.control)
        return [float(value) for value in total]

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
                steps = f"{self.step:,} of {self._total:,} steps"
                print(self._settings.ended(self.directory, steps, self._evaluations.end_of_run()))
            return EXIT_OK
        directory = self.directory

        def write_end() -> None:
            self._evaluations.finish(self.log)
            self._evaluations.report_target(self.step, self.log)
            if self._checkpointer is not None:
                self._checkpointer.finish()
            self._report_checkpoints()
            self._training.update.bring_weights()
            scored = self._evaluations.load_best(self.step, self._kept, self.log)
            if self.log:
                if export and self._settings.output.save:
                    saved = self._checkpointer
                    with saved.uploaded_export(self.step) if saved is not None else nullcontext():
                        export(directory)
                last = self._evaluations.last(scored)
                seconds, scores = time.monotonic() - self._began, final_scores(last)
                self.log.progress.say(self._speed.line(self.world.num_workers, self._settings.unit))
                self.log.write(record.End(step=self.step, seconds=seconds, metrics=scores))
                if summary:
                    self.log.progress.say(summary(last))
            if self._checkpointer is not None:
                self._checkpointer.upload_run_files()

        self.workers.together(write_end)
        return EXIT_OK

    # ---- inside -----------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; that of the data is the one integer ``samples``."""
        wires = [ddp.wire for ddp in self._training.models if ddp.wire is not None]
        return {
            **self._training.update.state_of(self._kept),
            **({"wire": wires[-1]} if wires else {}),
            "loss_scale": self._training.scale.state_dict(),
            "samples": self._samples,
            "config": self._tree,
        }

    def _begin(self, batch: BatchPlan, references: Mapping[str, float], notes: Sequence[str]) -> None:
        """Begin the record on the first worker, once: the settings, the arithmetic, where it goes on from."""
        if not self.world.is_main:
            return
        if self.log is None:  # the first phase
            assert self.directory is not None
            precision = self._precision.name if self._is_autocast else "the script's own types"
            if self._restored is not None:
                notes = [*_changes(self, precision), *notes]
            first_step = self.step + 1 if self._restored is not None else 0
            trains = self._settings.output.evaluate is None
            self.log = open_log(self, first_step if trains else None)
            self.log.write(
                self._settings.start_row(
                    self.directory,
                    self.world,
                    batch,
                    config=self._tree,
                    precision=precision,
                    num_parameters=self.num_parameters,
                    total_steps=self._total,
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

    def _report_checkpoints(self) -> None:
        if self._checkpointer is not None:
            for row in self._checkpointer.poll():
                if self.log:
                    self.log.write(row)

    def _commit(self, step: Step) -> None:
        """Count a step that was done, and write its line if one is due."""
        before, self.step = self.step, self._training.update.step_after(step.number)
        self._evaluations.scores.clear()
        self._samples += step.num_samples * (self.step - before)
        self._metrics.add(step)
        writes_line = self._settings.has_line(self.step, self._until, self.lines)
        if writes_line:
            self._settle()
        self.timer.end_step(self.step - before)
        if self.log:
            self.log.progress.advance(self.step)
        if writes_line:
            self._write_line(step)
        self._last_end = time.monotonic()

    def _write_line(self, step: Step) -> None:
        update = self._training.update
        loss, figures = self._metrics.means(uneven=0 if update.is_synchronous else self.world.num_workers)
        weight_norm = update.weight_norm(*step.optimizers)
        if len(step.optimizers) > 1:
            figures |= _learning_rates(step.optimizers, self._kept)
        self._speed.add(self.timer, step.num_samples)
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
                    samples_per_s=step.num_samples / self.timer.step_s(),
                    step_s=self.timer.step_s(),
                    parts_s=self.timer.parts_s(),
                    num_skipped=self._metrics.num_skipped(),
                    layer_norms=before_clipping(step.layer_norms, step.grad_norm) if step.layer_norms else {},
                    peak_memory_bytes=peak_memory_bytes(self.world.device),
                )
            )
            if (row := update.row()) is not None:
                self.log.write(row)
        self._metrics.reset()
        self.timer.reset()


def _changes(run: Run, precision: str) -> list[str]:
    """Return notes on what is not as it was when the run was stopped."""
    assert run.directory is not None
    return [
        *changed_precision(run.directory, run.step, precision),
        *changed_backend(run.directory, run.step, run.world.backend, run.world.num_workers),
    ]


def _state_of_steps(run: Run) -> StepState:
    """Return what the steps of a new run share."""
    world, settings = run.world, run._settings
    layer_norms = None
    if settings.output.layer_norms:
        layer_norms = LayerNorms(
            run._kept, lambda step: settings.has_line(step, run._until, run.lines), world.control
        )
    return StepState(
        world=world,
        timer=run.timer,
        copies=run.to_device,
        scale=_loss_scale(run._precision, settings.loop),
        update=Update(
            on_device=world.device.type == "cuda",
            shards=OptimizerShards() if run.shards_optimizer else None,
        ),
        seed_key=seed_key_of(run.seed, world.rank),
        kept=run._kept,
        saves=run._checkpointer is not None,
        layer_norms=layer_norms,
    )


@contextmanager
def named_out_of_memory(run: Run) -> Iterator[None]:
    """Name the settings to change if memory runs out in this block.

    Raises:
        ShoalError: it ran out, once the batch was known.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if run._batch is None or not is_out_of_memory(error):
            raise
        settings = run._settings
        remedy = getattr(settings.config, "memory_remedy", "a smaller model")
        section = settings.section_with(run._section, "micro_batch_size")
        raise out_of_memory(error, run._batch, remedy, section=section) from error


def open_log(run: Run, first_step: int | None) -> RunLog:
    """Return the log of a run that goes on with ``first_step``; ``None``: it does no steps."""
    assert run.directory is not None
    progress = Progress(run._total, run.step, unit=run._settings.unit)
    return run._stack.enter_context(RunLog(run.directory, progress, run._writers, first_step=first_step))


@contextmanager
def owned(run_dir: Path, world: World) -> Iterator[None]:
    """Own ``run_dir`` in this block on the main worker. A collective: all workers raise its error.

    Raises:
        UsageError: as :func:`own`, or the directory cannot be created or written.
        ShoalError: as :func:`own`.
    """
    mine = []

    def take() -> None:
        if world.is_main:
            require_writable(run_dir)
            mine.append(own(run_dir))
            _name_owner(world, mine[0])

    run_on_all(world.control, take)
    try:
        yield
    finally:
        for ownership in mine:
            ownership.release()


def _name_owner(world: World, ownership: Ownership) -> None:
    """Publish the run directory's owner token to the members, of whom one may have to take over."""
    if world.members is not None:
        world.members.put("owner", ownership.token)


def _open_profiler(run: Run) -> StepProfiler | None:
    """Return the profiler of the first worker's next steps, if the settings ask for one."""
    num_steps = run._settings.output.profile
    if not num_steps or not run.world.is_main or run.directory is None:
        return None
    return run._stack.enter_context(closing(StepProfiler(run.directory, run.step, num_steps)))


def add_writers(run: Run, target: Target | None) -> None:
    """Let the writers that the settings name have the rows of a run, too.

    Args:
        target: of the run.
    """
    assert run.directory is not None
    output = run._settings.output
    if (path := progress_file()) is not None:
        run._writers.append(CheckpointNotice(path))
    if output.mlperf_log is not None or output.report_to:
        from shoal.train.row_writers import open_writers

        watched = target.names if target is not None else frozenset()
        run._writers += open_writers(run._stack, run.directory, output, watched=watched)


def take_over(run: Run, target: Target | None, owner: str) -> None:
    """Write the record of a run whose former first worker was lost.

    Args:
        target: of the run.
        owner: token of that worker as the owner of the run directory.
    """
    assert run.directory is not None
    mine = own(run.directory, given_up=owner)
    run._stack.callback(mine.release)
    _name_owner(run.world, mine)
    add_writers(run, target)
    run.log = open_log(run, run.step + 1)
    run._evaluations.read(run.step)


def _check_features(settings: Settings) -> None:
    """Check that the settings ask for nothing that the workers' changes or the servers exclude.

    Raises:
        UsageError: they do.
    """
    if settings.output.layer_norms and settings.servers.option:
        raise UsageError(
            f"run.layer_norms does not go with {settings.servers.option}: gradients are on the servers; "
            "leave one of them out"
        )
    parallel, finetune = (getattr(settings.config, name, None) for name in ("parallel", "finetune"))
    refused = {
        "a model in stages or shards (parallel)": getattr(parallel, "splits", False),
        "finetune.at": getattr(finetune, "at", ()),
        "run.validation_beside": settings.output.validation_beside,
        "run.validation_hosts": settings.output.validation_hosts,
        "run.samples": settings.output.samples,
    }
    if settings.distributed.elastic is not None and (named := [name for name in refused if refused[name]]):
        raise UsageError(
            f"distributed.elastic is for replicas of the whole model, and does not go with {named[0]}: leave "
            "one of them out"
        )


def _is_due(every: int | Sequence[int] | None, step: int, last: int) -> bool:
    if isinstance(every, Sequence):
        return step in every
    return step == last or bool(every and step % every == 0)


def _check_kept(kept: Mapping[str, Any]) -> None:
    """Check that checkpoints will have something in them.

    Raises:
        UsageError: :meth:`Run.keep` was not given a tensor.
    """
    if not flatten(kept).tensors:
        raise UsageError(
            "checkpoints would be empty: call run.keep(model=model, optimizer=optimizer) before "
            "run.steps, or train without, Run.open(settings=RunOutputConfig(save=False))"
        )


def _source_of(data: Any, seed: int, world: World) -> StepSource:
    """Return the data of :meth:`Run.steps` as a source of steps.

    Raises:
        UsageError: the workers may change, and each brings micro-batches of its own.
    """
    source = as_source(data, seed=seed)
    if world.members is not None and isinstance(source, IterableSource):
        raise UsageError(
            "distributed.elastic needs data whose order the run decides, not a DataLoader or another "
            "iterable of micro-batches: give run.steps the dataset itself, or one of shoal's readers"
        )
    return source


def _open_shares(run: Run, source: StepSource, batch: BatchPlan) -> list[str]:
    """Divide the global batches by the workers' speed if the settings say so; return lines to print.

    A collective.
    """
    setting = run._settings.distributed.shares
    if setting == "equal" or run.world.num_workers == 1 or run.directory is None:
        return []
    from shoal.train.shares import advice_on_shares, open_shares

    run._shares = open_shares(
        setting,
        directory=run.directory,
        world=run.world,
        step=run.step,
        batch=batch,
        source=source,
        models=run._training.models,
    )
    return advice_on_shares(setting, batch, run._section)


def _row_of_phase(phase: tuple[str, int], since: int, until: int, batch: BatchPlan) -> record.Phase:
    """Return the row with which a phase begins.

    Args:
        phase: its name, and the length of its sequences.
        since: last step before it.
        until: its last step.
    """
    name, length = phase
    return record.Phase(step=since + 1, last_step=until, name=name, sequence_length=length, **batch.sizes)


def check_own_rows(
    source: StepSource, batches: Any, shard: DataShard, world: World, *, is_first: bool
) -> None:
    """Check the first micro-batches that an iterable yields in this process. A collective.

    Args:
        source: the data; others than iterables are not checked.
        batches: this worker's micro-batches of a step.
        shard: their sizes.
        world: the workers.
        is_first: whether it is the first step of the data; a later one may be the last of an epoch.

    Raises:
        UsageError: a micro-batch has another size than the run's, or all workers have the same rows.
    """
    if not isinstance(source, IterableSource) or not source.checked:
        return
    size = shard.micro_batch_size if is_first else None
    digests = run_on_all(world.control, lambda: digest_of_rows(batches, size))
    if 1 < world.num_workers == shard.num_workers and digests[0] and len(set(digests)) == 1:
        raise UsageError(
            f"all {len(digests)} workers were given the same rows by the {type(source.batches).__name__} "
            "of run.steps: give each its own part, as DataLoader(..., sampler=DistributedSampler(...)) "
            "or datasets.distributed.split_dataset_by_node do, or an indexable dataset, which run.steps "
            "divides; data that has to be the same: IterableSource(batches=..., checked=False) of "
            "shoal.data.sources"
        )


def _loss_scale(precision: Precision, loop: LoopConfig) -> LossScale:
    return LossScale(enabled=precision.name == "fp16", static=loop.loss_scale)


def _learning_rates(optimizers: Sequence[Optimizer], kept: Mapping[str, Any]) -> dict[str, float]:
    """Return the learning rates of several optimizers, by the names under which they are kept."""
    names = {id(each): name for name, each in kept.items()}
    return {
        f"learning_rate_{names.get(id(each), number)}": float(each.param_groups[0]["lr"])
        for number, each in enumerate(optimizers, start=1)
    }


def _settings(
    config: object | None,
    output: RunOutputConfig | None,
    loop: LoopConfig | None,
    distributed: DistributedConfig | None,
    servers: ServersConfig | None,
    recipe: str,
) -> Settings:
    """Return all settings: sections that are not given are those of ``config``, or the defaults."""
    output = output or _section(config, "run", RunOutputConfig)
    if output.evaluate is not None:
        output = replace(output, **_NOTHING_BUT_SCORES)
    if output.samples and recipe == "script":
        raise UsageError(
            "run.samples is for shoal's recipes, whose models `shoal predict` knows: leave it out, and write "
            "outputs of your model where run.due(…, evaluation=True) is true"
        )
    return Settings(
        config=config,
        output=output,
        loop=loop or _section(config, "train", LoopConfig),
        distributed=distributed or _section(config, "distributed", DistributedConfig),
        servers=servers or _section(config, "servers", ServersConfig),
        recipe=recipe,
    )


def _section(config: object, name: str, kind: type[T]) -> T:
    """Return a section of the settings, or the defaults if they have none of this kind."""
    section = getattr(config, name, None)
    return section if isinstance(section, kind) else kind()


def inner_run(run: Run, config: Any) -> Run:
    """Return a run on the workers of another that writes nothing, for a short training inside that one."""
    settings = replace(
        run._settings,
        config=config,
        loop=config.train,
        distributed=config.distributed,
        servers=config.servers,
    )
    return Run(run.world, None, settings, precision=run.precision, stop=run.stop_request)
