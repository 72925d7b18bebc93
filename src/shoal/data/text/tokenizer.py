"""Trains and reads tokenizers; each becomes an object and a JSON file of ``tokenizers``.

Training runs sentencepiece, whose result depends on the text and its fixed number of threads only (the
trainers of ``tokenizers`` 0.23 gave another vocabulary in each of four runs on the same text, even with one
thread). A WordPiece vocabulary is made from sentencepiece's BPE on text that was split into words, which is
also how ``tokenizers`` trains one.
"""

from __future__ import annotations

import io
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shoal.atomic_io import read_text, refuse_pointer
from shoal.data.bad_entries import REPEATED, BadEntries, BadEntry, OnBad
from shoal.data.text.tokenizer_files import SPECIAL_TOKENS, special_ids
from shoal.errors import UsageError, cannot_read
from shoal.json_text import parse_json

Kind = Literal["unigram", "wordpiece"]

_TRAINING_THREADS = 4
"""Fixed on every machine: sums of floats, and with them the vocabulary, depend on it."""

_WORD_START = "▁"
_BYTE_LEVEL_START = "Ġ"


def train_tokenizer(kind: Kind, texts: Iterable[str], *, vocab_size: int, lowercase: bool) -> Tokenizer:
    """Train a tokenizer of at most ``vocab_size`` tokens, special ones included, on ``texts``.

    The same texts in the same order give the same tokenizer. A small corpus may give fewer tokens. Memory
    grows with the length of ``texts``: pass a bounded sample.

    Raises:
        UsageError: the vocabulary is too small for the characters of the text.
    """
    if kind == "unigram":
        normalizer = _sentencepiece_normalizer(lowercase)
        lines = (normalizer.normalize_str(text) for text in texts)
        specials = ("<pad>", "<unk>")
        return _unigram(_train_sentencepiece(lines, "unigram", vocab_size, specials), normalizer)
    normalizer, cutter = _bert_normalizer(lowercase), pre_tokenizers.BertPreTokenizer()
    lines = (
        " ".join(word for word, _ in cutter.pre_tokenize_str(normalizer.normalize_str(text)))
        for text in texts
    )
    # a piece of BPE becomes up to two of WordPiece ("a", "##a"), so the list is truncated afterwards
    model = _train_sentencepiece(lines, "bpe", vocab_size, ("[PAD]", "[UNK]"))
    return _wordpiece(_wordpiece_vocabulary(model, vocab_size), lowercase)


def read_tokenizer(
    path: Path,
    *,
    lowercase: bool,
    needs: Sequence[str] = tuple(SPECIAL_TOKENS),
    on_bad: OnBad = "skip",
) -> Tokenizer:
    """Read a sentencepiece ``.model`` (Unigram), a BERT ``vocab.txt`` or a ``tokenizer.json``.

    ``lowercase`` (which also drops accents, as ALBERT and BERT-uncased do) applies to the first two; a JSON
    file has its own normaliser. ``needs`` are the required roles of ``SPECIAL_TOKENS``. Tokens that a
    vocabulary has twice are counted on stderr, or with ``on_bad="refuse"`` refused.

    Raises:
        UsageError: the file is missing or unreadable, is not what its name says, lacks one of the special
            tokens, or has a token twice, which is refused.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"tokenizer {cannot_read(path, error)}") from None
    refuse_pointer(path, data)
    suffix = path.suffix.lower()
    if suffix == ".model":
        model = _parse_sentencepiece(path, data)
        if model.trainer_spec.model_type != model.trainer_spec.UNIGRAM:
            raise UsageError(f"tokenizer {path}: only Unigram models of sentencepiece can be read, not BPE")
        tokenizer = _unigram(
            model, _sentencepiece_normalizer(lowercase, model.normalizer_spec.precompiled_charsmap)
        )
    elif suffix == ".txt":
        tokenizer = _wordpiece(_read_vocabulary(path, on_bad), lowercase)
    elif suffix == ".json":
        try:
            tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # noqa: BLE001  # tokenizers raises plain Exception
            raise UsageError(f"tokenizer {path}: is not a tokenizer.json of `tokenizers`: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
    else:
        raise UsageError(
            f"tokenizer {path}: is known by the end of its name: .model (sentencepiece), .txt (a vocabulary "
            "of BERT) or .json (`tokenizers`); or let `unigram` or `wordpiece` be trained"
        )
    special_ids(tokenizer, str(path), needs)
    return tokenizer


def vocab_size(tokenizer: Tokenizer) -> int:
    """Return the number of rows an embedding needs: one more than the greatest id."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def continues_word(tokenizer: Tokenizer) -> bytes:
    """Return one byte per id: 1 if the token continues the word before it, else 0.

    Special tokens, and in vocabularies that mark word starts also tokens of punctuation, begin a word
    (``_is_start_piece`` of google-research/albert does the same).
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    special |= {spelling for spellings in SPECIAL_TOKENS.values() for spelling in spellings}
    if model_kind(tokenizer) == "wordpiece":
        prefix = parse_json(tokenizer.to_str(), "the tokenizer")["model"]["continuing_subword_prefix"]
        continues = {token for token in vocabulary if token.startswith(prefix)}
    else:
        starts = (_WORD_START, _BYTE_LEVEL_START)
        continues = {t for t in vocabulary if not (t.startswith(starts) or all(map(_is_punctuation, t)))}
    flags = bytearray(vocab_size(tokenizer))
    for token in continues - special:
        flags[vocabulary[token]] = 1
    return bytes(flags)


def model_kind(tokenizer: Tokenizer) -> str:
    """Return the name of the tokenizer's model in lower case: ``unigram``, ``wordpiece``, ``bpe``, …."""
    return type(tokenizer.model).__name__.lower()


