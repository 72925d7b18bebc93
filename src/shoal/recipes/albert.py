"""Pretrains ALBERT (Lan et al. 2019, arXiv 1909.11942): masked LM and sentence order.

    python -m shoal.recipes.albert --preset tiny --data.path runs/text
    torchrun --nproc-per-node 8 -m shoal.recipes.albert --preset base --data.path /data/text
    shoal train albert --preset tiny --data.path runs/text --workers 2

In an optimizer step each worker takes its part of the global batch as packed micro-batches. Losses are sums,
divided by the counts of the global batch. The last backward averages the gradients over the workers, and
leaving the step clips them and updates the weights.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shoal.env.worker import WorkerEnv
from shoal.models.text_config import AlbertModelConfig
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import DryRun, Sample, masked_lm, run_script
from shoal.recipes.masked_lm import MaskedLMConfig, Phase, TextConfig
from shoal.recipes.model_source import TRANSFORMERS
from shoal.recipes.prepared_text import keep_tokenizer, load_weights
from shoal.train.config import TrainConfig
from shoal.train.optim_config import OptimConfig, check_warmup, schedule_of

# ------------------------------------------------------------------------------------------------- config

PRESETS = ("tiny", "base", "large", "xlarge")


@dataclass(frozen=True, kw_only=True)
class DataConfig(TextConfig):
    """Selects the text, and sets masking and the length of examples."""

    max_seq_length: int = 512
    """Tokens of an example, special tokens included."""
    max_predictions_per_seq: int = 20
    """Maximum number of masked tokens in an example."""


@dataclass(frozen=True, kw_only=True)
class AlbertConfig(MaskedLMConfig):
    """All settings of ALBERT's pretraining; presets are TOML files in ``presets/albert``."""

    longer: ClassVar[str] = "--train.total-steps"
    pairs: ClassVar[Literal["sop", "nsp"]] = "sop"
    recipe: ClassVar[str] = "albert"

    model: AlbertModelConfig = field(default_factory=AlbertModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        check_warmup("optim", self.optim.warmup_steps, "train", self.train.total_steps)
        self.check_common(self.train.total_steps, ("data", self.data.max_seq_length))

    @property
    def whole_phase(self) -> Phase:
        return Phase(section="train", sizes=self.train, lengths=self.data, rates=self.optim, pairs="order")


IMMUTABLE = (
    "model",
    "data.max_seq_length",
    "data.max_predictions_per_seq",
    "data.mask_prob",
    "data.max_ngram",
    "data.whole_words",
    "data.short_seq_prob",
    "train.seed",
    "train.global_batch_size",
    "optim.optimizer",
)
"""Settings that must stay when a run continues: weights, optimizer state or data order depend on them."""


def main(config: AlbertConfig, worker: WorkerEnv | None = None) -> int:
    """Pretrain until the last step, a signal, or a loss that stays not finite; return the exit code."""
    import torch

    from shoal.data.loader import held_out_batches
    from shoal.data.sources import ReaderSource
    from shoal.models.pretraining import AlbertPretraining, evaluate, pretraining_inputs
    from shoal.recipes.shard_cache import record_reads
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run

    with Run.open(config=config, recipe="albert", immutable=IMMUTABLE, worker=worker) as run:
        # ----------------------------------------------------------------------------------------- data
        train, held_out = masked_lm.open_text(config, config.data, pairs="order", world=run.world)
        keep_tokenizer(train.shards, run)
        references = masked_lm.reference_lines("sop", held_out, config.run.validation_samples)

        # ----------------------------------------------------------------------------------------- model
        torch.manual_seed(run.seed)
        model = AlbertPretraining(config.model)
        load_weights(model, config.model)
        ddp = run.data_parallel(model, average=config.optim.clip == "global")
        run.compile(model, dynamic=True)  # packed: no two micro-batches have the same shape
        optimizer = build_optimizer(model.named_parameters(), config.optim)
        schedule = schedule_of(config.optim, config.optim, config.train.total_steps)
        run.keep(model=model, optimizer=optimizer)

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> None:
            batches = held_out_batches(
                held_out,
                micro_batch_size=run.batch.micro_batch_size,
                limit=config.run.validation_samples,
                rank=run.world.rank,
                num_workers=run.world.num_workers,
            )
            scores, num_samples = evaluate(ddp, batches, run.world.device, run.sum, "sop")
            run.evaluation("validation", scores, num_samples=num_samples)

        # ----------------------------------------------------------------------------------------- loop
        steps = run.steps(
            ReaderSource(reader=train, processes=config.data.loader_processes),
            config.train,
            until=config.train.total_steps,
            targets=lambda batch: len(batch["masked_ids"]),
            references=references,
            notes=[f"data: {train.num_examples:,} training examples an epoch"],
        )
        if config.finetune.at:
            steps = masked_lm.scored_by_finetuning(steps, config, model, train.shards, run)
        for step in steps:
            with step:
                set_learning_rate(optimizer, learning_rate(schedule, step.number - 1))
                for batch in step:
                    sums = ddp(**pretraining_inputs(batch))
                    mlm_loss, mlm_correct, sop_loss, sop_correct = sums
                    step.backward(mlm_loss / step.num_targets + sop_loss / step.num_samples)
                    step.add(step.num_targets, mlm_loss=mlm_loss, mlm_accuracy=mlm_correct)
                    step.add(step.num_samples, sop_loss=sop_loss, sop_accuracy=sop_correct)
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if run.due(config.run.validation_frequency, evaluation=True):
                run.workers.together(score)
        if run.lacks_scores("validation"):
            run.workers.together(score)
        record_reads(run, train.shards)

        # ----------------------------------------------------------------------------------------- export
        return run.finish(
            lambda directory: masked_lm.write_export(
                model, train.shards.tokenizer_file, directory / TRANSFORMERS
            ),
            lambda last: masked_lm.verdict("sop", last["validation"], references),
        )


class use(masked_lm.EncoderUse):
    """Uses the models of ALBERT."""

    sizes = AlbertModelConfig


def check(config: AlbertConfig, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run."""
    data, train = config.data, config.train
    phase = ("train", train, train.total_steps, data)
    return masked_lm.describe(
        config, num_workers, config.model.num_parameters, [phase], pairs="order", dry_run=dry_run
    )


def sample(config: AlbertConfig) -> Sample:
    """Return the first sequences of the text and the model; without text, full sequences."""
    return masked_lm.sample(config, config.data, config.train, pairs="order")


divide = masked_lm.divide
trial = masked_lm.trial

if __name__ == "__main__":
    run_script("albert")
