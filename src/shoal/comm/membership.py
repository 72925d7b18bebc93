"""Holds the group that a process has joined for JAX, TensorFlow or Keras, and its public functions."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from shoal.comm import world as worlds
from shoal.comm.engine import EngineOptions
from shoal.comm.store import Store
from shoal.comm.world import TIMEOUT_S, World
from shoal.errors import UsageError


def _nothing() -> None:
    pass


class Membership:
    """The group of all processes of a job, joined once by :meth:`init`.

    Args:
        package: name of the package of users, for messages, as in ``"shoal.tensorflow"``.
        prepare: called before the others are waited for.
        joined: called with the group.
        finish: called before the group is left: waits for the collectives of the framework.
    """

    def __init__(
        self,
        package: str,
        *,
        prepare: Callable[[], None] = _nothing,
        joined: Callable[[World], None] = lambda _: None,
        finish: Callable[[], None] = _nothing,
    ) -> None:
        self._package, self._prepare, self._joined, self._finish = package, prepare, joined, finish
        self._world: World | None = None

    def init(
        self,
        *,
        timeout_s: float = TIMEOUT_S,
        options: EngineOptions | None = None,
        store: Store | None = None,
    ) -> None:
        """Join the processes that the launcher has started together; once, before the first collective.

        The launcher (``shoal launch``, ``shoal emulate``, ``mpirun``, ``srun``) sets the rank. A process
        without one is alone: its collectives return their operands.

        Args:
            timeout_s: limit for each rank's arrival and for each collective, in seconds.
            options: of the engine, the same on all ranks.
            store: that all ranks reach already, such as the one of a ``torch.distributed`` group; ``None``:
                rank 0 makes one.

        Raises:
            CommError: a rank did not come in time, or has another secret.
            UsageError: it was called before, an environment variable is wrong, or rank 0's port is taken.
        """
        if self._world is not None:
            raise UsageError(
                f"{self._package}.init() was called before; call it once, at the program's beginning"
            )
        self._prepare()
        self._world = worlds.join(timeout_s=timeout_s, options=options, store=store)
        self._joined(self._world)
        atexit.register(self.shutdown)

    def shutdown(self) -> None:
        """Wait for the collectives of this process, and leave the others. A program's end does it too."""
        if self._world is not None:
            leaving, self._world = self._world, None
            atexit.unregister(self.shutdown)
            self._finish()
            leaving.close()

    def is_initialized(self) -> bool:
        """Return whether :meth:`init` was called."""
        return self._world is not None

    def world(self) -> World:
        """Return the group of all processes.

        Raises:
            UsageError: :meth:`init` was not called.
        """
        if self._world is None:
            raise UsageError(f"{self._package}.init() was not called; call it before the first collective")
        return self._world

    def rank(self) -> int:
        """Return the rank of this process, from 0 to :meth:`size` - 1.

        Raises:
            UsageError: :meth:`init` was not called.
        """
        return self.world().rank

    def size(self) -> int:
        """Return the number of processes.

        Raises:
            UsageError: :meth:`init` was not called.
        """
        return self.world().size

    def local_rank(self) -> int:
        """Return the rank of this process among those of its host.

        Raises:
            UsageError: :meth:`init` was not called.
        """
        return self.world().local_rank

    def local_size(self) -> int:
        """Return the number of processes on this host.

        Raises:
            UsageError: :meth:`init` was not called.
        """
        return self.world().local_size
