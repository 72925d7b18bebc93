"""One worker of ``train_step``: a Trainer whose callback takes one of our steps after each of its own."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.albert import AlbertForPreTraining

from benchmarks.averaging import averaging_over
from benchmarks.train_step import GLOBAL_BATCH, SEQUENCE
from shoal.data.sources import ReaderSource
from shoal.data.text.examples import ExampleReader
from shoal.models.pretraining import PRETRAINING_INPUTS, AlbertPretraining, transformers_config
from shoal.models.text_config import AlbertModelConfig
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes.albert import AlbertConfig, DataConfig
from shoal.recipes.masked_lm import open_text
from shoal.recipes.prepared_text import write_synthetic_text
from shoal.train.config import RunConfig, TrainConfig, required
from shoal.train.optim_config import OptimConfig, schedule_of
from shoal.train.optimizers import build_optimizer
from shoal.train.run import Run, inner_run

WARM_UP_STEPS = 3
MODELS = {
    "tiny": AlbertModelConfig(
        vocab_size=8_192,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=128,
    ),
    "base": AlbertModelConfig(),
    "make train": AlbertModelConfig(
        vocab_size=2_048,
        embedding_size=128,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
    ),
}


def settings(preset: str, folder: Path, compiled: bool) -> AlbertConfig:
    return AlbertConfig(
        model=MODELS[preset],
        data=DataConfig(path=folder, max_seq_length=SEQUENCE[preset]),
        train=TrainConfig(
            total_steps=1_000, global_batch_size=GLOBAL_BATCH[preset], precision="fp32", compile=compiled
        ),
        optim=OptimConfig(optimizer="adamw", learning_rate=1e-4, warmup_steps=0),
        run=RunConfig(name="benchmark", dir=folder / "run", log_frequency=10**9, checkpoint_frequency=10**9),
    )


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """The Trainer's examples, ready in memory, labels over the whole sequence as it wants them."""

    def __init__(self, reader: ExampleReader, num_rows: int) -> None:
        batch = reader.batch(0, range(num_rows))
        self._rows = []
        for row in range(num_rows):
            labels = torch.full((batch["input_ids"].shape[1],), -100)
            real = batch["masked_weights"][row] > 0
            labels[batch["masked_positions"][row][real]] = torch.from_numpy(batch["masked_ids"][row][real])
            self._rows.append(
                {
                    "input_ids": batch["input_ids"][row],
                    "token_type_ids": batch["token_type_ids"][row],
                    "attention_mask": batch["attention_mask"][row],
                    "labels": labels,
                    "sentence_order_label": int(batch["labels"][row]),
                }
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


class ByTurns(TrainerCallback):  # type: ignore[misc]
    """Times the Trainer's step that has ended, then takes and times one of shoal's."""

    def __init__(self, run: Run, steps: Iterator[int]) -> None:
        self._run, self._steps = run, steps
        self.samples: dict[str, list[float]] = {"ours": [], "peer": []}
        self._begin_s = 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        end_s = time.perf_counter()
        if self._begin_s:
            self.samples["peer"].append(1e3 * (end_s - self._begin_s))
        self._run.world.barrier()
        begin_s = time.perf_counter()
        next(self._steps)
        self.samples["ours"].append(1e3 * (time.perf_counter() - begin_s))
        self._run.world.barrier()
        self._begin_s = time.perf_counter()


def our_steps(
    run: Run, config: AlbertConfig, reader: ExampleReader, group: dist.ProcessGroup | None = None
) -> Iterator[int]:
    """Do one step of the recipe after the other, and yield its number; gradients go over ``group``."""
    torch.manual_seed(run.seed)
    model = AlbertPretraining(config.model)
    with averaging_over(group or dist.group.WORLD):
        ddp = run.data_parallel(model)
    run.compile(model, dynamic=True)
    optimizer = build_optimizer(model.named_parameters(), config.optim)
    schedule = schedule_of(config.optim, config.optim, config.train.total_steps)
    run.keep(model=model, optimizer=optimizer)
    steps = run.steps(
        ReaderSource(reader=reader),
        config.train,
        until=config.train.total_steps,
        targets=lambda batch: len(batch["masked_ids"]),
    )
    for step in steps:
        with step:
            set_learning_rate(optimizer, learning_rate(schedule, step.number - 1))
            for batch in step:
                mlm_loss, mlm_correct, sop_loss, sop_correct = ddp(
                    **{name: batch[name] for name in PRETRAINING_INPUTS}
                )
                step.backward(mlm_loss / step.num_targets + sop_loss / step.num_samples)
                step.add(step.num_targets, mlm_loss=mlm_loss, mlm_accuracy=mlm_correct)
                step.add(step.num_samples, sop_loss=sop_loss, sop_accuracy=sop_correct)
            step.update(optimizer, max_norm=config.optim.max_grad_norm)
        yield step.number


@contextmanager
def opened(config: AlbertConfig) -> Iterator[tuple[Run, ExampleReader]]:
    """Open a run of the recipe and its training examples."""
    with Run.open(required(config.run.dir), config=config, recipe="albert") as run:
        reader, _ = open_text(config, config.data, pairs="order")
        yield run, reader


def measure(
    run: Run, config: AlbertConfig, reader: ExampleReader, num_steps: int, compiled: bool
) -> dict[str, list[float]]:
    world = run.world
    turns = ByTurns(run, our_steps(run, config, reader))
    model = AlbertForPreTraining(transformers_config(config.model))
    batch_size = GLOBAL_BATCH["tiny" if config.model.hidden_size == 128 else "base"] // world.num_workers
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(config.run.dir) + "-trainer",
            per_device_train_batch_size=batch_size,
            max_steps=num_steps + WARM_UP_STEPS + 1,
            learning_rate=1e-4,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            use_cpu=True,
            ddp_backend="gloo" if world.num_workers > 1 else None,
            torch_compile=compiled,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Rows(reader, batch_size * world.num_workers * 4),
        callbacks=[turns],
    )
    trainer.train()
    return {side: times[WARM_UP_STEPS:][:num_steps] for side, times in turns.samples.items()}


