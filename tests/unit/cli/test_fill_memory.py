"""The largest micro-batch: of ``shoal bench train --fill-memory``, and of a recipe with ``auto``.

A small program stands for ``shoal bench train``, whose trials take seconds each; one test runs the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.bench.step_timing import TrainBench
from shoal.cli.bench_train import _least_batch
from shoal.cli.fill_memory import (
    find_largest,
    least_size,
    settle_for,
    share_and_limit,
    with_batch,
    with_known_batches,
)
from shoal.comm.tcp_store import listening_socket
from shoal.decide.batch import plan_batch
from shoal.errors import ShoalError, UsageError
from shoal.launch.emulated_job import Hosts
from shoal.launch.host_rendezvous import HostGroup, join_hosts
from shoal.recipes.mask_rcnn import MaskRCNNTrainConfig
from shoal.recipes.resnet50 import ResNetTrainConfig
from shoal.recipes.start import Launch
from shoal.recipes.t5 import T5Config
from shoal.train.config import ParallelConfig

TRIAL = """
import json, sys
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
assert not {"--fill-memory", "--memory", "--nnodes", "--rdzv"} & set(words) and "--workers" in words, words
batch = int(value("--batch"))
memory = 100 + 7 * batch
if batch > 60:
    sys.exit("shoal: out of memory with a micro-batch of 61 images: use less")
if "broken" in words:
    sys.exit("the reason")
