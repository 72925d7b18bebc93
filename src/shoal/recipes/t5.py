"""Pretrains T5 (Raffel et al. 2019, arXiv 1910.10683): span corruption, whole or split into pipeline stages.

    python -m shoal.recipes.t5 --preset tiny --data.path runs/text
    torchrun --nproc-per-node 8 -m shoal.recipes.t5 --preset 3b --data.path /data/t5 --parallel.pipeline 8
    shoal train t5 --preset tiny --data.path runs/text --workers 4 --parallel.pipeline 2

The workers are ``parallel.pipeline`` stages × ``parallel.data`` replicas. In an optimizer step all stages of
a replica take the same part of the global batch. A stage runs forward and backward over its micro-batches,
exchanges activations and their gradients with its neighbours, and averages its gradients over the replicas.
Leaving the step clips them over all stages and updates the weights. One worker is a pipeline of one stage and
one replica. A run continues from its checkpoint in any layout, with the same losses.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from shoal.data.text.span_config import MAX_SENTINELS, SpanConfig
from shoal.decide.batch import BatchPlan, ScheduleName, known_size
from shoal.env.launcher import worker_env
from shoal.env.worker import WorkerEnv
from shoal.errors import UsageError, require_positive
from shoal.formatting import parse_bytes
from shoal.models.text_config import T5ModelConfig
from shoal.optim.lr_schedules import InverseSquareRoot, learning_rate, set_learning_rate
from shoal.recipes import DryRun, Sample, Use, run_script, token_ids
from shoal.recipes.model_source import TRANSFORMERS, find_run
from shoal.recipes.prepared_text import (
    PreparedTextConfig,
    keep_tokenizer,
    open_shards,
    read_manifest,
    tokenizer_files,
    write_synthetic_text,
)
from shoal.train.config import (
    DistributedConfig,
    ParallelConfig,
    RunConfig,
    ServersConfig,
    TrainConfig,
    check_combination,
    load_toml,
    settings_lines,
)
from shoal.train.optim_config import TextOptimizerConfig, check_served
from shoal.train.run_dir import CONFIG_FILE, description_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from tokenizers import Tokenizer
    from torch import Tensor, nn

    from shoal.data.manifest import Manifest
    from shoal.data.text.span_corruption import SpanReader
    from shoal.decide.cost import ModelCost
    from shoal.decide.layout_search import RankedLayout
    from shoal.models.t5 import T5
    from shoal.pipelining.runtime import Pipeline
    from shoal.planner.hardware import Machines
    from shoal.record import Evaluation
    from shoal.train.run import Run
    from shoal.train.world import World

# ------------------------------------------------------------------------------------------------- config

PRESETS = ("tiny", "small", "base", "large", "3b")


@dataclass(frozen=True, kw_only=True)
class DataConfig(PreparedTextConfig):
    """Selects the text, and sets the length and noise of examples."""

    input_length: int = 512
    """Tokens of an input, sentinels and end token included; the target's length follows from it (114)."""
    noise_density: float = 0.15
    """Fraction of the text's tokens that is replaced and predicted."""
    mean_span_length: float = 3.0
    """Tokens replaced by one sentinel, on average."""


