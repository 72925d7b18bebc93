"""Pretrains ALBERT, BERT and their relatives divided over workers: pipeline stages, and shards of replicas.

It trains instead of ``albert.py`` and ``bert.py`` where ``parallel.pipeline`` or ``parallel.shard`` divides
the model. Sequences are padded, since stages have fixed shapes; losses, weights and dropout are those of
a run whose workers have the whole model, and a run continues in any layout.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.decide.batch import BatchPlan
from shoal.env.worker import WorkerEnv
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import masked_lm, script
from shoal.recipes.masked_lm import MaskedLMConfig
from shoal.recipes.model_source import TRANSFORMERS
from shoal.recipes.prepared_text import keep_tokenizer, load_weights
from shoal.train.optim_config import schedule_of

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.data.text.padded_examples import PaddedExamples
    from shoal.models.pretraining import Pretraining
    from shoal.pipelining.runtime import Pipeline
    from shoal.train.run import Run


def main(config: MaskedLMConfig, worker: WorkerEnv | None = None) -> int:
    """Pretrain until the last step, a signal, or a loss that stays not finite; return the exit code."""
    from contextlib import ExitStack

    import torch

    from shoal.data.sources import ReaderSource
    from shoal.data.text.padded_examples import PaddedExamples
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run

    phase, parallel, task = config.whole_phase, config.parallel, config.sentence_task
    recipe, immutable = config.recipe, script(config.recipe).IMMUTABLE
    with (
        Run.open(config=config, recipe=recipe, immutable=immutable, worker=worker) as run,
        ExitStack() as stack,
    ):
        # ----------------------------------------------------------------------------------------- data
        batch = parallel.plan(phase.sizes, run.world.num_workers, section=phase.section)
        train, held_out = masked_lm.open_text(
            config, phase.lengths, pairs=phase.pairs, verify=run.world.is_main
        )
        keep_tokenizer(train.shards, run)
        references = masked_lm.reference_lines(task, held_out, config.run.validation_samples)
        replica = run.world.rank // parallel.pipeline

        # ----------------------------------------------------------------------------------------- model
        reader = PaddedExamples(train)
        model, stage = _open_model(config, run, reader, batch)
        stack.callback(stage.close)
        optimizer = build_optimizer(stage.module.named_parameters(), config.optim)
        schedule = schedule_of(phase.rates, config.optim, phase.sizes.total_steps)
        run.keep(**stage.kept(), optimizer=optimizer)
        stage.step_number = run.step

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> None:
            padded, limit = PaddedExamples(held_out), config.run.validation_samples
            scores, num_samples = _evaluate(stage, padded, run, batch, replica, task, limit)
            run.evaluation("validation", scores, num_samples=num_samples)

        # ----------------------------------------------------------------------------------------- loop
        steps = run.steps(
            ReaderSource(reader=reader, processes=config.data.loader_processes, whole=True),
            batch,
            until=phase.sizes.total_steps,
            targets=lambda inputs: int(inputs["masked_weights"].sum()),
            replica=(replica, batch.num_workers),
            section=phase.section,
            references=references,
            notes=[f"data: {train.num_examples:,} training examples an epoch"],
        )
        for step in steps:
            with step:
                set_learning_rate(optimizer, learning_rate(schedule, step.number - 1))
                num_targets = step.num_targets / parallel.pipeline  # each stage has counted its replica's
                for inputs in step:  # one batch: the stage cuts it into micro-batches
                    share = torch.tensor(step.num_samples / num_targets, dtype=torch.float32)
                    stage.loss_scale = step.loss_scale
                    step.observe(stage.step(**inputs, samples_per_target=share), "pipeline")
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if run.due(config.run.validation_frequency, evaluation=True):
                score()
        if run.lacks_scores("validation"):
            score()

        return run.finish(
            lambda directory: _export(model, train.shards.tokenizer_file, directory),
            lambda last: masked_lm.verdict(task, last["validation"], references),
        )


def _open_model(
    config: MaskedLMConfig, run: "Run", reader: "PaddedExamples", batch: BatchPlan
) -> "tuple[Pretraining, Pipeline]":
    """Return the model with its first weights, and this worker's stages of it, which the run updates."""
    import torch

    from shoal.models.padded_pretraining import PaddedPretraining
    from shoal.models.pretraining import new_encoder
    from shoal.recipes.stages import open_stages

    sizes: Any = config.model
    torch.manual_seed(run.seed)
    model = new_encoder(sizes)
    load_weights(model, config.model)
    run.num_parameters = sum(parameter.numel() for parameter in model.parameters())
    stage = open_stages(
        PaddedPretraining(model), _example(reader, batch.worker_batch_size), run, config.parallel, batch,
        distributed=config.distributed, servers=config.servers,
    )  # fmt: skip
    return model, stage


