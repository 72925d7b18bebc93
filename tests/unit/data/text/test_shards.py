"""Token shards: what is written is read, and each kind of damage is one clear error."""

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest

from shoal.atomic_io import sha256_of
from shoal.data.cache import OWN_FOLDER, CacheConfig
from shoal.data.manifest import Manifest
from shoal.data.text.shards import ShardWriter, TextShards
from shoal.errors import ShoalError, UsageError
from synthetic_text import TOKENIZER, prepare, random_documents

LENGTHS = [40, 1, 300, 7, 0, 25, 1000, 3]


@pytest.fixture
def prepared(tmp_path):
    prepare(
        tmp_path, {"train": random_documents(LENGTHS), "validation": random_documents([50])}, num_shards=2
    )
    return tmp_path


def as_lists(shards):
    return [[s.tolist() for s in shards.document(i)] for i in range(shards.num_documents)]


@pytest.mark.parametrize("num_bytes", [1 << 20, 3_000], ids=["all fits", "some fits"])
@pytest.mark.parametrize("verify", ["sizes", "checksums"])
def test_documents_come_from_a_cache(prepared, tmp_path, num_bytes, verify, capfd):
    expected = {split: as_lists(TextShards(prepared, split)) for split in ("train", "validation")}
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=num_bytes)
    for split in expected:
        shards = TextShards(prepared, split, verify=verify, cache=cache)
        assert as_lists(shards) == as_lists(pickle.loads(pickle.dumps(shards))) == expected[split]
    folder, manifest = tmp_path / "cache" / OWN_FOLDER, Manifest.load(prepared)
    files = manifest.files()
    copies = {file.name: folder / file.copy_name for file in files if (folder / file.copy_name).exists()}
    assert len(copies) == len(files) if num_bytes > 3_000 else 0 < len(copies) < len(files)
    for name, copy in copies.items():
        assert copy.read_bytes() == (prepared / name).read_bytes()
        copy.write_bytes(b"\xff" * copy.stat().st_size)
    with pytest.raises(ShoalError, match=r"the header of its index differs|token id 65535"):  # of a copy
        TextShards(prepared, "train", verify="checksums", cache=cache)


def test_a_changed_file_does_not_enter_a_cache(prepared, tmp_path):
    tokens = prepared / "train-00000.tokens"
    tokens.write_bytes(bytes(tokens.stat().st_size))
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=1 << 20)
    with pytest.raises(ShoalError, match=r"train-00000\.tokens has the wrong checksum"):
        TextShards(prepared, "train", cache=cache)
    assert not list((tmp_path / "cache" / OWN_FOLDER).glob("train-00000-*.tokens"))


@pytest.mark.parametrize("vocab_size", [300, 65_536, 65_537, 250_000])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("verify", ["sizes", "checksums"])
def test_documents_come_back(tmp_path, vocab_size, num_shards, verify):
    documents = random_documents(LENGTHS, vocab_size=vocab_size)
    documents[0][0][0] = vocab_size - 1
    prepare(tmp_path, {"train": documents}, vocab_size=vocab_size, num_shards=num_shards)
    shards = TextShards(tmp_path, "train", verify=verify)
    written = [document for document in documents if document]
    assert as_lists(shards) == written
    assert shards.document_lengths().tolist() == [length for length in LENGTHS if length]
    assert shards.num_tokens == sum(LENGTHS)
    assert shards.num_sentences == sum(map(len, documents))
    infos = Manifest.load(tmp_path).splits["train"]
    assert sum(info.num_documents for info in infos) == shards.num_documents == len(written)


def test_the_tokens_file_is_flat_and_little_endian(tmp_path):
    prepare(tmp_path, {"train": [[[5, 256], [65_535]], [[7]]]}, vocab_size=65_536)
    assert (tmp_path / "train-00000.tokens").read_bytes() == bytes([5, 0, 0, 1, 255, 255, 7, 0])
    prepare(tmp_path, {"train": [[[5, 65_536]]]}, vocab_size=65_537)
    assert (tmp_path / "train-00000.tokens").read_bytes() == bytes([5, 0, 0, 0, 0, 0, 1, 0])


