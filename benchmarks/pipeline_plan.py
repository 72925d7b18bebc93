"""Plans T5-3B for 8 x 256 devices of 40 GB on the meta device; prints what it took, as JSON."""

from __future__ import annotations

import json
import resource
import time

import torch
from torch import Tensor

from benchmarks.harness import peer_module
from shoal.decide.autotune import Conditions
from shoal.decide.cost import Link
from shoal.decide.layout_search import LayoutSearch
from shoal.decide.partition import Memory
from shoal.pipelining.export_graph import export_model
from shoal.pipelining.roofline import DeviceRates, estimate_cost

NUM_DEVICES, NUM_RANKS = 2048, 8
DEVICE_BYTES = 40 * 10**9
MICRO_BATCH, GLOBAL_BATCH = 1, 8192
SOURCE_LENGTH, TARGET_LENGTH = 512, 114
A100 = DeviceRates(flops_per_s=150e12, bytes_per_s=1.3e12)
"""Operations per second that an A100 reaches in bf16."""
NVSWITCH = Link(bytes_per_s=250e9, latency_s=1e-5)
NETWORK = Link(bytes_per_s=400e9 / 8 / 8, latency_s=3e-5)
"""A device's part of the 400 Gbit/s that eight of them share."""


def main() -> None:
    begin_s = time.perf_counter()
    model, batch = t5_3b()
    cost = estimate_cost(export_model(model, batch, training=True), A100)
    memory = Memory(limit_bytes=DEVICE_BYTES, optimizer_ratio=6.0, reserved_bytes=2 * 10**9)
    search = LayoutSearch(
        cost=cost,
        memory=memory,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        sizes=[MICRO_BATCH],
        conditions=Conditions(link=NVSWITCH),
        data_link=NETWORK,
    )
    best = search.choose(NUM_DEVICES, [NUM_RANKS])[0]
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - begin_s,
                "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 10**9,
                "fullest stage": max(best.choice.rank_bytes) / 10**9,
                "layout": str(best),
                "reason": best.reason,
                "step_s": best.step_s,
                "bubble": best.choice.timeline.bubble,
            }
        )
    )


def t5_3b() -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """Return the model in bf16 and a micro-batch, both without values."""
    transformers = peer_module("transformers")
    config = transformers.T5Config(
        vocab_size=32_128,
        d_model=1024,
        d_kv=128,
        d_ff=16_384,
        num_layers=24,
        num_heads=32,
        decoder_start_token_id=0,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config).to(torch.bfloat16).train()
        batch = {
            "input_ids": torch.zeros(MICRO_BATCH, SOURCE_LENGTH, dtype=torch.long),
            "labels": torch.zeros(MICRO_BATCH, TARGET_LENGTH, dtype=torch.long),
        }
    return model, batch


if __name__ == "__main__":
    main()
