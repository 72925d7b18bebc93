"""Trains with ``model.fit`` of Keras 3 in several processes, on any of its backends, with resume.

KERAS_BACKEND=jax shoal launch --workers 4 -- python examples/keras_fit.py
KERAS_BACKEND=torch shoal emulate --hosts 4 --nic 200mbit -- python examples/keras_fit.py --backup backup
"""

import argparse

import keras
import numpy as np

import shoal.keras as sk

ROWS, FEATURES, BATCH = 1000, 16, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--backup", help="folder from which a run that was stopped continues")
    arguments = parser.parse_args()
    sk.init()

    points = np.random.default_rng(0).standard_normal((ROWS, FEATURES)).astype("float32")
    labels = 2 * (points[:, 0] > 0) + (points[:, 1] > 0)
    # 14 batches of 64 rows and one of 4, whatever the number of processes
    data = sk.Shards(points[:900], labels[:900], batch_size=BATCH)
    part = slice(900 + 100 * sk.rank() // sk.size(), 900 + 100 * (sk.rank() + 1) // sk.size())

    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(4)]
    )
    model.compile(
        sk.DistributedOptimizer(keras.optimizers.Adam(1e-2)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [sk.Broadcast(0), sk.AverageMetrics(), data.follow_epochs()]
    if arguments.backup and sk.rank() == 0:
        callbacks.insert(0, keras.callbacks.BackupAndRestore(arguments.backup, delete_checkpoint=False))
    history = model.fit(
        data,
        epochs=arguments.epochs,
        validation_data=(points[part], labels[part]),
        callbacks=callbacks,
        verbose=0,
    ).history
    if sk.rank() == 0:
        for epoch, loss, accuracy in zip(
            range(arguments.epochs - len(history["loss"]), arguments.epochs),
            history["loss"],
            history["val_accuracy"],
            strict=True,
        ):
            print(
                f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.2f} on {sk.size()} processes",
                flush=True,
            )


if __name__ == "__main__":
    main()
