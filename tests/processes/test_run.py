"""Trains by a user's own script on :class:`shoal.train.run.Run`: resumes and repeats steps to the bit."""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from job_workers import run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from forked import fork_process, torchrun, wait_for
from shoal.data.loader import BatchStream
from shoal.data.sources import DatasetSource, IterableSource
from shoal.data.steps import DataShard
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USAGE, RetryStep, UsageError
from shoal.record import Evaluation, Step, read_record
from shoal.train.config import LoopConfig, RunConfig
from shoal.train.run import Run

TOTAL = 8


@dataclass(frozen=True)
class Sizes:
    global_batch_size: int
    micro_batch_size: int | None = None


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of the plane and whether they are in the unit circle."""

    def __init__(self, count: int = 50) -> None:
        self.points = torch.randn(count, 2, generator=torch.Generator().manual_seed(3))
        self.inside = (self.points.norm(dim=1) < 1).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.inside[index]


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Linear(16, 2))


def script(
    directory: Path,
    worker: WorkerEnv,
    *,
    sizes: Sizes = Sizes(12),
    data: Callable[[WorkerEnv], Any] = lambda worker: Points(),
    norm: bool = False,
    fail_at: tuple[int, ...] = (),
    signal_at: int = 0,
    precision: str | tuple[str, ...] = "fp32",
    error: type[Exception] = RetryStep,
    nan_at: tuple[int, ...] = (),
    too_large: int = 0,
    updates: bool = True,
    several: bool = False,
    overfit_steps: int = 0,
) -> int:
    settings = RunConfig(name="test", log_frequency=1, checkpoint_frequency=3)
    precision = precision if isinstance(precision, str) else precision[worker.ranks.rank]
    loop = LoopConfig(
        seed=5,
        precision=precision,
        max_nonfinite_steps=2,
        overfit_steps=overfit_steps,  # type: ignore[arg-type]
    )
    with Run.open(directory, settings=settings, loop=loop, worker=worker) as run:
        module = net(norm)
        model = run.data_parallel(module)
        made: dict[str, Optimizer] = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)}
        if several:
            matrices = [p for p in module.parameters() if p.ndim == 2]
            others = [p for p in module.parameters() if p.ndim != 2]
            made = {"muon": Muon(matrices, lr=0.02), "adamw": AdamW(others, lr=0.01)}
        run.keep(model=module, **made)
        failures = list(fail_at)
        for step in run.steps(data(worker), sizes, until=TOTAL):
            with step:
                for points, inside in step:
                    loss = F.cross_entropy(model(points), inside, reduction="sum")
                    torch.empty(too_large)
                    step.backward(loss * (math.nan if step.number in nan_at else 1.0) / step.num_samples)
                    step.add(step.num_samples, error=loss)
                if step.number in failures:
                    failures.remove(step.number)
                    raise error(f"step {step.number} fails")
                if updates:
                    step.update(*made.values(), max_norm=1.0)
            if step.is_done and step.number == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if run.due(4):
                run.evaluation("validation", {"steps": run.step}, num_samples=50)
        return run.finish(lambda directory: torch.save(module.state_dict(), directory / "model.pt"))


def train(directory: Path, num_workers: int = 2, **options: Any) -> list[int | None]:
    return run_script(script, directory, num_workers, **options)


def losses(directory: Path) -> dict[int, float]:
    return {row.step: row.loss for row in read_record(directory) if isinstance(row, Step)}


def weights(directory: Path) -> dict[str, Tensor]:
    return torch.load(directory / "model.pt", weights_only=True)


def same(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return losses(one) == losses(other) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert train(directory) == [EXIT_OK, EXIT_OK]
    return directory


def test_the_record_has_its_lines_and_scores(whole: Path) -> None:
    rows = read_record(whole)
    steps = [row for row in rows if isinstance(row, Step)]
    assert [row.step for row in steps] == list(range(1, TOTAL + 1))
    assert [row.samples for row in steps] == [12 * step for step in range(1, TOTAL + 1)]
    for row in steps:
        assert row.metrics["error"] == pytest.approx(row.loss, rel=1e-6)
        assert row.learning_rate == 0.1 and math.isfinite(row.grad_norm)
    assert [row.step for row in rows if isinstance(row, Evaluation)] == [4, 8]


@pytest.mark.parametrize(
    ("num_workers", "sizes"),
    [(1, Sizes(12)), (1, Sizes(12, 3)), (3, Sizes(12, 2)), (4, Sizes(12, 3))],
    ids=lambda value: str(value),
)
def test_any_division_of_the_batch_trains_the_same(
    whole: Path, tmp_path: Path, num_workers: int, sizes: Sizes
) -> None:
    assert train(tmp_path / "run", num_workers, sizes=sizes) == [EXIT_OK] * num_workers
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-5)


def test_workers_that_choose_other_precisions_end_with_the_names_of_their_hosts(tmp_path: Path) -> None:
    assert train(tmp_path, precision=("bf16", "auto")) == [EXIT_USAGE, EXIT_USAGE]
    host = os.uname().nodename
    for rank in (0, 1):
        said = (tmp_path / f"worker-{rank}.log").read_text()
        assert f"train.precision differs between the workers: bf16 on {host}; fp32 on {host};" in said
        assert "Traceback" not in said
    assert not (tmp_path / "record.jsonl").exists()


SEVERAL = {"several": True, "precision": "fp16"}


@pytest.mark.parametrize("options", [{}, {"norm": True}, {"precision": "fp16"}, SEVERAL], ids=str)
def test_a_step_that_is_repeated_leaves_no_trace(tmp_path: Path, options: dict[str, Any]) -> None:
    """Weights, momentum, running statistics, loss scale and counters are those of the uninterrupted run."""
    assert train(tmp_path / "whole", **options) == [EXIT_OK, EXIT_OK]
    assert train(tmp_path / "run", fail_at=(1, 5, 5, 8), **options) == [EXIT_OK, EXIT_OK]
    assert same(tmp_path / "run", tmp_path / "whole")
    rows = read_record(tmp_path / "run")
    assert [row.step for row in rows if isinstance(row, Evaluation)] == [4, 8]


def test_another_error_ends_the_run_and_the_same_command_continues(whole: Path, tmp_path: Path) -> None:
    found = train(tmp_path / "run", fail_at=(6,), error=ZeroDivisionError)
    assert found == [EXIT_FAILURE, EXIT_FAILURE]
    assert "step 6 fails" in (tmp_path / "run" / "worker-0.log").read_text()
    assert train(tmp_path / "run") == [EXIT_OK, EXIT_OK]
    assert same(tmp_path / "run", whole)
    rows = [json.loads(line) for line in (tmp_path / "run" / "record.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"].count(4) == 2  # after the checkpoint
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(losses(whole))
    assert [event.step for event in events.Scalars("validation/steps")] == [4, 8]


def test_a_signal_saves_and_the_same_command_continues(whole: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", signal_at=5) == [EXIT_STOPPED, EXIT_STOPPED]
    assert max(losses(tmp_path / "run")) == 5
    assert train(tmp_path / "run") == [EXIT_OK, EXIT_OK]
    assert same(tmp_path / "run", whole)


def test_a_run_with_several_optimizers_continues_to_the_bit(tmp_path: Path) -> None:
    assert train(tmp_path / "whole", **SEVERAL) == [EXIT_OK, EXIT_OK]
    assert train(tmp_path / "run", signal_at=5, **SEVERAL) == [EXIT_STOPPED, EXIT_STOPPED]
    assert train(tmp_path / "run", **SEVERAL) == [EXIT_OK, EXIT_OK]
    assert same(tmp_path / "run", tmp_path / "whole")


def test_only_steps_in_a_row_count_as_not_finite(tmp_path: Path) -> None:
    assert train(tmp_path / "spread", nan_at=(2, 4, 6)) == [EXIT_OK, EXIT_OK]
    assert train(tmp_path / "row", nan_at=(2, 4, 5)) == [EXIT_FAILURE, EXIT_FAILURE]
    message = (tmp_path / "row" / "worker-0.log").read_text()
    assert "not finite for 2 steps in a row, up to step 5; samples of that step: 0:" in message
    assert "Lower the learning rate or lengthen its warmup; the same command continues" in message


def test_a_real_lack_of_memory_becomes_advice(tmp_path: Path) -> None:
    assert train(tmp_path / "run", too_large=1 << 53) == [EXIT_FAILURE, EXIT_FAILURE]
    message = (tmp_path / "run" / "worker-0.log").read_text()
    assert "out of memory with a micro-batch of 6 samples: use micro_batch_size 3 or" in message


def test_a_step_without_an_update_is_refused(tmp_path: Path) -> None:
    assert train(tmp_path / "run", updates=False) == [EXIT_USAGE, EXIT_USAGE]
    message = (tmp_path / "run" / "worker-0.log").read_text()
    assert "step 1 has no update: call step.update(optimizer) once" in message


def loader(worker: WorkerEnv, *, drop_last: bool = False) -> DataLoader[Any]:
    points = Points()
    ranks = worker.ranks
    sampler = DistributedSampler(points, ranks.num_workers, ranks.rank, seed=7)
    return DataLoader(points, batch_size=3, sampler=sampler, drop_last=drop_last)


@pytest.mark.parametrize(
    ("drop_last", "signal_at"), [(False, 5), (True, 3), (True, 4)], ids=["within", "after 3", "after 4"]
)
def test_a_dataloader_goes_on_at_its_place(tmp_path: Path, drop_last: bool, signal_at: int) -> None:
    """25 points per worker make 9 batches per epoch, or 8, and two batches a step: where an epoch ends."""
    options = {"data": partial(loader, drop_last=drop_last), "sizes": Sizes(12, 3)}
    assert train(tmp_path / "whole", **options) == [EXIT_OK, EXIT_OK]
    assert train(tmp_path / "run", signal_at=signal_at, **options) == [EXIT_STOPPED, EXIT_STOPPED]
    assert train(tmp_path / "run", **options) == [EXIT_OK, EXIT_OK]
    assert same(tmp_path / "run", tmp_path / "whole")
    assert len(set(losses(tmp_path / "run").values())) == TOTAL


class TwoSteps:
    """Gives the batches of steps 0 and 1 of a dataset in turn."""

    def __init__(self, worker: WorkerEnv) -> None:
        self.source = DatasetSource(dataset=Points(), seed=5)

    def open(self, shard: DataShard, steps: range, *, pin_memory: bool = False) -> BatchStream[Any]:
        return BatchStream((next(self.source.open(shard, range(step % 2, 2))) for step in steps), [])

    def names(self, shard: DataShard, step: int) -> list[str]:
        return self.source.names(shard, step % 2)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_first_steps_over_and_over(tmp_path: Path, num_workers: int) -> None:
    assert train(tmp_path / "whole", num_workers, data=TwoSteps) == [EXIT_OK] * num_workers
    options = {"overfit_steps": 2, "signal_at": 5}
    assert train(tmp_path / "run", num_workers, **options) == [EXIT_STOPPED] * num_workers
    assert train(tmp_path / "run", num_workers, overfit_steps=2) == [EXIT_OK] * num_workers
    assert same(tmp_path / "run", tmp_path / "whole")


def same_rows(worker: WorkerEnv) -> DataLoader[Any]:
    return DataLoader(Points(), batch_size=3)


def unchecked_rows(worker: WorkerEnv) -> IterableSource:
    return IterableSource(batches=same_rows(worker), checked=False)


def constant_rows(worker: WorkerEnv) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(12, 2), torch.ones(12).long()), batch_size=3)


def own_first_batch(worker: WorkerEnv) -> DataLoader[Any]:
    points = [Points(3)[k % 3] for k in range(12)]
    return DataLoader(points, batch_size=3 if worker.ranks.rank == 0 else 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            same_rows,
            "all 2 workers were given the same rows by the DataLoader of run.steps: give each its own",
        ),
        (
            own_first_batch,
            "the first micro-batch of the data has 2 rows, and the run's micro_batch_size is 3",
        ),
        (unchecked_rows, ""),
        (constant_rows, ""),
    ],
    ids=["same", "one worker's size", "unchecked", "constant"],
)
def test_workers_have_their_own_rows(tmp_path: Path, data: Callable[[WorkerEnv], Any], message: str) -> None:
    wanted = EXIT_USAGE if message else EXIT_OK
    assert train(tmp_path / "run", data=data, sizes=Sizes(12, 3)) == [wanted, wanted]
    for rank in range(2):
        assert message in (tmp_path / "run" / f"worker-{rank}.log").read_text()


def _alone(directory: Path) -> None:
    os.dup2(os.open(directory.with_suffix(".txt"), os.O_CREAT | os.O_WRONLY), 2)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    sys.exit(script(directory, None))


def test_without_a_launcher_a_script_is_its_only_worker(tmp_path: Path) -> None:
    assert wait_for([fork_process(_alone, tmp_path / "run")]) == [EXIT_OK]
    assert "world: 1 worker on 1 host" in (tmp_path / "run.txt").read_text()


SCRIPT = """
import torch
from shoal import Run
from shoal.train.config import RunOutputConfig
from shoal.train.run import Sizes

