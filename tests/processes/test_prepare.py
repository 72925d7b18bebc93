"""`prepare_text` as real processes: any number of them, killed, out of space, given bad input."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepare_jobs import DEADLINE_S, DRIVER, SMALL_SAMPLE, command, contents, prepare, write_corpus
from tokenizers import Tokenizer

from forked import is_running
from shoal.data.manifest import Manifest
from shoal.data.text.corpus import find_files
from shoal.data.text.sentences import split_sentences
from shoal.data.text.shards import Shard
from shoal.env.settings import test_data_dir as data_dir


def identities(out: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of the shards whose piece is recorded as finished.

    From the manifest on all of them are, and the records of the pieces are being removed.
    """
    numbers = {record.stem for record in (out / "records").glob("0*.json")}
    if (out / "manifest.json").is_file():
        numbers = {file.stem.rpartition("-")[2] for file in out.glob("*-*.tokens")}
    return {
        file.name: (file.stat().st_ino, file.stat().st_mtime_ns)
        for file in out.glob("*-*.*")
        if file.suffix != ".partial" and file.stem.rpartition("-")[2] in numbers
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("source") / "corpus.txt", 1_250_000)


@pytest.fixture(scope="module")
def whole(corpus: Path) -> Path:
    """The corpus, prepared without interruption."""
    done = prepare(corpus, out := corpus.parent / "whole")
    assert done.returncode == 0, done.stderr
    return out


def test_the_shards_hold_the_text(corpus: Path, whole: Path) -> None:
    """Every article of the source, in order, with its sentences, encoded as the stored tokenizer does."""
    manifest = Manifest.load(whole)
    tokenizer = Tokenizer.from_file(str(whole / manifest.tokenizer.file))
    tokenizer.encode_special_tokens = True
    articles = corpus.read_text(encoding="utf-8").splitlines()
    found: dict[str, list[list[list[int]]]] = {"train": [], "validation": []}
    for split, documents in found.items():
        for info in manifest.shards(split):
            shard = Shard(whole, info, manifest.vocab_size)
            for document in range(info.num_documents):
                begin, end = shard.document_offsets[document : document + 2]
                edges = shard.sentence_offsets[begin : end + 1]
                documents.append([shard.tokens[a:b].tolist() for a, b in pairwise(edges)])
    num_held_out = len(found["validation"])
    assert abs(num_held_out - 0.05 * len(articles)) < 1
    for article in articles:
        encodings = tokenizer.encode_batch(split_sentences(article), add_special_tokens=False)
        expected = [e.ids for e in encodings]
        split = next(s for s in found if found[s] and found[s][0] == expected)
        found[split].pop(0)
    assert found == {"train": [], "validation": []}
    assert len(manifest.shards("train")) == 20  # 1.25 MB in pieces of 64 KiB


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_number_of_processes_does_not_matter(
    corpus: Path, whole: Path, tmp_path: Path, processes: int
) -> None:
    done = prepare(corpus, tmp_path / "out", processes=processes)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(whole)


def test_killed_again_and_again_it_ends_with_the_same_bytes(
    corpus: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    rng = random.Random(3)
    finished: dict[str, tuple[int, int]] = {}
    num_kills = 0
    while True:
        process = subprocess.Popen(command(corpus, out), start_new_session=True, stderr=subprocess.DEVNULL)
        # the first kills fall into planning and training, the later ones come after some new pieces
        limit = len(list((out / "records").glob("0*.json"))) + rng.randint(2, 4) if num_kills > 1 else None
        ends = time.monotonic() + (rng.uniform(0.2, 0.8) if limit is None else DEADLINE_S)
        while process.poll() is None and time.monotonic() < ends:
            if limit is not None and len(list((out / "records").glob("0*.json"))) >= limit:
                time.sleep(rng.uniform(0, 0.002))
                break
            time.sleep(0.005)
        if process.poll() is not None:
            assert process.returncode == 0
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        num_kills += 1
        now = identities(out) if out.exists() else {}
        assert finished.items() <= now.items(), "a finished shard was written again"
        finished = now
        assert num_kills < 40
    assert num_kills >= 5 and len(finished) > 10
    after = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in out.iterdir()}
    assert finished.items() <= after.items()
    assert contents(out) == contents(whole)


