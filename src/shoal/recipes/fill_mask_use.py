"""Fills the masks of texts by a pretrained encoder: ``shoal predict fill-mask``."""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.errors import UsageError
from shoal.recipes import finetuning, using
from shoal.recipes.model_source import find_model
from shoal.recipes.using import PredictConfig, Row
from shoal.train.config import REQUIRED, required

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shoal.data.text.fill_mask import MaskedTexts
    from shoal.models.pretraining import Pretraining
    from shoal.models.tasks import MaskedLM
    from shoal.train.gradients import Precision
    from shoal.train.world import Float32Array, World


@dataclass(frozen=True, kw_only=True)
class Predict(PredictConfig):
    """The model, and the texts with masks."""

    model: Annotated[Path, Parameter(group=REQUIRED)]
    """A run of `shoal train albert` or `shoal train bert`, one of its checkpoints, a transformers directory
    with its tokenizer and a masked-LM head, or hub:NAME."""
    text: str | None = None
    """One text with [MASK] in it, instead of files."""
    top: int = 5
    """Tokens to list for each mask, the likeliest first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 1:
            raise UsageError(f"--top {self.top} must be at least 1")


def check_prediction(what: Predict, inputs: tuple[Path, ...]) -> list[str]:
    """Check what can be checked without torch; return the lines of a dry run.

    Raises:
        UsageError: no model, no text, or a file that cannot be read.
    """
    find_model(what.model)
    using.check_files(inputs)
    using.check_out(what.out)
    if (what.text is not None) == bool(inputs):
        raise UsageError("name files of texts, or give one text with --text: one of the two")
    return [f"texts        {len(_read(what, inputs)):,}"]


def predict(what: Predict, inputs: tuple[Path, ...], world: "World", precision: "Precision") -> Iterator[Row]:
    """Yield a row for each text, on the first worker; all workers call it.

    Raises:
        UsageError: the model has no masked-LM head, or a text has no mask, or too many tokens.
        ShoalError: the model's files are damaged.
    """
    import torch

    from shoal.data.text.fill_mask import make_masked_texts
    from shoal.models.encoder import packed_inputs
    from shoal.models.pretraining import at_least_fp32

    model, tokenizer, length = read_model(what.model)
    model.to(world.device)
    texts = make_masked_texts(_read(what, inputs), tokenizer, max_seq_length=length)

    def likeliest(batch: Any) -> torch.Tensor:
        rows = batch["cu_seqlens"][:-1].long() + batch["masked"]
        hidden = model.encoder(**packed_inputs(batch), wanted=rows)
        best = at_least_fp32(model.mlm_logits(hidden)).softmax(1).topk(what.top)
        return torch.cat([best.indices.float(), best.values], dim=1)  # ids below 2^24 are exact

    found = finetuning.outputs_of(model, texts, likeliest, world, precision, batch_size=what.batch_size)
    if found is not None:
        yield from _rows(texts, tokenizer, found, what.top)


def _read(what: Predict, inputs: tuple[Path, ...]) -> list[str]:
    from shoal.data.text.fill_mask import read_lines

    return [what.text] if what.text is not None else [line for path in inputs for line in read_lines(path)]


def read_model(source: Path) -> "tuple[Pretraining | MaskedLM, Tokenizer, int]":
    """Return the model, its tokenizer and the most tokens of a sequence.

    Raises:
        UsageError: there is no such model, or it has no masked-LM head.
        ShoalError: its files are damaged.
    """
    from shoal.models.directory import resolve
    from shoal.models.tasks import MaskedLM, load_task_model

    found = find_model(source)
    if found.checkpoint is not None:
        from shoal.data.manifest import Manifest
        from shoal.data.text.tokenizer import read_tokenizer
        from shoal.recipes.export import read_encoder

        model, data = read_encoder(source)
        file = data / Manifest.load(data).tokenizer.file
        return model, read_tokenizer(file, lowercase=True), model.config.max_position_embeddings
    directory = resolve(required(found.directory))
    masked = load_task_model(MaskedLM, directory)
    if masked.new_parts:
        raise UsageError(
            f"--model {source} has no masked-LM head ({masked.new_parts[0]} is missing): name a pretrained "
            "model"
        )
    return masked, finetuning.read_source_tokenizer(directory), finetuning.longest_sequence(directory)


def _rows(texts: "MaskedTexts", tokenizer: "Tokenizer", found: "Float32Array", top: int) -> Iterator[Row]:
    masks: list[list[Row]] = [[] for _ in texts.texts]
    for text, row in zip(texts.text_of.tolist(), found, strict=True):
        tokens, chances = row[:top].astype("int64").tolist(), row[top:].tolist()
        listed = [
            {"token": tokenizer.id_to_token(token), "probability": chance}
            for token, chance in zip(tokens, chances, strict=True)
        ]
        masks[text].append({**listed[0], "top": listed})
    for number, (text, filled) in enumerate(zip(texts.texts, masks, strict=True), start=1):
        yield {"id": number, "text": text, "masks": filled}
