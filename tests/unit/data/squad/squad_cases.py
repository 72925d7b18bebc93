"""Small SQuAD data, and a tokenizer whose windows are read off by eye."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shoal.data.squad.dataset import Answer, Question, SquadData


def make_data(*cases: tuple[str, str, str | None]) -> SquadData:
    """Return data of (paragraph, question, answer) each; the answer is at its first place."""
    questions = [
        Question(
            f"q{k}",
            text,
            k,
            () if answer is None else (Answer(answer, context.index(answer)),),
            answer is None,
        )
        for k, (context, text, answer) in enumerate(cases)
    ]
    return SquadData(
        path=Path("d.json"),
        version="2.0",
        paragraphs=tuple(context for context, _, _ in cases),
        questions=tuple(questions),
    )


def words_tokenizer(pair: str = "[CLS] $A [SEP] $B:1 [SEP]:1") -> Tokenizer:
    """Return a tokenizer whose tokens are the words a to z and anything else."""
    vocabulary = {
        token: k for k, token in enumerate(["[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer
