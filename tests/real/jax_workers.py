"""Programs of the JAX tests, one function each: ``python jax_workers.py NAME``, in several processes.

Their environment has the wheel and JAX, not torch. What they find to be wrong is an AssertionError.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LEAVES = [(0,), (1,), (3, 5), (), (300, 100), (70_000,)]
"""Shapes: of 0 and 1 elements, below and above the 64 KiB that travel together."""


def operands(dtype: str) -> list[list[np.ndarray]]:
    """Return all ranks' leaves, of bits that a sum in another order would round differently."""
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    random = np.random.default_rng(7)
    return [
        [(random.standard_normal(shape) * 10.0 ** random.integers(-3, 4)).astype(kind) for shape in LEAVES]
        for _ in range(SIZE)
    ]


def digest(leaves: list[Any]) -> str:
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def sums() -> None:
    """Print the digests of sums and means, which the test compares with those of torch's backend."""
    import jax

    import shoal.jax as sj

    assert "torch" not in sys.modules
    sj.init(timeout_s=60)
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        with jax.enable_x64(dtype == "float64"):
            mine = [jax.numpy.asarray(leaf) for leaf in operands(dtype)[RANK]]
            before = digest(mine)
            for op in ("sum", "mean"):
                whole = sj.all_reduce(mine, op)
                compiled = jax.jit(lambda leaves, op=op: sj.all_reduce(leaves, op))(mine)
                apart = [sj.all_reduce(leaf, op) for leaf in mine]
                assert digest(whole) == digest(compiled) == digest(apart), (dtype, op)
                if RANK == 0:
                    print(f"{dtype} {op} {digest(whole)}")
            assert digest(mine) == before, "an array that was not donated has changed"


def shapes() -> None:
    """Compare sums of trees of any shapes with NumPy's in rank order, together and leaf by leaf."""
    import ml_dtypes
    from hypothesis import Phase, given, settings
    from hypothesis import strategies as st

    import shoal.jax as sj

    sj.init(timeout_s=60)
    shape = st.one_of(
        st.tuples(),
        st.tuples(st.integers(0, 2)),
        st.tuples(st.integers(0, 40_000)),
        st.tuples(st.integers(0, 40), st.integers(0, 40)),
    )

    # All ranks draw the same examples. One that fails is not shrunk: the others would not follow.
    @settings(derandomize=True, database=None, deadline=None, max_examples=40, phases=[Phase.generate])
    @given(
        st.lists(shape, min_size=1, max_size=5),
        st.sampled_from(["float32", "bfloat16", "float16"]),
        st.integers(0, 2**32 - 1),
    )
    def check(leaves: list[tuple[int, ...]], dtype: str, seed: int) -> None:
        random, kind = np.random.default_rng(seed), np.dtype(getattr(ml_dtypes, dtype, dtype))
        every = [[random.standard_normal(each).astype(kind) for each in leaves] for _ in range(SIZE)]
        sums = [leaf.astype(np.float32) for leaf in every[0]]
        for rank in every[1:]:
            sums = [total + leaf.astype(np.float32) for total, leaf in zip(sums, rank, strict=True)]
        expected = digest([total.astype(kind) for total in sums])
        assert digest(sj.all_reduce(every[RANK], "sum")) == expected
        assert digest([sj.all_reduce(leaf, "sum") for leaf in every[RANK]]) == expected

    check()


