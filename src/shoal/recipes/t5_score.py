"""Scores a T5 that is trained, whole or in stages, on held-out text."""

from __future__ import annotations

from contextlib import closing

from shoal.data.loader import LoaderConfig, to_device, training_steps
from shoal.data.steps import DataShard, StepReader
from shoal.data.text.examples import unigram_entropy
from shoal.data.text.span_corruption import SpanReader
from shoal.models.t5 import MODEL_INPUTS
from shoal.pipelining.runtime import Pipeline
from shoal.record import Evaluation
from shoal.train.run import Run

LOSS, ACCURACY = "span_loss", "span_accuracy"
"""Cross-entropy per target token; part of them that is the likeliest token. Held-out without z-loss."""


def evaluate(
    stage: Pipeline, reader: SpanReader, run: Run, pipeline: int, *, limit: int
) -> tuple[dict[str, float], int]:
    """Return loss and accuracy on the first global batches of the held-out stream, and their samples.

    Whole global batches: the scores do not depend on the layout, and stages see the shapes of training. A
    split that is smaller than one is gone through more than once, each time with other spans.
    """
    size = run.batch.global_batch_size
    num_batches = max(min(limit, reader.num_examples) // size, 1)
    shard = DataShard(
        global_batch_size=size,
        micro_batch_size=run.batch.worker_batch_size,
        rank=run.world.place.rank // pipeline,
        num_workers=run.batch.num_workers,
    )
    steps = StepReader(reader=reader, share=shard)
    losses: list[float] = []
    num_correct = num_targets = 0
    with closing(training_steps(steps, LoaderConfig(), num_steps=num_batches)) as batches:
        for (batch,) in batches:
            inputs = to_device({name: batch[name] for name in MODEL_INPUTS}, run.world.device)
            found = stage.evaluate(**inputs)
            losses.append(float(found.loss))
            if found.outputs is not None:  # on the workers of the last stage
                num_correct += sum(int(output.num_correct.sum()) for output in found.outputs)
                num_targets += batch["labels"].numel()
    correct, targets = run.sum([num_correct, num_targets])
    return {LOSS: sum(losses) / num_batches, ACCURACY: correct / targets}, num_batches * size


def reference_loss(reader: SpanReader) -> float:
    """Return the loss of a model that knows where sentinels stand and how often each token of text occurs.

    A loss below it has learnt from the context.
    """
    spans = reader.config
    targets = reader.batch(0, range(min(reader.num_examples, 2_048)))["labels"][:, :-1]
    text = targets[targets < reader.shards.manifest.vocab_size]
    return spans.num_noise / spans.target_length * unigram_entropy(text)


def verdict(scores: Evaluation, reference: float) -> str:
    """Compare the held-out loss with :func:`reference_loss`, in a line."""
    loss = scores.metrics[LOSS]
    return (
        f"held-out loss {loss:.3f}: {abs(reference - loss):.2f} nats "
        f"{'below' if loss < reference else 'above'} a model that knows how often tokens occur "
        f"and where sentinels stand ({reference:.3f})"
    )
