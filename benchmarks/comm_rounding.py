"""Errors of bf16 sums of 64 ranks: the engine's, and those of a ring in bf16."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

import torch

from shoal.comm.engine import Engine, EngineOptions, Operation, Peer

NUM_RANKS = 64
COUNT = 65_536
_DEADLINE_S = 120.0


def cancelling_inputs(seed: int, *, cancelling: bool) -> list[torch.Tensor]:
    """Return each rank's bf16 values. Cancelling: pairs of ranks nearly undo each other."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(NUM_RANKS, COUNT, generator=draw) * 10.0 ** torch.randint(
        -3, 3, (COUNT,), generator=draw
    )
    if cancelling:
        values[1::2] = -values[::2] * (1 + 2.0**-7 * torch.randn(NUM_RANKS // 2, COUNT, generator=draw))
        values = values[torch.randperm(NUM_RANKS, generator=draw)]
    return list(values.to(torch.bfloat16))


def engine_sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Sum on an engine for each rank, each a host of its own, all in this process over loopback."""
    secret, segment = secrets.token_bytes(16), f"shoal-rounding-{secrets.token_hex(4)}"
    engines = [
        Engine(
            rank=rank,
            size=NUM_RANKS,
            group="rounding",
            secret=secret,
            address="127.0.0.1",
            options=EngineOptions(),
        )
        for rank in range(NUM_RANKS)
    ]
    peers = [
        Peer(host=f"host{rank}", address="127.0.0.1", port=engine.port, global_rank=rank, pid=rank)
        for rank, engine in enumerate(engines)
    ]
    outputs = [torch.empty_like(tensor) for tensor in inputs]

    def connect(rank: int) -> None:
        engines[rank].connect(peers, [], range(NUM_RANKS), segment=segment, timeout_s=_DEADLINE_S)

    def add(rank: int) -> None:
        asked = Operation(
            kind="all_reduce",
            input=inputs[rank].data_ptr(),
            output=outputs[rank].data_ptr(),
            count=COUNT,
            dtype="bfloat16",
            timeout_s=_DEADLINE_S,
        )
        engines[rank].wait(engines[rank].submit(asked))

    for what in (connect, add, lambda rank: engines[rank].close()):
        _on_all(what)
    if any(not torch.equal(outputs[0].view(torch.int16), other.view(torch.int16)) for other in outputs):
        raise SystemExit("the ranks got different sums")
    return outputs[0]


def _on_all(what: Callable[[int], Any]) -> None:
    problems: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            what(rank)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def ring_sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Sum as a ring in bf16 does: part i starts on rank i and is rounded at each of the 63 hops."""
    parts = [tensor.chunk(NUM_RANKS) for tensor in inputs]
    sums = []
    for part in range(NUM_RANKS):
        total = parts[part][part]
        for hop in range(1, NUM_RANKS):
            total = total + parts[(part + hop) % NUM_RANKS][part]
        sums.append(total)
    return torch.cat(sums)


def errors_over_bound(total: torch.Tensor, inputs: list[torch.Tensor]) -> float:
    """Return the largest |error| / (half an ulp of the sum in bf16 + 64 * 2^-24 * the sum of |x|)."""
    exact = torch.stack(inputs).double()
    wanted, absolute = exact.sum(0), exact.abs().sum(0)
    _, exponent = torch.frexp(wanted)
    half_ulp = torch.ldexp(torch.ones_like(wanted), exponent - 1 - 7 - 1).clamp_min(2.0**-134)
    bound = half_ulp + NUM_RANKS * 2.0**-24 * absolute
    return float(((total.double() - wanted).abs() / bound).max())