def torch_sums() -> None:
    """Print the digests of the same sums and means through ``torch.distributed``."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("shoal", init_method="env://")
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        for op, reduction in (("sum", dist.ReduceOp.SUM), ("mean", dist.ReduceOp.AVG)):
            leaves = [
                torch.from_numpy(leaf.reshape(-1).view(np.uint8)).view(getattr(torch, dtype))
                for leaf in operands(dtype)[RANK]
            ]
            for leaf in leaves:
                dist.all_reduce(leaf, reduction)
            if RANK == 0:
                print(f"{dtype} {op} {digest([leaf.view(torch.uint8).numpy() for leaf in leaves])}")
    dist.destroy_process_group()


def fake_device(folder: Path, name: str = f"libcudart.so.{RANK}") -> Any:
    """Run programs for CPUs as programs for CUDA devices, on a runtime without a GPU; return that runtime."""
    import ctypes
    import platform
    from functools import partial

    import jax
    from jax.interpreters import mlir

    from shoal.comm import native_build
    from shoal.jax import ffi

    def built(name: str, sources: str, *includes: Path) -> Path:
        return native_build.build(
            native_build.Library(
                title="a test's library", kind=f"test-{name}", name=name,
                sources=Path(__file__).parents[1] / sources,
                versions=(jax.__version__, platform.machine()), includes=includes,
            )
        )  # fmt: skip

    found = folder / name  # by which the handler finds it
    found.symlink_to(built("fake_cudart", "fake_cuda").resolve())
    runtime = ctypes.CDLL(str(found))
    runtime.fake_cuda_seed.argtypes = [ctypes.c_uint64]
    runtime.fake_cuda_count.restype = ctypes.c_uint64
    runtime.fake_cuda_seed(RANK + 1)
    shim = ctypes.CDLL(str(built("on_fake_device", "fake_cuda_jax", Path(jax.ffi.include_dir()))))
    stream = ctypes.c_void_p()
    assert runtime.cudaStreamCreateWithPriority(ctypes.byref(stream), 0, 0) == 0
    shim.use_fake_device(
        ctypes.cast(ffi.library().shoal_jax_device_collective, ctypes.c_void_p), stream,
        ctypes.cast(runtime.cudaStreamSynchronize, ctypes.c_void_p),
    )  # fmt: skip
    target = ffi._TARGETS["cuda"]
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(shim.on_fake_device), platform="cpu")
    mlir.register_lowering(ffi.collective_p, partial(ffi._lower, platform="cuda"), platform="cpu")
    return runtime


def of_devices() -> None:
    """Run the function that ``OF_DEVICES`` names on devices, on each ``OF_EVERY``-th rank."""
    import tempfile

    if RANK % int(os.environ.get("OF_EVERY", "1")):
        globals()[os.environ["OF_DEVICES"]]()
        return
    with tempfile.TemporaryDirectory() as folder:
        runtime = fake_device(Path(folder))
        globals()[os.environ["OF_DEVICES"]]()
        assert runtime.fake_cuda_count(4), "no copy was made"


def broken_device() -> None:
    """Let a copy of rank 1 fail: all ranks get the call that failed, while rank 1 is still there."""
    import tempfile

    import jax
    import jax.numpy as jnp

    import shoal.jax as sj

    with tempfile.TemporaryDirectory() as folder:
        runtime = fake_device(Path(folder))
        sj.init(timeout_s=60)
        program = jax.jit(lambda x: sj.all_reduce(x, "sum"))
        program(jnp.ones(1000)).block_until_ready()
        if RANK == 1:
            runtime.fake_cuda_fail(b"cudaMemcpy2DAsync", 0, 719)
            runtime.fake_cuda_fail(b"cudaMemcpyAsync", 0, 719)
        try:
            program(jnp.ones(1000)).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            assert "cudaErrorLaunchFailure (719): unspecified launch failure" in str(error), error
            met = Path(os.environ["MEET"])
            if RANK == 0:
                met.touch()
            while not met.exists():
                time.sleep(0.01)
            print("rank 0 had the error of rank 1")
            sys.stdout.flush()
            os._exit(0)
        raise AssertionError("a copy failed and nobody noticed")


def without_a_device() -> None:
    """Lower programs for other devices, and run one for CUDA where its runtime is not loaded."""
    import tempfile

    import jax
    import jax.numpy as jnp

    import shoal.jax as sj

    sj.init(timeout_s=60)
    x = jnp.arange(4.0)
    for compiled in (jax.jit(sj.all_reduce), sj.jit(sj.all_reduce)):
        traced = jax.jit(compiled).trace(x)
        for platform, target in (("cuda", "shoal_jax_device_collective"), ("cpu", "shoal_jax_collective")):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert f"@{target}(" in text and text.count("custom_call @shoal") == 1, text
        refused(
            lambda traced=traced: traced.lower(lowering_platforms=("tpu",)),
            "compiled for tpu", "use JAX's own collectives",
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        fake_device(Path(folder), "libother.so")
        try:
            sj.all_reduce(x, "sum").block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            assert "CUDA's runtime 'libcudart.so' is not loaded in this process" in str(error), error
        else:
            raise AssertionError("a runtime was found that is not there")


def refused(call: Callable[[], object], *texts: str) -> None:
    """Check that a call raises NotImplementedError with these texts."""
    try:
        call()
    except NotImplementedError as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(f"nothing was said of {texts}")


def several_devices() -> None:
    """Refuse programs of this process for two devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import shoal.jax as sj

    sj.init(timeout_s=60)
    mesh = jax.make_mesh((2,), ("d",))
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("d")))
    mapped = jax.shard_map(
        sj.all_reduce, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"), check_vma=False
    )
    for program in (sj.jit(lambda x: sj.all_reduce(x, "sum") + 1), sj.jit(mapped)):
        refused(lambda program=program: program(x), "for 2 devices", "start one process for each device")


