"""Measures recipes for ``shoal bench train``: runs the script on synthetic data and reads its record."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench.step_timing import TrainBench, TrainResult
from shoal.data.text.span_config import MAX_SENTINELS
from shoal.env import WorkerEnv
from shoal.errors import EXIT_OK
from shoal.recipes.albert import AlbertConfig
from shoal.recipes.bert import BertConfig
from shoal.recipes.mask_rcnn import MaskRCNNTrainConfig
from shoal.recipes.resnet50 import ResNetTrainConfig
from shoal.recipes.t5 import T5Config
from shoal.record import Start, Step, read_record

if TYPE_CHECKING:
    import torch

TextConfig = AlbertConfig | BertConfig | T5Config
Config = TextConfig | ResNetTrainConfig | MaskRCNNTrainConfig
_NUM_DOCUMENTS = 200
_SENTENCES, _TOKENS = 60, 20
"""Per document: 1,200 tokens, so that all sequences have full length."""
_SPECIAL_IDS = 5

_MICRO_BATCH = 64
"""Images per worker and micro-batch if neither the command nor the preset sets them."""
_NUM_CLASSES = 1000
"""ImageNet's, which determines the size of the last layer."""
_NUM_IMAGES = 64
"""Minimum number of synthetic images."""
_LARGER = 8 / 7
"""Ratio of the sides of an image and of its crop: 256 to 224."""

_NUM_SCENES = 32
"""Minimum number of made scenes with objects."""
_SCENE_SIDE = 640
"""Their longer side in pixels, as of most images of COCO; each is resized as the recipe says."""

_MATMUL_SIDE = {"cpu": 1024, "cuda": 8192}
_MATMUL_S = 0.3


def measure(config: Config, worker: WorkerEnv, what: TrainBench, *, name: str) -> int:
    """Run the recipe's script on synthetic data; the main worker prints and writes the result."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as made:
        script = make_script(config, Path(made), what, num_workers=worker.place.num_workers)
        script.main(script.config, worker)
        if worker.place.is_main:
            result = read_result(script, what, name)
            print("\n".join(result.lines()))
            if what.json:
                result.write(what.json)
                print(f"\n{what.json}")
    return EXIT_OK


def prepared(config: TextConfig, folder: Path, what: TrainBench, *, num_workers: int) -> TextConfig:
    """Return the settings of a run over synthetic text with sequences of full length."""
    data: Any = replace(config.data, path=folder)
    if not isinstance(config, T5Config):
        data = replace(data, short_seq_prob=0.0)
    section, sizes = _sizes(config)
    micro = what.batch or sizes.micro_batch_size or min(64, sizes.global_batch_size)
    sizes = replace(
        sizes,
        micro_batch_size=micro,
        global_batch_size=micro * what.accumulate * num_workers,
        total_steps=what.warm_up + what.steps,
    )
    run = replace(
        config.run, name="bench", dir=folder / "run", log_frequency=1, save=False, validation_samples=micro
    )
    changed: dict[str, Any] = {}
    if isinstance(config, BertConfig):
        sizes = replace(sizes, warmup_steps=0)
    elif isinstance(config, AlbertConfig):
        changed["optim"] = replace(config.optim, warmup_steps=0)
    return replace(config, data=data, run=run, **{section: sizes}, **changed)


def _sizes(config: TextConfig) -> tuple[str, Any]:
    """Return name and settings of the section with the batch; of BERT the phase that runs."""
    if isinstance(config, BertConfig):
        return "phase1", config.phase1
    return "train", config.train


def write_text(folder: Path, vocab_size: int) -> None:
    """Write shards of random tokens, in the format of ``shoal prepare text``."""
    from shoal.atomic_io import sha256_of
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


def prepared_images(
    config: ResNetTrainConfig, folder: Path, what: TrainBench, *, num_workers: int
) -> ResNetTrainConfig:
    """Return the settings of a run over synthetic images: the timed steps, then a small evaluation."""
    micro = what.batch or config.train.micro_batch_size or _MICRO_BATCH
    batch = micro * what.accumulate * num_workers
    num_images = max(_NUM_IMAGES, batch)
    return replace(
        config,
        data=replace(
            config.data, path=None, made_images=num_images, made_size=round(_LARGER * config.augment.size)
        ),
        model=replace(config.model, num_classes=config.model.num_classes or _NUM_CLASSES),
        train=replace(
            config.train,
            micro_batch_size=micro,
            global_batch_size=batch,
            total_epochs=(what.warm_up + what.steps) * batch / num_images,
            norm_images=0,
        ),
        optim=replace(config.optim, warmup_epochs=0.0),
        validation=replace(config.validation, every_epochs=0, size=32, resize=32),
        run=replace(config.run, name="bench", dir=folder / "run", log_frequency=1, save=False),
    )


def prepared_detection(
    config: MaskRCNNTrainConfig, folder: Path, what: TrainBench, *, num_workers: int
) -> MaskRCNNTrainConfig:
    """Return the settings of a run over made scenes, all resized alike, then a small evaluation."""
    micro = what.batch or config.train.micro_batch_size
    batch = micro * what.accumulate * num_workers
    shorter = max(config.augment.shorter)
    return replace(
        config,
        data=replace(config.data, path=None, made_images=max(_NUM_SCENES, batch), made_size=_SCENE_SIDE),
        augment=replace(config.augment, shorter=(shorter,), scales=None),
        model=replace(config.model, weights=None),
        train=replace(
            config.train,
            micro_batch_size=micro,
            global_batch_size=batch,
            total_steps=what.warm_up + what.steps,
        ),
        optim=replace(config.optim, warmup_steps=0, milestones=()),
        validation=replace(config.validation, shorter=64, longer=64),
        run=replace(
            config.run, name="bench", dir=folder / "run", log_frequency=1, save=False, validation_frequency=0
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Script:
    """A recipe's script, and one micro-batch of its model to count FLOPs with."""

    main: Callable[[Any, WorkerEnv], int]
    config: Any
    sequence_length: int
    make_model: Callable[[], Any]
    batch: Callable[[], dict[str, Any]]
    """Returns the model's inputs."""
    loss: Callable[[Any, dict[str, Any]], Any]
    """Maps the model and its inputs to a scalar."""