def over_both(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Return the milliseconds of each step over shoal, over gloo and without an exchange.

    A step ends when all workers have ended it, so that those without an exchange wait for each other too.
    The spec is that of :func:`main`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_synthetic_text(folder, MODELS[spec["preset"]].vocab_size)
        config = settings(spec["preset"], folder, spec["compiled"])
        samples: dict[str, list[float]] = {"ours": [], "peer": [], "alone": []}
        with opened(config) as (run, reader):
            assert run.world.backend == "shoal", run.world.backend_reason
            alone = [dist.new_group([rank], backend="gloo") for rank in range(run.world.num_workers)]
            own = alone[run.world.rank]
            assert isinstance(own, dist.ProcessGroup)
            groups = {"ours": None, "peer": run.world.control, "alone": own}
            sides = {
                side: our_steps(inner_run(run, config), config, reader, group)
                for side, group in groups.items()
            }
            for _ in range(WARM_UP_STEPS + spec["num_steps"]):
                for side, steps in sides.items():
                    run.world.barrier()
                    begin_s = time.perf_counter()
                    next(steps)
                    run.world.barrier()
                    samples[side].append(1e3 * (time.perf_counter() - begin_s))
        return {side: times[WARM_UP_STEPS:] for side, times in samples.items()}


def main(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Return both sides' milliseconds of each step.

    The spec: ``{"preset": "tiny", "num_steps": 20, "compiled": false}``.
    """
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_synthetic_text(folder, MODELS[spec["preset"]].vocab_size)
        config = settings(spec["preset"], folder, spec["compiled"])
        with opened(config) as (run, reader):
            return measure(run, config, reader, spec["num_steps"], spec["compiled"])
