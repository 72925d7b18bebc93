"""Measures recipes for ``shoal bench train``: runs the script for some steps and reads its record."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench.step_timing import TrainBench, TrainResult
from shoal.cli import bench_train_settings as made
from shoal.cli.bench_train_settings import Config
from shoal.data.text.span_config import MAX_SENTINELS
from shoal.decide.batch import known_size
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK
from shoal.planner.hardware import peak_flops_per_s
from shoal.recipes import finetuning
from shoal.recipes.bert import BertConfig
from shoal.recipes.classify import ClassifyConfig
from shoal.recipes.finetuning import FinetuneConfig
from shoal.recipes.mask_rcnn_config import MaskRCNNTrainConfig
from shoal.recipes.resnet50_config import ResNetTrainConfig
from shoal.recipes.squad import SquadConfig
from shoal.recipes.t5 import T5Config
from shoal.recipes.t5_classify import T5ClassifyConfig
from shoal.record import Start, Step, read_record
from shoal.train.config import required

if TYPE_CHECKING:
    import torch

    from shoal.data.text.sequences import Sequences

_MATMUL_SIDE = {"cpu": 1024, "cuda": 8192}
_MATMUL_S = 0.3
TRACED_STEPS = 3
"""The first settles the profiler."""
MOST_KERNELS = 40


def measure(config: Config, worker: WorkerEnv, what: TrainBench, *, name: str) -> int:
    """Run the recipe's script; the main worker prints and writes the result.

    Args:
        name: of recipe and model, such as ``bert-large`` or ``squad-bert-large``.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        more = replace(what, steps=what.steps + (TRACED_STEPS if what.trace else 0))
        script = make_script(config, Path(folder), more, num_workers=worker.place.num_workers, name=name)
        script = replace(script, config=with_few_lines(script.config, what))
        with traced(what, is_main=worker.place.is_main):
            script.main(script.config, worker)
        if worker.place.is_main:
            result = read_result(script, what, name)
            print("\n".join(result.lines()))
            if what.json:
                result.write(what.json)
                print(f"\n{what.json}")
    return EXIT_OK


@contextmanager
def traced(what: TrainBench, *, is_main: bool) -> Iterator[None]:
    """Write a trace of the main worker's last steps, after the timed ones, and print their time by kernel.

    Steps are counted by those of the first optimizer.
    """
    if what.trace is None or not is_main:
        yield
        return
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    file, before = what.trace, what.warm_up + what.steps
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=before - 1, warmup=1, active=TRACED_STEPS - 1, repeat=1),
        on_trace_ready=lambda done: _write_trace(done, file),
    )
    first: list[Any] = []

    def count(optimizer: Any, *_: object) -> None:
        first.append(optimizer)
        del first[1:]
        if optimizer is first[0]:
            profiler.step()

    handle = register_optimizer_step_post_hook(count)
    try:
        with profiler:
            yield
    finally:
        handle.remove()


def _write_trace(profiler: Any, file: Path) -> None:
    profiler.export_chrome_trace(str(file))
    events = profiler.key_averages()
    device = sum(event.self_device_time_total for event in events)
    name = "self_device_time_total" if device else "self_cpu_time_total"
    print(events.table(sort_by=name, row_limit=MOST_KERNELS, max_name_column_width=90), flush=True)


def with_few_lines(config: Any, what: TrainBench) -> Any:
    """Return the settings with a line of the record for several steps on a GPU: each line waits for it."""
    import torch

    if config.distributed.device == "cpu" or not torch.cuda.is_available():
        return config
    return replace(config, run=replace(config.run, log_frequency=math.gcd(what.warm_up, what.steps)))


@dataclass(frozen=True, kw_only=True)
class Script:
    """Holds a recipe's script, and one micro-batch of its model to count FLOPs with."""

    main: Callable[[Any, WorkerEnv], int]
    config: Any
    sequence_length: int
    make_model: Callable[[], Any]
    batch: Callable[[], dict[str, Any]]
    """Returns the model's inputs."""
    loss: Callable[[Any, dict[str, Any]], Any]
    """Maps the model and its inputs to a scalar."""


