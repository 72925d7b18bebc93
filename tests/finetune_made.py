"""A tiny model with its tokenizer, made questions and pairs, and settings of quick finetunings with them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from shoal.data.squad.config import WindowConfig
from shoal.data.text.tokenizer import train_tokenizer
from shoal.data.text.tokenizer_files import tokenizer_json
from shoal.recipes.classify import ClassifyConfig, ScoredDataConfig
from shoal.recipes.finetuning import (
    FinetuneOptimConfig,
    FinetuneRunConfig,
    FinetuneTrainConfig,
    SourceConfig,
)
from shoal.recipes.lm_finetune import CausalSourceConfig, ConversationsConfig, LmFinetuneConfig, RowsRunConfig
from shoal.recipes.squad import SquadConfig, SquadDataConfig
from shoal.recipes.t5_classify import T5ClassifyConfig, T5ClassifyOptimConfig, T5DataConfig

WORDS = ["sun", "moon", "river", "stone", "bird", "tree", "wind", "light", "road", "hill", "rain", "field"]
VOCAB = 120
STEPS = 80
"""Enough to learn some answers by heart."""


def write_questions(path: Path, *, version: str = "2.0", num_paragraphs: int = 6) -> Path:
    """Write made questions: four a paragraph, in 2.0 one of these without an answer."""
    draw = random.Random(11)
    paragraphs = []
    for p in range(num_paragraphs):
        words = [draw.choice(WORDS) for _ in range(draw.randint(20, 60))]
        context = " ".join(words)
        questions = []
        for q in range(4):
            first = draw.randrange(len(words) - 2)
            text, start = " ".join(words[first : first + 2]), len(" ".join(words[:first])) + (first > 0)
            asked = " ".join(draw.choices(WORDS, k=4))
            impossible = version == "2.0" and q == 3
            answers = [] if impossible else [{"text": text, "answer_start": start}]
            entry = {"id": f"p{p}q{q}", "question": asked, "answers": answers}
            questions.append(entry | ({"is_impossible": impossible} if version == "2.0" else {}))
        paragraphs.append({"context": context, "qas": questions})
    path.write_text(json.dumps({"version": version, "data": [{"title": "", "paragraphs": paragraphs}]}))
    return path


def write_pairs(path: Path, num_examples: int, *, seed: int) -> Path:
    """Write pairs whose label says whether the second text has the word of the first."""
    draw = random.Random(seed)
    lines = ["sentence1\tsentence2\tgold_label"]
    for _ in range(num_examples):
        word, *others = draw.sample(WORDS, 5)
        same = draw.random() < 0.5
        second = [word, *others[:2]] if same else others[:3]
        draw.shuffle(second)
        lines.append(f"{word}\t{' '.join(second)}\t{'same' if same else 'other'}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_scored_pairs(path: Path, num_examples: int, *, seed: int) -> Path:
    """Write pairs whose score, with fractions, says how many words the second text shares with the first."""
    draw = random.Random(seed)
    lines = ["sentence1\tsentence2\tscore"]
    for _ in range(num_examples):
        words, shared = draw.sample(WORDS, 6), draw.randrange(4)
        second = [*words[:shared], *words[3 : 6 - shared]]
        draw.shuffle(second)
        lines.append(f"{' '.join(words[:3])}\t{' '.join(second)}\t{1.25 * shared:.2f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_texts(path: Path, num_examples: int, *, seed: int) -> Path:
    """Write texts of three words, and as targets the words that are longer than four letters."""
    draw = random.Random(seed)
    lines = ["text\tlonger"]
    for _ in range(num_examples):
        words = draw.sample(WORDS, 3)
        lines.append(f"{' '.join(words)}\t{' '.join(word for word in words if len(word) > 4) or 'same'}")
    path.write_text("\n".join(lines) + "\n")
    return path


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_causal(folder: Path, config: PreTrainedConfig | None = None, template: str | None = CHATML) -> Path:
    """Write a tiny causal model with random weights, and a byte-level tokenizer with a chat template."""
    torch.manual_seed(7)
    made = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.train_from_iterator([" ".join(WORDS)] * 20, vocab_size=320, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = config or GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64)
    config.vocab_size, config.eos_token_id, config.bos_token_id = 320, 0, 0
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def conversations(num: int, *, seed: int) -> list[list[dict[str, str]]]:
    """Return chats of one or two turns, in which the assistant answers with the first word of the user."""
    draw, chats = random.Random(seed), []
    for _ in range(num):
        chat = [{"role": "system", "content": "Say it."}] if draw.random() < 0.5 else []
        for _ in range(draw.randint(1, 2)):
            words = draw.sample(WORDS, draw.randint(1, 4))
            chat += [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": words[0]}]
        chats.append(chat)
    return chats


def write_chats(path: Path, num: int, *, seed: int) -> Path:
    """Write :func:`conversations` as JSON lines."""
    rows = [{"messages": chat} for chat in conversations(num, seed=seed)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lm_config(
    model: Path, train: Path, held_out: tuple[Path, ...], run_dir: Path, /, **changes: dict[str, Any]
) -> LmFinetuneConfig:
    """Return settings of a quick finetuning on conversations; ``changes`` are ``section={field: value}``."""
    config: Any = LmFinetuneConfig(
        model=CausalSourceConfig(path=model),
        data=ConversationsConfig(path=train, eval=held_out, max_seq_length=64),
        train=FinetuneTrainConfig(
            total_steps=12, global_batch_size=6, micro_batch_size=1, precision="fp32", compile=False
        ),
        optim=FinetuneOptimConfig(learning_rate=5e-3, warmup_share=0.2, eps=1e-8, weight_decay=0.0),
        run=RowsRunConfig(name="test", dir=run_dir, log_frequency=1, checkpoint_frequency=3),
    )
    for section, values in changes.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    made: LmFinetuneConfig = config
    return made


def write_model(folder: Path, texts: list[str] | None = None, **sizes: int) -> Path:
    """Write a transformers directory without weights: sizes and a tokenizer trained on ``texts``."""
    folder.mkdir(parents=True)
    vocab = sizes.pop("vocab_size", VOCAB)
    tokenizer = train_tokenizer(
        "wordpiece", texts or [" ".join(WORDS)] * 20, vocab_size=vocab, lowercase=True
    )
    (folder / "tokenizer.json").write_bytes(tokenizer_json(tokenizer))
    default = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    config = BertConfig(
        vocab_size=vocab,
        **default | sizes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
    )
    config.architectures = ["BertModel"]
    config.save_pretrained(folder)
    return folder


def write_t5(folder: Path) -> Path:
    """Write a transformers directory of T5 without weights: sizes and a tokenizer that knows the words."""
    folder.mkdir(parents=True)
    texts = [" ".join([*WORDS, "same", "other", "mnli", "hypothesis", "premise", ":"])] * 20
    tokenizer = train_tokenizer("wordpiece", texts, vocab_size=VOCAB, lowercase=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json(tokenizer))
    T5Config(
        vocab_size=VOCAB + 8,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=tokenizer.token_to_id("[PAD]"),
        eos_token_id=tokenizer.token_to_id("[SEP]"),
        decoder_start_token_id=tokenizer.token_to_id("[PAD]"),
    ).save_pretrained(folder)
    return folder


def t5_config(
    source: Path, examples: Path, evals: tuple[Path, ...], run_dir: Path, **changes: Any
) -> T5ClassifyConfig:
    """Return settings for quick steps from random weights."""
    shared = _shared(source, run_dir) | {"optim": T5ClassifyOptimConfig(learning_rate=3e-2)}
    config = T5ClassifyConfig(data=T5DataConfig(path=examples, eval=evals, max_seq_length=32), **shared)
    return _changed(config, changes)


def texts_config(source: Path, examples: Path, run_dir: Path, **changes: Any) -> T5ClassifyConfig:
    """Return settings of :func:`t5_config` for the files of :func:`write_texts`."""
    config = t5_config(source, examples, (examples,), run_dir)
    data = {"task": "longer", "source_column": "text", "target_column": "longer", "max_target_length": 8}
    return _changed(_changed(config, {"data": data}), changes)


def squad_config(source: Path, questions: Path, run_dir: Path, **changes: Any) -> SquadConfig:
    """Return settings for quick steps from random weights."""
    config = SquadConfig(
        data=SquadDataConfig(path=questions, eval=questions),
        window=WindowConfig(max_seq_length=48, doc_stride=16, max_question_length=8),
        **_shared(source, run_dir),
    )
    return _changed(config, changes)


def classify_config(
    source: Path, examples: Path, evals: tuple[Path, ...], run_dir: Path, **changes: Any
) -> ClassifyConfig:
    """Return settings for quick steps from random weights."""
    config = ClassifyConfig(
        data=ScoredDataConfig(path=examples, eval=evals, max_seq_length=32), **_shared(source, run_dir)
    )
    return _changed(config, changes)


def _shared(source: Path, run_dir: Path) -> dict[str, Any]:
    return {
        "model": SourceConfig(path=source, from_scratch=True),
        "train": FinetuneTrainConfig(total_steps=STEPS, global_batch_size=12, precision="fp32"),
        "optim": FinetuneOptimConfig(learning_rate=5e-3),
        "run": FinetuneRunConfig(
            name="test", dir=run_dir, log_frequency=1, checkpoint_frequency=10, evaluation_batch_size=8
        ),
    }


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    for section, values in changes.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return config
