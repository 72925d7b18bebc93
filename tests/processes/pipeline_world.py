"""Real worker processes for tests of pipelines: models are made and exported once, then workers are forked.

A worker does in turn whatever it is told, and writes what it found to a file of its own.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from forked import fork_process
from pipeline_models import Case, cases
from shoal.decide.cost import Link, ModelCost, Unit
from shoal.pipelining import Pipeline, make_mesh, pipeline, stage_sources
from shoal.pipelining.export_graph import ExportedGraph, export_model
from shoal.pipelining.loss import default_count, loss_of, micro_batches
from shoal.pipelining.units import units_of

NUM_PARTS = 4
"""Micro-batches of the global batch of 8 rows: each replica has an equal part of them."""
DEADLINE_S = 280.0

Task = Callable[["Worker"], Any]
Shared = dict[str, "Made"]


class Made:
    """A model with its batch, exported for micro-batches of two rows in both modes."""

    def __init__(self, case: str | Case, dropout: float = 0.0) -> None:
        self.model, self.batch = cases(dropout)[case]() if isinstance(case, str) else case()
        part = micro_batches(self.batch, NUM_PARTS)[0]
        self.exported = {mode: export_model(self.model, part, mode) for mode in (True, False)}
        units = units_of(self.exported[True])
        self.cost = ModelCost(
            units=tuple(
                Unit(name=name, forward_s=1.0, backward_s=2.0, parameters=parameters)
                for name, parameters in zip(units.names, units.parameters, strict=True)
            ),
            relay_bytes=units.relay_bytes,
        )
        self.state = {name: tensor.clone() for name, tensor in self._tensors()}
        self._oracle: Oracle | None = None

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def reset(self) -> None:
        """Put parameters and buffers back to what they were, without gradients."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(self.state[name])
        self.model.zero_grad(set_to_none=True)

    def oracle(self) -> Oracle:
        if self._oracle is None:
            self.reset()
            self._oracle = Oracle(self.model, self.batch)
            self.reset()
        return self._oracle


class Oracle:
    """The unsplit model on the same micro-batches, in order, in one process."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        parts = micro_batches(batch, NUM_PARTS)
        counts = [float(default_count(part)) for part in parts]
        model.train()
        self.loss = 0.0
        for part, count in zip(parts, counts, strict=True):
            loss = loss_of(model(**part)) * (count / sum(counts))
            loss.backward()  # type: ignore[no-untyped-call]
            self.loss += float(loss.detach())
        self.gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        }
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}


class Worker:
    """A task's rank, world and results in its process."""

    def __init__(self, rank: int, size: int, shared: Shared) -> None:
        self.rank, self.size, self.shared = rank, size, shared
        self._meshes: dict[tuple[int, int], DeviceMesh] = {}

    def mesh(self, ranks: int, replicas: int) -> DeviceMesh:
        if (ranks, replicas) not in self._meshes:
            self._meshes[ranks, replicas] = make_mesh("cpu", pipeline=ranks, data=replicas)
        return self._meshes[ranks, replicas]

    def pipeline(
        self,
        made: Made,
        *,
        ranks: int,
        virtual: int = 1,
        replicas: int = 1,
        schedule: str = "1f1b",
        **options: Any,
    ) -> tuple[Pipeline, dict[str, Tensor]]:
        """Return a fresh pipeline over a model, and this replica's rows of its batch."""
        made.reset()
        mesh = self.mesh(ranks, replicas)
        parts = pytree.tree_map(lambda tensor: tensor.chunk(replicas), made.batch)
        batch = {name: rows[mesh["dp"].get_local_rank()] for name, rows in parts.items()}
        given = {
            "microbatches": NUM_PARTS // replicas,
            "cost": made.cost,
            "link": Link(bytes_per_s=1e12),
            "data_parallel": mesh["dp"],
            **options,
        }
        with exported_before(made):
            stage = pipeline(
                made.model, batch, mesh=mesh["pp"], schedule=schedule, virtual_stages=virtual, **given
            )
        return stage, batch


