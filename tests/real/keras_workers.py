"""Programs of the Keras tests: ``python keras_workers.py NAME,NAME`` in several processes.

The backend is that of KERAS_BACKEND. What they find to be wrong is an AssertionError.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import shoal.keras as sk
from shoal.keras import process

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if os.environ.get("STAGED"):  # tensors on CPUs go as those on GPUs do
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.memory_device import MemoryDevice

    process.DEVICES["cpu"] = lambda _: MemoryDevice(seed=RANK)
BATCH, FEATURES, CLASSES = 12, 16, 4
TOLERANCE = 1e-6
RANDOM = np.random.default_rng(5)
X = RANDOM.standard_normal((20 * BATCH, FEATURES)).astype("float32")
Y = RANDOM.integers(0, CLASSES, len(X))


def classifier(seed: int, optimizer: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(CLASSES)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"], **options)  # padding has no weight
    return model


def alike(model: Any) -> str:
    """Return the digest of a model's weights, which has to be that of all ranks."""
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).digest()
    of_ranks = sk.allgather(np.frombuffer(digest, np.uint8)[None])
    assert (of_ranks == of_ranks[0]).all(), "the weights differ by rank"
    return digest.hex()


def difference(ours: Any, alone: Any) -> float:
    return max(
        float(np.abs(a - b).max()) for a, b in zip(ours.get_weights(), alone.get_weights(), strict=True)
    )


def in_one_process(model: Any, rows: int, epochs: int, batch: int = BATCH) -> Any:
    """Train on the batches of ``Shards``, whole."""
    histories = []
    for epoch in range(epochs):
        order = np.random.default_rng((0, epoch)).permutation(rows)
        histories.append(
            model.fit(X[:rows][order], Y[:rows][order], batch_size=batch, shuffle=False, verbose=0).history
        )
    return histories


def staged() -> None:
    """Count what :func:`training` and :func:`scaling` have sent by way of a device."""
    (tensors,) = process._on_devices.values()
    counts = tensors.staging.lane.counters()
    assert counts["bytes_to_host"] == counts["bytes_to_device"] > 0, counts
    assert counts["events"] <= 2 * counts["chunks"], counts