def alone() -> None:
    """Run every collective in a process without others."""
    import jax
    import jax.numpy as jnp

    import shoal.jax as sj

    try:
        sj.rank()
    except ValueError as error:
        assert "shoal.jax.init() was not called" in str(error)
    sj.init()
    tree = {"a": jnp.arange(4.0), "b": jnp.int32(3)}
    for same in (sj.all_reduce(tree["a"], "sum"), sj.broadcast(tree)["a"], jax.jit(sj.broadcast)(tree)["a"]):
        assert same.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert sj.all_gather(tree)["a"].shape == (1, 4)
    assert sj.reduce_scatter(tree["a"]).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert sj.all_reduce([]) == []
    sj.barrier()


def mixed_sizes() -> None:
    """Sum small leaves that have the size of a large one together; refuse what only devices divide."""
    import jax

    import shoal.jax as sj

    sj.init(timeout_s=60)
    every = [[np.full(size, rank, np.float32) for size in (20_000, 10_000, 10_000)] for rank in range(SIZE)]
    totals = sj.all_reduce([leaf + number for number, leaf in enumerate(every[RANK])], "sum")
    for number, total in enumerate(totals):
        assert np.array_equal(total, np.full(total.shape, sum(range(SIZE)) + SIZE * number)), number
    try:
        np.asarray(sj.all_reduce(np.ones(5_000_000, np.float32), "sum"))
    except jax.errors.JaxRuntimeError as error:
        assert "float32[5000000] in parts, as from a GPU, this one of " in str(error), error
    else:
        raise AssertionError("ranks that divide an array in other ways have summed it")


def collectives() -> None:
    """Compare all collectives with NumPy's results, and the places of donated arrays."""
    import jax
    import jax.numpy as jnp

    import shoal.jax as sj

    sj.init(timeout_s=60)
    assert (sj.rank(), sj.size(), sj.local_rank(), sj.local_size()) == (RANK, SIZE, RANK, SIZE)
    every = np.arange(SIZE * 4 * SIZE * 3, dtype=np.int32).reshape(SIZE, 4 * SIZE, 3) % 97
    mine = {"x": jnp.asarray(every[RANK]), "flag": jnp.asarray(RANK == 1)}
    assert np.array_equal(sj.all_gather(mine)["x"], every)
    assert sj.all_gather(mine)["flag"].tolist() == [rank == 1 for rank in range(SIZE)]
    assert np.array_equal(sj.all_gather(mine["x"], tiled=True), every.reshape(-1, 3))
    assert np.array_equal(sj.reduce_scatter(mine["x"], "sum"), every.sum(0)[4 * RANK : 4 * RANK + 4])
    assert np.array_equal(sj.broadcast(mine, root=SIZE - 1)["x"], every[SIZE - 1])
    for op, reduce in (("max", np.max), ("min", np.min), ("prod", np.prod), ("sum", np.sum)):
        assert np.array_equal(sj.all_reduce(mine["x"], op), reduce(every, axis=0)), op
    assert bool(sj.all_reduce(mine["flag"], "max"))
    assert complex(sj.all_reduce(jnp.complex64(RANK + 1j), "sum")) == sum(range(SIZE)) + SIZE * 1j
    keys = {"key": jax.random.key(RANK), "x": mine["x"]}
    for received in (sj.broadcast(keys)["key"], sj.all_gather(keys)["key"][0]):
        assert jax.random.key_data(received).tolist() == jax.random.key_data(jax.random.key(0)).tolist()
    for dtype, op in (
        ("int32", "mean"), ("bool", "sum"), ("uint32", "max"), ("int16", "sum"), ("key<fry>", "mean")
    ):  # fmt: skip
        try:
            sj.all_reduce(keys["key"] if dtype.startswith("key") else jnp.zeros(2, dtype), op)
        except TypeError as error:
            assert f"an array of dtype {dtype} has no {op} over ranks" in str(error)
        else:
            raise AssertionError(f"{dtype} {op}")
    rounded = sj.all_reduce(jnp.float32(1 + 2**-12), wire="bfloat16")
    assert (rounded.dtype, float(rounded)) == (jnp.float32, 1.0)
    for compiled in (jax.jit, sj.jit):
        values = jnp.full(1 << 20, float(RANK))
        kept = compiled(sj.all_reduce)(values)
        assert float(values[-1]) == RANK and float(kept[-1]) == (SIZE - 1) / 2, "an array was overwritten"
        place = values.unsafe_buffer_pointer()
        mean = compiled(sj.all_reduce, donate_argnums=0)(values)
        assert mean.unsafe_buffer_pointer() == place, "a donated array was copied"
        assert float(mean[-1]) == (SIZE - 1) / 2
    batch = jax.vmap(lambda row: sj.all_reduce(row, "sum"))(jnp.ones((4, 2)))
    assert np.array_equal(batch, np.full((4, 2), SIZE))
    sj.barrier()


