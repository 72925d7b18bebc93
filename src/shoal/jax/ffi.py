"""Defines the primitive of JAX by which a collective enters a program, and its lowering to one FFI call.

The primitive has an ordered effect, so that the calls of a program, in ``scan`` and ``cond`` too, and those
of programs one after the other run in the order in which the user wrote them: all ranks must submit in the
same order, and XLA orders by data alone. JAX passes a token from call to call for it.
"""

from __future__ import annotations

import ctypes
import platform as machine
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import core, effects
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.lib import __version__ as jaxlib_version

from shoal.comm import native_build
from shoal.errors import ShoalError, UsageError

_TARGETS = {"cpu": "shoal_jax_collective", "cuda": "shoal_jax_device_collective"}
"""Handler by platform."""
KINDS = {"all_reduce": 0, "broadcast": 2, "all_gather": 3, "reduce_scatter": 4}
"""Numbers of ``shoal_kind`` in ``shoal.h``."""
REDUCTIONS = {"sum": 0, "mean": 1, "prod": 2, "min": 3, "max": 4}
"""Numbers of ``shoal_reduction`` in ``shoal.h``."""
_IN_PLACE = ("all_reduce", "broadcast")


class _SubmissionOrder(effects.Effect):  # type: ignore[misc]
    def __str__(self) -> str:
        return "shoal's order"


ORDER = _SubmissionOrder()
for _allowed in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.ordered_effects,
    effects.custom_derivatives_allowed_effects,
):
    _allowed.add_type(_SubmissionOrder)

collective_p = Primitive("shoal_collective")
"""Operands: arrays. Results: one for each. Parameters: those of :func:`bind`."""
collective_p.multiple_results = True


@cache
def library() -> ctypes.CDLL:
    """Return the library with the handlers, compiled when the cache lacks it.

    Its source includes XLA's headers, which the installed jaxlib brings: what is compiled fits that version.

    Raises:
        UsageError: there is no compiler.
        ShoalError: it cannot be compiled or loaded.
    """
    headers = Path(jax.ffi.include_dir())
    try:
        path = native_build.build(
            native_build.Library(
                title="its handlers for JAX",
                kind="jax",
                name="libshoal_jax",
                sources=Path(__file__).parent / "native",
                versions=(jaxlib_version, str(headers), machine.machine()),
                includes=(headers,),
                shared=(native_build.TREE_CALL,),
            )
        )
        loaded = _opened(path)
    except (ShoalError, OSError) as problem:
        kind = UsageError if isinstance(problem, UsageError) else ShoalError
        raise kind(f"shoal.jax compiles its handlers for XLA on first use: {problem}") from None
    loaded.shoal_jax_set_group.argtypes = (ctypes.c_int64, ctypes.c_void_p)
    loaded.shoal_jax_set_group.restype = None
    return loaded


def _opened(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as problem:
        raise native_build.not_loaded(path, problem) from None


@cache
def register() -> None:
    """Make the handlers known to XLA."""
    for platform, target in _TARGETS.items():
        jax.ffi.register_ffi_target(
            target,
            jax.ffi.pycapsule(getattr(library(), target)),
            platform={"cuda": "CUDA"}.get(platform, platform),  # XLA's name
        )


def set_group(number: int, group: int) -> None:
    """Register a group under its number for compiled programs.

    Args:
        number: above 0.
        group: address of a reference to a ``shoal_group``, which this takes over; 0: none any more.
    """
    library().shoal_jax_set_group(number, group)


def bind(
    leaves: Sequence[Any],
    *,
    kind: str,
    group: int,
    size: int,
    timeout_s: float,
    op: str = "sum",
    root: int = 0,
) -> list[jax.Array]:
    """Return the results of one collective on several arrays.

    Args:
        leaves: arrays, those of a kind in place (all_reduce, broadcast) are overwritten where nothing else
            uses them.
        kind: one of :data:`KINDS`.
        group: number of the group.
        size: number of its ranks.
        timeout_s: limit of the collective.
        op: one of :data:`REDUCTIONS`.
        root: source of a broadcast.

    Returns:
        For each leaf of shape ``s``: ``s``; of an all_gather ``(size, *s)``; of a reduce_scatter ``s`` with
        the first dimension divided by ``size``.
    """
    results: list[jax.Array] = collective_p.bind(
        *leaves, kind=kind, group=group, size=size, timeout_s=timeout_s, op=op, root=root
    )
    return results


def _result(aval: Any, kind: str, size: int) -> Any:
    if kind == "all_gather":
        return aval.update(shape=(size, *aval.shape))
    if kind == "reduce_scatter":
        return aval.update(shape=(aval.shape[0] // size, *aval.shape[1:]))
    return aval


@collective_p.def_effectful_abstract_eval  # type: ignore[untyped-decorator,unused-ignore]
def _abstract_eval(*avals: Any, kind: str, size: int, **_: Any) -> tuple[list[Any], set[Any]]:
    return [_result(aval, kind, size).update(weak_type=False) for aval in avals], {ORDER}


def _lower(
    ctx: Any,
    *operands: Any,
    platform: str,
    kind: str,
    group: int,
    size: int,
    timeout_s: float,
    op: str,
    root: int,
) -> Any:
    _check_one_device(ctx)
    token = ctx.tokens_in.get(ORDER)
    abstract = core.abstract_token
    aliases = {number: number for number in range(1 + len(operands))} if kind in _IN_PLACE else {0: 0}
    call = jax.ffi.ffi_lowering(_TARGETS[platform], has_side_effect=True, operand_output_aliases=aliases)
    token, *results = call(
        replace(ctx, avals_in=[abstract, *ctx.avals_in], avals_out=[abstract, *ctx.avals_out]),
        token,
        *operands,
        group=np.int64(group),
        kind=np.int64(KINDS[kind]),
        reduction=np.int64(REDUCTIONS[op]),
        root=np.int64(root),
        timeout_s=np.float64(timeout_s),
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ORDER: token})))
    return results


def _check_one_device(ctx: Any) -> None:
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if (num_devices := (context.num_devices or 1) if mesh is None else mesh.size) > 1:
        raise NotImplementedError(
            f"shoal.jax inside a program for {num_devices} devices, each of which would be a rank; start one "
            "process for each device (with CUDA_VISIBLE_DEVICES), or use shoal.jax outside of that program"
        )


for _platform in _TARGETS:
    mlir.register_lowering(collective_p, partial(_lower, platform=_platform), platform=_platform)


def _refuse(ctx: Any, *operands: Any, platform: str, **_: Any) -> Any:
    raise NotImplementedError(
        f"shoal.jax is for arrays on CPUs and CUDA devices, and this program is compiled for {platform}; "
        "compute with jax.default_device(jax.devices('cpu')[0]), or use JAX's own collectives"
    )


for _platform in ("rocm", "tpu"):
    mlir.register_lowering(collective_p, partial(_refuse, platform=_platform), platform=_platform)


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, kind: str, **params: Any) -> Any:
    if kind not in _IN_PLACE:
        raise NotImplementedError(f"shoal.jax.{kind} inside vmap; call it outside, on the whole array")
    return collective_p.bind(*operands, kind=kind, **params), dims


batching.primitive_batchers[collective_p] = _batch