def training() -> None:
    """Train 20 steps, and 18 with a last batch that leaves ranks without rows; compare with one process."""
    for name, make in (
        ("sgd", lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
        ("adam", lambda: keras.optimizers.Adam(1e-2, global_clipnorm=1.0)),
    ):
        for rows, epochs in ((len(X), 1), (8 * BATCH + BATCH // 4, 2)):
            ours = classifier(RANK, sk.DistributedOptimizer(make()))
            data = sk.Shards(X[:rows], Y[:rows], batch_size=BATCH)
            callbacks = [sk.Broadcast(0), sk.AverageMetrics(), data.follow_epochs()]
            history = ours.fit(data, epochs=epochs, verbose=0, callbacks=callbacks).history
            alone = classifier(0, make())
            histories = in_one_process(alone, rows, epochs)
            differ = difference(ours, alone)
            assert differ <= TOLERANCE, (name, rows, differ)
            if rows == len(X):
                for metric in ("loss", "accuracy"):
                    assert abs(history[metric][0] - histories[0][metric][0]) <= TOLERANCE, metric
            print(f"weights {name} {rows} {alike(ours)} differ by {differ:.1e}")


def accumulation() -> None:
    """Accumulate over 2 micro-batches: only complete gradients are sent."""
    optimizer = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2)
    ours = classifier(RANK, sk.DistributedOptimizer(optimizer))
    data = sk.Shards(X, Y, batch_size=BATCH // 2, shuffle=False)
    ours.fit(data, verbose=0, callbacks=[sk.Broadcast(0)])
    alone = classifier(0, keras.optimizers.Adam(1e-2))
    alone.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert difference(ours, alone) <= TOLERANCE
    alike(ours)
    before = process.group().engine.counters()["ops_all_reduce"]
    ours.fit(data, verbose=0)
    sent = process.group().engine.counters()["ops_all_reduce"] - before
    assert sent == 20, sent  # for 40 micro-batches, with all leaves in one block


def without_input() -> None:
    """Begin with a model whose weights are made by its first batch, as Horovod's own example has it."""
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.layers.Dense(32, "tanh"), keras.layers.Dense(CLASSES)])
    optimizer = sk.DistributedOptimizer(
        keras.optimizers.Adam(1e-2), backward_passes_per_step=1, average_aggregated_gradients=True
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = sk.Shards(X, Y, batch_size=BATCH, shuffle=False)
    model.fit(data, verbose=0, callbacks=[sk.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert len(model.trainable_variables) == 4 and len(optimizer.variables) == 10
    alike(model)
    try:
        sk.DistributedOptimizer(keras.optimizers.Adam(1e-2), backward_passes_per_step=4)
    except ValueError as refusal:
        assert "gradient_accumulation_steps=4" in str(refusal)
    else:
        raise AssertionError("4 passes were taken")


class Subclassed(keras.Model):
    """Makes one layer's weights at once, and the others' in its first call; one layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.unused = (keras.layers.Dense(n, "tanh") for n in (32, CLASSES, 3))
        self.first.build((None, FEATURES))

    def call(self, inputs: Any) -> Any:
        return self.out(self.first(inputs))


def subclassed() -> None:
    """Broadcast what a subclassed model has when training begins, and the rest after its first batch."""
    keras.utils.set_random_seed(RANK)
    model = Subclassed()
    optimizer = sk.DistributedOptimizer(
        keras.optimizers.SGD(0.1), name="Distributed", device_dense="/cpu:0", num_groups=2, groups=None,
        gradient_predivide_factor=2.0, scale_local_gradients=True,
    )  # fmt: skip
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = sk.Shards(X, Y, batch_size=BATCH, shuffle=False)
    model.fit(data, verbose=0, callbacks=[sk.Broadcast(root_rank=0, device="")])
    assert len(model.trainable_variables) == 4
    alike(model)
    for given in ({"process_set": [0]}, {"colour": "red"}, {"gradient_scale": 1.0}):
        try:
            sk.DistributedOptimizer(keras.optimizers.SGD(0.1), **given)
        except (ValueError, TypeError) as refusal:
            assert next(iter(given)) in str(refusal)
        else:
            raise AssertionError(given)
    try:
        print(sk.callbacks.LearningRateScheduleCallback)
    except AttributeError as refusal:
        assert "use keras.callbacks.LearningRateScheduler" in str(refusal)


def scaling() -> None:
    """Give one rank a gradient that is not finite: all skip that step."""
    data = X.copy()
    data[3 * BATCH + BATCH - 1, 0] = np.inf  # of the last rank, in step 3
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
    ours = classifier(RANK, sk.DistributedOptimizer(scaled))
    shards = sk.Shards(data, Y, batch_size=BATCH, shuffle=False)
    ours.fit(shards, verbose=0, callbacks=[sk.Broadcast(0)])
    alone = classifier(0, keras.optimizers.SGD(0.1))
    kept = np.delete(np.arange(len(X)), np.s_[3 * BATCH : 4 * BATCH])
    alone.fit(X[kept], Y[kept], batch_size=BATCH, shuffle=False, verbose=0)
    assert difference(ours, alone) <= TOLERANCE
    assert float(keras.ops.convert_to_numpy(scaled.dynamic_scale.value)) == 512.0
    alike(ours)


def mixed_precision() -> None:
    """Let ``compile`` wrap the optimizer in a LossScaleOptimizer: Broadcast makes the ranks agree."""
    data = X.copy()
    data[3 * BATCH + BATCH - 1, 0] = np.inf
    keras.config.set_dtype_policy("mixed_float16")
    try:
        ours = classifier(RANK, sk.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        assert isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer)
        before = ours.optimizer.initial_scale
        shards = sk.Shards(data, Y, batch_size=BATCH, shuffle=False)
        ours.fit(shards, verbose=0, callbacks=[sk.Broadcast(0)])
    finally:
        keras.config.set_dtype_policy("float32")
    assert all(np.isfinite(weight).all() for weight in ours.get_weights())
    assert float(keras.ops.convert_to_numpy(ours.optimizer.dynamic_scale.value)) < before
    alike(ours)


class Stop(keras.callbacks.Callback):
    """Ends training as a killed job does: by an exception, at the beginning of an epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise InterruptedError


def resume() -> None:
    """Stop after 2 of 4 epochs, begin again with a backup on rank 0: the weights are those of 4 epochs."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for stops in ((), (Stop(),), ()):
            model = classifier(RANK, sk.DistributedOptimizer(keras.optimizers.Adam(1e-2)))
            data = sk.Shards(X, Y, batch_size=BATCH)
            backup = [keras.callbacks.BackupAndRestore(folder)] if RANK == 0 else []
            if not found:
                backup = []
            callbacks = [*backup, sk.Broadcast(0), data.follow_epochs(), *stops]
            try:
                history = model.fit(data, epochs=4, verbose=0, callbacks=callbacks).epoch
            except InterruptedError:
                found.append("stopped")
                continue
            found.append(alike(model))
        assert history == [2, 3]
    assert found[0] == found[2] and found[1] == "stopped"


def metrics() -> None:
    """Compare the metrics of validation on parts of unequal sizes with those on the whole."""
    optimizer = sk.DistributedOptimizer(keras.optimizers.SGD(0.1))
    ours = classifier(RANK, optimizer)
    bounds = [0, *(50 + 30 * rank for rank in range(SIZE - 1)), 180]
    part = slice(bounds[RANK], bounds[RANK + 1])
    seen = ours.fit(
        sk.Shards(X, Y, batch_size=BATCH, shuffle=False), validation_data=(X[part], Y[part]), epochs=2,
        verbose=0, callbacks=[sk.Broadcast(0), sk.AverageMetrics()],
    ).history  # fmt: skip
    alone = classifier(0, keras.optimizers.SGD(0.1))
    expected = alone.fit(
        X, Y, batch_size=BATCH, shuffle=False, validation_data=(X[:180], Y[:180]), epochs=2, verbose=0
    ).history
    assert seen.keys() == expected.keys()
    for name, values in expected.items():
        assert np.allclose(seen[name], values, atol=TOLERANCE), (name, seen[name], values)


def vector_metrics() -> None:
    """Compare a metric that has a number for each class with that of one process on all rows."""
    labels = np.eye(3, dtype="float32")[Y % 3]

    def model_of(optimizer: Any) -> Any:
        keras.utils.set_random_seed(7)
        model = keras.Sequential(
            [keras.layers.Input(X.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(3)]
        )
        model.compile(optimizer, "mse", weighted_metrics=[keras.metrics.F1Score()])
        return model

    ours = model_of(sk.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    seen = ours.fit(
        sk.Shards(X, labels, batch_size=BATCH, shuffle=False), verbose=0,
        callbacks=[sk.Broadcast(0), sk.AverageMetrics()],
    ).history  # fmt: skip
    alone = model_of(keras.optimizers.SGD(0.0))
    expected = alone.fit(X, labels, batch_size=BATCH, shuffle=False, verbose=0).history
    assert np.shape(seen["f1_score"]) == (1, 3)
    assert np.allclose(seen["f1_score"], np.array(expected["f1_score"]), atol=TOLERANCE), (seen, expected)


def steps() -> None:
    """Give ranks other numbers of steps: all get an error that says so."""
    model = classifier(0, sk.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    rows = 24 + 12 * (RANK == SIZE - 1)
    try:
        model.fit(X[:rows], Y[:rows], batch_size=BATCH, verbose=0, callbacks=[sk.Broadcast(0)])
    except ValueError as error:
        expected = f"an epoch has 2 steps on rank 0 and 3 steps on rank {SIZE - 1}; all ranks need the same"
        assert expected in str(error), error
    else:
        raise AssertionError("ranks with other numbers of steps began")


def others() -> None:
    """Values, warm-up, compression, saved models."""
    assert float(sk.allreduce(float(RANK))) == (SIZE - 1) / 2
    assert int(sk.allreduce(RANK, "max")) == SIZE - 1
    assert sk.allgather(np.full(RANK, RANK)).tolist() == [rank for rank in range(SIZE) for _ in range(rank)]
    assert sk.broadcast(np.array([RANK]), SIZE - 1).tolist() == [SIZE - 1]
    optimizer = sk.DistributedOptimizer(keras.optimizers.Adam(1e-2), compression="bfloat16")
    try:
        sk.DistributedOptimizer(optimizer)
    except ValueError as error:
        assert "averages gradients already" in str(error)
    model = classifier(RANK, optimizer)
    rates: list[float] = []

    def note_rate(batch: int, logs: Any) -> None:
        if keras.config.backend() == "jax":
            model.jax_state_sync()
        rates.append(float(model.optimizer.learning_rate))

    note = keras.callbacks.LambdaCallback(on_train_batch_begin=note_rate)
    data = sk.Shards(X, Y, batch_size=BATCH)
    hvd = sk
    model.fit(
        data, epochs=3, verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.LearningRateWarmupCallback(1e-2, warmup_epochs=2), note,
        ],
    )  # fmt: skip
    assert np.isclose(rates[0], 1e-2 / SIZE) and np.isclose(rates[20], 1e-2 * (1 + 1 / SIZE) / 2)
    assert np.allclose(rates[40:], 1e-2)
    alike(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        again = keras.models.load_model(path)
    assert type(again.optimizer).__name__ == "Adam" and type(again.optimizer) is not type(model.optimizer)
    assert difference(again, model) == 0.0


def horovod() -> None:
    """Run the calls of Horovod's example ``tensorflow2_keras_mnist.py``, and each name of the page."""
    hvd = sk
    hvd.barrier()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.001 * hvd.size()), op=hvd.Average, compression=hvd.Compression.fp16
    )
    model = classifier(RANK, optimizer)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.002, warmup_epochs=2, verbose=1),
    ]
    share = len(X) // SIZE
    part = slice(RANK * share, (RANK + 1) * share)
    model.fit(X[part], Y[part], batch_size=BATCH, epochs=3, steps_per_epoch=4, callbacks=callbacks, verbose=0)
    alike(model)
    assert np.isclose(float(model.optimizer.learning_rate), 0.002)
    assert hvd.allreduce(np.float32(RANK), name="a", op=hvd.Sum) == sum(range(SIZE))
    assert hvd.allreduce(np.float32(RANK), average=False) == sum(range(SIZE))
    assert not hvd.nccl_built() and hvd.global_process_set is None
    assert hvd.allreduce(RANK, op=hvd.Max) == SIZE - 1 and hvd.allreduce(RANK + 1, op=hvd.Min) == 1
    assert hvd.allgather([RANK], name="b").tolist() == list(range(SIZE))
    assert hvd.broadcast(RANK, root_rank=SIZE - 1, name="c") == SIZE - 1
    hvd.broadcast_variables(model.variables, 0)
    alike(model)
    assert hvd.is_initialized()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    sk.init(timeout_s=60)
    assert (sk.rank(), sk.size(), sk.local_rank(), sk.local_size()) == (RANK, SIZE, RANK, SIZE)
    for name in sys.argv[1].split(","):
        globals()[name]()
    sk.shutdown()
