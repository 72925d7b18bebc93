"""Images that go to the device as bytes, against those that the host normalises: the same bits."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.data.images.augment import AugmentConfig
from shoal.data.images.normalise import Normalisation
from shoal.data.images.reader import ImageReader
from shoal.data.images.shards import ImageShards
from shoal.data.images.synthetic import make_images
from shoal.data.images.transform import TrainTransform
from shoal.data.loader import as_tensors
from shoal.env.worker import alone
from shoal.models.resnet_config import ResNetConfig
from shoal.recipes import images as image_recipes
from shoal.recipes import resnet50
from shoal.train.config import RunOutputConfig

CPU = torch.device("cpu")
MEAN, STD = (0.1, 0.7, 0.3), (0.21, 0.9, 0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "images"
    make_images(out, num_classes=3, num_train=24, num_validation=6, size=20, seed=1)
    return out


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("host_type", "device_type"), [("float32", torch.float32), ("uint16", torch.bfloat16)]
)
def test_the_bits_are_those_of_the_host(
    folder: Path, channels_last: bool, host_type: Any, device_type: torch.dtype
) -> None:
    config = AugmentConfig(size=24, blur=0.5, mean=MEAN, std=STD)
    assert config.is_in_bytes

    def batch(dtype: Any) -> Any:
        reader = ImageReader(
            ImageShards(folder, "train"), TrainTransform(config), seed=3, threads=1, dtype=dtype,
            channels_last=channels_last,
        )  # fmt: skip
        return as_tensors(reader.batch(2, range(24)), pin_memory=False)["images"]

    there, here = batch("uint8"), batch(host_type)
    assert there.dtype == torch.uint8 and there.unique().numel() > 100
    made = Normalisation(CPU, mean=MEAN, std=STD)(there, dtype=device_type)
    assert made.stride() == here.stride()
    assert torch.equal(made, here.view(device_type))


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue", "lighting", "erase"])
def test_what_gives_colours_between_whole_numbers_is_left_to_the_host(name: str) -> None:
    assert AugmentConfig().is_in_bytes
    assert not AugmentConfig(**{name: 0.1}).is_in_bytes


def test_padding_becomes_zero() -> None:
    sizes = torch.tensor([[2, 3], [4, 1]])
    made = Normalisation(CPU)(torch.full((2, 3, 4, 5), 9, dtype=torch.uint8), sizes)
    whole = Normalisation(CPU)(torch.full((1, 3, 1, 1), 9, dtype=torch.uint8))
    for one, (height, width) in zip(made, sizes.tolist(), strict=True):
        assert torch.equal(one[:, :height, :width], whole[0].expand(3, height, width))
        assert int((one == 0).sum()) == 3 * (20 - height * width)


def test_a_run_whose_images_go_as_bytes_has_the_bits_of_one_on_the_host(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for in_bytes in (False, True):
        monkeypatch.setattr(image_recipes, "copies_bytes", lambda *_, wanted=in_bytes: wanted)
        run_dir = tmp_path / f"run-{in_bytes}"
        config = resnet50.ResNetTrainConfig(
            model=ResNetConfig(network="resnet8", width=4),
            data=resnet50.DataConfig(path=str(folder), decode_threads=1),
            augment=AugmentConfig(size=24),
            train=resnet50.TrainConfig(
                total_epochs=1, global_batch_size=8, micro_batch_size=4, precision="fp32"
            ),
            optim=resnet50.OptimConfig(learning_rate=0.05, warmup_epochs=0.5),
            validation=resnet50.ValidationConfig(size=24, resize=26, batch_size=6),
            run=RunOutputConfig(dir=run_dir),
        )  # fmt: skip
        (meeting := tmp_path / f"meet-{in_bytes}").mkdir()
        assert resnet50.main(config, alone(meeting)) == 0
        weights.append((run_dir / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_picture_of_one_colour_is_what_the_formula_says() -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (10, 20, 30)).save(file, "PNG")
    out = np.empty((3, 8, 8), np.uint8)
    TrainTransform(AugmentConfig(size=8))(file.getvalue(), out, (0, 0, 0))
    made = Normalisation(CPU)(torch.from_numpy(out)[None])
    wanted = [(v / 255 - m) / s for v, m, s in zip((10, 20, 30), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)]  # fmt: skip  # noqa: E501
    assert made[0, :, 0, 0].tolist() == pytest.approx(wanted, rel=1e-5)
