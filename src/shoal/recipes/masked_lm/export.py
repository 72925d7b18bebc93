"""Writes a BERT or ALBERT with the tokenizer of its text as a directory that transformers loads."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from shoal.data.manifest import Manifest
from shoal.errors import UsageError
from shoal.models.directory import save
from shoal.models.pretraining import Pretraining


def is_exportable(model: Pretraining) -> bool:
    """Whether transformers has a form for ``model``; there is none with norms before the layers' halves."""
    return not getattr(model.config, "pre_layer_norm", False)


def write_export(model: Pretraining, data: Path, out: Path) -> None:
    """Write ``model`` with the tokenizer of the prepared text ``data``, whole or not at all.

    An older export in ``out`` is replaced.

    Raises:
        UsageError: transformers has no form for this model.
    """
    if not is_exportable(model):
        raise UsageError(
            "a model with pre_layer_norm cannot be exported: transformers' ALBERT has no such form"
        )
    save(model, out, tokenizer=tokenizer_of(data))


def tokenizer_of(data: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a prepared text as ``AutoTokenizer`` finds it beside the weights."""
    manifest = Manifest.load(data)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(data / manifest.tokenizer.file))
    ids = {
        "cls_token": manifest.cls_id,
        "sep_token": manifest.sep_id,
        "mask_token": manifest.mask_id,
        "pad_token": manifest.pad_id,
        "unk_token": manifest.unk_id,
    }
    tokenizer.add_special_tokens({name: tokenizer.convert_ids_to_tokens(i) for name, i in ids.items()})
    return tokenizer
