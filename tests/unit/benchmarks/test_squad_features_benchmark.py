"""The peer's code is ours to write, so it must find the windows and answers that the data has."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks import squad_features
from benchmarks.squad_features import WINDOWS, check_equal, map_rows, question_rows

from shoal.data.squad.dataset import SquadData, read_squad
from shoal.data.squad.features import SquadFeatures, make_features
from shoal.env.settings import test_data_dir as data_dir

needs_data = pytest.mark.skipif(
    not (data_dir() / "tokenizers").is_dir(), reason="no tokenizers of the test data (SHOAL_TEST_DATA)"
)


@pytest.fixture
def data(tmp_path: Path) -> SquadData:
    """Two paragraphs, the first of several windows, and a question without an answer."""
    words = [f"w{number}" for number in range(200)]
    long = " ".join(words)
    questions = [
        ("a", "  Which word?", [{"text": "w130 w131", "answer_start": long.index("w130 w131")}]),
        ("b", "None?", []),
    ]
    short = [("c", "What? ", [{"text": "wrote", "answer_start": 4}])]
    paragraphs = [
        {
            "context": context,
            "qas": [{"id": i, "question": q, "answers": a, "is_impossible": not a} for i, q, a in asked],
        }
        for context, asked in ((long, questions), ("Ada wrote it.", short))
    ]
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return read_squad(file, purpose="train")


@needs_data
@pytest.mark.parametrize("name", squad_features.TOKENIZERS)
def test_both_sides_make_the_same_windows(name: str, data: SquadData) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    mine, theirs = squad_features.read_pair(name)
    ours, peer = make_features(data, mine, WINDOWS), map_rows(question_rows(data), theirs, 1)
    assert len(ours) > len(data.questions)
    assert np.count_nonzero(ours.start) >= 2
    assert check_equal(name, ours, peer) == 0
    for field in ("tokens", "types", "start"):
        with pytest.raises(SystemExit, match=name):
            check_equal(name, _with_one_changed(ours, field), peer)
    with pytest.raises(SystemExit, match="windows here"):
        check_equal(name, ours, peer.select(range(len(peer) - 1)))


def _with_one_changed(features: SquadFeatures, field: str) -> SquadFeatures:
    changed = copy.copy(features)
    values = getattr(features, field).copy()
    values[-1] += 1
    object.__setattr__(changed, field, values)
    return changed


def test_absent_test_data_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_TEST_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"vocab\.txt is not there.*SHOAL_TEST_DATA"):
        squad_features.read_pair("WordPiece")