assert (value("--steps"), value("--warm-up")) == ("1", "1"), words
result = {"peak_memory_bytes": memory * 10**6, "device_memory_bytes": DEVICE and DEVICE * 10**6}
json.dump(result, open(value("--json"), "w"))
"""


def command(folder: Path, *words: str, device_mb: int | None = None) -> list[str]:
    program = folder / "trial.py"
    program.write_text(TRIAL.replace("DEVICE", repr(device_mb)))
    options = ("--workers", "1", "--steps", "9", "--json", "mine.json", "--fill-memory", *words)
    return [sys.executable, str(program), *options]


@pytest.mark.parametrize(("memory", "found"), [("500MB", 50), ("120MB", 1), ("9GB", 60)])
def test_a_tenth_of_the_memory_stays_free(tmp_path: Path, memory: str, found: int) -> None:
    what = TrainBench(fill_memory=True, memory=memory)
    largest = find_largest(command(tmp_path, "--memory", memory), what, unit="images")
    limited = find_largest(command(tmp_path, "--batch", "12"), replace(what, batch=12), unit="images")
    assert (largest, limited) == (found, min(found, 12))
    timed = with_batch(command(tmp_path, "--memory", memory, "--batch", "70"), found)
    assert timed[2:] == ["--workers", "1", "--steps", "9", "--json", "mine.json", "--batch", str(found)]


def test_the_second_trial_follows_from_the_memory_that_was_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = TrainBench(fill_memory=True, memory="500MB")
    assert find_largest(command(tmp_path), what, unit="images", sample_bytes=lambda: 7e6) == 50
    tried = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert tried[:2] == ["micro-batch of 1", "micro-batch of 50"], "100 + 7 a sample of 450 MB"


def test_hosts_time_the_least_micro_batch_that_they_find(tmp_path: Path) -> None:
    """The trials of each are on it alone: without the other hosts."""
    with listening_socket("127.0.0.1", 0) as free:
        port = int(free.getsockname()[1])
    joined: list[HostGroup] = []

    def on_host(memory: str) -> list[str]:
        group = join_hosts(
            host="127.0.0.1", port=port, num_hosts=2, num_workers=1, secret=b"of a test", deadline_s=60
        )
        joined.append(group)
        words = command(tmp_path, "--memory", memory, "--nnodes", "2", "--rdzv", "a:1")
        what = TrainBench(fill_memory=True, memory=memory)
        return _least_batch(words, lambda: find_largest(words, what, unit="images"), group)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(on_host, ("500MB", "300MB"))
        close_all(joined)
    assert first == second and first[-2:] == ["--batch", "24"], "of 270 MB"
    assert "--nnodes" in first and "--fill-memory" not in first


def test_memory_is_that_of_the_gpu_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = TrainBench(fill_memory=True)
    assert find_largest(command(tmp_path, device_mb=500), what, unit="images") == 50
    with pytest.raises(UsageError, match="without a GPU needs the memory of a worker"):
        find_largest(command(tmp_path), what, unit="images")
    monkeypatch.setenv("SHOAL_MEMORY", "400MB")
    assert find_largest(command(tmp_path, device_mb=500), what, unit="images") == 37


def test_a_cpu_without_a_named_memory_is_told_before_any_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_MEMORY", raising=False)
    nothing = [sys.executable, str(tmp_path / "absent.py"), "--fill-memory"]
    with pytest.raises(
        UsageError, match="without a GPU needs the memory of a worker: --memory 8GB, or SHOAL"
    ):
        find_largest(nothing, TrainBench(fill_memory=True), unit="images", on_cpu=True)
    config = resnet(tmp_path)
    on_cpu = replace(config, distributed=replace(config.distributed, device="cpu"))
    with pytest.raises(
        UsageError, match=r"train\.micro_batch_size auto without a GPU .*: set SHOAL_MEMORY=8GB"
    ):
        with_known_batches("resnet50", on_cpu, Launch(), "tiny", [])


def test_errors_of_a_trial_and_too_little_memory_are_told(tmp_path: Path) -> None:
    what = TrainBench(fill_memory=True, memory="1GB")
    with pytest.raises(ShoalError, match="a trial with a micro-batch of 1 failed:\nthe reason"):
        find_largest(command(tmp_path, "broken"), what, unit="images")
    with pytest.raises(ShoalError, match=r"not one of the images fits into 85[.]8 MiB, 90% of the memory"):
        find_largest(command(tmp_path), replace(what, memory="100MB"), unit="images")


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="--memory 1GB is the limit of --fill-memory"):
        TrainBench(memory="1GB")


def resnet(folder: Path, **train: object) -> ResNetTrainConfig:
    config = ResNetTrainConfig()
    return replace(
        config,
        train=replace(config.train, micro_batch_size="auto", **train),  # type: ignore[arg-type]
        run=replace(config.run, dir=folder),
    )


def test_sizes_that_need_no_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["shoal", "train", "resnet50", "--train.micro-batch-size", "auto"]
    config = resnet(tmp_path)
    known = replace(config, train=replace(config.train, micro_batch_size=8))
    assert with_known_batches("resnet50", known, Launch(), "tiny", words) == (known, words)
    dry, same = with_known_batches("resnet50", config, Launch(dry_run=True), "tiny", words)
    assert dry.train.micro_batch_size is None and same == words
    assert "found when the run starts" in capsys.readouterr().out
    boxes = MaskRCNNTrainConfig()
    auto = replace(boxes, train=replace(boxes.train, micro_batch_size="auto"))
    assert with_known_batches("mask_rcnn", auto, Launch(dry_run=True), "tiny", words) == (boxes, words)
    emulated = Launch(on="emulated", emulated=Hosts(hosts=2))
    with pytest.raises(UsageError, match="auto does not go with --on emulated, whose hosts share one memory"):
        with_known_batches("resnet50", config, emulated, "tiny", words)
    t5 = T5Config()
    pipeline = replace(
        t5, train=replace(t5.train, micro_batch_size="auto"), parallel=ParallelConfig(pipeline=4)
    )
    with pytest.raises(UsageError, match="each host alone, which has 2 of the 4 workers of a pipeline"):
        with_known_batches("t5", pipeline, Launch(nnodes=2, workers=2), "tiny", words)
    searched = replace(
        t5, train=replace(t5.train, micro_batch_size="auto"), parallel=ParallelConfig(layout="auto")
    )
    with pytest.raises(
        UsageError, match=r"layout auto chooses the micro-batch too: leave train\.micro_batch"
    ):
        with_known_batches("t5", searched, Launch(), "tiny", words)
    # a run that continues has its size
    (tmp_path / "config.toml").write_text("[train]\nmicro_batch_size = 24\n")
    again, changed = with_known_batches("resnet50", config, Launch(), "tiny", words)
    assert again.train.micro_batch_size == 24
    assert changed == ["shoal", "train", "resnet50", "--train.micro-batch-size", "24"]


def test_several_hosts_take_the_least_of_their_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts meet as those of a job; each has a memory of its own, and the shares are those of all workers."""
    monkeypatch.setenv("SHOAL_MEMORY", "8GB")
    words = ["shoal", "train", "resnet50", "--train.micro-batch-size", "auto"]
    config = resnet(tmp_path, global_batch_size=96)
    launch = Launch(nnodes=3, workers=2, rdzv="127.0.0.1:1")
    known, same = with_known_batches("resnet50", config, launch, "tiny", words)
    assert (known.train.micro_batch_size, same) == (16, words)  # a share of 96 / 6, all of it
    with listening_socket("127.0.0.1", 0) as free:
        port = int(free.getsockname()[1])

    def on_host(found: int | None) -> list[str] | str:
        group = join_hosts(
            host="127.0.0.1", port=port, num_hosts=3, num_workers=2, secret=b"of a test", deadline_s=60
        )
        joined.append(group)
        local.found = found
        settle = settle_for("resnet50", config, known, launch, "tiny", words)
        assert settle is not None
        try:
            return settle(group)
        except ShoalError as error:
            return str(error)

    def largest(*args: object, num_workers: int, num_local: int) -> int:
        assert (num_workers, num_local) == (6, 2)
        if local.found is None:
            raise ShoalError("not one fits")
        return int(local.found)

    local, joined = threading.local(), list[HostGroup]()
    monkeypatch.setattr("shoal.cli.fill_memory._largest_size", largest)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(on_host, (16, 4, 8))) == [[*words[:3], "--train.micro-batch-size", "4"]] * 3
        close_all(joined)
        own, *others = pool.map(on_host, (None, 4, 8))
        close_all(joined)
    assert own == "not one fits"
    assert all("could not be found on host" in str(each) for each in others)


