"""Every model under every schedule and layout: loss and every gradient against one process, in fp32.

One spawn runs all cases: making and exporting the models takes longer than training them.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pipeline_world import Made, Shared, Worker, run_worlds, worst_gradient

from pipeline_models import FAMILIES, cases

MOST_ERROR = 1e-6
LAYOUTS = ((2, 1, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2))
"""(ranks, stages per rank, replicas)"""
ONE_STAGE = ("gpipe", "1f1b", "interleaved", "bfs", "backward_first")
SEVERAL_STAGES = ("interleaved", "bfs", "vee", "backward_first")
MODELS = tuple(cases())

Case = tuple[str, str, tuple[int, int, int]]


def settings() -> list[tuple[str, tuple[int, int, int]]]:
    """Return every schedule with every layout that it can have."""
    return [
        (schedule, layout)
        for layout in LAYOUTS
        for schedule in (SEVERAL_STAGES if layout[1] > 1 else ONE_STAGE)
    ]


def whole_matrix() -> list[Case]:
    return [(model, *setting) for model in MODELS for setting in settings()]


def pairwise() -> list[Case]:
    """Return cases with every pair of (family, layout), (schedule, layout) and most of (family, schedule)."""
    chosen: list[Case] = []
    for layout in LAYOUTS:
        schedules = itertools.cycle(SEVERAL_STAGES if layout[1] > 1 else ONE_STAGE)
        offset = LAYOUTS.index(layout)
        for model in (*FAMILIES[offset:], *FAMILIES[:offset]):
            chosen.append((model, next(schedules), layout))
    return chosen


def make_models(names: list[str]) -> Shared:
    return {name: Made(name) for name in names}


def run_cases(matrix: list[Case], worker: Worker) -> dict[str, Any]:
    """Train one step of every case of this world; return the errors by case."""
    found = {}
    for model, schedule, (ranks, virtual, replicas) in matrix:
        if ranks * replicas != worker.size:
            continue
        made = worker.shared[model]
        oracle = made.oracle()
        stage, batch = worker.pipeline(
            made, ranks=ranks, virtual=virtual, replicas=replicas, schedule=schedule
        )
        loss = float(stage.step(**batch))
        error, name = worst_gradient(dict(stage.module.named_parameters()), oracle.gradients)
        buffers = dict(stage.module.named_buffers()) if replicas == 1 else {}
        wrong = [
            n for n, buffer in buffers.items() if not buffer.allclose(oracle.buffers[n], rtol=1e-6, atol=1e-7)
        ]
        found[f"{model} {schedule} {ranks}x{virtual}x{replicas}"] = {
            "loss": abs(loss - oracle.loss) / abs(oracle.loss),
            "gradient": error,
            "name": name,
            "buffers": wrong,
            "parameters": [n for n, _ in stage.module.named_parameters()],
            "owned": [n for n, _ in stage.module.named_parameters() if stage.owned(n)],
        }
        stage.close()
    return found


def check(matrix: list[Case], folder: Path) -> None:
    task = partial(run_cases, matrix)
    make = partial(make_models, sorted({model for model, *_ in matrix}))
    worlds = run_worlds(folder, make, [(2, task), (4, task)])
    for world in worlds:
        for rank, found in enumerate(world):
            for case, result in found.items():
                said = (case, f"rank {rank}", result["name"], result["gradient"], result["loss"])
                assert result["gradient"] <= MOST_ERROR and result["loss"] <= MOST_ERROR, said
                assert not result["buffers"], (case, rank, result["buffers"])
        for case in world[0]:
            replicas = int(case[-1])
            owned = [name for found in world[:: replicas or 1] for name in found[case]["owned"]]
            everything = {name for found in world for name in found[case]["parameters"]}
            if replicas == 1:
                assert len(owned) == len(set(owned)) and set(owned) == everything, case
    assert {case for world in worlds for case in world[0]} == {
        f"{model} {schedule} {'x'.join(map(str, layout))}" for model, schedule, layout in matrix
    }


def test_every_gradient_equals_one_process(tmp_path: Path) -> None:
    check(pairwise(), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_gradient_of_the_whole_matrix_equals_one_process(tmp_path: Path) -> None:
    check(whole_matrix(), tmp_path)
