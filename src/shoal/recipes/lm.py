"""Pretrains causal language models: any of transformers, from random weights or from those of a directory.

    python -m shoal.recipes.lm --preset tiny --data.path runs/text
    torchrun --nproc-per-node 8 -m shoal.recipes.lm --preset gpt2-124m --data.path /data/text
    shoal train lm --model models/qwen2 --data.path /data/text --run.dir runs/continued --workers 2

Documents are packed into blocks without padding, each with its end token behind it. By default they do not
see each other. In an optimizer step each worker takes its part of the global batch as micro-batches of
blocks. Losses are sums over targets, divided by the targets of the global batch. The last backward averages
the gradients over the workers, and leaving the step clips them and updates the weights.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.decide.batch import StagesConfig
from shoal.env.worker import WorkerEnv
from shoal.errors import UsageError, require_positive
from shoal.models.text_config import HUB
from shoal.optim.lr_schedules import AnySchedule, Cosine, LRSchedule, learning_rate, set_learning_rate
from shoal.recipes import DryRun, Sample, Use, run_script, token_ids
from shoal.recipes.model_source import MODEL_CONFIG, TRANSFORMERS, find_run
from shoal.recipes.prepared_text import (
    PreparedTextConfig,
    keep_tokenizer,
    kept_tokenizer,
    open_shards,
    read_manifest,
    write_synthetic_text,
)
from shoal.train.config import (
    DistributedConfig,
    RunConfig,
    ServersConfig,
    TrainConfig,
    check_combination,
    required,
    settings_lines,
)
from shoal.train.optim_config import MuonOptions, TextOptimizerConfig, check_served, check_warmup
from shoal.train.run_dir import description_in, keep_description

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from shoal.data.manifest import Manifest
    from shoal.data.text.blocks import BlockReader
    from shoal.data.text.conversations import ChatTokenizer
    from shoal.models.causal import CausalLM
    from shoal.pipelining.runtime import Pipeline
    from shoal.recipes.divided import Divided
    from shoal.record import Evaluation
    from shoal.train.run import Run
    from shoal.train.world import World

# ------------------------------------------------------------------------------------------------- config

PRESETS = ("tiny", "gpt2-124m", "llama-1b", "llama-8b")
"""Each is also the name of a model, with random weights: ``--model gpt2-124m``."""


Attention = Literal["shoal", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
"""Implementations of attention: shoal's, and those of transformers."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and how it is computed."""

    source: Path | None = None
    """Transformers directory, whose weights are trained on; a config.json, for random weights; hub:NAME; the
    directory of a run; or the name of a preset."""
    vocab_size: int | None = None
    """Rows of the embedding of a model with random weights; default: as in its config.json."""
    dropout: float | None = 0.0
    """Dropout of all kinds; none: as in the model's config.json."""
    attention: Attention = "shoal"
    """Implementation of attention: ``shoal`` is transformers' ``sdpa``, with own kernels on GPUs that have
    them; the flash kernels need their package."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""

    def __post_init__(self) -> None:
        require_positive("model", self, "vocab_size")
        require_positive("model", self, "dropout", least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class DataConfig(PreparedTextConfig):
    """Selects the text, and sets the length of blocks."""

    block_length: int = 1_024
    """Tokens of a block, end tokens included."""
    across_documents: bool = False
    """Let the documents of a block see each other, as GPT-2 did."""


@dataclass(frozen=True, kw_only=True)
class LmOptimConfig(MuonOptions, TextOptimizerConfig):
    """The optimizer and its schedule, in optimizer steps."""

    optimizer: Literal["lamb", "lans", "adamw", "adafactor", "muon"] = "adamw"  # type: ignore[assignment]
    """torch's AdamW; torch's Muon for the matrices of layers, with AdamW for all else; LAMB or LANS for large
    batches; or T5's Adafactor."""
    weight_decay: float = 0.1
    """Decay of matrices and embeddings, not of biases and norms."""
    learning_rate: float = 3e-4
    """Learning rate at the end of the warm-up."""
    end_learning_rate: float = 0.0
    """Learning rate after the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: cosine decays over all other steps; wsd (warm-up, stable, decay) stays at the rate
    and decays linearly at the end."""
    decay_share: float = 0.2
    """Fraction of all steps in which wsd decays."""
    z_loss: float = 0.0
    """Weight of log² Z, the squared log of the softmax's sum, in the loss (PaLM: 1e-4)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("optim", self, "decay_share", least=0, most=1)
        require_positive("optim", self, "z_loss", least=0)

    def schedule_of(self, total_steps: int) -> AnySchedule:
        """Return the learning rate's schedule.

        Raises:
            UsageError: warm-up and decay are longer than the run.
        """
        decay = round(self.decay_share * total_steps) if self.schedule == "wsd" else 0
        stable = total_steps - self.warmup_steps - decay
        if stable < 0:
            raise UsageError(
                f"optim.warmup_steps {self.warmup_steps} and optim.decay_share {self.decay_share} are more "
                f"than the {total_steps} steps of train.total_steps: shorten one of them"
            )
        if self.schedule == "cosine":
            return Cosine(
                base=self.learning_rate,
                end=self.end_learning_rate,
                warmup_steps=self.warmup_steps,
                total_steps=total_steps,
            )
        return LRSchedule(
            base=self.learning_rate,
            end=self.end_learning_rate,
            warmup_steps=self.warmup_steps,
            constant_steps=stable,
            total_steps=total_steps,
        )


@dataclass(frozen=True, kw_only=True)
class LmConfig:
    """All settings of a causal language model's pretraining; presets are TOML files in ``presets/lm``."""

    unit: ClassVar[str] = "blocks"
    recipe: ClassVar[str] = "lm"
    memory_remedy: ClassVar[str] = "--model.activation-checkpointing"
    longer: ClassVar[str] = "--train.total-steps"
    scores: ClassVar[dict[str, tuple[str, ...]]] = {
        "validation": ("lm_loss", "perplexity", "bits_per_byte", "lm_accuracy")
    }

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: LmOptimConfig = field(default_factory=LmOptimConfig)
    parallel: StagesConfig = field(default_factory=StagesConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)

    def __post_init__(self) -> None:
        require_positive("data", self.data, "block_length")
        check_warmup("optim", self.optim.warmup_steps, "train", self.train.total_steps)
        self.optim.schedule_of(self.train.total_steps)
        check_combination(self.train, self.distributed, self.servers, clip=self.optim.clip)
        check_served(self.optim, self.servers)
        self.parallel.check(self)
        check_attention(self.model.attention, self.parallel)
        if self.optim.optimizer == "muon" and self.servers.option:
            raise UsageError(
                f"optim.optimizer muon with {self.servers.option}: servers update all weights by "
                "one optimizer, and have none that reads whole matrices; choose --optim.optimizer adamw, or "
                "leave the servers' mode out"
            )


