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
from shoal.recipes.albert import AlbertConfig
from shoal.recipes.bert import BertConfig
from shoal.recipes.resnet.config import ResNetTrainConfig
from shoal.recipes.t5.config import T5PretrainConfig

if TYPE_CHECKING:
    from shoal.train.world import World

TextConfig = AlbertConfig | BertConfig | T5PretrainConfig
Config = TextConfig | ResNetTrainConfig
_NUM_DOCUMENTS = 200
_SENTENCES, _TOKENS = 60, 20
"""Of a document: 1,200 tokens, so that sequences are whole."""
_SPECIAL_IDS = 5


def measure(config: Config, place: WorkerEnv, what: TrainBench, *, name: str) -> int:
    """Run the steps; the main worker prints and writes what it measured. Returns the exit code."""
    from shoal.train.world import join_world

    if isinstance(config, AlbertConfig | BertConfig):
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as made:
            text: Any = prepared(config, Path(made), what, num_workers=place.place.num_workers)
            found = _measure_script(text, place, Path(made), what, name)
            if found is not None:
                _report(found, what)
        return EXIT_OK
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        join_world(place, config.distributed) as world,
    ):
        result = _result(config, Path(folder), world, what, name)
        if world.is_main:
            _report(result, what)
    return EXIT_OK


def _report(result: TrainResult, what: TrainBench) -> None:
    print("\n".join(result.lines()))
    if what.json:
        result.write(what.json)
        print(f"\n{what.json}")


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
        assert isinstance(text, T5PretrainConfig)
        write_text(folder, text.model.vocab_size - MAX_SENTINELS)
        return _measure_t5(text, world, what, name)


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
    if not isinstance(config, T5PretrainConfig):
        steps = what.warm_up + what.steps
        changed[section] = replace(
            sizes, total_steps=steps, **({"warmup_steps": 0} if section == "phase1" else {})
        )
        if section == "train":
            optim: Any = config.optim
            changed["optim"] = replace(optim, warmup_steps=0)
        run = replace(run, log_frequency=1, save=False, validation_samples=micro)
    return replace(config, data=data, run=run, **changed)


def _sizes(config: TextConfig) -> tuple[str, Any]:
    """Return name and settings of the section that has the batch; of BERT the one phase that runs."""
    if isinstance(config, BertConfig):
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


def _measure_script(
    config: AlbertConfig | BertConfig, worker: WorkerEnv, folder: Path, what: TrainBench, name: str
) -> TrainResult | None:
    """Run the recipe's script on made text and read its record; workers but the main one return ``None``."""
    import torch

    from shoal.cli.bench_train_clock import matmul_flops_per_s
    from shoal.data.loader import held_out_batches
    from shoal.models.pretraining import PRETRAINING_INPUTS, AlbertPretraining, BertPretraining
    from shoal.recipes import albert, bert, masked_lm
    from shoal.record import Start, Step, read_record
    from shoal.train.config import required

    write_text(folder, config.model.vocab_size)
    if isinstance(config, BertConfig):
        bert.main(config, worker)
        sizes, pairs = config.phase1, "next"
    else:
        albert.main(config, worker)
        sizes, pairs = config.data, "order"  # type: ignore[assignment]
    if not worker.place.is_main:
        return None
    rows = read_record(required(config.run.dir))
    start = next(row for row in rows if isinstance(row, Start))
    timed = [row for row in rows if isinstance(row, Step)][what.warm_up :]
    reader, _ = masked_lm.open_text(
        config,
        pairs=pairs,  # type: ignore[arg-type]
        max_seq_length=sizes.max_seq_length,
        max_predictions_per_seq=sizes.max_predictions_per_seq,
        verify=False,
    )
    batch = next(held_out_batches(reader, micro_batch_size=start.micro_batch_size))
    kind: Any = BertPretraining if isinstance(config, BertConfig) else AlbertPretraining
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[start.precision]
    return TrainResult(
        recipe=name,
        sequence_length=sizes.max_seq_length,
        num_parameters=start.num_parameters,
        device=start.device,
        num_devices=start.num_workers,
        precision=start.precision,
        global_batch=start.global_batch_size,
        micro_batch=start.micro_batch_size,
        samples_s=tuple(row.step_s for row in timed),
        parts_s={part: sum(row.parts_s[part] for row in timed) / len(timed) for part in timed[0].parts_s},
        peak_memory_bytes=timed[-1].peak_memory_bytes,
        flops_per_sample=_flops(
            lambda: kind(config.model),
            {key: batch[key] for key in PRETRAINING_INPUTS},
            lambda out: out[0] + out[2],
        ),
        matmul_flops_per_s=matmul_flops_per_s(
            torch.device("cpu" if start.device.startswith("CPU") else "cuda"), dtype
        ),
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
