"""Defines an optimizer step of :class:`shoal.train.run.Run`: its micro-batches, and a transaction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data import precedence
from shoal.data.loader import Copies
from shoal.data.steps import DataShard
from shoal.decide.batch import BatchPlan
from shoal.decide.rng import GOLDEN, Stream, random_keys
from shoal.errors import RetryStep, UsageError
from shoal.optim.moments import parameters_of
from shoal.train.gradients import DataParallel, LossScale, Update
from shoal.train.reporting import StepTimer
from shoal.train.world import World, run_on_all

T = TypeVar("T")

_MASK = (1 << 63) - 1


class Readback:
    """Scalars of a device on their way to the host, which queues more work meanwhile.

    The copy is queued at once, into pinned memory. :meth:`read` waits for it alone, not for operations that
    the host has queued behind it: one step later it does not wait at all.

    Args:
        values: scalars of one device.
    """

    def __init__(self, *values: Tensor) -> None:
        stacked = torch.stack([value.detach().double() for value in values])
        self._copied: torch.cuda.Event | None = None
        self._values = stacked
        if stacked.device.type == "cuda":
            self._values = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            self._values.copy_(stacked, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[float]:
        """Return the values, in the order of the arguments."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values.tolist()
        return values


@dataclass(kw_only=True)
class StepState:
    """State that the steps of a run share."""

    world: World
    timer: StepTimer
    copies: Copies
    """Copies micro-batches to the device."""
    scale: LossScale
    update: Update
    seed_key: int
    """Of this worker; seeds torch's generators in each step, so that no generator's state need be saved."""
    models: list[DataParallel] = field(default_factory=list)
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Objects that checkpoints hold, by name."""
    saves: bool = False
    """True if the run writes checkpoints."""
    layer_norms: LayerNorms | None = None
    """Measures gradients by layer, if the settings ask for it."""
    workers: Workers = field(default_factory=lambda: Workers())
    """Goes on without a worker that is lost in a step, if the settings ask for it."""


def seed_key_of(seed: int, rank: int) -> int:
    """Return the key of a worker for :class:`StepState`."""
    return int(random_keys(seed, Stream.DROPOUT, rank).item())


class Workers:
    """The workers of a run: these do not change, and the loss of one is an error.

    :class:`~shoal.train.crew.ChangingMembers` goes on with others.
    """

    @property
    def num_changes(self) -> int:
        """Return how often they have changed."""
        return 0

    def join(self, until: int) -> bool:
        """Become one of the workers before a loop; return false if they are past it. A collective.

        Args:
            until: last step of the loop.
        """
        return True

    @property
    def are_done(self) -> bool:
        """Return whether the run is over, for a process that comes too late for a loop."""
        return False

    def together(self, action: Callable[[], T]) -> T:
        """Return the result of an action of all workers between steps, such as an evaluation. A collective.

        With ``distributed.elastic`` those that are left repeat it if a worker is lost in it; else such a loss
        is an error.
        """
        return action()

    def shares(self, batch: BatchPlan) -> tuple[int, ...]:
        """Return the samples of each worker in a step, by rank; empty: equal parts."""
        return ()

    def survive(self) -> AbstractContextManager[None]:
        """Return a context for what comes before a step; one that has lost a worker ends early."""
        return nullcontext()

    @property
    def num_waiting(self) -> int:
        """Return the number of processes that have asked to become workers, on the first worker."""
        return 0

    def admit(self, num_waiting: int) -> bool:
        """Take in who has asked, up to this number; return whether somebody did. A collective."""
        return False

    def release(self, num_leaving: int, *, leaves: bool) -> bool:
        """Go on without workers that were asked to stop; return false if all stop. A collective.

        Args:
            num_leaving: number of these.
            leaves: whether this is one of them.
        """
        return False

    def agree(self, step: Step) -> Exception | None:
        """Agree that all have the step's gradients; return the loss of a worker. A collective."""
        return None

    def redo(self, step: Step, error: BaseException) -> bool:
        """Go on without a worker that was lost in a step; return whether one was."""
        return False

    def end(self) -> None:
        """Take in nobody any more."""


