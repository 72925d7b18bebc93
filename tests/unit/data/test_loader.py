"""The loader: the same global batches for any readers, from any sample on."""

import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from forked import is_running
from shoal.data.loader import LoaderConfig, held_out_batches, training_steps
from shoal.data.steps import DataShard, StepReader
from shoal.data.text.examples import ExampleConfig, ExampleReader
from shoal.data.text.shards import TextShards
from shoal.errors import ShoalError, UsageError
from synthetic_text import prepare, random_documents

GLOBAL_BATCH = 24
NUM_STEPS = 5


def descendants(pid):
    """Process ids of the children of a process and of theirs."""
    children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [d for child in children for d in descendants(child)]


def loaders_of(pid):
    return [d for d in descendants(pid) if "spawn_main" in Path(f"/proc/{d}/cmdline").read_text()]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """53 examples: five global batches of 24 cross two borders of epochs."""
    directory = tmp_path_factory.mktemp("prepared")
    prepare(directory, {"train": random_documents([61 * 25, 61 * 20, 61 * 8 - 3])}, num_shards=2)
    reader = ExampleReader(
        TextShards(directory, "train"), ExampleConfig(max_seq_length=64, max_predictions_per_seq=8)
    )
    assert reader.num_examples == 53
    return reader


def padded(batch):
    """Undo the packing: a row an example, with the hidden tokens in a row of their own."""
    lengths, columns = batch["cu_seqlens"].diff(), batch["position_ids"]
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    input_ids, types, hidden = (torch.zeros(len(lengths), 64, dtype=torch.int64) for _ in range(3))
    input_ids[rows, columns] = batch["input_ids"]
    types[rows, columns] = batch["token_type_ids"]
    masked = batch["masked_rows"]
    hidden[rows[masked], columns[masked]] = batch["masked_ids"]
    padded = {"input_ids": input_ids, "types": types, "hidden": hidden, "lengths": lengths}
    return padded | {name: batch[name] for name in ("labels", "epoch", "index")}


def joined(batches):
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def global_batches(
    reader, *, num_workers=1, micro_batch_size=GLOBAL_BATCH, num_loader_processes=0, samples_consumed=0,
    num_steps=NUM_STEPS, global_batch_size=GLOBAL_BATCH,
):  # fmt: skip
    """Put the parts of all workers together, in rank order, for each step."""
    workers = [
        training_steps(
            StepReader(
                reader=reader,
                share=DataShard(
                    global_batch_size=global_batch_size,
                    micro_batch_size=micro_batch_size,
                    rank=rank,
                    num_workers=num_workers,
                ),
                samples_consumed=samples_consumed,
            ),
            LoaderConfig(num_loader_processes=num_loader_processes),
            num_steps=num_steps,
        )
        for rank in range(num_workers)
    ]
    return [
        joined([padded(batch) for step in steps for batch in step]) for steps in zip(*workers, strict=True)
    ]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype
            assert torch.equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def expected(reader):
    return global_batches(reader)


@pytest.mark.parametrize(("num_workers", "micro_batch_size"), list(product((1, 2, 3, 8), (1, 3, 4, 5, 24))))
def test_global_batches_do_not_depend_on_workers(reader, expected, num_workers, micro_batch_size):
    found = global_batches(reader, num_workers=num_workers, micro_batch_size=micro_batch_size)
    assert_same(found, expected)


@pytest.mark.parametrize(("num_workers", "num_loader_processes"), [(1, 1), (2, 2), (3, 1)])
def test_nor_on_loader_processes(reader, expected, num_workers, num_loader_processes):
    found = global_batches(
        reader, num_workers=num_workers, micro_batch_size=3, num_loader_processes=num_loader_processes
    )
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "micro_batch_size", "num_loader_processes"),
    list(product((1, 2, 3, 8), (1, 3, 24), (1, 2))),
)
def test_the_whole_matrix(reader, expected, num_workers, micro_batch_size, num_loader_processes):
    found = global_batches(
        reader,
        num_workers=num_workers,
        micro_batch_size=micro_batch_size,
        num_loader_processes=num_loader_processes,
    )
    assert_same(found, expected)


