"""Where a finetuning begins: a run of shoal or a transformers directory, with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shoal.data.text.tokenizer import read_tokenizer, vocab_size
from shoal.errors import UsageError
from shoal.json_text import parse_json
from shoal.models.directory import HUB, resolve
from shoal.models.tasks import TaskModel
from shoal.recipes.export import export_run
from shoal.recipes.finetune.config import SourceConfig
from shoal.train.config import load_toml, required
from shoal.train.exchange import together
from shoal.train.run_dir import CONFIG_FILE
from shoal.train.world import World

START = "start"
"""Where in the run directory the weights of a pretraining run are put, so that they stay what they were."""

MODEL_CONFIG = "config.json"


def start_of(config: SourceConfig, run_dir: Path, world: World) -> Path:
    """Return the transformers directory to start from; the main worker makes it if it must be made."""
    path = required(config.path)
    if kind_of_source(path) == "hub":  # each host has a cache of its own
        return Path(together(world.control, lambda: str(resolve(path)))[world.place.rank])
    return Path(
        together(world.control, lambda: str(prepare_source(path, run_dir)) if world.is_main else "")[0]
    )


def prepare_source(path: Path, run_dir: Path) -> Path:
    """Return the transformers directory that ``path`` stands for.

    A finetuned run stands for its ``transformers`` folder; of a pretraining run the newest checkpoint (or the
    one that is named) is exported into ``run_dir``, once.

    Raises:
        UsageError: ``path`` is neither a transformers directory nor a run nor a checkpoint in one.
        ShoalError: the run has no checkpoint, or it is damaged.
    """
    kind = kind_of_source(path)
    if kind in ("directory", "hub"):
        return resolve(path)
    if kind == "finetuned":
        return path / "transformers"
    start = run_dir / START
    return start if (start / MODEL_CONFIG).is_file() else export_run(path, start)


def kind_of_source(path: Path) -> str:
    """Return what ``path`` is: ``hub`` (a name there), ``directory``, ``finetuned`` (a run) or ``run``.

    Raises:
        UsageError: none of these.
    """
    if str(path).startswith(HUB):
        return "hub"
    if (path / MODEL_CONFIG).is_file():
        return "directory"
    if (path / CONFIG_FILE).is_file():
        return (
            "finetuned"
            if (path / "transformers" / MODEL_CONFIG).is_file() and _is_finetuning(path)
            else "run"
        )
    if (path.resolve().parent.parent / CONFIG_FILE).is_file():
        return "run"
    what = "is neither" if path.exists() else "does not exist; name"
    joint = "nor" if path.exists() else "or"
    raise UsageError(
        f"model.path {path} {what} a transformers directory (with {MODEL_CONFIG}) {joint} the directory of a "
        f"run of shoal (with {CONFIG_FILE}); a model of the hub is named {HUB}NAME"
    )


def _is_finetuning(run_dir: Path) -> bool:
    return "path" in load_toml(run_dir / CONFIG_FILE).get("model", {})


def model_settings(config: SourceConfig) -> dict[str, Any]:
    """Return what the settings say about making the model, for ``load_task_model``."""
    return {
        "from_scratch": config.from_scratch,
        "dropout": config.dropout,
        "activation_checkpointing": config.activation_checkpointing,
    }


def new_parts(model: TaskModel) -> list[str]:
    """Return a line about the weights that the source did not have, if there are any."""
    total = sum(1 for _ in model.parameters())
    if not model.new_parts:
        return []
    names = "all of them" if len(model.new_parts) == total else ", ".join(model.new_parts)
    return [f"weights drawn from the seed: {names}"]


def read_model_config(directory: Path) -> dict[str, Any]:
    """Return ``config.json`` of a transformers directory.

    Raises:
        UsageError: it is not there, or not a JSON object.
    """
    path = directory / MODEL_CONFIG
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    tree = parse_json(data, str(path), error=UsageError)
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: must be a JSON object; is it a transformers directory?")
    return tree


def read_source_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer of a transformers directory; T5's has no tokens for classes and masks.

    Raises:
        UsageError: there is none, it cannot be read, or it has more tokens than the model has embeddings.
    """
    file = _tokenizer_file(directory)
    config = read_model_config(directory)
    if config.get("model_type") == "t5":
        tokenizer = read_tokenizer(file, lowercase=False, needs=("sep", "pad", "unk"))
    else:
        tokenizer = read_tokenizer(file, lowercase=_lowercases(directory))
    needed, rows = vocab_size(tokenizer), int(config.get("vocab_size", 0))
    if needed > rows:
        raise UsageError(
            f"{file} has {needed:,} tokens and the model of {directory / MODEL_CONFIG} {rows:,} embeddings; "
            "they do not belong together: put the model's own tokenizer there"
        )
    return tokenizer


def _tokenizer_file(directory: Path) -> Path:
    names = ("tokenizer.json", "vocab.txt", "spiece.model")
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise UsageError(
        f"{directory} holds no tokenizer ({', '.join(names)}); put the one there that the model was trained "
        "with, e.g. by its save_pretrained"
    )


def _lowercases(directory: Path) -> bool:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return True  # as BERT's and ALBERT's tokenizers do where nothing is said
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    tree = parse_json(data, str(path), error=UsageError)
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: must be a JSON object")
    return bool(tree.get("do_lower_case", True))


def check_length(directory: Path, setting: str, max_seq_length: int) -> None:
    """Raise a :class:`UsageError` where sequences are longer than the model has positions for."""
    config = read_model_config(directory)
    positions = int(config.get("max_position_embeddings", max_seq_length))
    if config.get("model_type") == "roberta":  # its first positions are behind the padding's
        positions -= int(config.get("pad_token_id") or 1) + 1
    if max_seq_length > positions:
        raise UsageError(
            f"{setting} {max_seq_length} is more than the {positions} positions of the model in {directory}; "
            "shorten it"
        )
