"""Makes batches of conversations for causal language models, of which only the responses are learnt.

A file holds prompts with responses, which are plain text, or messages, which the chat template of the
tokenizer turns into text. Each conversation is tokenised once. A row of a batch holds one conversation, or
several packed ones that do not see each other. Rows are the same in every epoch, in another order.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from transformers import AutoTokenizer

from shoal.data.bad_entries import BadEntries, BadEntry
from shoal.data.steps import Reader, example_names
from shoal.data.text.blocks import NO_TARGET
from shoal.data.text.rows import field_names, field_rows, json_rows
from shoal.decide.rng import Int64Array, dropout_keys
from shoal.errors import UsageError

RESPONSES = ("completion", "response", "answer")
"""Names of the field of a response, of which the first counts that a row has."""
_MESSAGES = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant"}
"""Names of roles in ShareGPT's form, where they differ."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begins what the assistant writes, in a chat template that says so."""

Message = Mapping[str, Any]
"""Has ``role``, ``content``, and what else the chat template reads."""


# ------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, or a prompt and its response."""

    location: str
    """In its file, such as ``line 3``."""
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    response: str = ""


def read_conversations(
    path: Path, bad: BadEntries, *, prompt: str = "prompt", response: str | None = None, as_chat: bool = False
) -> list[Conversation]:
    """Read a file with a conversation in each row: ``.jsonl``, ``.json`` or ``.parquet``.

    A row has ``messages``, with ``role`` and ``content`` each; ``conversations``, with ``from`` and ``value``
    each (ShareGPT); or a prompt and a response.

    Args:
        bad: counts rows of another form, which are left out.
        prompt: field of a prompt.
        response: field of a response; default: the first of :data:`RESPONSES` that the row has.
        as_chat: make messages of a user and of an assistant of prompts and responses.

    Raises:
        UsageError: the file cannot be read, has another name, too many rows of another form, or no other.
    """
    responses = (response,) if response else RESPONSES
    conversations = []
    for location, row in _rows(path, bad, {*_MESSAGES, prompt, *responses}):
        try:
            conversations.append(_conversation(location, row, prompt, responses, as_chat))
        except BadEntry as error:
            bad.add(error, location)
    bad.check(len(conversations))
    if not conversations:
        raise UsageError(f"{path}: holds no conversation")
    return conversations