def make_script(config: Config, folder: Path, what: TrainBench, *, num_workers: int) -> Script:
    """Return the script that trains on synthetic data in ``folder``."""
    import torch

    from shoal.data.coco.synthetic import NUM_CATEGORIES
    from shoal.data.loader import held_out_batches
    from shoal.models.detection.mask_rcnn import MaskRCNN, largest_step
    from shoal.models.pretraining import PRETRAINING_INPUTS, AlbertPretraining, BertPretraining
    from shoal.models.resnet import new_resnet
    from shoal.models.t5 import MODEL_INPUTS, new_t5
    from shoal.recipes import albert, bert, mask_rcnn, masked_lm, resnet50, t5

    if isinstance(config, ResNetTrainConfig):
        images = prepared_images(config, folder, what, num_workers=num_workers)
        size = images.augment.size
        return Script(
            main=resnet50.main,
            config=images,
            sequence_length=1,
            make_model=lambda: new_resnet(images.model, images.model.num_classes or _NUM_CLASSES),
            batch=lambda: {"images": torch.empty(2, 3, size, size)},
            loss=lambda model, inputs: model(**inputs).sum(),
        )
    if isinstance(config, MaskRCNNTrainConfig):
        scenes = prepared_detection(config, folder, what, num_workers=num_workers)
        return Script(
            main=mask_rcnn.main,
            config=scenes,
            sequence_length=1,
            make_model=lambda: MaskRCNN(scenes.model, NUM_CATEGORIES),
            batch=lambda: {"images": torch.empty(2, 3, *scenes.augment.largest_batch)},
            loss=lambda model, inputs: largest_step(model, inputs["images"]),
        )
    text: Any = prepared(config, folder, what, num_workers=num_workers)

    def batch_of(reader: Any, names: tuple[str, ...]) -> dict[str, Any]:
        batch = next(held_out_batches(reader, micro_batch_size=_sizes(text)[1].micro_batch_size))
        return {name: batch[name] for name in names}

    if isinstance(config, T5Config):
        write_text(folder, config.model.vocab_size - MAX_SENTINELS)
        return Script(
            main=t5.main,
            config=text,
            sequence_length=config.data.input_length,
            make_model=lambda: new_t5(config.model, pad_id=0, end_id=3),
            batch=lambda: batch_of(t5.open_text(text, verify=False)[0], MODEL_INPUTS),
            loss=lambda model, inputs: model(**inputs).loss,
        )
    write_text(folder, config.model.vocab_size)
    two = isinstance(config, BertConfig)
    sizes = text.phase1 if two else text.data
    reader = partial(masked_lm.open_text, text, sizes, pairs="next" if two else "order", verify=False)
    make: Any = BertPretraining if two else AlbertPretraining
    return Script(
        main=bert.main if two else albert.main,
        config=text,
        sequence_length=sizes.max_seq_length,
        make_model=lambda: make(config.model),
        batch=lambda: batch_of(reader()[0], PRETRAINING_INPUTS),
        loss=lambda model, inputs: (lambda sums: sums[0] + sums[2])(model(**inputs)),
    )


def read_result(script: Script, what: TrainBench, name: str) -> TrainResult:
    """Return the times of the steps after the warm-up from the record of the run."""
    import torch

    rows = read_record(script.config.run.dir)
    start = next(row for row in rows if isinstance(row, Start))
    timed = [row for row in rows if isinstance(row, Step)][what.warm_up :]
    device = torch.device("cpu" if start.device.startswith("CPU") else "cuda")
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
        unit=start.unit,
        samples_s=tuple(row.step_s for row in timed),
        parts_s={part: sum(row.parts_s[part] for row in timed) / len(timed) for part in timed[0].parts_s},
        peak_memory_bytes=timed[-1].peak_memory_bytes,
        flops_per_sample=count_flops(script),
        matmul_flops_per_s=matmul_flops_per_s(device, dtype),
    )


def count_flops(script: Script) -> float:
    """Return the FLOPs of forward and backward of one sample, counted on the meta device."""
    import torch

    from shoal.data.loader import to_device
    from shoal.models.profile import profile_step

    inputs = to_device(script.batch(), torch.device("meta"))
    num_samples = len(inputs["labels"] if "labels" in inputs else inputs["images"])
    with torch.device("meta"):
        model = script.make_model()
    profile = profile_step(model.train(), lambda: script.loss(model, inputs), num_samples=num_samples)
    return 3 * sum(flops for _, _, flops in profile.layers) / num_samples


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest large square product within some tenths of a second."""
    import torch

    side = _MATMUL_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def product_s() -> float:
        begin_s = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin_s

    best, begin_s = product_s(), time.perf_counter()
    while time.perf_counter() - begin_s < _MATMUL_S:
        best = min(best, product_s())
    return 2 * side**3 / best
