"""Finetunes T5 on sentences or pairs with labels, such as MNLI, or from any text to any other.

    python -m shoal.recipes.t5_classify --task mnli --model t5/ --data train.tsv --eval dev_matched.tsv
    python -m shoal.recipes.t5_classify --task summarize --source-column article --target-column summary ...
    torchrun --nproc-per-node 8 -m shoal.recipes.t5_classify --model runs/t5 ...
    shoal finetune t5 --preset tiny --model runs/t5 --workers 2 ...

The model reads "mnli hypothesis: … premise: …" and is trained to write the label's word, or reads
"summarize: …" and writes a text. The loss is the cross-entropy (with z-loss) of the target's tokens, summed
and divided by those of the whole global batch. An evaluation takes the label whose tokens are likeliest
(``--data.labels-by generation``: the one that the model generates), and generates texts by beam search.

A model that is too large for one worker is divided over several (``--parallel.pipeline``,
``--parallel.shard``). Its inputs are all padded to one length, and its targets too. It cannot generate: of
texts an evaluation computes the loss. Gradients, dropout and labels are those of one worker, and a run may
continue in any layout.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from shoal.data.text.text_scores import require_packages, score_names
from shoal.decide.batch import BatchPlan, StagesConfig
from shoal.env.worker import WorkerEnv
from shoal.errors import UsageError
from shoal.models.text_config import T5ModelConfig
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import (
    DryRun,
    Row,
    Sample,
    classify,
    finetuning,
    run_script,
    t5,
    t5_written,
    token_ids,
    using,
)
from shoal.recipes.classify import (
    ClassifyDataConfig,
    EvaluateLabelsConfig,
    LabelledColumnsConfig,
    TextsConfig,
    TextUse,
)
from shoal.recipes.finetuning import FinetuneConfig, FinetuneOptimConfig
from shoal.recipes.model_source import TRANSFORMERS, ModelSource, find_model, recipe_of
from shoal.recipes.prepared_text import tokenizer_files
from shoal.recipes.source_tokenizer import read_source_tokenizer
from shoal.recipes.t5_written import LOSS, Form, GenerationConfig, Search, SearchConfig, T5WordingConfig
from shoal.train.config import required

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

    from shoal.data.text.classify import ClassifyData
    from shoal.data.text.text_to_text import TextToText
    from shoal.models.t5 import T5
    from shoal.pipelining.runtime import Pipeline
    from shoal.train.run import Run
    from shoal.train.world import Float32Array

# ------------------------------------------------------------------------------------------------- config

PRESETS = ("t5", "tiny")


@dataclass(frozen=True, kw_only=True)
class T5DataConfig(T5WordingConfig, ClassifyDataConfig):
    """The files of examples, the names of their columns and the wording of inputs."""

    scores: Annotated[bool, Parameter(show=False)] = False
    """Refused: T5 learns texts and labels, and no numbers."""

    def check_columns(self) -> None:
        """Check that the two columns of texts go together, and with the other settings.

        Raises:
            UsageError: they do not, or labels are scores.
        """
        if self.scores:
            raise UsageError(
                "data.scores: T5 learns texts and labels, and no numbers; finetune an encoder with `shoal "
                "finetune classify --data.scores`, or let T5 write the numbers as texts, with --task, "
                "--data.source-column and --data.target-column"
            )
        if not self.is_text:
            if self.target_column:
                raise UsageError("data.target_column needs data.source_column, the texts to read")
            return
        if not self.target_column:
            raise UsageError("data.source_column needs data.target_column, the texts to write")
        if self.labels:
            raise UsageError("data.labels are of tasks with labels: leave data.source_column or them out")
        if self.task == T5WordingConfig.task:
            raise UsageError(
                f'a task from text to text needs a name, with which inputs begin: give --task, "" for none '
                f"({self.task} has labels)"
            )


@dataclass(frozen=True, kw_only=True)
class T5ClassifyOptimConfig(FinetuneOptimConfig):
    """The optimizer and its schedule: by default T5's, a constant rate."""

    optimizer: Literal["lamb", "lans", "adamw", "adafactor"] = "adafactor"
    """Adafactor, with learning rates relative to the size of each weight, or another optimizer."""
    learning_rate: float = 1e-3
    """Learning rate at the end of the warm-up."""
    warmup_share: float = 0.0
    """Fraction of all steps used for warm-up."""
    power: float = 0.0
    """Power of the polynomial decay; 0: a constant rate."""
    weight_decay: float = 0.0
    """Decay of weights, not of biases and norms."""
    max_grad_norm: float | None = None
    """Clip gradients to this norm; Adafactor clips its updates instead."""


