"""Programs of the TensorFlow tests: ``python tensorflow_workers.py NAME,NAME`` in several processes.

What they find to be wrong is an AssertionError.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from jax_workers import operands

import shoal.tensorflow as hvd
from shoal.tensorflow import op

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def digest(leaves: list[Any]) -> str:
    arrays = (leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf for leaf in leaves)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def sums() -> None:
    """Print the digests of sums and means, which the test compares with those of torch's backend."""
    assert "torch" not in sys.modules and (op.compiled() is None) == bool(os.environ.get("FALLBACK"))
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        mine = [tf.constant(leaf) for leaf in operands(dtype)[RANK]]
        before = digest(mine)
        for name, reduction in (("sum", hvd.Sum), ("mean", hvd.Average)):
            whole = hvd.grouped_allreduce(mine, op=reduction)
            compiled = tf.function(
                lambda leaves, reduction=reduction: hvd.grouped_allreduce(leaves, op=reduction)
            )
            apart = [hvd.allreduce(leaf, op=reduction) for leaf in mine]
            assert digest(whole) == digest(compiled(mine)) == digest(apart), (dtype, name)
            if RANK == 0:
                print(f"{dtype} {name} {digest(whole)}")
        assert digest(mine) == before, "an operand has changed"


def collectives() -> None:
    """Compare all collectives with NumPy's results, and what is refused."""
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (RANK, SIZE, RANK, SIZE)
    every = np.arange(SIZE * 4 * SIZE * 3, dtype=np.int32).reshape(SIZE, 4 * SIZE, 3) % 97
    mine = tf.constant(every[RANK])
    for run in (lambda function: function, lambda function: tf.function(function)):
        assert np.array_equal(run(hvd.broadcast)(mine, SIZE - 1), every[SIZE - 1])
        rows = [np.full((rank, 2), rank, np.int64) for rank in range(SIZE)]
        assert np.array_equal(run(hvd.allgather)(tf.constant(rows[RANK])), np.concatenate(rows))
        part = run(lambda x: hvd.reducescatter(x, op=hvd.Sum))(mine)
        assert np.array_equal(part, every.sum(0)[4 * RANK : 4 * RANK + 4])
        for rows in (0, 1, 2 * SIZE + 1, 3 * SIZE - 1):
            cut = np.array_split(every.sum(0)[:rows], SIZE)[RANK]
            assert np.array_equal(run(lambda x: hvd.reducescatter(x, op=hvd.Sum))(mine[:rows]), cut), rows
        any_length = tf.function(
            lambda x: hvd.reducescatter(x, op=hvd.Sum), input_signature=[tf.TensorSpec([None, 3], tf.int32)]
        )
        for rows in (SIZE, SIZE + 1):
            assert np.array_equal(any_length(mine[:rows]), np.array_split(every.sum(0)[:rows], SIZE)[RANK])
        for reduction, expected in ((hvd.Max, np.max), (hvd.Min, np.min), (hvd.Product, np.prod)):
            found = run(lambda x, reduction=reduction: hvd.allreduce(x, op=reduction))(mine)
            assert np.array_equal(found, expected(every, axis=0)), reduction
        pairs = tf.constant([[RANK + 1j], [2j]], tf.complex64)
        total = np.array([[sum(range(SIZE)) + SIZE * 1j], [SIZE * 2j]])
        assert np.array_equal(run(lambda x: hvd.allreduce(x, op=hvd.Sum))(pairs), total)
        flags = run(hvd.allgather)(tf.constant([RANK == 1]))
        assert flags.numpy().tolist() == [rank == 1 for rank in range(SIZE)]
    rounded = hvd.allreduce(tf.constant(1 + 2**-12), compression=hvd.Compression.bf16)
    assert (rounded.dtype, float(rounded)) == (tf.float32, 1.0)
    scaled = hvd.allreduce(tf.constant(4.0), prescale_factor=0.5, postscale_factor=3.0)
    assert float(scaled) == 6.0
    variable = tf.Variable([float(RANK)])
    hvd.broadcast_variables([variable], root_rank=SIZE - 1)
    assert float(variable[0]) == SIZE - 1
    assert hvd.broadcast_object({"epoch": RANK + 3}, root_rank=0) == {"epoch": 3}
    assert hvd.broadcast_object({RANK: (1, [None])}, root_rank=1) == {1: (1, [None])}
    assert hvd.allgather_object([RANK]) == [[rank] for rank in range(SIZE)]
    for dtype, reduction in (("int32", "mean"), ("bool", "sum"), ("uint32", "max"), ("int16", "sum")):
        try:
            hvd.allreduce(tf.zeros(2, dtype), op=reduction)
        except TypeError as error:
            assert f"a tensor of dtype {dtype} has no {reduction} over ranks" in str(error)
        else:
            raise AssertionError(f"{dtype} {reduction}")
    by_xla = tf.function(lambda: hvd.allreduce(tf.zeros(2)), jit_compile=True)
    try:
        by_xla()
    except Exception as error:  # AutoGraph makes an error of its own of it
        assert "XLA compiles only TensorFlow's own operations" in str(error), error
    else:
        raise AssertionError("XLA has compiled a collective")
    hvd.barrier()


