"""A worker of ``shoal bench train``: made data, the recipe's own job and steps, a clock."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench.step_timing import TrainBench, TrainResult
from shoal.cli.bench_train_clock import result_of, timed
from shoal.data.text.span_config import MAX_SENTINELS
from shoal.env import WorkerEnv
from shoal.errors import EXIT_OK
from shoal.recipes.albert.config import AlbertPretrainConfig
from shoal.recipes.bert.config import BertPretrainConfig
from shoal.recipes.resnet.config import ResNetTrainConfig
from shoal.recipes.t5.config import T5PretrainConfig

if TYPE_CHECKING:
    from shoal.train.world import World

TextConfig = AlbertPretrainConfig | BertPretrainConfig | T5PretrainConfig
Config = TextConfig | ResNetTrainConfig
_NUM_DOCUMENTS = 200
_SENTENCES, _TOKENS = 60, 20
"""Of a document: 1,200 tokens, so that sequences are whole."""
_SPECIAL_IDS = 5


def measure(config: Config, place: WorkerEnv, what: TrainBench, *, name: str) -> int:
    """Run the steps; the main worker prints and writes what it measured. Returns the exit code."""
    from shoal.train.world import join_world

    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        join_world(place, config.distributed) as world,
    ):
        result = _result(config, Path(folder), world, what, name)
        if world.is_main:
            print("\n".join(result.lines()))
            if what.json:
                result.write(what.json)
                print(f"\n{what.json}")
    return EXIT_OK


def _result(config: Config, folder: Path, world: World, what: TrainBench, name: str) -> TrainResult:
    from shoal.cli import bench_train_images
    from shoal.train.config import required
    from shoal.train.health import memory_advice

    if isinstance(config, ResNetTrainConfig):
        images = bench_train_images.prepared(config, folder, what, num_workers=world.num_workers)
        with memory_advice(
            required(images.train.micro_batch_size), unit="images", remedy="--train.precision bf16"
        ):
            return bench_train_images.measure_images(images, world, what)
    text = prepared(config, folder, what, num_workers=world.num_workers)
    with memory_advice(_sizes(text)[1].micro_batch_size):
        if isinstance(text, T5PretrainConfig):
            write_text(folder, text.model.vocab_size - MAX_SENTINELS)
            return _measure_t5(text, world, what, name)
        write_text(folder, text.model.vocab_size)
        return _measure_masked_lm(text, world, what, name)


def prepared(config: TextConfig, folder: Path, what: TrainBench, *, num_workers: int) -> TextConfig:
    """Return the settings of a run over made text in which every sequence is whole."""
    data: Any = replace(config.data, path=folder)
    if not isinstance(config, T5PretrainConfig):
        data = replace(data, short_seq_prob=0.0)
    section, sizes = _sizes(config)
    micro = what.batch or sizes.micro_batch_size or min(64, sizes.global_batch_size)
    batch = micro * what.accumulate * num_workers
    sizes = replace(sizes, micro_batch_size=micro, global_batch_size=batch)
    run = replace(config.run, name="bench", dir=folder / "run")
    changed: Any = {section: sizes}
    return replace(config, data=data, run=run, **changed)


def _sizes(config: TextConfig) -> tuple[str, Any]:
    """Return name and settings of the section that has the batch; of BERT the one phase that runs."""
    if isinstance(config, BertPretrainConfig):
        return "phase1", config.phase1
    return "train", config.train


def write_text(folder: Path, vocab_size: int) -> None:
    """Write documents of random tokens, as ``shoal prepare text`` would write prepared ones."""
    from shoal.data.atomic_io import sha256_of
    from shoal.data.manifest import Manifest, ShardInfo, TokenizerInfo
    from shoal.data.text.shards import ShardWriter

    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text("{}", encoding="utf-8")
    draw = random.Random(1)
    splits: dict[str, tuple[ShardInfo, ...]] = {}
    for split, num_documents in (("train", _NUM_DOCUMENTS), ("validation", 5)):
        writer = ShardWriter(folder, f"{split}-00000", vocab_size)
        for _ in range(num_documents):
            sentence = [draw.randrange(_SPECIAL_IDS, vocab_size) for _ in range(_TOKENS)]
            writer.add_document([sentence] * _SENTENCES)
        splits[split] = (writer.finish(),)
    Manifest(
        vocab_size=vocab_size,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        pad_id=0,
        unk_id=1,
        continues_word=bytes(vocab_size),
        tokenizer=TokenizerInfo(file=tokenizer.name, sha256=sha256_of(tokenizer), kind="wordpiece"),
        source="random tokens",
        splits=splits,
    ).save(folder)


def _measure_masked_lm(config: Any, world: World, what: TrainBench, name: str) -> TrainResult:
    from shoal.models.pretraining import PRETRAINING_INPUTS, AlbertPretraining, BertPretraining
    from shoal.recipes.masked_lm.job import build
    from shoal.recipes.masked_lm.losses import NUM_SUMS
    from shoal.recipes.masked_lm.model import make_model
    from shoal.recipes.masked_lm.step import agree, batches_after, take_step, warm_up
    from shoal.train.signals import StopRequest
    from shoal.train.window import Meter

    kind: Any = AlbertPretraining if config.recipe == "albert" else BertPretraining
    job = build(config, world, make_model(config, world, kind))
    warm_up(job)
    meter, stop = Meter.of(config.train, NUM_SUMS), StopRequest()
    seen: list[dict[str, Any]] = []

    def steps() -> Iterator[None]:
        with batches_after(job, 0) as batches:
            for step, micro_batches in batches:
                num_masked, _ = agree(job, meter, step, micro_batches, stop)
                take_step(job, meter, step, micro_batches, num_masked)
                seen[:] = [{name: micro_batches[0][name] for name in PRETRAINING_INPUTS}]
                yield

    samples_s, parts_s = timed(steps(), job.clock, what)
    return result_of(
        world,
        name=name,
        num_parameters=config.num_parameters,
        global_batch=_sizes(config)[1].global_batch_size,
        micro_batch=_sizes(config)[1].micro_batch_size,
        sequence_length=job.phase.max_seq_length,
        precision=job.precision.name,
        samples_s=samples_s,
        parts_s=parts_s,
        flops=_flops(lambda: kind(config.model), seen[0], lambda out: out[0] + out[2]),
    )


def _measure_t5(config: T5PretrainConfig, world: World, what: TrainBench, name: str) -> TrainResult:
    from contextlib import closing

    from shoal.models.t5 import new_t5
    from shoal.recipes.t5.job import MODEL_INPUTS, build
    from shoal.recipes.t5.pretrain import batches_after, take_step
    from shoal.train.window import StepWindow

    job = build(config, world)
    window = StepWindow(1)
    seen: list[dict[str, Any]] = []
    micro = job.batch.micro_batch_size

    def steps() -> Iterator[None]:
        with closing(batches_after(job, 0)) as batches:
            for step, batch in enumerate(batches, start=1):
                job.clock.mark("data")
                take_step(job, step, batch, window)
                seen[:] = [{name: batch[name][:micro] for name in MODEL_INPUTS}]
                yield

    try:
        samples_s, parts_s = timed(steps(), job.clock, what)
    finally:
        job.stage.close()
    return result_of(
        world,
        name=name,
        num_parameters=config.num_parameters,
        global_batch=_sizes(config)[1].global_batch_size,
        micro_batch=_sizes(config)[1].micro_batch_size,
        sequence_length=config.data.input_length,
        precision=job.precision.name,
        samples_s=samples_s,
        parts_s=parts_s,
        flops=_flops(lambda: new_t5(config.model, pad_id=0, end_id=3), seen[0], lambda out: out.loss),
    )


def _flops(make: Any, batch: dict[str, Any], loss: Any) -> float:
    """Return the FLOPs of forward and backward of one sequence of ``batch``, counted on the meta device."""
    import torch

    from shoal.data.loader import to_device
    from shoal.models.profile import profile_step

    num_samples = len(batch["labels"])
    with torch.device("meta"):
        model = make()
    inputs = to_device(batch, torch.device("meta"))
    profile = profile_step(model.train(), lambda: loss(model(**inputs)), num_samples=num_samples)
    return 3 * sum(flops for _, _, flops in profile.layers) / num_samples
