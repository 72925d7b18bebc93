"""Small trainings of residual networks for tests; ``pretrain_jobs`` starts their workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pretrain_jobs as jobs

from shoal.data.images.augment import AugmentConfig
from shoal.data.images.synthetic import make_images
from shoal.models.resnet_config import ResNetConfig
from shoal.recipes.resnet50 import (
    DataConfig,
    OptimConfig,
    ResNetTrainConfig,
    TrainConfig,
    ValidationConfig,
)
from shoal.train.config import RunOutputConfig

NUM_TRAIN, NUM_VALIDATION, NUM_CLASSES = 50, 23, 4


def prepare_small(folder: Path) -> Path:
    """Make and prepare a few images and return the directory."""
    out = folder / "images"
    make_images(
        out,
        num_classes=NUM_CLASSES,
        num_train=NUM_TRAIN,
        num_validation=NUM_VALIDATION,
        size=24,
        seed=1,
    )
    return out


def small_config(images: Path, run_dir: Path, **changes: Any) -> ResNetTrainConfig:
    """Return settings for 9 quick steps of 16 images, whose epochs end with steps 3, 6 and 9."""
    config = ResNetTrainConfig(
        model=ResNetConfig(network="resnet8", width=4),
        data=DataConfig(path=str(images), decode_threads=1),
        augment=AugmentConfig(size=24, first_size=24),
        train=TrainConfig(
            total_epochs=3,
            global_batch_size=16,
            micro_batch_size=4,
            precision="fp32",
            mixup=0.2,
            label_smoothing=0.1,
            average_decay=0.8,
            whiten_images=16,
        ),
        optim=OptimConfig(learning_rate=0.05, warmup_epochs=0.5, momentum=0.9),
        validation=ValidationConfig(size=24, resize=26, mirror=True, batch_size=5),
        run=RunOutputConfig(name="test", dir=run_dir, log_frequency=1),
    )
    return jobs.changed(config, changes)
