"""Time of attention with dropout on a GPU: our kernels, the explicit form compiled, and torch's fused ones.

Times are between CUDA events around a pass, medians of 20 after 5 that warm up. Torch's kernels draw masks
that depend on the batch, so there is no target beside them.

    python -m benchmarks.gpu.attention_forms --device cuda --json attention.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Benchmark
from shoal import attention, dropout

TARGET = 1.0
P = 0.1
HEADS, COLUMNS = 16, 64
CASES = ((64, 512), (256, 128), (32, 384))
TINY_CASES = ((2, 16),)
NUM_WARM_UPS, NUM_SAMPLES = 5, 20

Form = Callable[[Tensor, Tensor], Tensor]
"""Computes attention from heads of queries, keys and values, ``[B, S, 3 * heads, d]``, keys ``[B, S]``."""


def ours(stacked: Tensor, keys: Tensor) -> Tensor:
    """Compute packed attention by our kernels, or explicitly where there are none."""
    num_samples, size = keys.shape
    if not attention.has_kernels(stacked.device, stacked.dtype, COLUMNS, P):
        return explicit(stacked, keys)
    offsets = torch.arange(0, keys.numel() + 1, size, device=keys.device, dtype=torch.int32)
    context = attention.packed_attention(
        None,
        stacked.flatten(0, 1),
        keys.flatten(),
        P,
        cu_queries=offsets,
        cu_keys=offsets,
        max_queries=size,
        max_keys=size,
    )
    return context.view(num_samples, size, *context.shape[1:])


def explicit(stacked: Tensor, keys: Tensor) -> Tensor:
    """Compute what :func:`shoal.dropout.attention` does."""
    query, key, value = parts(stacked)
    weights = (query * COLUMNS**-0.5 @ key.transpose(-2, -1)).softmax(-1)
    heads = torch.arange(query.shape[1], device=keys.device)[:, None]
    of_rows = dropout.fold_in(keys[:, None], heads)
    return (dropout.dropout(weights.to(value.dtype), of_rows, P) @ value).transpose(1, 2)


def parts(stacked: Tensor) -> list[Tensor]:
    """Return query, key and value, ``[B, heads, S, d]``."""
    return [x.transpose(1, 2) for x in stacked.chunk(3, 2)]


def torchs(p: float) -> Form:
    def fused(stacked: Tensor, keys: Tensor) -> Tensor:
        query, key, value = parts(stacked)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=p).transpose(1, 2)

    return fused


def samples_ms(call: Callable[[], object], device: torch.device, *, tiny: bool) -> list[float]:
    """Return the time of each call, on the device.

    Before each the device fills 2 GiB: its caches hold nothing of the call, which the host queues meanwhile.
    """
    filled = torch.empty(0 if device.type == "cpu" else 2 << 30, dtype=torch.int8, device=device)
    num_warm_ups, num_samples = (1, 2) if tiny else (NUM_WARM_UPS, NUM_SAMPLES)
    found: list[float] = []
    for _ in range(num_warm_ups + num_samples):
        if device.type == "cpu":
            begin_s = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - begin_s))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        filled.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return found[num_warm_ups:]


def inputs(num_samples: int, size: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return heads side by side as in the encoders, and keys of dropout."""
    stacked = torch.randn(num_samples, size, 3 * heads, COLUMNS, device=device, dtype=torch.bfloat16)
    keys = dropout.row_keys(torch.arange(num_samples, device=device), (num_samples, size))
    return stacked.requires_grad_(), keys


def passes(form: Form, stacked: Tensor, keys: Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls to time, by the names of the passes."""
    grad = torch.randn_like(stacked[:, :, : stacked.shape[2] // 3])

    def both() -> object:
        return torch.autograd.grad(form(stacked, keys), stacked, grad)

    return {"forward": lambda: form(stacked, keys), "forward and backward": both}


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options.add_argument("--tiny", action="store_true", help="show that it runs")
    bench = Benchmark("gpu.attention_forms", options=options)
    attention.USES_KERNELS = True
    tiny, device = bench.args.tiny, torch.device(bench.args.device)
    peers: tuple[tuple[str, Form, float | None], ...] = (
        ("explicit, compiled", torch.compile(explicit, dynamic=False), TARGET),
        ("SDPA, torch's dropout", torchs(P), None),
        ("SDPA without dropout", torchs(0.0), None),
    )
    for num_samples, size in TINY_CASES if tiny else CASES:
        stacked, keys = inputs(num_samples, size, 2 if tiny else HEADS, device)
        ours_ms = {
            name: samples_ms(call, device, tiny=tiny) for name, call in passes(ours, stacked, keys).items()
        }
        for peer_name, form, target in peers:
            for name, call in passes(form, stacked, keys).items():
                peer_ms = samples_ms(call, device, tiny=tiny)
                case = f"{num_samples} x {size}, {name}"
                bench.add(
                    case, ours=ours_ms[name], peer=peer_ms, peer_name=peer_name, unit="ms", target=target
                )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
