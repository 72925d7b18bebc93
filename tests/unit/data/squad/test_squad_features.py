"""Windows against the tokenizer's own, cut as transformers' run_qa does; answers found again in the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from squad_cases import make_data, words_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from shoal.data.squad.config import WindowConfig
from shoal.data.squad.dataset import Answer, Question, SquadData, read_squad
from shoal.data.squad.features import SquadFeatures, make_features
from shoal.data.text.tokenizer import read_tokenizer, train_tokenizer
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import UsageError


def real(name: str) -> Path:
    path = data_dir() / name
    if not path.is_file():
        pytest.skip(f"no {name} in {data_dir()}; set SHOAL_TEST_DATA")
    return path


def rows(flat: np.ndarray, features: SquadFeatures) -> list[list[int]]:
    return [part.tolist() for part in np.split(flat, features.bounds[1:-1])]


def run_qa(tokenizer: Tokenizer, data: SquadData, length: int, overlap: int) -> list[tuple[object, ...]]:
    """Return the windows of transformers' run_qa: (question, ids, types, start, end) of each window."""
    tokenizer.encode_special_tokens = True
    tokenizer.enable_truncation(length, stride=overlap, strategy="only_second")
    found: list[tuple[object, ...]] = []
    for k, question in enumerate(data.questions):
        whole = tokenizer.encode(question.text.strip(), data.paragraphs[question.paragraph])
        for window in [whole, *whole.overflowing]:
            inside = [t for t, role in enumerate(window.sequence_ids) if role == 1]
            start = end = 0
            if question.answers:
                begin_char = question.answers[0].start
                end_char = begin_char + len(question.answers[0].text)
                first, last = inside[0], inside[-1]
                if window.offsets[first][0] <= begin_char and window.offsets[last][1] >= end_char:
                    start = max(t for t in inside if window.offsets[t][0] <= begin_char)
                    end = min(t for t in inside if window.offsets[t][1] >= end_char)
            found.append((k, window.ids, window.type_ids, start, end))
    tokenizer.no_truncation()
    return found


def as_run_qa(features: SquadFeatures) -> list[tuple[object, ...]]:
    return list(
        zip(
            features.question.tolist(),
            rows(features.tokens, features),
            rows(features.types, features),
            features.start.tolist(),
            features.end.tolist(),
            strict=True,
        )
    )


def span_text(features: SquadFeatures, window: int) -> str:
    question = features.data.questions[features.question[window]]
    offsets = features.offsets[features.paragraph_bounds[question.paragraph] :]
    shift = features.context_first[window] - features.context_begin[window]
    first, last = features.start[window] + shift, features.end[window] + shift
    return features.data.paragraphs[question.paragraph][offsets[first, 0] : offsets[last, 1]]


@pytest.mark.parametrize(("length", "overlap"), [(384, 128), (120, 30), (100, 0)])
def test_real_data_is_cut_like_run_qa(length: int, overlap: int) -> None:
    tokenizer = read_tokenizer(real("tokenizers/bert-uncased-vocab.txt"), lowercase=True)
    data = read_squad(real("squad/cs224n-dev-v2.0.json"), purpose="train")
    some = SquadData(
        path=data.path,
        version="2.0",
        paragraphs=data.paragraphs,
        questions=data.questions[::12],
    )
    config = WindowConfig(max_seq_length=length, overlap=overlap)
    features = make_features(some, tokenizer, config)
    assert as_run_qa(features) == run_qa(tokenizer, some, length, overlap)
    answered = [w for w in range(len(features)) if features.start[w]]
    exact = sum(
        span_text(features, w) == some.questions[features.question[w]].answers[0].text for w in answered
    )
    assert exact > 0.98 * len(answered) > 100


@pytest.mark.parametrize("name", ["bert-uncased-vocab.txt", "albert_spiece.model"])
def test_answers_are_found_again_in_odd_text(name: str) -> None:
    tokenizer = read_tokenizer(real(f"tokenizers/{name}"), lowercase=True)
    contexts = [
        ("  Ça été — the naïve Ünïcode “quotes” ", "naïve Ünïcode"),
        ("北京 is 😀 far\u00a0 away,  really\tfar.", "far\u00a0 away"),
        ("ALL CAPS and [MASK] [SEP] words: $5.50!", "[SEP] words"),
        ("cafe\u0301 noir", "cafe\u0301 noir"),
        ("東京\u3000北京 x", "北京"),
        ("one two", " two"),  # the blank before an answer does not count
    ]
    data = make_data(*((context, "What, [CLS]?", answer) for context, answer in contexts))
    features = make_features(data, tokenizer, WindowConfig())
    assert features.start.all()
    assert [span_text(features, w) for w in range(len(contexts))] == [
        answer.strip() for _, answer in contexts
    ]
    special = {tokenizer.token_to_id(token) for token in ("[MASK]", "[CLS]", "[SEP]")}
    assert [sum(token in special for token in row) for row in rows(features.tokens, features)] == [3] * len(
        contexts
    )


