"""Tokenizers trained and given, against sentencepiece and `tokenizers` themselves."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from shoal.data.text import chunk_worker
from shoal.data.text.chunk_worker import SentenceEncoder, words_stand_alone
from shoal.data.text.sentences import split_sentences
from shoal.data.text.tokenizer import (
    Kind,
    continues_word,
    model_kind,
    read_tokenizer,
    train_tokenizer,
    vocab_size,
)
from shoal.data.text.tokenizer_files import special_ids, tokenizer_json
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import UsageError

NASTY = [
    "Plain words, and (brackets): it's 3.14 now.",
    "Ça été—the naïve Ünïcode “quotes” ﬁx ½ ①",
    "``old quotes'' and <unk> <pad> [MASK] [CLS] in text",
    "日本語 text 北京 mixed",
    "emoji 😀 and\u200bzero\u00adwidth",
    "a",
    "ALL CAPS WORDS HERE",
]


def real_sentences(name: str) -> list[str]:
    path = data_dir() / "wikitext2" / name
    if not path.is_file():
        pytest.skip(f"no WikiText-2 in {data_dir()}; set SHOAL_TEST_DATA")
    return [s for line in path.read_text(encoding="utf-8").splitlines() for s in split_sentences(line)]


def given(name: str) -> Path:
    path = data_dir() / "tokenizers" / name
    if not path.is_file():
        pytest.skip(f"no {name} in {data_dir()}/tokenizers; set SHOAL_TEST_DATA")
    return path


def some_text() -> list[str]:
    """Enough to train on, with every letter it needs."""
    return [
        f"The {animal} {verb} over the {adjective} fence, and then it {verb} again in {year}."
        for animal in ("fox", "dog", "cat", "horse", "mouse")
        for verb in ("jumps", "leaps", "climbs", "flies")
        for adjective in ("old", "wooden", "broken", "painted")
        for year in range(1990, 2000)
    ]


def without_accents(sentence: str) -> str:
    """Preprocess as tokenization.py of google-research/albert before sentencepiece (do_lower_case)."""
    sentence = unicodedata.normalize("NFKD", sentence.replace("``", '"').replace("''", '"'))
    return "".join(c for c in sentence if not unicodedata.combining(c)).lower()


def test_albert_model_gives_the_ids_of_sentencepiece() -> None:
    path = given("albert_spiece.model")
    oracle, tokenizer = SentencePieceProcessor(model_file=str(path)), read_tokenizer(path, lowercase=True)
    tokenizer.encode_special_tokens = True
    sentences = real_sentences("test.txt")
    expected = oracle.encode([without_accents(sentence) for sentence in sentences])
    found = [e.ids for e in tokenizer.encode_batch(sentences, add_special_tokens=False)]
    assert found == expected and len(found) > 9000
    assert special_ids(tokenizer, "albert") == {"cls": 2, "sep": 3, "mask": 4, "pad": 0, "unk": 1}
    assert (model_kind(tokenizer), vocab_size(tokenizer)) == ("unigram", 30_000)


def test_albert_model_keeps_case_where_asked() -> None:
    tokenizer = read_tokenizer(given("albert_spiece.model"), lowercase=False)
    lower = read_tokenizer(given("albert_spiece.model"), lowercase=True)
    text = "The Résumé"
    assert lower.encode(text).tokens == ["[CLS]", "▁the", "▁resume", "[SEP]"]
    # the model's own character map folds case too, but keeps accents
    assert tokenizer.encode(text).tokens != lower.encode(text).tokens


def test_bert_vocabulary_gives_the_ids_of_transformers() -> None:
    from transformers import BertTokenizer

    path = given("bert-uncased-vocab.txt")
    oracle = BertTokenizer(vocab=str(path), do_lower_case=True)
    tokenizer = read_tokenizer(path, lowercase=True)
    sentences = real_sentences("valid.txt")[:1500] + NASTY[:2] + NASTY[3:]
    assert [e.ids for e in tokenizer.encode_batch(sentences)] == oracle(sentences)["input_ids"]
    flags = continues_word(tokenizer)
    ids = tokenizer.encode("unbelievably [MASK] embeddings", add_special_tokens=False)
    assert [t.startswith("##") for t in ids.tokens] == [bool(flags[i]) for i in ids.ids]
    assert sum(flags) == 5828  # lines of vocab.txt that begin with ##


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_training_is_deterministic_and_round_trips(kind: Kind, tmp_path: Path) -> None:
    text = some_text()
    made = [tokenizer_json(train_tokenizer(kind, text, vocab_size=200, lowercase=True)) for _ in range(3)]
    assert made[0] == made[1] == made[2]
    (tmp_path / "tokenizer.json").write_bytes(made[0])
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json", lowercase=True)
    assert tokenizer_json(tokenizer) == made[0]
    assert model_kind(tokenizer) == kind and 40 < vocab_size(tokenizer) <= 200
    encoding = tokenizer.encode("The FOX Jumps.", "again")
    assert tokenizer.decode(encoding.ids) == "the fox jumps. again"
    assert encoding.tokens[0] == "[CLS]" and encoding.tokens.count("[SEP]") == 2
    assert encoding.type_ids[-1] == 1
    assert sorted(special_ids(tokenizer, "made").values()) == [0, 1, 2, 3, 4]


def test_word_starts() -> None:
    tokenizer = train_tokenizer("unigram", some_text(), vocab_size=60, lowercase=True)
    flags = continues_word(tokenizer)
    assert len(flags) == vocab_size(tokenizer)
    for token, number in tokenizer.get_vocab().items():
        begins = token.startswith(("▁", "[", "<")) or token in ".,"
        assert bool(flags[number]) == (not begins), token
    assert any(flags)


@pytest.mark.parametrize("name", ["albert_spiece.model", "bert-uncased-vocab.txt", "unigram", "wordpiece"])
def test_encoder_gives_the_ids_of_the_tokenizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = real_sentences("valid.txt")[:4000] + NASTY
    if name in ("unigram", "wordpiece"):
        tokenizer = train_tokenizer(
            "unigram" if name == "unigram" else "wordpiece", sentences, vocab_size=900, lowercase=True
        )
    else:
        tokenizer = read_tokenizer(given(name), lowercase=True)
    assert words_stand_alone(tokenizer)
    monkeypatch.setattr(chunk_worker, "_MAX_WORDS", 3000)  # so that the dictionary starts afresh on the way
    encoder = SentenceEncoder(tokenizer, unknown_id=special_ids(tokenizer, name)["unk"])
    expected = [e.ids for e in tokenizer.encode_batch(sentences, add_special_tokens=False)]
    found = []
    for start in range(0, len(sentences), 300):
        found += [ids.tolist() for ids in encoder.encode(sentences[start : start + 300])]
    assert found == expected


def test_special_names_in_the_text_are_text() -> None:
    tokenizer = train_tokenizer(
        "unigram", some_text() + ["[ ] < > mask pad cls"] * 50, vocab_size=90, lowercase=True
    )
    specials = set(special_ids(tokenizer, "made").values()) - {1}
    (ids,) = SentenceEncoder(tokenizer, unknown_id=1).encode(["[MASK] <pad> the [CLS]fox [SEP]"])
    assert not specials & set(ids.tolist())


def test_unknown_word_becomes_the_unknown_token() -> None:
    tokenizer = train_tokenizer("wordpiece", some_text(), vocab_size=200, lowercase=True)
    encoder = SentenceEncoder(tokenizer, unknown_id=1, unknown_word="<unk>")
    plain = [ids.tolist() for ids in encoder.encode(["the", "fox jumps"])]
    found = [ids.tolist() for ids in encoder.encode(["<unk>", "the <unk> fox jumps <unk>", "the"])]
    assert found == [[1], [*plain[0], 1, *plain[1], 1], plain[0]]


def test_tokenizers_that_look_across_blanks_are_not_taken_apart() -> None:
    """A tokenizer of whole sentences: the dictionary of words would give other ids."""
    text = some_text()
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("the fox", -1.0), ("the", -3.0), (" ", -3.0), ("fox", -3.0)], 0)
    )
    assert not words_stand_alone(tokenizer)
    (ids,) = SentenceEncoder(tokenizer, unknown_id=0).encode(["the fox"])
    assert ids.tolist() == [1]
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert words_stand_alone(tokenizer)
    tokenizer.normalizer = normalizers.Replace("the fox", "fox")
    assert not words_stand_alone(tokenizer)
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert not words_stand_alone(byte_level)
    assert text


def test_bad_tokenizers_are_named(tmp_path: Path) -> None:
    def file(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    model = given("albert_spiece.model").read_bytes()
    bare = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "[MASK]": 2}, unk_token="[UNK]"))
    for path, words in [
        (tmp_path / "missing.json", "cannot be read: No such file"),
        (file("a.model", b"not a model"), "is not a sentencepiece model"),
        *(
            (file(f"{n}.model", model[:n]), "is not a sentencepiece model")
            for n in (1, 1000, 1001, 1002, 1003)
        ),
        (file("a.json", b"{}"), "is not a tokenizer.json"),
        (file("bare.json", bare.to_str().encode()), r"no token for cls \(\[CLS\].*, sep .*, pad "),
        (file("a.txt", b"[PAD]\n\xff"), "line 2: 0xff, byte 7 of the file, is not UTF-8; .*iconv"),
        (file("c.txt", b"[PAD]\n[UNK]\nx\n"), "no token for cls"),
        (file("VOCAB.TXT", b"[PAD]\n[UNK]\nx\n"), "no token for cls"),
        (file("d.txt", b"[PAD]\r[UNK]\rx\r"), r"its lines end in CR alone; convert it: tr"),
        (
            file("e.json", b"version https://git-lfs.github"),
            "pointer of Git LFS .*: git lfs pull",
        ),
        (file("a.bin", b""), "known by the end of its name"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            read_tokenizer(path, lowercase=True)
        assert str(path) in str(caught.value)


def test_a_vocabulary_with_lines_twice_is_that_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import BertTokenizer

    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "ship", "", "fox", "ship", "", "##es"]
    lines += ["\u3000", "\u00a0", "\u2028", "\u0085", ""]  # spaces that end no line, and a blank last line
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(lines) + "\n")
    tokenizer = read_tokenizer(path, lowercase=True)
    kind = "token that is there again below, where its id is"
    line = f"shoal: tokenizer {path}: left out 3: {kind}: 3 (line 7: 'ship', line 8, line 11)\n"
    assert capsys.readouterr().err == line
    with pytest.raises(UsageError, match=rf"line 7 is a {kind}: 'ship'; correct it, or let such"):
        read_tokenizer(path, lowercase=True, on_bad="refuse")
    theirs = BertTokenizer(vocab={token: number for number, token in enumerate(lines)})
    for text in ("the ship", "the fox ships", "foxes", "shipes the fox"):
        assert tokenizer.encode(text).ids == theirs(text)["input_ids"]
    last = {token: number for number, token in enumerate(lines)}
    assert {token: tokenizer.token_to_id(token) for token in lines} == last
    assert tokenizer.token_to_id("ship") == 9 and vocab_size(tokenizer) == len(lines)


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_vocabulary_too_small_for_the_characters(kind: Kind) -> None:
    with pytest.raises(UsageError, match="vocab"):
        train_tokenizer(kind, some_text(), vocab_size=16, lowercase=True)


def test_bpe_model_of_sentencepiece_is_refused(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceTrainer

    prefix = tmp_path / "bpe"
    SentencePieceTrainer.train(
        sentence_iterator=iter(some_text()),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=80,
        minloglevel=2,
    )
    with pytest.raises(UsageError, match="only Unigram"):
        read_tokenizer(prefix.with_suffix(".model"), lowercase=True)


def test_json_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("wordpiece", some_text(), vocab_size=200, lowercase=True)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_json(tokenizer))
    assert json.loads(path.read_bytes())["truncation"]
    assert len(read_tokenizer(path, lowercase=True).encode("the fox jumps over the old fence").ids) > 7
