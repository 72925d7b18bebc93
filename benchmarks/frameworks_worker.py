"""Workers of ``frameworks``: each function is a job, and imports the frameworks that it uses."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WARM_UPS = 3
FEATURES, HIDDEN, CLASSES, BATCH = 784, 1024, 10, 64


def timed(call: Callable[[], None], spec: dict[str, Any], count: int) -> list[float]:
    """Return seconds of calls; a short call is sampled as the mean of ten."""
    inner = 10 if count < 1 << 18 else 1
    samples = []
    for _ in range(WARM_UPS + int(spec["repeats"])):
        begin = time.perf_counter()
        for _ in range(inner):
            call()
        samples.append((time.perf_counter() - begin) / inner)
    return samples[WARM_UPS:]


def paths(spec: dict[str, Any]) -> dict[str, Any]:
    """Time all-reduces of the same bytes through torch.distributed and through XLA's FFI, by turns."""
    import jax.numpy as jnp
    import torch
    import torch.distributed as dist

    import shoal.jax

    shoal.jax.init()
    os.environ["MASTER_PORT"] = str(spec["torch_port"])
    dist.init_process_group("shoal", init_method="env://")
    reduce = shoal.jax.jit(lambda x: shoal.jax.all_reduce(x, "sum"), donate_argnums=0)
    samples: dict[str, dict[str, list[float]]] = {}
    for count in spec["counts"]:
        tensor, array = torch.zeros(count), jnp.zeros(count)

        def by_torch(tensor: Any = tensor) -> None:
            dist.all_reduce(tensor)

        def by_ffi(kept: list[Any] = [array]) -> None:  # noqa: B006
            kept[0] = reduce(kept[0])
            kept[0].block_until_ready()

        found: dict[str, list[float]] = {"torch": [], "ffi": []}
        part = {**spec, "repeats": max(spec["repeats"] // 3, 3)}
        for _ in range(3):
            found["torch"] += timed(by_torch, part, count)
            found["ffi"] += timed(by_ffi, part, count)
        samples[str(count)] = found
    dist.destroy_process_group()
    return samples


def seam(spec: dict[str, Any]) -> dict[str, Any]:
    """Time ``psum`` of unchanged JAX, over shoal or over jaxlib's gloo."""
    if spec["collectives"] == "shoal":
        import shoal.jax

        shoal.jax.use_collectives()
    import jax
    import numpy as np
    from jax._src import xla_bridge
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    if spec["collectives"] == "gloo":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if address := spec.get("addresses"):  # jaxlib takes the host's name, and has no setting for it
            make = xla_bridge._jax.make_gloo_tcp_collectives
            xla_bridge._jax.make_gloo_tcp_collectives = lambda distributed_client: make(
                distributed_client=distributed_client, hostname=address[RANK], interface="eth0"
            )
    jax.config.update("jax_num_cpu_devices", 1)
    place = f"{os.environ['MASTER_ADDR']}:{spec['port']}"
    jax.distributed.initialize(place, SIZE, RANK, coordinator_bind_address=place)
    mesh = jax.make_mesh((SIZE,), ("d",), axis_types=(AxisType.Auto,))
    psum = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()))
    samples = {}
    for count in spec["counts"]:
        values = jax.make_array_from_process_local_data(
            NamedSharding(mesh, P("d")), np.full((1, count), RANK + 1.0, np.float32)
        )

        def call(values: Any = values) -> None:
            psum(values).block_until_ready()

        samples[str(count)] = timed(call, spec, count)
        found = float(np.asarray(psum(values).addressable_data(0))[0, -1])
        assert found == SIZE * (SIZE + 1) / 2, found
    return samples


def keras_fit(spec: dict[str, Any]) -> dict[str, Any]:
    """Count the examples per second of ``model.fit`` with shoal."""
    import keras

    import shoal.keras as sk

    sk.init()
    x, y = examples(spec, BATCH * SIZE)
    model = classifier(keras, sk.DistributedOptimizer(keras.optimizers.Adam(1e-3)))
    data = sk.Shards(x, y, batch_size=BATCH * SIZE)
    rates: list[float] = []
    begin = [0.0]
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begin.__setitem__(0, time.perf_counter()),
        on_epoch_end=lambda epoch, logs: rates.append(len(x) / (time.perf_counter() - begin[0])),
    )
    model.fit(data, epochs=1 + spec["epochs"], verbose=0, callbacks=[sk.Broadcast(0), clock])
    return {"rates": rates[1:]}


