"""Counts the code that Inductor writes for a layer of BERT-large on an H100, without a GPU, in a table.

    python -m benchmarks.gpu.layer --markdown benchmarks/results/gpu_layer_DATE.md

The layer is that of the recipes: 64 x 512 tokens, bf16 products and residuals, keyed dropout, attention
in the kernels of ``shoal.attention_kernel``, which Inductor's code launches. Bytes are those of its own
kernels, each tensor once a kernel; products and attention are not in them. Nothing runs
(``benchmarks.gpu.kernels``); it takes half a minute.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.counts import LARGE
from benchmarks.gpu.kernels import Code, code_of
from shoal.attention import assuming_kernels
from shoal.models.encoder import Encoder
from shoal.models.pretraining import BertPretraining
from shoal.models.text_config import BertModelConfig

_LAUNCH = re.compile(r"\btriton_\w+\.run\(")
_SHAPE = re.compile(r"empty_strided_cuda\(\(([\d, ]+)\)")


@dataclass(frozen=True)
class PassCounts:
    """Counts of a forward or backward pass."""

    num_bytes: int
    """Read and written by Inductor's kernels."""
    num_launches: int
    """Of Inductor's kernels."""
    num_products: int
    num_casts: int
    """Views of a tensor as another type, which cut the fusion of what is before and behind them."""
    num_squares: int
    """Tensors with queries times keys of all heads, or more elements."""


def layer_passes(
    config: BertModelConfig = LARGE, num_sequences: int = 64, length: int = 512
) -> tuple[PassCounts, PassCounts]:
    """Count the forward and the backward pass of a layer over sequences of one length."""
    with FakeTensorMode(), assuming_kernels(True):
        model = BertPretraining(replace(config, num_hidden_layers=1))
        layer = _OneLayer(model.encoder, num_sequences, length)
        forward, backward = code_of(layer, layer.loss)
    scores = num_sequences * config.num_attention_heads * length**2
    return _counts(forward, scores), _counts(backward, scores)


class _OneLayer(nn.Module):
    def __init__(self, encoder: Encoder, num_sequences: int, length: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.run: Callable[..., Tensor] = encoder._layer
        hidden, num_tokens = encoder.base.config.hidden_size, num_sequences * length
        positions = torch.arange(length).repeat(num_sequences)
        cu_seqlens = torch.arange(num_sequences + 1, dtype=torch.int32) * length
        keys = torch.zeros(num_tokens, dtype=torch.int64)
        rows = torch.randn(num_tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        layout = encoder._layout(rows, positions, cu_seqlens, length, None, None)
        self.inputs = (encoder.layers[0], rows, False, layout, (keys, keys, keys))

    def compile(self, *args: Any, **options: Any) -> None:
        self.run = torch.compile(self.encoder._layer, *args, **options)

    def loss(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.run(*self.inputs).sum()


def _counts(code: Code, scores: int) -> PassCounts:
    body, calls = code.text.rpartition("def call(")[2], code.library_calls
    shapes = [torch.Size(map(int, found.rstrip(", ").split(","))) for found in _SHAPE.findall(body)]
    return PassCounts(
        num_bytes=code.num_bytes,
        num_launches=len(_LAUNCH.findall(body)),
        num_products=sum(call.startswith("extern_kernels.") for call in calls),
        num_casts=body.count("= torch.ops.aten.view.dtype("),
        num_squares=sum(shape.numel() >= scores for shape in shapes),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    lines = [
        "# A layer of BERT-large, 64 × 512 tokens, in Inductor's code for an H100",
        "",
        f"{datetime.date.today()}, torch {torch.__version__}, counted without a GPU by "
        "`python -m benchmarks.gpu.layer`. No time was measured.",
        "",
        "| pass | GB of Triton kernels | launches | products | views as another type | tensors of S × S |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in zip(("forward", "backward"), layer_passes(), strict=True):
        lines.append(
            f"| {name} | {found.num_bytes / 1e9:.2f} | {found.num_launches} | {found.num_products} | "
            f"{found.num_casts} | {found.num_squares} |"
        )
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
