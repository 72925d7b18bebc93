"""Do PyTorch's own distributed tests pass with our backend wherever they pass with gloo?

The tests are those in the wheel (``torch.testing._internal.distributed.distributed_test``), 4 workers each,
forked. The conditions that skip tests are evaluated as for gloo, then the tests run with ``"shoal"`` in
gloo's place. A few of them compare the backend's name; they are listed below with the place, and run once
more with the name hidden from them. Engines count what passes through them.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from benchmarks.harness import Benchmark, peer_module
from benchmarks.worker import run_alone

NAME_CHECKS = dict.fromkeys(
    (
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_accumulate_gradients_no_sync_grad_is_view",
    ),
    '_test_accumulate_gradients_no_sync makes a model only if BACKEND is "mpi", "gloo" or "nccl"',
) | {
    "test_ddp_logging_data_cpu": (
        "it compares dist.get_backend() with the name in DDP's log, 'custom' for every backend in C++ "
        "that is not torch's"
    )
}
COLLECTIVES = (
    "test_(barrier|monitored_barrier|all_reduce|reduce|sparse_all_reduce|broadcast|all_gather|gather|scatter|"
    "all_to_all|send_recv|isend|irecv|batch_isend_irecv)"
)
"""Begin of the names of the tests of collectives, barriers and messages."""
ENGINE_KINDS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", "all_to_all",
    "gather", "scatter", "send", "recv",
)  # fmt: skip

Result = dict[str, Any]


def run_suite(backend: str, match: str, *, called_gloo: bool = False) -> Result:
    """Run the tests whose names match, in a process of its own, and return their outcomes and counters."""
    spec = {"backend": backend, "match": match, "called_gloo": called_gloo}
    settings = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    result: Result = run_alone("benchmarks.backend_suite_worker:run", spec, settings=settings)
    return result


def passed(result: Result) -> set[str]:
    return {name for name, test in result["tests"].items() if test["outcome"] == "passed"}


def describe(name: str, result: Result) -> str:
    outcomes = Counter(test["outcome"] for test in result["tests"].values())
    counts = ", ".join(f"{outcomes[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    seconds = sum(test["seconds"] for test in result["tests"].values())
    return f"{name:>20}: {counts} ({seconds:.0f} s)"


def print_differences(gloo: Result, shoal: Result, hidden: Result | None) -> None:
    print("\npass with gloo and not with shoal:")
    for name in sorted(passed(gloo) - passed(shoal)):
        again = "passes with the name hidden" if hidden and name in passed(hidden) else "FAILS"
        lines = (shoal["tests"][name]["why"].strip() or "?").splitlines()
        why = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        print(f"  {name}: {again}: {NAME_CHECKS.get(name, why[:300])}")
    print("pass with shoal and not with gloo:")
    for name in sorted(passed(shoal) - passed(gloo)):
        print(f"  {name}")


def main() -> int:
    bench = Benchmark("backend_suite")
    peer_module("expecttest")
    match = COLLECTIVES if bench.quick else ""
    gloo = run_suite("gloo", match)
    print(describe("gloo", gloo), flush=True)
    shoal = run_suite("shoal", match)
    print(describe("shoal", shoal), flush=True)
    again = sorted((passed(gloo) - passed(shoal)) & NAME_CHECKS.keys())
    hidden = run_suite("shoal", f"^({'|'.join(again)})$", called_gloo=True) if again else None
    if hidden:
        print(describe("shoal, name hidden", hidden))
    print_differences(gloo, shoal, hidden)

    totals: Counter[str] = Counter()
    for counters in shoal["counters"]:
        totals.update({key: value for key, value in counters.items() if key != "test"})
    print("\nthrough our engines, all ranks and tests:")
    for kind in ENGINE_KINDS:
        print(f"  {kind:>15}: {totals[f'ops_{kind}']:>6} operations, {totals[f'bytes_{kind}']:>12} bytes")
    print(f"  on the wire: {totals['bytes_sent']} bytes sent\n")

    reached = passed(gloo) & (passed(shoal) | (passed(hidden) if hidden else set()))
    bench.add(
        "tests that pass with gloo", ours=[len(reached)], peer=[len(passed(gloo))], peer_name="gloo",
        unit="tests", target=1.0, better="higher",
    )  # fmt: skip
    for kind in (
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "all_to_all",
        "gather",
        "scatter",
        "recv",
    ):
        bench.limit(
            f"bytes through our {kind}", totals[f"bytes_{kind}"], 1,
            unit="B", formula="at least something", better="higher",
        )  # fmt: skip
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
