"""Readers and steps under torch's own DataLoader: the same examples, in workers too, and a state that
resumes."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shoal.data.images.reader import ImageReader
from shoal.data.images.shards import ImageShards
from shoal.data.loader import LoaderConfig, StepDataset, training_steps
from shoal.data.steps import DataShard, StepReader
from shoal.data.text.examples import ExampleConfig, ExampleReader
from shoal.data.text.shards import TextShards
from shoal.errors import UsageError
from synthetic_images import StampTransform, random_images, write_images
from synthetic_text import prepare, random_documents

SHARD = DataShard(global_batch_size=12, micro_batch_size=4, rank=1, num_workers=2)  # 6 = 4 + 2 samples
NUM_STEPS = 5


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ExampleReader:
    directory = tmp_path_factory.mktemp("text")
    prepare(directory, {"train": random_documents([61 * 12, 61 * 9])}, num_shards=2)
    return ExampleReader(
        TextShards(directory, "train"), ExampleConfig(max_seq_length=64, max_predictions_per_seq=8)
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageReader:
    directory = tmp_path_factory.mktemp("images")
    write_images(directory, random_images(21))
    return ImageReader(ImageShards(directory, "train"), StampTransform(), seed=7, threads=2)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[n]), torch.as_tensor(b[n])) for n in a)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_reader_is_a_map_style_data_set(
    kind: str, num_workers: int, request: pytest.FixtureRequest
) -> None:
    reader: ExampleReader | ImageReader = request.getfixturevalue(kind)
    assert len(reader) == reader.num_examples == 21
    reader.batch(0, np.arange(8))  # its threads are running when the DataLoader forks
    for epoch in (0, 3):
        reader.epoch = epoch
        batches = list(DataLoader(reader, batch_size=8, num_workers=num_workers))
        assert [len(batch["index"]) for batch in batches] == [8, 8, 5]
        for number, batch in enumerate(batches):
            assert same(batch, reader.batch(epoch, np.arange(21)[8 * number : 8 * number + 8]))
    reader.epoch = 0


def test_a_reader_shuffles_with_spawned_workers(text: ExampleReader) -> None:
    text.epoch = 2
    loader = DataLoader(text, batch_size=8, shuffle=True, num_workers=1, multiprocessing_context="spawn")
    found = torch.cat([batch["index"] * 10 + batch["epoch"] for batch in loader])
    assert sorted(found.tolist()) == [10 * index + 2 for index in range(21)]
    text.epoch = 0


def test_one_example_and_those_that_are_not_there(text: ExampleReader) -> None:
    assert same(text[5], {name: array[0] for name, array in text.batch(0, [5]).items()})
    for index in (-1, 21):
        with pytest.raises(IndexError, match="of 21"):
            text[index]
    assert len(list(text)) == 21


def expected(reader: ExampleReader, consumed: int = 0) -> list[dict[str, Any]]:
    steps = training_steps(
        StepReader(reader=reader, share=SHARD, samples_consumed=consumed), LoaderConfig(), num_steps=NUM_STEPS
    )
    return [batch for step in steps for batch in step]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_step_data_set_yields_the_micro_batches_of_training(text: ExampleReader, num_workers: int) -> None:
    dataset = StepDataset(text, SHARD, num_steps=NUM_STEPS, samples_consumed=7)
    found = list(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    wanted = expected(text, consumed=7)
    assert len(found) == 10 and all(map(same, found, wanted))


def test_it_has_no_end_unless_one_is_set(text: ExampleReader) -> None:
    assert len(list(islice(StepDataset(text, SHARD), 40))) == 40


@pytest.mark.parametrize("taken", [0, 1, 2, 5, 10])
def test_a_state_continues_with_the_next_micro_batch(text: ExampleReader, taken: int) -> None:
    wanted = expected(text)
    first = StepDataset(text, SHARD, num_steps=NUM_STEPS)
    assert all(map(same, islice(first, taken), wanted))
    state = first.state_dict()
    assert state == {"samples_consumed": 12 * (taken // 2), "micro_batch": taken % 2}
    for num_workers in (0, 2):
        again = StepDataset(text, SHARD, num_steps=NUM_STEPS)
        again.load_state_dict(state)
        found = list(DataLoader(again, batch_size=None, num_workers=num_workers))
        assert len(found) == 10 - taken and all(map(same, found, wanted[taken:]))


def test_the_end_of_a_step_continues_with_another_number_of_ranks(text: ExampleReader) -> None:
    first = StepDataset(text, SHARD, num_steps=NUM_STEPS)
    list(islice(first, 4))
    alone = StepDataset(text, DataShard(global_batch_size=12, micro_batch_size=12), num_steps=NUM_STEPS)
    alone.load_state_dict(first.state_dict())
    found = [batch["index"].tolist() for batch in alone]
    wanted = [batch["index"].tolist() for batch in expected(text)[4:]]
    assert len(found) == 3  # rank 1 has the second half of each global batch
    assert [batch[6:] for batch in found] == [a + b for a, b in zip(wanted[::2], wanted[1::2], strict=True)]


@pytest.mark.parametrize(
    "state", [{"samples_consumed": 5, "micro_batch": 0}, {"samples_consumed": 12, "micro_batch": 2}]
)
def test_a_state_of_other_settings_is_refused(text: ExampleReader, state: dict[str, int]) -> None:
    with pytest.raises(
        UsageError, match="not a position of a stream of global batches of 12 samples, 2 micro"
    ):
        StepDataset(text, SHARD).load_state_dict(state)
    with pytest.raises(UsageError, match="after 24 samples"):
        StepDataset(text, SHARD, samples_consumed=24).load_state_dict(
            {"samples_consumed": 0, "micro_batch": 0}
        )
