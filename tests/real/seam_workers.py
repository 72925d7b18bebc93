"""Programs of the JAX tests in which JAX's own collectives run on shoal: ``python seam_workers.py NAME``.

They are unchanged programs of ``jax.distributed``; only the first lines choose shoal.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from jax_workers import digest, operands

import shoal.jax

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
COORDINATOR = f"127.0.0.1:{os.environ['COORDINATOR_PORT']}"
ROWS, FEATURES, CLASSES, STEPS = 16, 12, 4, 20
RANDOM = np.random.default_rng(11)
X = RANDOM.standard_normal((STEPS, ROWS, FEATURES)).astype(np.float32)
Y = RANDOM.integers(0, CLASSES, (STEPS, ROWS))


def started() -> Any:
    """Join the processes; return a mesh of all of them."""
    import jax
    from jax.sharding import AxisType

    jax.distributed.initialize(COORDINATOR, SIZE, RANK)
    return jax.make_mesh((SIZE,), ("batch",), axis_types=(AxisType.Auto,))


def flax_model() -> None:
    """Train a model of flax with ``jit`` and shardings, and the same in this process alone."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = started()

    class Classifier(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(CLASSES)(linen.LayerNorm()(linen.tanh(linen.Dense(24)(x))))

    model, optimizer = Classifier(), optax.adam(1e-2)

    def loss(params: Any, x: Any, y: Any) -> Any:
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    def train(place: Any, part: Any) -> list[np.ndarray]:
        params = jax.tree.map(place, model.init(jax.random.key(0), jnp.zeros((1, FEATURES))))
        state = jax.tree.map(place, optimizer.init(params))
        for x, y in zip(X, Y, strict=True):
            params, state = step(params, state, part(x), part(y))
        return [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(params)]

    everywhere, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    share = ROWS // SIZE
    ours = train(
        lambda leaf: jax.make_array_from_process_local_data(everywhere, np.asarray(leaf)),
        lambda rows: jax.make_array_from_process_local_data(
            divided, rows[RANK * share : (RANK + 1) * share], rows.shape
        ),
    )
    here = jax.local_devices()[0]
    alone = train(lambda leaf: jax.device_put(leaf, here), lambda rows: jax.device_put(rows, here))
    differ = max(float(np.abs(a - b).max()) for a, b in zip(ours, alone, strict=True))
    assert differ <= 1e-6, differ


def keras_model() -> None:
    """Train by ``model.fit`` under ``keras.distribution.DataParallel``, as Keras' guide does."""
    import keras

    keras.distribution.initialize(COORDINATOR, SIZE, RANK)
    import jax

    def fit(rows: slice, batch: int) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(24, "tanh"), keras.layers.Dense(CLASSES)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss)
        x, y = X[:, rows].reshape(-1, FEATURES), Y[:, rows].ravel()
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return [np.asarray(weight.value.addressable_data(0)) for weight in model.weights]

    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=jax.devices(), auto_shard_dataset=False)
    )
    share = ROWS // SIZE
    ours = fit(slice(RANK * share, (RANK + 1) * share), share)
    keras.distribution.set_distribution(None)
    alone = fit(slice(None), ROWS)
    differ = max(float(np.abs(a - b).max()) for a, b in zip(ours, alone, strict=True))
    assert differ <= 1e-6, differ


def sums() -> None:
    """Print the digests of ``psum``, which the test compares with those of torch's backend."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_enable_x64", True)
    mesh = started()
    program = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x[0], "batch"), mesh=mesh, in_specs=P("batch"), out_specs=P())
    )
    for dtype in ("float32", "bfloat16", "float64"):
        shares = [
            jax.make_array_from_process_local_data(NamedSharding(mesh, P("batch")), leaf[None])
            for leaf in operands(dtype)[RANK]
        ]
        found = digest([program(share).addressable_data(0) for share in shares])
        if RANK == 0:
            print(f"{dtype} sum {found}")


def collectives() -> None:
    """Print the digests of JAX's collectives, on the devices of all processes or on PLACES of this one."""
    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    if SIZE > 1:
        jax.distributed.initialize(COORDINATOR, SIZE, RANK)
    places, lax = int(os.environ.get("PLACES", SIZE)), jax.lax
    every = np.random.default_rng(3).integers(-99, 99, (places, places, 50)).astype(np.float32)
    ring = [(place, (place + 1) % places) for place in range(places)]
    line = ((places,), ("d",))
    cases: dict[str, Any] = {
        "psum": (line, lambda x: lax.psum(x, "d")),
        "pmean": (line, lambda x: lax.pmean(x, "d")),
        "pmax": (line, lambda x: lax.pmax(x, "d")),
        "pmin": (line, lambda x: lax.pmin(x, "d")),
        "all_gather": (line, lambda x: lax.all_gather(x, "d", tiled=True)),
        "psum_scatter": (line, lambda x: lax.psum_scatter(x[0], "d", tiled=True)),
        "ppermute": (line, lambda x: lax.ppermute(x, "d", ring)),
        "all_to_all": (line, lambda x: lax.all_to_all(x, "d", 1, 0, tiled=True)),
    }
    if places == 4:
        square = ((2, 2), ("a", "b"))
        cases["psum over rows"] = (square, lambda x: lax.psum(x, "a"))
        cases["psum over columns"] = (square, lambda x: lax.psum(x, "b"))
        cases["all_to_all over rows"] = (square, lambda x: lax.all_to_all(x, "a", 1, 0, tiled=True))
    for name, ((shape, axes), function) in cases.items():
        mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
        whole = jax.make_array_from_callback(
            every.shape, NamedSharding(mesh, P(axes)), lambda index: every[index]
        )
        program = jax.shard_map(
            lambda x, function=function, axes=axes: lax.all_gather(function(x), axes),
            mesh=mesh, in_specs=P(axes), out_specs=P(), check_vma=False,
        )  # fmt: skip
        print(f"float of {name}: {digest([jax.jit(program)(whole).addressable_data(0)])}")


def scatter() -> None:
    """Run the program of jax#40830, in which gloo's results differed: psum_scatter of 4 MiB of float64."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_enable_x64", True)
    mesh = started()
    count = (4 << 20) // 8
    every = np.random.default_rng(7).standard_normal((SIZE, count))
    expected = every[0].copy()
    for part in every[1:]:
        expected += part
    share = slice(RANK * count // SIZE, (RANK + 1) * count // SIZE)
    mine = jax.make_array_from_process_local_data(NamedSharding(mesh, P("batch")), every[RANK : RANK + 1])
    program = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum_scatter(x[0], "batch", tiled=True), mesh=mesh,
            in_specs=P("batch"), out_specs=P("batch"),
        )
    )  # fmt: skip
    for run in range(int(os.environ.get("RUNS", "100"))):
        assert np.array_equal(np.asarray(program(mine).addressable_data(0)), expected[share]), run


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    if SIZE > 1:
        shoal.jax.use_collectives(timeout_s=60)
    globals()[sys.argv[1]]()
