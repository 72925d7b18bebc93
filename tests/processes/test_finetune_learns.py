"""The whole path can learn: real questions of SQuAD by heart, from random weights, through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import finetune_made as made
from forked import shoal
from shoal.env.settings import test_data_dir as data_dir

REAL = data_dir() / "squad" / "cs224n-dev-v2.0.json"
pytestmark = pytest.mark.skipif(not REAL.is_file(), reason="needs the SQuAD files of SHOAL_TEST_DATA")


def first_questions(count: int, out: Path) -> tuple[Path, list[str]]:
    """Write the first ``count`` questions of the real file; return the texts as well."""
    articles: list[dict[str, Any]] = []
    texts: list[str] = []
    for article in json.loads(REAL.read_text(encoding="utf-8"))["data"]:
        paragraphs = []
        for paragraph in article["paragraphs"]:
            taken = paragraph["qas"][:count]
            count -= len(taken)
            if taken:
                paragraphs.append({"context": paragraph["context"], "qas": taken})
                texts += [paragraph["context"], *(entry["question"] for entry in taken)]
        if paragraphs:
            articles.append({"title": article["title"], "paragraphs": paragraphs})
    out.write_text(json.dumps({"version": "v2.0", "data": articles}), encoding="utf-8")
    return out, texts


def score(folder: Path, num_questions: int, *options: str, **sizes: int) -> float:
    """Return F1 on the questions that a tiny model was trained on."""
    data, texts = first_questions(num_questions, folder / "questions.json")
    model = made.write_model(folder / "model", texts, max_position_embeddings=384, **sizes)
    command = [
        *("finetune", "squad", "--preset", "tiny", "--model", str(model)),
        *("--data", str(data), "--eval", str(data), "--run.dir", str(folder / "run")),
        *("--model.from-scratch", *options),
    ]
    result = shoal(*command, deadline_s=1_500)
    assert result.returncode == 0, result.stderr
    scores = json.loads((folder / "run" / "scores.json").read_text())
    assert scores["total"] == num_questions
    return float(scores["f1"])


@pytest.mark.slow
def test_twenty_questions_are_learnt_by_heart(tmp_path: Path) -> None:
    options = ("--train.epochs", "30", "--train.global-batch-size", "10")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 1_000}
    assert score(tmp_path, 20, *options, **sizes) >= 90


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_two_thousand_questions_are_learnt_by_heart(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 4_000}
    assert score(tmp_path, 2_000, "--workers", "2", **sizes) >= 90
