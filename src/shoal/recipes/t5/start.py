"""From settings to workers: checks what can be checked before any starts, then starts or joins them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.data.manifest import Manifest
from shoal.decide.batch import BatchPlan, plan_batch
from shoal.decide.memory_estimate import MemoryEstimate, estimate_memory
from shoal.env import WorkerEnv
from shoal.errors import UsageError
from shoal.recipes.start import Launch, named, start
from shoal.recipes.t5.config import T5PretrainConfig
from shoal.train.config import as_tree, required, to_toml


def run(
    config: T5PretrainConfig,
    how: Launch,
    pretrain: Callable[[T5PretrainConfig, WorkerEnv, list[str]], int],
    *,
    preset: str,
    command: list[str],
) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that cannot work together or with the data.
        ShoalError: a worker failed.
    """
    resolved = replace(config, run=named(config.run, f"{config.recipe}-{preset}"))
    return start(
        how,
        command=command,
        run_dir=required(resolved.run.dir),
        describe=lambda num_workers: describe(resolved, num_workers, dry_run=how.dry_run),
        work=lambda place: pretrain(resolved, place, command),
    )


def plan_of(config: T5PretrainConfig, num_workers: int) -> BatchPlan:
    """Return how a global batch is computed; its ``num_workers`` are the replicas.

    Raises:
        UsageError: the sizes do not divide.
    """
    train, replicas = config.train, config.parallel.replicas(num_workers)
    share = train.global_batch_size // replicas
    return plan_batch(
        global_batch_size=train.global_batch_size,
        num_workers=replicas,
        micro_batch_size=config.parallel.micro_batch_size(share, train.micro_batch_size),
    )


def in_words(batch: BatchPlan) -> str:
    """Return the arithmetic of a batch whose ``num_workers`` are replicas of a pipeline."""
    parts = (
        (batch.micro_batch_size, "sequence", "sequences"),
        (batch.accumulation_steps, "micro-batch", "micro-batches"),
        (batch.num_workers, "replica", "replicas"),
    )
    product = " × ".join(f"{number} {one if number == 1 else many}" for number, one, many in parts)
    return f"{product} = {batch.global_batch_size:,} sequences a step"


def describe(config: T5PretrainConfig, num_workers: int, *, dry_run: bool) -> list[str]:
    """Check the settings; return what a dry run prints: settings, arithmetic, parameters, memory, layout.

    Raises:
        UsageError: sizes that do not divide, no data or no layout that fits.
    """
    devices = config.parallel.devices or num_workers
    if devices != num_workers and not dry_run:
        raise UsageError(
            f"--devices {devices} plans for other devices than the {num_workers} workers here: add "
            "--dry-run, or leave it out"
        )
    num_workers, predicted = devices, []
    if config.parallel.layout == "auto" or (dry_run and config.parallel.memory is not None):
        from shoal.recipes.t5.layout import find_layouts, layout_lines, settled

        layouts = find_layouts(config, num_workers)
        predicted = layout_lines(layouts, config.parallel.device)
        config = settled(config, layouts[0]) if config.parallel.layout == "auto" else config
    batch, spans = plan_of(config, num_workers), config.spans()
    manifest = check_data(config)
    num_tokens = sum(shard.num_tokens for shard in manifest.shards("train"))
    sequences = config.train.total_steps * batch.global_batch_size
    memory = estimate(config, batch)
    return [
        to_toml(as_tree(config)),
        f"layout       {config.parallel.pipeline} pipeline × {batch.num_workers} data",
        f"batch        {in_words(batch)}",
        f"examples     {spans.num_tokens} tokens of text, {spans.num_noise} of them in {spans.num_spans} "
        f"spans: inputs of {spans.input_length}, targets of {spans.target_length}",
        f"run          {config.train.total_steps:,} steps, {sequences:,} sequences, about "
        f"{sequences * spans.num_tokens / max(num_tokens, 1):,.1f} times the {num_tokens:,} tokens of "
        f"{config.data.path}",
        f"parameters   {config.num_parameters:,}",
        f"memory       {memory}",
        *predicted,
    ]


def check_data(config: T5PretrainConfig) -> Manifest:
    """Return the manifest of the prepared text that the settings name.

    Raises:
        UsageError: none is named, it is not there, or its vocabulary is larger than the model's.
    """
    if config.data.path is None:
        raise UsageError(
            "data.path is not set: name the directory that `shoal prepare text` wrote, "
            "e.g. --data.path runs/text"
        )
    manifest = Manifest.load(config.data.path)
    config.check_vocabulary(manifest.vocab_size)
    return manifest


def estimate(config: T5PretrainConfig, batch: BatchPlan) -> MemoryEstimate:
    """Estimate a worker's memory with equal stages that keep as many micro-batches as there are stages."""
    model, spans, stages = config.model, config.spans(), config.parallel.pipeline
    kept = min(stages, batch.accumulation_steps)
    whole = estimate_memory(
        num_parameters=config.num_parameters // stages,
        micro_batch_size=batch.micro_batch_size * kept,
        sequence_length=spans.input_length + spans.target_length,
        hidden_size=max(model.d_model, model.num_heads * model.d_kv),
        intermediate_size=model.d_ff,
        num_layers=-(-model.num_layers // stages),
        num_logits=batch.micro_batch_size * spans.target_length * model.vocab_size,
        activation_bytes=2 if config.train.precision == "bf16" else 4,
        activation_checkpointing=False,
    )
    return replace(whole, optimizer_bytes=0) if config.optim.optimizer == "adafactor" else whole
