"""The failure that is the cause, and a worker's report of its own."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore

from shoal.errors import EXIT_STOPPED, ShoalError, UsageError
from shoal.launch.supervision import decide_outcome
from shoal.launch.worker import WorkerError, describe_error, read_errors, write_error

KILL, TERM, SEGV = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV


def error(
    rank: int, time_s: float = 0.0, *, is_bug: bool = True, lost: bool = False, code: int = 1
) -> WorkerError:
    return WorkerError(
        rank=rank,
        time_s=time_s,
        message=f"message of {rank}",
        is_bug=is_bug,
        exit_code=code,
        lost_peer=lost,
    )


def test_all_well_and_all_stopped() -> None:
    assert decide_outcome({0: 0, 1: 0}, {}).exit_code == 0
    assert decide_outcome({0: 75, 1: 75}, {}).exit_code == EXIT_STOPPED
    assert decide_outcome({0: 75, 1: 0}, {}).exit_code == EXIT_STOPPED
    assert decide_outcome({0: 75, 1: 75}, {}).text == ""


def test_the_earliest_error_of_a_workers_own_is_the_cause() -> None:
    errors = {0: error(0, 1.0, lost=True), 1: error(1, 1.2), 2: error(2, 1.1)}
    outcome = decide_outcome({0: 1, 1: 1, 2: 1, 3: KILL}, errors, killed={3})
    assert outcome.text.startswith("worker 2: message of 2")


def test_a_death_by_signal_explains_lost_peers_and_exit_codes() -> None:
    outcome = decide_outcome({0: 1, 1: 3, 2: KILL}, {0: error(0, lost=True)})
    assert outcome.exit_code == 1
    assert outcome.text.startswith("worker 2 was ended by SIGKILL: killed from outside, or by the kernel")
    assert "native code crashed" in decide_outcome({0: SEGV}, {}).text
    assert decide_outcome({0: 3, 1: KILL}, {}, killed={1}).exit_code == 3


def test_a_death_by_a_signal_that_was_passed_on_is_a_stop() -> None:
    assert decide_outcome({0: TERM, 1: 75}, {}, forwarded={signal.SIGTERM}).exit_code == EXIT_STOPPED
    assert decide_outcome({0: TERM, 1: 75}, {}).exit_code == 1
    assert decide_outcome({0: TERM, 1: KILL}, {}, forwarded={15}, killed={1}).exit_code == EXIT_STOPPED


def test_an_error_beats_a_stop() -> None:
    assert decide_outcome({0: 75, 1: 2}, {1: error(1, code=2, is_bug=False)}).exit_code == 2
    assert decide_outcome({0: 75, 1: 2}, {1: error(1, code=2, is_bug=False)}).text == "message of 1"


def test_only_lost_peers_point_to_another_host() -> None:
    outcome = decide_outcome({0: 1, 1: 1}, {0: error(0, 2.0, lost=True), 1: error(1, 1.0, lost=True)})
    assert (outcome.exit_code, outcome.text.split(",")[0]) == (76, "worker 1 lost another worker")


def test_the_log_of_a_silent_worker_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(50)))
    text = decide_outcome({1: 9}, {}, logs={1: tmp_path / "log"}).text
    assert text.startswith(f"worker 1 ended with exit code 9\n(its whole output: {tmp_path / 'log'})")
    assert "line 49" in text
    assert "line 29" not in text


def raised(make: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise make from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("exception", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"), True),
        (ShoalError("group '0', rank 0: rank 1 (10.0.0.2, pid 7) was lost: it closed the connection"), True),
        (ShoalError("rank 1 (10.0.0.2, pid 7) has left the group, and all_reduce 3 waits for it"), True),
        (ShoalError("all_reduce 3 of rank 0 does not fit that of rank 1"), False),
        (RuntimeError("shape mismatch"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_lost_peer_is_told_from_an_own_error(exception: BaseException, lost: bool) -> None:
    assert describe_error(raised(exception), rank=0).lost_peer is lost
    wrapped = raised(ShoalError("cannot save"), raised(exception))
    assert describe_error(wrapped, rank=0).lost_peer is lost


def test_what_a_worker_reports_arrives(tmp_path: Path) -> None:
    usage = describe_error(raised(UsageError("3 does not divide 8")), rank=1)
    assert (usage.message, usage.is_bug, usage.exit_code) == ("3 does not divide 8", False, 2)
    defect = describe_error(raised(KeyError("x")), rank=0, run=tmp_path)
    kept = tmp_path / "logs" / "worker-00000.traceback"
    assert "in raised" in kept.read_text()
    assert defect.message.startswith(
        f"KeyError: 'x', which shoal did not expect; its traceback is in {kept}. "
    )
    write_error(tmp_path, usage)
    write_error(tmp_path, defect)
    assert read_errors(tmp_path) == {0: defect, 1: usage}


def test_a_peer_that_did_not_come_to_the_store_file_is_lost(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    store.set_timeout(timedelta(milliseconds=20))
    for ask in (lambda: store.get("peer"), lambda: store.wait(["peer"])):
        with pytest.raises(RuntimeError) as caught:
            ask()
        assert describe_error(caught.value, rank=0).lost_peer