def make_script(config: Config, folder: Path, what: TrainBench, *, num_workers: int, name: str) -> Script:
    """Return the script that trains, on data that is made in ``folder`` where none is named."""
    if isinstance(config, ResNetTrainConfig):
        return residual_network(made.prepared_images(config, folder, what, num_workers=num_workers))
    if isinstance(config, MaskRCNNTrainConfig):
        return _mask_rcnn(made.prepared_detection(config, folder, what, num_workers=num_workers))
    if isinstance(config, FinetuneConfig):
        model_name = name.partition("-")[2]
        task: Any = made.prepared_finetuning(
            config, folder, what, num_workers=num_workers, model_name=model_name
        )
        kinds: dict[type, Callable[[Any], Script]] = {
            SquadConfig: _squad, ClassifyConfig: _classify, T5ClassifyConfig: _t5_classify,
        }  # fmt: skip
        return kinds[type(task)](task)
    text: Any = made.prepared(config, folder, what, num_workers=num_workers)
    if config.data.path is None:
        sentinels = MAX_SENTINELS if isinstance(config, T5Config) else 0
        made.write_text(folder, config.model.vocab_size - sentinels)
    return _t5(text) if isinstance(config, T5Config) else _masked_lm(text)


def residual_network(config: ResNetTrainConfig) -> Script:
    """Return what measures the recipe for ResNets."""
    import torch

    from shoal.models.resnet import new_resnet
    from shoal.recipes import resnet50

    size = config.augment.size
    return Script(
        main=resnet50.main,
        config=config,
        sequence_length=1,
        make_model=lambda: new_resnet(config.model, config.model.num_classes or made.NUM_CLASSES),
        batch=lambda: {"images": torch.empty(2, 3, size, size)},
        loss=lambda model, inputs: model(inputs["images"]).sum(),  # torchvision calls them x
    )


def _mask_rcnn(config: MaskRCNNTrainConfig) -> Script:
    import torch

    from shoal.data.coco.synthetic import NUM_CATEGORIES
    from shoal.models.detection.mask_rcnn import MaskRCNN, largest_step
    from shoal.recipes import mask_rcnn

    return Script(
        main=mask_rcnn.main,
        config=config,
        sequence_length=1,
        make_model=lambda: MaskRCNN(config.model, NUM_CATEGORIES),
        batch=lambda: {"images": torch.empty(2, 3, *config.augment.largest_batch)},
        loss=lambda model, inputs: largest_step(model, inputs["images"]),
    )


def _t5(config: T5Config) -> Script:
    from shoal.models.t5 import MODEL_INPUTS, new_t5
    from shoal.recipes import t5

    return Script(
        main=t5.main,
        config=config,
        sequence_length=config.data.input_length,
        make_model=lambda: new_t5(config.model, pad_id=0, end_id=3),
        batch=lambda: _first_batch(t5.open_text(config, verify=False)[0], MODEL_INPUTS, config),
        loss=lambda model, inputs: model(**inputs).loss,
    )


def _masked_lm(config: Any) -> Script:
    from shoal.models.pretraining import PRETRAINING_INPUTS, new_encoder
    from shoal.recipes import albert, bert, masked_lm

    two = isinstance(config, BertConfig)
    sizes = config.phase1 if two else config.data
    pairs: Any = config.pair_task if two else "order"
    reader = partial(masked_lm.open_text, config, sizes, pairs=pairs, verify=False)
    return Script(
        main=bert.main if two else albert.main,
        config=config,
        sequence_length=sizes.max_seq_length,
        make_model=lambda: new_encoder(config.model),
        batch=lambda: _first_batch(reader()[0], PRETRAINING_INPUTS, config),
        loss=lambda model, inputs: (lambda sums: sums[0] + sums[2])(model(**inputs)),
    )


def _first_batch(reader: Any, names: tuple[str, ...], config: Any) -> dict[str, Any]:
    from shoal.data.loader import held_out_batches

    batch = next(held_out_batches(reader, micro_batch_size=made.sizes_of(config)[1].micro_batch_size))
    return {name: batch[name] for name in names}


def _source(config: FinetuneConfig) -> Path:
    """Return the transformers directory of a finetuning, which its run has exported where it is a run's."""
    return finetuning.prepare_source(required(config.model.path), required(config.run.dir))


def _first_examples(examples: Sequences, config: FinetuneConfig) -> dict[str, Any]:
    """Return the first examples of a finetuning as one micro-batch."""
    import numpy as np

    from shoal.data.loader import as_tensors

    chosen = np.arange(min(known_size(config.train.micro_batch_size) or 1, len(examples)))
    return dict(as_tensors(examples.batch(chosen), pin_memory=False))


