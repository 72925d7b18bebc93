"""Opens prepared text and initial weights for the recipes that pretrain; keeps and exports tokenizers."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from shoal.errors import UsageError
from shoal.models.text_config import EncoderConfig, input_names, is_t5, num_positions
from shoal.recipes.shard_cache import CachedDataConfig
from shoal.train.config import REQUIRED, required

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

    from shoal.data.manifest import Manifest
    from shoal.data.text.shards import TextShards
    from shoal.models.directory import HasWeights
    from shoal.train.run import Run
    from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class PreparedTextConfig(CachedDataConfig):
    """The text to train on, and how it is read."""

    path: Annotated[Path | None, Parameter(group=REQUIRED)] = None
    """Directory that `shoal prepare text` wrote, or s3://, gs:// or https:// of one, with a cache."""
    verify: Literal["sizes", "checksums"] = "checksums"
    """Compare only file sizes at the start, or read every byte once (1.5 GB/s, on the main worker)."""
    loader_processes: int = 0
    """Processes that make examples; 0: a thread of the worker, which is enough for text."""


def read_manifest(data: PreparedTextConfig, *, end_token_only: bool = False) -> "Manifest":
    """Return the manifest of the prepared text that the settings name.

    Args:
        end_token_only: the model needs no special token but the end token.

    Raises:
        UsageError: none is named, it is not there, or it has no other special token, which the model needs.
    """
    from shoal.data.manifest import Manifest
    from shoal.data.storage import open_storage

    if data.path is None:
        raise UsageError(
            "data.path is not set: name the directory that `shoal prepare text` wrote, "
            "e.g. --data.path runs/text"
        )
    manifest = open_storage(data.path).manifest(Manifest)
    if manifest.end_token_only and not end_token_only:
        raise UsageError(
            f"data.path {data.path}: this text was prepared with --end-token, for causal language models "
            "(shoal train lm); prepare it without"
        )
    return manifest


def keep_tokenizer(text: "TextShards", run: "Run") -> None:
    """Copy the tokenizer and the manifest of the text into the run directory, for exports."""
    from shoal.data.manifest import MANIFEST
    from shoal.train.run_dir import keep_description

    if run.directory is not None and run.world.is_main:
        files = (MANIFEST, text.manifest.tokenizer.file)
        keep_description(run.directory, lambda name: (text.directory / name).read_bytes(), *files)


def write_synthetic_text(folder: Path, vocab_size: int) -> None:
    """Write shards of random tokens, in the format of ``shoal prepare text``.

    A document has 1,200 tokens, so that all sequences made of them have full length.
    """
    import random

    from tokenizers import Tokenizer, models

    from shoal.atomic_io import sha256_of
    from shoal.data.manifest import Manifest, ShardInfo, TokenizerInfo
    from shoal.data.text.shards import ShardWriter

    tokenizer = folder / "tokenizer.json"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(5, vocab_size))]
    vocabulary = {word: number for number, word in enumerate(words)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(tokenizer))
    draw = random.Random(1)
    splits: dict[str, tuple[ShardInfo, ...]] = {}
    for split, num_documents in (("train", 200), ("validation", 5)):
        writer = ShardWriter(folder, f"{split}-00000", vocab_size)
        for _ in range(num_documents):
            sentence = [draw.randrange(5, vocab_size) for _ in range(20)]
            writer.add_document([sentence] * 60)
        splits[split] = (writer.finish(),)
    Manifest(
        vocab_size=vocab_size,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        pad_id=0,
        unk_id=1,
        continues_word=bytes(vocab_size),
        tokenizer=TokenizerInfo(file=tokenizer.name, sha256=sha256_of(tokenizer), kind="wordpiece"),
        source="random tokens",
        splits=splits,
    ).save(folder)


def kept_tokenizer(run_dir: Path) -> Path:
    """Return the tokenizer that :func:`keep_tokenizer` copied.

    Raises:
        UsageError: the run has none.
    """
    from shoal.data.manifest import Manifest
    from shoal.train.run_dir import description_in

    folder = description_in(run_dir)
    return folder / Manifest.load(folder).tokenizer.file


def open_shards(
    data: PreparedTextConfig,
    vocab_size: int,
    world: "World | None" = None,
    *,
    sentinels: int = 0,
    end_token_only: bool = False,
) -> "tuple[TextShards, TextShards]":
    """Return the shards of training and held-out text; the manifest is read once.

    Args:
        vocab_size: of the model.
        world: of the workers that read them: the first one verifies, all use the cache; default: neither.
        sentinels: tokens of the model that the text does not have.
        end_token_only: as for :func:`read_manifest`.

    Raises:
        UsageError: there is no prepared text, or the model's vocabulary is too small for it.
    """
    from shoal.data.objects import scheme_of
    from shoal.data.text.shards import TextShards

    manifest, path = read_manifest(data, end_token_only=end_token_only), required(data.path)
    manifest.check_vocabulary(vocab_size, sentinels=sentinels)
    cache = data.open_cache(world, "text", path)
    if cache is None and scheme_of(path) is not None:
        cache = data.own_cache()
    level = data.verify if world is not None and world.is_main else "sizes"
    train = TextShards(path, "train", verify=level, manifest=manifest, cache=cache)
    return train, TextShards(path, "validation", verify=level, manifest=manifest, cache=cache)


def load_weights(model: "nn.Module", config: EncoderConfig) -> None:
    """Copy the initial weights that the settings name into ``model``.

    Raises:
        UsageError: they are not there, or are of another model.
        ShoalError: they cannot be read.
    """
    from shoal.models.directory import copy_weights
    from shoal.train.checkpoint import load_model

    source = config.checkpoint_path
    if source is None:
        return
    if (source / "config.json").is_file():  # what transformers writes
        copy_weights(model, source)
    else:
        load_model(source, model)


def tokenizer_files(
    tokenizer: "Tokenizer", model: "HasWeights", max_length: int | None = None
) -> dict[str, bytes]:
    """Return the files by which transformers tokenises as the model was trained, by their names.

    Args:
        tokenizer: with which it was trained.
        max_length: most tokens of a text, of a model without positions (T5).
    """
    from shoal.data.text.tokenizer_files import SPECIAL_TOKENS, special_ids, transformers_files, with_end

    sizes = model.weights.config.to_dict()
    roles = {role: role for role in SPECIAL_TOKENS}
    if is_t5(sizes):
        roles = {"eos": "sep", "pad": "pad", "unk": "unk"}
        tokenizer = with_end(tokenizer, sizes["eos_token_id"])
    length = required(num_positions(sizes) or max_length)
    ids = special_ids(tokenizer, "the tokenizer", tuple(roles.values()))
    tokens = {name: ids[role] for name, role in roles.items()}
    return transformers_files(tokenizer, tokens, input_names=input_names(sizes), max_length=length)
