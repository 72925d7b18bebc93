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
from shoal import dropout

TARGET = 1.0
P = 0.1
HEADS, COLUMNS = 16, 64
CASES = ((64, 512), (256, 128), (32, 384))
TINY_CASES = ((2, 16),)
NUM_WARM_UPS, NUM_SAMPLES = 5, 20

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ours(query: Tensor, key: Tensor, value: Tensor, keys: Tensor) -> Tensor:
    return dropout.attention(query, key, value, keys, P)


def explicit(query: Tensor, key: Tensor, value: Tensor, keys: Tensor) -> Tensor:
    """Compute what :func:`shoal.dropout.attention` does where it has no kernel."""
    weights = (query * COLUMNS**-0.5 @ key.transpose(-2, -1)).softmax(-1)
    return dropout.dropout(weights.to(value.dtype), keys, P) @ value


def torchs(p: float) -> Form:
    return lambda query, key, value, keys: F.scaled_dot_product_attention(query, key, value, dropout_p=p)


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


def inputs(num_samples: int, size: int, heads: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value, heads side by side as in the encoders, and keys of dropout."""
    rows = torch.randn(3, num_samples, size, heads, COLUMNS, device=device, dtype=torch.bfloat16)
    keys = dropout.row_keys(torch.arange(num_samples, device=device), (num_samples, heads, size))
    return [x.transpose(1, 2).requires_grad_() for x in rows.unbind()], keys


def passes(form: Form, matrices: list[Tensor], keys: Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls to time, by the names of the passes."""
    query, key, value = matrices
    grad = torch.randn_like(query)

    def both() -> object:
        return torch.autograd.grad(form(query, key, value, keys), matrices, grad)

    return {"forward": lambda: form(query, key, value, keys), "forward and backward": both}


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options.add_argument("--tiny", action="store_true", help="show that it runs")
    bench = Benchmark("gpu.attention_forms", options=options)
    dropout.USES_KERNELS = True
    tiny, device = bench.args.tiny, torch.device(bench.args.device)
    peers: tuple[tuple[str, Form, float | None], ...] = (
        ("explicit, compiled", torch.compile(explicit, dynamic=False), TARGET),
        ("SDPA, torch's dropout", torchs(P), None),
        ("SDPA without dropout", torchs(0.0), None),
    )
    for num_samples, size in TINY_CASES if tiny else CASES:
        matrices, keys = inputs(num_samples, size, 2 if tiny else HEADS, device)
        ours_ms = {
            name: samples_ms(call, device, tiny=tiny) for name, call in passes(ours, matrices, keys).items()
        }
        for peer_name, form, target in peers:
            for name, call in passes(form, matrices, keys).items():
                peer_ms = samples_ms(call, device, tiny=tiny)
                case = f"{num_samples} x {size}, {name}"
                bench.add(
                    case, ours=ours_ms[name], peer=peer_ms, peer_name=peer_name, unit="ms", target=target
                )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