def _squad(config: SquadConfig) -> Script:
    from shoal.data.squad.features import make_features
    from shoal.models.encoder import packed_inputs
    from shoal.models.tasks import QuestionAnswering, load_task_model, span_loss
    from shoal.recipes import squad

    def batch() -> dict[str, Any]:
        tokenizer = finetuning.read_source_tokenizer(_source(config))
        return _first_examples(
            make_features(squad.read_files(config.data)[0], tokenizer, config.window), config
        )

    def loss(model: Any, inputs: dict[str, Any]) -> Any:
        start, end = model(**packed_inputs(inputs))
        return span_loss(start, end, inputs, inputs["start"], inputs["end"])

    return Script(
        main=squad.main,
        config=config,
        sequence_length=config.window.length,
        make_model=lambda: load_task_model(QuestionAnswering, _source(config), **_new(config)),
        batch=batch,
        loss=loss,
    )


def _classify(config: ClassifyConfig) -> Script:
    from shoal.data.text.classify import make_pairs
    from shoal.models.encoder import packed_inputs
    from shoal.models.tasks import SequenceClassification, label_loss, load_task_model
    from shoal.recipes import classify

    length = config.data.max_seq_length

    def make_model() -> Any:
        labels = classify.read_files(config.data)[0].labels
        return load_task_model(SequenceClassification, _source(config), labels=labels, **_new(config))

    def batch() -> dict[str, Any]:
        tokenizer = finetuning.read_source_tokenizer(_source(config))
        pairs = make_pairs(classify.read_files(config.data)[0], tokenizer, max_seq_length=length)
        return _first_examples(pairs, config)

    return Script(
        main=classify.main,
        config=config,
        sequence_length=length,
        make_model=make_model,
        batch=batch,
        loss=lambda model, inputs: label_loss(model(**packed_inputs(inputs)), inputs["labels"]),
    )


def _t5_classify(config: T5ClassifyConfig) -> Script:
    from shoal.data.text.text_to_text import make_text_to_text
    from shoal.models.t5 import read_t5
    from shoal.recipes import t5_classify, t5_written

    length = config.data.max_seq_length

    def batch() -> dict[str, Any]:
        source, data = _source(config), t5_classify.read_files(config.data)[0]
        sizes = finetuning.read_model_config(source)
        examples = make_text_to_text(
            data,
            finetuning.read_source_tokenizer(source),
            template=t5_written.wording(config.data, data),
            max_seq_length=length,
            end_id=sizes["eos_token_id"],
            pad_id=sizes["pad_token_id"],
            max_target_length=config.data.max_target_length if config.data.is_text else None,
        )
        return _first_examples(examples, config)

    return Script(
        main=t5_classify.main,
        config=config,
        sequence_length=length,
        make_model=lambda: read_t5(_source(config), **_new(config)),
        batch=batch,
        # without the mask, whose values meta tensors do not have; the shapes are the same
        loss=lambda model, inputs: model(inputs["input_ids"], inputs["labels"]).loss,
    )


def _new(config: FinetuneConfig) -> dict[str, Any]:
    return config.model.options | {"from_scratch": True}


def read_result(script: Script, what: TrainBench, name: str) -> TrainResult:
    """Return the times of the steps after the warm-up from the record of the run."""
    import torch

    rows = read_record(script.config.run.dir)
    start = next(row for row in rows if isinstance(row, Start))
    timed = [row for row in rows if isinstance(row, Step) and 0 < row.step - what.warm_up <= what.steps]
    device = torch.device("cpu" if start.device.startswith("CPU") else "cuda")
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    parallel = getattr(script.config, "parallel", None)
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
        peak_flops_per_s=peak_flops_per_s(start.device, start.precision),
        device_memory_bytes=memory,
        num_stages=parallel.pipeline if parallel else 1,
    )


def count_flops(script: Script) -> float:
    """Return the FLOPs of forward and backward of one sample, counted on the meta device."""
    import torch

    from shoal.data.loader import to_device
    from shoal.models.profile import profile_step

    inputs = to_device(script.batch(), torch.device("meta"))
    num_samples = len(next(inputs[name] for name in ("labels", "images", "start") if name in inputs))
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