class Step:
    """One optimizer step: an iterable over this worker's micro-batches, and a transaction as a context.

    Attributes:
        number: counted over the whole run from 1.
        num_samples: number of samples of the global batch.
        num_targets: number of targets of the global batch, at least 1; see ``targets`` of :meth:`Run.steps`.
        is_done: whether the step was committed.
        is_given: whether others had committed it when a worker was lost, and gave their state to this one,
            with all that :meth:`Run.keep` has.
        sums: this worker's parts of the figures of :meth:`add`.
        counts: of the items that each of them is a mean over.
        learning_rate: of the first group of the first optimizer.
        optimizers: those that :meth:`update` was given.
        layer_norms: of the clipped gradients, by layer, in steps that measure them.
    """

    def __init__(
        self,
        training: StepState,
        number: int,
        micro_batches: Any,
        shard: DataShard,
        *,
        num_targets: int,
        commit: Callable[[Step], None],
        on_host: bool = False,
    ) -> None:
        self._training, self._micro_batches, self._commit = training, micro_batches, commit
        self._count, self._on_host = shard.num_micro_batches, on_host
        self.number = number
        self.num_samples = shard.global_batch_size
        self.num_targets = num_targets
        self.is_done = self.is_given = False
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.learning_rate = math.nan
        self._figures: Readback | list[float] = [math.nan, math.nan]
        self._loss = torch.zeros((), dtype=torch.float64, device=training.world.device)
        self.optimizers: Sequence[Optimizer] = ()
        self.layer_norms: dict[str, float] = {}
        self._averages = self._has_loss = False
        self._before: list[dict[str, Tensor]] = []

    @property
    def grad_norm(self) -> float:
        """The norm of the gradient before clipping, the same on all workers; may wait for a GPU."""
        return self._read()[0]

    @property
    def loss(self) -> float:
        """This worker's part of the mean loss over the global batch; may wait for a GPU."""
        return self._read()[1]

    @property
    def is_unread(self) -> bool:
        """True while :attr:`grad_norm` and :attr:`loss` are on their way to the host."""
        return isinstance(self._figures, Readback)

    def _read(self) -> list[float]:
        if isinstance(self._figures, Readback):
            self._figures = self._figures.read()
        return self._figures

    def __enter__(self) -> Step:
        training = self._training
        torch.manual_seed((training.seed_key + self.number * GOLDEN) & _MASK)
        self._before = [ddp.volatile_state() for ddp in training.models]
        for ddp in training.models:
            ddp.has_averaged = False
        return self

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's micro-batches. Backward of the last one averages gradients over workers."""
        training = self._training
        for number, batch in enumerate(self._micro_batches, start=1):
            training.timer.lap("data")
            with ExitStack() as stack:
                self._averages = number == self._count
                for ddp in training.models:
                    if not (self._averages and ddp.average):
                        stack.enter_context(ddp.no_sync())
                yield batch if self._on_host else training.copies(batch)

    def backward(self, loss: Tensor) -> None:
        """Run backward.

        Args:
            loss: this micro-batch's part of the mean loss over the global batch: a sum over the micro-batch
                divided by :attr:`num_samples` or :attr:`num_targets`.
        """
        training = self._training
        training.timer.lap("forward")
        self._has_loss = True
        self._loss += loss.detach()
        weight = training.world.num_workers * training.scale.value  # DDP averages over workers
        try:
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        finally:
            if not self._exchanges_in_update:
                precedence.OWN.end()
        waits = not training.models or any(ddp.sends for ddp in training.models)
        training.timer.lap("gradient_wait" if self._averages and waits else "backward")

    @property
    def _exchanges_in_update(self) -> bool:
        """True if the update, too, exchanges gradients or new weights, and not only norms."""
        training = self._training
        has_shards = training.update.shards is not None and training.world.num_workers > 1
        return training.update.on_servers or has_shards or any(not ddp.average for ddp in training.models)

    @property
    def loss_scale(self) -> float:
        """Factor of the gradients until the update; other than 1 in fp16 alone."""
        return self._training.scale.value

    def observe(self, loss: float | Tensor, part: str) -> None:
        """Record a loss whose backward pass ran elsewhere, such as in a pipeline; the same on all workers.

        Args:
            part: the part of the step that the time since the last lap belongs to.
        """
        self._training.timer.lap(part)
        self._has_loss = True
        self._loss += loss / self._training.world.num_workers

    def add(self, count: int, **sums: Tensor | float) -> None:
        """Add to figures that the next line of the record shows as means.

        Args:
            count: over how many items of the global batch each is a mean, such as :attr:`num_targets`; 0: the
                line shows the sum itself.
            sums: this micro-batch's part of each sum, scalars.
        """
        for name, value in sums.items():
            value = torch.as_tensor(value, device=self._loss.device).detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            self.counts[name] = count

    def update(self, *optimizers: Optimizer, max_norm: float | None = None) -> None:
        """Measure and clip the gradients; leaving the step then applies all ``optimizers``.

        The running statistics of batch norms become their means over all workers.

        A gradient norm that is not finite, the same on all workers, skips the updates of all optimizers.

        Args:
            optimizers: one, or several with different parameters, such as Muon and AdamW.
            max_norm: clip the norm over the parameters of all optimizers to it.

        Raises:
            UsageError: it is the second call in this step, the step has no gradients or they were not
                averaged, or an optimizer is not kept in checkpoints.
        """
        training = self._training
        self._require_new(optimizers)
        self._require_gradients(optimizers)
        if self._exchanges_in_update:
            precedence.OWN.begin()
        self.optimizers = optimizers
        self.learning_rate = optimizers[0].param_groups[0]["lr"]
        per_worker = any(not ddp.average for ddp in training.models)
        if training.update.is_synchronous:
            for ddp in filter(lambda each: each.norms, training.models):
                ddp.average_norms()
                training.timer.lap("gradient_wait")
        norm = training.update.finish_gradients(
            *optimizers, max_norm=max_norm, per_worker=per_worker, loss_scale=training.scale.value
        )
        if training.layer_norms is not None:
            self.layer_norms = training.layer_norms.measure(self.number, training.update)
        if isinstance(norm, Tensor):
            self._figures = Readback(norm, self._loss)
        else:  # a GPU was waited for, and not yet given the optimizer's work
            self._figures = [norm, float(self._loss)]

    def _require_new(self, optimizers: Sequence[Optimizer]) -> None:
        """Check the arguments of :meth:`update`."""
        if self.optimizers:
            raise UsageError(
                f"step {self.number} has a second step.update(): give all optimizers to one call, "
                "step.update(a, b), which measures and clips their gradients together"
            )
        if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
            classes = ", ".join(type(each).__name__ for each in optimizers) or "nothing"
            raise UsageError(
                f"step.update() was given {classes}: give it optimizers, one by one: step.update(a, b)"
            )
        parameters = parameters_of(*optimizers)
        if len(set(parameters)) < len(parameters):
            raise UsageError(
                f"step {self.number}: step.update() was given optimizers with the same parameters, which "
                "both would update: give each parameter to one optimizer, and each optimizer once"
            )
        kept = map(id, self._training.kept.values())
        if self._training.saves and not {*map(id, optimizers)} <= {*kept}:
            raise UsageError(
                f"step {self.number}: step.update() was given an optimizer whose state is not in "
                "checkpoints: give it to run.keep too, as in run.keep(model=model, optimizer=optimizer)"
            )

    def _require_update(self) -> None:
        if not self.optimizers:
            raise UsageError(
                f"step {self.number} has no update: call step.update(optimizer) once at the end of "
                "`with step`, after the last micro-batch"
            )

    def sum_figures(self, total: Callable[[Sequence[float]], list[float]]) -> None:
        """Replace this worker's loss and figures by those of all workers. A collective."""
        loss, *sums = total([self.loss, *map(float, self.sums.values())])
        self._figures = [self.grad_norm, loss]
        self.sums = {
            name: torch.tensor(value, dtype=torch.float64)
            for name, value in zip(self.sums, sums, strict=True)
        }

    def _require_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that the gradients are those of :meth:`backward`, averaged over the workers."""
        if not self._has_loss:
            has_gradients = any(p.grad is not None for p in parameters_of(*optimizers))
            reason = (
                "its gradients are those of loss.backward()" if has_gradients else "it has no backward pass"
            )
            raise UsageError(
                f"step {self.number}: {reason}: call step.backward(loss) for each micro-batch of the step"
            )
        for ddp in self._training.models:
            is_due = ddp.average and ddp.require_backward_grad_sync and not ddp.has_averaged
            if is_due and any(p.grad is not None for p in ddp.module.parameters()):
                raise UsageError(
                    f"step {self.number}: gradients were not averaged over the workers: compute the loss "
                    "from what run.data_parallel returned, as in ddp(inputs) instead of model(inputs), and "
                    "go through all micro-batches of the step"
                )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        training = self._training
        if error is None:
            self._require_update()
            error = training.workers.agree(self)
        if error is not None:
            precedence.OWN.end()
            for optimizer in (each for each in training.kept.values() if isinstance(each, Optimizer)):
                optimizer.zero_grad()  # of models without a wrapper, such as FSDP2's
            for ddp, before in zip(training.models, self._before, strict=True):
                ddp.zero_grad()
                ddp.restore_volatile(before)
            return isinstance(error, RetryStep) or training.workers.redo(self, error)
        optimizers = self.optimizers
        if self.is_unread and not training.scale.dynamic:  # else the next backward pass needs the scale
            training.update.apply(*optimizers)  # which skips it on the device, if need be
        else:
            if finite := math.isfinite(self.grad_norm):
                training.update.apply(*optimizers)
            training.scale.update(finite=finite)
        precedence.OWN.end()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for ddp in training.models:
            ddp.zero_grad()  # of weights that this step has not updated
        training.timer.lap("optimizer")
        self.is_done = True
        self._commit(self)
        return False


class RunningMetrics:
    """Averages losses, norms and metrics over the steps since the last line of the record.

    A GPU may not have computed those of the newest step, which are read one step later. Sums stay on the
    device in float64 until :meth:`means` sums them over all workers.

    Args:
        sum_over_workers: sums a CPU tensor ``[n]`` over all workers.

    Attributes:
        num_nonfinite: consecutive steps, up to the last one read, in which this worker's loss is not finite.
    """

    def __init__(self, sum_over_workers: Callable[[Tensor], list[float]]) -> None:
        self._sum_over_workers = sum_over_workers
        self._unread: list[Step] = []
        self.num_nonfinite = 0
        self.reset()

    @property
    def num_unread(self) -> int:
        """Number of steps that are not read yet."""
        return len(self._unread)

    def add(self, step: Step) -> None:
        """Add a step that was done, and read those that a GPU has passed."""
        self._unread.append(step)
        self.read(all_but=int(step.is_unread))

    def read(self, all_but: int = 0) -> None:
        """Read the losses and norms of the steps that were added, without the ``all_but`` newest."""
        while len(self._unread) > all_but:
            step = self._unread.pop(0)
            self.num_nonfinite = 0 if math.isfinite(step.loss) else self.num_nonfinite + 1
            self.add_step(step.loss, step.sums, step.counts, step.grad_norm)

    def reset(self) -> None:
        """Discard all steps."""
        self.grad_norms: list[float] = []
        self._loss = 0.0
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = defaultdict(int)

    def add_step(
        self, loss: float, sums: dict[str, Tensor], counts: dict[str, int], grad_norm: float
    ) -> None:
        """Add one step.

        Args:
            loss: this worker's part of the mean loss over the global batch.
            sums: this worker's part of the sum of each metric, float64 scalars.
            counts: number of items of the global batch over which each metric is a mean.
            grad_norm: not finite if the update was skipped.
        """
        self._loss += loss
        self.grad_norms.append(grad_norm)
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] += counts[name]

    def state(self) -> list[str | list[str] | dict[str, list[str]]]:
        """Return the sums since the last line as JSON values, with floats that may be not finite as texts."""
        self.read()
        sums = {name: [float(value).hex(), str(self._counts[name])] for name, value in self._sums.items()}
        return [self._loss.hex(), [norm.hex() for norm in self.grad_norms], sums]

    def load_state(self, state: Any) -> None:
        """Go on with the sums of :meth:`state`."""
        loss, norms, sums = state
        self._unread.clear()
        self.reset()
        self._loss, self.grad_norms = float.fromhex(loss), [float.fromhex(norm) for norm in norms]
        for name, (value, count) in sums.items():
            self._sums[name] = torch.tensor(float.fromhex(value), dtype=torch.float64)
            self._counts[name] = int(count)

    def means(self, *, uneven: int = 0) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the mean metrics over all workers. A collective.

        Args:
            uneven: the number of workers, if they have not taken the same steps.
        """
        self.read()
        values = [torch.tensor(self._loss, dtype=torch.float64), *(s.cpu() for s in self._sums.values())]
        counts: list[float] = [len(self.grad_norms), *(self._counts[name] for name in self._sums)]
        if uneven:  # the mean of what the workers have counted
            own = torch.tensor(counts, dtype=torch.float64) / uneven
            sums = self._sum_over_workers(torch.cat([torch.stack(values), own]))
            sums, counts = sums[: len(counts)], sums[len(counts) :]
        else:
            sums = self._sum_over_workers(torch.stack(values))
        loss, *means = (value / max(count, 1) for value, count in zip(sums, counts, strict=True))
        return loss, dict(zip(self._sums, means, strict=True))

    def num_skipped(self) -> int:
        """Return the number of steps whose update was skipped because the gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in self.grad_norms)

    def mean_grad_norm(self) -> float:
        """Return the mean gradient norm over the steps that were not skipped."""
        finite = [norm for norm in self.grad_norms if math.isfinite(norm)]
        return sum(finite) / len(finite) if finite else math.nan


# ---- norms of layers ------------------------------------------------------------------------------------


class LayerNorms:
    """Measures the norm of each layer's gradient in the steps that have a line.

    A layer is the part of a model up to the first number in a parameter's name (``encoder.layer.3``), or the
    module that has the parameter.

    Args:
        kept: the state of the run, with its models.
        is_due: returns whether a step has a line.
        control: the workers, which may have different layers.
    """

    def __init__(
        self, kept: Mapping[str, Any], is_due: Callable[[int], bool], control: dist.ProcessGroup | None
    ) -> None:
        self._kept, self._is_due, self._control = kept, is_due, control
        self._layers: dict[str, list[nn.Parameter]] | None = None

    def measure(self, step: int, update: Update) -> dict[str, float]:
        """Return the norms by layer, as they are now; nothing for a step without a line. A collective."""
        if not self._is_due(step):
            return {}
        if self._layers is None:
            own = self._own_layers()
            names = [name for worker in run_on_all(self._control, lambda: list(own)) for name in worker]
            self._layers = {name: own.get(name, []) for name in dict.fromkeys(names)}
        return {name: update.norm_of_gradients(parameters) for name, parameters in self._layers.items()}

    def _own_layers(self) -> dict[str, list[nn.Parameter]]:
        models = {name: each for name, each in self._kept.items() if isinstance(each, nn.Module)}
        layers: dict[str, list[nn.Parameter]] = {}
        for key, model in models.items():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    layer = layer_of(name if len(models) == 1 else f"{key}.{name}")
                    layers.setdefault(layer, []).append(parameter)
        return layers


def layer_of(name: str) -> str:
    """Return the layer of a parameter.

    Example:
        >>> layer_of("encoder.layer.3.attention.weight"), layer_of("head.bias"), layer_of("scale")
        ('encoder.layer.3', 'head', 'scale')
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1]) or name


def before_clipping(norms: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return the norms of layers scaled so that they make up ``whole``, the norm before clipping."""
    total = math.hypot(*norms.values())
    factor = whole / total if total > 0 and math.isfinite(total) and math.isfinite(whole) else 1.0
    return {name: norm * factor for name, norm in norms.items()}
