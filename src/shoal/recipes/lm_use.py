"""Uses causal language models: ``shoal evaluate lm`` scores text, and ``shoal predict lm`` continues prompts.

The model is that of a run of ``shoal train lm``, or a transformers directory with its tokenizer.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from shoal.data.text.corpus import Format, find_files
from shoal.errors import UsageError, require_positive
from shoal.recipes import Row, Use, lm, use_of
from shoal.recipes.model_source import ADAPTER, MODEL_CONFIG, TRANSFORMERS, ModelSource, find_model, recipe_of
from shoal.recipes.prepared_text import PreparedTextConfig, read_manifest
from shoal.recipes.using import EvaluateConfig, PredictConfig, check_files
from shoal.train.config import required

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from shoal.data.loader import Batch
    from shoal.data.text.blocks import BlockReader
    from shoal.data.text.conversations import ChatTokenizer, Message
    from shoal.data.text.shards import TextShards
    from shoal.models.causal import CausalLM
    from shoal.train.world import Float32Array

# ------------------------------------------------------------------------------------------------- settings

_BLOCK_LENGTH = 1_024


@dataclass(frozen=True, kw_only=True)
class ScoredTextConfig:
    """The text to score, and how it is cut into blocks."""

    path: Path | None = None
    """Directory that `shoal prepare text` wrote, whose held-out part is scored; default: that of the model's
    run. Files that are named are scored instead."""
    block_length: int | None = None
    """Tokens of a block; default: as in the model's run, else 1,024 or the model's positions, if fewer."""
    across_documents: bool = False
    """Let the documents of a block see each other."""
    format: Format | Literal["auto"] = "auto"
    """Format of the files, as for `shoal prepare text`."""

    def __post_init__(self) -> None:
        require_positive("data", self, "block_length")


@dataclass(frozen=True, kw_only=True)
class LmEvaluateConfig(EvaluateConfig):
    """The model, and the text to score."""

    batch_size: int = 1
    """Blocks per worker and batch; independent of the number of workers, as are the scores."""
    data: ScoredTextConfig = field(default_factory=ScoredTextConfig)


@dataclass(frozen=True, kw_only=True)
class LmPredictConfig(PredictConfig):
    """The model, and how prompts are continued."""

    batch_size: int = 1
    """Prompts per worker and batch, padded on the left; independent of the number of workers."""
    text: str | None = None
    """One prompt, instead of files."""
    chat: bool = False
    """Ask by the chat template of the model's tokenizer, in which each prompt is a message of a user."""
    max_new_tokens: int = 64
    """Most tokens of a continuation."""
    temperature: float = 0.0
    """0: the likeliest token each time; else tokens are drawn, from logits that are divided by it."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    seed: int = 0
    """Of the draws, which depend on the number of the prompt and not on the workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("", self, "max_new_tokens")
        require_positive("", self, "temperature", least=0)
        require_positive("", self, "top_p", least=0, most=1)
        require_positive("", self, "seed", least=0, below=1 << 31)

    @property
    def has_one_input(self) -> bool:
        return self.text is not None


# ------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True, kw_only=True)
class ScoredText:
    """Text to score: the blocks, and a name for the scores."""

    name: str
    reader: "BlockReader"
    remarks: list[str]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt with the number of its line, or the id of its row."""

    id: int | str
    text: str
    messages: "tuple[Message, ...]" = ()
    """A conversation to be answered, of which ``text`` is the last message."""


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file: ``.txt`` with one in each line, or ``.jsonl`` with prompts or messages.

    Raises:
        UsageError: the file has another name, cannot be read, or a line has no prompt.
    """
    from shoal.data.bad_entries import BadEntries
    from shoal.data.text.fill_mask import read_lines
    from shoal.data.text.rows import json_rows

    if path.suffix == ".txt":
        return [Prompt(id=number, text=line) for number, line in enumerate(read_lines(path), start=1)]
    if path.suffix != ".jsonl":
        raise UsageError(
            f"{path}: is known by the end of its name: .txt, with a prompt in each line, or .jsonl, with "
            'objects {"prompt": …}'
        )
    prompts = []
    for number, location, row in json_rows(path, BadEntries(str(path), "refuse")):
        text, own, messages = row.get("prompt"), row.get("id", number), _messages(row.get("messages"))
        if messages:
            text = messages[-1]["content"]
        if not isinstance(text, str):
            raise UsageError(
                f"{path}, {location}: holds no string 'prompt', but {', '.join(row) or 'nothing'}; "
                "messages are a list of objects with role and content, of which one is the user's"
            )
        name = own if isinstance(own, int | str) else number
        prompts.append(Prompt(id=name, text=text, messages=messages))
    if not prompts:
        raise UsageError(f"{path}: holds no prompt")
    return prompts


