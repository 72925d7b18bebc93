"""Runs jaxlib's own CPU collectives on shoal, for programs of ``jax.distributed``.

When jaxlib is loaded, it loads the MPI library that MPITRAMPOLINE_LIB names; ``libshoal_mpi.so`` is one
(``csrc/mpi_abi``). Each communicator is an engine. Its ranks find each other through the store of
``jax.distributed``'s coordinator, and XLA creates communicators in the same order in all processes.
"""

from __future__ import annotations

import ctypes
import sys
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from shoal import native
from shoal.comm.engine import CommError, Engine
from shoal.comm.job_group import TIMEOUT_S
from shoal.comm.rendezvous import connect_engine
from shoal.comm.store import PrefixStore, Records
from shoal.env.secret import job_secret
from shoal.env.variables import set_variables, without_brackets
from shoal.errors import ShoalError, UsageError

_ALL_PROCESSES = -1
_SPLIT = {"color": range(1 << 31), "key": range(1 << 31)}
_CONNECT = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_char), ctypes.c_int,
)  # fmt: skip
_engines: list[Engine] = []


@cache
def use_collectives(*, timeout_s: float = TIMEOUT_S) -> None:
    """Use shoal for the collectives of JAX's CPU backend. Call it before ``jax`` is imported.

    Then call ``jax.distributed.initialize`` as before. Every process has one device. SHOAL_HELPERS and
    SHOAL_SECRET_FILE work as for torch's backend.

    Args:
        timeout_s: limit for each rank's arrival and for each collective, in seconds.

    Raises:
        UsageError: jaxlib is loaded already.
        ShoalError: this shoal was built without ``libshoal_mpi.so``.

    Example:
        >>> import shoal.jax
        >>> shoal.jax.use_collectives()  # doctest: +SKIP
        >>> import jax  # doctest: +SKIP
        >>> jax.distributed.initialize()  # doctest: +SKIP
    """
    if "jaxlib" in sys.modules:
        raise UsageError(
            "shoal.jax.use_collectives() has to be called before `import jax`: jaxlib chooses its "
            "collectives as it is loaded; move the call to the first lines of the program"
        )
    path = Path(native.core().__file__ or "").parent / "lib" / "libshoal_mpi.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as problem:
        raise ShoalError(f"{path} cannot be loaded ({problem}); reinstall shoal") from None
    connect = _CONNECT(_connector(timeout_s))
    _kept.append((library, connect))
    library.shoal_mpi_configure.argtypes = (ctypes.c_double, _CONNECT)
    library.shoal_mpi_configure(timeout_s, connect)
    set_variables({"MPITRAMPOLINE_LIB": str(path), "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi"})


_kept: list[Any] = []
"""Callbacks that C may call until the process ends."""


def _connector(timeout_s: float) -> Any:
    def connect(
        number: int, color: int, key: int, group: Any, rank: Any, size: Any, message: Any, message_bytes: int
    ) -> int:
        """Make the group of a communicator for ``csrc/mpi_abi/mpi.cc``, in a thread of XLA."""
        try:
            from jax._src.distributed import global_state

            rank[0], size[0] = int(global_state.process_id), int(global_state.num_processes or 1)
            if number != _ALL_PROCESSES:
                members = [0]
                if size[0] > 1:
                    store = CoordinatorStore(global_state, timedelta(seconds=timeout_s))
                    members = _members(store, number, color, key, rank[0], size[0])
                    if len(members) > 1:
                        group[0] = _engine(store, number, color, key, members, rank[0])
                rank[0], size[0] = key if len(members) > 1 else 0, len(members)
        except Exception as problem:  # noqa: BLE001  # C cannot take it; the communicator says it when it is used
            text = str(problem).encode()[: message_bytes - 1] + b"\0"
            ctypes.memmove(message, text, len(text))
            return 1
        return 0

    return connect


def _members(store: CoordinatorStore, number: int, color: int, key: int, rank: int, size: int) -> list[int]:
    """Return the ranks whose communicator with this ``number`` has the same color, by their keys."""
    split = f"split {number}"
    records = Records(PrefixStore(f"shoal/{split}/", store), split, job_secret(), store.timeout)
    records.put(f"rank/{rank}", {"color": color, "key": key})
    keys = {}
    for other in range(size):
        record = records.get(f"rank/{other}", other, _SPLIT)
        if record["color"] == color:
            keys[record["key"]] = other
    if sorted(keys) != list(range(len(keys))):
        raise CommError(
            f"communicator {number} of JAX has the places {sorted(keys)} instead of 0 to {len(keys) - 1}: "
            "the processes make communicators in different orders; run one small psum over each axis of the "
            "mesh, in the same order in all processes, before the program"
        )
    return [rank_of_key for _, rank_of_key in sorted(keys.items())]


def _engine(store: CoordinatorStore, number: int, color: int, key: int, members: list[int], rank: int) -> int:
    group = f"jax {number}.{color}"
    engine = connect_engine(
        PrefixStore(f"shoal/{group}/", store), key, len(members), group, rank, store.timeout
    )
    _engines.append(engine)
    return engine.c_group()


class CoordinatorStore:
    """A :class:`~shoal.comm.store.Store` in the process of ``jax.distributed``'s coordinator.

    Args:
        state: ``jax._src.distributed.global_state`` of a process that ``jax.distributed.initialize`` has
            joined.
        timeout: limit of :meth:`get`.
    """

    def __init__(self, state: Any, timeout: timedelta) -> None:
        self._client, self.timeout = state.client, timeout
        self.host, _, self.port = str(state.coordinator_address or "").rpartition(":")
        self.host = without_brackets(self.host)

    def set(self, key: str, value: str, /) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str, /) -> bytes:
        return self._get(key, self.timeout.total_seconds())

    def check(self, keys: list[str], /) -> bool:
        try:
            for key in keys:
                self._client.key_value_try_get_bytes(key)
        except RuntimeError as problem:  # jaxlib has one class for all of its errors
            if "NOT_FOUND" in str(problem):
                return False
            raise
        return True

    def add(self, key: str, amount: int, /) -> int:
        return int(self._client.key_value_increment(key, amount))

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        end = time.monotonic() + timeout.total_seconds()
        for key in keys:
            self._get(key, end - time.monotonic())

    def _get(self, key: str, limit_s: float) -> bytes:
        return bytes(self._client.blocking_key_value_get_bytes(key, max(int(limit_s * 1000), 1)))
