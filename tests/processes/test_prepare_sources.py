"""`prepare_text` from rows and compressed files: the same articles in order, also after kills."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pyarrow as pa
import pytest
import zstandard
from prepare_jobs import DEADLINE_S, command, contents, prepare, write_corpus
from pyarrow import parquet
from tokenizers import Tokenizer

from shoal.data.manifest import Manifest
from shoal.data.text.chunk_worker import article_rank
from shoal.data.text.corpus import cut_chunks, find_files, read_articles
from shoal.data.text.prepare import held_out_rank
from shoal.data.text.sentences import split_sentences
from shoal.data.text.shards import Shard
from shoal.env.settings import test_data_dir as data_dir


def documents(out: Path) -> dict[str, list[list[list[int]]]]:
    """Return the ids of each sentence of each document by split."""
    manifest = Manifest.load(out)
    found: dict[str, list[list[list[int]]]] = {split: [] for split in manifest.splits}
    for split, infos in manifest.splits.items():
        for info in infos:
            shard = Shard(out, info, manifest.vocab_size)
            for document in range(info.num_documents):
                begin, end = shard.document_offsets[document : document + 2]
                edges = shard.sentence_offsets[begin : end + 1]
                found[split].append([shard.tokens[a:b].tolist() for a, b in pairwise(edges)])
    return found


def as_rows(articles: list[str], field: str) -> bytes:
    rows = ({"id": number, field: text.replace("\n", "\n\n")} for number, text in enumerate(articles))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_lines(articles: list[str]) -> bytes:
    return "".join(text.replace("\n", " ") + "\n" for text in articles).encode()


def write_parquet(path: Path, articles: list[str], **options: Any) -> None:
    parquet.write_table(
        pa.table({"text": [text.replace("\n", "\n\n") for text in articles]}), path, **options
    )


def as_dump(articles: list[str]) -> bytes:
    """A dump whose pages have the text of the articles, with markup in and between the paragraphs."""
    pages = []
    for number, text in enumerate(articles):
        title, *paragraphs = text.split("\n")
        body = "{{Infobox|a=[[b]]}}\n"
        for paragraph in paragraphs:
            words = [_SPECIAL.sub(lambda found: f"&#{ord(found[0])};", word) for word in paragraph.split(" ")]
            words[0] = f"[[{words[0]}]]"
            words[-1] = f"[[Target|'''{words[-1]}''']]<ref name=a>A {{{{note}}}}</ref>"
            body += " ".join(words) + "\n\n[[File:A.jpg|thumb|A caption.]]\n{| class=x\n| cell\n|}\n\n"
        fields = f"<title>{escape(title)}</title>\n<ns>0</ns>\n<id>{number}</id>"
        body = escape(body + "[[Category:B]]")
        pages.append(f"<page>\n{fields}\n<revision>\n<text>{body}</text>\n</revision>\n</page>\n")
        pages.append(
            "<page>\n<title>Talk</title>\n<ns>1</ns>\n<revision><text>No.</text></revision>\n</page>\n"
        )
    return f"<mediawiki>\n<siteinfo />\n{''.join(pages)}</mediawiki>\n".encode()


_SPECIAL = re.compile(r"[^\w ,.]", re.ASCII)


@pytest.fixture(scope="module")
def articles(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A megabyte of articles: real ones where there are, each with paragraphs."""
    path = data_dir() / "wikitext2" / "valid.txt"
    if not path.is_file():
        path = write_corpus(tmp_path_factory.mktemp("made") / "corpus.txt", 1_100_000)
    (chunk,) = cut_chunks(find_files([str(path)], "auto"), 1 << 30)
    return list(read_articles(chunk, "strict"))


@pytest.fixture(scope="module")
def some(articles: list[str]) -> list[str]:
    """The first of the articles, less than half a megabyte."""
    return articles[:28]


