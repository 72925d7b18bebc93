"""Fills the masks of texts with a pretrained encoder: ``shoal predict fill-mask``.

The encoder is that of a run of ALBERT or BERT, or of a transformers directory with a masked-LM head.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.errors import UsageError
from shoal.recipes import Row, Use, masked_lm, use_of, using
from shoal.recipes.model_source import find_model, longest_sequence, recipe_of
from shoal.recipes.prepared_text import kept_tokenizer
from shoal.recipes.source_tokenizer import read_source_tokenizer
from shoal.recipes.using import PredictConfig
from shoal.train.config import REQUIRED, required

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shoal.data.text.fill_mask import MaskedTexts
    from shoal.models.pretraining import Pretraining
    from shoal.models.tasks import MaskedLM
    from shoal.train.world import Float32Array

    Opened = tuple[Pretraining | MaskedLM, Tokenizer, int]


@dataclass(frozen=True, kw_only=True)
class FillMaskConfig(PredictConfig):
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

    @property
    def has_one_input(self) -> bool:
        return self.text is not None


class use(Use):
    """Fills masks."""

    Predict = FillMaskConfig
    one_input = "--text"

    def read_model(self) -> None:
        model, self.tokenizer, self.length = read_masked_lm(self.settings.model)
        self.model = model.to(self.world.device)

    def read(self, inputs: tuple[Path, ...]) -> list[list[str]]:
        from shoal.data.text.fill_mask import read_lines

        text = self.settings.text
        return [[text] if text is not None else [line for path in inputs for line in read_lines(path)]]

    def describe(self, data: list[str]) -> str:
        return f"texts        {len(data):,}"

    def outputs(self, data: list[str]) -> "tuple[MaskedTexts, Float32Array] | None":
        """Return the masks, and the likeliest tokens of each and their probabilities, ``[masks, 2 top]``."""
        import torch

        from shoal.data.text.fill_mask import make_masked_texts
        from shoal.models.encoder import packed_inputs
        from shoal.models.token_losses import at_least_fp32

        model, top, size = self.model, self.settings.top, self.settings.batch_size
        texts = make_masked_texts(data, self.tokenizer, max_seq_length=self.length)

        def likeliest(batch: Any) -> torch.Tensor:
            rows = batch["cu_seqlens"][:-1].long() + batch["masked"]
            hidden = model.encoder(**packed_inputs(batch), wanted=rows)
            best = at_least_fp32(model.mlm_logits(hidden)).softmax(1).topk(top)
            return torch.cat([best.indices.float(), best.values], dim=1)  # ids below 2^24 are exact

        best = using.outputs_of(model, texts, likeliest, self.world, self.precision, batch_size=size)
        return None if best is None else (texts, best)

    def rows(self, data: list[str], outputs: "tuple[MaskedTexts, Float32Array]") -> Iterator[Row]:
        (texts, best), top = outputs, self.settings.top
        masks: list[list[Row]] = [[] for _ in data]
        for text, row in zip(texts.text_of.tolist(), best, strict=True):
            tokens, chances = row[:top].astype("int64").tolist(), row[top:].tolist()
            listed = [
                {"token": self.tokenizer.id_to_token(token), "probability": chance}
                for token, chance in zip(tokens, chances, strict=True)
            ]
            masks[text].append({**listed[0], "top": listed})
        for number, (shown, filled) in enumerate(zip(data, masks, strict=True), start=1):
            yield {"id": number, "text": shown, "masks": filled}


def read_masked_lm(path: Path) -> "Opened":
    """Return the model that ``path`` names, its tokenizer and the most tokens of a sequence.

    Raises:
        UsageError: there is no such model, or it has no masked-LM head.
        ShoalError: its files are damaged.
    """
    from shoal.data.text.tokenizer import read_tokenizer
    from shoal.models.directory import resolve
    from shoal.models.tasks import MaskedLM, load_task_model

    source = find_model(path)
    if source.checkpoint is not None:
        run = required(source.run)
        use = use_of(recipe := recipe_of(run))
        if use is None or not issubclass(use, masked_lm.EncoderUse):
            raise UsageError(f"{run} is a run of {recipe}, which fills no masks: name one of albert or bert")
        model, _ = use.read_checkpoint(source.checkpoint)
        tokenizer = read_tokenizer(kept_tokenizer(run), lowercase=True)
        return model, tokenizer, model.config.max_position_embeddings
    directory = resolve(required(source.directory))
    masked = load_task_model(MaskedLM, directory)
    if masked.new_parts:
        raise UsageError(
            f"--model {path} has no masked-LM head ({masked.new_parts[0]} is missing): name a pretrained one"
        )
    return masked, read_source_tokenizer(directory), longest_sequence(directory)
