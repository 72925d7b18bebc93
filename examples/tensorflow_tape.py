"""Runs a TensorFlow training loop that was written for Horovod; only its import is changed.

shoal launch --workers 4 -- python examples/tensorflow_tape.py
shoal emulate --hosts 4 --nic 200mbit --helpers 4 -- python examples/tensorflow_tape.py
"""

import keras
import numpy as np
import tensorflow as tf

import shoal.tensorflow as hvd  # was: import horovod.tensorflow as hvd

BATCH, STEPS, FEATURES = 64, 60, 16


def main() -> None:
    hvd.init()
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(4)]
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    @tf.function
    def step(points: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(points, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for number in range(1, STEPS + 1):
        points = np.random.default_rng(number).standard_normal((BATCH, FEATURES)).astype("float32")
        labels = 2 * (points[:, 0] > 0) + (points[:, 1] > 0)
        mine = slice(hvd.rank() * BATCH // hvd.size(), (hvd.rank() + 1) * BATCH // hvd.size())
        loss = step(tf.constant(points[mine]), tf.constant(labels[mine]))
        if number % 20 == 0:
            mean = float(hvd.allreduce(loss))
            if hvd.rank() == 0:
                print(f"step {number}: loss {mean:.3f} on {hvd.size()} processes", flush=True)


if __name__ == "__main__":
    main()
