"""Finetunes causal language models on conversations, or on prompts and responses: all weights, or adapters.

    python -m shoal.recipes.lm_finetune --model models/qwen2 --data chats.jsonl
    torchrun --nproc-per-node 8 -m shoal.recipes.lm_finetune --preset lora --model llama --data chats.jsonl
    shoal finetune lm --preset tiny --model runs/lm --data pairs.jsonl --data.eval held_out.jsonl --workers 2

The loss is the cross-entropy of the tokens of responses, summed and divided by those of the whole global
batch. Conversations are packed into rows, in which they do not see each other. With ``--lora.rank`` the
weights stay as they are, and low-rank adapters are trained.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

import json
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.data.bad_entries import BadEntries, BadEntriesConfig
from shoal.decide.batch import BatchPlan, StagesConfig
from shoal.env.worker import WorkerEnv
from shoal.errors import UsageError, require_positive
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import DryRun, Sample, finetuning, lm, run_script
from shoal.recipes.finetuning import FinetuneConfig, FinetuneRunConfig, SourceConfig
from shoal.recipes.model_source import ADAPTER, MODEL_CONFIG, TRANSFORMERS, find_run
from shoal.train.config import load_toml, required
from shoal.train.run_dir import CONFIG_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from shoal.data.text.conversations import ChatTokenizer, ConversationReader, Conversations
    from shoal.models.causal import CausalLM
    from shoal.models.lora import Adapters
    from shoal.recipes.divided import Divided
    from shoal.record import Evaluation
    from shoal.train.run import Run

# ------------------------------------------------------------------------------------------------- config

PRESETS = ("full", "lora", "tiny")


@dataclass(frozen=True, kw_only=True)
class CausalSourceConfig(SourceConfig):
    """The model to start from, and how it is computed."""

    attention: lm.Attention = "shoal"
    """Implementation of attention: ``shoal`` is transformers' ``sdpa``, with own kernels on GPUs that have
    them; the flash kernels need their package."""


@dataclass(frozen=True, kw_only=True)
class ConversationsConfig(BadEntriesConfig):
    """The files of conversations, and how they become rows."""

    path: Path | None = None
    """Training conversations, .jsonl, .json or .parquet."""
    eval: tuple[Path, ...] = ()
    """Files to evaluate on, each separately; default: none."""
    max_seq_length: int = 1_024
    """Tokens of a row, and most tokens of a conversation, which loses its end beyond."""
    packed: bool = True
    """Let several conversations share a row, without seeing each other; else each row has one."""
    prompt: str = "prompt"
    """Field of a prompt, in rows without messages."""
    response: str | None = None
    """Field of a response; default: completion, response or answer."""
    as_chat: bool = False
    """Make messages of user and assistant of prompts and responses, for the chat template."""
    chat_template: Path | None = None
    """File with a chat template in Jinja, instead of the tokenizer's own; the export has it."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters."""

    rank: int = 0
    """Rank of the adapters, which alone are trained; 0: all weights are trained."""
    alpha: float = 16.0
    """Adapters are multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout of the inputs of adapters."""
    targets: tuple[str, ...] = ()
    """Ends of the names of layers, such as q_proj v_proj; default: all linear layers but the head."""
    merge: bool = True
    """Also write the model with the adapters merged into its weights."""

    def __post_init__(self) -> None:
        require_positive("lora", self, "rank", least=0)
        require_positive("lora", self, "dropout", least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class RowsRunConfig(FinetuneRunConfig):
    """Run directory, and frequencies of evaluations and checkpoints."""

    evaluation_batch_size: int = 1
    """Rows per worker and evaluation batch."""


@dataclass(frozen=True, kw_only=True)
class LmFinetuneConfig(FinetuneConfig):
    """All settings of finetuning a causal model; presets are TOML files in ``presets/lm_finetune``."""

    unit: ClassVar[str] = "rows"
    recipe: ClassVar[str] = "lm_finetune"

    model: CausalSourceConfig = field(default_factory=CausalSourceConfig)
    data: ConversationsConfig = field(default_factory=ConversationsConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: StagesConfig = field(default_factory=StagesConfig)
    run: RowsRunConfig = field(default_factory=RowsRunConfig)

    @property
    def scores(self) -> dict[str, tuple[str, ...]]:
        """The names of the scores in the record, by split."""
        return {path.stem: (lm.LOSS, "perplexity", "lm_accuracy") for path in self.data.eval}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("data", self.data, "max_seq_length")
        names = [path.stem for path in self.data.eval]
        if len(set(names)) != len(names):
            raise UsageError(f"data.eval has two files of the same name ({', '.join(names)}); rename one")
        self.parallel.check(self)
        lm.check_attention(self.model.attention, self.parallel)
        if self.parallel.splits and (self.lora.rank or not self.data.packed):
            given = f"lora.rank {self.lora.rank}" if self.lora.rank else "data.packed False"
            raise UsageError(
                f"{given} does not go with a model in stages or shards, which train all weights on rows of "
                "one length; leave it out, or leave parallel.pipeline and parallel.shard out"
            )
        if self.lora.rank and self.servers.option:
            raise UsageError(
                f"lora.rank {self.lora.rank} with {self.servers.option}: servers update all weights of a "
                "model; leave one of them out"
            )

    def batch(self, num_workers: int) -> BatchPlan:
        """Return the division of a global batch over this number of workers, in this layout."""
        return self.parallel.divide(self.train, num_workers, unit=self.unit)


IMMUTABLE = (
    *finetuning.IMMUTABLE,
    *(
        f"data.{name}"
        for name in ("max_seq_length", "packed", "prompt", "response", "as_chat", "chat_template")
    ),
    *(f"lora.{name}" for name in ("rank", "alpha", "dropout", "targets")),
)


def main(config: LmFinetuneConfig, worker: WorkerEnv | None = None) -> int:
    """Train until the last step or a signal, evaluate and write the model; return the exit code."""
    from shoal.data.sources import ReaderSource
    from shoal.data.text.blocks import num_targets
    from shoal.models.causal import CausalLM
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run

    finetuning.require_paths(config, config.data, "conversations", evaluates=False)
    with Run.open(config=config, recipe="lm_finetune", immutable=IMMUTABLE, worker=worker) as run:
        # ----------------------------------------------------------------------------------------- data
        source = finetuning.open_source(config.model, run)
        sizes = read_sizes(config, source)
        tokenizer = read_tokenizer(config, source)
        readers = [make_rows(file, config, sizes) for file in read_files(config, tokenizer)]
        training, *held_out = readers
        plan = finetuning.make_plan(
            config, num_sequences=training.num_examples, num_workers=run.world.num_workers
        )

        # ----------------------------------------------------------------------------------------- model
        weights, adapters = open_model(config, source, sizes, run)
        model = CausalLM(weights).train()
        if config.model.activation_checkpointing:
            model.recompute_activations()
        ddp = run.data_parallel(model, average=config.optim.clip == "global")
        if config.data.packed:
            with run.precision.autocast():
                model.check()
        run.compile(model, dynamic=not config.data.packed)
        optimizer = build_optimizer(model.named_parameters(), config.optim)
        run.keep(model=model if adapters is None else adapters.trained(), optimizer=optimizer)

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> None:
            evaluate(ddp, held_out, config, run)

        # ----------------------------------------------------------------------------------------- loop
        steps = run.steps(
            ReaderSource(reader=training),
            plan.batch,
            until=plan.total_steps,
            targets=num_targets,
            notes=[describe(reader) for reader in readers],
        )
        for step in steps:
            with step:
                set_learning_rate(optimizer, learning_rate(plan.schedule, step.number - 1))
                for batch in step:
                    total, loss, num_correct = ddp(**batch)
                    step.backward(total / step.num_targets)
                    step.add(step.num_targets, lm_loss=loss, lm_accuracy=num_correct)
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if run.due(config.run.validation_frequency, evaluation=True) and held_out:
                run.workers.together(score)
        if held_out and run.lacks_scores():
            run.workers.together(score)

        # ----------------------------------------------------------------------------------------- export
        return run.finish(
            lambda directory: write_exports(directory, model, adapters, tokenizer, merge=config.lora.merge),
            lambda last: verdict(last, required(run.directory), config),
        )


# ------------------------------------------------------------------------------------------------- model


def read_sizes(config: LmFinetuneConfig, source: Path) -> "PreTrainedConfig":
    """Return the model's configuration with the dropout of the settings.

    Raises:
        UsageError: it is no causal language model, or has fewer positions than a row.
    """
    from shoal.models.causal import read_causal_config, set_dropout
    from shoal.models.tensor_plan import check_tensor

    sizes = read_causal_config(source)
    lm.check_length(config.data.max_seq_length, sizes, source, "data.max_seq_length")
    if config.model.dropout is not None:
        set_dropout(sizes, config.model.dropout)
    check_tensor(sizes, config.parallel.tensor)
    return sizes


def open_model(
    config: LmFinetuneConfig, source: Path, sizes: "PreTrainedConfig", run: "Run"
) -> "tuple[PreTrainedModel, Adapters | None]":
    """Return the model, with adapters in it where the settings ask for them, and the adapters."""
    import torch

    start = source / MODEL_CONFIG if config.model.from_scratch else source
    weights = lm.open_weights(start, sizes, config.model.attention, run)
    torch.manual_seed(run.seed)
    return weights, add_adapters(weights, config.lora)


def add_adapters(weights: "PreTrainedModel", lora: LoraConfig) -> "Adapters | None":
    """Put adapters into a model, in place; ``None``: the settings ask for none."""
    from shoal.models.lora import Adapters

    options = {name: getattr(lora, name) for name in ("rank", "alpha", "dropout", "targets")}
    return Adapters(weights, **options) if lora.rank else None


def divide(config: LmFinetuneConfig, run: "Run") -> "Divided":
    """Return the run of a model that is divided over workers; it starts on meta."""
    import torch

    from shoal.data.text.blocks import num_targets
    from shoal.models.causal import CausalLM, MeanLoss, new_causal
    from shoal.models.layers import blocks_of
    from shoal.recipes.divided import Divided
    from shoal.recipes.stages import load_weights, read_stored

    finetuning.require_paths(config, config.data, "conversations", evaluates=False)
    source = finetuning.open_source(config.model, run)
    sizes, tokenizer = read_sizes(config, source), read_tokenizer(config, source)
    readers = [make_rows(file, config, sizes) for file in read_files(config, tokenizer)]
    training, *held_out = readers
    plan = finetuning.make_plan(
        config, num_sequences=training.num_examples, num_workers=run.world.num_workers
    )
    with torch.device("meta"):
        model = CausalLM(new_causal(sizes, config.model.attention))
    if config.model.activation_checkpointing:
        model.recompute_activations()
    network = MeanLoss(model)
    return Divided(
        network=network,
        blocks=blocks_of(model.weights),
        train=training,
        held_out={reader.data.path.stem: reader for reader in held_out},
        num_samples={reader.data.path.stem: len(reader.data) for reader in held_out},
        sizes=config.train,
        total_steps=plan.total_steps,
        schedule=plan.schedule,
        fill=None if config.model.from_scratch else lambda part: load_weights(part, network, source),
        check=lambda stage, example: model.check(lambda: lm.leaks(stage, example)),
        num_sums=3,
        blank=lm.blank_rows,
        count=lambda arrays: [num_targets(arrays)],
        score=lambda sums, _: lm.token_scores(*sums),
        notes=[describe(reader) for reader in readers],
        export=lambda directory: write_exports(
            directory, model, None, tokenizer, merge=False, read=read_stored(directory, network)
        ),
        verdict=lambda last: verdict(last, required(run.directory), config),
    )


# ------------------------------------------------------------------------------------------------- data


def read_tokenizer(config: LmFinetuneConfig, source: Path) -> "ChatTokenizer":
    """Return the tokenizer of the model, with the chat template of the settings."""
    from shoal.atomic_io import read_text
    from shoal.data.text.conversations import ChatTokenizer

    file = config.data.chat_template
    return ChatTokenizer(source, None if file is None else read_text(file))


def read_files(config: LmFinetuneConfig, tokenizer: "ChatTokenizer") -> "list[Conversations]":
    """Return the training conversations, then those of each evaluation file, tokenised.

    Raises:
        UsageError: a file cannot be read, or too much of it cannot be used.
    """
    from shoal.data.text.conversations import read_conversations, tokenize

    data = config.data
    files = []
    for path in (required(data.path), *data.eval):
        bad: BadEntries = data.bad_entries(path, "--data.")
        conversations = read_conversations(
            path, bad, prompt=data.prompt, response=data.response, as_chat=data.as_chat
        )
        files.append(tokenize(path, conversations, tokenizer, data.max_seq_length, bad))
    return files


def make_rows(
    file: "Conversations", config: LmFinetuneConfig, sizes: "PreTrainedConfig"
) -> "ConversationReader":
    """Return the rows of a file.

    Raises:
        UsageError: it has tokens that the model does not have.
    """
    from shoal.data.text.conversations import ConversationReader

    if (most := int(file.tokens.max())) >= sizes.vocab_size:
        raise UsageError(
            f"{file.path}: the tokenizer gives token {most}, and the model of {config.model.path} has "
            f"{sizes.vocab_size}: they do not belong together"
        )
    data = config.data
    return ConversationReader(
        file, length=data.max_seq_length, packed=data.packed, seed=config.train.seed, fill_id=0
    )


def describe(reader: "ConversationReader") -> str:
    """Return a line about a file, for a dry run and the beginning of a run."""
    full = len(reader.data.tokens) / (reader.num_examples * reader.length)
    rows = f", {reader.num_examples:,} rows, {full:.0%} full" if reader.packed else ""
    return f"{reader.data.describe(reader.length)}{rows}"


# ------------------------------------------------------------------------------------------------- evaluation


def evaluate(
    model: "nn.Module", readers: "list[ConversationReader]", config: LmFinetuneConfig, run: "Run"
) -> None:
    """Score each file with all workers, and record its scores. A collective."""
    import torch

    from shoal.data.loader import held_out_batches, to_device
    from shoal.data.text.blocks import num_targets

    for reader in readers:
        own = torch.zeros(3, dtype=torch.float64)
        batches = held_out_batches(
            reader,
            micro_batch_size=config.run.evaluation_batch_size,
            rank=run.world.rank,
            num_workers=run.world.num_workers,
        )
        model.eval()
        with torch.no_grad(), run.precision.autocast():
            for batch in batches:
                _, loss, num_correct = model(**to_device(batch, run.world.device))
                own += torch.tensor([float(loss), float(num_correct), num_targets(batch)])
        model.train()
        scores = lm.token_scores(*run.sum(own))
        run.evaluation(reader.data.path.stem, scores, num_samples=len(reader.data))


def verdict(last: "Mapping[str, Evaluation]", directory: Path, config: LmFinetuneConfig) -> str:
    """Describe the scores, and where the model is, in a line each."""
    scores = [
        f"{split}: loss {row.metrics[lm.LOSS]:.3f}, perplexity {row.metrics['perplexity']:.2f}, accuracy "
        f"{row.metrics['lm_accuracy']:.3f}"
        for split, row in last.items()
    ]
    places = [] if config.lora.rank == 0 else [f"the adapters are in {directory / ADAPTER}"]
    if config.lora.merge or not config.lora.rank:
        places.append(f"the finetuned model is in {directory / TRANSFORMERS}")
    return "\n".join([*scores, *places])


# ------------------------------------------------------------------------------------------------- export


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A model that is written as it is."""

    weights: "PreTrainedModel"


def write_exports(
    directory: Path,
    model: "CausalLM",
    adapters: "Adapters | None",
    tokenizer: "ChatTokenizer",
    *,
    merge: bool,
    read: "Callable[[str], Tensor] | None" = None,
) -> None:
    """Write the adapters, if there are any, and the whole model with its tokenizer.

    The model ends a text at the ends of responses, too.

    Args:
        read: returns a weight by its name in transformers; default: as the model has it.
    """
    from shoal.models.causal import end_ids
    from shoal.models.directory import save

    files, ends = tokenizer.files(), end_ids(model.weights)
    if more := sorted(tokenizer.ends.difference(ends)):
        model.weights.generation_config.eos_token_id = [*ends, *more]
    if adapters is None:
        save(model, directory / TRANSFORMERS, tokenizer=files, read=read)
        return
    save(adapters, directory / ADAPTER, tokenizer=files)
    if merge:
        save(ExportedModel(weights=adapters.merge()), directory / TRANSFORMERS, tokenizer=files)


class use(lm.CausalUse):
    """Opens checkpoints with their adapters merged."""

    @classmethod
    def open_checkpoint(cls, source: Path) -> "tuple[CausalLM, Tokenizer, int]":
        from tokenizers import Tokenizer

        from shoal.models.causal import CausalLM, end_ids

        weights, chat = read_checkpoint(source)
        tokenizer = Tokenizer.from_file(str(chat.directory / "tokenizer.json"))
        return CausalLM(weights), tokenizer, end_ids(weights)[0]

    @classmethod
    def chat_tokenizer(cls, source: Path) -> "ChatTokenizer":
        return tokenizer_of(source)


def read_checkpoint(source: Path) -> "tuple[PreTrainedModel, ChatTokenizer]":
    """Return the model of a checkpoint, with its adapters merged, and its tokenizer.

    The model ends a text at the ends of messages, too.
    """
    from shoal.data.text.conversations import Conversation
    from shoal.models.causal import CausalLM, end_ids, new_causal, open_causal, read_causal_config
    from shoal.train.checkpoint import load_model

    tree = load_toml(find_run(source, "--model") / CONFIG_FILE)
    lora, tokenizer = LoraConfig(**tree["lora"]), tokenizer_of(source)
    start = tokenizer.directory
    sizes = read_causal_config(start)
    weights = open_causal(start, sizes) if lora.rank else new_causal(sizes)
    adapters = add_adapters(weights, lora)
    load_model(source, CausalLM(weights) if adapters is None else adapters.trained())
    if tokenizer.tokenizer.chat_template is not None:
        turns = tuple({"role": role, "content": "text"} for role in ("user", "assistant"))
        tokenizer.encode(Conversation("", messages=turns))
        weights.generation_config.eos_token_id = [*end_ids(weights), *tokenizer.ends]
    return (weights if adapters is None else adapters.merge()), tokenizer


def tokenizer_of(source: Path) -> "ChatTokenizer":
    """Return the tokenizer of a checkpoint's run, with its chat template."""
    from shoal.atomic_io import read_text
    from shoal.data.text.conversations import ChatTokenizer

    run = find_run(source, "--model")
    tree = load_toml(run / CONFIG_FILE)
    file = tree["data"].get("chat_template")
    start = finetuning.prepare_source(Path(tree["model"]["path"]), run)
    return ChatTokenizer(start, None if file is None else read_text(Path(file)))


# ------------------------------------------------------------------------------------------------- dry run


def check(config: LmFinetuneConfig, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run."""
    finetuning.require_paths(config, config.data, "conversations", evaluates=False)
    path = required(config.model.path)
    plan = finetuning.make_plan(config, num_sequences=config.train.global_batch_size, num_workers=num_workers)
    if finetuning.find_source(path).checkpoint is not None and dry_run is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        source = finetuning.prepare_source(path, Path(folder))
        sizes = read_sizes(config, source)
        tokenizer = read_tokenizer(config, source)
        if dry_run is None:
            return []
        readers = [make_rows(file, config, sizes) for file in read_files(config, tokenizer)]
        counted = sample(replace(config, model=replace(config.model, path=source)))
    return [
        *finetuning.describe(config, readers[0].num_examples, num_workers),
        f"parameters   {counted.num_parameters:,}, of which {counted.num_trainable:,} are trained",
        dry_run.memory_line(config, (counted, plan.batch)),
        *map(describe, readers),
    ]


# ------------------------------------------------------------------------------------------------- sample


def sample(config: LmFinetuneConfig) -> Sample:
    """Return two full rows and the model; where none is named, that of `shoal train lm --preset tiny`."""
    import torch

    from shoal.models.causal import new_causal, read_causal_config

    source = config.model.path or lm.source_of(lm.ModelConfig(source=Path("tiny")))
    with torch.device("meta"):
        weights = new_causal(read_causal_config(source))
        add_adapters(weights, config.lora)
    return lm.sample_of(weights, config.data.max_seq_length, recomputes=config.model.activation_checkpointing)


def trial(config: LmFinetuneConfig, folder: Path) -> LmFinetuneConfig:
    """Return the settings of a short run, on synthetic prompts and responses where no file is named.

    Raises:
        UsageError: no model is named.
    """
    from shoal.data.text.conversations import ChatTokenizer

    if config.data.path is not None:
        return config
    if config.model.path is None:
        raise UsageError("model.path is not set: name the model to time with --model.path")
    source = finetuning.prepare_source(config.model.path, folder)
    words = sorted(ChatTokenizer(source).tokenizer.get_vocab())
    draw, length = random.Random(1), config.data.max_seq_length
    rows = [
        {
            "prompt": " ".join(draw.choices(words, k=max(length // 16, 1))),  # so that a row has responses
            "completion": " ".join(draw.choices(words, k=length)),
        }
        for _ in range(256)
    ]
    path = folder / "training.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return replace(config, data=replace(config.data, path=path))


if __name__ == "__main__":
    run_script("lm_finetune")
