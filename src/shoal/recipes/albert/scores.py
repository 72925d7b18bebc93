"""From summed losses and counts to the figures of the record, in training and on held-out data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shoal import record
from shoal.data.examples import unigram_entropy
from shoal.data.loader import Batch
from shoal.train.world import World

NUM_SUMS = 4
"""Sums a micro-batch adds to: masked-LM loss and correct, sentence-order loss and correct."""


def metrics_of(sums: Tensor, num_masked: int, num_sequences: int) -> dict[str, float]:
    """Return means in nats and accuracies from sums over all workers, float64 ``[4]``."""
    mlm_loss, mlm_correct, sop_loss, sop_correct = (float(value) for value in sums)
    masked, sequences = max(num_masked, 1), max(num_sequences, 1)
    return {
        "mlm_loss": mlm_loss / masked,
        "mlm_accuracy": mlm_correct / masked,
        "sop_loss": sop_loss / sequences,
        "sop_accuracy": sop_correct / sequences,
    }


def total_loss(metrics: dict[str, float]) -> float:
    """Return the loss that is trained on: both means added."""
    return metrics["mlm_loss"] + metrics["sop_loss"]


def evaluate(
    world: World,
    step: int,
    batches: Callable[[], Iterator[Batch]],
    add_sums: Callable[[Batch, Tensor], object],
) -> record.Evaluation:
    """Return the scores on held-out examples, shared out over the workers.

    Args:
        batches: yields this worker's micro-batches.
        add_sums: runs the model on a micro-batch and adds its four sums to a float64 tensor.
    """
    began = time.monotonic()
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=world.device)
    num_masked = num_sequences = 0
    with torch.inference_mode():
        for batch in batches():
            add_sums(batch, sums)
            num_masked += int(batch["masked_weights"].sum())
            num_sequences += len(batch["labels"])
    num_masked, num_sequences = world.sum_counts(num_masked, num_sequences)
    return record.Evaluation(
        step=step,
        split="validation",
        num_samples=num_sequences,
        metrics=metrics_of(world.sum_values(sums.cpu()), num_masked, num_sequences),
        seconds=time.monotonic() - began,
    )


def reference_lines(batches: Iterator[Batch]) -> dict[str, float]:
    """Return what knowing nothing of the text scores: the unigram entropy of the held-out targets, chance.

    A model that only knows how often each token occurs reaches the entropy; what lies below is language.
    """
    targets = [batch["masked_ids"][batch["masked_weights"] > 0] for batch in batches]
    return {
        "mlm_loss": unigram_entropy(torch.cat(targets).numpy()),
        "sop_loss": math.log(2),
        "sop_accuracy": 0.5,
    }


def verdict(scores: record.Evaluation, references: dict[str, float]) -> str:
    """Return what the held-out scores say, against knowing how often tokens occur and against guessing."""
    loss, entropy = scores.metrics["mlm_loss"], references["mlm_loss"]
    accuracy = scores.metrics["sop_accuracy"]
    p_value = max(chance_p_value(accuracy, scores.num_samples), 1e-300)
    return (
        f"held-out masked-LM loss {loss:.3f}: {abs(entropy - loss):.2f} nats "
        f"{'below' if loss < entropy else 'above'} the unigram entropy of its targets ({entropy:.3f})\n"
        f"held-out sentence order {100 * accuracy:.1f} % right on {scores.num_samples:,} pairs "
        f"(by guessing: p {'<' if p_value <= 1e-300 else '='} {p_value:.1e})"
    )


def chance_p_value(accuracy: float, num_samples: int) -> float:
    """Return the probability of at least this accuracy by guessing, one-sided (normal approximation)."""
    z = (accuracy - 0.5) / (0.5 / math.sqrt(num_samples))
    return 0.5 * math.erfc(z / math.sqrt(2))
