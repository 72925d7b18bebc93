"""The choice of the backend that carries gradients: every row of the rule, and the comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.decide.backend import (
    LIMIT_S,
    READINGS,
    SMALLEST_BYTES,
    Recorded,
    Situation,
    choose_backend,
    choose_measured,
    next_bytes,
    planned_backend,
)
from shoal.errors import UsageError

CPUS = Situation(num_workers=4, num_hosts=2)
GPUS = Situation(on_gpu=True, num_workers=16, num_hosts=2)
LOST = {"unloaded": "no C++ compiler is found"}
MIB = 1 << 20


def recorded(backend: str, num_workers: int = 16, num_hosts: int = 2) -> dict[str, Any]:
    return {"recorded": Recorded(backend=backend, num_workers=num_workers, num_hosts=num_hosts)}


@pytest.mark.parametrize(
    ("known", "changes", "backend", "reason"),
    [
        pytest.param(CPUS, {}, "shoal", "workers on CPUs", id="cpus"),
        pytest.param(CPUS, {"num_hosts": 1}, "shoal", "workers on CPUs", id="cpus of one host"),
        pytest.param(CPUS, LOST, "gloo", "process group in C++ does not load", id="cpus without C++"),
        pytest.param(CPUS, {"requested": "gloo"}, "gloo", "distributed.backend names it", id="cpus, gloo"),
        pytest.param(CPUS, {"num_workers": 1}, "gloo", "nothing to sum", id="one worker on a CPU"),
        pytest.param(CPUS, {"averages": False}, "gloo", "nothing is averaged", id="workers that predict"),
        pytest.param(GPUS, {"averages": False, "num_helpers": 2}, "gloo", "nothing", id="gpus that predict"),
        pytest.param(CPUS, {"num_helpers": 1}, "shoal", "1 helper is named", id="cpus and a helper"),
        pytest.param(CPUS, {**LOST, "num_helpers": 2}, "shoal", "2 helpers", id="in Python"),
        pytest.param(CPUS, {**LOST, "servers": "servers.mode sync"}, "shoal", "servers.mode", id="updates"),
        pytest.param(CPUS, recorded("gloo"), "gloo", "the run began with it", id="a run with gloo"),
        pytest.param(CPUS, {**LOST, **recorded("shoal")}, "shoal", "the run began", id="one with shoal"),
        pytest.param(CPUS, recorded("gloo", 1, 1), "shoal", "CPUs", id="one by a single worker"),
        pytest.param(CPUS, recorded("nccl"), "shoal", "workers on CPUs", id="one on GPUs, now on CPUs"),
        pytest.param(
            CPUS, {"num_helpers": 1, **recorded("gloo")}, "shoal", "1 helper", id="one that gets helpers"
        ),
        pytest.param(GPUS, {"num_hosts": 1}, "nccl", "GPUs of one host", id="gpus of one host"),
        pytest.param(GPUS, {"num_workers": 1, "num_hosts": 1}, "nccl", "one worker", id="one gpu"),
        pytest.param(GPUS, LOST, "nccl", "process group in C++ does not load", id="gpus without C++"),
        pytest.param(GPUS, {"num_helpers": 4}, "shoal", "4 helpers are named", id="gpus and helpers"),
        pytest.param(
            GPUS,
            {"requested": "shoal", "num_helpers": 4, **LOST},
            "shoal",
            "names it",
            id="gpus, shoal by name",
        ),
        pytest.param(GPUS, recorded("shoal"), "shoal", "the run began with it", id="a comparison's result"),
        pytest.param(GPUS, recorded("nccl"), "nccl", "the run began with it", id="its other result"),
        pytest.param(
            GPUS, {"num_hosts": 1, **recorded("nccl", 16, 1)}, "nccl", "began", id="one host goes on"
        ),
    ],
)  # fmt: skip
def test_the_rule(known: Situation, changes: dict[str, Any], backend: str, reason: str) -> None:
    choice = choose_backend(replace(known, **changes))
    assert choice is not None
    assert choice.backend == backend and reason in choice.reason
    is_surprise = "unloaded" in changes and "does not load" in choice.reason
    assert bool(choice.note) == is_surprise
    assert not is_surprise or "no C++ compiler is found" in choice.note


def test_gpus_of_several_hosts_are_compared() -> None:
    assert choose_backend(GPUS) is None
    assert choose_backend(replace(GPUS, **recorded("nccl", 8, 1))) is None, "chosen for one host"
    assert "nccl, or shoal if it is 10 % faster in a comparison of 3 s" in planned_backend(GPUS)


@pytest.mark.parametrize("backend", ["nccl", "gloo", "MPI"])
def test_helpers_that_a_backend_cannot_use_are_refused(backend: str) -> None:
    with pytest.raises(UsageError, match=f"distributed.backend {backend} does not use helper hosts, and 2"):
        choose_backend(replace(GPUS, requested=backend, num_helpers=2))
    assert choose_backend(replace(GPUS, requested=backend)) is not None


@pytest.mark.parametrize("known", [CPUS, GPUS])
def test_helpers_that_a_wire_format_does_not_use_are_refused(known: Situation) -> None:
    for requested in ("auto", "shoal"):
        named = replace(known, requested=requested, num_helpers=1)
        with pytest.raises(UsageError, match="wire int8 does not use helper hosts, and 1 helper"):
            choose_backend(replace(named, wire="int8"))
        assert choose_backend(replace(named, wire="bf16")) is not None


def test_gpus_with_helpers_need_the_group_in_cpp() -> None:
    with pytest.raises(UsageError, match=r"1 helper is named, and workers on GPUs need .* no C\+\+ compiler"):
        choose_backend(replace(GPUS, num_helpers=1, **LOST))


def test_a_dry_run_says_what_a_start_may_change() -> None:
    assert planned_backend(CPUS) == (
        "shoal (workers on CPUs); gloo if its process group in C++ does not load"
    )  # fmt: skip
    assert planned_backend(replace(CPUS, num_helpers=2)) == "shoal (2 helpers are named)"
    assert planned_backend(replace(CPUS, requested="gloo")) == "gloo (distributed.backend names it)"


# ---- the comparison --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nccl", "shoal", "chosen"),
    [(10.0, 9.0, "shoal"), (10.0, 9.2, "nccl"), (10.0, 11.0, "nccl"), (10.0, 10.0, "nccl")],
)
def test_shoal_has_to_be_ten_per_cent_faster(nccl: float, shoal: float, chosen: str) -> None:
    """Medians decide: readings that one disturbance has spoilt do not count."""
    seconds = {"fp32": {"nccl": [nccl, 0.0, nccl, 99.0, nccl], "shoal": [99.0, shoal, shoal, shoal, 0.0]}}
    choice = choose_measured(seconds, wire="fp32", num_bytes=25 * MIB)
    assert choice.backend == chosen
    assert choice.reason == f"25 MiB as fp32: nccl {1e3 * nccl:.1f} ms, shoal {1e3 * shoal:.1f} ms"
    assert choice.note == f"backend {chosen}, by the sum of {choice.reason}"


def test_another_format_is_suggested_and_never_chosen() -> None:
    seconds = {
        "fp32": {"nccl": [0.010] * READINGS, "shoal": [0.012] * READINGS},
        "bf16": {"nccl": [0.006] * READINGS, "shoal": [0.005] * READINGS},
    }
    choice = choose_measured(seconds, wire="fp32", num_bytes=25 * MIB)
    assert choice.backend == "nccl"
    assert choice.note.endswith("; --distributed.wire bf16 takes 5.0 ms over shoal")
    assert "bf16" not in choice.reason
    seconds["bf16"] = {"nccl": [0.0095] * READINGS, "shoal": [0.011] * READINGS}
    assert "bf16" not in choose_measured(seconds, wire="fp32", num_bytes=25 * MIB).note, "not 10 % faster"
    assert choose_measured(seconds, wire="bf16", num_bytes=25 * MIB).backend == "nccl"


@pytest.mark.parametrize("rate", [1e6, 1e7, 1e8, 1e9, 1e10])
@pytest.mark.parametrize("latency_s", [1e-5, 5e-3])
def test_all_readings_fit_the_time(rate: float, latency_s: float) -> None:
    """Two backends that are equally fast, in fp32 and then in bf16."""
    bucket, formats, spent_s = 25 * MIB, 2, 0.0

    def read(num_bytes: float) -> float:
        nonlocal spent_s
        spent_s += (took := latency_s + num_bytes / rate)
        return took

    num_bytes, more = 0, SMALLEST_BYTES
    while more > num_bytes:
        num_bytes = more
        slowest_s = max(read(num_bytes) for _ in range(2))
        more = next_bytes(
            num_bytes, bucket_bytes=bucket, slowest_s=slowest_s, spent_s=spent_s,
            num_readings=2 * (1 + READINGS * formats),
        )  # fmt: skip
    for _ in range(READINGS):
        for size in (num_bytes, num_bytes, num_bytes / 2, num_bytes / 2):
            read(size)
    assert spent_s <= LIMIT_S
    assert (num_bytes == bucket) == (rate >= 1e9), "the whole bucket where it fits"
