"""From settings to workers: checks what can be checked before any starts, then starts or joins them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from shoal.data.manifest import Manifest
from shoal.data.squad.dataset import read_squad
from shoal.decide.batch import BatchPlan, plan_batch
from shoal.decide.memory_estimate import MemoryEstimate, estimate_memory
from shoal.env import WorkerEnv
from shoal.errors import UsageError
from shoal.recipes.masked_lm.config import Phase, PretrainConfig
from shoal.recipes.start import Launch, named, start
from shoal.train.config import as_tree, required, to_toml

Config = TypeVar("Config", bound=PretrainConfig)


def run(
    config: Config,
    how: Launch,
    pretrain: Callable[[Config, WorkerEnv, list[str]], int],
    *,
    preset: str,
    command: list[str],
) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that cannot work together or with the data.
        ShoalError: a worker failed.
    """
    resolved: Config = replace(config, run=named(config.run, f"{config.recipe}-{preset}"))  # type: ignore[type-var]
    return start(
        how,
        command=command,
        run_dir=required(resolved.run.dir),
        describe=lambda num_workers: describe(resolved, num_workers),
        work=lambda place: pretrain(resolved, place, command),
    )


def check_data(config: PretrainConfig) -> Manifest:
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
    manifest.check_vocabulary(config.model.vocab_size)
    return manifest


def check_finetune(config: PretrainConfig, num_workers: int) -> None:
    """Check what can be checked of the finetuning in between.

    Raises:
        UsageError: sizes that do not divide, or no questions.
    """
    short = config.finetune
    plan_batch(
        global_batch_size=short.global_batch_size,
        num_workers=num_workers,
        micro_batch_size=short.micro_batch_size,
        section="finetune",
    )
    for path in (required(short.data), required(short.eval)):
        read_squad(path, misplaced="skip")


def describe(config: PretrainConfig, num_workers: int) -> list[str]:
    """Check the settings; return what a dry run prints: settings, arithmetic, parameters, memory.

    Raises:
        UsageError: sizes that do not divide, or no data that fits.
    """
    plans = [
        plan_batch(
            global_batch_size=phase.global_batch_size,
            num_workers=num_workers,
            micro_batch_size=phase.micro_batch_size,
            section=phase.section,
        )
        for phase in config.phases
    ]
    manifest = check_data(config)
    if config.finetune.at:
        check_finetune(config, num_workers)
    num_tokens = sum(shard.num_tokens for shard in manifest.shards("train"))
    phases = list(zip(config.phases, plans, strict=True))
    memory = max((estimate(config, *pair) for pair in phases), key=lambda estimate: estimate.total_bytes)
    return [
        to_toml(as_tree(config)),
        *(line for pair in phases for line in phase_lines(config, *pair, num_tokens)),
        f"parameters   {config.num_parameters:,}",
        f"memory       {memory}",
    ]


def phase_lines(config: PretrainConfig, phase: Phase, batch: BatchPlan, num_tokens: int) -> list[str]:
    """Return the lines of a dry run about one phase, named where there are several."""
    name = f"{phase.section}: " if len(config.phases) > 1 else ""
    sequences = phase.num_steps * batch.global_batch_size
    epochs = sequences * phase.max_seq_length / max(num_tokens, 1)
    return [
        f"batch        {name}{batch}",
        f"run          {name}{phase.num_steps:,} steps, {sequences:,} sequences of {phase.max_seq_length} "
        f"tokens, about {epochs:,.1f} times the {num_tokens:,} tokens of {config.data.path}",
    ]


def estimate(config: PretrainConfig, phase: Phase, batch: BatchPlan) -> MemoryEstimate:
    """Estimate a worker's memory in a phase."""
    model = config.model
    return estimate_memory(
        num_parameters=config.num_parameters,
        micro_batch_size=batch.micro_batch_size,
        sequence_length=phase.max_seq_length,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_hidden_layers,
        num_logits=batch.micro_batch_size * phase.max_predictions_per_seq * model.vocab_size,
        activation_bytes=2 if config.train.precision in ("bf16", "fp16") else 4,
        activation_checkpointing=model.activation_checkpointing,
    )
