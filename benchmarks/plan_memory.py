"""Memory of a worker by the planner, against torch's tracker over a whole training step.

The tracker (``MemTracker``) follows tensors without values through the forward and backward pass of a
micro-batch of a recipe, with the gradients of earlier micro-batches in place; the optimizer's state is added
as planned. Nothing is computed. Tensors claim to be on a GPU; where there is none, ``claimed_gpu.cc`` is
compiled and preloaded, since torch's backward pass asks the driver about it. Layers that a GPU compiles keep
less.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.harness import Benchmark
from shoal.attention import assuming_kernels
from shoal.decide.batch import BatchPlan
from shoal.dropout import SampleDropout
from shoal.models.encoder import full_sequences
from shoal.models.step_memory import TYPES, FusedAttention, autocast_on, replace_weights
from shoal.planner.hardware import Catalog
from shoal.recipes import Sample, script
from shoal.recipes.memory import memory_of, part_of
from shoal.recipes.workloads import preset_settings

CASES = (
    ("albert", "base", 32),
    ("albert", "large", 16),
    ("bert", "base", 32),
    ("bert", "large", 32),
    ("t5", "small", 16),
    ("t5", "base", 8),
    ("lm", "tiny", 64),
    ("lm", "gpt2-124m", 8),
    ("lm", "llama-1b", 1),
    ("resnet50", "imagenet-16k", 64),
    ("lm", "tiny", 64, 2),
    ("lm", "llama-1b", 1, 8),
)
"""Recipe, preset, samples of a micro-batch, and the workers that divide each layer if there are any."""
QUICK = (("albert", "tiny", 8), ("t5", "tiny", 8), ("lm", "tiny", 8, 2))
TARGET = 0.1
DEVICE = torch.device("cuda:0")
HOST = Catalog().machines("1xp5.48xlarge")


def inputs_for(sample: Sample, num_samples: int) -> dict[str, Any]:
    """Return a sample's inputs on the device for another number of samples; packed sequences are full."""
    times = num_samples // sample.num_samples
    packed = full_sequences(num_samples, sample.sequence_length) if "cu_seqlens" in sample.inputs else {}
    inputs: dict[str, Any] = {}
    for name, value in sample.inputs.items():
        wanted = packed.get(name, value)
        if isinstance(wanted, Tensor):
            rows = wanted.shape[0] if name in packed else times * wanted.shape[0]
            wanted = torch.empty([rows, *wanted.shape[1:]], dtype=wanted.dtype, device=DEVICE)
        inputs[name] = wanted
    return inputs


def tracked_bytes(sample: Sample, num_samples: int, precision: str, state_bytes: int) -> int:
    """Return the peak of a forward and backward pass, and the optimizer's state of ``state_bytes``."""
    model = copy.deepcopy(sample.model).train()
    if sample.recompute is not None:
        sample.recompute(model)
    with FakeTensorMode(allow_non_fake_inputs=True), assuming_kernels(True):
        replace_weights(model, DEVICE)
        inputs = inputs_for(sample, num_samples)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        tracker = MemTracker()
        given = [value for value in inputs.values() if isinstance(value, Tensor)]
        tracker.track_external(model, *given, *[w.grad for w in weights if w.grad is not None])
        with FusedAttention(), tracker:
            with autocast_on(DEVICE.type, TYPES[precision]):
                loss = keyed(sample, model, inputs, num_samples)
            torch.autograd.backward(loss)
    peak: int = tracker.get_tracker_snapshot("peak")[DEVICE]["Total"]
    return peak + state_bytes


def keyed(sample: Sample, model: nn.Module, inputs: Mapping[str, Any], num_samples: int) -> Tensor:
    """Return the loss, with dropout that has a key for each sample."""
    with SampleDropout(torch.empty(num_samples, dtype=torch.int64, device=DEVICE)):
        loss: Tensor = sample.loss(model, inputs)
        return loss


def measure(
    recipe: str, preset: str, num_samples: int, precision: str, tensor: int = 1
) -> tuple[float, float]:
    """Return the planned and the tracked bytes of a worker."""
    config = preset_settings(recipe, preset)
    config = replace(config, train=replace(config.train, precision=precision))
    if tensor > 1:
        config = replace(config, parallel=replace(config.parallel, tensor=tensor))
    sample: Sample = script(recipe).sample(config)
    num_samples = max(num_samples, sample.num_samples) // sample.num_samples * sample.num_samples
    batch = BatchPlan(
        global_batch_size=num_samples, num_workers=1, micro_batch_size=num_samples, accumulation_steps=1
    )
    planned = memory_of(sample, config, batch, HOST)
    part = part_of(sample, tensor)
    return planned.total_bytes, tracked_bytes(part, num_samples, precision, planned.optimizer_bytes)


def with_claimed_gpu() -> None:
    """Start this program again, with what answers torch for a GPU that is not there."""
    if torch.cuda.is_available():
        return
    preloaded = Path(os.environ.get("LD_PRELOAD", ""))
    source = Path(__file__).with_name("claimed_gpu.cc")
    if preloaded.stem == source.stem:  # this is the second start
        shutil.rmtree(preloaded.parent)
        return
    library = Path(tempfile.mkdtemp(prefix="shoal-bench-")) / "claimed_gpu.so"
    headers = Path(torch.__file__).parent / "include"
    subprocess.run(
        ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{headers}", "-o", library, source], check=True
    )
    os.execve(sys.executable, sys.orig_argv, os.environ | {"LD_PRELOAD": str(library)})


def main() -> int:
    with_claimed_gpu()
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--recipe", help="only the configurations of this one")
    bench = Benchmark("plan_memory", options=options)
    for recipe, preset, samples, *divided in QUICK if bench.quick else CASES:
        if bench.args.recipe not in (None, recipe):
            continue
        for precision in ("fp32", "bf16"):
            planned, tracked = measure(recipe, preset, samples, precision, *divided)
            name = f"{recipe}-{preset}{f' over {divided[0]} workers' if divided else ''}"
            print(
                f"{name} {precision}: {planned / 2**30:.3f} of {tracked / 2**30:.3f} GiB",
                flush=True,
            )
            bench.limit(
                f"{name}, {samples} samples, {precision}: error of the memory",
                [abs(planned / tracked - 1)],
                TARGET,
                unit="",
                formula="the design's",
            )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