def test_arrays_and_empty_sentences_are_taken(tmp_path):
    with ShardWriter(tmp_path, "a", 100) as writer:
        writer.add_document([np.array([1, 2], dtype=np.uint16), [], (3,)])
        writer.add_document([[], []])
        assert writer.num_tokens == 3
        info = writer.finish()
    assert (info.num_documents, info.num_sentences, info.num_tokens) == (1, 2, 3)


def test_a_split_may_be_empty(tmp_path):
    prepare(tmp_path, {"train": []})
    assert TextShards(tmp_path, "train", verify="checksums").num_documents == 0


def test_pickling_carries_paths_not_tokens(prepared):
    shards = TextShards(prepared, "train")
    data = pickle.dumps(shards)
    assert len(data) < 1000
    assert as_lists(pickle.loads(data)) == as_lists(shards)


def test_the_manifest_comes_back(prepared):
    manifest = Manifest.load(prepared)
    assert set(manifest.continues_word) == {0, 1}
    manifest.save(prepared)
    assert Manifest.load(prepared) == manifest
    assert not list(prepared.glob("*.partial"))


# Damage: each case changes a good directory and names what the message must say.


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_manifest(tmp_path):
    with pytest.raises(UsageError) as error:
        TextShards(tmp_path / "nothing", "train")
    assert "nothing has no manifest.json" in one_line(error)
    assert "shoal prepare text" in one_line(error)


def test_unknown_split(prepared):
    with pytest.raises(UsageError, match="Did you mean 'validation'"):
        TextShards(prepared, "validaton")


@pytest.mark.parametrize("suffix", ["tokens", "index"])
def test_missing_shard(prepared, suffix):
    (prepared / f"train-00001.{suffix}").unlink()
    with pytest.raises(ShoalError) as error:
        TextShards(prepared, "train")
    assert f"train-00001.{suffix} is missing" in one_line(error)


@pytest.mark.parametrize("suffix", ["tokens", "index"])
def test_cut_short(prepared, suffix):
    path = prepared / f"train-00001.{suffix}"
    size = path.stat().st_size
    os.truncate(path, size - 2)
    with pytest.raises(ShoalError) as error:
        TextShards(prepared, "train")
    assert f"train-00001.{suffix} was cut short: it has {size - 2:,} bytes" in one_line(error)
    assert f"{size:,}" in one_line(error)


def test_wrong_checksum(prepared):
    path = prepared / "train-00001.tokens"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    TextShards(prepared, "train")
    with pytest.raises(ShoalError) as error:
        TextShards(prepared, "train", verify="checksums")
    assert f"{path} has the wrong checksum" in one_line(error)


def rewrite(directory, name, suffix, change):
    """Change the bytes of a file and record their new checksum, as a faulty writer would."""
    path = directory / f"{name}.{suffix}"
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    manifest = json.loads((directory / "manifest.json").read_text())
    for info in manifest["splits"]["train"]:
        if info["name"] == name:
            info["files"][suffix]["sha256"] = sha256_of(path)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def set_int64(position, value):
    def change(data):
        data[position : position + 8] = value.to_bytes(8, "little", signed=True)

    return change


