"""Conversations are tokenised as by transformers, only responses are learnt, and packing changes no loss."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune_made as made
from shoal.data.bad_entries import BadEntries
from shoal.data.text.conversations import (
    ChatTokenizer,
    Conversation,
    ConversationReader,
    Conversations,
    best_fit,
    read_conversations,
    tokenize,
)
from shoal.errors import UsageError
from shoal.models.causal import CausalLM

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}{% else %}"
    "{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
"""The same text as :data:`finetune_made.CHATML`, which says what the assistant writes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_causal(tmp_path_factory.mktemp("model"))


def written(folder: Path, rows: list[Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, model: Path, length: int = 64, **options: Any) -> Conversations:
    bad = BadEntries(path)
    return tokenize(path, read_conversations(path, bad, **options), ChatTokenizer(model), length, bad)


def test_responses_are_found_as_transformers_marks_them(model: Path) -> None:
    plain, marked = ChatTokenizer(model), ChatTokenizer(model, MARKED)
    for chat in made.conversations(30, seed=3):
        conversation = Conversation("line 1", messages=tuple(chat))
        ids, is_target = plain.encode(conversation)
        assert (ids, is_target) == marked.encode(conversation)
        learnt = plain.tokenizer.decode([i for i, t in zip(ids, is_target, strict=True) if t])
        answers = [each["content"] for each in chat if each["role"] == "assistant"]
        assert learnt == "".join(f"{answer}<|im_end|>\n" for answer in answers)


def test_a_response_is_learnt_with_its_end_and_not_its_prompt(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "sun moon: ", "completion": "river"}, {"prompt": "", "answer": "bird tree"}]
    file = read(written(tmp_path, rows), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for number, (prompt, response) in enumerate((("sun moon: ", "river"), ("", "bird tree"))):
        part = slice(*file.bounds[number : number + 2])
        assert file.tokens[part].tolist() == [*tokenizer(prompt + response)["input_ids"], 0]
        learnt = file.tokens[part][file.is_target[part]].tolist()
        assert learnt[-1] == 0 and tokenizer.decode(learnt[:-1]).strip() == response
    named = [{"q": "sun ", "a": "moon"}]
    other = read(written(tmp_path, named), model, prompt="q", response="a")
    assert tokenizer.decode(other.tokens.tolist()) == "sun moon<|endoftext|>"
    chats = read(written(tmp_path, named), model, prompt="q", response="a", as_chat=True)
    shown = "<|im_start|>user\nsun <|im_end|>\n<|im_start|>assistant\nmoon<|im_end|>\n"
    assert tokenizer.decode(chats.tokens.tolist()) == shown


def test_other_forms_of_messages_are_the_same(model: Path, tmp_path: Path) -> None:
    chats = made.conversations(4, seed=1)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    other = [
        {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in chat]} for chat in chats
    ]
    wanted = read(written(tmp_path, [{"messages": chat} for chat in chats]), model)
    assert read(written(tmp_path, other), model).tokens.tolist() == wanted.tokens.tolist()
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"messages": chats, "n": [1, 2, 3, 4]}), tmp_path / "ROWS.PARQUET")
    assert read(tmp_path / "ROWS.PARQUET", model).tokens.tolist() == wanted.tokens.tolist()


def test_what_cannot_be_learnt_is_counted(model: Path, tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "sun"}, {"role": "assistant", "content": "moon"}
    rows: list[Any] = [
        {"messages": [user, answer]},
        {"messages": [user]},
        {"messages": [user, {"role": "assistant"}]},
        {"messages": [user, {"role": "assistant", "content": {"text": "moon"}}]},
        {"conversations": [{"from": ["human"], "value": "sun"}]},
        {"text": "sun"},
        {"messages": [{"role": "user", "content": "sun " * 80}, answer]},
        {"messages": [user, {"role": "assistant", "content": "moon " * 80}]},
        {"prompt": "sun", "completion": " "},
    ]
    file = read(written(tmp_path, rows), model)
    assert len(file) == 2 and file.num_cut == 1 and file.bounds[-1] - file.bounds[1] == 64
    said = file.describe(64)
    assert "conversation without a message of the assistant: 1 (line 2: the roles are user)" in said
    assert "message without role and content: 3 (line 3:" in said
    assert "row without messages, and without the strings prompt and completion or" in said
    assert "conversation without a response in its first 64 tokens: 1 (line 7)" in said
    assert "row whose response is empty: 1 (line 9)" in said
    assert "1 cut to 64 tokens; left out 7" in said


