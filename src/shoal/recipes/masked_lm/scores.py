"""From summed losses and counts to the figures of the record, in training and on held-out data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal import record
from shoal.data.loader import Batch, held_out_batches
from shoal.data.text.examples import unigram_entropy
from shoal.recipes.masked_lm.job import Job
from shoal.recipes.masked_lm.losses import NUM_SUMS, losses_of

SENTENCE_TASKS = {"sop": "sentence order", "nsp": "next sentence"}


def metrics_of(task: str, sums: Tensor, num_masked: int, num_sequences: int) -> dict[str, float]:
    """Return means in nats and accuracies from sums over all workers, float64 ``[4]``.

    ``task`` is ``sop`` or ``nsp``, as in the metrics' names.
    """
    mlm_loss, mlm_correct, sentence_loss, sentence_correct = (float(value) for value in sums)
    masked, sequences = max(num_masked, 1), max(num_sequences, 1)
    return {
        "mlm_loss": mlm_loss / masked,
        "mlm_accuracy": mlm_correct / masked,
        f"{task}_loss": sentence_loss / sequences,
        f"{task}_accuracy": sentence_correct / sequences,
    }


def total_loss(metrics: dict[str, float]) -> float:
    """Return the loss that is trained on: both means added."""
    return sum(value for name, value in metrics.items() if name.endswith("_loss"))


def score(job: Job, step: int) -> record.Evaluation:
    """Return the scores on the held-out examples, shared out over the workers."""
    began = time.monotonic()
    job.ddp.eval()
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=job.world.device)
    num_masked = num_sequences = 0
    with torch.inference_mode():
        for batch in held_out(job):
            losses_of(job, batch, sums)
            num_masked += len(batch["masked_ids"])
            num_sequences += len(batch["labels"])
    job.ddp.train()  # type: ignore[no-untyped-call]
    num_masked, num_sequences = job.world.sum_counts(num_masked, num_sequences)
    totals = job.world.sum_values(sums.cpu())
    return record.Evaluation(
        step=step,
        split="validation",
        num_samples=num_sequences,
        metrics=metrics_of(job.config.sentence_task, totals, num_masked, num_sequences),
        seconds=time.monotonic() - began,
    )


def held_out(job: Job, *, whole: bool = False) -> Iterator[Batch]:
    """Yield this worker's part of the held-out examples, or all of them."""
    return held_out_batches(
        job.held_out_reader,
        micro_batch_size=job.batch.micro_batch_size,
        limit=job.config.run.validation_samples,
        rank=0 if whole else job.world.place.rank,
        num_workers=1 if whole else job.world.num_workers,
    )


def reference_lines(task: str, batches: Sequence[Batch]) -> dict[str, float]:
    """Return what knowing nothing of the text scores: the unigram entropy of the held-out targets, chance.

    A model that only knows how often each token occurs reaches the entropy; what lies below is language.
    """
    targets = torch.cat([batch["masked_ids"] for batch in batches])
    return {
        "mlm_loss": unigram_entropy(targets.numpy()),
        f"{task}_loss": math.log(2),
        f"{task}_accuracy": 0.5,
    }


def verdict(task: str, scores: record.Evaluation, references: dict[str, float]) -> str:
    """Return what the held-out scores say, against knowing how often tokens occur and against guessing."""
    loss, entropy = scores.metrics["mlm_loss"], references["mlm_loss"]
    accuracy = scores.metrics[f"{task}_accuracy"]
    p_value = max(chance_p_value(accuracy, scores.num_samples), 1e-300)
    return (
        f"held-out masked-LM loss {loss:.3f}: {abs(entropy - loss):.2f} nats "
        f"{'below' if loss < entropy else 'above'} the unigram entropy of its targets ({entropy:.3f})\n"
        f"held-out {SENTENCE_TASKS[task]} {100 * accuracy:.1f} % right on {scores.num_samples:,} pairs "
        f"(by guessing: p {'<' if p_value <= 1e-300 else '='} {p_value:.1e})"
    )


def chance_p_value(accuracy: float, num_samples: int) -> float:
    """Return the probability of at least this accuracy by guessing, one-sided (normal approximation)."""
    z = (accuracy - 0.5) / (0.5 / math.sqrt(num_samples))
    return 0.5 * math.erfc(z / math.sqrt(2))
