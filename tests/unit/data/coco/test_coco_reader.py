"""Batches for a detector: padding, packed masks, and the same global batches on any number of workers."""

from __future__ import annotations

import io
import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from made_coco import CATEGORIES, made_truth
from PIL import Image
from pycocotools import mask as official

from shoal.data.coco.augment import SIZE_STEP, DetectionAugmentConfig
from shoal.data.coco.masks import bitmaps
from shoal.data.coco.reader import DetectionReader
from shoal.data.coco.transform import DetectionTransform
from shoal.data.images.augment import IMAGENET_MEAN, IMAGENET_STD
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.normalise import Normalisation
from shoal.data.images.shards import ImageShards, ImageShardWriter
from shoal.data.loader import LoaderConfig, held_out_batches, streamed_steps
from shoal.data.steps import DataShard, StepReader
from shoal.decide.bucketing import GroupedOrder, aspect_groups
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import ShoalError

SEED, RUN = 5, 2
PLAIN = DetectionAugmentConfig(shorter=(50,), longer=1000, flip=0.5)
TINY = data_dir() / "coco_tiny100" / "tiny_coco"


pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools


@cache
def truth() -> dict[str, Any]:
    return made_truth(1, num_images=11)


def pixels_of(image: dict[str, Any]) -> npt.NDArray[np.uint8]:
    random = np.random.default_rng(image["id"])
    return random.integers(0, 256, (image["height"], image["width"], 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """11 images of 50 pixels in height and 60 to 70 in width, every third turned; the last has no object."""
    directory = tmp_path_factory.mktemp("prepared")
    with ImageShardWriter(directory, "train-00000") as writer:
        for number, image in enumerate(truth()["images"]):
            objects = [one for one in truth()["annotations"] if one["image_id"] == image["id"]]
            pixels = pixels_of(image)
            if number % 3 == 0:  # upright; what its objects are does not matter here
                pixels, objects = np.ascontiguousarray(pixels.transpose(1, 0, 2)), []
            height, width = pixels.shape[:2]
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "png")
            tree = {"image_id": image["id"], "width": width, "height": height, "annotations": objects}
            writer.add(
                str(number),
                file.getvalue(),
                width=width,
                height=height,
                annotations=json.dumps(tree).encode(),
            )
        info = writer.finish()
    ImageManifest(classes=(), source="made up", splits={"train": (info,)}).save(directory)
    return directory


def reader_of(directory: Path, config: DetectionAugmentConfig = PLAIN, **options: Any) -> DetectionReader:
    shards = ImageShards(directory, "train")
    options = {"seed": SEED, "threads": 2, **options}
    return DetectionReader(shards, DetectionTransform(config), dict(sorted(CATEGORIES.items())), **options)


def bitmap_of(batch: dict[str, Any], row: int, number: int) -> npt.NDArray[np.uint8]:
    """The mask of an object in its frame."""
    start, top, left, height, width = np.asarray(batch["mask_places"])[row, number].tolist()
    whole = np.zeros(np.asarray(batch["sizes"])[row], dtype=np.uint8)
    part = np.asarray(batch["masks"])[row, start : start + height * width].reshape(height, width)
    whole[top : top + height, left : left + width] = part
    return whole


def test_batches_take_few_sizes(directory: Path) -> None:
    config = DetectionAugmentConfig(shorter=(70,), longer=100)
    assert config.canvases == ((96, 96), (96, 128), (128, 96))
    assert DetectionAugmentConfig().canvases[:3] == ((800, 1_088), (800, 1_216), (800, 1_344))
    assert len(DetectionAugmentConfig(shorter=(640, 800)).canvases) == 6
    assert DetectionAugmentConfig(scales=(0.1, 2.0), canvas=1_000).canvases == ((1_024, 1_024),)
    epochs, indices = np.array([0, 0]), np.array([1, 4])
    plain = reader_of(directory, config).batch(epochs, indices)
    height, width = plain["images"].shape[2:]
    larger = [(height + 64, width), (height, width + 32), (height + 32, width - 32)]
    batch = reader_of(directory, config, canvases=larger).batch(epochs, indices)
    assert batch["images"].shape[2:] == (height, width + 32)
    assert (batch["images"][..., :width] == plain["images"]).all() and not batch["images"][..., width:].any()
    assert all((batch[name] == plain[name]).all() for name in batch.keys() - {"images"})
    none_holds = reader_of(directory, config, canvases=larger[2:]).batch(epochs, indices)
    assert (none_holds["images"] == plain["images"]).all()


@pytest.mark.parametrize("name", ["as they are", "resized", "jittered in scale"])
def test_a_batch_holds_each_image_with_its_objects(directory: Path, name: str) -> None:
    """Against the transform called by itself; pixels that are not resized against their definition."""
    config = {
        "as they are": PLAIN,
        "resized": DetectionAugmentConfig(shorter=(70, 90), longer=100),
        "jittered in scale": DetectionAugmentConfig(scales=(0.3, 1.5), canvas=70),
    }[name]
    reader = reader_of(directory, config)
    indices = np.array([3, 1, 10, 4, 1])
    epochs = np.array([0, 0, 1, 2, 7])
    batch = reader.batch(epochs, indices)
    sizes = batch["sizes"]
    assert batch["images"].shape[2:] == tuple(-(-sizes.max(axis=0) // SIZE_STEP) * SIZE_STEP)
    assert batch["num_objects"].max() == batch["boxes"].shape[1] > 1
    for row, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist(), strict=True)):
        height, width = sizes[row].tolist()
        out = np.empty((3, height, width), dtype=np.float32)
        encoded, extra = reader.shards.read(index), reader.shards.extra(index)
        objects = reader.transform(encoded, extra, out, (SEED, epoch, index))
        assert (batch["images"][row, :, :height, :width] == out).all()
        assert not batch["images"][row, :, height:].any() and not batch["images"][row, :, :, width:].any()
        count = int(batch["num_objects"][row])
        assert np.array_equal(batch["boxes"][row, :count], objects.boxes)
        assert not batch["boxes"][row, count:].any() and not batch["labels"][row, count:].any()
        labels = [sorted(CATEGORIES).index(category) + 1 for category in objects.categories.tolist()]
        assert batch["labels"][row, :count].tolist() == labels
        found = [bitmap_of(batch, row, number) for number in range(count)]
        expected = bitmaps(objects.masks, height, width)
        assert all((a == b).all() for a, b in zip(found, expected, strict=True))
        assert batch["image_id"][row] == truth()["images"][index]["id"]
        assert batch["original_size"][row].tolist() == reader.shards.sizes[index][::-1].tolist()
        if name == "as they are":
            plain = pixels_of(truth()["images"][index]) / 255
            plain = plain.transpose(1, 0, 2) if index % 3 == 0 else plain
            normal = ((plain - IMAGENET_MEAN) / IMAGENET_STD).transpose(2, 0, 1)
            assert any(np.allclose(out, seen, atol=1e-5) for seen in (normal, normal[:, :, ::-1]))
    assert batch["epoch"].tolist() == epochs.tolist() and batch["index"].tolist() == indices.tolist()


def test_no_objects_at_all(directory: Path) -> None:
    batch = reader_of(directory).batch(0, [10, 0])
    assert batch["num_objects"].tolist() == [0, 0]
    assert (batch["boxes"].shape, batch["masks"].shape) == ((2, 0, 4), (2, 0))


def test_neither_threads_nor_company_nor_pickling_change_an_image(directory: Path) -> None:
    whole = reader_of(directory).batch(3, np.arange(11))
    for reader in (reader_of(directory, threads=1), pickle.loads(pickle.dumps(reader_of(directory)))):
        for index in (2, 7):
            alone = reader.batch(3, [index])
            height, width = alone["sizes"][0]
            image, same = alone["images"][0], whole["images"][index]
            assert (image[:, :height, :width] == same[:, :height, :width]).all()
            assert (bitmap_of(alone, 0, 0) == bitmap_of(whole, index, 0)).all()


def names(
    reader: DetectionReader, order: GroupedOrder, num_workers: int, first: int, num_steps: int
) -> list[list[tuple[int, int]]]:
    """(epoch, index) of the samples of each global batch of 4 runs, workers in the order of ranks."""
    size = 4 * RUN
    workers = [
        streamed_steps(
            StepReader(
                reader=reader,
                share=DataShard(
                    global_batch_size=size, micro_batch_size=RUN, rank=rank, num_workers=num_workers
                ),
                samples_consumed=first,
                order=order,
            ),
            LoaderConfig(),
            num_steps=num_steps,
        )
        for rank in range(num_workers)
    ]
    steps = []
    for parts in zip(*workers, strict=True):
        batches = [batch for part in parts for batch in part]
        for batch in batches:
            assert len({w >= h for h, w in batch["sizes"].tolist()}) == 1
        pairs = [zip(b["epoch"].tolist(), b["index"].tolist(), strict=True) for b in batches]
        steps.append([pair for some in pairs for pair in some])
    return steps


def test_any_number_of_workers_reads_the_grouped_order_and_takes_it_up(directory: Path) -> None:
    """Micro-batches are of one group; after two steps of one worker, four go on."""
    reader = reader_of(directory)
    order = GroupedOrder(aspect_groups(reader.shards.sizes), RUN, SEED)
    epochs, indices = order.examples_of(np.arange(5 * 4 * RUN))
    expected = list(zip(epochs.tolist(), indices.tolist(), strict=True))
    for num_workers in (1, 2, 4):
        steps = names(reader, order, num_workers, 0, 5)
        assert [name for step in steps for name in step] == expected
    resumed = names(reader, order, 1, 0, 2) + names(reader, order, 4, 2 * 4 * RUN, 3)
    assert [name for step in resumed for name in step] == expected


def test_validation_has_each_image_once(directory: Path) -> None:
    reader = reader_of(directory, DetectionAugmentConfig(shorter=(50,), flip=0.0))
    batches = [
        batch
        for rank in range(3)
        for batch in held_out_batches(reader, micro_batch_size=2, rank=rank, num_workers=3)
    ]
    found = [number for batch in batches for number in batch["image_id"].tolist()]
    assert found == [image["id"] for image in truth()["images"]]
    backwards = np.arange(reader.num_examples)[::-1]
    dealt = [
        list(
            held_out_batches(
                reader, micro_batch_size=2, indices=backwards, rank=rank, num_workers=3, dealt=True
            )
        )
        for rank in range(3)
    ]
    assert [dealt[n % 3][n // 3]["index"].tolist() for n in range(3)] == [[10, 9], [8, 7], [6, 5]]
    assert sum(len(batch["index"]) for own in dealt for batch in own) == reader.num_examples


def test_refusals_name_the_image(directory: Path) -> None:
    shards = ImageShards(directory, "train")
    reader = DetectionReader(shards, DetectionTransform(PLAIN), {3: "hen"}, seed=0)
    with pytest.raises(ShoalError, match=r"an object has the category \d, which the list of categories"):
        reader.batch(0, np.arange(11))

    def damaged(self: ImageShards, number: int) -> bytes:
        return b"{}"

    class Damaged(ImageShards):
        extra = damaged

    reader = DetectionReader(Damaged(directory, "train"), DetectionTransform(PLAIN), CATEGORIES, seed=0)
    with pytest.raises(ShoalError, match=r"train-00000.tar: 4: annotations of an image cannot be read"):
        reader.batch(0, [4])


def test_an_image_that_cannot_be_used_is_replaced_by_one_of_its_aspect(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its objects; the same in every process, and the other images stay as they are."""

    class Damaged(ImageShards):
        def extra(self, number: int) -> bytes:
            return b"{}" if number in (3, 4) else bytes(super().extra(number))

    def reader() -> DetectionReader:
        shards = Damaged(directory, "train")
        return DetectionReader(shards, DetectionTransform(PLAIN), CATEGORIES, seed=SEED, on_bad="skip")

    whole, batch = reader_of(directory), reader().batch(0, np.arange(11))
    assert np.flatnonzero(batch["replaced"]).tolist() == [3, 4]
    assert batch["index"].tolist() == list(range(11))
    ids = whole.batch(0, np.arange(11))["image_id"].tolist()
    used = [ids.index(number) for number in batch["image_id"].tolist()]
    assert [number for number in used if number in (3, 4)] == []
    aspects = aspect_groups(whole.shards.sizes)
    assert (aspects[used] == aspects).all()
    expected = whole.batch(0, used)
    for name in ("images", "boxes", "labels", "masks", "mask_places", "sizes"):
        assert np.array_equal(batch[name], expected[name]), name
    assert np.array_equal(reader().batch(0, [4, 5])["image_id"], batch["image_id"][[4, 5]])
    said = capsys.readouterr().err
    assert "train-00000.tar: 4: annotations of an image cannot be read" in said
    assert "another image takes its place" in said


@pytest.mark.skipif(not TINY.is_dir(), reason="SHOAL_TEST_DATA has no coco_tiny100")
def test_masks_of_coco_are_the_official_ones(tmp_path: Path) -> None:
    """Neither resized nor mirrored: every object of 12 images, as pycocotools rasterises it."""
    tree = json.loads((TINY / "annotations" / "instances_train2017.json").read_bytes())
    images = [one for one in tree["images"] if min(one["width"], one["height"]) == 480][:12]
    objects: dict[int, list[Any]] = {image["id"]: [] for image in tree["images"]}
    for one in tree["annotations"]:
        objects[one["image_id"]].append(one)
    with ImageShardWriter(tmp_path, "train-00000") as writer:
        for image in images:
            size = {"width": image["width"], "height": image["height"]}
            text = json.dumps({"image_id": image["id"], **size, "annotations": objects[image["id"]]})
            jpeg = (TINY / "train2017" / image["file_name"]).read_bytes()
            writer.add(str(image["id"]), jpeg, **size, annotations=text.encode())
        info = writer.finish()
    ImageManifest(classes=(), source="COCO", splits={"train": (info,)}).save(tmp_path)
    config = DetectionAugmentConfig(shorter=(480,), longer=1333, flip=0.0)
    categories = {one["id"]: one["name"] for one in tree["categories"]}
    reader = DetectionReader(ImageShards(tmp_path, "train"), DetectionTransform(config), categories, seed=0)
    batch = reader.batch(0, np.arange(len(images)))
    num_compared = 0
    for row, image in enumerate(images):
        wanted = [one for one in objects[image["id"]] if not one["iscrowd"]]
        assert batch["num_objects"][row] == len(wanted)
        for number, one in enumerate(wanted):
            rles = official.frPyObjects(one["segmentation"], image["height"], image["width"])
            assert np.array_equal(bitmap_of(batch, row, number), official.decode(official.merge(rles)))
            x, y, w, h = one["bbox"]
            np.testing.assert_allclose(batch["boxes"][row, number], [x, y, x + w, y + h], atol=1e-3)
            num_compared += 1
    assert num_compared > 40


def test_images_in_bytes_are_normalised_on_the_device_to_the_same_bits(directory: Path) -> None:
    config = DetectionAugmentConfig(shorter=(40, 50), longer=1000, flip=0.5)
    floats, in_bytes = (
        reader_of(directory, config, dtype=dtype).batch(1, range(11)) for dtype in ("float32", "uint8")
    )
    assert in_bytes["images"].dtype == np.uint8
    sizes = torch.from_numpy(in_bytes["sizes"])
    made = Normalisation(torch.device("cpu"))(torch.from_numpy(in_bytes["images"]), sizes)
    assert torch.equal(made, torch.from_numpy(floats["images"]))
    assert all(np.array_equal(floats[name], in_bytes[name]) for name in floats if name != "images")
    of_bytes, of_floats = (reader_of(directory, config, dtype=d) for d in ("uint8", "float32"))
    assert of_floats.example_bytes - of_bytes.example_bytes == 3 * of_bytes.example_tokens
