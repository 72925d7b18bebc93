"""Finetunes T5 on sentences or pairs with labels: MNLI, or any file like it.

    python -m shoal.recipes.t5_classify --task mnli --model t5/ --data train.tsv --eval dev_matched.tsv
    torchrun --nproc-per-node 8 -m shoal.recipes.t5_classify --model runs/t5 ...
    shoal finetune t5 --preset tiny --model runs/t5 --workers 2 ...

The model reads "mnli hypothesis: … premise: …" and generates the label's word. The loss is the cross-entropy
(with z-loss) of the word's tokens, summed and divided by those of the whole global batch. An evaluation
decodes greedily; an output that spells no label counts as wrong.

A model that is too large for one worker is divided over several (``--parallel.pipeline``,
``--parallel.shard``). Its inputs are all padded to one length, and an evaluation takes the label whose tokens
are likeliest. Gradients and dropout are those of one worker, and a run may continue in any layout.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.decide.batch import BatchPlan
from shoal.env import WorkerEnv
from shoal.errors import UsageError
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import classify, finetuning, run_script
from shoal.recipes.classify import ClassifyDataConfig, TextColumnsConfig
from shoal.recipes.finetuning import EXPORT, FinetuneConfig, FinetuneOptimConfig
from shoal.train.config import required
from shoal.train.parallel_config import ParallelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.data.loader import Batch
    from shoal.data.steps import Arrays
    from shoal.data.text.classify import ClassifyData
    from shoal.data.text.text_to_text import TextToText
    from shoal.decide.rng import Int64Array
    from shoal.models.t5 import T5
    from shoal.pipelining.runtime import Pipeline
    from shoal.train.gradients import Precision
    from shoal.train.run import Run
    from shoal.train.world import Float32Array, World

NO_LABEL = "(no label)"
"""Stands for outputs that spell none of the labels, in tables and predictions."""

# ------------------------------------------------------------------------------------------------- config

PRESETS = ("t5", "tiny")


@dataclass(frozen=True, kw_only=True)
class T5WordingConfig(TextColumnsConfig):
    """Columns of texts, the wording of inputs and their length."""

    task: str = "mnli"
    """The task's name, with which inputs begin; mnli, qnli and qqp in T5's wording, others with sentence1 and
    sentence2, or sentence."""
    template: str | None = None
    """Another wording, such as "topic of: {first}", with {first} and {second} in place of the texts."""
    max_seq_length: int = 512
    """Tokens of an input at most, the end token included; longer inputs are cut at the end."""

    def __post_init__(self) -> None:
        if self.template is not None and self.template.count("{first}") != 1:
            raise UsageError(f'data.template {self.template!r} must have "{{first}}" in it, once')


@dataclass(frozen=True, kw_only=True)
class T5DataConfig(T5WordingConfig, ClassifyDataConfig):
    """The files of examples, the names of their columns and the wording of inputs."""


@dataclass(frozen=True, kw_only=True)
class T5OptimConfig(FinetuneOptimConfig):
    """The optimizer and its schedule: by default T5's, a constant rate."""

    optimizer: Literal["lamb", "lans", "adamw", "adafactor"] = "adafactor"
    """Adafactor, whose rate is relative to a weight's size, or one of the others."""
    learning_rate: float = 1e-3
    """Learning rate at the end of the warm-up."""
    warmup_share: float = 0.0
    """Part of all steps that warms up."""
    power: float = 0.0
    """Power of the polynomial decay; 0: a constant rate."""
    weight_decay: float = 0.0
    """Decay of weights, not of biases and norms."""
    max_grad_norm: float | None = None
    """Clip gradients to this norm; Adafactor clips its updates instead."""


