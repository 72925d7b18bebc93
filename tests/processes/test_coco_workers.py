"""Evaluation spread over worker processes gives the figures of one, to the last digit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_workers import run_workers

from shoal.data.coco.annotations import read_annotations
from shoal.data.coco.results import KINDS, read_results
from shoal.env.settings import test_data_dir as data_dir
from shoal.env.worker import WorkerRanks
from shoal.recipes.mask_rcnn import score_across_workers
from shoal.train.world import World

FILES = data_dir() / "coco_eval_golden" / "cocoapi"
PUBLISHED = {"bbox": [0.505, 0.697, 0.573], "segm": [0.320, 0.562, 0.299]}


def evaluate(rank: int, num_workers: int, out: Path) -> None:
    """Each worker scores every n-th image; the last one of three has none at all."""
    if num_workers > 1:
        control = dist.new_group(backend="gloo")
        assert isinstance(control, dist.ProcessGroup)
    else:
        control = None  # type: ignore[assignment]
    ranks = WorkerRanks(rank=rank, num_workers=num_workers, local_rank=rank, num_local_workers=num_workers)
    world = World(ranks=ranks, device=torch.device("cpu"), backend="gloo", control=control)
    truth = read_annotations(FILES / "instances_val2014_100.json")
    figures = {}
    for kind in KINDS:
        path = FILES / f"instances_val2014_fake{kind}100_results.json"
        found = read_results([path], truth).detections[kind]
        sharing = min(num_workers, 2)
        own = {image: one for n, (image, one) in enumerate(found.items()) if n % sharing == rank}
        score = score_across_workers(world, truth, own, kind)
        assert (score is None) == (rank > 0)
        figures[kind] = list(score.figures.values()) if score else []
    if rank == 0:
        out.write_text(json.dumps(figures))


@pytest.mark.skipif(not FILES.is_dir(), reason="SHOAL_TEST_DATA has no coco_eval_golden")
def test_same_figures_at_1_2_and_3_workers(tmp_path: Path) -> None:
    figures = []
    for num_workers in (1, 2, 3):
        out = tmp_path / f"{num_workers}.json"
        meeting = tmp_path / f"meet{num_workers}"
        assert run_workers(evaluate, num_workers, meeting, num_workers, out) == [0] * num_workers
        figures.append(json.loads(out.read_text()))
    assert figures[0] == figures[1] == figures[2]
    for kind in KINDS:
        assert len(figures[0][kind]) == 12
        assert [round(value, 3) for value in figures[0][kind][:3]] == PUBLISHED[kind]