def test_packed_examples_are_those_of_the_reader(reader):
    (found,) = global_batches(reader, micro_batch_size=5, num_steps=1)
    wanted = reader.batch(found["epoch"].numpy(), found["index"].numpy())
    hidden = np.zeros_like(wanted["input_ids"])
    rows, slots = np.nonzero(wanted["masked_weights"])
    hidden[rows, wanted["masked_positions"][rows, slots]] = wanted["masked_ids"][rows, slots]
    assert found["input_ids"].tolist() == wanted["input_ids"].tolist()  # padding is 0 in both
    assert found["types"].tolist() == wanted["token_type_ids"].tolist()
    assert found["lengths"].tolist() == wanted["attention_mask"].sum(axis=1).tolist()
    assert found["labels"].tolist() == wanted["labels"].tolist()
    assert found["hidden"].tolist() == hidden.tolist()


def test_micro_batches_have_their_size(reader):
    steps = training_steps(
        StepReader(
            reader=reader,
            share=DataShard(global_batch_size=GLOBAL_BATCH, micro_batch_size=4, rank=1, num_workers=2),
        ),
        LoaderConfig(),
        num_steps=2,
    )
    assert [[len(batch["index"]) for batch in step] for step in steps] == [[4, 4, 4]] * 2


@pytest.mark.parametrize(
    ("samples_consumed", "num_loader_processes"),
    [(1, 0), (7, 0), (24, 0), (52, 0), (53, 0), (54, 0), (1000, 0), (7, 1), (54, 2)],
)
def test_resuming_at_any_sample_continues_the_stream(reader, samples_consumed, num_loader_processes):
    whole = joined(global_batches(reader, num_steps=1, global_batch_size=samples_consumed + 2 * GLOBAL_BATCH))
    resumed = joined(
        global_batches(
            reader,
            samples_consumed=samples_consumed,
            num_steps=2,
            num_workers=2,
            micro_batch_size=6,
            num_loader_processes=num_loader_processes,
        )
    )
    for name in whole:
        # Workers' parts were put together step by step, so the order is that of the stream.
        assert torch.equal(resumed[name], whole[name][samples_consumed:]), name


def test_each_epoch_has_each_example_once(reader):
    n = reader.num_examples
    stream = joined(global_batches(reader, num_workers=3, micro_batch_size=8, num_steps=14))
    num_epochs = 14 * GLOBAL_BATCH // n
    for epoch in range(num_epochs):
        part = slice(epoch * n, (epoch + 1) * n)
        assert stream["epoch"][part].tolist() == [epoch] * n
        assert sorted(stream["index"][part].tolist()) == list(range(n))
    first, second = stream["index"][:n], stream["index"][n : 2 * n]
    assert not torch.equal(first, second)


def test_a_global_batch_larger_than_the_data(reader):
    batch = global_batches(reader, num_workers=2, global_batch_size=130, num_steps=1)[0]
    assert np.bincount(batch["epoch"]).tolist() == [53, 53, 24]
    same = batch["index"] == batch["index"][0]
    assert same.sum() >= 2
    masks = batch["hidden"][same]
    assert not torch.equal(masks[0], masks[1]), "each epoch masks an example differently"


@pytest.mark.parametrize("num_loader_processes", [0, 2])
def test_closing_early_ends_what_was_started(reader, num_loader_processes):
    steps = training_steps(
        StepReader(reader=reader, share=DataShard(global_batch_size=GLOBAL_BATCH, micro_batch_size=6)),
        LoaderConfig(num_loader_processes=num_loader_processes, num_prefetched_steps=4),
        num_steps=10_000,
    )
    next(steps)
    start = time.monotonic()
    steps.close()
    assert time.monotonic() - start < 120
    assert list(steps) == []
    assert loaders_of(os.getpid()) == []


