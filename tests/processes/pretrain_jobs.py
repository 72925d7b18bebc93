"""Real pretraining jobs for tests: a small text, small settings, workers forked with torch already loaded."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import job_workers

from forked import wait_for
from forked_programs import forked_pools
from shoal.data.text.prepare import PrepareConfig, prepare_text
from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig
from shoal.recipes.albert import AlbertConfig, DataConfig
from shoal.recipes.bert import BertConfig, PhaseConfig
from shoal.recipes.bert import DataConfig as BertDataConfig
from shoal.recipes.bert import TrainConfig as BertTrainConfig
from shoal.recipes.lm import DataConfig as LmDataConfig
from shoal.recipes.lm import LmConfig, LmOptimConfig, ModelConfig
from shoal.recipes.mask_rcnn import MaskRCNNTrainConfig
from shoal.recipes.resnet50 import ResNetTrainConfig
from shoal.recipes.t5 import DataConfig as T5DataConfig
from shoal.recipes.t5 import T5Config, T5OptimConfig
from shoal.record import Step, read_record
from shoal.train.config import RunConfig, TrainConfig
from shoal.train.optim_config import OptimConfig, PhasesOptimConfig

AnyConfig = AlbertConfig | BertConfig | LmConfig | T5Config | ResNetTrainConfig | MaskRCNNTrainConfig
Config = TypeVar(
    "Config",
    AlbertConfig,
    BertConfig,
    LmConfig,
    T5Config,
    ResNetTrainConfig,
    MaskRCNNTrainConfig,
)

WORDS = [
    "sun",
    "moon",
    "river",
    "stone",
    "bird",
    "tree",
    "wind",
    "light",
    "road",
    "hill",
    "rain",
    "field",
    "cloud",
    "leaf",
    "song",
    "house",
]


def small_text(path: Path, num_articles: int = 60) -> None:
    """Write articles of random sentences, one a line."""
    draw = random.Random(5)
    articles = [
        " ".join(
            f"The {' '.join(draw.choices(WORDS, k=draw.randint(4, 9)))}." for _ in range(draw.randint(5, 14))
        )
        for _ in range(num_articles)
    ]
    path.write_text("\n".join(articles) + "\n", encoding="utf-8")


def prepare_small(folder: Path) -> Path:
    """Prepare the small text and return the directory."""
    small_text(folder / "articles.txt")
    out = folder / "text"
    config = PrepareConfig(
        sources=(str(folder / "articles.txt"),),
        out=out,
        tokenizer="wordpiece",
        vocab_size=80,
        validation=0.2,
        processes=1,
    )
    with forked_pools():
        prepare_text(config, progress=False)
    return out


def _run(directory: Path, validation_frequency: int = 6, validation_samples: int = 32) -> RunConfig:
    """Return a line for each step, and a checkpoint for every third."""
    return RunConfig(
        name="test",
        dir=directory,
        log_frequency=1,
        validation_frequency=validation_frequency,
        validation_samples=validation_samples,
        checkpoint_frequency=3,
    )


def small_config(text: Path, run_dir: Path, **changes: Any) -> AlbertConfig:
    """Return settings for 12 quick steps; ``changes`` are ``section={field: value}``."""
    config = AlbertConfig(
        model=AlbertModelConfig(
            vocab_size=96,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        ),
        data=DataConfig(path=text, max_seq_length=32, max_predictions_per_seq=5),
        train=TrainConfig(total_steps=12, global_batch_size=12, precision="fp32"),
        optim=OptimConfig(learning_rate=5e-3, warmup_steps=2),
        run=_run(run_dir),
    )
    return changed(config, changes)


def small_bert_config(text: Path, run_dir: Path, **changes: Any) -> BertConfig:
    """Return settings for 8 and 6 quick steps in two phases."""
    config = BertConfig(
        model=BertModelConfig(
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=48,
        ),
        data=BertDataConfig(path=text),
        phase1=PhaseConfig(
            total_steps=8,
            max_seq_length=24,
            max_predictions_per_seq=4,
            global_batch_size=12,
            learning_rate=5e-3,
            warmup_steps=2,
        ),
        phase2=PhaseConfig(
            total_steps=6,
            max_seq_length=48,
            max_predictions_per_seq=8,
            global_batch_size=6,
            learning_rate=2e-3,
            warmup_steps=1,
        ),
        train=BertTrainConfig(precision="fp32"),
        optim=PhasesOptimConfig(power=0.5, decay_from="start"),
        run=_run(run_dir),
    )
    return changed(config, changes)


def small_t5_config(text: Path, run_dir: Path, **changes: Any) -> T5Config:
    """Return settings for 6 quick steps."""
    config = T5Config(
        model=T5ModelConfig(
            vocab_size=192, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout=0.1
        ),
        data=T5DataConfig(path=text, input_length=24),
        train=TrainConfig(total_steps=6, global_batch_size=8, precision="fp32", micro_batch_size=2),
        optim=T5OptimConfig(learning_rate=0.1, hold_steps=4),
        run=_run(run_dir, validation_frequency=3, validation_samples=16),
    )
    return changed(config, changes)


def small_lm_config(text: Path, source: Path, run_dir: Path, **changes: Any) -> LmConfig:
    """Return settings for 12 quick steps of a causal model, a transformers directory or a config.json."""
    config = LmConfig(
        model=ModelConfig(source=source),
        data=LmDataConfig(path=text, block_length=32),
        train=TrainConfig(total_steps=12, global_batch_size=12, precision="fp32", micro_batch_size=2),
        optim=LmOptimConfig(learning_rate=5e-3, warmup_steps=2, beta2=0.95, eps=1e-8),
        run=_run(run_dir),
    )
    return changed(config, changes)


def changed(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    sections = {section: replace(getattr(config, section), **values) for section, values in changes.items()}
    return replace(config, **sections)  # type: ignore[type-var]


def start(config: AnyConfig, num_workers: int) -> list[BaseProcess]:
    """Start the workers of a job."""
    return job_workers.start(config, num_workers)


def wait(processes: list[BaseProcess], deadline_s: float = 240.0) -> list[int | None]:
    """Return the exit codes; kill what is still there at the deadline."""
    return wait_for(processes, deadline_s)


def kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def run(config: AnyConfig, num_workers: int = 2) -> list[int | None]:
    """Run a job to its end and return the workers' exit codes."""
    return wait(start(config, num_workers))