def order() -> None:
    """Run 40 calls of random sizes and dependencies in one function, on ranks of different speed."""
    random = np.random.default_rng(3)
    sizes = [int(size) for size in 10 ** random.uniform(0, 4.5, 40)]
    earlier = [int(random.integers(0, k)) if k and random.random() < 0.4 else None for k in range(40)]

    @tf.function
    def program(seed: Any) -> Any:
        found: list[Any] = []
        for number, (count, before) in enumerate(zip(sizes, earlier, strict=True)):
            base = seed * (number + 1) if before is None else found[before][0]
            operand = tf.fill([count], base) + tf.cast(hvd.rank(), tf.float32)
            found.append(hvd.allreduce(operand, op=hvd.Sum))
        carry = tf.zeros(3)
        for _ in tf.range(4):
            carry = hvd.allreduce(carry) + 1
            if carry[0] > 2:
                hvd.allreduce(carry, op=hvd.Max)
        return [leaf[-1] for leaf in found], carry

    for run in range(int(os.environ.get("RUNS", "20"))):
        if run % SIZE == RANK and run % 5 == 0:
            time.sleep(0.01)
        seed = float(run % 3)
        got, carry = program(tf.constant(seed))
        expected: list[float] = []
        for number, before in enumerate(earlier):
            base = seed * (number + 1) if before is None else expected[before]
            expected.append(SIZE * base + sum(range(SIZE)))
        assert np.allclose([float(value) for value in got], expected, rtol=1e-6), run
        assert carry.numpy().tolist() == [4.0, 4.0, 4.0]


def training() -> None:
    """Train 20 steps with an embedding on a part of each batch, and in one process on the whole."""
    import keras

    random = np.random.default_rng(0)
    tokens, labels = random.integers(0, 50, (20, 60, 5)), random.integers(0, 10, (20, 60))

    def train(distributed: bool, rows: slice, dense: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(RANK if distributed else 0)
        layers = [keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
        weights = model.trainable_variables
        velocity = [tf.Variable(tf.zeros_like(each.value)) for each in weights]
        if distributed:
            hvd.broadcast_variables(model.variables, root_rank=0)

        @tf.function
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x, training=True))
                )
            if distributed:
                tape = hvd.DistributedGradientTape(tape, sparse_as_dense=dense)
            gradients = tape.gradient(loss, [each.value for each in weights])
            assert isinstance(gradients[0], tf.IndexedSlices) != (distributed and dense)
            for weight, moment, gradient in zip(weights, velocity, gradients, strict=True):
                moment.assign(0.9 * moment + tf.convert_to_tensor(gradient))
                weight.value.assign_sub(0.1 * moment)

        for x, y in zip(tokens, labels, strict=True):
            step(tf.constant(x[rows]), tf.constant(y[rows]))
        return [np.asarray(weight) for weight in model.get_weights()]

    share = 60 // SIZE
    alone = train(False, slice(None), False)
    for dense in (False, True):
        ours = train(True, slice(RANK * share, (RANK + 1) * share), dense)
        differ = max(float(np.abs(a - b).max()) for a, b in zip(ours, alone, strict=True))
        assert differ <= 1e-6, differ
        assert len(set(hvd.allgather_object(digest(ours)))) == 1
        print(f"weights {dense} differ by {differ:.1e}")


