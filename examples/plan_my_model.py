"""Predicts the training of your own model on machines that you have not rented.

    python examples/plan_my_model.py
    python examples/plan_my_model.py --hosts 64xp4d.24xlarge --helpers 16xc5n.18xlarge

The model is built on the meta device: nothing is allocated, downloaded or computed.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import plan
from shoal.planner.answer import text_of

VOCABULARY, LENGTH = 32_000, 1024


class TinyGPT(nn.Module):
    """A decoder-only language model that returns its own loss."""

    def __init__(self, width: int = 1024, num_layers: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy; ``input_ids`` and ``labels`` are int64 ``[samples, LENGTH]``."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=input_ids.device)
        hidden = self.layers(self.tokens(input_ids) + self.positions, mask=mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="8xp4d.24xlarge", help="hosts that train")
    parser.add_argument("--helpers", help="CPU hosts that sum gradients, such as 4xc5n.18xlarge")
    parser.add_argument("--global-batch", type=int, default=512, help="samples per optimizer step")
    args = parser.parse_args()

    with torch.device("meta"):
        model = TinyGPT()
        ids = torch.empty(2, LENGTH, dtype=torch.int64)
    plans = plan(
        model,
        args.hosts,
        args.helpers,
        inputs={"input_ids": ids, "labels": ids},
        global_batch=args.global_batch,
        train_samples=10e6,
    )
    best = plans[0]
    print(text_of(plans, compare=True))
    print(
        f"\nin numbers: {best.samples_per_s:.0f} samples/s, {best.total_s / 3600:.1f} h, ${best.dollars:.0f}"
    )
    print({cause: round(seconds / best.total_s, 3) for cause, seconds in best.seconds_by_cause.items()})


if __name__ == "__main__":
    main()