@dataclass(frozen=True, kw_only=True)
class T5ClassifyConfig(FinetuneConfig):
    """All settings of finetuning T5 on labels; presets are TOML files in ``presets/t5_classify``."""

    refuses_fp16: ClassVar[str] = "T5"
    equal_shares: ClassVar[bool] = True
    explicit_stages: ClassVar[bool] = True

    data: T5DataConfig = field(default_factory=T5DataConfig)
    optim: T5ClassifyOptimConfig = field(default_factory=T5ClassifyOptimConfig)
    parallel: StagesConfig = field(default_factory=StagesConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data.check_columns()
        self.parallel.check(self)
        if self.data.labels_by == "generation" and self.parallel.splits:
            raise UsageError(
                "data.labels_by generation needs the whole model on each worker: leave out parallel.pipeline "
                "and parallel.shard, or choose labels by likelihood"
            )

    def batch(self, num_workers: int) -> BatchPlan:
        """Return the division of a global batch over this number of workers, in this layout.

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
        if not self.data.is_text:
            return {path.stem: (self.data.accuracy,) for path in self.data.eval}
        names = (LOSS,) if self.parallel.splits else score_names(self.generation.metrics)
        return {path.stem: names for path in self.data.eval}


IMMUTABLE = (
    *classify.IMMUTABLE,
    *(f"data.{name}" for name in ("task", "template", "source_column", "target_column", "max_target_length")),
)


def main(config: T5ClassifyConfig, worker: WorkerEnv | None = None) -> int:
    """Train until the last step or a signal, evaluate and write the model; return the exit code."""
    from contextlib import ExitStack

    from shoal.data.text.task_batches import TaskSource
    from shoal.models.t5 import read_t5
    from shoal.models.token_losses import IGNORED
    from shoal.pipelining.init_meta import init_whole
    from shoal.recipes.stages import write_stored
    from shoal.train.optimizers import build_optimizer
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
        tokenizer = read_source_tokenizer(source)
        training, *held_out = files = open_files(config, model, tokenizer)
        plan = finetuning.make_plan(config, num_sequences=len(training), num_workers=run.world.num_workers)

        # ----------------------------------------------------------------------------------------- model
        run.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        stage = ddp = None
        trained: nn.Module = model
        if parallel.splits:
            stage = divided(config, run, model, source, training, plan.batch)
            stack.callback(stage.close)
            trained = stage.module
        else:
            if scratch:
                init_whole(model, run.world.device, seed=run.seed)
            ddp = run.data_parallel(model, average=config.optim.clip == "global")
            run.compile(model, dynamic=True, by_default=not config.model.activation_checkpointing)
        optimizer = build_optimizer(trained.named_parameters(), config.optim)
        run.keep(**(stage.kept() if stage is not None else {"model": model}), optimizer=optimizer)
        finetuning.keep_sizes(run, model, tokenizer, config.data.max_seq_length)

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> None:
            for file in held_out:
                score_file(config, run, file, model, stage, tokenizer)

        # ----------------------------------------------------------------------------------------- loop
        steps = run.steps(
            TaskSource(data=training, seed=run.seed, whole=parallel.splits),
            plan.batch,
            until=plan.total_steps,
            targets=None if parallel.splits else lambda batch: int((batch["labels"] != IGNORED).sum()),
            replica=(run.world.rank // parallel.pipeline, plan.batch.num_workers)
            if parallel.splits
            else None,
            notes=[
                f"worded as: {t5_written.wording(config.data, training.data)}",
                *(counts(config.data, file) for file in files),
            ],
        )
        for step in steps:
            with step:
                set_learning_rate(optimizer, learning_rate(plan.schedule, step.number - 1))
                for batch in step:
                    if stage is not None:  # forward and backward of all stages and micro-batches
                        stage.loss_scale = step.loss_scale
                        step.observe(stage.step(**batch), "pipeline")
                    else:
                        mean_loss = required(ddp)(**batch).loss
                        step.backward(mean_loss * (batch["labels"] != IGNORED).sum() / step.num_targets)
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if run.due(config.run.validation_frequency, evaluation=True):
                run.workers.together(score)
        if run.lacks_scores():
            run.workers.together(score)

        # ----------------------------------------------------------------------------------------- export
        if stage is None:
            return finetuning.finish(run, model, source, config.data.max_seq_length)
        exported = tokenizer_files(tokenizer, model, config.data.max_seq_length)
        return run.finish(
            lambda directory: write_stored(directory, model, directory / TRANSFORMERS, exported),
            lambda _: f"the finetuned model is in {required(run.directory) / TRANSFORMERS}",
        )


# ------------------------------------------------------------------------------------------------- model


def divided(
    config: T5ClassifyConfig, run: "Run", model: "T5", source: Path, training: "TextToText", batch: BatchPlan
) -> "Pipeline":
    """Return this worker's stages of the model, which the run updates.

    Args:
        model: without data; a stage has its part of the weights in ``source``, or random ones.
        training: examples that say the sizes of micro-batches.
    """
    import numpy as np

    from shoal.models.layers import blocks_of
    from shoal.recipes.stages import load_weights, open_stages

    rows = np.arange(batch.worker_batch_size) % len(training)
    return open_stages(
        model,
        t5_written.with_keys(training.batch(rows), run.seed, rows),
        run,
        config.parallel,
        batch,
        blocks=blocks_of(model.weights),
        fill=None if config.model.from_scratch else lambda part: load_weights(part, model, source),
        distributed=config.distributed,
        servers=config.servers,
    )


# ------------------------------------------------------------------------------------------------- evaluation


def score_file(
    config: T5ClassifyConfig,
    run: "Run",
    file: "TextToText",
    model: "T5",
    stage: "Pipeline | None",
    tokenizer: "Tokenizer",
) -> None:
    """Evaluate on a file by the whole model or by its stages; write scores and predictions."""
    world, precision, size = run.world, run.precision, config.run.evaluation_batch_size
    if config.data.is_text and stage is not None:
        loss = t5_written.mean_loss(stage, file, run, config.parallel.pipeline)
        run.evaluation(file.data.path.stem, {LOSS: loss}, num_samples=len(file))
    elif config.data.is_text:
        search = t5_written.form_of(model).search
        texts = t5_written.written_texts(model, file, tokenizer, search, world, precision, batch_size=size)
        t5_written.record_texts(run, file.data, texts, config.generation.metrics)
    else:
        by, names = config.data.labels_by, config.data.names(file.data.labels)
        if stage is not None:
            losses = t5_written.label_losses_of_stages(stage, file, run, config.parallel.pipeline)
            predicted = t5_written.likeliest(losses)
        else:
            predicted = t5_written.predicted_labels(model, file, by, world, precision, batch_size=size)
        classify.record_scores(run, file.data, names, predicted, name=config.data.accuracy)


# ------------------------------------------------------------------------------------------------- data


def read_files(settings: T5DataConfig) -> "list[ClassifyData]":
    """Return the training examples, then those of each evaluation file; targets that are texts as labels.

    Raises:
        UsageError: a file cannot be used, or two evaluation files have the same name.
    """
    from shoal.data.text.text_to_text import read_text_pairs

    if not settings.is_text:
        return classify.read_files(settings)
    classify.require_names(settings.eval)
    source, target = settings.source_column, settings.target_column
    return [
        read_text_pairs(path, source=source, target=target, bad=settings.counter(path))
        for path in (required(settings.path), *settings.eval)
    ]


def open_files(config: T5ClassifyConfig, model: "T5", tokenizer: "Tokenizer") -> "list[TextToText]":
    """Return the training examples and those of each evaluation file; the model's config gets their form.

    Of a model in stages, all inputs are padded to the longest, and all targets.

    Raises:
        UsageError: a file or the tokenizer cannot be used, or a package of the scores is not installed.
    """
    settings, splits = config.data, config.parallel.splits
    if settings.is_text and not splits:
        require_packages(config.generation.metrics)
    files_data = read_files(settings)
    template = t5_written.wording(settings, files_data[0])
    files = [
        t5_written.examples_of(settings, data, model, tokenizer, template=template) for data in files_data
    ]
    first_search = Search(num_tokens=settings.max_target_length, num_beams=4, length_penalty=0.6)
    labels = () if settings.is_text else files_data[0].labels
    form = Form(template=template, labels=labels, search=first_search)
    form = replace(form, search=form.searched(config.generation))
    t5_written.set_form(model, settings.task, form)
    if not splits:
        return files
    width = max(int(file.lengths.max()) for file in files)
    target_width = max(file.longest_word for file in files)
    return [replace(file, width=width, target_width=target_width) for file in files]


def counts(settings: T5DataConfig, file: "TextToText") -> str:
    """Return a line about a file for the beginning of the run."""
    if not settings.is_text:
        return classify.counts(file.data, len(file), file.num_cut, settings.max_seq_length)
    return (
        f"{file.data.path.name}: {len(file):,} examples, {file.num_cut:,} inputs cut to "
        f"{settings.max_seq_length} tokens, {file.num_targets_cut:,} targets to {settings.max_target_length}"
        f"{classify.left_out(file.data)}"
    )


# ------------------------------------------------------------------------------------------------- use


@dataclass(frozen=True, kw_only=True)
class T5TextsConfig(T5WordingConfig):
    """Columns of texts, their wording and length; by default those with which the model was finetuned."""

    task: str = ""
    """The task's name, with which inputs begin, in T5's wording; default: the model's."""


@dataclass(frozen=True, kw_only=True)
class T5PredictConfig(TextsConfig):
    """Texts, and the form in which they are read."""

    refuses_fp16: ClassVar[str] = "T5"

    data: T5TextsConfig = field(default_factory=T5TextsConfig)
    generation: SearchConfig = field(default_factory=SearchConfig)


@dataclass(frozen=True, kw_only=True)
class T5LabelledConfig(T5TextsConfig, LabelledColumnsConfig):
    """Columns of texts and labels, their wording and length."""


@dataclass(frozen=True, kw_only=True)
class T5EvaluateConfig(EvaluateLabelsConfig):
    """The form in which texts and labels are read."""

    refuses_fp16: ClassVar[str] = "T5"

    data: T5LabelledConfig = field(default_factory=T5LabelledConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)


class Writing(TextUse):
    """Labels texts with a finetuned T5, or generates texts."""

    Predict, Evaluate = T5PredictConfig, T5EvaluateConfig
    form: Form | None = None
    """That of the model, once it is read."""

    @classmethod
    def find(cls, path: Path) -> ModelSource:
        source = find_model(path)
        return source if _is_pretraining(source) else super().find(path)

    def read_model(self) -> None:
        from shoal.models.t5 import read_t5

        if _is_pretraining(source := find_model(self.settings.model)):
            model, self.tokenizer = t5.use.open_checkpoint(required(source.checkpoint))
        else:
            model, directory = using.read_trained(
                self.settings.model, lambda path, sizes_only: read_t5(path, from_scratch=sizes_only)
            )
            length = self.settings.data.max_seq_length
            self.tokenizer = using.read_tokenizer(directory, "data.max_seq_length", length)
        self.model, self.form = model.to(self.world.device), t5_written.form_of(model)
        self.labels = self.form.labels

    @property
    def has_labels(self) -> bool:
        """Return whether outputs are labels: the columns of an evaluation decide, else the model."""
        is_evaluation = isinstance(self.settings, T5EvaluateConfig)
        return not self.settings.data.is_text if is_evaluation else bool(self.labels)

    def outputs(self, data: "ClassifyData") -> "Float32Array | list[int] | list[str] | None":
        """Return losses of all labels, or the generated labels or texts."""
        form, columns, model = required(self.form), self.settings.data, self.model
        asked = columns.template or columns.task
        template = t5_written.wording(columns, data) if asked else form.template
        file = t5_written.examples_of(columns, data, model, self.tokenizer, template=template)
        compute, size = (self.world, self.precision), self.settings.batch_size
        if not self.has_labels:
            search = form.searched(self.settings.generation)
            return t5_written.written_texts(
                model,
                file,
                self.tokenizer,
                search,
                *compute,
                batch_size=size,
                keeps_sentinels=form.keeps_sentinels,
            )
        if columns.labels_by == "likelihood":
            return t5_written.label_losses(model, file, *compute, batch_size=size)
        return t5_written.predicted_labels(model, file, "generation", *compute, batch_size=size)

    def read(self, inputs: tuple[Path, ...]) -> "list[ClassifyData]":
        columns = self.settings.data
        if columns.is_text:
            columns = replace(columns, first=columns.source_column, second="")
        if self.form and not self.labels:
            columns = replace(columns, second="")
        return self.read_texts(inputs, columns)

    def rows(self, data: "ClassifyData", outputs: Any) -> Iterator[Row]:
        if self.labels and self.settings.data.labels_by == "likelihood":
            yield from self.label_rows(data, -outputs)
            return
        for number, output in zip(data.numbers, outputs, strict=True):
            if self.labels:
                yield {"id": number, "generated_label": (*self.labels, None)[output]}
            else:
                yield {"id": number, "text": output}

    def check_evaluation(self, inputs: tuple[Path, ...]) -> list[str]:
        columns = self.settings.data
        if columns.is_text != bool(columns.target_column):
            raise UsageError("scores of texts need --data.source-column and --data.target-column: give both")
        if columns.is_text:
            require_packages(self.settings.generation.metrics)
        return super().check_evaluation(inputs)

    def labelled(self, inputs: tuple[Path, ...]) -> "Iterator[ClassifyData]":
        from shoal.data.text.classify import read_classify
        from shoal.data.text.text_to_text import read_text_pairs

        columns = self.settings.data
        if columns.is_text:
            source, target = columns.source_column, columns.target_column
            for path in inputs:
                yield read_text_pairs(path, source=source, target=target, bad=columns.counter(path))
            return
        labels = t5_written.require_labels(self.settings.model, self.model)
        for path in inputs:
            yield read_classify(path, columns.columns(), labels=labels, bad=columns.counter(path))

    def scores(self, data: "ClassifyData", outputs: Any) -> str:
        columns, metrics = self.settings.data, self.settings.generation.metrics
        if columns.is_text:
            scores = t5_written.write_text_scores(self.settings.out, data, outputs, metrics)
            listed = ", ".join(f"{name} {score:.2f}" for name, score in scores.items())
            named = f"{data.path}: {listed} of {len(outputs):,} examples, in {self.precision.name}"
            return f"{named}{classify.left_out(data)}"
        predicted = t5_written.likeliest(outputs) if columns.labels_by == "likelihood" else outputs
        return self.label_scores(data, columns.names(self.labels), required(predicted), columns.accuracy)


def _is_pretraining(source: ModelSource) -> bool:
    """Return whether the weights are in a checkpoint of ``shoal train t5``."""
    return source.checkpoint is not None and recipe_of(required(source.run)) == "t5"


use = Writing


# ------------------------------------------------------------------------------------------------- dry run


def check(config: T5ClassifyConfig, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run."""
    finetuning.require_paths(config, config.data, "examples")
    files = read_files(config.data)
    length = config.data.max_seq_length
    finetuning.check_model(config, num_workers, setting="data.max_seq_length", max_seq_length=length)
    if not dry_run:
        return []
    return [
        *finetuning.describe(config, len(files[0].examples), num_workers),
        finetuning.memory_line(
            config, dry_run, sample, num_sequences=len(files[0].examples), num_workers=num_workers
        ),
        f"worded as    {t5_written.wording(config.data, files[0])}",
        *([] if config.data.is_text else [f"labels       {', '.join(files[0].labels)}"]),
        *(f"{data.path}: {len(data.examples):,} examples{classify.left_out(data)}" for data in files),
    ]


# ------------------------------------------------------------------------------------------------- sample

LABEL_TOKENS = 4
"""Tokens of a label's word, its end included, where no examples are named."""


def sample(config: T5ClassifyConfig) -> Sample:
    """Return the first examples and the network; without a file, full inputs."""
    import tempfile

    from shoal.models.t5 import read_t5
    from shoal.recipes.t5 import sample_of

    settings = config.data
    # the kernels of dropout count whatever its rate
    options = replace(config.model, dropout=config.model.dropout or T5ModelConfig.dropout).options
    with tempfile.TemporaryDirectory() as folder:
        source = finetuning.prepare_source(required(config.model.path), Path(folder))
        model = read_t5(source, **options, on_meta=True)
        if settings.path is not None:
            data, tokenizer = read_files(settings)[0], read_source_tokenizer(source)
            template = t5_written.wording(settings, data)
            examples = t5_written.examples_of(settings, data, model, tokenizer, template=template)
            return sample_of(model, finetuning.first_examples(examples, config))
    num_targets = settings.max_target_length if settings.is_text else LABEL_TOKENS
    inputs = {"input_ids": token_ids(2, settings.max_seq_length), "labels": token_ids(2, num_targets)}
    return sample_of(model, inputs)


def trial(config: T5ClassifyConfig, folder: Path) -> T5ClassifyConfig:
    """Return the settings of a short run, on synthetic pairs with labels where none are named."""
    from shoal.models.synthetic import LABELS

    write = partial(classify.write_pairs, config.data.max_seq_length, LABELS)
    return finetuning.trial(config, folder, ".tsv", write)


if __name__ == "__main__":
    run_script("t5_classify")