def horovod() -> None:
    """Run the calls of Horovod's example ``tensorflow2_mnist.py``, and each name of the page."""
    import keras

    hvd.barrier()
    random = np.random.default_rng(RANK)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.001 * hvd.size())

    @tf.function
    def training_step(images: Any, labels: Any, first_batch: bool) -> Any:
        with tf.GradientTape() as tape:
            loss_value = loss(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(
            tape,
            device_dense="",
            compression=hvd.Compression.fp16,
            gradient_predivide_factor=2.0,
            num_groups=1,
        )
        gradients = tape.gradient(loss_value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss_value

    for batch in range(4):
        images, labels = random.standard_normal((5, 6)).astype("float32"), random.integers(0, 3, 5)
        training_step(tf.constant(images), tf.constant(labels), batch == 0)
        if batch == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
    assert len(set(hvd.allgather_object(digest(model.get_weights()), name="digest"))) == 1
    mine, mean = tf.constant([float(RANK), 2.0]), (SIZE - 1) / 2
    for averaged in (
        hvd.allreduce(mine, name="a", op=hvd.Average, compression=hvd.Compression.none),
        hvd.grouped_allreduce([mine], op=hvd.Average, name="b")[0],
    ):
        assert averaged.numpy().tolist() == [mean, 2.0]
    assert hvd.broadcast(mine, root_rank=SIZE - 1, name="c").numpy().tolist() == [SIZE - 1.0, 2.0]
    assert hvd.broadcast_object([RANK, "x"], root_rank=0, name="d") == [0, "x"]
    gathered = hvd.grouped_allgather([mine, mine[:1]], name="e")
    assert [len(each) for each in gathered] == [2 * SIZE, SIZE]
    assert len(hvd.allgather(mine, name="f")) == 2 * SIZE
    assert len(hvd.reducescatter(tf.ones(SIZE), op=hvd.Sum, name="g")) == 1
    assert hvd.is_initialized()
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)
    assert isinstance(wrapped, keras.optimizers.SGD)


def memory() -> None:
    """Count the page faults of steps of training: few, since freed memory is kept."""
    import keras

    import shoal.keras as sk

    random = np.random.default_rng(0)
    x, y = random.standard_normal((16 * 64 * SIZE, 784)).astype("float32"), np.zeros(16 * 64 * SIZE)
    layers = [keras.layers.Dense(1024, "relu"), keras.layers.Dense(1024, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((784,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss)
    data = sk.Shards(x, y, batch_size=64 * SIZE)
    model.fit(data, verbose=0, callbacks=[sk.Broadcast(0)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.fit(data, verbose=0)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 16 * 1000, faults  # 16 steps; without kept memory 8,500 each


def lost() -> None:
    """Lose rank 1 in a step: the others get an error that names it."""
    program = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    program(tf.ones(1000))
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        program(tf.ones(1000))
    except tf.errors.AbortedError as error:
        assert "rank 1" in str(error), error
        assert time.monotonic() - begun < 30
        print("rank 1 was named")
        sys.stdout.flush()
        os._exit(0)
    raise AssertionError("rank 1 is gone and nobody noticed")


def differing() -> None:
    """Submit tensors of other shapes on rank 1: all ranks get both sides."""
    try:
        hvd.allreduce(tf.ones(100 + RANK), op=hvd.Sum)
    except tf.errors.AbortedError as error:
        assert "100" in str(error) and "101" in str(error), error
        os._exit(0)
    raise AssertionError("100 and 101 elements were added")


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    hvd.init(timeout_s=60)
    for name in sys.argv[1].split(","):
        globals()[name]()
    hvd.shutdown()