class exported_before:
    """Let ``pipeline()`` use the graphs that the parent process has exported: tracing takes seconds."""

    def __init__(self, made: Made) -> None:
        self._made = made

    def __enter__(self) -> None:
        made = self._made

        def cached(model: nn.Module, inputs: Mapping[str, Tensor], training: bool) -> ExportedGraph:
            exported = made.exported[training]
            assert model is made.model
            assert {n: t.shape for n, t in inputs.items()} == {n: t.shape for n, t in exported.inputs.items()}
            return exported

        stage_sources.export_model = cached  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        stage_sources.export_model = export_model  # type: ignore[attr-defined]


def run_worlds(
    folder: Path,
    make: Callable[[], Shared],
    worlds: Sequence[tuple[int, Task]],
    *,
    backend: str = "gloo",
    killed: Collection[int] = (),
) -> list[list[Any]]:
    """Run each task on its number of workers, one world after the other; return what its workers returned.

    Args:
        killed: ranks of which no result is expected.

    Raises:
        AssertionError: a worker failed; with its traceback.
    """
    folder.mkdir(exist_ok=True)
    # a process that has started no threads, from which workers can be forked
    parent = fork_process(_parent, folder, make, list(worlds), backend)
    parent.join(DEADLINE_S)
    if parent.is_alive():
        parent.kill()
        raise AssertionError(f"the workers were not done after {DEADLINE_S:g} s: {_reports(folder)}")
    results = []
    for number, (size, _) in enumerate(worlds):
        found = []
        for rank in sorted(set(range(size)) - set(killed)):
            path = folder / f"result-{number}-{rank}.json"
            assert path.exists(), f"worker {rank} of world {number} left no result: {_reports(folder)}"
            found.append(json.loads(path.read_text()))
        results.append(found)
    failed = [one["error"] for world in results for one in world if "error" in one]
    assert not failed, failed[0]
    return [[one["result"] for one in world] for world in results]


def _reports(folder: Path) -> str:
    return "\n".join(
        path.read_text() for path in sorted(folder.glob("result-*.json")) if "error" in path.read_text()
    )


def _parent(folder: Path, make: Callable[[], Shared], worlds: list[tuple[int, Task]], backend: str) -> None:
    shared = make()
    gc.freeze()  # or each worker visits, and so copies, all of it
    context = multiprocessing.get_context("fork")
    for number, (size, task) in enumerate(worlds):
        workers = [
            context.Process(target=_worker, args=(folder, number, rank, size, backend, shared, task))
            for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def _worker(
    folder: Path, number: int, rank: int, size: int, backend: str, shared: Shared, task: Task
) -> None:
    report: dict[str, Any]
    torch.set_num_threads(
        1
    )  # renews torch 2.11's pool, for which autograd's threads race in a forked process
    try:
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meet-{number}", rank=rank, world_size=size
        )
        begin = time.process_time()
        report = {"result": task(Worker(rank, size, shared)), "seconds": time.process_time() - begin}
    except BaseException:
        report = {"error": f"worker {rank} of {size}:\n{traceback.format_exc()}"}
    temporary = folder / f"result-{number}-{rank}.tmp"
    temporary.write_text(json.dumps(report))
    temporary.rename(temporary.with_suffix(".json"))
    if dist.is_initialized() and "result" in report:
        dist.destroy_process_group()
    os._exit(0 if "result" in report else 1)


def worst_gradient(found: Mapping[str, nn.Parameter], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest error of this rank's gradients, max |difference| / max |g| of each, and whose it is.

    A gradient that is only rounding (the bias of keys) counts against 1e-4 of the largest of all.
    """
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    worst = (0.0, "")
    for name, parameter in found.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        largest = max(float(expected[name].abs().max()), 1e-4 * scale)
        worst = max(worst, (float((gradient - expected[name]).abs().max()) / largest, name))
    return worst
