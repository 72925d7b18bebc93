"""Finetunes T5 on sentences or pairs with labels: MNLI, or any file like it.

    python -m shoal.recipes.t5_classify --task mnli --model t5/ --data train.tsv --eval dev_matched.tsv
    torchrun --nproc-per-node 8 -m shoal.recipes.t5_classify --model runs/t5 ...
    shoal finetune t5 --preset tiny --model runs/t5 --workers 2 ...

The model reads "mnli hypothesis: … premise: …" and generates the label's word. The loss is the cross-entropy
(with z-loss) of the word's tokens, summed and divided by those of the whole global batch. An evaluation
decodes greedily; an output that spells no label counts as wrong.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from shoal.env import WorkerEnv
from shoal.errors import UsageError
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import classify, finetuning, run_script
from shoal.recipes.classify import ClassifyDataConfig, TextColumnsConfig
from shoal.recipes.finetuning import FinetuneConfig, FinetuneOptimConfig

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.data.loader import Batch
    from shoal.data.text.classify import ClassifyData
    from shoal.data.text.text_to_text import TextToText
    from shoal.models.t5 import T5
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
    import torch

    from shoal.data.text.task_batches import TaskSource
    from shoal.data.text.text_to_text import make_text_to_text
    from shoal.models.t5 import IGNORED, read_t5
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run

    finetuning.require_paths(config, config.data, "examples")
    with Run.open(config=config, recipe="t5_classify", immutable=IMMUTABLE, worker=worker) as run:
        # ----------------------------------------------------------------------------------------- model
        source, length = finetuning.open_source(config.model, run), config.data.max_seq_length
        tokenizer = finetuning.read_source_tokenizer(source)
        torch.manual_seed(run.seed)
        model = read_t5(source, **config.model.options)
        sizes = model.weights.config
        ddp = run.data_parallel(model, average=config.optim.clip == "global")
        run.compile(model, dynamic=True, by_default=False)
        optimizer = build_optimizer(model.named_parameters(), config.optim)
        run.keep(model=model, optimizer=optimizer)

        # ----------------------------------------------------------------------------------------- data
        files = [
            make_text_to_text(
                data,
                tokenizer,
                template=wording(config.data, data),
                max_seq_length=length,
                end_id=sizes.eos_token_id,
                pad_id=sizes.pad_token_id,
            )
            for data in classify.read_files(config.data)
        ]
        training, *held_out = files
        sizes.id2label = dict(enumerate(training.data.labels))
        sizes.task_specific_params = {config.data.task: {"template": wording(config.data, training.data)}}
        plan = finetuning.make_plan(config, num_sequences=len(training), num_workers=run.world.num_workers)

        # ----------------------------------------------------------------------------------------- loop
        steps = run.steps(
            TaskSource(data=training, seed=run.seed),
            plan.batch,
            until=plan.total_steps,
            targets=lambda batch: int((batch["labels"] != IGNORED).sum()),
            notes=[
                f"worded as: {wording(config.data, training.data)}",
                *(classify.counts(file.data, len(file), file.num_cut, length) for file in files),
            ],
        )
        for step in steps:
            with step:
                set_learning_rate(optimizer, learning_rate(plan.schedule, step.number - 1))
                for batch in step:
                    mean_loss = ddp(**batch).loss
                    step.backward(mean_loss * (batch["labels"] != IGNORED).sum() / step.num_targets)
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if run.due(config.run.validation_frequency):
                evaluate(model, held_out, config, run)
        if run.lacks_scores():
            evaluate(model, held_out, config, run)

        # ----------------------------------------------------------------------------------------- export
        return finetuning.finish(run, model, source)


# ------------------------------------------------------------------------------------------------- data


def wording(settings: T5WordingConfig, data: "ClassifyData") -> str:
    """Return the template of a file's inputs."""
    from shoal.data.text.text_to_text import template_of

    return settings.template or template_of(settings.task, has_pairs=data.examples[0].second is not None)


# ------------------------------------------------------------------------------------------------- evaluation


def evaluate(model: "T5", files: "list[TextToText]", config: T5ClassifyConfig, run: "Run") -> None:
    """Generate the labels of each file with all workers and record the scores."""
    for file in files:
        predicted = predicted_labels(
            model, file, run.world, run.precision, batch_size=config.run.evaluation_batch_size
        )
        classify.record_scores(run, file.data, (*file.data.labels, NO_LABEL), predicted)


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