def check_attention(attention: Attention, parallel: StagesConfig) -> None:
    """Raise a :class:`UsageError` where stages cannot have this attention."""
    if parallel.pipeline > 1 and attention not in ("shoal", "sdpa", "eager"):
        raise UsageError(
            f"model.attention {attention} does not go with parallel.pipeline: stages are made of an exported "
            "graph, in which the lengths of documents are not known; leave it out"
        )


IMMUTABLE = (
    "model.source",
    "model.vocab_size",
    "model.dropout",
    "data.block_length",
    "data.across_documents",
    "train.seed",
    "train.global_batch_size",
    "optim.optimizer",
)
"""Settings that must stay when a run continues: weights, optimizer state or data order depend on them."""


def main(config: LmConfig, worker: WorkerEnv | None = None) -> int:
    """Pretrain until the last step, a signal, or a loss that stays not finite; return the exit code."""
    from shoal.data.loader import held_out_batches
    from shoal.data.sources import ReaderSource
    from shoal.data.text.blocks import num_targets
    from shoal.recipes.shard_cache import record_reads
    from shoal.train.optimizers import build_optimizers
    from shoal.train.run import Run

    with Run.open(config=config, recipe="lm", immutable=IMMUTABLE, worker=worker) as run:
        # ----------------------------------------------------------------------------------------- data
        source = source_of(config.model)
        sizes = read_sizes(config, source)
        train, held_out = open_text(config, sizes, world=run.world)
        keep_tokenizer(train.shards, run)
        keep_sizes(sizes, run)
        references = {LOSS: reference_loss(held_out)}

        # ----------------------------------------------------------------------------------------- model
        model = open_model(config, source, sizes, run)
        ddp = run.data_parallel(model, average=config.optim.clip == "global")
        if not config.data.across_documents:
            with run.precision.autocast():
                model.check()
        run.compile(model, dynamic=False)
        optimizers = build_optimizers(model.named_parameters(), config.optim, model.hidden_matrices())
        schedule = config.optim.schedule_of(config.train.total_steps)
        run.keep(model=model, **optimizers)

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> None:
            batches = held_out_batches(
                held_out,
                micro_batch_size=run.batch.micro_batch_size,
                limit=config.run.validation_samples,
                rank=run.world.rank,
                num_workers=run.world.num_workers,
            )
            scores, num_samples = evaluate(ddp, batches, run, train)
            run.evaluation("validation", scores, num_samples=num_samples)

        # ----------------------------------------------------------------------------------------- loop
        steps = run.steps(
            ReaderSource(reader=train, processes=config.data.loader_processes),
            config.train,
            until=config.train.total_steps,
            targets=num_targets,
            references=references,
            notes=[describe(config, train, held_out)],
        )
        for step in steps:
            with step:
                for optimizer in optimizers.values():
                    set_learning_rate(optimizer, learning_rate(schedule, step.number - 1))
                for batch in step:
                    total, loss, num_correct = ddp(**batch)
                    step.backward(total / step.num_targets)
                    step.add(step.num_targets, lm_loss=loss, lm_accuracy=num_correct)
                step.update(*optimizers.values(), max_norm=config.optim.max_grad_norm)
            if run.due(config.run.validation_frequency, evaluation=True):
                run.workers.together(score)
        if run.lacks_scores("validation"):
            run.workers.together(score)
        record_reads(run, train.shards)

        # ----------------------------------------------------------------------------------------- export
        return run.finish(
            lambda directory: write_export(model, train.shards.directory, directory / TRANSFORMERS),
            lambda last: verdict(last["validation"], references[LOSS]),
        )


