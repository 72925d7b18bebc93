"""From settings to workers: checks what can be checked before any starts, then starts or joins them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shoal.data.manifest import Manifest
from shoal.decide.batch import BatchPlan, plan_batch
from shoal.decide.memory import MemoryEstimate, estimate_memory
from shoal.env import joined
from shoal.errors import EXIT_OK, UsageError
from shoal.launch.emulated_job import Hosts, launch_emulated
from shoal.launch.local import launch
from shoal.models.albert_config import num_parameters
from shoal.recipes.albert.config import AlbertPretrainConfig
from shoal.train.config import as_tree, required, to_toml
from shoal.train.run_dir import require_writable


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What concerns starting workers, and nothing of what they do."""

    preset: str
    num_workers: int | None
    nnodes: int
    rdzv: str | None
    dry_run: bool
    on: Literal["local", "emulated"] = "local"
    hosts: int | None = None
    nic: str | None = None
    helpers: int = 0
    helper_nic: str | None = None

    def emulated_hosts(self) -> Hosts | None:
        """Return the emulated hosts to run on, or ``None`` for this host.

        Raises:
            UsageError: options that do not go together.
        """
        if self.on == "local":
            given = {"--hosts": self.hosts, "--nic": self.nic, "--helper-nic": self.helper_nic}
            names = [name for name, value in given.items() if value is not None]
            names += ["--helpers"] if self.helpers else []
            if names:
                raise UsageError(f"{', '.join(names)} set up emulated hosts: add --on emulated")
            return None
        if self.hosts is None:
            raise UsageError("--on emulated needs --hosts N, the number of hosts to emulate")
        if self.nnodes != 1 or self.rdzv is not None:
            raise UsageError(
                "--nnodes and --rdzv name real hosts and do not go with --on emulated: use --hosts"
            )
        return Hosts(
            hosts=self.hosts,
            nic=self.nic,
            helpers=self.helpers,
            helper_nic=self.helper_nic,
            workers_per_host=1 if self.num_workers is None else self.num_workers,
        )


def run(config: AlbertPretrainConfig, how: Launch, *, command: list[str]) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that cannot work together or with the data.
        ShoalError: a worker failed.
    """
    config = with_defaults(config, how.preset)
    place = joined()
    if place is not None:
        from shoal.launch.worker import run_worker
        from shoal.recipes.albert.pretrain import pretrain

        return run_worker(lambda: pretrain(config, joined=place, command=command))
    emulated = how.emulated_hosts()
    if emulated is None:
        num_local = how.num_workers or default_num_workers()
        num_workers, hosts = num_local * how.nnodes, ""
    else:
        num_workers, hosts = emulated.num_workers, emulated.check()
    batch = plan_batch(
        global_batch_size=config.train.global_batch_size,
        num_workers=num_workers,
        micro_batch_size=config.train.micro_batch_size,
    )
    manifest = check_data(config)
    if how.dry_run:
        print(describe(config, batch, manifest, hosts=hosts))
        return EXIT_OK
    run_dir = required(config.run.dir)
    require_writable(run_dir)
    if emulated is not None:
        return launch_emulated(command, emulated, log_dir=run_dir / "logs")
    return launch(command, num_workers=num_local, nnodes=how.nnodes, rdzv=how.rdzv, log_dir=run_dir / "logs")


def with_defaults(config: AlbertPretrainConfig, preset: str) -> AlbertPretrainConfig:
    """Fill in the name and the directory of the run."""
    name = config.run.name or (config.run.dir.name if config.run.dir else f"albert-{preset}")
    directory = config.run.dir or Path("runs") / name
    return replace(config, run=replace(config.run, name=name, dir=directory))


def default_num_workers() -> int:
    """Return one worker a GPU, or one."""
    import torch

    return max(torch.cuda.device_count(), 1)


def check_data(config: AlbertPretrainConfig) -> Manifest:
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


def describe(config: AlbertPretrainConfig, batch: BatchPlan, manifest: Manifest, *, hosts: str = "") -> str:
    """Return what a dry run prints: settings, emulated hosts if any, arithmetic, parameters, memory."""
    memory = estimate(config, batch)
    steps, sequences = config.train.total_steps, config.train.total_steps * batch.global_batch_size
    tokens = sum(shard.num_tokens for shard in manifest.shards("train"))
    epochs = sequences * config.data.max_seq_length / max(tokens, 1)
    return "\n".join(
        [
            to_toml(as_tree(config)),
            f"batch        {batch}",
            f"run          {steps:,} steps, {sequences:,} sequences, about {epochs:,.1f} times the "
            f"{tokens:,} tokens of {config.data.path}",
            f"parameters   {num_parameters(config.model):,}",
            f"memory       about {_size(memory.total_bytes)} a worker: weights "
            f"{_size(memory.weights_bytes)}, gradients {_size(memory.gradients_bytes)}, optimizer "
            f"{_size(memory.optimizer_bytes)}, activations {_size(memory.activations_bytes)}",
            *([f"emulated hosts\n{hosts}"] if hosts else []),
            "dry run: nothing was started",
        ]
    )


def estimate(config: AlbertPretrainConfig, batch: BatchPlan) -> MemoryEstimate:
    """Estimate a worker's memory."""
    model, data = config.model, config.data
    return estimate_memory(
        num_parameters=num_parameters(model),
        micro_batch_size=batch.micro_batch_size,
        sequence_length=data.max_seq_length,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_hidden_layers,
        num_logits=batch.micro_batch_size * data.max_predictions_per_seq * model.vocab_size,
        activation_bytes=2 if config.train.precision in ("bf16", "fp16") else 4,
        activation_checkpointing=model.activation_checkpointing,
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