def test_index_that_contradicts_itself(prepared):
    info = Manifest.load(prepared).splits["train"][0]
    sentences = 64
    documents = sentences + 8 * (info.num_sentences + 1)
    document_tokens = documents + 8 * (info.num_documents + 1)
    good = prepared / "train-00000.index"
    backup = good.read_bytes()
    for position, value, verify, said in (
        (0, 5, "sizes", "header"),
        (16, 99, "sizes", "header"),
        (sentences, 1, "sizes", "from 1"),
        (documents - 8, 7, "sizes", "to 7"),
        (sentences + 8, 10**6, "checksums", "do not increase"),
        (documents + 8, 10**6, "checksums", "do not increase"),
        (document_tokens + 8, 1, "checksums", "first sentence"),
    ):
        rewrite(prepared, "train-00000", "index", set_int64(position, value))
        with pytest.raises(ShoalError) as error:
            TextShards(prepared, "train", verify=verify)
        assert said in one_line(error) and "train-00000" in one_line(error)
        good.write_bytes(backup)


def test_counts_that_do_not_fit(prepared):
    path = prepared / "manifest.json"
    path.write_text(path.read_text().replace('"num_documents": 4', '"num_documents": 3'))
    with pytest.raises(ShoalError, match="counts do not fit"):
        TextShards(prepared, "train")


def test_token_beyond_the_vocabulary(prepared):
    def change(data):
        data[0:2] = (40_000).to_bytes(2, "little")

    rewrite(prepared, "train-00000", "tokens", change)
    with pytest.raises(ShoalError, match="token id 40000 in a vocabulary of 30000"):
        TextShards(prepared, "train", verify="checksums")


@pytest.mark.parametrize("version", ["0", "2", "null", "true"])
def test_another_format_version(prepared, version):
    path = prepared / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', f'"version": {version}'))
    with pytest.raises(ShoalError) as caught:
        Manifest.load(prepared)
    found = {"null": "None", "true": "True"}.get(version, version)
    update = "update shoal, or " if version == "2" else ""
    assert str(caught.value) == (
        f"{path} has format version {found}; this shoal reads version 1 only: {update}run "
        f"`shoal prepare text SOURCE... --out {prepared} --overwrite`"
    )


@pytest.mark.parametrize("version", [0, 2])
def test_a_shard_of_another_format_version(prepared, version):
    rewrite(prepared, "train-00000", "index", lambda data: data.__setitem__(8, version))
    with pytest.raises(
        ShoalError, match=rf"index has format version {version}; .* `shoal prepare text SOURCE"
    ):
        TextShards(prepared, "train")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"shoal-text"', '"other"', "format"),
        ('"vocab_size": 30000,', "", "vocab_size"),
        ('"vocab_size": 30000', '"vocab_size": 40000', "continues_word has 30000 flags"),
        ('"mask_id": 4', '"mask_id": 30000', "mask_id=30000"),
        ('"num_tokens"', '"tokens"', "tokens"),
        ('"kind"', '"king"', "king"),
        ("{", "", "is not JSON: Extra data"),
    ],
)
def test_damaged_manifest(prepared, old, new, said):
    path = prepared / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ShoalError) as error:
        Manifest.load(prepared)
    assert said in one_line(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda value: value["splits"]["train"][0].update(name="../x"),
            "the file name '../x' must be of letters",
        ),
        (
            lambda value: value["tokenizer"].update(file="/etc/passwd"),
            "the file name '/etc/passwd' must be of",
        ),
        (
            lambda value: value["splits"]["train"][0].update(num_tokens="9"),
            "counts of the shard 'train-00000' must",
        ),
        (
            lambda value: value["splits"]["train"][0]["files"]["index"].update(bytes=-8),
            "00000.index must have a num",
        ),
    ],
)
def test_a_field_that_cannot_be(prepared, change, said):
    path = prepared / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(ShoalError, match=rf"manifest\.json: a field is missing or wrong \(.*{said}"):
        Manifest.load(prepared)


def test_another_tokenizer(prepared, tmp_path):
    (prepared / "tokenizer.json").write_bytes(TOKENIZER + b" ")
    with pytest.raises(UsageError, match=r"tokenizer.json: this tokenizer .* is not the one that made"):
        TextShards(prepared, "train")
    (prepared / "tokenizer.json").unlink()
    with pytest.raises(ShoalError, match=r"tokenizer.json: the tokenizer of the shards cannot be read"):
        TextShards(prepared, "train")