@pytest.fixture(scope="module")
def sources(some: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same articles in every container."""
    folder = tmp_path_factory.mktemp("sources")
    rows, lines = as_rows(some, "body"), as_lines(some)
    middle = len(lines) // 2
    (folder / "1.jsonl").write_bytes(rows)
    (folder / "2.jsonl.gz").write_bytes(gzip.compress(rows))
    write_parquet(folder / "3.parquet", some, row_group_size=10, compression="zstd")
    (folder / "4.txt.zst").write_bytes(
        zstandard.compress(lines[:middle]) + zstandard.compress(lines[middle:])
    )
    (folder / "5.txt.bz2").write_bytes(bz2.compress(lines))
    write_parquet(folder / "6.parquet", some)
    (folder / "6.parquet.gz").write_bytes(gzip.compress((folder / "6.parquet").read_bytes()))
    (folder / "7-pages-articles.xml.bz2").write_bytes(bz2.compress(as_dump(some)))
    names = [
        "1.jsonl:body",
        "2.jsonl.gz:body",
        "3.parquet:text",
        "4.txt.zst",
        "5.txt.bz2",
        "6.parquet.gz",
        "7-pages-articles.xml.bz2",
    ]
    return [str(folder / name) for name in names]


@pytest.fixture(scope="module")
def whole(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sources, prepared without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = prepare("", out, sources=sources)
    assert done.returncode == 0, done.stderr
    return out


def test_every_source_gives_its_articles_in_order(some: list[str], sources: list[str], whole: Path) -> None:
    manifest = Manifest.load(whole)
    tokenizer = Tokenizer.from_file(str(whole / manifest.tokenizer.file))
    tokenizer.encode_special_tokens = True

    def encode(text: str) -> list[list[int]]:
        sentences = [one for paragraph in text.split("\n") for one in split_sentences(paragraph)]
        return [e.ids for e in tokenizer.encode_batch(sentences, add_special_tokens=False)]

    flat = [text.replace("\n", " ") for text in some]
    given = [some, some, some, flat, flat, some, some]
    assert len(given) == len(sources)
    rank = held_out_rank([text for texts in given for text in texts], True, 0.05, 0)
    everything = documents(whole)
    for split in ("train", "validation"):
        expected = [
            encode(text)
            for texts in given
            for text in texts
            if (article_rank(text, 0) <= rank) == (split != "train")
        ]
        found = everything[split]
        assert found == [[ids for ids in document if ids] for document in expected]
        assert len(found) > 5


@pytest.mark.slow
def test_killed_while_it_unpacks_it_ends_with_the_same_bytes(
    sources: list[str], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    unpacked = out / "records" / "unpacked"
    kept: dict[str, int] = {}
    for num_files in (1, 3):
        process = subprocess.Popen(
            command("", out, sources=sources, processes=1), start_new_session=True, stderr=subprocess.DEVNULL
        )
        ends = time.monotonic() + DEADLINE_S
        while len([*unpacked.glob("0000?")]) < num_files:
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        now = {path.name: path.stat().st_ino for path in unpacked.glob("0000?")}
        assert kept.items() <= now.items(), "a file was unpacked again"
        kept = now
    done = prepare("", out, sources=sources, processes=3)
    assert done.returncode == 0 and "of 5 unpacked files were finished before" in done.stderr
    assert contents(out) == contents(whole)
    assert not (out / "records").exists()


READ_ALL = """
import re, sys
from pathlib import Path
from shoal.data.progress import PreparationProgress
from shoal.data.text.corpus import cut_chunks, find_files, read_articles
from shoal.data.text.unpack import unpack_files
if __name__ == "__main__":
    found = find_files([sys.argv[1]], "auto")
    files = unpack_files(found, Path(sys.argv[2]), PreparationProgress(shown=False), processes=1)
    chunks = cut_chunks(files, 1 << 20)
    print(sum(len(article) for chunk in chunks for article in read_articles(chunk, "strict")))
    print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_memory_does_not_grow_with_the_source(articles: list[str], tmp_path: Path, name: str) -> None:
    rng = random.Random(0)
    peaks = []
    for times in (8, 40):  # 9 and 44 MB; in Parquet one row group, whose pages are of one size
        many = [article for _ in range(times) for article in rng.sample(articles, len(articles))]
        if name.endswith("zst"):
            (tmp_path / name).write_bytes(zstandard.compress(as_rows(many, "text")))
        else:
            pages = {"use_dictionary": False, "write_batch_size": 16}
            write_parquet(tmp_path / name, many, compression="zstd", **pages)
            assert parquet.ParquetFile(tmp_path / name).num_row_groups == 1
        arguments = [sys.executable, "-c", READ_ALL, str(tmp_path / name), str(tmp_path / str(times))]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        num_characters, peak = map(int, done.stdout.split())
        assert num_characters == sum(map(len, many))
        peaks.append(peak / 1024)
    assert peaks[1] < peaks[0] + 20, peaks  # MiB; the text grew by 33


def test_a_data_set_is_prepared_as_its_rows_are(articles: list[str], whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="no datasets found: pip install '.[bench]' to run this")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(as_rows(articles, "body"))
    sources = [f"hf:{tmp_path / 'set'}:::body", f"{tmp_path / 'set' / 'train.jsonl'}:body"]
    outs = [tmp_path / "rows", tmp_path / "file"]
    for source, out in zip(sources, outs, strict=True):
        done = prepare(source, out, tokenizer=str(whole / "tokenizer.json"))
        assert done.returncode == 0, done.stderr
    rows, file = map(documents, outs)
    assert rows == file and len(rows["train"]) > 50


@pytest.mark.parametrize(
    ("name", "pack", "words"),
    [
        ("a.txt.gz", lambda text: gzip.compress(text)[:-5], "a.txt.gz: was cut short"),
        ("a.txt.zst", lambda text: text, "a.txt.zst: is damaged, or not compressed as .zst"),
        (
            "a.jsonl.bz2",
            lambda text: bz2.compress(b'{"txt": "Good."}\n{"text": "Good."}\n'),
            "a.jsonl.bz2: there is no text in a field 'text'",
        ),
        (
            "a.txt.bz2",
            lambda text: bz2.compress(b"Caf\xe9\n"),
            "a.txt.bz2: nothing can be used; left out 1: entry with bytes that are not UTF-8",
        ),
        ("a.parquet", lambda text: text, "a.parquet: cannot be read as Parquet"),
    ],
)
def test_bad_sources_are_one_clear_error(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes], words: str
) -> None:
    (tmp_path / name).write_bytes(pack(b"The quick brown fox. So.\n" * 20_000))
    done = prepare(tmp_path / name, tmp_path / "out")
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.splitlines()[-1].startswith("error: ")
