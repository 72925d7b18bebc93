"""TFRecord: checksums of the standard, bytes that protobuf itself reads, shards with their contents."""

from __future__ import annotations

import ast
import json
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from shoal.data.images.manifest import ImageManifest
from shoal.data.images.shards import ImageShards, ImageShardWriter
from shoal.data.manifest import Manifest
from shoal.data.text.prepare import PrepareConfig, prepare_text
from shoal.data.text.shards import TextShards
from shoal.data.tfrecord import example, masked_crc32c, record, varints
from shoal.native import crc32c

FIELD = descriptor_pb2.FieldDescriptorProto
MESSAGES: dict[str, list[tuple[str, int, bool, str]]] = {
    "Int64List": [("value", 1, True, "")],
    "BytesList": [("value", 1, True, "bytes")],
    "Feature": [("bytes_list", 1, False, "BytesList"), ("int64_list", 3, False, "Int64List")],
    "Entry": [("key", 1, False, "string"), ("value", 2, False, "Feature")],
    "Features": [("feature", 1, True, "Entry")],
    "Example": [("features", 1, False, "Features")],
}
"""``tf.train.Example`` without other lists; a map is a repeated message of keys and values."""


def example_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="test", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, repeated, kind in fields:
            made = message.field.add(name=field, number=number)
            made.label = FIELD.LABEL_REPEATED if repeated else FIELD.LABEL_OPTIONAL
            if kind in MESSAGES:
                made.type, made.type_name = FIELD.TYPE_MESSAGE, f".test.{kind}"
            else:
                made.type = getattr(FIELD, f"TYPE_{kind.upper() or 'INT64'}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Example"))


def features_of(data: bytes) -> dict[str, list[int | bytes]]:
    parsed = example_class().FromString(data)
    return {
        entry.key: [*entry.value.int64_list.value, *entry.value.bytes_list.value]
        for entry in parsed.features.feature
    }


def records_of(path: Path) -> list[bytes]:
    data, found = path.read_bytes(), []
    while data:
        length, length_crc = struct.unpack_from("<QI", data)
        content = data[12 : 12 + length]
        assert length_crc == masked_crc32c(data[:8])
        assert struct.unpack_from("<I", data, 12 + length) == (masked_crc32c(content),)
        found.append(content)
        data = data[16 + length :]
    return found