@pytest.mark.parametrize("num_loader_processes", [0, 1])
def test_damage_met_while_reading_is_one_clear_error(tmp_path, num_loader_processes):
    prepare(tmp_path, {"train": random_documents([500])})
    reader = ExampleReader(TextShards(tmp_path, "train"), ExampleConfig(max_seq_length=64))
    path = tmp_path / "train-00000.tokens"
    path.write_bytes(b"\xff" * path.stat().st_size)
    steps = training_steps(
        StepReader(reader=reader, share=DataShard(global_batch_size=4, micro_batch_size=4)),
        LoaderConfig(num_loader_processes=num_loader_processes),
        num_steps=3,
    )
    with pytest.raises(ShoalError) as error:
        next(steps)
    assert "token id 65535 in a vocabulary of 30000" in str(error.value)
    assert "\n" not in str(error.value)
    steps.close()


class DyingReader(ExampleReader):
    """Its process is killed at the first batch, as the kernel does when memory runs out."""

    def __reduce__(self):
        return (DyingReader, (self.shards, self.config))

    def batch(self, epochs, indices):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_loader_process_is_one_clear_error(reader):
    steps = training_steps(
        StepReader(
            reader=DyingReader(reader.shards, reader.config),
            share=DataShard(global_batch_size=4, micro_batch_size=4),
        ),
        LoaderConfig(num_loader_processes=1),
        num_steps=3,
    )
    with pytest.raises(ShoalError, match=r"a loader process died, .*num_loader_processes"):
        next(steps)


WORKER = """
import sys
from pathlib import Path
from shoal.data.text.examples import ExampleConfig, ExampleReader
from shoal.data.loader import LoaderConfig, training_steps
from shoal.data.text.shards import TextShards
from shoal.data.steps import DataShard, StepReader

if __name__ == "__main__":
    reader = ExampleReader(TextShards(Path(sys.argv[1]), "train"), ExampleConfig(max_seq_length=64))
    share = DataShard(global_batch_size=4, micro_batch_size=4)
    steps = StepReader(reader=reader, share=share)
    for step in training_steps(steps, LoaderConfig(num_loader_processes=2), num_steps=10**9):
        print("step", flush=True)
        sys.stdin.readline()
"""


def test_loader_processes_outlive_signals_but_not_their_worker(reader):
    """A job's signal goes to all its processes: loaders leave it to the worker, and end when it ends."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(reader.shards.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        try:
            assert worker.stdout.readline() == "step\n"
            loaders = loaders_of(worker.pid)
            assert len(loaders) >= 1
            for pid in loaders:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                    os.kill(pid, number)
            for _ in range(300):  # through several blocks
                worker.stdin.write("go on\n")
                worker.stdin.flush()
                assert worker.stdout.readline() == "step\n"
            assert all(is_running(pid) for pid in loaders)
        finally:
            worker.kill()
        deadline = time.monotonic() + 120
        while any(is_running(pid) for pid in loaders):
            assert time.monotonic() < deadline, "a loader process outlives its worker"
            time.sleep(0.05)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [None, 10, 3, 1000])
def test_held_out_examples_are_shared_without_padding(reader, num_workers, limit):
    whole = joined([padded(b) for b in held_out_batches(reader, micro_batch_size=1000, limit=limit)])
    assert len(whole["index"]) == min(limit or 53, 53)
    assert whole["index"].tolist() == sorted(set(whole["index"].tolist()))
    assert not whole["epoch"].any()
    parts = [
        padded(batch)
        for rank in range(num_workers)
        for batch in held_out_batches(
            reader, micro_batch_size=4, limit=limit, rank=rank, num_workers=num_workers
        )
    ]
    assert max(len(batch["index"]) for batch in parts) <= 4
    assert_same([joined(parts)], [whole])


@pytest.mark.parametrize("setting", [{"num_loader_processes": -1}, {"num_prefetched_steps": 0}])
def test_wrong_settings(setting):
    with pytest.raises(UsageError, match=next(iter(setting))):
        LoaderConfig(**setting)
