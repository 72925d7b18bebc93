"""Data sets through `datasets`: local directories, which need no network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shoal.data.text.corpus import find_files
from shoal.data.text.hub import HubSource, json_lines, parse_hub
from shoal.errors import UsageError

pytest.importorskip("datasets", reason="no datasets found: pip install '.[bench]' to run this")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set with two configurations, one of them with two splits."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "some_texts"
    for config, split, count in [("plain", "train", 150), ("plain", "test", 3), ("other", "train", 2)]:
        rows = [{"id": n, "body": None if n == 1 else f"{config} {split} {n}: é\n\n😀"} for n in range(count)]
        (folder / config).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / config / f"{split}.jsonl").write_text(text, encoding="utf-8")
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("plain", "other"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return folder


def rows_of(source: str) -> list[str | None]:
    return [json.loads(line)["body"] for line in b"".join(json_lines(source)).decode().splitlines()]


def test_parts_of_a_name() -> None:
    assert parse_hub("hf:allenai/c4") == HubSource("allenai/c4", "", "train", "text")
    assert parse_hub("hf:a::validation") == HubSource("a", "", "validation", "text")
    assert parse_hub("hf:a:b:train[:10%]+test[5:]:c") == HubSource("a", "b", "train[:10%]+test[5:]", "c")
    for wrong in ("hf:", "hf::b", "hf:a:b:c:d:e"):
        with pytest.raises(UsageError, match=r"is named as hf:NAME\["):
            parse_hub(wrong)


def test_rows_in_their_order(folder: Path) -> None:
    expected = [None if n == 1 else f"plain train {n}: é\n\n😀" for n in range(150)]
    assert rows_of(f"hf:{folder}:plain::body") == expected
    assert rows_of(f"hf:{folder}:plain:train[20:50]:body") == expected[20:50]
    assert len(rows_of(f"hf:{folder}:plain:test:body")) == 3
    assert rows_of(f"hf:{folder}:other::body")[0] == "other train 0: é\n\n😀"


def test_a_source_is_listed_and_not_loaded(tmp_path: Path) -> None:
    (file,) = find_files([f"hf:{tmp_path / 'none'}:::body"], "auto")
    assert (file.format, file.field, file.name) == ("jsonl", "body", f"hf:{tmp_path / 'none'}:::body")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (":plain", "there is no text in a field 'text'; its texts are body"),
        (":plain::id", "no text in a field 'id'"),
        (":plain:dev:body", "Unknown split"),
        (":plan::body", "BuilderConfig 'plan' not found"),
    ],
)
def test_what_is_not_there_is_named(folder: Path, parts: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        list(json_lines(f"hf:{folder}{parts}"))
    assert f"hf:{folder}{parts}: " in str(caught.value)
    with pytest.raises(UsageError, match="none: datasets cannot load it"):
        list(json_lines(f"hf:{folder}/none"))


def test_without_datasets_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"hf:a: needs the package datasets.*pip install datasets"):
        parse_hub("hf:a")