def _messages(value: object) -> "tuple[Message, ...]":
    """Return the messages up to the last one of the user, the rest being an answer; empty: there are none."""
    messages = value if isinstance(value, list) else []
    texts = [each.get(key) for each in messages if isinstance(each, dict) for key in ("role", "content")]
    if len(texts) != 2 * len(messages) or not all(isinstance(text, str) for text in texts):
        return ()
    last = max((number for number, each in enumerate(messages, 1) if each["role"] == "user"), default=0)
    return tuple(messages[:last])


def refuse_adapters(path: Path) -> None:
    """Raise a :class:`UsageError` where ``path`` has adapters without the model that they belong to."""
    for folder in (path, path / ADAPTER):
        if (folder / "adapter_config.json").is_file() and not (path / TRANSFORMERS / MODEL_CONFIG).is_file():
            raise UsageError(
                f"--model {path} has adapters alone, since the finetuning had --lora.no-merge: merge them "
                f"with peft, PeftModel.from_pretrained(MODEL, {str(folder)!r}).merge_and_unload()"
                ".save_pretrained(OUT), copy the tokenizer's files beside it, and name OUT"
            )


# ------------------------------------------------------------------------------------------------- use


def use_of_run(source: ModelSource) -> type[lm.CausalUse]:
    """Return how the checkpoints of a run are opened.

    Raises:
        UsageError: it trains no causal language model.
    """
    use = use_of(recipe := recipe_of(required(source.run)))
    if use is None or not issubclass(use, lm.CausalUse):
        raise UsageError(
            f"--model {source.path} is of a run of {recipe}, and not of `shoal train lm` or `shoal "
            "finetune lm`"
        )
    return use


