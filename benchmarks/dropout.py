"""Compares dropout keyed by samples with torch's dropout, forward and backward.

Both sides run the same operation or the same module; ours runs it inside ``SampleDropout``. The layer is
transformers' of BERT-base over 32 sequences of 128 tokens, with dropout 0.1 on hidden states and on attention
weights: torch's side may use a fused attention kernel that draws the mask itself, ours computes attention
explicitly. Targets allow 1.3 times torch's time on the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from benchmarks.harness import Benchmark
from shoal.decide.rng import dropout_keys
from shoal.dropout import SampleDropout

NUM_SAMPLES, LENGTH = 32, 128
P = 0.1


def pass_ms(module: Callable[[Tensor], Tensor], x: Tensor, keys: Tensor | None) -> Callable[[], None]:
    """Return a forward and backward pass, which has ended when the call returns."""
    gradient = torch.randn_like(x)

    def run() -> None:
        if keys is None:
            out = module(x)
        else:
            with SampleDropout(keys):
                out = module(x)
        out.backward(gradient)  # type: ignore[no-untyped-call]
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    return run


def bert_layer(device: torch.device) -> nn.Module:
    config = BertConfig(hidden_dropout_prob=P, attention_probs_dropout_prob=P, attn_implementation="sdpa")
    torch.manual_seed(0)
    layer: nn.Module = BertLayer(config).to(device).train()
    return layer


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    bench = Benchmark("dropout", options=options)
    device = torch.device(bench.args.device)
    target = 1 / 1.3 if device.type == "cpu" else None
    keys = torch.from_numpy(dropout_keys(42, 0, np.arange(NUM_SAMPLES))).to(device)
    layer = bert_layer(device)

    def whole_layer(x: Tensor) -> Tensor:
        out = layer(x)
        return out if isinstance(out, Tensor) else out[0]

    cases: list[tuple[str, Callable[[Tensor], Tensor], tuple[int, ...]]] = [
        ("dropout of hidden states", lambda x: F.dropout(x, P), (NUM_SAMPLES, LENGTH, 768)),
        ("dropout of attention weights", lambda x: F.dropout(x, P), (NUM_SAMPLES, 12, LENGTH, LENGTH)),
        ("layer of BERT-base", whole_layer, (NUM_SAMPLES, LENGTH, 768)),
    ]
    for name, module, shape in cases:
        x = torch.randn(shape, device=device, requires_grad=True)
        bench.compare(
            f"{name}, {list(shape)}, {device.type}",
            ours=pass_ms(module, x, keys),
            peer=pass_ms(module, x, None),
            peer_name="torch's dropout",
            target=target,
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
