"""Trains on emulated hosts whose caches give each other their shards: the same run, each shard read once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pretrain_jobs as jobs
import pytest
from image_jobs import prepare_small

from forked import shoal
from shoal.data.cache import OWN_FOLDER
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.shards import ImageShards, ImageShardWriter
from shoal.data.manifest import Manifest
from shoal.errors import EXIT_OK, EXIT_USAGE
from shoal.record import Reads, read_record
from shoal.report import tables
from shoal.report.runs import load_runs

DEADLINE_S = 600.0
HOSTS = 2

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)


def many_shards(folder: Path) -> Path:
    """Return a directory with a few small shards of the images of each split."""
    source, out, splits = prepare_small(folder), folder / "shards", {}
    out.mkdir()
    for split in ("train", "validation"):
        images, shards = ImageShards(source, split), []
        for first in range(0, len(images), 8):
            with ImageShardWriter(out, f"{split}-{first // 8:05d}") as writer:
                for number in range(first, min(first + 8, len(images))):
                    width, height = images.sizes[number].tolist()
                    data, label = bytes(images.read(number)), int(images.labels[number])
                    writer.add(f"image{number}", data, width=width, height=height, suffix="png", label=label)
                shards.append(writer.finish())
        splits[split] = tuple(shards)
    ImageManifest(classes=images.manifest.classes, source="small", splits=splits).save(out)
    return out


def options(data: Path, run_dir: Path) -> list[str]:
    return [
        *("--data.path", str(data), "--run.dir", str(run_dir), "--data.decode-threads", "1"),
        *("--model.network", "resnet8", "--model.width", "4", "--augment.size", "24"),
        *("--augment.first-size", "24", "--train.total-epochs", "2", "--train.global-batch-size", "16"),
        *("--train.micro-batch-size", "4", "--train.precision", "fp32", "--validation.size", "24"),
        *("--validation.resize", "26", "--run.log-frequency", "1", "--optim.warmup-epochs", "0.5"),
    ]


def train(*words: str, recipe: str = "resnet50") -> subprocess.CompletedProcess[str]:
    return shoal("train", recipe, *words, deadline_s=DEADLINE_S)


@needs_hosts
def test_a_run_with_peers_is_the_run_without(tmp_path: Path) -> None:
    data, cache = many_shards(tmp_path), tmp_path / "cache"
    where = ("--on", "emulated", "--hosts", str(HOSTS))
    alone = train(*options(data, tmp_path / "alone"), *where)
    assert alone.returncode == EXIT_OK, alone.stderr
    peers = ("--data.cache", str(cache), "--data.cache-bytes", "100MB", "--data.cache-peers", "on")
    together = train(*options(data, tmp_path / "together"), *where, *peers)
    assert together.returncode == EXIT_OK, together.stderr
    losses = jobs.losses(tmp_path / "alone")
    assert len(losses) == 6 and jobs.losses(tmp_path / "together") == losses
    assert "shards of host" not in together.stderr
    originals = {path.stem: path.read_bytes() for path in data.glob("*.tar")}
    (reads,) = [row for row in read_record(tmp_path / "together") if isinstance(row, Reads)]
    copies = list(cache.glob(f"*/{OWN_FOLDER}/*.tar"))
    assert len({path.parent for path in copies}) == HOSTS
    assert {path.name[:-21]: path.read_bytes() for path in copies} == originals
    once, copied = sum(map(len, originals.values())), sum(path.stat().st_size for path in copies)
    assert (reads.storage_bytes, reads.peer_bytes, reads.peer_failures) == (once, copied - once, 0)
    assert reads.memory_bytes > 0
    assert "from memory" in tables.reads(*load_runs([tmp_path / "together"]))


@pytest.mark.slow
@needs_hosts
def test_a_run_on_text_with_peers_is_the_run_without(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    data, cache = jobs.prepare_small(tmp_path / "text"), tmp_path / "cache"

    def losses(name: str, *more: str) -> dict[int, float]:
        words = [
            *("--preset", "tiny", "--data.path", str(data), "--run.dir", str(tmp_path / name)),
            *("--model.hidden-size", "32", "--model.intermediate-size", "64", "--model.vocab-size", "96"),
            *("--data.max-seq-length", "32", "--data.max-predictions-per-seq", "5"),
            *("--train.total-steps", "4", "--optim.warmup-steps", "1", "--train.global-batch-size", "8"),
            *("--run.log-frequency", "1", "--on", "emulated", "--hosts", str(HOSTS), *more),
        ]
        done = train(*words, recipe="albert")
        assert done.returncode == EXIT_OK, done.stderr
        assert "shards of host" not in done.stderr
        return jobs.losses(tmp_path / name)

    alone = losses("alone")
    peers = ("--data.cache", str(cache), "--data.cache-bytes", "100MB", "--data.cache-peers", "on")
    assert len(alone) == 4 and losses("together", *peers) == alone
    manifest = Manifest.load(data)
    for file in manifest.files():
        copies = list(cache.glob(f"*/{OWN_FOLDER}/{file.copy_name}"))
        assert len(copies) == HOSTS
        assert {copy.read_bytes() for copy in copies} == {(data / file.name).read_bytes()}
    once = sum(file.num_bytes for file in manifest.files())
    (reads,) = [row for row in read_record(tmp_path / "together") if isinstance(row, Reads)]
    assert (reads.storage_bytes, reads.peer_bytes, reads.peer_failures) == (once, once, 0)
    assert reads.memory_bytes == HOSTS * once


def test_peers_need_a_cache(tmp_path: Path) -> None:
    done = train(*options(tmp_path, tmp_path / "run"), "--data.cache-peers", "on")
    assert done.returncode == EXIT_USAGE
    assert "data.cache_peers on: peers give each other what they keep" in done.stderr