class use(Use):
    """Scores text and continues prompts."""

    Predict, Evaluate = LmPredictConfig, LmEvaluateConfig
    one_input = "--text"

    @classmethod
    def find(cls, path: Path) -> ModelSource:
        refuse_adapters(path)
        source = find_model(path)
        if source.checkpoint is not None:
            use_of_run(source)
        return source

    def read_model(self) -> None:
        model, self.tokenizer, self.end_id = read_causal(self.find(self.settings.model))
        self.model = model.to(self.world.device).eval()

    @property
    def positions(self) -> int | None:
        """Return the most tokens that the model reads; ``None``: it has no limit."""
        return getattr(self.model.weights.config, "max_position_embeddings", None)

    # --------------------------------------------------------------------------------------------- evaluate

    def check_evaluation(self, inputs: tuple[Path, ...]) -> list[str]:
        check_files(inputs)
        if inputs:
            if len({path.name for path in inputs}) < len(inputs):
                raise UsageError("two files have the same name, as their scores would: rename one")
            return [f"files        {len(inputs):,}"]
        if self.settings.data.path is None:
            raise UsageError("there is no text to score: name files, or prepared text with --data.path")
        manifest = read_manifest(PreparedTextConfig(path=self.settings.data.path), end_token_only=True)
        num_tokens = sum(shard.num_tokens for shard in manifest.shards("validation"))
        return [f"text         {num_tokens:,} held-out tokens of {self.settings.data.path}"]

    def labelled(self, inputs: tuple[Path, ...]) -> Iterator[ScoredText]:
        from shoal.data.text.prepare import PrepareConfig, described, prepare_text
        from shoal.data.text.shards import TextShards

        if not self.settings.data.across_documents:
            with self.precision.autocast():
                self.model.check()
        if not inputs:
            path = required(self.settings.data.path)
            yield self._blocks(path, TextShards(path, "validation"), [])
        for path in inputs:
            with TemporaryDirectory(prefix="shoal-text-") as folder:
                tokenizer = Path(folder) / "model.json"
                self.tokenizer.save(str(tokenizer))
                config = PrepareConfig(
                    sources=(str(path),),
                    out=Path(folder) / "text",
                    format=self.settings.data.format,
                    tokenizer=str(tokenizer),
                    end_token=self.tokenizer.id_to_token(self.end_id),
                    validation=0,
                    processes=1,
                )
                prepare_text(config, progress=False)
                remarks = described(find_files(config.sources, config.format))
                yield self._blocks(path, TextShards(config.out, "train"), remarks)

    def _blocks(self, path: Path, shards: "TextShards", remarks: list[str]) -> ScoredText:
        """Return the blocks of prepared text with all of its tokens.

        Raises:
            UsageError: it is of another tokenizer than the model, or blocks are too long for the model.
        """
        from tokenizers import Tokenizer

        from shoal.data.text.blocks import BlockConfig, BlockReader

        data, sizes, model = self.settings.data, self.model.weights.config, self.settings.model
        length = data.block_length or min(_BLOCK_LENGTH, self.positions or _BLOCK_LENGTH)
        lm.check_length(length, sizes, model)
        shards.manifest.check_vocabulary(sizes.vocab_size)
        lm.check_end(sizes, shards.manifest, text=path, model=model)
        theirs = Tokenizer.from_file(str(shards.tokenizer_file)).get_vocab()
        if not theirs.items() <= self.tokenizer.get_vocab().items():
            raise UsageError(
                f"{path}: was prepared with another tokenizer than that of {model}, which gives tokens other "
                "numbers; name files of text, or prepare it with --tokenizer of the model"
            )
        blocks = BlockConfig(block_length=length, across_documents=data.across_documents, every_token=True)
        return ScoredText(name=path.name, reader=BlockReader(shards, blocks), remarks=remarks)

    def remarks(self, data: "ScoredText | list[Prompt]") -> list[str]:
        return data.remarks if isinstance(data, ScoredText) else []

    def score(self, data: ScoredText) -> str | None:
        sums = self.sums(data.reader)
        if sums is None:
            return None
        from shoal.atomic_io import write_json

        loss, num_correct, num_targets, num_bytes = sums.astype("float64").sum(axis=0).tolist()
        scores = lm.scores_of(loss, num_correct, num_targets, num_bytes)
        counts = {"targets": int(num_targets), "bytes": int(num_bytes), "precision": self.precision.name}
        if self.settings.out is not None:
            write_json(self.settings.out / f"scores-{data.name}.json", {**scores, **counts})
        return (
            f"{data.name}: loss {scores[lm.LOSS]:.4f}, perplexity {scores['perplexity']:.2f}, "
            f"{scores['bits_per_byte']:.4f} bits per byte, accuracy {scores['lm_accuracy']:.4f} "
            f"({counts['targets']:,} targets, {counts['bytes']:,} bytes, {counts['precision']})"
        )

    def sums(self, reader: "BlockReader") -> "Float32Array | None":
        """Return loss, right tokens, targets and bytes of micro-batches ``[N, 4]``, on the first worker."""
        import numpy as np
        import torch

        from shoal.data.loader import held_out_batches, to_device
        from shoal.data.text.blocks import num_bytes, num_targets
        from shoal.train.world import gather_rows, infer

        size, rank, num_workers = self.settings.batch_size, self.world.rank, self.world.num_workers

        def sums_of(batch: "Batch") -> "Tensor":
            inputs = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
            with self.precision.autocast():
                _, loss, num_correct = self.model(**to_device(inputs, self.world.device))
            text = num_bytes(self.tokenizer, batch["labels"].numpy(), self.end_id)
            return torch.tensor([[float(loss), float(num_correct), num_targets(batch), text]])

        batches = held_out_batches(
            reader, micro_batch_size=size, rank=rank, num_workers=num_workers, dealt=True
        )
        own = list(infer(sums_of, batches, self.world.device))
        numbers = np.arange(-(-reader.num_examples // size))
        rows = [numbers[worker::num_workers] for worker in range(num_workers)]
        return gather_rows(self.world, torch.cat(own) if own else torch.empty(0, 4), rows)

    # --------------------------------------------------------------------------------------------- predict

    def read(self, inputs: tuple[Path, ...]) -> list[list[Prompt]]:
        if (text := self.settings.text) is not None:
            return [[Prompt(id=1, text=text)]]
        return [read_prompts(path) for path in inputs]

    def describe(self, data: list[Prompt]) -> str:
        return f"prompts      {len(data):,}"

    def token_ids(self, data: list[Prompt]) -> list[list[int]]:
        """Return the tokens of prompts, with those that the tokenizer puts around texts.

        Raises:
            UsageError: one has none, or leaves too few positions of the model for its continuation.
        """
        is_chat = [self.settings.chat or bool(each.messages) for each in data]
        chat = self._chat() if any(is_chat) else None
        prompts = [
            self.tokenizer.encode(each.text).ids
            if chat is None or not asks
            else chat.prompt(each.messages or ({"role": "user", "content": each.text},))
            for each, asks in zip(data, is_chat, strict=True)
        ]
        room = (self.positions or 1 << 31) - self.settings.max_new_tokens
        for prompt, ids in zip(data, prompts, strict=True):
            if not 0 < len(ids) <= room:
                raise UsageError(
                    f"prompt {prompt.id}, {prompt.text[:60]!r}, has {len(ids)} tokens, and must have from 1 "
                    f"to {room}: the model's positions less --max-new-tokens {self.settings.max_new_tokens}"
                )
        return prompts

    def _chat(self) -> "ChatTokenizer":
        from shoal.data.text.conversations import ChatTokenizer
        from shoal.models.directory import resolve

        source = self.find(self.settings.model)
        if source.checkpoint is not None and (chat := use_of_run(source).chat_tokenizer(source.checkpoint)):
            return chat
        if source.directory is None:
            raise UsageError(f"--chat: --model {source.path} has no chat template; finetune it on messages")
        return ChatTokenizer(resolve(source.directory))

    def outputs(self, data: list[Prompt]) -> "Float32Array | None":
        """Return the tokens of each continuation, ``[prompts, max_new_tokens]``; the end token fills up."""
        import numpy as np
        import torch

        from shoal.decide.order import micro_batches
        from shoal.models.causal import generate
        from shoal.models.directory import quiet_transformers
        from shoal.train.world import gather_rows, infer

        settings, prompts, world = self.settings, self.token_ids(data), self.world

        def continued(cut: range) -> "Tensor":
            with self.precision.autocast():
                return generate(
                    self.model.weights,
                    [prompts[number] for number in cut],
                    end_id=self.end_id,
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    seeds=[(settings.seed << 32) + number for number in cut],
                )

        cuts = micro_batches(range(len(prompts)), settings.batch_size)
        with quiet_transformers():
            own = list(infer(continued, cuts[world.rank :: world.num_workers], world.device))
        rows = [
            np.array([number for cut in cuts[worker :: world.num_workers] for number in cut], dtype=np.int64)
            for worker in range(world.num_workers)
        ]
        empty = torch.empty(0, settings.max_new_tokens)  # ids below 2^24 are exact
        return gather_rows(world, torch.cat([empty, *own]), rows)

    def rows(self, data: list[Prompt], outputs: "Float32Array") -> Iterator[Row]:
        from shoal.models.causal import end_ids

        ends = end_ids(self.model.weights, self.end_id)
        for prompt, before, row in zip(data, self.token_ids(data), outputs, strict=True):
            ids = [int(token) for token in row]
            length = next((at for at, token in enumerate(ids) if token in ends), len(ids))
            text = continuation(self.tokenizer, before, ids[:length])
            ended = "end token" if length < len(ids) else "max new tokens"
            yield {"id": prompt.id, "prompt": prompt.text, "text": text, "tokens": length, "ended": ended}


def continuation(tokenizer: "Tokenizer", before: list[int], ids: list[int]) -> str:
    """Return the text of tokens behind others: a blank between the two belongs to it."""
    prompt, whole = tokenizer.decode(before), tokenizer.decode([*before, *ids])
    return whole.removeprefix(prompt) if whole.startswith(prompt) else tokenizer.decode(ids)


def read_causal(source: ModelSource) -> "tuple[CausalLM, Tokenizer, int]":
    """Return a model, its tokenizer and its end token.

    Raises:
        UsageError: it is no causal language model, has no tokenizer.json, or names no end token.
        ShoalError: its files are damaged.
    """
    if source.checkpoint is not None:
        return use_of_run(source).open_checkpoint(source.checkpoint)

    from tokenizers import Tokenizer

    from shoal.models.causal import CausalLM, end_ids, open_causal
    from shoal.models.directory import resolve

    directory = resolve(required(source.directory))
    model, file = CausalLM(open_causal(directory)), directory / "tokenizer.json"
    if not file.is_file():
        raise UsageError(
            f"{directory} holds no tokenizer.json: write it there by AutoTokenizer's save_pretrained"
        )
    ends = end_ids(model.weights)
    if not ends:
        raise UsageError(f"{directory / MODEL_CONFIG} names no eos_token_id, which ends a document: set it")
    return model, Tokenizer.from_file(str(file)), ends[0]
