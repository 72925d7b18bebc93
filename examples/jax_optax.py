"""Trains with JAX and optax in several processes; shoal averages the gradients inside a jitted step.

python examples/jax_optax.py
shoal launch --workers 4 -- python examples/jax_optax.py
shoal emulate --hosts 4 --nic 200mbit -- python examples/jax_optax.py
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shoal.jax

BATCH, STEPS, WIDTHS = 64, 60, (16, 64, 4)


def samples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch: points, and in which quarter of the first two dimensions they lie."""
    points = np.random.default_rng(seed).standard_normal((BATCH, WIDTHS[0])).astype(np.float32)
    return points, 2 * (points[:, 0] > 0) + (points[:, 1] > 0)


def loss_of(params, points, labels):
    hidden = points
    for weights, bias in params[:-1]:
        hidden = jnp.tanh(hidden @ weights + bias)
    logits = hidden @ params[-1][0] + params[-1][1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> None:
    shoal.jax.init()
    rank, size = shoal.jax.rank(), shoal.jax.size()
    keys = jax.random.split(jax.random.key(rank), len(WIDTHS))
    params = [
        (jax.random.normal(key, shape) / shape[0] ** 0.5, jnp.zeros(shape[1]))
        for key, shape in zip(keys, pairwise(WIDTHS), strict=False)
    ]
    params = shoal.jax.broadcast(params)  # rank 0's
    optimizer = shoal.jax.distributed(optax.adam(1e-2))

    @shoal.jax.jit
    def step(params, state, points, labels):
        loss, gradients = jax.value_and_grad(loss_of)(params, points, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    for number in range(1, STEPS + 1):
        points, labels = samples(number)
        mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        params, state, loss = step(params, state, points[mine], labels[mine])
        if number % 20 == 0:
            mean = float(shoal.jax.all_reduce(loss))
            if rank == 0:
                print(f"step {number}: loss {mean:.3f} on {size} processes", flush=True)


if __name__ == "__main__":
    main()