def test_a_model_with_too_small_a_vocabulary(prepared):
    manifest = Manifest.load(prepared)
    manifest.check_vocabulary(30_000)
    with pytest.raises(UsageError, match="30000 tokens, the model one of 29999"):
        manifest.check_vocabulary(29_999)
    manifest.check_vocabulary(30_100, sentinels=100)
    with pytest.raises(UsageError, match=r"30000 tokens and 100 sentinels, .* at least 30100"):
        manifest.check_vocabulary(30_099, sentinels=100)


def test_flags_for_each_token_are_required(prepared):
    manifest = Manifest.load(prepared)
    with pytest.raises(ValueError, match="continues_word has 3 flags"):
        dataclasses.replace(manifest, continues_word=b"\0\0\0")


# Writing


@pytest.mark.parametrize("wrong", [-1, 100])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, wrong):
    with pytest.raises(ShoalError, match=f"document 1 has the token id {wrong}"):
        with ShardWriter(tmp_path, "a", 100) as writer:
            writer.add_document([[1, 2]])
            writer.add_document([[3, wrong]])
    assert list(tmp_path.iterdir()) == []


def test_an_exception_removes_only_what_is_unfinished(tmp_path):
    with ShardWriter(tmp_path, "a", 100) as writer:
        writer.add_document([[1, 2]])
        writer.finish()
    finished = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(finished) == {"a.tokens", "a.index"}
    with pytest.raises(KeyboardInterrupt):
        with ShardWriter(tmp_path, "a", 100) as writer:
            writer.add_document([[3, 4]])
            assert (tmp_path / "a.tokens.partial").exists()
            raise KeyboardInterrupt
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == finished


def test_leftovers_of_a_killed_writer_are_overwritten(tmp_path):
    (tmp_path / "train-00000.tokens.partial").write_bytes(b"leftover" * 100)
    documents = random_documents([30])
    prepare(tmp_path, {"train": documents})
    assert as_lists(TextShards(tmp_path, "train", verify="checksums")) == documents
    assert not list(tmp_path.glob("*.partial"))


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(ShoalError, match=r"nowhere/a.tokens: cannot be written"):
        ShardWriter(tmp_path / "nowhere", "a", 100)


FULL_DISK = """
import resource, sys
from pathlib import Path
from shoal.data.manifest import Manifest
from shoal.data.text.shards import ShardWriter
from shoal.errors import ShoalError

directory, limit, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
manifest = Manifest.load(directory)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    if what == "manifest":
        manifest.save(directory)
    else:
        sentences = [[5] * 100] if what == "tokens" else [[5]] * 100
        writer = ShardWriter(directory, "train-00001", 100)
        for _ in range(20_000):
            writer.add_document(sentences)
        writer.finish()
except ShoalError as error:
    print(error)
    raise SystemExit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("what", "limit", "path"),
    [
        ("tokens", 2 << 20, "train-00001.tokens"),  # while documents are added
        ("tokens", 3_999_999, "train-00001.tokens"),  # in the last flush
        ("index", 4_000_500, "train-00001.index"),
        ("manifest", 100, "manifest.json"),
    ],
)
def test_a_full_disk_loses_nothing(tmp_path, what, limit, path):
    """A limit on file size stands for the full disk: the same write fails, with an errno of the same kind."""
    prepare(tmp_path, {"train": random_documents([30])})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), str(limit), what],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert f"{path}: no space left" in result.stdout
    assert result.stdout.count("\n") == 1 and not result.stderr
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_copies_are_complete(prepared, tmp_path_factory):
    """A prepared directory can be moved: nothing in it names its place."""
    copy = tmp_path_factory.mktemp("copy") / "there"
    shutil.copytree(prepared, copy)
    assert as_lists(TextShards(copy, "train", verify="checksums")) == as_lists(TextShards(prepared, "train"))