def close_all(joined: list[HostGroup]) -> None:
    """Close the connections of the hosts, that of the leader last."""
    for group in sorted(joined, key=lambda each: -each.rank):
        group.resources.close()
    joined.clear()


def test_a_size_of_the_run_that_continues_goes_before_smaller_ones() -> None:
    found = [{"size": 8, "begun": 1, "name": "a"}, {"size": 2, "begun": 0, "name": "b"}]
    assert least_size(found, "train") == 8
    assert least_size([{**each, "begun": 0} for each in found], "train") == 2


def test_settings_are_checked_before_any_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_MEMORY", "8GB")

    def check(config: ResNetTrainConfig, num_workers: int) -> None:
        raise UsageError(f"{config.train.micro_batch_size} images of {num_workers} workers")

    with pytest.raises(UsageError, match="32 images of 2 workers"):
        config = resnet(tmp_path, global_batch_size=64)
        with_known_batches("resnet50", config, Launch(workers=2), "tiny", [], check=check)


def test_a_pipeline_keeps_its_stages_busy() -> None:
    assert share_and_limit(64, None, 2) == (32, 32)
    assert share_and_limit(64, ParallelConfig(), 2) == (32, 32)
    assert share_and_limit(64, ParallelConfig(pipeline=2), 4) == (32, 4), "4 micro-batches a stage"
    assert share_and_limit(64, ParallelConfig(pipeline=2, micro_batches=2), 4) == (32, 16)


def test_without_the_command_auto_is_refused() -> None:
    train = replace(MaskRCNNTrainConfig().train, micro_batch_size="auto")
    with pytest.raises(UsageError, match="auto is found by the command that starts the workers"):
        plan_batch(train, 1)


@pytest.mark.slow
def test_a_recipe_fills_a_small_memory(tmp_path: Path) -> None:
    """64 images are a worker's share, and fit or not: the run gets the largest divisor that fits."""
    run, sizes = tmp_path / "run", ("--data.made-images", "400", "--train.global-batch-size", "64")
    words = ("--preset", "tiny", "--run.dir", str(run), *sizes, "--train.micro-batch-size", "auto")
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "train", "resnet50", *words, "--train.total-epochs", "1"],
        capture_output=True, text=True, check=False, timeout=280,
        env=os.environ | {"SHOAL_MEMORY": "2000MB", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "largest micro-batch: " in done.stdout
    start = json.loads((run / "record.jsonl").read_text().splitlines()[0])
    most = int(done.stdout.split("largest micro-batch: ")[1].split()[0])
    assert start["micro_batch_size"] == max(size for size in (1, 2, 4, 8, 16, 32, 64) if size <= most)