def test_checksums_are_those_of_the_standard() -> None:
    """RFC 3720, B.4; and a record that TensorFlow 2.21 wrote."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0
    assert record(b"shoal").hex() == "0500000000000000eab2043e73686f616ca5cd0ac4"


def test_protobuf_reads_the_examples() -> None:
    edges = [0, 1, 127, 128, 16_383, 16_384, (1 << 21) - 1, 1 << 21, (1 << 28) - 1, 1 << 28, (1 << 32) - 1]
    ids = np.array(edges + random.Random(0).choices(range(1 << 32), k=500), dtype=np.uint32)
    lengths = np.array([len(ids)])
    found = features_of(example({"input_ids": ids, "sentence_lengths": lengths}))
    assert found == {"input_ids": ids.tolist(), "sentence_lengths": [len(ids)]}
    assert varints(np.array([0, 300])) == b"\x00\xac\x02"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=4)) for _ in range(300)]
    lines = (
        " ".join(f"{' '.join(rng.choices(words, k=8)).capitalize()}." for _ in range(5)) for _ in range(4000)
    )
    (folder / "a.txt").write_text("\n".join(lines))
    config = PrepareConfig(
        sources=(str(folder / "a.txt"),),
        out=folder / "out",
        container="tfrecord",
        vocab_size=400,
        shard_bytes=1 << 19,
        processes=1,
    )
    prepare_text(config, progress=False)
    return folder / "out"


def rows_of(document: list[Any]) -> dict[str, list[int]]:
    return {
        "input_ids": np.concatenate(document).tolist(),
        "sentence_lengths": [len(one) for one in document],
    }


def test_shards_hold_their_documents(prepared: Path) -> None:
    for split in ("train", "validation"):
        shards = TextShards(prepared, split, verify="checksums")
        found = []
        for info in Manifest.load(prepared).shards(split):
            assert set(info.files) == {"tokens", "index", "tfrecord"}
            found += [features_of(data) for data in records_of(prepared / f"{info.name}.tfrecord")]
        documents = [shards.document(number) for number in range(shards.num_documents)]
        assert found == [rows_of(one) for one in documents]
        assert len(found) > 100


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of many lengths, with and without a label and annotations."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(5)
    with ImageShardWriter(folder, "train-00000", "tfrecord") as writer:
        for number, size in enumerate([1, 100, 127, 128, 300, 16_383, 16_384, 70_000]):
            writer.add(
                f"a/{number}\udce9",  # a name that is no UTF-8
                rng.bytes(size),
                width=300 * number,
                height=7,
                label=number % 3 - 1,
                annotations=b"[%d]" % number if number % 2 else None,
            )
        shards = (writer.finish(),)
    ImageManifest(classes=("x", "y"), source="made", splits={"train": shards}).save(folder)
    return folder


def image_features(folder: Path) -> list[dict[str, list[int | bytes]]]:
    """Return the features of each image, by its shard's index."""
    shards, features = ImageShards(folder, "train", verify="checksums"), []
    for number in range(len(shards)):
        width, height = shards.sizes[number].tolist()
        label, extra = int(shards.labels[number]), bytes(shards.extra(number))
        features.append(
            {
                "image/filename": [f"a/{number}".encode() + b"\xe9.jpg"],
                "image/height": [height],
                "image/width": [width],
                **({"image/class/label": [label]} if label >= 0 else {}),
                **({"image/annotations": [extra]} if number % 2 else {}),
                "image/encoded": [bytes(shards.read(number))],
            }
        )
        assert shards.name(number) == f"{folder}/train-00000.tfrecord: a/{number}\udce9"
    return features


def test_protobuf_reads_the_images(images: Path) -> None:
    found = [features_of(data) for data in records_of(images / "train-00000.tfrecord")]
    assert found == image_features(images) and len(found) == 8


READ_IMAGES = """
import sys
import tensorflow as tf
for data in tf.data.TFRecordDataset(sys.argv[1]):
    features = tf.train.Example.FromString(data.numpy()).features.feature
    print({name: [*f.int64_list.value, *f.bytes_list.value] for name, f in features.items()})
"""


READ = """
import json, sys
import tensorflow as tf
kinds = {name: tf.io.RaggedFeature(tf.int64) for name in ("input_ids", "sentence_lengths")}
for data in tf.data.TFRecordDataset(sys.argv[1:]):
    parsed = tf.io.parse_single_example(data, kinds)
    print(json.dumps({name: value.numpy().tolist() for name, value in parsed.items()}))
"""


@pytest.fixture(scope="module")
def tensorflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python with TensorFlow in an environment of its own: its packages are not those of the tests."""
    folder = tmp_path_factory.mktemp("tf")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "tensorflow-cpu"], check=True)
    return python


@pytest.mark.slow
def test_tensorflow_reads_the_shards(prepared: Path, tensorflow: Path) -> None:
    names = [f"{info.name}.tfrecord" for info in Manifest.load(prepared).shards("train")]
    done = subprocess.run([tensorflow, "-c", READ, *names], cwd=prepared, check=True, stdout=subprocess.PIPE)
    shards = TextShards(prepared, "train")
    documents = [shards.document(number) for number in range(shards.num_documents)]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [rows_of(one) for one in documents]


@pytest.mark.slow
def test_tensorflow_reads_the_images(images: Path, tensorflow: Path) -> None:
    command = [tensorflow, "-c", READ_IMAGES, images / "train-00000.tfrecord"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert [ast.literal_eval(line) for line in done.stdout.splitlines()] == image_features(images)