def test_again_changed_and_anew(corpus: Path, whole: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "text.txt", tmp_path / "out"
    source.write_bytes(corpus.read_bytes()[:300_000] + b"\n")
    assert prepare(source, out).returncode == 0
    before = {file.name: file.stat() for file in out.iterdir()}
    done = prepare(source, out, processes=1)
    assert done.returncode == 0 and "already prepared" in done.stderr
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == {
        name: status.st_mtime_ns for name, status in before.items()
    }
    done = prepare(source, out, validation=0.2, vocab_size=299)
    assert done.returncode == 2
    assert "validation was 0.05 and is now 0.2; vocab_size was 300 and is now 299" in done.stderr.replace(
        "\n", " "
    )
    assert "--overwrite" in done.stderr
    with source.open("a") as file:
        file.write("One more article. It is short.\n")
    done = prepare(source, out)
    assert done.returncode == 2 and "source_state" in done.stderr and "--overwrite" in done.stderr
    assert {name: status.st_ino for name, status in before.items()} == {
        f.name: f.stat().st_ino for f in out.iterdir()
    }
    assert prepare(corpus, out, overwrite=True).returncode == 0
    assert contents(out) == contents(whole)


def test_somebody_elses_directory_is_left_alone(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        done = prepare(corpus, tmp_path, overwrite=overwrite)
        assert done.returncode == 2 and "thesis.tex" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_one_at_a_time(corpus: Path, tmp_path: Path) -> None:
    first = subprocess.Popen(command(corpus, tmp_path / "out"), stderr=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / "out" / "prepare.json").exists())
    second = prepare(corpus, tmp_path / "out")
    assert second.returncode == 1 and "another process" in second.stderr
    assert first.wait(DEADLINE_S) == 0


def test_full_disk_keeps_what_is_finished(corpus: Path, whole: Path, tmp_path: Path) -> None:
    """A limit on file sizes is a disk that is full for every file beyond it: real, and needs no root."""
    out = tmp_path / "out"
    sizes = sorted(file.stat().st_size for file in whole.glob("train-*.tokens"))
    limit = sizes[-1] - 1  # all but the largest shard fit
    assert limit > (whole / "tokenizer.json").stat().st_size
    done = prepare(corpus, out, most_bytes=limit)
    assert done.returncode == 1 and "no space left" in done.stderr and ".tokens" in done.stderr
    assert "Traceback" not in done.stderr and not list(out.glob("*.partial"))
    kept = identities(out)
    done = prepare(corpus, out)
    assert done.returncode == 0 and (not kept or "finished before" in done.stderr)
    after = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in out.iterdir()}
    assert kept.items() <= after.items()
    assert contents(out) == contents(whole)