def _sentencepiece_normalizer(lowercase: bool, charsmap: bytes = b"") -> normalizers.Normalizer:
    """Return ALBERT's normalisation of text before sentencepiece, then the model's own character map."""
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if lowercase:
        steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    elif not lowercase:
        steps.append(normalizers.NFKC())
    steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return normalizers.Sequence(steps)


def _bert_normalizer(lowercase: bool) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lowercase, lowercase=lowercase
    )


def _parse_sentencepiece(path: Path, data: bytes) -> Any:
    """Parse ``data`` as sentencepiece's ``ModelProto``; ``path`` is only named in errors.

    Raises:
        UsageError: it is not a sentencepiece model.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        model.Clear()
    if not model.pieces or not model.HasField("trainer_spec"):  # stored behind the pieces: the file was cut
        raise UsageError(f"{path}: is not a sentencepiece model, or it is damaged")
    return model


def _train_sentencepiece(
    lines: Iterator[str], model_type: str, vocab_size: int, specials: tuple[str, str]
) -> Any:
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=written,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=0.99995,
            num_threads=_TRAINING_THREADS,
            normalization_rule_name="identity",
            pad_id=0,
            pad_piece=specials[0],
            unk_id=1,
            unk_piece=specials[1],
            bos_id=-1,
            eos_id=-1,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            max_sentence_length=1 << 16,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"no {model_type} vocabulary of {vocab_size} tokens could be trained on this text ({error}); "
            "set --vocab-size nearer to the size of the corpus, or give a tokenizer"
        ) from None
    return _parse_sentencepiece(Path("the trained model"), written.getvalue())


def _unigram(model: Any, normalizer: normalizers.Normalizer) -> Tokenizer:
    unk = next((i for i, piece in enumerate(model.pieces) if piece.type == piece.UNKNOWN), None)
    # nine digits hold a float32, and unlike seventeen they are read back from JSON as they were written
    vocabulary = [(piece.piece, float(f"{piece.score:.9g}")) for piece in model.pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unk))
    tokenizer.normalizer = normalizer
    # sentencepiece never takes "<pad>" in a text for the piece of that name; Unigram of `tokenizers` would,
    # so such text is cut after its first character
    reserved = [piece.piece for piece in model.pieces if piece.type != piece.NORMAL and len(piece.piece) > 1]
    names = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in reserved)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            pre_tokenizers.Split(Regex(names), "merged_with_previous"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _with_special_tokens(tokenizer)


def _wordpiece(vocabulary: dict[str, int], lowercase: bool) -> Tokenizer:
    unk = next((s for s in SPECIAL_TOKENS["unk"] if s in vocabulary), SPECIAL_TOKENS["unk"][0])
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unk))
    tokenizer.normalizer = _bert_normalizer(lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _with_special_tokens(tokenizer)


def _with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Mark the special tokens of the vocabulary, and add [CLS] and [SEP] around texts by default."""
    present = [
        s for spellings in SPECIAL_TOKENS.values() for s in spellings if tokenizer.token_to_id(s) is not None
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in present])
    cls, sep = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    if cls is not None and sep is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
        )
    return tokenizer


def _wordpiece_vocabulary(model: Any, vocab_size: int) -> dict[str, int]:
    """Convert pieces of BPE, most frequent merges first, to WordPiece's spelling."""
    special = [piece.piece for piece in model.pieces if piece.type != piece.NORMAL]
    normal = [p.piece for p in model.pieces if p.type == p.NORMAL and p.piece != _WORD_START]
    characters = sorted({character for text in normal for character in text} - {_WORD_START})
    tokens = dict.fromkeys(special)
    tokens |= dict.fromkeys(f(c) for c in characters for f in (str, "##{}".format))
    if len(tokens) > vocab_size:
        raise UsageError(
            f"the text has {len(characters)} different characters, which need {len(tokens)} tokens of "
            f"WordPiece; --vocab-size {vocab_size} must be at least that"
        )
    for text in normal:
        if len(tokens) == vocab_size:
            break
        tokens[text[1:] if text.startswith(_WORD_START) else f"##{text}"] = None
    return {token: number for number, token in enumerate(tokens)}


def _read_vocabulary(path: Path, on_bad: OnBad) -> dict[str, int]:
    """Return the ids of a ``vocab.txt``, which are line numbers; of equal lines the last counts.

    That is how transformers reads such files, as bert-base-multilingual-uncased's.
    """
    text = read_text(path)
    if "\n" not in text and text.count("\r") > 1:
        raise UsageError(f"tokenizer {path}: its lines end in CR alone; convert it: tr '\\r' '\\n'")
    tokens = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    bad = BadEntries(f"tokenizer {path}", on_bad)
    for number, token in enumerate(tokens):
        if vocabulary[token] != number:
            bad.add(BadEntry(REPEATED, repr(token)), f"line {number + 1}")
    for line in bad.lines():
        print(f"shoal: {line}", file=sys.stderr)
    return vocabulary


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"