@dataclass(frozen=True, kw_only=True)
class T5OptimConfig(TextOptimizerConfig):
    """The optimizer and its schedule, in optimizer steps."""

    optimizer: Literal["lamb", "lans", "adamw", "adafactor"] = "adafactor"
    """Adafactor, with learning rates relative to the size of each weight, or another optimizer."""
    learning_rate: float = 1.0
    """The rate is this / sqrt(max(step, hold_steps)), for Adafactor relative to each weight's size."""
    hold_steps: int = 10_000
    """Steps with a constant learning rate at the beginning."""
    weight_decay: float = 0.0
    """Decay of weights, not of biases and norms."""
    max_grad_norm: float | None = None
    """Clip gradients to this norm; Adafactor clips its updates instead."""

    @property
    def schedule(self) -> InverseSquareRoot:
        """The learning rate's schedule."""
        return InverseSquareRoot(base=self.learning_rate, hold_steps=self.hold_steps)


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """All settings of T5's pretraining; presets are TOML files in ``presets/t5``."""

    unit: ClassVar[str] = "sequences"
    memory_remedy: ClassVar[str] = "a longer --parallel.pipeline"
    longer: ClassVar[str] = "--train.total-steps"
    refuses_fp16: ClassVar[str] = "T5"
    """Activations of the published weights overflow."""
    equal_shares: ClassVar[bool] = True
    """Stages, even one alone, are built for parts of one size."""
    explicit_stages: ClassVar[bool] = True
    """More than one are exported, and compute attention without its kernels."""
    scores: ClassVar[dict[str, tuple[str, ...]]] = {"validation": ("span_loss", "span_accuracy")}

    model: T5ModelConfig = field(default_factory=T5ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: T5OptimConfig = field(default_factory=T5OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)

    def __post_init__(self) -> None:
        require_positive("optim", self.optim, "hold_steps")
        self.parallel.check_wire(self.distributed.wire)
        check_combination(self.train, self.distributed, self.servers, clip="global")
        check_served(self.optim, self.servers)
        if self.distributed.shares != "equal":
            raise UsageError(
                f"distributed.shares {self.distributed.shares}: the stages of T5 are built for parts of one "
                "size; leave it out"
            )
        if self.distributed.elastic is not None:
            raise UsageError(
                f"distributed.elastic {self.distributed.elastic}: the stages of T5 are built for workers "
                "that stay; leave it out"
            )
        self.parallel.check_steps(self.servers.option)
        if self.servers.mode == "sync":
            raise UsageError(
                "servers.mode sync: T5 adds its gradients up itself, and servers take those of "
                "DistributedDataParallel; use --servers.mode bounded with --servers.wait-for the number of "
                "workers, where servers step too"
            )
        self.spans()

    def spans(self) -> SpanConfig:
        """Return the lengths of inputs, targets and spans.

        Raises:
            UsageError: a number out of its range.
        """
        data = self.data
        return SpanConfig(
            input_length=data.input_length,
            noise_density=data.noise_density,
            mean_span_length=data.mean_span_length,
            seed=self.train.seed,
        )


IMMUTABLE = (
    "model",
    "data.input_length",
    "data.noise_density",
    "data.mean_span_length",
    "train.seed",
    "train.global_batch_size",
    "optim.optimizer",
)
"""Settings that must stay when a run continues: weights, optimizer state or data order depend on them."""

TRACED_STEP = 3
"""The step after the start whose actions a pipeline measures; the first ones allocate."""


def main(config: T5Config, worker: WorkerEnv | None = None) -> int:
    """Pretrain until the last step, a signal, or a loss that stays not finite; return the exit code."""
    from contextlib import ExitStack, nullcontext

    from shoal.data.sources import ReaderSource
    from shoal.data.text.span_corruption import text_to_text_tokenizer
    from shoal.models.t5 import MODEL_INPUTS
    from shoal.recipes.shard_cache import record_reads
    from shoal.recipes.stages import write_stored
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run

    worker = worker or worker_env()
    if config.parallel.layout == "auto":
        layouts = find_layouts(config, worker.ranks.num_workers if worker else 1)
        config = with_layout(config, layouts[0])
    parallel = config.parallel
    with (
        Run.open(config=config, recipe="t5", immutable=IMMUTABLE, worker=worker) as run,
        ExitStack() as stack,
    ):
        # ----------------------------------------------------------------------------------------- data
        batch = parallel.plan(config.train, run.world.num_workers)
        train, held_out = open_text(config, world=run.world)
        keep_tokenizer(train.shards, run)
        spans = config.spans()
        references = {LOSS: reference_loss(held_out)}

        # ----------------------------------------------------------------------------------------- model
        model, stage = open_model(config, run, train, batch)
        stack.callback(stage.close)
        optimizer = build_optimizer(stage.module.named_parameters(), config.optim)
        run.num_parameters = config.model.num_parameters
        run.keep(**stage.kept(), optimizer=optimizer)

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> None:
            scores, num_samples = evaluate(
                stage, held_out, run, parallel.pipeline, limit=config.run.validation_samples
            )
            run.evaluation("validation", scores, num_samples=num_samples)

        # ----------------------------------------------------------------------------------------- loop
        steps = run.steps(
            ReaderSource(reader=train, processes=config.data.loader_processes, whole=True),
            batch,
            until=config.train.total_steps,
            replica=(run.world.rank // parallel.pipeline, batch.num_workers),
            references=references,
            notes=[
                f"data: {train.num_examples:,} training examples an epoch, {held_out.num_examples:,} held "
                f"out; {spans.num_tokens} tokens of text each, as {spans.input_length} and "
                f"{spans.target_length}"
            ],
        )
        traced = run.step + TRACED_STEP if parallel.pipeline > 1 else None
        for step in steps:
            with step, stage.tracing() if step.number == traced else nullcontext():
                set_learning_rate(optimizer, learning_rate(config.optim.schedule, step.number - 1))
                stage.step_number = step.number - 1  # dropout depends on it
                for inputs in step:  # one batch: the stage cuts it into micro-batches
                    stage.loss_scale = step.loss_scale
                    loss = stage.step(**{name: inputs[name] for name in MODEL_INPUTS})
                    step.observe(loss, "pipeline")
                    step.add(run.world.num_workers, **{LOSS: loss})  # the same on all workers
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if step.number == traced and run.log:
                run.log.write(stage.recorded(step.number))
            if run.due(config.run.validation_frequency, evaluation=True):
                score()
        if run.lacks_scores("validation"):
            score()
        record_reads(run, train.shards)

        # ----------------------------------------------------------------------------------------- export
        def export(directory: Path) -> None:
            tokenizer = text_to_text_tokenizer(train.shards.tokenizer_file, train.shards.manifest.vocab_size)
            files = tokenizer_files(tokenizer, model, spans.input_length)
            write_stored(directory, model, directory / TRANSFORMERS, files)

        return run.finish(export, lambda last: verdict(last["validation"], references[LOSS]))


# ------------------------------------------------------------------------------------------------- data


def open_text(config: T5Config, *, world: "World | None" = None) -> "tuple[SpanReader, SpanReader]":
    """Return the readers of the training and the held-out examples.

    Raises:
        UsageError: tokens and sentinels do not fit into the embedding, or there is no prepared text.
    """
    from shoal.data.text.span_corruption import SpanReader

    train, held_out = open_shards(config.data, config.model.vocab_size, world=world, sentinels=MAX_SENTINELS)
    return SpanReader(train, config.spans()), SpanReader(held_out, config.spans())


# ------------------------------------------------------------------------------------------------- model


def open_model(config: T5Config, run: "Run", train: "SpanReader", batch: BatchPlan) -> "tuple[T5, Pipeline]":
    """Return the model without data, and this worker's stages of it, with weights, which the run updates."""
    import numpy as np
    import torch

    from shoal.models.layers import blocks_of
    from shoal.models.t5 import MODEL_INPUTS
    from shoal.recipes.stages import load_weights, open_stages

    example = train.batch(0, np.arange(batch.worker_batch_size) % train.num_examples)
    with torch.device("meta"):  # this worker allocates its stages only
        model = make_model(config.model, train.shards.manifest)
    weights = config.model.checkpoint_path
    stage = open_stages(
        model,
        {name: torch.from_numpy(example[name]) for name in MODEL_INPUTS},
        run,
        config.parallel,
        batch,
        blocks=blocks_of(model.weights),
        fill=None if weights is None else lambda part: load_weights(part, model, weights),
        distributed=config.distributed,
        servers=config.servers,
    )
    return model, stage


def make_model(config: T5ModelConfig, manifest: "Manifest") -> "T5":
    """Return a T5 with random weights for prepared text with this manifest."""
    from shoal.models.t5 import new_t5

    return new_t5(config, pad_id=manifest.pad_id, end_id=manifest.sep_id)


def with_layout(config: T5Config, layout: "RankedLayout") -> T5Config:
    """Return the settings that mean ``layout``; its micro-batches replace ``train.micro_batch_size``."""
    parallel = replace(
        config.parallel,
        pipeline=layout.layout.stages,
        data=layout.data,
        virtual_stages=layout.layout.virtual,
        micro_batches=layout.num_micro_batches,
        schedule=cast(ScheduleName, layout.choice.schedule.name),
    )
    return replace(config, parallel=parallel, train=replace(config.train, micro_batch_size=None))


_INSTANCES = {"v100": "p3dn.24xlarge", "a100": "p4d.24xlarge", "h100": "p5.48xlarge"}
"""Hosts of the planner's catalog, by ``parallel.device``."""


def find_layouts(
    config: T5Config, num_devices: int, machines: "Machines | None" = None
) -> "list[RankedLayout]":
    """Return the layouts that fit into memory by a cost model, the fastest first. Allocates no tensors.

    ``parallel.pipeline`` is fixed unless ``parallel.layout`` is ``auto``. Nothing is measured, so that the
    result does not depend on the machine: rates and links are those of the planner's catalog, and activations
    count as in dry runs and plans, in the precision of the device.

    Args:
        machines: hosts of the catalog, with their devices and memory; default: those of ``parallel.device``
            with ``parallel.memory``.

    Raises:
        UsageError: ``parallel.memory`` is not set, or no layout fits; the message has the missing amount.
    """
    from shoal.decide.autotune import PORTFOLIO, VIRTUAL_CHOICES, Conditions
    from shoal.decide.footprint import optimizer_state_bytes
    from shoal.decide.layout_search import MICRO_BATCH_SIZES, LayoutSearch
    from shoal.decide.partition import Memory
    from shoal.recipes.memory import usable_bytes

    train, parallel = config.train, config.parallel
    if machines is None and parallel.memory is None:
        raise UsageError("parallel.layout auto needs the memory of a device, such as --memory 40GB")
    hosts = machines or _default_machines(config)
    given = known_size(train.micro_batch_size)
    sizes = (given,) if given else MICRO_BATCH_SIZES
    base = sizes[len(sizes) // 2]  # costs per launch depend on the size
    search = LayoutSearch(
        cost=_cost_on(hosts, config, base),
        memory=Memory(
            limit_bytes=usable_bytes(hosts) if parallel.memory is None else parse_bytes(parallel.memory),
            optimizer_ratio=optimizer_state_bytes(config.optim.optimizer) / 4,
        ),
        global_batch_size=train.global_batch_size,
        micro_batch_size=base,
        sizes=sizes,
        conditions=Conditions(
            link=hosts.instance.near,
            names=PORTFOLIO if parallel.schedule == "auto" else (parallel.schedule,),
            virtual=VIRTUAL_CHOICES if parallel.virtual_stages is None else (parallel.virtual_stages,),
            optimize=parallel.optimize,
        ),
        data_link=hosts.instance.far,
        shard=parallel.shard,
        shard_optimizer=train.shard_optimizer,
    )
    return search.choose(num_devices, None if parallel.layout == "auto" else (parallel.pipeline,))


def _default_machines(config: T5Config) -> "Machines":
    """Return the host of the catalog with ``parallel.device``."""
    from shoal.planner.hardware import Catalog

    return Catalog().machines(_INSTANCES[config.parallel.device])


def _cost_on(machines: "Machines", config: T5Config, num_samples: int) -> "ModelCost":
    """Return the cost of a micro-batch on an accelerator of the machines, by the catalog's rates."""
    import torch

    from shoal.models.t5 import new_t5
    from shoal.pipelining.export_graph import export_model
    from shoal.pipelining.roofline import DeviceRates, estimate_cost
    from shoal.planner.prediction import rates_of
    from shoal.recipes.memory import activations_of, numerics_of

    spans, numerics = config.spans(), numerics_of(config, machines)
    flops_per_s, bytes_per_s, launch_s = rates_of(machines.instance, numerics.precision)
    rates = DeviceRates(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, launch_s=launch_s)
    lengths = {"input_ids": spans.input_length, "labels": spans.target_length}
    with torch.device("meta"):
        model = new_t5(config.model, pad_id=0, end_id=1)
        batch = {name: torch.zeros(num_samples, size, dtype=torch.int64) for name, size in lengths.items()}
        graph = export_model(model, batch, training=True)
    return estimate_cost(graph, rates).keeping(
        activations_of(sample(config), numerics.without_kernels), num_samples
    )


def explain(
    config: T5Config, layouts: "list[RankedLayout]", num_devices: int, machines: "Machines | None" = None
) -> str:
    """Return the layouts of :func:`find_layouts` in words: stages, memory, timeline, predicted step."""
    from shoal.pipelining.explain import explain_layouts
    from shoal.planner.hardware import require_accelerators
    from shoal.planner.prediction import ASSUMED_UTILISATION

    hosts = machines or _default_machines(config)
    accelerator = require_accelerators(hosts)
    memory = config.parallel.memory or f"{accelerator.memory_bytes / 2**30:.0f} GiB"
    rates = f"at {100 * ASSUMED_UTILISATION:.0f} % of the peak of {hosts.instance.name}"
    return explain_layouts(
        layouts,
        title=f"T5 on {num_devices:,} {accelerator.name} of {memory}, by a cost model {rates}, not measured",
    )


# ------------------------------------------------------------------------------------------------- evaluation

LOSS, ACCURACY = "span_loss", "span_accuracy"
"""Cross-entropy per target token; part of them that is the likeliest token. Held-out without z-loss."""


def evaluate(
    stage: "Pipeline", reader: "SpanReader", run: "Run", pipeline: int, *, limit: int
) -> tuple[dict[str, float], int]:
    """Return loss and accuracy on the first global batches of the held-out stream, and their samples.

    Whole global batches: the scores do not depend on the layout, and stages see the shapes of training. A
    split that is smaller than one is gone through more than once, each time with other spans.
    """
    from contextlib import closing

    from shoal.data.loader import LoaderConfig, to_device, training_steps
    from shoal.data.steps import DataShard, StepReader
    from shoal.models.t5 import MODEL_INPUTS

    size = run.batch.global_batch_size
    num_batches = max(min(limit, reader.num_examples) // size, 1)
    shard = DataShard(
        global_batch_size=size,
        micro_batch_size=run.batch.worker_batch_size,
        rank=run.world.rank // pipeline,
        num_workers=run.batch.num_workers,
    )
    steps = StepReader(reader=reader, share=shard)
    losses: list[float] = []
    num_correct = num_targets = 0
    with closing(training_steps(steps, LoaderConfig(), num_steps=num_batches)) as batches:
        for (batch,) in batches:
            inputs = to_device({name: batch[name] for name in MODEL_INPUTS}, run.world.device)
            evaluation = stage.evaluate(**inputs)
            losses.append(float(evaluation.loss))
            if evaluation.outputs is not None:  # on the workers of the last stage
                num_correct += sum(int(output.num_correct.sum()) for output in evaluation.outputs)
                num_targets += batch["labels"].numel()
    correct, targets = run.sum([num_correct, num_targets])
    return {LOSS: sum(losses) / num_batches, ACCURACY: correct / targets}, num_batches * size


def reference_loss(reader: "SpanReader") -> float:
    """Return the loss of a model that knows where sentinels stand and how often each token of text occurs.

    A loss below it has learnt from the context.
    """
    from shoal.data.text.examples import unigram_entropy

    spans = reader.config
    targets = reader.batch(0, range(min(reader.num_examples, 2_048)))["labels"][:, :-1]
    text = targets[targets < reader.shards.manifest.vocab_size]
    return spans.num_noise / spans.target_length * unigram_entropy(text)


def verdict(scores: "Evaluation", reference: float) -> str:
    """Compare the held-out loss with :func:`reference_loss`, in a line."""
    loss = scores.metrics[LOSS]
    return (
        f"held-out loss {loss:.3f}: {abs(reference - loss):.2f} nats "
        f"{'below' if loss < reference else 'above'} a model that knows how often tokens occur "
        f"and where sentinels stand ({reference:.3f})"
    )


# ------------------------------------------------------------------------------------------------- use


class Exporting(Use):
    """Opens and exports checkpoints; ``shoal predict t5`` uses the models."""

    export_folder = TRANSFORMERS

    @classmethod
    def export(cls, source: Path, out: Path | None, dtype: "torch.dtype") -> Path:
        """Write a T5 one tensor at a time: it may be too large for this machine's memory."""
        import torch

        from shoal.recipes.stages import write_stored
        from shoal.train.checkpoint import stored_model

        run, (step, _) = find_run(source, "SOURCE"), stored_model(source)
        with torch.device("meta"):
            model, files = described_model(run)
        out = out or run / f"{TRANSFORMERS}-{step}"
        write_stored(source, model.to(dtype), out, files)
        return out

    @classmethod
    def open_checkpoint(cls, source: Path) -> "tuple[T5, Tokenizer]":
        """Return the model of a checkpoint, and its tokenizer."""
        from tokenizers import Tokenizer

        from shoal.train.checkpoint import load_model

        model, files = described_model(find_run(source, "--model"))
        load_model(source, model)
        return model, Tokenizer.from_buffer(files["tokenizer.json"])


def described_model(run: Path) -> "tuple[T5, dict[str, bytes]]":
    """Return a model of the sizes of a run, with random weights, and the files of its tokenizer."""
    from shoal.data.manifest import Manifest
    from shoal.data.text.span_corruption import text_to_text_tokenizer

    data, settings = description_in(run), load_toml(run / CONFIG_FILE)
    manifest = Manifest.load(data)
    sizes = {name: value for name, value in settings["model"].items() if name != "checkpoint_path"}
    model = make_model(T5ModelConfig(**sizes), manifest)
    tokenizer = text_to_text_tokenizer(data / manifest.tokenizer.file, manifest.vocab_size)
    return model, tokenizer_files(tokenizer, model, settings["data"]["input_length"])


use = Exporting


# ------------------------------------------------------------------------------------------------- dry run


def check(config: T5Config, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run."""
    parallel = config.parallel
    devices = parallel.devices or num_workers
    if devices != num_workers and not dry_run:
        raise UsageError(
            f"--devices {devices} plans for other devices than the {num_workers} workers here: add "
            "--dry-run, or leave it out"
        )
    predicted = []
    machines: Machines | None = dry_run.machines if dry_run else None
    if parallel.layout == "auto" or (dry_run and parallel.memory is not None):
        layouts = find_layouts(config, devices, machines)
        predicted = [explain(config, layouts, devices, machines)]
        config = with_layout(config, layouts[0]) if parallel.layout == "auto" else config
    batch, spans = config.parallel.plan(config.train, devices), config.spans()
    stages = config.parallel.pipeline
    manifest = read_manifest(config.data)
    manifest.check_vocabulary(config.model.vocab_size, sentinels=MAX_SENTINELS)
    num_tokens = sum(shard.num_tokens for shard in manifest.shards("train"))
    sequences = config.train.total_steps * batch.global_batch_size
    return [
        *settings_lines(config),
        f"layout       {stages} pipeline × {batch.num_workers} data",
        f"batch        {batch}",
        f"examples     {spans.num_tokens} tokens of text, {spans.num_noise} of them in {spans.num_spans} "
        f"spans: inputs of {spans.input_length}, targets of {spans.target_length}",
        f"run          {config.train.total_steps:,} steps, {sequences:,} sequences, about "
        f"{sequences * spans.num_tokens / max(num_tokens, 1):,.1f} times the {num_tokens:,} tokens of "
        f"{config.data.path}",
        f"parameters   {config.model.num_parameters:,}",
        *([dry_run.memory_line(config, (sample(config), batch))] if dry_run else []),
        *predicted,
    ]


# ------------------------------------------------------------------------------------------------- sample


def sample(config: T5Config) -> Sample:
    """Return two full inputs with their targets, and the network."""
    import torch

    from shoal.models.t5 import new_t5

    spans = config.spans()
    sizes = replace(config.model, dropout=T5ModelConfig.dropout)  # its kernels count whatever the rate
    with torch.device("meta"):
        model = new_t5(sizes, pad_id=0, end_id=1)
    return sample_of(
        model, {"input_ids": token_ids(2, spans.input_length), "labels": token_ids(2, spans.target_length)}
    )


def sample_of(model: "T5", inputs: "Mapping[str, Tensor]") -> Sample:
    """Return a sample of a T5, with the loss of ``labels`` for ``input_ids``."""
    from shoal.models.layers import blocks_of

    def loss(model: "nn.Module", inputs: "Mapping[str, Tensor]") -> "Tensor":
        # without the mask, whose values meta tensors do not have; the shapes are the same
        out: Tensor = model(inputs["input_ids"], inputs["labels"]).loss
        return out

    num_samples, length = inputs["input_ids"].shape
    return Sample(
        model=model,
        inputs=inputs,
        loss=loss,
        num_samples=num_samples,
        sequence_length=length,
        # stages of the decoder also pass on the encoder's output
        relay_bytes=2.0 * (length + inputs["labels"].shape[1]) * model.weights.config.d_model,
        blocks=blocks_of(model.weights),
    )


def trial(config: T5Config, folder: Path) -> T5Config:
    """Return the settings of a short run, on synthetic text where none is named."""
    if config.data.path is not None:
        return config
    write_synthetic_text(folder, config.model.vocab_size - MAX_SENTINELS)
    return replace(config, data=replace(config.data, path=folder))


if __name__ == "__main__":
    run_script("t5")
