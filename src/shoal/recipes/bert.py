"""Pretrains BERT (Devlin et al. 2018, arXiv 1810.04805): masked LM and next sentence, in two phases.

RoBERTa and DistilBERT (``--model.family``) are trained with masked LM alone, on text of one document.

    python -m shoal.recipes.bert --preset tiny --data.path runs/text
    torchrun --nproc-per-node 8 -m shoal.recipes.bert --preset large --data.path /data/text
    shoal train bert --preset tiny --data.path runs/text --workers 2

The first phase has short sequences, the second long ones. The second begins with the weights of the first,
a fresh optimizer, and examples, batch and schedule of its own. A checkpoint at the border belongs to both: a
run that continues from it begins the second phase as a run that was never interrupted does.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Literal

from shoal.decide.batch import MicroBatch
from shoal.env.worker import WorkerEnv
from shoal.errors import UsageError, require_positive
from shoal.models.text_config import BertModelConfig
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import DryRun, Sample, masked_lm, run_script
from shoal.recipes.masked_lm import MaskedLMConfig, Phase, TextConfig
from shoal.recipes.model_source import TRANSFORMERS
from shoal.recipes.prepared_text import keep_tokenizer, load_weights, open_shards, read_manifest
from shoal.train.config import LoopConfig
from shoal.train.optim_config import Rates, check_warmup, schedule_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from shoal.data.text.shards import TextShards
    from shoal.train.gradients import DataParallel
    from shoal.train.run import Run

# ------------------------------------------------------------------------------------------------- config

PRESETS = ("tiny", "base", "large", "large-lans")


@dataclass(frozen=True, kw_only=True)
class DataConfig(TextConfig):
    """Selects the text, and sets masking and the length of examples."""

    max_ngram: int = 1
    """Longest run of words masked together; the paper masks single tokens."""
    whole_words: bool = False
    """Mask all tokens of a word or none (the authors' later "whole word masking" models)."""


@dataclass(frozen=True, kw_only=True)
class PhaseConfig(Rates):
    """One phase: its examples, its batch and its schedule."""

    total_steps: int = 7_038
    """Optimizer steps of this phase; 0 skips it."""
    max_seq_length: int = 128
    """Tokens of an example, special tokens included."""
    max_predictions_per_seq: int = 20
    """Maximum number of masked tokens in an example."""
    global_batch_size: int = 65_536
    """Sequences in one optimizer step, over all workers."""
    micro_batch_size: MicroBatch | None = None
    """Sequences per worker and forward pass; default: the largest divisor of its share up to 64; auto: the
    largest that fits into memory."""
    learning_rate: float = 6e-3
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Settings that both phases share."""

    total_steps: int | None = None
    """Optimizer steps of both phases together, divided in the preset's proportion; default: the preset's."""


@dataclass(frozen=True, kw_only=True)
class BertConfig(MaskedLMConfig):
    """All settings of BERT's pretraining; presets are TOML files in ``presets/bert``."""

    pairs: ClassVar[Literal["sop", "nsp"]] = "nsp"
    recipe: ClassVar[str] = "bert"

    train: TrainConfig = field(default_factory=TrainConfig)
    model: BertModelConfig = field(default_factory=BertModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    phase1: PhaseConfig = field(default_factory=PhaseConfig)
    phase2: PhaseConfig = field(default_factory=PhaseConfig)

    def __post_init__(self) -> None:
        for section, phase in (("phase1", self.phase1), ("phase2", self.phase2)):
            require_positive(section, phase, "global_batch_size", "micro_batch_size")
            require_positive(section, phase, "total_steps", least=0)
            if phase.total_steps:
                check_warmup(section, phase.warmup_steps, section, phase.total_steps)
        if not self.phases:
            raise UsageError("phase1.total_steps and phase2.total_steps are both 0: nothing to train")
        if self.train.total_steps not in (None, self.total_steps):
            raise UsageError(
                f"train.total_steps {self.train.total_steps} is not the sum of phase1.total_steps "
                f"{self.phase1.total_steps} and phase2.total_steps {self.phase2.total_steps}: leave it out, "
                "or those"
            )
        lengths = [(section, phase.max_seq_length) for section, phase in self.phases]
        self.check_common(self.total_steps, *lengths)

    @property
    def sentence_task(self) -> Literal["sop", "nsp"] | None:
        """Next sentence, of BERT alone."""
        return self.pairs if self.model.family == "bert" else None

    @property
    def pair_task(self) -> Literal["next", "none"]:
        """Task on pairs of segments: the next sentence, or none."""
        return "next" if self.model.family == "bert" else "none"

    @property
    def phases(self) -> list[tuple[str, PhaseConfig]]:
        """The phases that have steps, in order, with their sections."""
        sections = (("phase1", self.phase1), ("phase2", self.phase2))
        return [(section, phase) for section, phase in sections if phase.total_steps]

    def only_phase(self, number: Literal[1, 2]) -> "BertConfig":
        """Return the settings of a run of one phase alone."""
        if number == 1:
            return replace(self, phase2=replace(self.phase2, total_steps=0))
        return replace(self, phase1=replace(self.phase1, total_steps=0))

    @property
    def whole_phase(self) -> Phase:
        ((section, phase),) = self.phases
        return Phase(section=section, sizes=phase, lengths=phase, rates=phase, pairs=self.pair_task)

    @property
    def longer(self) -> str:
        return f"--{self.phases[-1][0]}.total-steps"

    @property
    def total_steps(self) -> int:
        return self.phase1.total_steps + self.phase2.total_steps


IMMUTABLE = (
    "model",
    "data.mask_prob",
    "data.max_ngram",
    "data.whole_words",
    "data.short_seq_prob",
    "train.seed",
    "optim.optimizer",
    "phase1.total_steps",
    *(
        f"{phase}.{name}"
        for phase in ("phase1", "phase2")
        for name in ("max_seq_length", "max_predictions_per_seq", "global_batch_size")
    ),
)
"""Settings that must stay when a run continues: weights, optimizer state or data order depend on them."""


def main(config: BertConfig, worker: WorkerEnv | None = None) -> int:
    """Pretrain until the last step, a signal, or a loss that stays not finite; return the exit code."""
    import torch

    from shoal.models.pretraining import new_encoder
    from shoal.recipes.shard_cache import record_reads
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run

    with Run.open(config=config, recipe="bert", immutable=IMMUTABLE, worker=worker) as run:
        # ----------------------------------------------------------------------------------------- data
        shards = open_shards(config.data, config.model.vocab_size, world=run.world)
        keep_tokenizer(shards[0], run)

        # ----------------------------------------------------------------------------------------- model
        torch.manual_seed(run.seed)
        model = new_encoder(config.model)
        load_weights(model, config.model)
        ddp = run.data_parallel(model, average=config.optim.clip == "global")
        run.compile(model, dynamic=True)  # packed: no two micro-batches have the same shape
        optimizer = build_optimizer(model.named_parameters(), config.optim)
        run.keep(model=model, optimizer=optimizer)

        # ----------------------------------------------------------------------------------------- phases
        ends = list(accumulate(phase.total_steps for _, phase in config.phases))
        for (section, phase), end in zip(config.phases, ends, strict=True):
            if run.step >= end and end != ends[-1]:
                continue  # a run that continues in the second phase
            if run.step == end - phase.total_steps > 0:
                optimizer = build_optimizer(model.named_parameters(), config.optim)
                run.keep(optimizer=optimizer)
            references = train_phase(config, run, shards, ddp, optimizer, section, phase, end=end)
            if run.reached:
                break
        record_reads(run, shards[0])

        # ----------------------------------------------------------------------------------------- export
        return run.finish(
            lambda directory: masked_lm.write_export(
                model, shards[0].tokenizer_file, directory / TRANSFORMERS
            ),
            lambda last: masked_lm.verdict(config.sentence_task, last["validation"], references),
        )


def train_phase(
    config: BertConfig,
    run: "Run",
    shards: "tuple[TextShards, TextShards]",
    ddp: "DataParallel",
    optimizer: "Optimizer",
    section: str,
    phase: PhaseConfig,
    *,
    end: int,
) -> dict[str, float]:
    """Train to the step at which a phase ends, and evaluate; return what losses are compared with."""
    from shoal.data.loader import held_out_batches
    from shoal.data.sources import ReaderSource
    from shoal.models.pretraining import evaluate, pretraining_inputs

    task, begin = config.sentence_task, end - phase.total_steps
    # --------------------------------------------------------------------------------------------- data
    train, held_out = masked_lm.open_examples(config, shards, phase, pairs=config.pair_task)
    references = masked_lm.reference_lines(task, held_out, config.run.validation_samples)

    # --------------------------------------------------------------------------------------------- evaluation
    def score() -> None:
        batches = held_out_batches(
            held_out,
            micro_batch_size=run.batch.micro_batch_size,
            limit=config.run.validation_samples,
            rank=run.world.rank,
            num_workers=run.world.num_workers,
        )
        scores, num_samples = evaluate(ddp, batches, run.world.device, run.sum, task)
        run.evaluation("validation", scores, num_samples=num_samples)

    # --------------------------------------------------------------------------------------------- loop
    schedule = schedule_of(phase, config.optim, phase.total_steps)
    steps = run.steps(
        ReaderSource(reader=train, processes=config.data.loader_processes),
        phase,
        since=begin,
        until=end,
        total=config.total_steps,
        targets=lambda batch: len(batch["masked_ids"]),
        section=section,
        phase=(section, phase.max_seq_length),
        references=references,
        notes=[f"data: {train.num_examples:,} training examples an epoch"],
    )
    if config.finetune.at:
        steps = masked_lm.scored_by_finetuning(steps, config, ddp.module, train.shards, run)
    for step in steps:
        with step:
            set_learning_rate(optimizer, learning_rate(schedule, step.number - begin - 1))
            for batch in step:
                sums = ddp(**pretraining_inputs(batch))
                mlm_loss, mlm_correct, nsp_loss, nsp_correct = sums
                step.backward(mlm_loss / step.num_targets + nsp_loss / step.num_samples)
                step.add(step.num_targets, mlm_loss=mlm_loss, mlm_accuracy=mlm_correct)
                if task:
                    step.add(step.num_samples, nsp_loss=nsp_loss, nsp_accuracy=nsp_correct)
            step.update(optimizer, max_norm=config.optim.max_grad_norm)
        if run.due(config.run.validation_frequency, evaluation=True):
            run.workers.together(score)
    if run.lacks_scores("validation"):
        run.workers.together(score)
    return references


class use(masked_lm.EncoderUse):
    """Uses the models of BERT."""

    sizes = BertModelConfig


def check(config: BertConfig, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run."""
    pad_id = read_manifest(config.data).pad_id
    if config.model.family == "roberta" and config.model.pad_token_id != pad_id:
        raise UsageError(
            f"model.pad_token_id {config.model.pad_token_id} is not the padding of {config.data.path}, which "
            f"is token {pad_id}: set --model.pad-token-id {pad_id}"
        )
    phases = [(section, phase, phase.total_steps, phase) for section, phase in config.phases]
    pairs = config.pair_task
    return masked_lm.describe(
        config, num_workers, config.model.num_parameters, phases, pairs=pairs, dry_run=dry_run
    )


def sample(config: BertConfig) -> Sample:
    """Return the first sequences of the first phase and the model; without text, full sequences."""
    _, phase = config.phases[0]
    return masked_lm.sample(config, phase, phase, pairs=config.pair_task)


divide = masked_lm.divide
trial = masked_lm.trial

if __name__ == "__main__":
    run_script("bert")
