"""Opens text, scores and exports models for the scripts ``albert.py`` and ``bert.py``."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from shoal.decide.batch import BatchSizes, StagesConfig, known_size, plan_batch
from shoal.errors import UsageError, require_positive
from shoal.models.text_config import EncoderConfig
from shoal.recipes import DryRun, Sample, Use, squad, token_ids
from shoal.recipes.model_source import TRANSFORMERS, find_run
from shoal.recipes.prepared_text import (
    PreparedTextConfig,
    keep_tokenizer,
    kept_tokenizer,
    load_weights,
    open_shards,
    read_manifest,
    tokenizer_files,
    write_synthetic_text,
)
from shoal.recipes.squad import SQUAD_SCORES, SQUAD_SPLIT, ShortFinetuneConfig, SquadConfig
from shoal.train.config import (
    DistributedConfig,
    LoopConfig,
    RunConfig,
    ServersConfig,
    check_combination,
    load_toml,
    settings_lines,
)
from shoal.train.optim_config import PhasesOptimConfig, check_served, schedule_of
from shoal.train.run_dir import CONFIG_FILE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    from shoal.data.text.examples import ExampleReader
    from shoal.data.text.segments import PairTask
    from shoal.data.text.shards import TextShards
    from shoal.models.pretraining import Pretraining
    from shoal.recipes.divided import Divided
    from shoal.record import Evaluation
    from shoal.train.run import Run
    from shoal.train.step import Step
    from shoal.train.world import World

SENTENCE_TASKS = {"sop": "sentence order", "nsp": "next sentence"}

# ------------------------------------------------------------------------------------------------- config


@dataclass(frozen=True, kw_only=True)
class TextConfig(PreparedTextConfig):
    """Selects the text, and sets masking and the length of examples."""

    mask_prob: float = 0.15
    """Fraction of the tokens that is predicted."""
    max_ngram: int = 3
    """Longest run of words masked together."""
    whole_words: bool = True
    """Mask all tokens of a word or none."""
    short_seq_prob: float = 0.1
    """Fraction of the examples that is shorter than possible."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of pretraining, by the sections of the settings that define it."""

    section: str
    sizes: Any
    lengths: Any
    rates: Any
    pairs: "PairTask"


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig:
    """Settings of pretraining ALBERT or BERT, without those of its steps."""

    unit: ClassVar[str] = "sequences"
    memory_remedy: ClassVar[str] = "--model.activation-checkpointing"
    pairs: ClassVar[Literal["sop", "nsp"]]
    """The task about two sentences, in the names of its scores."""
    recipe: ClassVar[str]
    """Name of the recipe."""

    model: EncoderConfig
    data: TextConfig = field(default_factory=TextConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    optim: PhasesOptimConfig = field(default_factory=PhasesOptimConfig)
    finetune: ShortFinetuneConfig = field(default_factory=ShortFinetuneConfig)
    parallel: StagesConfig = field(default_factory=StagesConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)

    @property
    def whole_phase(self) -> "Phase":
        """The one phase of a run whose model is divided over workers."""
        raise NotImplementedError

    @property
    def sentence_task(self) -> Literal["sop", "nsp"] | None:
        """The task about two sentences, if there is one."""
        return self.pairs

    @property
    def scores(self) -> dict[str, tuple[str, ...]]:
        """The names of the scores in the record, by split."""
        tasks = ("mlm", self.sentence_task)
        names = tuple(f"{task}_{score}" for task in tasks if task for score in ("loss", "accuracy"))
        return {"validation": names, **({SQUAD_SPLIT: SQUAD_SCORES} if self.finetune.at else {})}

    def check_common(self, total_steps: int, *sequence_lengths: tuple[str, int]) -> None:
        """Check the settings of both recipes; ``sequence_lengths`` are (section, tokens).

        Raises:
            UsageError: a number out of its range, or two that do not go together.
        """
        check_combination(self.train, self.distributed, self.servers, clip=self.optim.clip)
        check_served(self.optim, self.servers)
        longest, short = self.model.max_position_embeddings, self.finetune
        require_positive("finetune", short, "total_steps", "global_batch_size", "micro_batch_size")
        lengths = [*sequence_lengths, *([("finetune", short.max_seq_length)] if short.at else [])]
        for section, length in lengths:
            if length > longest:
                raise UsageError(
                    f"{section}.max_seq_length {length} is more than model.max_position_embeddings "
                    f"{longest}: shorten the one or raise the other"
                )
        self.parallel.check(self)
        if self.parallel.splits and len(sequence_lengths) > 1:
            raise UsageError(
                "stages are made for one length of sequences: with parallel.pipeline or parallel.shard train "
                "each phase as a run of its own, the first with --phase2.total-steps 0, the second with "
                "--phase1.total-steps 0 and the first run as --model.checkpoint-path"
            )
        if self.parallel.splits and short.at:
            raise UsageError("finetune.at does not go with a model in stages or shards: leave it out")
        if not short.at:
            return
        if short.data is None or short.eval is None:
            raise UsageError(
                "finetune.at needs finetune.data and finetune.eval: SQuAD files to train and to score on"
            )
        beyond = [step for step in short.at if not 1 <= step <= total_steps]
        if beyond:
            raise UsageError(f"finetune.at {beyond[0]} is not one of the steps 1 to {total_steps}")


ConfigT = TypeVar("ConfigT", bound=MaskedLMConfig)

# ------------------------------------------------------------------------------------------------- data


def open_text(
    config: MaskedLMConfig, lengths: Any, *, pairs: "PairTask", world: "World | None" = None
) -> tuple["ExampleReader", "ExampleReader"]:
    """Return the readers of the training and the held-out examples.

    Args:
        lengths: the section with ``max_seq_length`` and ``max_predictions_per_seq``.
        pairs: the sentence task, ALBERT's order or BERT's next sentence, or none.
        world: of the workers that read them; ``None``: one that only counts them.
    """
    shards = open_shards(config.data, config.model.vocab_size, world=world)
    return open_examples(config, shards, lengths, pairs=pairs)


def open_examples(
    config: MaskedLMConfig, shards: "tuple[TextShards, TextShards]", lengths: Any, *, pairs: "PairTask"
) -> tuple["ExampleReader", "ExampleReader"]:
    """Return the readers of the examples of text that is open, as :func:`open_text` does."""
    from shoal.data.text.examples import ExampleConfig, ExampleReader

    data = config.data
    examples = ExampleConfig(
        max_seq_length=lengths.max_seq_length,
        max_predictions_per_seq=lengths.max_predictions_per_seq,
        mask_prob=data.mask_prob,
        max_ngram=data.max_ngram,
        whole_words=data.whole_words,
        pairs=pairs,
        short_seq_prob=data.short_seq_prob,
        seed=config.train.seed,
    )
    train, held_out = shards
    return ExampleReader(train, examples), ExampleReader(held_out, examples)


# ------------------------------------------------------------------------------------------------- stages


def divide(config: MaskedLMConfig, run: "Run") -> "Divided":
    """Return the run of one phase whose model is divided over workers.

    Sequences are padded, since stages have fixed shapes.
    """
    import torch

    from shoal.data.text.padded_examples import PaddedExamples
    from shoal.models.padded_pretraining import SUMS, PaddedPretraining
    from shoal.models.pretraining import new_encoder
    from shoal.recipes.divided import Divided
    from shoal.recipes.stages import read_stored

    phase, task = config.whole_phase, config.sentence_task
    train, held_out = open_text(config, phase.lengths, pairs=phase.pairs, world=run.world)
    keep_tokenizer(train.shards, run)
    references = reference_lines(task, held_out, config.run.validation_samples)
    sizes: Any = config.model
    torch.manual_seed(run.seed)
    model = new_encoder(sizes)
    load_weights(model, config.model)
    return Divided(
        network=PaddedPretraining(model),
        train=PaddedExamples(train),
        held_out={"validation": PaddedExamples(held_out)},
        limit=config.run.validation_samples,
        processes=config.data.loader_processes,
        shards=train.shards,
        sizes=phase.sizes,
        section=phase.section,
        total_steps=phase.sizes.total_steps,
        schedule=schedule_of(phase.rates, config.optim, phase.sizes.total_steps),
        targets=lambda batch: int(batch["masked_weights"].sum()),
        inputs=lambda ratio: {"samples_per_target": ratio},
        num_sums=len(SUMS) + 1,
        blank=_blank,
        count=lambda arrays: [float(arrays["masked_weights"].sum())],
        score=lambda sums, num_samples: _scores_of(sums, num_samples, task),
        references=references,
        notes=[f"data: {train.num_examples:,} training examples an epoch"],
        export=lambda directory: write_export(
            model,
            train.shards.tokenizer_file,
            directory / TRANSFORMERS,
            read_stored(directory, model),
        ),
        verdict=lambda last: verdict(task, last["validation"], references),
    )


def _blank(arrays: "dict[str, npt.NDArray[Any]]", is_there: "npt.NDArray[np.bool_]") -> None:
    arrays["weights"] = arrays["weights"] * is_there.astype("float32")
    arrays["masked_weights"] = arrays["masked_weights"] * is_there[:, None].astype("float32")


def _scores_of(sums: Sequence[float], num_samples: int, task: str | None) -> dict[str, float]:
    """Return mean losses in nats and accuracies from the sums of a network and the number of its targets."""
    *totals, masked = sums
    names = ("mlm_loss", "mlm_accuracy", *((f"{task}_loss", f"{task}_accuracy") if task else ()))
    counts = (masked, masked, num_samples, num_samples)
    return {n: value / max(count, 1) for n, value, count in zip(names, totals, counts, strict=False)}


# ------------------------------------------------------------------------------------------------- scores


def reference_lines(task: str | None, reader: "ExampleReader", limit: int) -> dict[str, float]:
    """Return the scores of a model that ignores the text: the unigram entropy of its targets, chance.

    Args:
        task: the one about two sentences, if there is one.
    """
    import torch

    from shoal.data.loader import held_out_batches
    from shoal.data.text.examples import unigram_entropy

    targets = [batch["masked_ids"] for batch in held_out_batches(reader, micro_batch_size=64, limit=limit)]
    references = {"mlm_loss": unigram_entropy(torch.cat(targets).numpy())}
    if task is not None:
        references |= {f"{task}_loss": math.log(2), f"{task}_accuracy": 0.5}
    return references


def verdict(task: str | None, scores: "Evaluation", references: dict[str, float]) -> str:
    """Compare held-out scores with the unigram entropy of the targets and with guessing, in two lines."""
    loss, entropy = scores.metrics["mlm_loss"], references["mlm_loss"]
    line = (
        f"held-out masked-LM loss {loss:.3f}: {abs(entropy - loss):.2f} nats "
        f"{'below' if loss < entropy else 'above'} the unigram entropy of its targets ({entropy:.3f})"
    )
    if task is None:
        return line
    accuracy = scores.metrics[f"{task}_accuracy"]
    z = (accuracy - 0.5) / (0.5 / math.sqrt(scores.num_samples))
    p_value = max(0.5 * math.erfc(z / math.sqrt(2)), 1e-300)  # one-sided, normal approximation
    return (
        f"{line}\n"
        f"held-out {SENTENCE_TASKS[task]} {100 * accuracy:.1f} % right on {scores.num_samples:,} pairs "
        f"(by guessing: p {'<' if p_value <= 1e-300 else '='} {p_value:.1e})"
    )


# ------------------------------------------------------------------------------------------------- SQuAD


def scored_by_finetuning(
    steps: "Iterator[Step]",
    config: MaskedLMConfig,
    model: "Pretraining",
    text: "TextShards",
    run: "Run",
) -> "Iterator[Step]":
    """Yield the steps of a loop; after those of ``finetune.at``, score a copy of the model on SQuAD.

    A signal stops the run in the middle of a finetuning; continued, it begins with the score.

    Raises:
        UsageError: the questions are not there, or do not go with the model.
    """

    def write(directory: Path) -> None:
        write_export(model, text.tokenizer_file, directory)

    def is_due() -> bool:
        return run.step in config.finetune.at and run.lacks_scores(SQUAD_SPLIT)

    for step in steps:
        if is_due():
            squad.score_pretraining(short_finetuning(config), write, run)
        else:  # after a score the run yields the step again, unless the score is its target
            yield step
    if is_due() and not squad.score_pretraining(short_finetuning(config), write, run):
        run.save(wait=True)
        run.stopped = True


def short_finetuning(config: MaskedLMConfig) -> SquadConfig:
    """Return the settings of a short finetuning inside a pretraining."""
    return squad.short_config(config.finetune, config.train, config.distributed, config.servers)


# ------------------------------------------------------------------------------------------------- export


def write_export(
    model: "Pretraining", tokenizer_file: Path, out: Path, read: "Callable[[str], Tensor] | None" = None
) -> None:
    """Write ``model`` with its tokenizer, whole or not at all; an older export in ``out`` is replaced.

    Args:
        read: returns a weight by its name in transformers; default: as the model has it.
    """
    from tokenizers import Tokenizer

    from shoal.models.directory import save

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    save(model, out, tokenizer=tokenizer_files(tokenizer, model), read=read)


# ------------------------------------------------------------------------------------------------- sample


def sample(config: Any, lengths: Any, batch: BatchSizes, *, pairs: "PairTask") -> Sample:
    """Return the first sequences of the text and the model; without text, full sequences.

    Args:
        lengths, pairs: as for :func:`open_text`.
    """
    import torch

    from shoal.data.loader import held_out_batches
    from shoal.models.encoder import full_sequences
    from shoal.models.pretraining import PRETRAINING_INPUTS, new_encoder

    # layers that are recomputed cannot be counted
    with torch.device("meta"):
        model = new_encoder(replace(config.model, activation_checkpointing=False))
    if config.data.path is not None:
        train, _ = open_text(config, lengths, pairs=pairs)
        inputs = next(held_out_batches(train, micro_batch_size=known_size(batch.micro_batch_size) or 2))
    else:
        num_masked = int(2 * lengths.max_seq_length * config.data.mask_prob)
        inputs = {
            **full_sequences(2, lengths.max_seq_length),
            "masked_rows": token_ids(num_masked),
            "masked_ids": token_ids(num_masked),
            "labels": token_ids(2),
        }
    return Sample(
        model=model,
        inputs={name: inputs[name] for name in PRETRAINING_INPUTS if name in inputs},
        loss=_total_loss,
        num_samples=len(inputs["labels"]),
        sequence_length=lengths.max_seq_length,
        recompute=_recompute if config.model.activation_checkpointing else None,
        num_recomputed=config.model.num_hidden_layers,
    )


def _recompute(model: "Pretraining") -> None:
    model.encoder.activation_checkpointing = True


def _total_loss(model: "Pretraining", inputs: Mapping[str, Any]) -> "Tensor":
    sums: tuple[Tensor, ...] = model(**inputs)
    return sums[0] + sums[2]


def trial(config: ConfigT, folder: Path) -> ConfigT:
    """Return the settings of a short run, on synthetic text of full sequences where none is named."""
    if config.data.path is not None:
        return config
    write_synthetic_text(folder, config.model.vocab_size)
    return replace(config, data=replace(config.data, path=folder, short_seq_prob=0.0))


# ------------------------------------------------------------------------------------------------- use


class EncoderUse(Use):
    """Exports a pretrained encoder."""

    export_folder = TRANSFORMERS
    sizes: ClassVar[type[Any]]
    """Settings of the recipe's models."""

    @classmethod
    def export(cls, source: Path, out: Path | None, dtype: "torch.dtype") -> Path:
        run = find_run(source, "SOURCE")
        model, step = cls.read_checkpoint(source)
        out = out or run / f"{TRANSFORMERS}-{step}"
        write_export(model.to(dtype), kept_tokenizer(run), out)
        return out

    @classmethod
    def read_checkpoint(cls, source: Path) -> "tuple[Pretraining, int]":
        """Return the model of a checkpoint, and its step.

        Raises:
            ShoalError: there is no checkpoint, or it is damaged.
        """
        from shoal.models.pretraining import new_encoder
        from shoal.train.checkpoint import load_model

        sizes = dict(load_toml(find_run(source, "SOURCE") / CONFIG_FILE)["model"])
        sizes.pop("checkpoint_path", None)
        model = new_encoder(cls.sizes(**sizes))
        return model, load_model(source, model)


# ------------------------------------------------------------------------------------------------- dry run


def describe(
    config: MaskedLMConfig,
    num_workers: int,
    num_parameters: int,
    phases: "Sequence[tuple[str, BatchSizes, int, Any]]",
    *,
    pairs: "PairTask",
    dry_run: DryRun | None,
) -> list[str]:
    """Check the settings; return the lines of a dry run: settings, arithmetic, parameters, memory.

    Args:
        phases: (section, batch, steps, section with the lengths) of each.
        pairs: as for :func:`open_text`.
        dry_run: counts the memory, which takes torch; otherwise it is left out.

    Raises:
        UsageError: sizes that do not divide, or no data that fits.
    """
    manifest = read_manifest(config.data)
    manifest.check_vocabulary(config.model.vocab_size)
    num_tokens = sum(shard.num_tokens for shard in manifest.shards("train"))
    lines, counted, without_text = [], [], replace(config, data=replace(config.data, path=None))
    for section, batch, num_steps, lengths in phases:
        length = lengths.max_seq_length
        plan = config.parallel.divide(batch, num_workers, section=section)
        name = f"{section}: " if len(phases) > 1 else ""
        sequences = num_steps * plan.global_batch_size
        lines += [
            f"batch        {name}{plan}",
            f"run          {name}{num_steps:,} steps, {sequences:,} sequences of {length} tokens, about "
            f"{sequences * length / max(num_tokens, 1):,.1f} times the {num_tokens:,} tokens of "
            f"{config.data.path}",
        ]
        if dry_run:
            counted.append((sample(without_text, lengths, batch, pairs=pairs), plan))
    if config.finetune.at:
        plan_batch(config.finetune, num_workers, section="finetune")
        squad.read_files(short_finetuning(config).data)
    lines = [*settings_lines(config), *lines, f"parameters   {num_parameters:,}"]
    if dry_run:
        lines.append(dry_run.memory_line(config, *counted))
    return lines