def test_a_character_of_several_tokens_is_found_as_a_whole() -> None:
    alphabet = ["[UNK]", "[CLS]", "[SEP]", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: k for k, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = words_tokenizer().post_processor
    cases = [("ab 😀 c", "😀"), ("é", "é"), ("x 北京y", "北京y"), ("ab", "b")]
    features = make_features(make_data(*((c, "z", a) for c, a in cases)), tokenizer, WindowConfig())
    assert [span_text(features, w) for w in range(4)] == [answer for _, answer in cases]
    assert (features.end - features.start + 1).tolist() == [4, 2, 7, 1]


def test_an_answer_that_the_tokenizer_leaves_out_is_in_no_window() -> None:
    tokenizer = words_tokenizer()
    tokenizer.normalizer = normalizers.BertNormalizer()
    data = make_data(("a \u200b\u0007 b", "z", "\u0007"), ("a \u0007b", "z", "\u0007b"))
    features = make_features(data, tokenizer, WindowConfig())
    assert features.start.tolist() == features.end.tolist() == [0, 4]


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_every_word_of_a_trained_tokenizer_is_found_again(kind: str) -> None:
    words = [f"{a}{b}" for a in ("run", "jump", "walk", "swim") for b in ("ning", "s", "ed", "er", "")]
    context = " ".join(words)
    tokenizer = train_tokenizer(kind, [context] * 50, vocab_size=60, lowercase=True)
    data = make_data(*((context, "who?", f" {word} "[: 99 if k < len(words) - 1 else -1].lstrip())
                       for k, word in enumerate(words) if context.count(f" {word} ")))  # fmt: skip
    features = make_features(data, tokenizer, WindowConfig())
    assert len(features) >= 10
    for w in range(len(features)):
        assert span_text(features, w) == data.questions[w].answers[0].text.strip()


def test_the_stride_is_from_begin_to_begin() -> None:
    data = make_data(("a b c d e f g h i j k", "z z", "h"), ("a b", "z z", None))
    features = make_features(data, words_tokenizer(), WindowConfig(max_seq_length=10, doc_stride=3))
    cls, sep = 1, 2
    expected = ["abcde", "defgh", "ghijk", "ab"]
    for row, letters in zip(rows(features.tokens, features), expected, strict=True):
        assert row == [cls, 28, 28, sep, *(ord(c) - 94 for c in letters), sep]
    assert rows(features.types, features)[0] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert features.question.tolist() == [0, 0, 0, 1]
    assert features.context_first.tolist() == [0, 3, 6, 0]
    assert features.context_length.tolist() == [5, 5, 5, 2]
    assert features.start.tolist() == features.end.tolist() == [0, 8, 5, 0]


def test_a_stride_longer_than_a_window_leaves_nothing_out() -> None:
    data = make_data(("a b c d e f g", "z z z z", "g"))
    features = make_features(data, words_tokenizer(), WindowConfig(max_seq_length=8, max_question_length=3))
    assert features.context_begin.tolist() == [5] * 4  # the question is cut to 3 tokens
    assert features.context_first.tolist() == [0, 2, 4, 6] and features.context_length.tolist() == [
        2,
        2,
        2,
        1,
    ]
    assert features.start.tolist() == [0, 0, 0, 5]


def test_an_answer_over_the_border_of_all_windows_is_in_none() -> None:
    data = make_data(("a b c d e f", "z", "b c d e"))
    features = make_features(data, words_tokenizer(), WindowConfig(max_seq_length=7, overlap=1))
    assert (
        features.context_first.tolist() == [0, 2, 4] and not features.start.any() and not features.end.any()
    )


def test_texts_without_tokens_and_half_surrogates() -> None:
    data = make_data(("", "z", None), ("   ", "", None), ("a \ud83d b", "\udc00", "b"))
    features = make_features(data, words_tokenizer(), WindowConfig(max_seq_length=12, max_question_length=4))
    assert rows(features.tokens, features) == [[1, 28, 2, 2], [1, 2, 2], [1, 0, 2, 3, 0, 4, 2]]
    assert features.start.tolist() == [0, 0, 5] and span_text(features, 2) == "b"


def test_marked_misplaced_and_blank_answers_are_in_no_window() -> None:
    answers = [
        (Answer("a", 0), True),
        (Answer("a", 2), False),
        (Answer("a", -1), False),
        (Answer(" ", 1), False),
    ]
    questions = tuple(Question(f"q{k}", "z", 0, (a,), marked) for k, (a, marked) in enumerate(answers))
    good = Question("good", "z", 0, (Answer("b", 2), Answer("a", 0)), False)
    data = SquadData(
        path=Path("d"),
        version="2.0",
        paragraphs=("a b",),
        questions=(*questions, good),
    )
    features = make_features(data, words_tokenizer(), WindowConfig())
    assert features.start.tolist() == [0, 0, 0, 0, 4]


def test_the_frame_is_the_tokenizers_own() -> None:
    tokenizer = words_tokenizer("[CLS] $A [SEP] [SEP] $B [SEP]")  # RoBERTa's
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50, pad_id=0, pad_token="[UNK]")
    data = make_data(("a b c d e f", "z z", "f"))
    features = make_features(data, tokenizer, WindowConfig(max_seq_length=10, doc_stride=4))
    assert rows(features.tokens, features) == [[1, 28, 28, 2, 2, 3, 4, 5, 6, 2], [1, 28, 28, 2, 2, 7, 8, 2]]
    assert not features.types.any() and features.start.tolist() == [0, 6]
    assert tokenizer.truncation["max_length"] == 5 and tokenizer.padding["length"] == 50
    assert tokenizer.encode_special_tokens is False
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    with pytest.raises(UsageError, match="puts no special tokens before, between and after a pair"):
        make_features(data, tokenizer, WindowConfig())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            WindowConfig(max_seq_length=6),
            "max_seq_length 6 has no room .* 3 special tokens, a question of 3 and",
        ),
        (WindowConfig(max_seq_length=10, overlap=4), "of 3, 4 tokens of overlap and one new token"),
    ],
)
def test_no_room(config: WindowConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_features(make_data(("a b", "z z z", None)), words_tokenizer(), config)
    with pytest.raises(UsageError, match="doc_stride 0 must be at least 1"):
        WindowConfig(doc_stride=0)
    with pytest.raises(UsageError, match="overlap -1 must be at least 0"):
        WindowConfig(overlap=-1)