def order() -> None:
    """Run 50 calls of random sizes and dependencies in one program, often, on ranks of different speed.

    Programs of ``jax.jit`` and of ``shoal.jax.jit`` take turns, and single calls come between.
    """
    import jax
    import jax.numpy as jnp

    import shoal.jax as sj

    sj.init(timeout_s=60)
    random = np.random.default_rng(3)
    sizes = [int(size) for size in 10 ** random.uniform(0, 4.5, 50)]
    earlier = [
        int(random.integers(0, number)) if number and random.random() < 0.4 else None for number in range(50)
    ]

    def program(seed: Any) -> list[Any]:
        found: list[Any] = []
        for number, (count, before) in enumerate(zip(sizes, earlier, strict=True)):
            base = seed * (number + 1) if before is None else found[before].ravel()[0]
            operand = jnp.full(count, 1.0) * base
            found.append(sj.all_reduce(operand + jnp.float32(sj.rank()), "sum"))

        def step(carry: Any, _: Any) -> Any:
            carry = sj.all_reduce(carry, "mean") + 1
            return carry, jax.lax.cond(carry[0] > 2, lambda x: sj.all_reduce(x, "max"), lambda x: x, carry)

        carry, rows = jax.lax.scan(step, jnp.zeros(3), None, length=4)
        return [*found, carry, rows]

    def expected(seed: float) -> list[np.ndarray]:
        found: list[float] = []
        for number, before in enumerate(earlier):
            base = seed * (number + 1) if before is None else found[before]
            found.append(SIZE * base + sum(range(SIZE)))
        return found

    programs = (sj.jit(program), jax.jit(program))
    for run in range(int(os.environ.get("RUNS", "40"))):
        if run % SIZE == RANK and run % 5 == 0:
            time.sleep(0.01)
        *leaves, carry, _ = programs[run % 2](jnp.float32(run % 3))
        last = sj.all_reduce(carry, "max")  # not waited for
        got = [float(np.asarray(leaf)[-1]) for leaf in leaves]
        assert np.allclose(got, expected(float(run % 3)), rtol=1e-6), run
        assert carry.tolist() == [4.0, 4.0, 4.0]
    sj.barrier()
    assert last.tolist() == [4.0, 4.0, 4.0]


def dispatch() -> None:
    """Run programs of ``shoal.jax.jit``: JAX has no token for them, and they take what ``jax.jit`` takes."""
    import jax
    import jax.numpy as jnp
    from jax._src import dispatch

    import shoal.jax as sj
    from shoal.jax import ffi

    sj.init(timeout_s=60)
    offset = jnp.arange(3.0)

    def step(tree: Any, scale: Any, mode: str) -> Any:
        total = sj.all_reduce(tree, mode)
        jax.debug.callback(lambda value: seen.append(float(value)), total["x"][0], ordered=True)
        return {"x": total["x"] * scale + offset}, mode == "sum"

    seen: list[float] = []
    fast = sj.jit(step, static_argnames="mode", donate_argnums=0)
    value = jnp.full(3, float(RANK))
    total = float(sum(range(SIZE)))
    for mode, scale, first in (("sum", 2.0, 2 * total), ("max", 3.0, 3.0 * (SIZE - 1))):
        tree, is_sum = fast({"x": value + 0.0}, scale, mode=mode)
        assert tree["x"].tolist() == [first, first + 1, first + 2] and is_sum == (mode == "sum")
    sj.all_reduce(value, "sum").block_until_ready()
    jax.effects_barrier()
    assert seen == [total, float(SIZE - 1)]
    assert ffi.ORDER not in dispatch.runtime_tokens.current_tokens
    nested = jax.jit(
        lambda x: fast({"x": x}, 1.0, mode="sum")[0]["x"] + fast({"x": x}, 1.0, mode="max")[0]["x"]
    )
    assert nested(value).tolist() == [total + SIZE - 1 + 2 * k for k in range(3)]
    assert ffi.ORDER in dispatch.runtime_tokens.current_tokens
    if RANK == 0:
        time.sleep(0.1)
    fast({"x": value + 0.0}, 1.0, mode="sum")  # not waited for
    sj.barrier()