@dataclass(frozen=True, kw_only=True)
class T5ClassifyConfig(FinetuneConfig):
    """All settings of finetuning T5 on labels; presets are TOML files in ``presets/t5_classify``."""

    data: T5DataConfig = field(default_factory=T5DataConfig)
    optim: T5OptimConfig = field(default_factory=T5OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        parallel = self.parallel
        if parallel.layout == "auto" or parallel.devices or parallel.memory:
            raise UsageError("parallel.layout auto, devices and memory are for pretraining: give pipeline")
        if not parallel.splits:
            if parallel.micro_batches:
                raise UsageError("parallel.micro_batches needs a pipeline: set train.micro_batch_size")
            return
        parallel.check_wire(self.distributed.wire)
        for setting, value, plain in (
            ("distributed.shares", self.distributed.shares, "equal"),
            ("optim.clip", self.optim.clip, "global"),
            ("train.compile", self.train.compile or False, False),
            ("train.precision", "fp16" if self.train.precision == "fp16" else "", ""),
            ("model.activation_checkpointing", self.model.activation_checkpointing, False),
        ):
            if value != plain:
                raise UsageError(f"{setting} {value} does not go with stages of T5: leave it out")

    def batch(self, num_workers: int) -> BatchPlan:
        """Return how a global batch is computed by so many workers, in this layout.

        Raises:
            UsageError: the sizes do not divide.
        """
        if self.parallel.splits:
            return self.parallel.plan(self.train, num_workers)
        self.parallel.replicas(num_workers)  # parallel.data, if given, has to be right
        return super().batch(num_workers)

    @property
    def scores(self) -> dict[str, tuple[str, ...]]:
        """The names of the scores in the record, by split."""
        return classify.scores_of(self.data)


IMMUTABLE = (*classify.IMMUTABLE, "data.task", "data.template")


def main(config: T5ClassifyConfig, worker: WorkerEnv | None = None) -> int:
    """Train until the last step or a signal, evaluate and write the model; return the exit code.

    Raises:
        UsageError: settings that do not go together, or with the model, the data or the run that is there.
        ShoalError: damaged files, a lost worker, no memory, a loss that is not finite.
    """
    from contextlib import ExitStack

    import numpy as np

    from shoal.data.text.task_batches import TaskSource
    from shoal.models.t5 import IGNORED, read_t5
    from shoal.pipelining.init_meta import init_whole
    from shoal.recipes.t5_stages import open_stages, write_stored
    from shoal.train.optimizers import build_optimizer
    from shoal.train.pipeline_update import PipelineUpdate
    from shoal.train.run import Run

    finetuning.require_paths(config, config.data, "examples")
    parallel, scratch = config.parallel, config.model.from_scratch
    with (
        Run.open(config=config, recipe="t5_classify", immutable=IMMUTABLE, worker=worker) as run,
        ExitStack() as stack,
    ):
        # ----------------------------------------------------------------------------------------- data
        source = finetuning.open_source(config.model, run)
        model = read_t5(source, **config.model.options, on_meta=scratch or parallel.splits)
        training, *held_out = files = open_files(config.data, model, source, fixed=parallel.splits)
        plan = finetuning.make_plan(config, num_sequences=len(training), num_workers=run.world.num_workers)

        # ----------------------------------------------------------------------------------------- model
        run.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        stage = ddp = None
        trained: nn.Module = model
        if parallel.splits:
            rows = np.arange(plan.batch.worker_batch_size) % len(training)
            example = with_keys(training.batch(rows), run.seed, rows)
            stage, mesh = open_stages(
                model,
                example,
                run,
                parallel,
                plan.batch,
                weights=None if scratch else source,
                wire=config.distributed.wire,
            )
            stack.callback(stage.close)
            run.use(PipelineUpdate(stage, mesh["pp"]))
            trained = stage.module
        else:
            if scratch:
                init_whole(model, run.world.device, seed=run.seed)
            ddp = run.data_parallel(model, average=config.optim.clip == "global")
            run.compile(model, dynamic=True, by_default=False)
        optimizer = build_optimizer(trained.named_parameters(), config.optim)
        run.keep(model=trained, optimizer=optimizer)

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> None:
            for file in held_out:
                if stage is None:
                    size = config.run.evaluation_batch_size
                    predicted = predicted_labels(model, file, run.world, run.precision, batch_size=size)
                else:
                    predicted = likeliest_labels(stage, file, run, parallel.pipeline)
                classify.record_scores(run, file.data, (*file.data.labels, NO_LABEL), predicted)

        # ----------------------------------------------------------------------------------------- loop
        steps = run.steps(
            TaskSource(data=training, seed=run.seed, whole=parallel.splits),
            plan.batch,
            until=plan.total_steps,
            targets=None if parallel.splits else lambda batch: int((batch["labels"] != IGNORED).sum()),
            replica=(run.world.place.rank // parallel.pipeline, plan.batch.num_workers)
            if parallel.splits
            else None,
            notes=[
                f"worded as: {wording(config.data, training.data)}",
                *(classify.counts(f.data, len(f), f.num_cut, config.data.max_seq_length) for f in files),
            ],
        )
        for step in steps:
            with step:
                set_learning_rate(optimizer, learning_rate(plan.schedule, step.number - 1))
                for batch in step:
                    if stage is not None:  # forward and backward of all stages and micro-batches
                        step.observe(stage.step(**batch), "pipeline")
                    else:
                        mean_loss = required(ddp)(**batch).loss
                        step.backward(mean_loss * (batch["labels"] != IGNORED).sum() / step.num_targets)
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if run.due(config.run.validation_frequency):
                score()
        if run.lacks_scores():
            score()

        # ----------------------------------------------------------------------------------------- export
        if stage is None:
            return finetuning.finish(run, model, source)
        return run.finish(
            lambda directory: write_stored(directory, model, directory / EXPORT, tokenizer_from=source),
            lambda _: f"the finetuned model is in {required(run.directory) / EXPORT}",
        )


# ------------------------------------------------------------------------------------------------- data


def open_files(settings: T5DataConfig, model: "T5", source: Path, *, fixed: bool) -> "list[TextToText]":
    """Return the training examples and those of each evaluation file; the model's config gets their labels.

    Args:
        fixed: pad all inputs to the longest of all files.

    Raises:
        UsageError: a file or the tokenizer of ``source`` cannot be used.
    """
    from shoal.data.text.text_to_text import make_text_to_text

    tokenizer, sizes = finetuning.read_source_tokenizer(source), model.weights.config
    files = [
        make_text_to_text(
            data,
            tokenizer,
            template=wording(settings, data),
            max_seq_length=settings.max_seq_length,
            end_id=sizes.eos_token_id,
            pad_id=sizes.pad_token_id,
        )
        for data in classify.read_files(settings)
    ]
    training = files[0].data
    sizes.id2label = dict(enumerate(training.labels))
    sizes.task_specific_params = {settings.task: {"template": wording(settings, training)}}
    width = max(int(file.lengths.max()) for file in files) if fixed else 0
    return [replace(file, width=width) for file in files]


def wording(settings: T5WordingConfig, data: "ClassifyData") -> str:
    """Return the template of a file's inputs."""
    from shoal.data.text.text_to_text import template_of

    return settings.template or template_of(settings.task, has_pairs=data.examples[0].second is not None)


def with_keys(arrays: "Arrays", seed: int, rows: "Int64Array") -> "Batch":
    """Return a batch outside of the training's order as stages take it: with dropout keys."""
    from shoal.data.loader import as_tensors
    from shoal.decide.rng import dropout_keys

    return as_tensors({**arrays, "dropout_keys": dropout_keys(seed, 0, rows)}, False)


# ------------------------------------------------------------------------------------------------- evaluation


def predicted_labels(
    model: "T5", file: "TextToText", world: "World", precision: "Precision", *, batch_size: int
) -> list[int] | None:
    """Return the label that the model writes for each example; one more than the last: none of them.

    Only the first worker has them; all workers call it.
    """
    tokens = written(model, file, file.longest_word, world, precision, batch_size=batch_size)
    return None if tokens is None else [file.label_of(row) for row in tokens.astype("int64")]


def written(
    model: "T5",
    file: "TextToText",
    num_tokens: int,
    world: "World",
    precision: "Precision",
    *,
    batch_size: int,
) -> "Float32Array | None":
    """Return the tokens that the model writes, ``[num_examples, num_tokens]``, on the first worker."""
    return finetuning.outputs_of(  # float32 holds ids below 2^24 exactly
        model, file, partial(_generated, model, num_tokens), world, precision, batch_size=batch_size
    )


def _generated(model: "T5", num_tokens: int, batch: "Batch") -> "Tensor":
    from shoal.models.t5 import generate

    return generate(model, batch["input_ids"], batch["attention_mask"], num_tokens=num_tokens)


def likeliest_labels(stage: "Pipeline", file: "TextToText", run: "Run", pipeline: int) -> list[int] | None:
    """Return the label of each example whose tokens, the end token included, are likeliest behind its input.

    Stages cannot generate: each example is computed once a label. Only the first worker has the labels; all
    workers call it.

    Args:
        pipeline: workers that hold a part of the model each.
    """
    import numpy as np
    import torch

    num_labels, size = len(file.words), run.batch.worker_batch_size
    losses = torch.zeros(len(file) * num_labels, dtype=torch.float64)
    replica = run.world.place.rank // pipeline
    for first in range(0, len(losses), run.batch.num_workers * size):
        own = np.arange(first + replica * size, first + (replica + 1) * size)
        rows = np.minimum(own, len(losses) - 1)  # batches have one shape: the last row again
        arrays = file.batch_with(rows // num_labels, (rows % num_labels).tolist())
        found = stage.evaluate(**with_keys(arrays, run.seed, rows))
        if found.outputs is not None:  # on the workers of the last stage
            own_losses = torch.cat([output.sequence_loss for output in found.outputs]).double().cpu()
            there = own < len(losses)
            losses[own[there]] = own_losses[there]
    table = np.reshape(run.sum(losses), (-1, num_labels))
    return [int(label) for label in table.argmin(axis=1)] if run.world.is_main else None


# ------------------------------------------------------------------------------------------------- dry run


def check(config: T5ClassifyConfig, num_workers: int, dry_run: bool) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run.

    Raises:
        UsageError: a file or model that cannot be used, or sizes that do not divide.
    """
    finetuning.require_paths(config, config.data, "examples")
    files = classify.read_files(config.data)
    length = config.data.max_seq_length
    finetuning.check_model(config, num_workers, setting="data.max_seq_length", max_seq_length=length)
    if not dry_run:
        return []
    return [
        *finetuning.describe(config, len(files[0].examples), num_workers),
        f"worded as    {wording(config.data, files[0])}",
        f"labels       {', '.join(files[0].labels)}",
        *(f"{data.path}: {len(data.examples):,} examples" for data in files),
    ]


if __name__ == "__main__":
    run_script("t5_classify")
