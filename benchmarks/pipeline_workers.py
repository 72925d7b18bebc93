"""The processes of the pipeline benchmark: what each rank of a small pipeline on this machine measures."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import peer_module
from shoal.decide.cost import ModelCost
from shoal.decide.partition import minimax, parameter_ranges
from shoal.decide.pipeline_simulator import Timeline
from shoal.pipelining import Pipeline, pipeline
from shoal.pipelining.export_graph import export_model
from shoal.pipelining.loss import micro_batches
from shoal.pipelining.measure_cost import measure_cost
from shoal.pipelining.process_groups import broadcast_json

NUM_MICRO_BATCHES = 8
_DEADLINE_S = 3000.0
Batch = dict[str, Tensor]


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Run ``function(rank, *args)`` in processes of one thread each; return what each returned.

    Raises:
        SystemExit: a process failed; its traceback is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_run, args=(function, rank, num_ranks, Path(folder), args))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_DEADLINE_S)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        if any(codes):
            raise SystemExit(f"{function.__name__} failed: its processes left with {codes}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _run(
    function: Callable[..., Any], rank: int, num_ranks: int, folder: Path, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)
    (folder / f"{rank}.json").write_text(json.dumps(function(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()


# ---- models ---------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Equal layers: stages of as many each take the same time, the first one's gradients included."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))  # the first layer's input has a gradient, too
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean()}


def equal_layers(small: bool) -> tuple[nn.Module, Batch]:
    torch.manual_seed(2)
    width, rows = (256, 64) if small else (3072, 128)  # much to compute for each byte that is sent
    return Layers(8, width), {"x": torch.randn(NUM_MICRO_BATCHES * rows, width)}


def t5(small: bool) -> tuple[nn.Module, Batch]:
    """Return a T5 of six and six blocks with tied embeddings, and a batch of 8 micro-batches."""
    transformers = peer_module("transformers")
    torch.manual_seed(1)
    width, blocks, rows, source, target = (64, 2, 1, 32, 16) if small else (256, 6, 2, 128, 64)
    config = transformers.T5Config(
        vocab_size=2048 if small else 8192,
        d_model=width,
        d_kv=width // 8,
        d_ff=4 * width,
        num_layers=blocks,
        num_heads=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    size = NUM_MICRO_BATCHES * rows
    batch = {
        "input_ids": torch.randint(1, 2048, (size, source)),
        "labels": torch.randint(1, 2048, (size, target)),
    }
    return transformers.T5ForConditionalGeneration(config).train(), batch


# ---- what is measured -----------------------------------------------------------------------------------


def traced_bubbles(rank: int, small: bool, num_steps: int) -> dict[str, list[float]]:
    """Return the traced idle shares of a step of equal stages under each schedule."""
    model, batch = equal_layers(small)
    found: dict[str, list[float]] = {}
    for name, num_virtual in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)):
        cuts = [layers_cut(model, batch, k, 2 * num_virtual) for k in range(1, 2 * num_virtual)]
        stage = pipeline(
            model,
            batch,
            microbatches=NUM_MICRO_BATCHES,
            schedule=name,
            virtual_stages=num_virtual,
            cuts=cuts,
        )
        found[name] = [timeline.bubble for timeline in traces(stage, batch, num_steps)]
        stage.close()
    return found


def layers_cut(model: nn.Module, batch: Batch, number: int, parts: int) -> int:
    """Return the cut at which part ``number`` of so many equal parts of ``Layers`` begins."""
    return block_starts(unit_names(model, batch), "layers.")[number * len(model.layers) // parts]  # type: ignore[arg-type]


def traces(stage: Pipeline, batch: Batch, num_steps: int) -> list[Timeline]:
    """Return the timelines of some steps, after two that are not counted."""
    found = []
    with stage.tracing():
        for _ in range(num_steps + 2):
            stage.step(**batch)
            assert stage.traced is not None
            found.append(stage.traced)
    return found[2:]


def saved_bytes(rank: int, small: bool) -> dict[str, int]:
    """Return the most bytes that this rank keeps for backward under each schedule, on the same cut."""
    model, batch = t5(small)
    found, cuts = {}, None
    for name in ("gpipe", "1f1b"):
        stage = pipeline(
            model, batch, microbatches=NUM_MICRO_BATCHES, schedule=name, virtual_stages=1, cuts=cuts
        )
        cuts = stage.plan.cuts
        meter = SavedBytes(stage)
        with torch.autograd.graph.saved_tensors_hooks(meter.pack, meter.unpack):
            stage.step(**batch)
        found[name] = meter.most
        stage.close()
    return found


class SavedBytes:
    """Counts the bytes that autograd keeps; each storage once, parameters not at all."""

    def __init__(self, stage: Pipeline) -> None:
        self.now = self.most = 0
        self._parameters = {p.untyped_storage().data_ptr() for p in stage.module.parameters()}
        self._holders: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> _Kept:
        return _Kept(self, tensor)

    def unpack(self, kept: _Kept) -> Tensor:
        return kept.tensor

    def change(self, tensor: Tensor, by: int) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._parameters:
            return
        before = self._holders.get(storage.data_ptr(), 0)
        self._holders[storage.data_ptr()] = before + by
        if before == 0 or before + by == 0:
            self.now += by * storage.nbytes()
            self.most = max(self.most, self.now)


class _Kept:
    """A saved tensor, counted while autograd holds it."""

    def __init__(self, meter: SavedBytes, tensor: Tensor) -> None:
        self.tensor, self._meter = tensor.detach(), meter
        meter.change(self.tensor, 1)

    def __del__(self) -> None:
        self._meter.change(self.tensor, -1)


def unit_names(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    return tuple(unit.name for unit in cost_of(model, batch).units)


def cost_of(model: nn.Module, batch: Batch) -> ModelCost:
    part = micro_batches(batch, NUM_MICRO_BATCHES)[0]
    return measure_cost(export_model(model, part, training=True))


def block_starts(names: Sequence[str], *prefixes: str) -> list[int]:
    """Return the units at which a new block begins: ``encoder.block.3`` after ``encoder.block.2``."""
    starts, last = [], None
    for index, name in enumerate(names):
        for prefix in prefixes:
            if name.startswith(prefix):
                block = prefix + name.removeprefix(prefix).split(".")[0]
                if block != last:
                    starts.append(index)
                last = block
    return starts


def split_times(rank: int, small: bool, num_repetitions: int) -> dict[str, Any]:
    """Return the step times of every cut of T5 in two, in turns, and how the automatic one was predicted."""
    model, batch = t5(small)
    automatic = pipeline(model, batch, microbatches=NUM_MICRO_BATCHES, schedule="1f1b", virtual_stages=1)
    cost = cost_of(model, batch) if rank == 0 else None
    group = dist.group.WORLD
    assert group is not None
    cuts = broadcast_json(cuts_to_try(cost) if cost else None, group, torch.device("cpu"))
    cuts["automatic"] = list(automatic.plan.cuts)
    stages = {
        name: pipeline(
            model,
            batch,
            microbatches=NUM_MICRO_BATCHES,
            schedule="1f1b",
            virtual_stages=1,
            cuts=cut,
            cost=cost,
        )
        for name, cut in cuts.items()
    }
    times: dict[str, list[float]] = {name: [] for name in cuts}
    for repetition in range(num_repetitions + 1):
        order = list(stages) if repetition % 2 else list(reversed(stages))
        for name in order:
            dist.barrier()
            begin_s = time.perf_counter()
            stages[name].step(**batch)
            dist.barrier()
            if repetition:
                times[name].append(time.perf_counter() - begin_s)
    predicted = [stage.forward_s + stage.backward_s for stage in automatic.plan.stages]
    found = traces(automatic, batch, max(num_repetitions, 3))
    for stage in (automatic, *stages.values()):
        stage.close()
    return {
        "times_s": times,
        "cuts": cuts,
        "predicted_s": predicted,
        "measured_s": [[_stage_s(timeline, stage) for timeline in found] for stage in range(2)],
    }


def cuts_to_try(cost: ModelCost) -> dict[str, list[int]]:
    """Return every boundary of blocks, the one in the middle again as ``layers``, and what parameters say."""
    starts = block_starts([unit.name for unit in cost.units], "encoder.block.", "decoder.block.")
    cuts = {f"block {number}": [start] for number, start in enumerate(starts) if number}
    return {
        **cuts,
        "layers": [starts[len(starts) // 2]],
        "parameters": list(minimax([parameter_ranges(cost)] * 2)[1]),
    }


def _stage_s(timeline: Timeline, stage: int) -> float:
    """Return the median time of a stage's forward and of its backward over one micro-batch."""
    times: dict[str, list[float]] = {"F": [], "B": []}
    for box in timeline.boxes:
        if box.action.stage == stage:
            times[box.action.kind].append(box.end_s - box.begin_s)
    return sum(statistics.median(each) for each in times.values())