def training() -> None:
    """Train 20 steps of Adam on this rank's part of each batch, and in one process on the whole of it."""
    import jax
    import jax.numpy as jnp
    import optax

    import shoal.jax as sj

    sj.init(timeout_s=60)
    random = np.random.default_rng(0)
    widths = [64, 128, 128, 10]
    params = [
        (jnp.asarray(random.standard_normal(shape) * 0.1, jnp.float32), jnp.zeros(shape[1]))
        for shape in pairwise(widths)
    ]
    inputs = random.standard_normal((20, 32, 64)).astype(np.float32)
    labels = random.integers(0, 10, (20, 32))

    def loss(params: Any, x: Any, y: Any) -> Any:
        for weights, bias in params[:-1]:
            x = jnp.tanh(x @ weights + bias)
        logits = x @ params[-1][0] + params[-1][1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def train(optimizer: Any, params: Any, rows: slice) -> Any:
        @sj.jit
        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
            return optax.apply_updates(params, updates), state

        state = optimizer.init(params)
        for x, y in zip(inputs, labels, strict=True):
            params, state = step(params, state, x[rows], y[rows])
        return jax.tree.leaves(params)

    share = 32 // SIZE
    rows = slice(RANK * share, (RANK + 1) * share)
    start = sj.broadcast(jax.tree.map(lambda leaf: leaf + RANK, params))  # rank 0's
    for make in (lambda: optax.sgd(0.1, momentum=0.9), lambda: optax.adam(1e-2)):
        ours = train(sj.distributed(make()), start, rows)
        alone = train(make(), params, slice(None))
        difference = max(float(jnp.abs(a - b).max()) for a, b in zip(ours, alone, strict=True))
        assert difference <= 1e-6, difference
        of_ranks = np.asarray(sj.all_gather(np.frombuffer(bytes.fromhex(digest(ours)), np.uint8)))
        assert (of_ranks == of_ranks[0]).all(), "the weights differ by rank"
        print(f"weights {digest(ours)} differ by {difference:.1e}")


def exact_training() -> None:
    """Train on values of which no sum is rounded: the bits are those of one process."""
    import jax
    import jax.numpy as jnp
    import optax

    import shoal.jax as sj

    sj.init(timeout_s=60)
    random = np.random.default_rng(1)
    inputs = random.integers(-2, 3, (2, 8 * SIZE, 4)).astype(np.float32)
    labels = random.integers(-8, 9, (2, 8 * SIZE)).astype(np.float32)

    def train(optimizer: Any, rows: slice) -> Any:
        weights = jnp.zeros(4)
        state = optimizer.init(weights)
        for x, y in zip(inputs[:, rows], labels[:, rows], strict=True):
            gradient = jax.grad(lambda w, x=x, y=y: 0.5 * ((x @ w - y) ** 2).mean())(weights)
            updates, state = optimizer.update(gradient, state)
            weights = weights + updates
        return weights

    ours = train(sj.distributed(optax.sgd(2**-4)), slice(8 * RANK, 8 * RANK + 8))
    assert digest([ours]) == digest([train(optax.sgd(2**-4), slice(None))])


def lost() -> None:
    """Lose rank 1 in a step: the others get an error that names it."""
    import jax
    import jax.numpy as jnp

    import shoal.jax as sj

    sj.init(timeout_s=60)
    program = jax.jit(lambda x: sj.all_reduce(x, "sum"))
    program(jnp.ones(1000)).block_until_ready()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        program(jnp.ones(1000)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        assert "rank 1" in str(error), error
        assert time.monotonic() - begun < 30
        print("rank 1 was named")
        sys.stdout.flush()
        os._exit(0)
    raise AssertionError("rank 1 is gone and nobody noticed")


def differing() -> None:
    """Submit arrays of other shapes on rank 1: all ranks get both sides."""
    import jax
    import jax.numpy as jnp

    import shoal.jax as sj

    sj.init(timeout_s=60)
    try:
        sj.all_reduce(jnp.ones(100 + RANK), "sum").block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        assert "100" in str(error) and "101" in str(error), error
        os._exit(0)
    raise AssertionError("100 and 101 elements were added")


def mpi() -> None:
    """Run JAX's own collectives on shoal, in an unchanged program of ``jax.distributed``."""
    import shoal.jax

    shoal.jax.use_collectives(timeout_s=60)

    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.distributed.initialize(f"127.0.0.1:{os.environ['COORDINATOR_PORT']}", SIZE, RANK)
    mesh = jax.make_mesh((SIZE,), ("d",), axis_types=(AxisType.Auto,))

    def shard(x: np.ndarray) -> Any:
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), x)

    def run(function: Callable[..., Any], x: Any, *out: Any) -> np.ndarray:
        specs = {"in_specs": P("d"), "out_specs": out[0] if out else P("d")}
        mapped = jax.shard_map(function, mesh=mesh, check_vma=False, **specs)
        return np.asarray(jax.jit(mapped)(x).addressable_data(0))

    every = np.random.default_rng(7).standard_normal((SIZE, SIZE, 1000)).astype(np.float32)
    mine = shard(every[RANK : RANK + 1])
    in_rank_order = every[0]
    for part in every[1:]:
        in_rank_order = in_rank_order + part
    lax = jax.lax
    assert np.array_equal(run(lambda x: lax.psum(x, "d"), mine, P())[0], in_rank_order)
    assert np.array_equal(run(lambda x: lax.pmax(x, "d"), mine, P())[0], every.max(0))
    assert np.array_equal(run(lambda x: lax.all_gather(x, "d", tiled=True), mine, P()), every)
    scattered = run(lambda x: lax.psum_scatter(x[0], "d", tiled=True), mine)
    assert np.array_equal(scattered, in_rank_order[RANK : RANK + 1])
    ring = [(rank, (rank + 1) % SIZE) for rank in range(SIZE)]
    assert np.array_equal(run(lambda x: lax.ppermute(x, "d", ring), mine), every[(RANK - 1) % SIZE][None])
    exchanged = run(lambda x: lax.all_to_all(x, "d", 1, 0, tiled=True), mine)
    assert np.array_equal(exchanged, every[:, RANK : RANK + 1])
    for dtype in (jnp.int32, jnp.complex64, jnp.bfloat16, jnp.bool_):
        whole = (every * 8).astype(np.int32) % 8
        added = run(lambda x: lax.psum(x, "d"), shard(np.asarray(whole[RANK : RANK + 1], dtype)), P())
        assert np.array_equal(
            added[0], np.asarray(whole, dtype).astype(added.dtype).sum(0, dtype=added.dtype)
        ), dtype
    weights = jax.device_put(jnp.ones((256, 256)), NamedSharding(mesh, P()))
    batch = shard(np.full((8, 256), RANK + 1.0, np.float32))
    gradient = jax.jit(jax.grad(lambda w, x: ((x @ w) ** 2).mean()), out_shardings=NamedSharding(mesh, P()))(
        weights, batch
    )
    expected = 2 * np.mean([(rank + 1.0) ** 2 for rank in range(SIZE)])
    assert np.allclose(np.asarray(gradient.addressable_data(0)), expected, rtol=1e-6)
    if SIZE == 4:
        two = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        x = jax.make_array_from_process_local_data(
            NamedSharding(two, P("a", "b")), np.full((1, 1), 10.0**RANK, np.float32), (2, 2)
        )
        both = jax.jit(
            jax.shard_map(
                lambda x: (lax.psum(x, "a"), lax.psum(x, "b")),
                mesh=two, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=False,
            )
        )(x)  # fmt: skip
        got = [float(np.asarray(each.addressable_data(0))[0, 0]) for each in both]
        assert got == [10.0 ** (RANK % 2) + 10.0 ** (RANK % 2 + 2), 11.0 if RANK < 2 else 1100.0]
    repeat = jax.jit(
        jax.shard_map(
            lambda x: lax.psum_scatter(x[0], "d", tiled=True), mesh=mesh, in_specs=P("d"), out_specs=P("d")
        )
    )
    for _ in range(int(os.environ.get("RUNS", "200"))):  # gloo's results differed from run to run (jax#40830)
        assert np.array_equal(np.asarray(repeat(mine).addressable_data(0)), scattered)


def too_late() -> None:
    """Choose the collectives after JAX has been imported."""
    import jax  # noqa: F401

    import shoal.jax

    shoal.jax.use_collectives()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    globals()[sys.argv[1]]()
