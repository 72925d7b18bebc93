"""Batches of images: the same global batches for any readers, from any sample on, in any order's form."""

import gc
import pickle
import threading
import weakref
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.data.cache import CacheConfig
from shoal.data.images.reader import ImageReader
from shoal.data.images.shards import ImageShards
from shoal.data.loader import LoaderConfig, held_out_batches, streamed_steps, training_steps
from shoal.data.steps import DataShard, StepReader
from shoal.decide.order import BlockShuffle, ShuffledOrder
from shoal.errors import ShoalError, UsageError
from synthetic_images import BAD, StampTransform, key_of, random_images, write_images

N, SEED, GLOBAL_BATCH = 53, 7, 24
IMAGES = random_images(N)
BLOCKS = BlockShuffle(block_size=8, blocks_in_window=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """53 images: five global batches of 24 cross two borders of epochs."""
    directory = tmp_path_factory.mktemp("prepared")
    write_images(directory, IMAGES, num_shards=3)
    return directory


def reader_of(directory, *, cache=None, **options):
    options = {"threads": 2, "seed": SEED, "transform": StampTransform(), **options}
    return ImageReader(ImageShards(directory, "train", cache=cache), **options)


@pytest.fixture(scope="module")
def reader(directory):
    return reader_of(directory)


def stamps(numbers, *, blocks=None):
    """Return the batch that ``StampTransform`` makes, by the definition of the order."""
    epochs, indices = ShuffledOrder(num_examples=N, seed=SEED, blocks=blocks).examples_of(numbers)
    return [
        [index, IMAGES[index][-1], SEED, epoch, index]
        for epoch, index in zip(epochs.tolist(), indices.tolist(), strict=True)
    ]


def rows(batch):
    return batch["images"][:, 0, 0, :5].to(torch.int64).tolist()


def streamed(
    reader, *, num_workers=1, micro_batch_size=5, processes=0, consumed=0, num_steps=5, blocks=None
):  # fmt: skip
    """Return the rows of each global batch, workers' parts in rank order."""
    workers = [
        streamed_steps(
            StepReader(
                reader=reader,
                share=DataShard(
                    global_batch_size=GLOBAL_BATCH,
                    micro_batch_size=micro_batch_size,
                    rank=rank,
                    num_workers=num_workers,
                ),
                samples_consumed=consumed,
                order=ShuffledOrder(num_examples=N, seed=SEED, blocks=blocks) if blocks else None,
            ),
            LoaderConfig(num_loader_processes=processes, max_prefetched_bytes=5000),
            num_steps=num_steps,
        )
        for rank in range(num_workers)
    ]
    return [
        [row for step in steps for batch in step for row in rows(batch)]
        for steps in zip(*workers, strict=True)
    ]


# ---- which images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [None, BLOCKS])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_any_number_of_workers_reads_the_order(reader, num_workers, blocks):
    found = streamed(reader, num_workers=num_workers, blocks=blocks)
    assert [row for step in found for row in step] == stamps(range(5 * GLOBAL_BATCH), blocks=blocks)


def test_so_do_loader_processes(reader):
    found = streamed(reader, processes=2, num_steps=3)
    assert [row for step in found for row in step] == stamps(range(3 * GLOBAL_BATCH))


@pytest.mark.parametrize("blocks", [None, BLOCKS])
def test_resuming_within_an_epoch_at_another_world_size(reader, blocks):
    """Two steps by one worker, the rest of the epoch by three: together each image once."""
    before = streamed(reader, num_steps=1, blocks=blocks)
    after = streamed(reader, num_workers=3, consumed=GLOBAL_BATCH, num_steps=2, blocks=blocks)
    together = [row for step in before + after for row in step]
    assert together == stamps(range(3 * GLOBAL_BATCH), blocks=blocks)
    assert sorted(index for *_, index in together[:N]) == list(range(N))


def test_streams_are_what_whole_steps_are(reader):
    share = DataShard(global_batch_size=GLOBAL_BATCH, micro_batch_size=5, rank=1, num_workers=2)
    whole = list(
        training_steps(
            StepReader(reader=reader, share=share, samples_consumed=17), LoaderConfig(), num_steps=4
        )
    )
    parts = [
        list(step)
        for step in streamed_steps(
            StepReader(reader=reader, share=share, samples_consumed=17), LoaderConfig(), num_steps=4
        )
    ]
    assert [len(step) for step in parts] == [3] * 4
    for a, b in zip(chain(*whole), chain(*parts), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_ahead", [0, 2])
def test_validation_has_each_image_once(reader, num_workers, num_ahead):
    batches = [
        batch
        for rank in range(num_workers)
        for batch in held_out_batches(
            reader, micro_batch_size=7, rank=rank, num_workers=num_workers, num_ahead=num_ahead
        )
    ]
    assert [row for batch in batches for row in rows(batch)] == [
        [i, IMAGES[i][-1], SEED, 0, i] for i in range(N)
    ]
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == [i % 3 for i in range(N)]


def test_a_batch_is_what_it_says(reader):
    batch = reader.batch([3, 0, 9], [52, 5, 5])
    assert batch["images"].dtype == np.float32 and batch["images"].shape == (3, 3, 8, 8)
    assert batch["labels"].tolist() == [1, 2, 2] and batch["labels"].dtype == np.int64
    assert batch["epoch"].tolist() == [3, 0, 9] and batch["index"].tolist() == [52, 5, 5]
    assert not batch["replaced"].any()
    assert reader.example_bytes == 3 * 8 * 8 * 4


def test_neither_threads_nor_company_change_an_image(directory, reader):
    epochs, indices = np.repeat(np.arange(4), N), np.tile(np.arange(N), 4)
    whole = reader.batch(epochs, indices)["images"]
    for threads in (1, 5):
        other = reader_of(directory, threads=threads)
        assert (other.batch(epochs[::-1], indices[::-1])["images"] == whole[::-1]).all()
    assert (reader.batch(2, [9])["images"] == whole[2 * N + 9]).all()


@pytest.mark.parametrize(("dtype", "channels_last"), [("uint8", False), ("uint16", False), ("float32", True)])
def test_forms_of_the_array(directory, dtype, channels_last):
    reader = reader_of(directory, dtype=dtype, channels_last=channels_last)
    (batch,) = held_out_batches(reader, micro_batch_size=100)
    images = batch["images"]
    assert str(images.dtype) == f"torch.{dtype}"
    assert images.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert images[:, 0, 0, 4].to(torch.int64).tolist() == list(range(N))
    assert reader.example_bytes == 3 * 8 * 8 * np.dtype(dtype).itemsize


def test_progressive_resolution_takes_the_larger_size_at_the_border(directory):
    reader = reader_of(directory, transform=StampTransform(sizes=(6, 8)))
    shapes = [
        tuple(batch["images"].shape)
        for step in streamed_steps(
            StepReader(reader=reader, share=DataShard(global_batch_size=20, micro_batch_size=20)),
            LoaderConfig(),
            num_steps=4,
        )
        for batch in step
    ]
    assert shapes == [(20, 3, 6, 6), (20, 3, 6, 6), (20, 3, 8, 8), (20, 3, 8, 8)]
    assert reader.example_bytes == 3 * 8 * 8 * 4


def test_through_a_cache_the_images_are_the_same(directory, tmp_path):
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=60_000, evict=True)
    cached = reader_of(directory, cache=cache)
    assert streamed(cached, num_workers=2) == streamed(reader_of(directory))
    counts = cached.shards.cache_counts
    assert counts.num_filled >= 3 and counts.num_evicted >= 1


# ---- how they come --------------------------------------------------------------------------------------


class Counting(ImageReader):
    """Counts micro-batches that were begun, and holds those after the first ``num_free`` back."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.num_begun, self.num_free = 0, 1 << 30
        self.changed = threading.Condition()

    def batch(self, epochs, indices):
        with self.changed:
            self.num_begun += 1
            number = self.num_begun
            self.changed.wait_for(lambda: number <= self.num_free, timeout=60)
        return super().batch(epochs, indices)


def stream_of(reader, *, max_prefetched_bytes, num_steps=10):
    share = DataShard(global_batch_size=GLOBAL_BATCH, micro_batch_size=4)
    config = LoaderConfig(max_prefetched_bytes=max_prefetched_bytes)
    return streamed_steps(StepReader(reader=reader, share=share), config, num_steps=num_steps)


def test_the_first_micro_batch_does_not_wait_for_its_step(directory):
    reader = Counting(ImageShards(directory, "train"), StampTransform(), seed=SEED, threads=1)
    reader.num_free = 1
    steps = stream_of(reader, max_prefetched_bytes=0)
    assert rows(next(next(steps))) == stamps(range(4))
    with reader.changed:
        reader.num_free = 1 << 30
        reader.changed.notify_all()
    steps.close()


@pytest.mark.parametrize(("fitting", "num_begun"), [(0, 1 + 1), (3, 1 + 3), (5.9, 1 + 5)])
def test_bytes_limit_what_is_made_ahead(directory, fitting, num_begun):
    reader = Counting(ImageShards(directory, "train"), StampTransform(), seed=SEED, threads=1)
    steps = stream_of(reader, max_prefetched_bytes=int(fitting * 4 * reader.example_bytes))
    next(next(steps))
    steps.close()  # waits for what was begun; what was only handed in is dropped
    assert 1 <= reader.num_begun <= num_begun
    reader.num_begun = 0
    steps = stream_of(reader, max_prefetched_bytes=int(fitting * 4 * reader.example_bytes), num_steps=2)
    taken = list(map(list, steps))
    assert reader.num_begun == sum(map(len, taken)) == 12


def test_a_step_that_is_not_read_to_its_end_does_not_leak_into_the_next(reader):
    steps = stream_of(reader, max_prefetched_bytes=1 << 20)
    firsts = [rows(next(step)) for _, step in zip(range(3), steps, strict=False)]
    assert firsts == [stamps(range(24 * k, 24 * k + 4)) for k in range(3)]
    steps.close()


def test_a_batch_that_was_let_go_is_freed(reader):
    steps = stream_of(reader, max_prefetched_bytes=0)
    step = next(steps)
    gone = weakref.ref(next(step)["images"])
    gc.collect()
    assert gone() is None
    steps.close()


def test_closing_ends_threads(reader):
    steps = stream_of(reader, max_prefetched_bytes=1 << 20)
    next(next(steps))
    steps.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shoal-loader")]


# ---- bad input ------------------------------------------------------------------------------------------

BAD_NUMBERS = (4, 30, 31)


@pytest.fixture(scope="module")
def with_bad(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bad")
    images = [data + BAD if i in BAD_NUMBERS else data for i, data in enumerate(IMAGES)]
    write_images(directory, images, num_shards=3)
    return directory


@pytest.mark.parametrize("processes", [0, 1])
def test_an_image_that_cannot_be_decoded_is_named(with_bad, processes):
    with pytest.raises(ShoalError) as error:
        streamed(reader_of(with_bad), processes=processes)
    message = str(error.value)
    places = [
        f"{with_bad}/train-0000{1 if i >= 18 else 0}.tar: {key_of(i)}: not an image" for i in BAD_NUMBERS
    ]
    assert any(message.startswith(place) for place in places) and "--data.on-bad skip" in message
    assert "\n" not in message


def test_bad_images_are_replaced_the_same_way_by_everybody(with_bad, monkeypatch):
    written = []
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    reader = reader_of(with_bad, on_bad="skip")
    batch = reader.batch(0, np.arange(N))
    assert np.flatnonzero(batch["replaced"]).tolist() == list(BAD_NUMBERS)
    used = batch["images"][:, 0, 0, 4].astype(int)
    assert (used[~batch["replaced"]] == np.flatnonzero(~batch["replaced"])).all()
    assert batch["labels"].tolist() == (used % 3).tolist()
    assert not set(used.tolist()) & set(BAD_NUMBERS)
    assert batch["index"].tolist() == list(range(N))
    assert all(line.endswith("\n") for line in written), "whole lines, or those of two threads would mix"
    assert sorted(line.split(": ")[1] for line in written) == sorted(map(key_of, BAD_NUMBERS))
    again = pickle.loads(pickle.dumps(reader)).batch(0, np.arange(N)[::-1])
    assert (again["images"][::-1] == batch["images"]).all()
    others = reader.batch(1, np.arange(N))["images"][list(BAD_NUMBERS), 0, 0, 4]
    assert others.tolist() != used[list(BAD_NUMBERS)].tolist(), "each epoch draws again"
    assert streamed(reader, num_workers=3) == streamed(again_reader(with_bad))


def test_many_bad_images_are_a_damaged_set(tmp_path):
    """The rule of all readers: 20 of them pass, 21 of 100 do not, unless that share is allowed."""
    images = [BAD if number < 21 else data for number, data in enumerate((IMAGES * 9)[:100])]
    write_images(tmp_path, images)
    reader_of(tmp_path, on_bad="skip").batch(0, np.arange(20))
    with pytest.raises(UsageError, match=r"21 of 100 entries are invalid, .*--data\.most-bad 0\.2"):
        reader_of(tmp_path, on_bad="skip", threads=1).batch(0, np.arange(21))
    reader_of(tmp_path, on_bad="skip", most_bad=0.21).batch(0, np.arange(21))


def again_reader(directory):
    return reader_of(directory, on_bad="skip", threads=1)


def test_nothing_but_bad_images_is_an_error(tmp_path):
    write_images(tmp_path, [BAD] * 5)
    with pytest.raises(ShoalError, match=r"nor can any of 8 others .* are these images"):
        reader_of(tmp_path, on_bad="skip").batch(0, [1])


class Misused(StampTransform):
    def __call__(self, encoded, out, key):
        raise UsageError("a crop of 300 does not fit")


def test_a_setting_that_does_not_fit_an_image_is_not_a_bad_image(directory):
    with pytest.raises(UsageError, match=r"train-00000\.tar: ant/0000: a crop of 300 does not fit"):
        reader_of(directory, transform=Misused(), on_bad="skip").batch(0, [0])


def test_wrong_settings(directory, tmp_path):
    with pytest.raises(UsageError, match="decode_threads 0 must be at least 1"):
        reader_of(directory, threads=0)
    with pytest.raises(UsageError, match="max_prefetched_bytes -1"):
        LoaderConfig(max_prefetched_bytes=-1)
    write_images(tmp_path, [])
    with pytest.raises(UsageError, match="the split 'train' has no images"):
        reader_of(tmp_path)
