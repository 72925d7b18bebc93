"""Finds special tokens of tokenizers, and makes the files from which transformers has the same tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, processors

from shoal.errors import UsageError

SPECIAL_TOKENS = {
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
}
"""Spellings of each special token in known tokenizers, those of trained ones first."""


def special_ids(
    tokenizer: Tokenizer, name: str, needs: Sequence[str] = tuple(SPECIAL_TOKENS)
) -> dict[str, int]:
    """Return the ids of the required roles of ``SPECIAL_TOKENS``; ``name`` names the tokenizer in errors.

    Raises:
        UsageError: there is no such token.
    """
    ids, missing = {}, []
    for role in needs:
        spellings = SPECIAL_TOKENS[role]
        token_id = next((i for s in spellings if (i := tokenizer.token_to_id(s)) is not None), None)
        if token_id is None:
            missing.append(f"{role} ({' or '.join(spellings)})")
        else:
            ids[role] = token_id
    if missing:
        raise UsageError(
            f"tokenizer {name}: has no token for {', '.join(missing)}; masked-LM and sentence order need "
            "them: choose a tokenizer of BERT, ALBERT or RoBERTa, or add these tokens to it"
        )
    return ids


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Return the content of ``tokenizer.json``."""
    return tokenizer.to_str(pretty=True).encode() + b"\n"


def transformers_files(
    tokenizer: Tokenizer, tokens: Mapping[str, int], *, input_names: Sequence[str], max_length: int
) -> dict[str, bytes]:
    """Return the names and contents of the files from which ``AutoTokenizer`` makes the same tokenizer.

    Args:
        tokens: ids of special tokens by transformers' names, such as ``sep`` or ``eos``.
        input_names: what the tokenizer returns.
        max_length: most tokens of a sequence, to which it truncates where that is asked for.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": list(input_names),
        "model_max_length": max_length,
        **{f"{name}_token": tokenizer.id_to_token(token) for name, token in tokens.items()},
    }
    return {
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n",
    }


def with_end(tokenizer: Tokenizer, end_id: int) -> Tokenizer:
    """Return a copy of a tokenizer that ends each text with T5's end token."""
    ending, end = Tokenizer.from_str(tokenizer.to_str()), tokenizer.id_to_token(end_id)
    ending.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, end_id)]
    )
    return ending
