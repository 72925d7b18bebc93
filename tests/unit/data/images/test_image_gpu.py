"""The GPU's path on the CPU: the same images as the CPU's own, but for torch's two ways to resize."""

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from image_files import announcing
from shoal.data.images import gpu
from shoal.data.images.augment import AugmentConfig
from shoal.data.images.gpu import EncodedReader, GpuTransform, decode_on
from shoal.data.images.reader import ImageReader
from shoal.data.images.shards import ImageShards
from shoal.data.images.transform import TrainTransform
from shoal.data.loader import LoaderConfig, streamed_steps
from shoal.data.steps import DataShard, StepReader
from shoal.errors import ShoalError, UsageError
from synthetic_images import write_images

CPU = torch.device("cpu")
CONFIG = AugmentConfig(size=32, lighting=0.1, erase=0.5)


def encoded(number, form="JPEG", mode="RGB"):
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((80 + number, 60), Image.Resampling.BICUBIC).convert(mode).save(file, form)
    return file.getvalue()


@pytest.fixture
def shards(tmp_path):
    images = [encoded(0), encoded(1, mode="L"), encoded(2, form="PNG"), *(encoded(i) for i in range(3, 12))]
    write_images(tmp_path, images, num_shards=2)
    return ImageShards(tmp_path, "train")


def batches(reader):
    share = DataShard(global_batch_size=8, micro_batch_size=4)
    return [
        batch
        for step in streamed_steps(StepReader(reader=reader, share=share), LoaderConfig(), num_steps=3)
        for batch in step
    ]


def test_images_are_those_of_the_cpu(shards):
    transform = GpuTransform(CONFIG, seed=5, device=CPU)
    wanted = batches(ImageReader(shards, TrainTransform(CONFIG), seed=5, threads=1))
    found = batches(pickle.loads(pickle.dumps(EncodedReader(shards, seed=5))))
    assert len(found) == len(wanted) == 6
    step = 1 / 255 / min(CONFIG.std)  # of the pixels before they are normalised
    for a, b in zip(found, wanted, strict=True):
        for name in ("labels", "epoch", "index"):
            assert torch.equal(a[name], b[name])
        difference = (transform(a) - b["images"]).abs()
        assert difference.max() <= 1.01 * step and difference.mean() < 0.2 * step


def test_bytes_that_are_no_image_are_named(shards, tmp_path):
    write_images(tmp_path / "bad", [encoded(0), b"no image"])
    reader = EncodedReader(ImageShards(tmp_path / "bad", "train"), seed=5)
    arrays = reader.micro_batch(reader.batch(0, [0, 1]))
    with pytest.raises(ShoalError, match="image 1 of the split: not an image"):
        GpuTransform(CONFIG, seed=5, device=CPU)({k: torch.from_numpy(v) for k, v in arrays.items()})


@pytest.mark.parametrize(("form", "words"), [("JPEG", "has more"), ("PNG", "has more"), ("GIF", "has more")])
def test_a_header_that_announces_too_much_is_named(tmp_path, form, words):
    write_images(tmp_path / "bad", [encoded(0), announcing(form, 60_000, 60_000)])
    reader = EncodedReader(ImageShards(tmp_path / "bad", "train"), seed=5)
    arrays = reader.micro_batch(reader.batch(0, [0, 1]))
    with pytest.raises(
        ShoalError, match=f"image 1 of the split: not an image that can be decoded: it {words}"
    ):
        GpuTransform(CONFIG, seed=5, device=CPU)({k: torch.from_numpy(v) for k, v in arrays.items()})


def a_batch(shards, indices):
    reader = EncodedReader(shards, seed=5)
    arrays = reader.micro_batch(reader.batch(0, indices))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def test_an_image_that_the_device_refuses_is_decoded_on_the_host_alone(shards, monkeypatch, capsys):
    """nvJPEG refuses what libjpeg decodes, such as arithmetic coding, and then the whole call fails."""
    calls = []

    def picky(device, images):
        calls.append(len(images))
        if any(torch.equal(image, refused) for image in images):
            raise RuntimeError("nvjpegDecode failed: 2\nat line 1")
        return decode_on(device, images)

    batch = a_batch(shards, [0, 1, 2, 3])
    refused = batch["encoded"].split(batch["lengths"].tolist())[1]
    transform = GpuTransform(CONFIG, seed=5, device=CPU)
    wanted = transform(batch)
    assert transform.num_refused == 0
    monkeypatch.setattr(gpu, "decode_on", picky)
    found = transform(batch)
    assert torch.equal(found, wanted)  # libjpeg decodes on both sides
    assert calls == [3, 1, 1, 1]  # the PNG goes to the host at once
    assert transform.num_refused == 1
    transform(batch)
    words = "image 1 of the split is decoded on the host, as are others of its kind, which is slower: nvjpeg"
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert transform.num_refused == 2


def test_lack_of_memory_is_no_reason_to_decode_on_the_host(shards, monkeypatch):
    def full(device, images):
        raise torch.OutOfMemoryError("CUDA out of memory")

    transform = GpuTransform(CONFIG, seed=5, device=CPU)
    monkeypatch.setattr(gpu, "decode_on", full)
    with pytest.raises(torch.OutOfMemoryError):
        transform(a_batch(shards, [0, 1]))


def test_a_missing_decoder_is_found_before_the_run(monkeypatch):
    def missing(device, images):
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support")

    monkeypatch.setattr(gpu, "decode_on", missing)
    with pytest.raises(
        UsageError, match=r"cannot decode a JPEG on cpu \(decode_jpegs_cuda: .*set data.decode"
    ):
        GpuTransform(CONFIG, seed=5, device=CPU)


def test_what_it_does_not_do_is_refused():
    for options, words in (({"hue": 0.1}, "hue 0.1 is not done"), ({"crop": "padded"}, "crop 'padded' is")):
        with pytest.raises(UsageError, match=words):
            GpuTransform(AugmentConfig(size=32, **options), seed=5, device=CPU)
