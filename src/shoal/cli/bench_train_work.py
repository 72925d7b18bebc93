"""Measures recipes for ``shoal bench train``: runs the script on made data and reads its record."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench.step_timing import TrainBench, TrainResult
from shoal.data.text.span_config import MAX_SENTINELS
from shoal.env import WorkerEnv
from shoal.errors import EXIT_OK
from shoal.recipes.albert import AlbertConfig
from shoal.recipes.bert import BertConfig
from shoal.recipes.resnet.config import ResNetTrainConfig
from shoal.recipes.t5 import T5Config

if TYPE_CHECKING:
    from shoal.train.world import World

TextConfig = AlbertConfig | BertConfig | T5Config
Config = TextConfig | ResNetTrainConfig
_NUM_DOCUMENTS = 200
_SENTENCES, _TOKENS = 60, 20
"""Of a document: 1,200 tokens, so that sequences are whole."""
_SPECIAL_IDS = 5


def measure(config: Config, place: WorkerEnv, what: TrainBench, *, name: str) -> int:
    """Run the steps; the main worker prints and writes what it measured. Returns the exit code."""
    from shoal.train.world import join_world

    if not isinstance(config, ResNetTrainConfig):
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
        result = _result(config, Path(folder), world, what)
        if world.is_main:
            _report(result, what)
    return EXIT_OK


def _report(result: TrainResult, what: TrainBench) -> None:
    print("\n".join(result.lines()))
    if what.json:
        result.write(what.json)
        print(f"\n{what.json}")


def _result(config: ResNetTrainConfig, folder: Path, world: World, what: TrainBench) -> TrainResult:
    from shoal.cli import bench_train_images
    from shoal.train.config import required
    from shoal.train.health import memory_advice

    images = bench_train_images.prepared(config, folder, what, num_workers=world.num_workers)
    with memory_advice(
        required(images.train.micro_batch_size), unit="images", remedy="--train.precision bf16"
    ):
        return bench_train_images.measure_images(images, world, what)


def prepared(config: TextConfig, folder: Path, what: TrainBench, *, num_workers: int) -> TextConfig:
    """Return the settings of a run over made text in which every sequence is whole."""
    data: Any = replace(config.data, path=folder)
    if not isinstance(config, T5Config):
        data = replace(data, short_seq_prob=0.0)
    section, sizes = _sizes(config)
    micro = what.batch or sizes.micro_batch_size or min(64, sizes.global_batch_size)
    batch = micro * what.accumulate * num_workers
    sizes = replace(sizes, micro_batch_size=micro, global_batch_size=batch)
    run = replace(
        config.run, name="bench", dir=folder / "run", log_frequency=1, save=False, validation_samples=micro
    )
    sizes = replace(sizes, total_steps=what.warm_up + what.steps)
    changed: dict[str, Any] = {}
    if isinstance(config, BertConfig):
        sizes = replace(sizes, warmup_steps=0)
    elif isinstance(config, AlbertConfig):
        changed["optim"] = replace(config.optim, warmup_steps=0)
    return replace(config, data=data, run=run, **{section: sizes}, **changed)


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


@dataclass(frozen=True, kw_only=True)
class _Script:
    """A recipe's script, and one micro-batch of its model to count FLOPs with."""

    main: Callable[[Any, WorkerEnv], int]
    sequence_length: int
    reader: Callable[[], Any]
    make_model: Callable[[], Any]
    inputs: tuple[str, ...]
    loss: Callable[[Any], Any]
    """Takes what the model returns."""


def _script(config: TextConfig) -> _Script:
    from shoal.models.pretraining import PRETRAINING_INPUTS, AlbertPretraining, BertPretraining
    from shoal.models.t5 import new_t5
    from shoal.recipes import albert, bert, masked_lm, t5

    if isinstance(config, T5Config):
        return _Script(
            main=t5.main,
            sequence_length=config.data.input_length,
            reader=lambda: t5.open_text(config, verify=False)[0],
            make_model=lambda: new_t5(config.model, pad_id=0, end_id=3),
            inputs=t5.MODEL_INPUTS,
            loss=lambda output: output.loss,
        )
    sizes: Any = config.phase1 if isinstance(config, BertConfig) else config.data
    return _Script(
        main=bert.main if isinstance(config, BertConfig) else albert.main,
        sequence_length=sizes.max_seq_length,
        reader=lambda: masked_lm.open_text(
            config,
            pairs="next" if isinstance(config, BertConfig) else "order",
            max_seq_length=sizes.max_seq_length,
            max_predictions_per_seq=sizes.max_predictions_per_seq,
            verify=False,
        )[0],
        make_model=lambda: (
            BertPretraining(config.model)
            if isinstance(config, BertConfig)
            else AlbertPretraining(config.model)
        ),
        inputs=PRETRAINING_INPUTS,
        loss=lambda sums: sums[0] + sums[2],
    )


def _measure_script(
    config: TextConfig, worker: WorkerEnv, folder: Path, what: TrainBench, name: str
) -> TrainResult | None:
    """Run the recipe's script on made text and read its record; workers but the main one return ``None``."""
    import torch

    from shoal.cli.bench_train_clock import matmul_flops_per_s
    from shoal.data.loader import held_out_batches
    from shoal.record import Start, Step, read_record
    from shoal.train.config import required

    sentinels = MAX_SENTINELS if isinstance(config, T5Config) else 0
    write_text(folder, config.model.vocab_size - sentinels)
    script = _script(config)
    script.main(config, worker)
    if not worker.place.is_main:
        return None
    rows = read_record(required(config.run.dir))
    start = next(row for row in rows if isinstance(row, Start))
    timed = [row for row in rows if isinstance(row, Step)][what.warm_up :]
    batch = next(held_out_batches(script.reader(), micro_batch_size=start.micro_batch_size))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[start.precision]
    return TrainResult(
        recipe=name,
        sequence_length=script.sequence_length,
        num_parameters=start.num_parameters,
        device=start.device,
        num_devices=start.num_workers,
        precision=start.precision,
        global_batch=start.global_batch_size,
        micro_batch=start.micro_batch_size,
        samples_s=tuple(row.step_s for row in timed),
        parts_s={part: sum(row.parts_s[part] for row in timed) / len(timed) for part in timed[0].parts_s},
        peak_memory_bytes=timed[-1].peak_memory_bytes,
        flops_per_sample=_flops(script.make_model, {key: batch[key] for key in script.inputs}, script.loss),
        matmul_flops_per_s=matmul_flops_per_s(
            torch.device("cpu" if start.device.startswith("CPU") else "cuda"), dtype
        ),
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
