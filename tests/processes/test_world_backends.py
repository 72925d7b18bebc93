"""Tests the backend on which workers agree: by default, after a comparison, with helpers, on resume.

Workers on CPUs stand for GPUs, gloo for NCCL, and the memory device for CUDA tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pretrain_jobs as jobs
import pytest
import torch
import torch.distributed as dist
from benchmarks.memory_device import MemoryDevice
from comm_group import SECRET, HelperProcess
from test_serve_metrics import scrape, value

from forked import fork_process, free_port, wait_for
from shoal.comm import native_group
from shoal.comm.backend import ShoalProcessGroup
from shoal.env.machine import cpu_quota, num_scheduled
from shoal.env.worker import WorkerEnv, WorkerRanks
from shoal.errors import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, UsageError
from shoal.launch.worker import run_worker
from shoal.recipes import albert
from shoal.recipes.albert import AlbertConfig
from shoal.record import Start, read_record
from shoal.train import backends
from shoal.train.config import DistributedConfig
from shoal.train.world import all_gather_json, join_world

NO_COMPILER = {"PATH": "", "CXX": ""}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


def place_of(rank: int, port: int) -> WorkerEnv:
    """Return the environment of one of two workers, each on a host of its own."""
    os.environ["SHOAL_HOST_ID"] = f"host-{rank}"
    ranks = WorkerRanks(rank=rank, num_workers=2, local_rank=0, num_local_workers=1)
    return WorkerEnv(ranks=ranks, master_addr="127.0.0.1", master_port=port, launcher="test")


# ---- what workers agree on -----------------------------------------------------------------------------


def join(
    rank: int, port: int, config: DistributedConfig, report: Path, environment: Mapping[str, str]
) -> None:
    """Join, sum, and write the backend with its reasons, or the error."""
    os.environ.update(environment)
    try:
        with join_world(place_of(rank, port=port), config) as world:
            tensor = torch.full((1_000,), rank + 1.0)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.full((1_000,), 3.0))
            found = [world.backend, world.backend_reason, world.note, all_gather_json(world.control, rank)]
    except UsageError as error:
        found = [f"UsageError: {error}"]
    report.write_text(json.dumps(found))


def joined(
    folder: Path, config: DistributedConfig | None = None, *environments: Mapping[str, str]
) -> list[list[Any]]:
    """Let two workers on two hosts join; return their reports."""
    port, given = free_port(), environments or ({}, {})
    reports = [folder / f"report-{rank}" for rank in range(2)]
    workers = [
        fork_process(join, rank, port, config or DistributedConfig(), reports[rank], given[rank])
        for rank in range(2)
    ]
    assert wait_for(workers) == [0, 0]
    return [json.loads(report.read_text()) for report in reports]


def test_workers_on_cpus_sum_over_shoal(tmp_path: Path) -> None:
    assert joined(tmp_path) == [["shoal", "workers on CPUs", "", [0, 1]]] * 2


def share_threads(rank: int, store: Path, report: Path, bound: bool) -> None:
    """Join another worker of this host with 64 threads, as torch starts under mpirun on 64 cores."""
    if bound:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[rank::2])
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(64)
    ranks = WorkerRanks(rank=rank, num_workers=2, local_rank=rank, num_local_workers=2)
    place = WorkerEnv(ranks=ranks, master_addr="", master_port=0, launcher="test", store_file=store)
    with join_world(place, DistributedConfig(backend="gloo")) as world:
        report.write_text(f"{torch.get_num_threads()} {world.cores}")


@pytest.mark.parametrize("bound", [False, True], ids=["free", "bound"])
def test_workers_share_the_cores_of_their_host(tmp_path: Path, bound: bool) -> None:
    if bound and num_scheduled() < 2:
        pytest.skip("needs two cores")
    reports = [tmp_path / "0", tmp_path / "1"]
    workers = [
        fork_process(share_threads, rank, tmp_path / "store", reports[rank], bound) for rank in range(2)
    ]
    assert wait_for(workers) == [0, 0]
    shares = [(num_scheduled() + 1 - rank if bound else num_scheduled()) // 2 for rank in range(2)]
    expected = [max(1, int(min(share, cpu_quota() / 2))) for share in shares]
    assert [report.read_text() for report in reports] == [f"{share} {share}" for share in expected]


def test_gloo_by_name(tmp_path: Path) -> None:
    found = joined(tmp_path, DistributedConfig(backend="GLOO"))
    assert found == [["gloo", "distributed.backend names it", "", [0, 1]]] * 2


def test_one_host_without_a_compiler_brings_all_to_gloo(tmp_path: Path) -> None:
    found = joined(tmp_path, None, {}, {**NO_COMPILER, "SHOAL_CACHE_DIR": str(tmp_path / "empty")})
    assert found[0] == found[1]
    backend, _, note, _ = found[0]
    assert backend == "gloo"
    assert note.startswith(
        "backend gloo: shoal's process group in C++ does not load: no C++ compiler is found"
    )


def test_the_group_in_python_is_not_taken_by_default(tmp_path: Path) -> None:
    ((backend, _, note, _), _) = joined(tmp_path, None, *[{"SHOAL_NATIVE_GROUP": "0"}] * 2)
    assert backend == "gloo" and note.endswith("SHOAL_NATIVE_GROUP is 0")


@pytest.mark.parametrize("native", ["0", "1"])
def test_helpers_are_named_by_worker_0_and_used_by_all(tmp_path: Path, native: str) -> None:
    """Also without the group in C++, where workers on CPUs would take gloo otherwise."""
    with HelperProcess("h0") as helper:
        own = {"SHOAL_NATIVE_GROUP": native, "SHOAL_SECRET": SECRET}
        named = {**own, "SHOAL_HELPERS": f"{helper.address}:{helper.port}*1.0"}
        assert joined(tmp_path, None, named, own) == [["shoal", "1 helper is named", "", [0, 1]]] * 2


def test_idle_helpers_are_refused_at_the_start(tmp_path: Path) -> None:
    named = {"SHOAL_HELPERS": "127.0.0.1:1", "SHOAL_SECRET": SECRET}
    found = joined(tmp_path, DistributedConfig(backend="gloo"), named, {"SHOAL_SECRET": SECRET})
    assert found[0] == found[1]
    assert found[0][0].startswith(
        "UsageError: distributed.backend gloo does not use helper hosts, and 1 helper"
    )


# ---- GPUs of several hosts ------------------------------------------------------------------------------


def as_gpus() -> None:
    """Let this worker on a CPU count as one on a GPU, and gloo stand for NCCL."""
    backends._is_gpu = lambda device: True
    backends.NCCL = "gloo"  # type: ignore[misc]


def train(config: AlbertConfig, rank: int, port: int, slower: str, environment: Mapping[str, str]) -> None:
    """Train ALBERT as workers on GPUs do; the backend ``slower`` takes 0.2 s more for a sum in the trial."""
    os.environ.update(environment)
    as_gpus()
    measured = backends._seconds

    def seconds(group: dist.ProcessGroup, wire: str, num_bytes: int, device: torch.device) -> float:
        print("a reading", wire, flush=True)
        return measured(group, wire, num_bytes, device) + 0.2 * (dist.get_backend(group) == slower)

    backends._seconds = seconds
    assert config.run.dir is not None
    config.run.dir.mkdir(parents=True, exist_ok=True)
    out = os.open(config.run.dir / f"out-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    worker = place_of(rank, port=port)
    run_worker(lambda: albert.main(config, worker))


def trained(
    config: AlbertConfig, slower: str = "", environment: Mapping[str, str] | None = None
) -> list[int | None]:
    port = free_port()
    workers: list[BaseProcess] = [
        fork_process(train, config, rank, port, slower, environment or {}) for rank in range(2)
    ]
    return wait_for(workers)


def starts(run_dir: Path) -> list[tuple[str, str]]:
    return [(row.backend, row.backend_reason) for row in read_record(run_dir) if isinstance(row, Start)]


@pytest.mark.parametrize(("slower", "chosen"), [("gloo", "shoal"), ("shoal", "gloo")])
def test_the_faster_backend_is_taken_and_kept(data: Path, tmp_path: Path, slower: str, chosen: str) -> None:
    run_dir = tmp_path / "run"
    config = jobs.small_config(data, run_dir, train={"total_steps": 3}, distributed={"bucket_mb": 0.25})
    assert trained(config, slower) == [EXIT_OK, EXIT_OK]
    ((backend, why),) = starts(run_dir)
    assert backend == chosen
    assert why.startswith("0.0625 MiB as fp32: gloo ") and " ms, shoal " in why
    said = (run_dir / "out-0").read_text()
    assert f"backend {chosen}, by the sum of {why}" in said
    assert said.count("a reading") >= 20 and said.count("a reading bf16") == 10
    longer = jobs.changed(config, {"train": {"total_steps": 4}})
    assert trained(longer, chosen) == [EXIT_OK, EXIT_OK]
    assert starts(run_dir)[1] == (chosen, "the run began with it"), "although it is the slower one now"
    assert (run_dir / "out-0").read_text().count("a reading") == said.count("a reading")


def test_the_comparison_is_in_the_format_of_the_run(data: Path, tmp_path: Path) -> None:
    for wire in ("bf16", "int8"):
        run_dir = tmp_path / wire
        config = jobs.small_config(
            data, run_dir, train={"total_steps": 2}, distributed={"bucket_mb": 0.25, "wire": wire}
        )
        assert trained(config, "gloo") == [EXIT_OK, EXIT_OK]
        ((backend, why),) = starts(run_dir)
        assert backend == "shoal" and why.startswith(f"0.0625 MiB as {wire}: ")


def test_nothing_is_compared_where_a_backend_is_named(data: Path, tmp_path: Path) -> None:
    named = jobs.small_config(
        data, tmp_path / "named", train={"total_steps": 2}, distributed={"backend": "gloo"}
    )
    assert trained(named, "gloo") == [EXIT_OK, EXIT_OK]
    assert starts(tmp_path / "named") == [("gloo", "distributed.backend names it")]
    for steps, backend in ((3, "auto"), (4, "shoal")):
        changes = {"train": {"total_steps": steps}, "distributed": {"backend": backend}}
        assert trained(jobs.changed(named, changes), "gloo") == [EXIT_OK, EXIT_OK]
    assert starts(tmp_path / "named")[1:] == [
        ("gloo", "the run began with it"), ("shoal", "distributed.backend names it"),
    ]  # fmt: skip
    said = (tmp_path / "named" / "out-0").read_text()
    assert "a reading" not in said
    assert (
        said.count("backend: gloo up to step 3, shoal from here on, so sums may differ in the last bit") == 1
    )


def test_a_backend_that_does_not_work_is_left_out(tmp_path: Path) -> None:
    """Worker 1 cannot be reached by shoal: both take what stands for NCCL."""
    found = joined_as_gpus(tmp_path, broken_rank=1)
    assert found[0][:2] == found[1][:2] == ["gloo", "shoal does not work"]
    assert found[0][2].startswith("backend gloo: shoal does not work: ")


def joined_as_gpus(folder: Path, *, broken_rank: int) -> list[list[Any]]:
    port = free_port()
    reports = [folder / f"report-{rank}" for rank in range(2)]
    workers = [fork_process(join_as_gpu, rank, port, reports[rank], rank == broken_rank) for rank in range(2)]
    assert wait_for(workers) == [0, 0]
    return [json.loads(report.read_text()) for report in reports]


def join_as_gpu(rank: int, port: int, report: Path, broken: bool) -> None:
    as_gpus()
    if broken:
        os.environ["SHOAL_INTERFACE"] = "nonesuch0"
    join(rank, port, DistributedConfig(timeout_s=30), report, {})


# ---- GPUs and helper hosts ------------------------------------------------------------------------------


def with_cuda_tensors() -> None:
    """Send CPU tensors as CUDA tensors go: through staging, past the group in C++."""
    native_group.load = lambda: None
    begin = ShoalProcessGroup.__init__

    def open_group(self: ShoalProcessGroup, *args: Any, **given: Any) -> None:
        begin(self, *args, **given)
        self.devices["cpu"] = lambda _: MemoryDevice()

    ShoalProcessGroup.__init__ = open_group  # type: ignore[method-assign]


def train_staged(config: AlbertConfig, rank: int, port: int, environment: Mapping[str, str]) -> None:
    with_cuda_tensors()
    train(config, rank, port, "", environment)


@pytest.mark.parametrize("mode", ["off", "sync"])
def test_a_recipe_on_gpus_sums_on_its_helper(data: Path, tmp_path: Path, mode: str) -> None:
    """Without the setting, as with ``--helpers 1``: what the helper sums, or steps with, is counted there."""
    run_dir, port = tmp_path / "run", free_port()
    config = jobs.small_config(data, run_dir, train={"total_steps": 3}, servers={"mode": mode})
    with HelperProcess("h0", arguments=("--metrics", "0")) as helper:
        assert helper.process.stdout is not None
        url = helper.process.stdout.readline().strip().partition(" at ")[2]
        named = {"SHOAL_HELPERS": f"{helper.address}:{helper.port}*1.0", "SHOAL_SECRET": SECRET}
        assert value(scrape(url), "summed_chunks") == 0
        codes = wait_for([fork_process(train_staged, config, rank, port, named) for rank in range(2)])
        assert codes == [EXIT_OK, EXIT_OK], (run_dir / "out-0").read_text()
        assert value(scrape(url), "summed_chunks") >= 3, "one bucket in each step"
    assert starts(run_dir) == [("shoal", "1 helper is named")]


def test_gpus_with_a_helper_but_no_group_in_cpp_are_refused(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    named = {"SHOAL_HELPERS": "127.0.0.1:1", "SHOAL_SECRET": SECRET, "SHOAL_NATIVE_GROUP": "0"}
    codes = trained(jobs.small_config(data, run_dir), environment=named)
    assert EXIT_USAGE in codes and set(codes) <= {EXIT_USAGE, EXIT_FAILURE}
    said = (run_dir / "out-0").read_text()
    assert "workers on GPUs need shoal's process group in C++ for that, which does not load" in said
