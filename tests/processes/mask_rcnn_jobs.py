"""Real Mask R-CNN jobs for tests: a few made scenes, the smallest settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pretrain_jobs as jobs

from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.data.coco.synthetic import make_coco
from shoal.models.detection.config import MaskRCNNConfig
from shoal.recipes.images import ImageDataConfig
from shoal.recipes.mask_rcnn import (
    DetectionRunConfig,
    MaskRCNNTrainConfig,
    OptimConfig,
    TrainConfig,
    ValidationConfig,
)

NUM_TRAIN, NUM_VALIDATION = 11, 5


def prepare_small(folder: Path) -> Path:
    """Make and prepare a few scenes, some wide and some tall, and return the directory."""
    out = folder / "scenes"
    make_coco(out, num_train=NUM_TRAIN, num_validation=NUM_VALIDATION, size=64, seed=3)
    return out


def small_config(scenes: Path, run_dir: Path, **changes: Any) -> MaskRCNNTrainConfig:
    """Return settings for 5 quick steps of 4 images, whose second epoch begins within step 4."""
    config = MaskRCNNTrainConfig(
        model=MaskRCNNConfig(
            backbone="resnet18",
            channels=8,
            anchor_sizes=(8, 16, 32, 64, 128),
            proposal_samples=16,
            proposals_a_level=30,
            proposals=20,
            proposals_used=20,
            region_samples=16,
            box_loss="giou",
            label_smoothing=0.1,
            least_score=0.01,
            detections=10,
        ),
        data=ImageDataConfig(path=str(scenes), decode_threads=1),
        augment=DetectionAugmentConfig(shorter=(48, 64), longer=64),
        train=TrainConfig(total_steps=5, global_batch_size=4, micro_batch_size=2, precision="fp32"),
        optim=OptimConfig(
            optimizer="novograd",
            learning_rate=0.01,
            warmup_steps=1,
            decay="cosine",
            bias_rate=2.0,
            max_grad_norm=5.0,
        ),
        validation=ValidationConfig(shorter=64, longer=64, batch_size=2),
        run=DetectionRunConfig(
            name="test",
            dir=run_dir,
            log_frequency=1,
            validation_frequency=3,
            checkpoint_frequency=3,
            keep_checkpoints=2,
        ),
    )
    return jobs.changed(config, changes)