def _rows(path: Path, bad: BadEntries, fields: set[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location of each row and its fields."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        names = [name for name in field_names(path, str(path)) if name in fields]
        for number, row in enumerate(field_rows(path, names, str(path)), start=1):
            yield f"row {number}", row
    elif suffix in (".jsonl", ".json"):
        for _, location, row in json_rows(path, bad):
            yield location, row
    else:
        raise UsageError(f"{path}: is known by the end of its name: .jsonl, .json or .parquet")


def _conversation(
    location: str, row: Mapping[str, Any], prompt: str, responses: Sequence[str], as_chat: bool
) -> Conversation:
    """Return the conversation of a row.

    Raises:
        BadEntry: it has another form.
    """
    if (name := next((each for each in _MESSAGES if row.get(each) is not None), None)) is not None:
        return Conversation(location, messages=_messages(row[name]))
    asked, answered = row.get(prompt), next((row[name] for name in responses if name in row), None)
    if not isinstance(asked, str) or not isinstance(answered, str):
        kind = f"a row without {_MESSAGES[0]}, and without the strings {prompt} and {' or '.join(responses)}"
        raise BadEntry(kind, f"has {', '.join(row) or 'nothing'}"[:100])
    if not answered.strip():
        raise BadEntry("a row whose response is empty", "")
    if not as_chat:
        return Conversation(location, prompt=asked, response=answered)
    sides = ({"role": "user", "content": asked}, {"role": "assistant", "content": answered})
    return Conversation(location, messages=sides)


def _messages(entries: Any) -> tuple[Message, ...]:
    """Return messages in the form of chat templates.

    Raises:
        BadEntry: they have another form, or none is the assistant's.
    """
    messages: list[Message] = []
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            break
        given = {name: value for name, value in entry.items() if value is not None}
        if "from" in given and "value" in given:
            sender = given["from"]
            given = {
                "role": isinstance(sender, str) and _ROLES.get(sender, sender),
                "content": given["value"],
            }
        has_role = isinstance(given.get("role"), str) and given["role"]
        has_content = "content" in given or "tool_calls" in given
        if not has_role or not has_content or not isinstance(given.get("content", ""), str | list):
            break
        messages.append(given)
    if not messages or len(messages) != len(entries):
        raise BadEntry("a conversation with a message without role and content", f"{entries!s:.60}")
    if all(message["role"] != "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise BadEntry("a conversation without a message of the assistant", f"the roles are {roles}"[:100])
    return tuple(messages)


# ------------------------------------------------------------------------------------------------ tokens


class ChatTokenizer:
    """Tokenises conversations by the tokenizer of a transformers directory.

    Args:
        directory: has ``tokenizer.json`` and, for messages, a chat template.
        template: chat template in Jinja that replaces the tokenizer's.

    Raises:
        UsageError: there is no tokenizer, or it is none of the library tokenizers.
    """

    def __init__(self, directory: Path, template: str | None = None) -> None:
        self.directory = directory
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"{directory}: has no tokenizer that can be read: {error!s:.200}") from None
        if not getattr(self.tokenizer, "is_fast", False):
            raise UsageError(
                f"{directory}: holds no tokenizer.json, which tells where tokens are in the text"
            )
        if template is not None:
            self.tokenizer.chat_template = template
        added = self.tokenizer.added_tokens_decoder.items()
        self._special = {number for number, token in added if token.special}
        self.ends: set[int] = set()
        """Special tokens with which the responses end that were tokenised."""

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and which are to be learnt.

        Raises:
            BadEntry: the chat template refuses the messages.
            UsageError: the tokenizer has no chat template or no end token, or the template changes what came
                before with each message.
        """
        if not conversation.messages:
            return self._encode_pair(conversation.prompt, conversation.response)
        try:
            marked = _GENERATION.search(self._template())
            encode = self._encode_marked if marked else self._encode_messages
            ids, is_target = encode(conversation.messages)
        except (TemplateError, TypeError) as error:
            raise BadEntry("a conversation that the chat template refuses", f"{error!s:.100}") from None
        for last, (learnt, follows) in enumerate(zip(is_target, [*is_target[1:], False], strict=True)):
            if learnt and not follows:  # white space may be behind the end of a turn
                near = [token for token in ids[max(last - 1, 0) : last + 1] if token in self._special]
                self.ends.update(near[-1:])
        return ids, is_target

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that ask for the answer to messages.

        Raises:
            UsageError: the tokenizer has no chat template, or it refuses the messages.
        """
        try:
            self._template()
            asked = self._render(list(messages), add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            raise UsageError(
                f"{self.directory}: the chat template refuses a message: {error!s:.100}"
            ) from None
        return self._encode_text(asked, (), add_special_tokens=False)[0]

    def _template(self) -> str:
        template = self.tokenizer.chat_template
        if not isinstance(template, str):
            raise UsageError(
                f"{self.directory}: the tokenizer has no chat template, which messages need; name a file "
                "with one, in Jinja, by --data.chat-template as you finetune"
            )
        return template

    def _encode_pair(self, prompt: str, response: str) -> tuple[list[int], list[bool]]:
        """Tokenise a prompt with its response, both as they are, and an end token."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise UsageError(
                f"{self.directory}: the tokenizer has no eos_token, which ends a response: set it"
            )
        text = prompt + response
        ids, is_target = self._encode_text(text, [(len(prompt), len(text))], add_special_tokens=True)
        if ids[-1:] == [end]:
            return ids, [*is_target[:-1], True]
        return [*ids, end], [*is_target, True]

    def _encode_marked(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Tokenise messages by a template that says what the assistant writes."""
        made = self.tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(made["input_ids"]), [bool(each) for each in made["assistant_masks"]]

    def _encode_messages(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Tokenise messages; the assistant's texts lie behind what asks for them."""
        text = self._render(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:number], add_generation_prompt=True)
                after = self._render(messages[: number + 1])
                if not (after.startswith(before) and text.startswith(after)):
                    raise UsageError(
                        f"{self.directory}: the chat template writes a conversation otherwise when a message "
                        "follows, so responses cannot be found; name a template that has them between "
                        "{% generation %} and {% endgeneration %} by --data.chat-template"
                    )
                spans.append((len(before), len(after)))
        return self._encode_text(text, spans, add_special_tokens=False)

    def _render(self, messages: Sequence[Message], **options: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        return text

    def _encode_text(
        self, text: str, spans: Sequence[tuple[int, int]], *, add_special_tokens: bool
    ) -> tuple[list[int], list[bool]]:
        """Return tokens, and which of them end behind the begin of a span and begin before its end."""
        made = self.tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        is_target = [
            any(begin < stop and start < end for begin, end in spans) and start < stop
            for start, stop in made["offset_mapping"]
        ]
        return list(made["input_ids"]), is_target

    def files(self) -> dict[str, bytes]:
        """Return the names and contents of the tokenizer's files, with the chat template."""
        with TemporaryDirectory(prefix="shoal-tokenizer-") as folder:
            self.tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The tokens of the conversations of a file; number ``k`` is ``bounds[k] : bounds[k + 1]``."""

    path: Path
    tokens: npt.NDArray[np.int32]
    """Of all conversations, flat."""
    is_target: npt.NDArray[np.bool_]
    """Tokens that are to be learnt, flat."""
    bounds: Int64Array
    num_cut: int
    """Conversations that were longer than allowed."""
    bad: BadEntries

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def describe(self, max_length: int) -> str:
        """Return a line about the file."""
        left_out = self.bad.summary()
        return (
            f"{self.path}: {len(self):,} conversations, {len(self.tokens):,} tokens, of which "
            f"{int(self.is_target.sum()):,} are learnt, {self.num_cut:,} cut to {max_length} tokens"
            f"{f'; {left_out}' if left_out else ''}"
        )


def tokenize(
    path: Path,
    conversations: Sequence[Conversation],
    tokenizer: ChatTokenizer,
    max_length: int,
    bad: BadEntries,
) -> Conversations:
    """Tokenise the conversations of a file; longer ones lose their end.

    Args:
        max_length: most tokens of a conversation.
        bad: counts those that are left out, as those whose responses begin behind ``max_length``.

    Raises:
        UsageError: too many are left out, or the tokenizer is not for them (:meth:`ChatTokenizer.encode`).
    """
    ids: list[int] = []
    is_target: list[bool] = []
    bounds, num_cut = [0], 0
    for conversation in conversations:
        try:
            own, learnt = tokenizer.encode(conversation)
            if not any(learnt[1:max_length]):
                raise BadEntry(f"a conversation without a response in its first {max_length} tokens", "")
        except BadEntry as error:
            bad.add(error, conversation.location)
            continue
        num_cut += len(own) > max_length
        ids += own[:max_length]
        is_target += learnt[:max_length]
        bounds.append(len(ids))
    bad.check(len(bounds) - 1)
    return Conversations(
        path=path,
        tokens=np.array(ids, dtype=np.int32),
        is_target=np.array(is_target, dtype=np.bool_),
        bounds=np.array(bounds, dtype=np.int64),
        num_cut=num_cut,
        bad=bad,
    )


# ------------------------------------------------------------------------------------------------ batches


def best_fit(lengths: Sequence[int] | Int64Array, size: int) -> list[list[int]]:
    """Return which sequences share a row of ``size`` tokens: best fit, the longest first.

    Args:
        lengths: of the sequences, at most ``size`` each.

    Example:
        >>> best_fit([3, 6, 4, 5], 9)
        [[1, 0], [3, 2]]
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """Tokens of free space and number of each row, in ascending order."""
    for number in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[number])
        fitting = bisect_left(rooms, (length, -1))
        if fitting < len(rooms):
            room, row = rooms.pop(fitting)
            rows[row].append(number)
        else:
            room, row = size, len(rows)
            rows.append([number])
        insort(rooms, (room - length, row))
    return rows


class ConversationReader(Reader):
    """Makes rows of conversations, packed or one in each.

    Args:
        data: the conversations, none longer than ``length``.
        length: tokens of a row.
        packed: several conversations share a row; otherwise each has its own, and the rows of a micro-batch
            are as long as the longest.
        seed: of the order and of the dropout keys.
        fill_id: token behind the end of a row.
    """

    def __init__(self, data: Conversations, *, length: int, packed: bool, seed: int, fill_id: int) -> None:
        self.data, self.length, self.packed, self.fill_id = data, length, packed, fill_id
        self.seed, self.example_tokens = seed, length
        lengths = np.diff(data.bounds)
        self.rows = best_fit(lengths, length) if packed else [[number] for number in range(len(data))]

    @property
    def num_examples(self) -> int:
        return len(self.rows)

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the rows ``indices`` (``[B]``, below ``num_examples``); the same in all ``epochs``.

        - ``input_ids`` int64 ``[B, length]``: conversations, then ``fill_id``;
        - ``position_ids`` int64 ``[B, length]``: from 0 in each conversation and, in packed rows, behind the
          last;
        - ``labels`` int64 ``[B, length]``: the token after each, where it is learnt;
        - ``dropout_keys`` int64 ``[B]``: keys of the rows (:mod:`shoal.dropout`);
        - ``lengths`` int64 ``[B]``: tokens of each row.
        """
        epochs_, indices_ = example_names(epochs, indices)
        shape = len(indices_), self.length
        arrays: dict[str, npt.NDArray[Any]] = {
            "input_ids": np.full(shape, self.fill_id, dtype=np.int64),
            "position_ids": np.zeros(shape, dtype=np.int64),
            "labels": np.full(shape, NO_TARGET, dtype=np.int64),
            "dropout_keys": dropout_keys(self.seed, epochs_, indices_),
            "lengths": np.zeros(len(indices_), dtype=np.int64),
        }
        for row, index in enumerate(indices_):
            arrays["lengths"][row] = self._fill(int(index), *(arrays[n][row] for n in list(arrays)[:3]))
        return arrays

    def _fill(self, index: int, ids: Int64Array, positions: Int64Array, labels: Int64Array) -> int:
        """Write a row, each array ``[length]``; return its number of tokens."""
        tokens, is_target, bounds = self.data.tokens, self.data.is_target, self.data.bounds
        at = 0
        for number in self.rows[index]:
            begin, end = bounds[number], bounds[number + 1]
            stop = at + end - begin
            ids[at:stop] = tokens[begin:end]
            positions[at:] = np.arange(len(positions) - at)
            labels[at : stop - 1] = np.where(is_target[begin + 1 : end], tokens[begin + 1 : end], NO_TARGET)
            at = int(stop)
        if self.packed:  # what follows is a document of its own
            positions[at:] = np.arange(len(positions) - at)
        return at

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the rows; those with one conversation are cut to the longest."""
        width = self.length if self.packed else int(arrays["lengths"].max())
        return {
            name: array[:, :width].copy() if array.ndim > 1 else array
            for name, array in arrays.items()
            if name != "lengths"
        }
