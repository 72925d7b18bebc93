"""Does one pass over n buffers beat the chain of ``torch.add`` with the same number of threads?

Memory traffic bounds the gain: the chain moves 3 buffers for each of its n - 1 additions, one pass moves
n + 1, so at n = 8 the bound is 21 / 9 = 2.33. Both sides get warm buffers of 25 MiB, the size of one bucket
of DistributedDataParallel, and leave their result in the same kind of output buffer.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.harness import Benchmark, settled_ms
from shoal import native


def chain(out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.add(inputs[0], inputs[1], out=out)
    for tensor in inputs[2:]:
        out.add_(tensor)


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both sides")
    bench = Benchmark("reduce", options=options)
    num_threads: int = bench.args.threads
    torch.set_num_threads(num_threads)
    cases = [
        (8, 25, torch.float32, 1.8),
        (8, 100, torch.float32, None),  # where the chain's 25 MiB of sums would stay in a large cache
        (4, 25, torch.float32, None),
        (2, 25, torch.float32, None),
        (8, 25, torch.bfloat16, None),
        (8, 25, torch.float16, None),
    ]
    for num_inputs, size_mib, dtype, target in cases:
        if bench.quick and target is None:
            continue
        count = size_mib * 2**20 // dtype.itemsize
        inputs = [torch.randn(count).to(dtype) for _ in range(num_inputs)]
        ours_out, peer_out = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)

        def ours(out: torch.Tensor = ours_out, inputs: list[torch.Tensor] = inputs) -> None:
            native.sum_in_rank_order(out, inputs, num_threads=num_threads)

        def peer(out: torch.Tensor = peer_out, inputs: list[torch.Tensor] = inputs) -> None:
            chain(out, inputs)

        name = str(dtype).removeprefix("torch.")
        bench.compare(
            f"{num_inputs} x {size_mib} MiB {name}, {num_threads} threads",
            ours=settled_ms(ours),
            peer=settled_ms(peer),
            peer_name="chain of torch.add",
            target=target,
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
