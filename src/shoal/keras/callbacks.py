"""Defines callbacks of ``model.fit`` that synchronize the ranks when training begins, and average metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from shoal.comm import arrays
from shoal.comm.horovod import check_keywords, load
from shoal.errors import UsageError
from shoal.keras import optimizer as optimizers
from shoal.keras import process

Result = float | npt.NDArray[Any]
"""A metric's: a number, or one for each class."""
_UNKNOWN = -1


class Broadcast(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Gives the model and the optimizer of all ranks the state of one rank when training begins.

    Weights, the optimizer's variables and the epoch at which training begins are those of rank
    ``root_rank``. Put it behind a callback that restores them there, such as
    ``keras.callbacks.BackupAndRestore``. States of random generators, as of dropout, stay as they are. A
    model whose layers have no weights yet, as on TensorFlow a subclassed one or a ``Sequential`` without an
    ``Input``, gets them by its first batch, after which all are sent.

    It also checks that all ranks have the same number of steps per epoch, makes a ``LossScaleOptimizer`` from
    ``compile`` agree on all ranks, and switches XLA off on TensorFlow, which has no shoal in it.

    Args:
        root_rank: rank whose state is sent.
        **others: Horovod's keywords that change nothing, such as ``device``.

    Raises:
        UsageError: when training begins: there is no such rank, or ranks have other numbers of steps.

    Example:
        >>> import shoal.keras as sk
        >>> callbacks = [sk.Broadcast(0), sk.AverageMetrics()]
    """

    def __init__(self, root_rank: int = 0, **others: Any) -> None:
        super().__init__()
        check_keywords("Broadcast", others)
        self.root_rank = root_rank
        self._is_due = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Send the state of rank ``root_rank``."""
        if not 0 <= self.root_rank < process.size():
            raise UsageError(f"root_rank {self.root_rank} is no rank; ranks are 0 to {process.size() - 1}")
        model = self.model
        _check_steps((self.params or {}).get("steps"))
        scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        if (
            scaled
            and optimizers.is_distributed(model.optimizer.inner_optimizer)
            and not optimizers.is_distributed(model.optimizer)
        ):
            optimizers.agree_on_overflow(model.optimizer)
        if process.backend() == "tensorflow" and model.jit_compile:
            model.jit_compile = False
            model.make_train_function(force=True)
        is_built = process.backend() != "tensorflow" or all(each.built for each in model._flatten_layers())
        own = np.array([len(model.weights), is_built], np.int64)
        of_ranks = arrays.all_gather(process.group(), [own])[0]
        self._is_due = not of_ranks[:, 1].all()
        if not self._is_due:
            self._send()
        elif (of_ranks[:, 0] == of_ranks[0, 0]).all():  # else a backup has built it on the rank that restores
            broadcast_variables(model.weights, self.root_rank)
        epoch = np.array([model._initial_epoch or 0], np.int64)
        arrays.broadcast(process.group(), [epoch], self.root_rank)
        model._initial_epoch = int(epoch[0])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Send the state of rank ``root_rank`` after the first batch if the model had none before."""
        if self._is_due:
            self._is_due = False
            self._send()

    def _send(self) -> None:
        model = self.model
        if model.optimizer and not model.optimizer.built:  # a backup builds it on the rank that restores
            model.optimizer.build(model.trainable_variables)
        variables = [*model.weights, *(model.optimizer.variables if model.optimizer else ())]
        broadcast_variables(variables, self.root_rank)


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Give Keras variables the values of rank ``root_rank``.

    Args:
        variables: with the same shapes and dtypes on all ranks.
        root_rank: rank whose values are sent.

    Raises:
        CommError: a rank was lost, or ranks differ.
        UsageError: ``init`` was not called.
    """
    targets = list({id(each): each for each in variables}.values())
    values = [np.array(keras.ops.convert_to_numpy(each.value), order="C") for each in targets]
    arrays.broadcast(process.group(), values, root_rank)
    for target, value in zip(targets, values, strict=True):
        target.assign(value)


class AverageMetrics(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Averages the metrics of an epoch, training's and validation's, over the samples of all ranks.

    Put it before callbacks that read them, such as ``EarlyStopping`` and ``ModelCheckpoint``, so that all
    ranks make the same decisions. The states of metrics, such as sums and counts, are added, so that ranks
    are weighted by their samples; other entries of the logs are averaged.

    Args:
        **others: Horovod's keywords that change nothing, such as ``device``.

    Example:
        >>> import shoal.keras as sk
        >>> callbacks = [sk.Broadcast(0), sk.AverageMetrics()]
    """

    def __init__(self, **others: Any) -> None:
        super().__init__()
        check_keywords("AverageMetrics", others)
        self._train: dict[str, Result] | None = None
        self._validation: dict[str, Result] | None = None
        self._in_epoch = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forget the metrics of the epoch before."""
        self._train = self._validation = None
        self._in_epoch = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keep the metrics of training, whose states validation resets."""
        if self._in_epoch:
            self._train = self._over_ranks()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Keep the metrics of validation."""
        if self._in_epoch:
            self._validation = self._over_ranks()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the logs of this rank."""
        self._in_epoch = False
        if logs is None:
            return
        results = self._over_ranks() if self._train is None else self._train
        results |= {f"val_{name}": value for name, value in (self._validation or {}).items()}
        others = [name for name in sorted(logs) if name not in results]
        values = [np.array(logs[name], dtype=np.float64) for name in others]
        if others:
            arrays.all_reduce(process.group(), values)
        results |= {name: _as_result(value) for name, value in zip(others, values, strict=True)}
        logs.update({name: results[name] for name in logs})

    def _over_ranks(self) -> dict[str, Result]:
        """Return the results of the model's metrics on the states of all ranks."""
        variables = self.model.metrics_variables
        own = [np.array(keras.ops.convert_to_numpy(each.value), order="C") for each in variables]
        states = [np.array(each) for each in own]
        for aggregation, operation in (("sum", "sum"), ("mean", "avg")):
            chosen = [
                state
                for state, variable in zip(states, variables, strict=True)
                if variable.aggregation == aggregation
            ]
            arrays.all_reduce(process.group(), chosen, operation)
        _assign(variables, states)
        results = self.model.get_metrics_result()
        scalars = {name: _as_result(keras.ops.convert_to_numpy(value)) for name, value in results.items()}
        _assign(variables, own)
        return scalars


class LearningRateWarmup(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Raises the learning rate linearly from that of one rank to that of all ranks.

    As Horovod's ``LearningRateWarmupCallback``, after Goyal et al. (2017), "Accurate, Large Minibatch SGD",
    section 2.2: from ``initial_lr / size`` to ``initial_lr``, after each batch.

    Args:
        initial_lr: learning rate for all ranks, reached when the epochs have passed.
        warmup_epochs: number of epochs.
        steps_per_epoch: ``None``: that of ``fit``.
        verbose: 1: rank 0 prints when the rate is reached.
        **others: Horovod's keywords that change nothing; ``momentum_correction`` only if False.

    Raises:
        UsageError: when training begins: the number of steps is not known, or the optimizer has a schedule.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        **others: Any,
    ) -> None:
        super().__init__()
        check_keywords("LearningRateWarmup", others)
        self._says = bool(verbose)
        self.initial_lr, self.warmup_epochs, self.steps_per_epoch = initial_lr, warmup_epochs, steps_per_epoch
        self._steps, self._epoch = 0, 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Look up the number of steps."""
        self._steps = int(self.steps_per_epoch or (self.params or {}).get("steps") or 0)
        if not self._steps:
            raise UsageError("LearningRateWarmup needs the number of steps of an epoch: give steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the learning rate."""
        passed = (self._epoch + batch / self._steps) / self.warmup_epochs
        if passed > 1 + 1 / (self._steps * self.warmup_epochs):
            return
        if process.backend() == "jax":
            self.model.jax_state_sync()  # within an epoch the variables are in the compiled step's hands
        first = self.initial_lr / process.size()
        try:
            self.model.optimizer.learning_rate = first + min(passed, 1.0) * (self.initial_lr - first)
        except TypeError as problem:
            raise UsageError(f"LearningRateWarmup cannot set the learning rate: {problem}") from None
        if passed >= 1 and self._says and process.rank() == 0:
            self._says = False
            print(f"\nLearningRateWarmup: epoch {self._epoch + 1} begins at {self.initial_lr}")


BroadcastGlobalVariablesCallback = Broadcast
MetricAverageCallback = AverageMetrics
LearningRateWarmupCallback = LearningRateWarmup


def __getattr__(name: str) -> Any:
    """Say why a callback of Horovod is not here."""
    return load(__name__, {}, name)


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _check_steps(steps: int | None) -> None:
    """Raise a UsageError on all ranks if their numbers of steps differ."""
    own = np.array([_UNKNOWN if steps is None else steps], np.int64)
    of_ranks = arrays.all_gather(process.group(), [own])[0].ravel().tolist()
    for rank, number in enumerate(of_ranks):
        if number != of_ranks[0]:
            raise UsageError(
                f"an epoch has {_count(of_ranks[0])} on rank 0 and {_count(number)} on rank {rank}; all "
                "ranks need the same number: use shoal.keras.Shards, or fit(steps_per_epoch=...)"
            )


def _count(number: int) -> str:
    return "an unknown number of steps" if number == _UNKNOWN else f"{number} steps"


def _as_result(value: npt.NDArray[Any]) -> Result:
    """Return a number, or the array of a metric that has one for each class, as ``F1Score`` has."""
    return float(value) if value.ndim == 0 else value