def test_articles_with_wrong_bytes_are_left_out_or_kept(corpus: Path, tmp_path: Path) -> None:
    lines = corpus.read_bytes().splitlines(keepends=True)[:120]
    bad = b"Caf\xe9 au lait. " + lines[-1]
    source, good, kept = (tmp_path / name for name in ("bad.txt", "good.txt", "kept.txt"))
    source.write_bytes(b"".join([*lines, bad]))
    good.write_bytes(b"".join(lines))
    kept.write_bytes(b"".join([*lines, bad.replace(b"\xe9", "\ufffd".encode())]))
    done = prepare(source, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    line, byte = f"line {len(lines) + 1} of {source}", f": 0xe9, byte {good.stat().st_size + 4} of the file"
    assert f"left out 1: entry with bytes that are not UTF-8: 1 ({line}{byte}" in done.stderr
    again = prepare(source, tmp_path / "out", errors="replace")
    assert again.returncode == 2 and "'replace'" in again.stderr and "--overwrite" in again.stderr
    refused = prepare(source, tmp_path / "refused", on_bad="refuse")
    assert refused.returncode == 2 and "--errors replace" in refused.stderr
    assert f"{line} is an entry with bytes that are not UTF-8{byte}" in refused.stderr
    for path, out, options in (
        (good, "good", {}), (kept, "kept", {}), (source, "replaced", {"errors": "replace"}),
    ):  # fmt: skip
        assert prepare(path, tmp_path / out, **options).returncode == 0
    assert tokens(tmp_path / "out") == tokens(tmp_path / "good")
    assert tokens(tmp_path / "replaced") == tokens(tmp_path / "kept") != tokens(tmp_path / "good")


def test_an_array_is_prepared_as_its_lines_are(corpus: Path, tmp_path: Path) -> None:
    rows: list[Any] = [{"text": line} for line in corpus.read_text(encoding="utf-8").splitlines()[:120]]
    rows[3:3] = [{"text": None}, 7]
    lines, array, packed = (tmp_path / name for name in ("a.jsonl", "a.json", "b.json.gz"))
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    array.write_text("\ufeff" + json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    packed.write_bytes(gzip.compress(array.read_bytes()))
    for source, unit in ((lines, "line"), (array, "entry"), (packed, "entry")):
        done = prepare(source, tmp_path / f"{source.name}.out")
        assert done.returncode == 0, done.stderr
        assert "read as jsonl" in done.stderr
        assert f"row whose text is null: 1 ({unit} 4 of {source})" in done.stderr
        assert f"with the text: 1 ({unit} 5 of {source}: holds int" in done.stderr
        assert tokens(tmp_path / f"{source.name}.out") == tokens(tmp_path / "a.jsonl.out")
    array.write_text("[]")
    done = prepare(array, tmp_path / "empty")
    assert done.returncode == 2 and "is empty, as all of the source" in done.stderr
    array.write_text('["a", "b"]')
    done = prepare(array, tmp_path / "words")
    assert done.returncode == 2 and f"entry 1 of {array}: holds str, and not an object" in done.stderr


def test_wrong_byte_in_a_worker_keeps_finished_pieces(tmp_path: Path) -> None:
    """Behind what the sample reads, it is a worker that finds the byte."""
    source = write_corpus(tmp_path / "large.txt", 1_000_000)
    with source.open("ab") as file:
        file.write(b"Good. \xff Bad.\n")
    options: dict[str, Any] = {"driver": SMALL_SAMPLE + DRIVER}
    done = prepare(source, tmp_path / "out", on_bad="refuse", **options)
    assert done.returncode == 2 and "0xff, byte" in done.stderr and "Traceback" not in done.stderr
    kept = identities(tmp_path / "out")
    assert len(kept) > 10
    done = prepare(source, tmp_path / "out", **options)
    assert done.returncode == 0 and "finished before" in done.stderr and "left out 1" in done.stderr
    after = {f.name: (f.stat().st_ino, f.stat().st_mtime_ns) for f in (tmp_path / "out").iterdir()}
    assert kept.items() <= after.items()


def tokens(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(out).items() if name.endswith((".tokens", ".index"))}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (None, {}, "there is no such file"),
        ("", {}, "is empty"),
        (" \n\n", {}, "no article in the source"),
        ("Only one article.\n", {}, "only one article"),
        ("The quick brown fox jumps over it. So.\nOther.\n", {"vocab_size": 17}, "--vocab-size"),
        ("One. Two.\nOther.\n", {"validation": 1.5}, "validation=1.5 must be"),
        ("One. Two.\nOther.\n", {"tokenizer": "unigrm"}, "Did you mean 'unigram'"),
    ],
)
def test_bad_input_is_one_clear_error(
    tmp_path: Path, text: str | None, options: dict[str, Any], words: str
) -> None:
    source = tmp_path / "text.txt"
    if text is not None:
        source.write_text(text)
    done = prepare(source, tmp_path / "out", **options)
    assert done.returncode == 2 and words in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("error:") == 1