def _example(examples: "PaddedExamples", size: int) -> "dict[str, Tensor]":
    """Return a replica's first batch on the CPU, by which the model is traced.

    Args:
        examples: the training examples; fewer than a batch are repeated.
        size: rows of the batch.
    """
    import numpy as np
    import torch

    from shoal.data.loader import as_tensors

    rows = np.arange(size) % examples.num_examples
    batch = as_tensors(examples.micro_batch(examples.batch(0, rows)), pin_memory=False)
    return {**batch, "samples_per_target": torch.ones(())}


def _export(model: Any, tokenizer_file: Path, directory: Path) -> None:
    """Write the model of the last checkpoint, one tensor at a time: no worker has all weights."""
    from shoal.train.checkpoint import stored_model

    _, stored = stored_model(directory)
    (prefix,) = (name for name, part in model.named_children() if part is model.weights)

    def read(name: str) -> "Tensor":
        return stored[f"{prefix}.{name}"]()

    masked_lm.write_export(model, tokenizer_file, directory / TRANSFORMERS, read)


def _evaluate(
    stage: "Pipeline",
    examples: "PaddedExamples",
    run: "Run",
    batch: BatchPlan,
    replica: int,
    task: str | None,
    limit: int,
) -> tuple[dict[str, float], int]:
    """Return mean losses in nats and accuracies on the held-out examples, and the number of examples.

    The examples are those of a run without stages; rows that fill the last batch count for nothing.
    """
    import numpy as np
    import torch

    from shoal.data.loader import as_tensors
    from shoal.data.steps import evenly_spread
    from shoal.models.padded_pretraining import SUMS

    chosen = evenly_spread(examples.num_examples, limit)
    totals = np.zeros(len(SUMS) + 1)
    for first in range(0, len(chosen), batch.global_batch_size):
        numbers = first + replica * batch.worker_batch_size + np.arange(batch.worker_batch_size)
        is_there = numbers < len(chosen)
        arrays = examples.micro_batch(examples.batch(0, chosen[np.where(is_there, numbers, 0)]))
        arrays["weights"] = arrays["weights"] * is_there.astype(np.float32)
        arrays["masked_weights"] = arrays["masked_weights"] * is_there[:, None].astype(np.float32)
        inputs = {
            name: value.to(run.world.device) for name, value in as_tensors(arrays, pin_memory=False).items()
        }
        evaluation = stage.evaluate(**inputs, samples_per_target=torch.ones((), device=run.world.device))
        for output in evaluation.outputs or ():  # on the workers of the last stage
            totals[:-1] += output["sums"].double().cpu().numpy()
        if evaluation.outputs is not None:
            totals[-1] += arrays["masked_weights"].sum()
    *sums, masked = run.sum(totals.tolist())
    names = ("mlm_loss", "mlm_accuracy", *((f"{task}_loss", f"{task}_accuracy") if task else ()))
    counts = (masked, masked, len(chosen), len(chosen))
    return {n: value / max(count, 1) for n, value, count in zip(names, sums, counts, strict=False)}, len(
        chosen
    )