def copy_without_end(run_dir: Path, out: Path, *, scores: bool = True) -> Path:
    """Copy a finished run as a kill between its last checkpoint and its end would have left it.

    Without ``scores``: as one that a signal stopped at its last step, when it had more steps to do.
    """
    made_at_the_end = ("transformers", "model", "results.json", "scores.json")
    shutil.copytree(run_dir, out, ignore=shutil.ignore_patterns(*made_at_the_end))
    path = out / "record.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kinds = ["end"] if scores else ["end", "evaluation"]
    path.write_text("".join(line for line in lines if not any(f'"kind": "{kind}"' in line for kind in kinds)))
    return out


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step in the record."""
    return {row.step: row.loss for row in read_record(run_dir) if isinstance(row, Step)}


def wait_for_step(run_dir: Path, step: int, processes: list[BaseProcess], deadline_s: float = 60.0) -> None:
    """Return when the record has a line about ``step``, or the workers have ended."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and any(process.is_alive() for process in processes):
        if (run_dir / "record.jsonl").is_file() and max(losses(run_dir), default=0) >= step:
            return
        time.sleep(0.01)


def wait_for_checkpoint(run_dir: Path, step: int, processes: list[BaseProcess]) -> None:
    """Return when the checkpoint of ``step`` is complete, or the workers have ended."""
    path = run_dir / "checkpoints" / f"step-{step:08}"
    end = time.monotonic() + 60.0
    while time.monotonic() < end and any(process.is_alive() for process in processes) and not path.is_dir():
        time.sleep(0.005)