# ------------------------------------------------------------------------------------------------- model


def source_of(model: ModelConfig) -> Path:
    """Return the transformers directory or the config.json that the settings name.

    Raises:
        UsageError: they name none.
        ShoalError: the hub cannot be reached, or has no such model.
    """
    from shoal.models.directory import resolve

    if model.source is None:
        raise UsageError(
            "model.source is not set: name a transformers directory, a config.json or one of "
            f"{', '.join(PRESETS)} with --model"
        )
    name = str(model.source)
    if name in PRESETS:
        return Path(str(resources.files("shoal.models") / "configs" / f"{name}.json"))
    if name.startswith(HUB):
        return resolve(name)
    of_run = Path(name) / TRANSFORMERS
    return of_run if (of_run / MODEL_CONFIG).is_file() else Path(name)


def read_sizes(config: LmConfig, source: Path) -> "PreTrainedConfig":
    """Return the model's configuration with the changes of the settings.

    A model with random weights has the end token of the text.

    Raises:
        UsageError: it is no causal language model; a setting is not for it, or blocks are too long for it.
    """
    from shoal.models.causal import read_causal_config, set_dropout
    from shoal.models.tensor_plan import check_tensor

    changes: dict[str, Any] = {}
    if config.model.vocab_size is not None:
        if source.is_dir():
            raise UsageError(
                f"model.vocab_size {config.model.vocab_size} is for random weights: leave it out, or name "
                f"{source / MODEL_CONFIG}"
            )
        changes["vocab_size"] = config.model.vocab_size
    sizes = read_causal_config(source, **changes)
    if config.model.dropout is not None:
        set_dropout(sizes, config.model.dropout)
    check_length(config.data.block_length, sizes, source)
    check_tensor(sizes, config.parallel.tensor)
    if not source.is_dir() and config.data.path is not None:
        sizes.eos_token_id = sizes.bos_token_id = read_manifest(config.data, end_token_only=True).sep_id
    return sizes