def test_tokenizers_that_cannot_find_responses_are_refused(model: Path, tmp_path: Path) -> None:
    chat = Conversation("line 1", messages=tuple(made.conversations(1, seed=1)[0] * 2))
    bare = made.write_causal(tmp_path / "bare", template=None)
    with pytest.raises(UsageError, match=r"has no chat template, which messages need; name a file"):
        ChatTokenizer(bare).encode(chat)
    counted = "{{ messages | length }}" + made.CHATML
    with pytest.raises(UsageError, match=r"writes a conversation otherwise when a message follows"):
        ChatTokenizer(model, counted).encode(chat)
    with pytest.raises(UsageError, match=r"has no tokenizer that can be read"):
        ChatTokenizer(tmp_path)
    path = written(tmp_path, [{"messages": list(chat.messages)}])
    with pytest.raises(UsageError, match=r"nothing can be used; left out 1: conversation that the chat temp"):
        bad = BadEntries(path)
        refusing = ChatTokenizer(model, "{{ raise_exception('no system') }}")
        tokenize(path, read_conversations(path, bad), refusing, 64, bad)
    with pytest.raises(UsageError, match=r"rows\.txt: is known by the end of its name"):
        read_conversations(tmp_path / "rows.txt", BadEntries("x"))


def test_rows_hold_every_sequence_once_and_are_nearly_full() -> None:
    draw = random.Random(5)
    lengths = [draw.randint(1, 40) for _ in range(500)]
    rows = best_fit(lengths, 64)
    assert sorted(number for row in rows for number in row) == list(range(500))
    assert max(sum(lengths[n] for n in row) for row in rows) <= 64
    assert len(rows) <= 1.02 * sum(lengths) / 64 + 1
    assert best_fit([64, 64], 64) == [[0], [1]]


@pytest.mark.parametrize("packed", [True, False])
def test_rows_have_the_losses_of_each_conversation_by_transformers(
    packed: bool, model: Path, tmp_path: Path
) -> None:
    file = read(made.write_chats(tmp_path / "chats.jsonl", 20, seed=2), model)
    weights = AutoModelForCausalLM.from_pretrained(model).double().eval()
    wanted, count = torch.zeros((), dtype=torch.float64), 0
    for number in range(len(file)):
        part = slice(*file.bounds[number : number + 2])
        ids = torch.tensor(file.tokens[part].tolist())[None]
        labels = ids.masked_fill(~torch.tensor(file.is_target[part])[None], -100)
        targets = int((labels[:, 1:] >= 0).sum())
        wanted = wanted + weights(input_ids=ids, labels=labels).loss * targets
        count += targets
    reader = ConversationReader(file, length=64, packed=packed, seed=1, fill_id=0)
    assert reader.num_examples < 18 if packed else reader.num_examples == 20
    total, found = torch.zeros((), dtype=torch.float64), 0
    for rows in ([0, 1], list(range(2, reader.num_examples))):
        arrays = reader.micro_batch(reader.batch(0, rows))
        assert arrays["input_ids"].shape[1] == (64 if packed else max(np_length(file, n) for n in rows))
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        total = total + CausalLM(weights)(**batch)[0]
        found += int((batch["labels"] >= 0).sum())
    assert found == count
    assert float(total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    ours, theirs = (torch.autograd.grad(loss, list(weights.parameters())) for loss in (total, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).norm()) <= 1e-6 * float(other.norm())


def np_length(file: Conversations, number: int) -> int:
    return int(file.bounds[number + 1] - file.bounds[number])
