"""A barrier that says who is missing, over torch's store: it must work where the group itself does not.

The words of the messages are those of torch's gloo backend, for which programs look.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from shoal.comm.engine import CommError

_POLL_S = 0.01
_ANSWER_MARGIN_S = 1.0


def monitored_barrier(
    store: Store, number: int, rank: int, size: int, limit: timedelta, wait_all_ranks: bool
) -> None:
    """Return when all ranks of the group have called it with this ``number``.

    Raises:
        CommError: ranks did not come within ``limit``; rank 0 names the first, or all (``wait_all_ranks``).
    """
    base = f"monitored/{number}"
    if limit <= timedelta(0):
        raise CommError(
            f"Rank {rank} timed out in monitoredBarrier: its timeout was {limit.total_seconds():g} s"
        )
    if rank == 0:
        verdict = _missing(store, base, size, limit, wait_all_ranks)
        store.set(f"{base}/verdict", verdict)
        if verdict:
            raise CommError(verdict)
        return
    store.set(f"{base}/{rank}", "1")
    passed = (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv"
    )
    try:
        store.wait([f"{base}/verdict"], limit + timedelta(seconds=_ANSWER_MARGIN_S))
    except Exception as problem:  # the store's own class of time-outs differs between versions
        raise CommError(
            f"{passed} from rank 0: it did not answer within {limit.total_seconds():g} s; see its log"
        ) from problem
    if verdict := store.get(f"{base}/verdict").decode():
        raise CommError(f"{passed} from rank 0, which says: {verdict}")


def _missing(store: Store, base: str, size: int, limit: timedelta, wait_all_ranks: bool) -> str:
    end = time.monotonic() + limit.total_seconds()
    missing = list(range(1, size))
    while missing:
        missing = [rank for rank in missing if not store.check([f"{base}/{rank}"])]
        if missing and time.monotonic() >= end:
            named = missing if wait_all_ranks else missing[:1]
            return (
                f"[Rank 0]: Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, named))} failed to pass "
                f"monitoredBarrier in {round(limit.total_seconds() * 1000)} ms"
            )
        if missing:
            time.sleep(_POLL_S)
    return ""