def test_a_directory_that_cannot_be_made(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = prepare(corpus, tmp_path / "file" / "out")
    assert done.returncode == 1 and "cannot be written: Not a directory" in done.stderr


def test_verse_is_read_as_lines_and_says_that_there_is_no_order_to_learn(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=4)) for _ in range(200)]
    verse = tmp_path / "verse.txt"
    verse.write_text("".join(f"{' '.join(rng.choices(words, k=6)).capitalize()},\n\n" for _ in range(400)))
    done = prepare(verse, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert f"read as lines, one article per line: {verse} (another: --format files or wikitext)" in lines
    assert lines[-1].startswith("warning: 1.00 sentences per article. ALBERT learns the order of sentences")
    (tmp_path / "chapters").mkdir()
    for number in range(2):
        text = "".join(f"{' '.join(rng.choices(words, k=6)).capitalize()}. " for _ in range(200))
        (tmp_path / "chapters" / f"{number}.txt").write_text(text)
    done = prepare(tmp_path / "chapters", tmp_path / "out", overwrite=True)
    assert done.returncode == 0, done.stderr
    assert "read as files, one article per file: 2 files" in done.stderr and "warning" not in done.stderr


def test_without_validation_there_is_one_split(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("The one article. It has two sentences.\n")
    options = {"tokenizer": "unigram", "validation": 0.0, "vocab_size": 60}
    assert prepare(source, tmp_path / "out", **options).returncode == 0
    manifest = Manifest.load(tmp_path / "out")
    assert list(manifest.splits) == ["train"]
    assert [(s.num_documents, s.num_sentences) for s in manifest.shards("train")] == [(1, 2)]


def test_wikitext_with_albert_tokenizer(tmp_path: Path) -> None:
    """Real articles; `<unk>` of the data is the tokenizer's own."""
    source, model = data_dir() / "wikitext2", data_dir() / "tokenizers" / "albert_spiece.model"
    if not (source.is_dir() and model.is_file()):
        pytest.skip(f"no WikiText-2 and ALBERT model in {data_dir()}; set SHOAL_TEST_DATA")
    assert prepare(source, tmp_path / "out", tokenizer=str(model)).returncode == 0
    manifest = Manifest.load(tmp_path / "out")
    infos = [info for split in manifest.splits.values() for info in split]
    assert sum(info.num_documents for info in infos) == 60 + 62
    shards = [Shard(tmp_path / "out", info, manifest.vocab_size) for info in infos]
    num_unknown = sum(int(np.count_nonzero(shard.tokens == manifest.unk_id)) for shard in shards)
    files = find_files([str(source)], "auto")
    assert {file.format for file in files} == {"wikitext"}
    num_written = sum(file.path.read_text(encoding="utf-8").count("<unk>") for file in files)
    assert num_written <= num_unknown < 1.6 * num_written
    assert (manifest.vocab_size, manifest.tokenizer.kind) == (30_000, "unigram")


def test_memory_does_not_grow_with_the_corpus(corpus: Path, whole: Path, tmp_path: Path) -> None:
    # the parent's ru_maxrss would count what this process had before exec; VmHWM does not
    measure = (
        "import resource, re\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    text = corpus.read_bytes()
    peaks = []
    for times in (2, 12):  # 2.5 and 15 MB
        source = tmp_path / f"{times}.txt"
        source.write_bytes(text * times)
        options: dict[str, Any] = {"tokenizer": str(whole / "tokenizer.json"), "shard_bytes": 1 << 20}
        arguments = command(source, tmp_path / str(times), SMALL_SAMPLE + DRIVER + measure, **options)
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        peaks.append([int(line) / 1024 for line in done.stdout.split()])  # MiB: parent, largest worker
    for small, large in zip(*peaks, strict=True):
        assert large < small + 4, peaks  # the text itself grew by 12 MiB


def test_a_killed_worker_is_said_and_a_killed_parent_leaves_no_orphans(
    corpus: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tokenizer = {"tokenizer": str(whole / "tokenizer.json")}
    process = subprocess.Popen(command(corpus, out, **tokenizer), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any((out / "records").glob("0*.json")) or process.poll() is not None)
    os.kill(next(workers_of(process.pid)), signal.SIGKILL)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and "a worker process was killed" in stderr and "Traceback" not in stderr

    other = tmp_path / "other"
    process = subprocess.Popen(command(corpus, other, **tokenizer), stderr=subprocess.DEVNULL)
    wait_for(lambda: any((other / "records").glob("0*.json")) or process.poll() is not None)
    orphans = list(workers_of(process.pid))
    assert len(orphans) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(is_running(pid) for pid in orphans))


def test_it_starts_without_torch() -> None:
    unwanted = "{'torch', 'transformers', 'datasets'}"
    code = f"import sys, shoal.data.text.prepare; print(*{unwanted} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.slow
def test_builtin_is_large_and_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    for processes in (1, 2):
        out = tmp_path / str(processes)
        options = {"tokenizer": "unigram", "vocab_size": 8192, "shard_bytes": 64 << 20}
        assert prepare("builtin", out, processes=processes, **options).returncode == 0
    assert (tmp_path / "1" / "builtin.txt").stat().st_size > 5_000_000
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def workers_of(pid: int) -> Iterator[int]:
    """Processes that `multiprocessing` spawned for ``pid``, without its resource tracker."""
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield child