def check_length(
    length: int, sizes: "PreTrainedConfig", source: Path, setting: str = "data.block_length"
) -> None:
    """Raise a :class:`UsageError` where blocks or rows are longer than the model has positions for."""
    longest = getattr(sizes, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise UsageError(
            f"{setting} {length} is more than the {longest} positions of the model in {source}; shorten it, "
            f"such as --{setting.replace('_', '-')} {longest}"
        )


def open_model(config: LmConfig, source: Path, sizes: "PreTrainedConfig", run: "Run") -> "CausalLM":
    """Return the model in training mode."""
    from shoal.models.causal import CausalLM

    weights = open_weights(source, sizes, config.model.attention, run)
    model = CausalLM(weights, z_loss=config.optim.z_loss).train()
    if config.model.activation_checkpointing:
        model.recompute_activations()
    return model


def open_weights(
    source: Path, sizes: "PreTrainedConfig", attention: Attention, run: "Run"
) -> "PreTrainedModel":
    """Return the model of transformers; random weights are drawn from the seed, the same in all layouts."""
    import torch

    from shoal.models.causal import CausalLM, new_causal, open_causal
    from shoal.pipelining.init_meta import init_whole

    if source.is_dir():
        return open_causal(source, sizes, attention)
    with torch.device("meta"):
        weights = new_causal(sizes, attention)
    init_whole(CausalLM(weights), run.world.device, seed=run.seed)
    return weights


def divide(config: LmConfig, run: "Run") -> "Divided":
    """Return the run of a model that is divided over workers; it starts on meta."""
    import torch
    from tokenizers import Tokenizer

    from shoal.data.text.blocks import num_bytes, num_targets
    from shoal.models.causal import CausalLM, MeanLoss, new_causal
    from shoal.models.layers import blocks_of
    from shoal.recipes.divided import Divided
    from shoal.recipes.stages import load_weights, read_stored

    source = source_of(config.model)
    sizes = read_sizes(config, source)
    train, held_out = open_text(config, sizes, world=run.world)
    keep_tokenizer(train.shards, run)
    keep_sizes(sizes, run)
    with torch.device("meta"):
        model = CausalLM(new_causal(sizes, config.model.attention), z_loss=config.optim.z_loss)
    if config.model.activation_checkpointing:
        model.recompute_activations()
    network = MeanLoss(model)
    tokenizer = Tokenizer.from_file(str(train.shards.tokenizer_file))
    references = {LOSS: reference_loss(held_out)}

    def check(stage: "Pipeline", example: "dict[str, Tensor]") -> None:
        if not config.data.across_documents:
            model.check(lambda: leaks(stage, example))

    def count(arrays: "Mapping[str, npt.NDArray[Any]]") -> list[float]:
        return [num_targets(arrays), num_bytes(tokenizer, arrays["labels"], train.shards.manifest.sep_id)]

    return Divided(
        network=network,
        blocks=blocks_of(model.weights),
        train=train,
        held_out={"validation": held_out},
        limit=config.run.validation_samples,
        processes=config.data.loader_processes,
        shards=train.shards,
        sizes=config.train,
        total_steps=config.train.total_steps,
        schedule=config.optim.schedule_of(config.train.total_steps),
        fill=(lambda part: load_weights(part, network, source)) if source.is_dir() else None,
        matrices=model.hidden_matrices(),
        check=check,
        num_sums=4,
        blank=blank_rows,
        count=count,
        score=lambda sums, _: scores_of(*sums),
        references=references,
        notes=[describe(config, train, held_out)],
        export=lambda directory: write_export(
            model, train.shards.directory, directory / TRANSFORMERS, read_stored(directory, network)
        ),
        verdict=lambda last: verdict(last["validation"], references[LOSS]),
    )


def blank_rows(arrays: "dict[str, npt.NDArray[Any]]", is_there: "npt.NDArray[np.bool_]") -> None:
    """Take the targets from the rows that are not true."""
    from shoal.data.text.blocks import NO_TARGET

    arrays["labels"][~is_there] = NO_TARGET


def leaks(stage: "Pipeline", example: "Mapping[str, Tensor]") -> bool:
    """Return whether the loss of a second document depends on the first one. A collective.

    Args:
        example: a replica's batch, whose sizes the comparison has.
    """
    import torch

    ids = example["input_ids"]
    length, columns = ids.shape[1], torch.arange(ids.shape[1])
    begin = length // 2
    labels = torch.where(columns < begin, -100, ids)
    positions = torch.where(columns < begin, columns, columns - begin).expand_as(ids).contiguous()
    losses = []
    for first in (1, 2):
        changed = torch.where(columns < begin, first, ids)
        batch = {**example, "input_ids": changed, "position_ids": positions, "labels": labels}
        losses.append(float(stage.evaluate(**batch).loss))
    return abs(losses[0] - losses[1]) > 1e-4 * losses[0]


def keep_sizes(sizes: "PreTrainedConfig", run: "Run") -> None:
    """Keep the model's configuration in the run directory, for exports."""
    if run.directory is not None and run.world.is_main:
        text = sizes.to_json_string(use_diff=False).encode()
        keep_description(run.directory, lambda _: text, MODEL_CONFIG)


# ------------------------------------------------------------------------------------------------- data


def open_text(
    config: LmConfig, sizes: "PreTrainedConfig", *, world: "World | None" = None
) -> "tuple[BlockReader, BlockReader]":
    """Return the readers of the training and the held-out blocks.

    Args:
        world: of the workers that read them; ``None``: one that only counts them.

    Raises:
        UsageError: there is no prepared text, it is too short, or it is of another tokenizer than the model.
    """
    from shoal.data.text.blocks import BlockConfig, BlockReader

    train, held_out = open_shards(config.data, sizes.vocab_size, world=world, end_token_only=True)
    check_end(sizes, train.manifest, text=train.directory, model=required(config.model.source))
    blocks = BlockConfig(
        block_length=config.data.block_length,
        across_documents=config.data.across_documents,
        seed=config.train.seed,
    )
    return BlockReader(train, blocks), BlockReader(held_out, blocks)


def describe(config: LmConfig, train: "BlockReader", held_out: "BlockReader") -> str:
    """Return a line about the data, for the beginning of a run."""
    return (
        f"data: {train.num_examples:,} blocks of {config.data.block_length} tokens an epoch, "
        f"{held_out.num_examples:,} held out"
    )


def check_end(sizes: "PreTrainedConfig", manifest: "Manifest", *, text: Path, model: Path) -> None:
    """Check that the documents of the text end with an end token of the model.

    Raises:
        UsageError: they do not.
    """
    ends = sizes.eos_token_id
    known = ends if isinstance(ends, list | tuple) else [ends]
    if ends is not None and manifest.sep_id not in known:
        raise UsageError(
            f"data.path {text}: documents end with token {manifest.sep_id}, those of the model "
            f"{model} with {', '.join(map(str, known))}: prepare the text with the model's own "
            "tokenizer (shoal prepare text --tokenizer … --end-token …)"
        )


# ------------------------------------------------------------------------------------------------- evaluation

LOSS = "lm_loss"
"""Cross-entropy per target in nats."""


def evaluate(
    model: "nn.Module", batches: Iterable[Mapping[str, "Tensor"]], run: "Run", reader: "BlockReader"
) -> tuple[dict[str, float], int]:
    """Return the scores of held-out blocks, and their number. A collective.

    Args:
        model: a :class:`~shoal.models.causal.CausalLM`, or a wrapper of one.
        batches: this worker's micro-batches.
        reader: has the tokenizer of the text, whose bytes are counted.
    """
    import torch
    from tokenizers import Tokenizer

    from shoal.data.loader import to_device
    from shoal.data.text.blocks import num_bytes, num_targets

    tokenizer = Tokenizer.from_file(str(reader.shards.tokenizer_file))
    own = torch.zeros(5, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for batch in batches:
            _, loss, num_correct = model(**to_device(batch, run.world.device))
            labels = batch["labels"]
            text = num_bytes(tokenizer, labels.numpy(), reader.shards.manifest.sep_id)
            own += torch.tensor([float(loss), float(num_correct), num_targets(batch), text, len(labels)])
    model.train()
    *sums, num_blocks = run.sum(own)
    return scores_of(*sums), int(num_blocks)


def scores_of(loss: float, num_correct: float, num_targets: float, num_bytes: float) -> dict[str, float]:
    """Return the scores of sums over held-out text.

    Args:
        loss: sum of the cross-entropies, in nats.
        num_bytes: UTF-8 bytes of the text of the targets; end tokens have none.

    Example:
        >>> scores_of(20 * math.log(2), 5, 10, 40)["bits_per_byte"]
        0.5
    """
    tokens = token_scores(loss, num_correct, num_targets)
    return {**tokens, "bits_per_byte": loss / math.log(2) / max(num_bytes, 1)}


def token_scores(loss: float, num_correct: float, num_targets: float) -> dict[str, float]:
    """Return the scores of sums over targets that do not need their text, as :func:`scores_of`."""
    mean = loss / max(num_targets, 1)
    return {
        LOSS: mean,
        "perplexity": math.exp(min(mean, 700.0)),  # the exponential of more is no float
        "lm_accuracy": num_correct / max(num_targets, 1),
    }


def reference_loss(reader: "BlockReader") -> float:
    """Return the loss of a model that knows how often each token occurs, and no context."""
    from shoal.data.text.blocks import NO_TARGET
    from shoal.data.text.examples import unigram_entropy

    labels = reader.batch(0, range(min(reader.num_examples, 256)))["labels"]
    return unigram_entropy(labels[labels != NO_TARGET])


def verdict(scores: "Evaluation", reference: float) -> str:
    """Describe the held-out scores in a line."""
    metrics = scores.metrics
    loss = metrics[LOSS]
    return (
        f"held-out loss {loss:.3f} (perplexity {metrics['perplexity']:.1f}, {metrics['bits_per_byte']:.3f} "
        f"bits per byte): {abs(reference - loss):.2f} nats {'below' if loss < reference else 'above'} the "
        f"unigram entropy of its targets ({reference:.3f})"
    )


# ------------------------------------------------------------------------------------------------- export


def write_export(
    model: "CausalLM", text: Path, out: Path, read: "Callable[[str], Tensor] | None" = None
) -> None:
    """Write the model with its tokenizer, whole or not at all; an older export in ``out`` is replaced.

    Args:
        text: the directory of the prepared text, or of its tokenizer and manifest.
        read: returns a weight by its name in transformers; default: as the model has it.
    """
    from tokenizers import Tokenizer

    from shoal.data.manifest import Manifest
    from shoal.models.directory import save

    config = model.weights.config
    positions = getattr(config, "max_position_embeddings", None) or 1 << 20
    manifest = Manifest.load(text)
    tokenizer = Tokenizer.from_file(str(text / manifest.tokenizer.file))
    save(model, out, tokenizer=tokenizer_files(tokenizer, manifest.sep_id, positions), read=read)


def tokenizer_files(tokenizer: "Tokenizer", end_id: int, max_length: int) -> dict[str, bytes]:
    """Return the files by which transformers tokenises as the model was trained: no tokens around a text."""
    from tokenizers import processors

    from shoal.data.text.tokenizer_files import transformers_files

    tokenizer.post_processor = processors.Sequence([])
    return transformers_files(
        tokenizer,
        {"eos": end_id},
        input_names=["input_ids", "attention_mask"],
        max_length=max_length,
    )


class CausalUse(Use):
    """Opens the checkpoints of a recipe, for `shoal predict lm` and `shoal evaluate lm`."""

    @classmethod
    def open_checkpoint(cls, source: Path) -> "tuple[CausalLM, Tokenizer, int]":
        """Return the model of a checkpoint, its tokenizer and its end token."""
        raise NotImplementedError

    @classmethod
    def chat_tokenizer(cls, source: Path) -> "ChatTokenizer | None":
        """Return the tokenizer of a checkpoint with its chat template, if it has one."""
        return None


class use(CausalUse):
    """Opens and exports checkpoints."""

    export_folder = TRANSFORMERS

    @classmethod
    def export(cls, source: Path, out: Path | None, dtype: "torch.dtype") -> Path:
        run = find_run(source, "SOURCE")
        model, step = read_checkpoint(source)
        out = out or run / f"{TRANSFORMERS}-{step}"
        write_export(model.to(dtype), description_in(run), out)
        return out

    @classmethod
    def open_checkpoint(cls, source: Path) -> "tuple[CausalLM, Tokenizer, int]":
        from tokenizers import Tokenizer, processors

        from shoal.data.manifest import Manifest

        run = find_run(source, "--model")
        model, _ = read_checkpoint(source)
        tokenizer = Tokenizer.from_file(str(kept_tokenizer(run)))
        tokenizer.post_processor = processors.Sequence([])  # as the tokenizer of an export
        return model, tokenizer, Manifest.load(description_in(run)).sep_id


def read_checkpoint(source: Path) -> "tuple[CausalLM, int]":
    """Return the model of a checkpoint, or of the newest one of a run, and its step."""
    from shoal.models.causal import CausalLM, new_causal, read_causal_config
    from shoal.train.checkpoint import load_model

    sizes = description_in(find_run(source, "SOURCE")) / MODEL_CONFIG
    model = CausalLM(new_causal(read_causal_config(sizes)))
    return model, load_model(source, model)


# ------------------------------------------------------------------------------------------------- dry run


def check(config: LmConfig, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run."""
    batch = config.parallel.divide(config.train, num_workers, unit=config.unit)
    manifest = read_manifest(config.data, end_token_only=True)
    sizes = read_sizes(config, source_of(config.model))
    manifest.check_vocabulary(sizes.vocab_size)
    check_end(sizes, manifest, text=required(config.data.path), model=required(config.model.source))
    if not dry_run:
        return []
    full = sample(replace(config, data=replace(config.data, path=None)))
    num_tokens = sum(shard.num_tokens + shard.num_documents for shard in manifest.shards("train"))
    tokens = config.train.total_steps * batch.global_batch_size * config.data.block_length
    return [
        *settings_lines(config),
        f"batch        {batch}",
        f"run          {config.train.total_steps:,} steps, {tokens:,} tokens in blocks of "
        f"{config.data.block_length}, about {tokens / max(num_tokens, 1):,.1f} times the {num_tokens:,} "
        f"tokens of {config.data.path}",
        f"parameters   {full.num_parameters:,}",
        dry_run.memory_line(config, (full, batch)),
    ]


# ------------------------------------------------------------------------------------------------- sample


def sample(config: LmConfig) -> Sample:
    """Return two blocks and the model."""
    import torch

    from shoal.models.causal import new_causal

    sizes = read_sizes(replace(config, data=replace(config.data, path=None)), source_of(config.model))
    with torch.device("meta"):
        weights = new_causal(sizes)
    return sample_of(
        weights,
        config.data.block_length,
        recomputes=config.model.activation_checkpointing,
        z_loss=config.optim.z_loss,
    )


def sample_of(weights: "PreTrainedModel", length: int, *, recomputes: bool, z_loss: float = 0.0) -> Sample:
    """Return two blocks of ``length`` tokens and a model on meta."""
    from shoal.models.causal import CausalLM
    from shoal.models.layers import blocks_of

    relayed, num_layers = 2.0 * length * weights.config.hidden_size, weights.config.num_hidden_layers
    return Sample(
        model=CausalLM(weights, z_loss=z_loss),
        inputs={"input_ids": token_ids(2, length), "labels": token_ids(2, length)},
        loss=_loss,
        num_samples=2,
        sequence_length=length,
        relay_bytes=relayed,
        recompute=_recompute if recomputes else None,
        num_recomputed=num_layers,
        blocks=blocks_of(weights),
        divide=_keep_part,
        summed_bytes=4 * num_layers * relayed,
    )


def _loss(model: "CausalLM", inputs: "Mapping[str, Tensor]") -> "Tensor":
    import torch

    # transformers looks at the values of position_ids, which meta tensors do not have, unless a mask is given
    ids = inputs["input_ids"]
    mask = torch.ones(len(ids), 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)
    logits = model.weights(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return model.losses(logits, inputs["labels"])[0]


def _recompute(model: "CausalLM") -> None:
    model.recompute_activations()


def _keep_part(model: "CausalLM", num_workers: int) -> None:
    from shoal.models.tensor_plan import keep_part

    keep_part(model.weights, num_workers)


def trial(config: LmConfig, folder: Path) -> LmConfig:
    """Return the settings of a short run, on synthetic text where none is named."""
    if config.data.path is not None:
        return config
    write_synthetic_text(folder, read_sizes(config, source_of(config.model)).vocab_size)
    return replace(config, data=replace(config.data, path=folder))


if __name__ == "__main__":
    run_script("lm")