def mirrored(spec: dict[str, Any]) -> dict[str, Any]:
    """Count those of a custom loop under MultiWorkerMirroredStrategy, whose ``fit`` fails with Keras 3."""
    workers = [f"127.0.0.1:{spec['port'] + rank}" for rank in range(SIZE)]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": RANK}}
    )
    import keras
    import tensorflow as tf

    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )
    x, y = examples(spec, BATCH * SIZE)
    mine = slice(RANK * len(x) // SIZE, (RANK + 1) * len(x) // SIZE)
    batches = tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(BATCH).prefetch(tf.data.AUTOTUNE)
    with strategy.scope():
        model = classifier(keras, keras.optimizers.Adam(1e-3))
        optimizer, weights = model.optimizer, model.trainable_variables
        optimizer.build(weights)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    device = f"/job:worker/replica:0/task:{RANK}/device:CPU:0"

    def replica(features: Any, labels: Any) -> None:
        with tf.device(device):
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(features, training=True)) / SIZE
            gradients = [tf.identity(each) for each in tape.gradient(loss, [w.value for w in weights])]
        optimizer.apply(gradients, weights)  # adds up over replicas

    step = tf.function(lambda features, labels: strategy.run(replica, args=(features, labels)))
    rates = []
    for _ in range(1 + spec["epochs"]):
        begin = time.perf_counter()
        for features, labels in batches:
            step(features, labels)
        rates.append(len(x) / (time.perf_counter() - begin))
    return {"rates": rates[1:]}


def training(_: dict[str, Any]) -> dict[str, Any]:
    """Compare gradients and weights of 20 steps with those of one process, for SGD and Adam."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import shoal.jax

    shoal.jax.init()
    random = np.random.default_rng(0)
    widths, rows = [64, 128, 128, 10], 32
    params = [
        (jnp.asarray(random.standard_normal(s) * 0.1, jnp.float32), jnp.zeros(s[1])) for s in pairwise(widths)
    ]
    inputs = random.standard_normal((20, rows, widths[0])).astype(np.float32)
    labels = random.integers(0, widths[-1], (20, rows))

    def loss(params: Any, x: Any, y: Any) -> Any:
        for weights, bias in params[:-1]:
            x = jnp.tanh(x @ weights + bias)
        logits = x @ params[-1][0] + params[-1][1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    gradient = jax.jit(jax.grad(loss))
    share = slice(RANK * rows // SIZE, (RANK + 1) * rows // SIZE)

    def train(optimizer: Any, part: slice, average: Callable[[Any], Any]) -> tuple[Any, Any]:
        own, state, found = params, optimizer.init(params), None
        for x, y in zip(inputs, labels, strict=True):
            found = average(gradient(own, x[part], y[part]))
            updates, state = optimizer.update(found, state, own)
            own = optax.apply_updates(own, updates)
        return jax.tree.leaves(own), jax.tree.leaves(found)

    def apart(ours: Any, alone: Any) -> float:
        return max(float(jnp.abs(a - b).max()) for a, b in zip(ours, alone, strict=True))

    result: dict[str, Any] = {"weights": [], "gradients": [], "alike": True}
    makers: tuple[Callable[[], Any], ...] = (lambda: optax.sgd(0.1, momentum=0.9), lambda: optax.adam(1e-2))
    for make in makers:
        ours, alone = (
            train(make(), share, shoal.jax.all_reduce),
            train(make(), slice(None), lambda tree: tree),
        )
        result["weights"].append(apart(ours[0], alone[0]))
        result["gradients"].append(apart(ours[1], alone[1]))
        digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in ours[0])).digest()
        every = np.asarray(shoal.jax.all_gather(jnp.asarray(np.frombuffer(digest, np.uint8))))
        result["alike"] &= bool((every == every[0]).all())
    return result


def examples(spec: dict[str, Any], batch: int) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    count = spec["steps"] * batch
    return random.standard_normal((count, FEATURES)).astype("float32"), random.integers(0, CLASSES, count)


def classifier(keras: Any, optimizer: Any) -> Any:
    layers = [
        keras.layers.Dense(HIDDEN, "relu"),
        keras.layers.Dense(HIDDEN, "relu"),
        keras.layers.Dense(CLASSES),
    ]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