settings = RunOutputConfig(log_frequency={frequency})
with Run.open({folder!r}, settings=settings) as run:
    model = torch.nn.Linear(2, 1)
    ddp = run.data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps([torch.ones(2)] * 8, Sizes(global_batch_size=4), until=2):
        with step:
            for rows in step:
                {backward}
            step.update(optimizer)
"""


def _run_script(path: Path) -> None:
    """Do what Python does with a script, from a process that has torch loaded."""
    os.chdir(path.parent)
    os.dup2(os.open("said", os.O_CREAT | os.O_WRONLY), 2)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(EXIT_FAILURE)


@pytest.mark.parametrize(
    ("frequency", "backward", "code", "last"),
    [
        (1, "ddp(rows).sum().backward()", EXIT_USAGE, "shoal: step 1: its gradients are those of loss.backw"),
        (0, "pass", EXIT_USAGE, "shoal: run.log_frequency 0 must be at least 1"),
        (1, "step.backward(ddp(rows).summ())", EXIT_FAILURE, "[rank0]: AttributeError: 'Tensor' object has"),
    ],
)
def test_a_script_ends_in_one_line(
    tmp_path: Path, frequency: int, backward: str, code: int, last: str
) -> None:
    (path := tmp_path / "script.py").write_text(
        SCRIPT.format(folder=str(tmp_path / "run"), frequency=frequency, backward=backward)
    )
    assert wait_for([fork_process(_run_script, path)]) == [code]
    said = (tmp_path / "said").read_text()
    assert said.splitlines()[-1].startswith(last)
    assert ("Traceback" in said) == (code == EXIT_FAILURE)


@pytest.mark.slow
def test_under_torchrun_each_worker_ends_in_one_line(tmp_path: Path) -> None:
    (path := tmp_path / "script.py").write_text(
        SCRIPT.format(folder=str(tmp_path / "run"), frequency=1, backward="ddp(rows).sum().backward()")
    )
    code, said = torchrun(str(path), output=tmp_path / "said")
    lines = [
        line for line in said.splitlines() if line.startswith("shoal: step 1: its gradients are those of")
    ]
    assert code == EXIT_FAILURE and len(lines) == 2  # torchrun's code, and a line of each worker
    assert said.count("Traceback") == said.count(
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    )
    assert "exitcode  : 2" in said


def test_what_is_no_data_is_refused(tmp_path: Path) -> None:
    from shoal.data.sources import as_source

    with pytest.raises(UsageError, match="a generator is no training data: give an indexable dataset"):
        as_source((x for x in range(3)), seed=1)
    with pytest.raises(UsageError, match="the dataset to train on is empty"):
        as_source([], seed=1)
