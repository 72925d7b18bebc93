"""Calibration with measured files: what was measured comes back, and files that do not belong are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import shoal.recipes
from plan_made import hosts, model
from shoal.bench.comm_results import CollectiveRow, write_json
from shoal.bench.comm_results import HostNetwork as CommNetwork
from shoal.bench.step_timing import KIND, TrainResult
from shoal.cli.plan import Request, plan
from shoal.decide.layout import Layout
from shoal.decide.server_assignment import ring_seconds, two_hop_seconds
from shoal.errors import UsageError
from shoal.planner.calibration import TRAIN_KIND, MeasuredComm, MeasuredTrain, read_measured
from shoal.planner.step_time import step_time
from shoal.record import PARTS, Start, Step

RESULT = TrainResult(
    recipe="made",
    sequence_length=1,
    num_parameters=100_000_000,
    device="device",
    num_devices=4,
    precision="bf16",
    global_batch=256,
    micro_batch=32,
    samples_s=(0.5,),
    parts_s={"forward": 0.5},
    peak_memory_bytes=1 << 30,
    flops_per_sample=3e10,
    matmul_flops_per_s=1e14,
)


def trained(folder: Path, **changed: Any) -> MeasuredTrain:
    path = folder / "train.json"
    replace(RESULT, **changed).write(path)
    read = read_measured(path)
    assert isinstance(read, MeasuredTrain)
    return read


def test_the_planner_gives_the_measured_throughput_back(tmp_path: Path) -> None:
    assert KIND == TRAIN_KIND
    read, made = trained(tmp_path), model()
    flops = read.achieved_flops("made", made, hosts(1).instance)
    layout = Layout(global_batch=256, micro_batch=32)
    step_s = step_time(made, hosts(1, per_host=4), layout, achieved_flops=flops).total_s
    assert step_s == pytest.approx(0.5, rel=1e-4)
    # a pipeline of all devices, in 8 micro-batches: a bubble of 3 in 11, so a faster device for the same time
    piped = trained(tmp_path, num_stages=4)
    assert piped.achieved_flops("made", made, hosts(1).instance) > 1.2 * flops
    tree = json.loads((tmp_path / "train.json").read_text())
    del tree["num_stages"]  # a file of before
    (tmp_path / "train.json").write_text(json.dumps(tree))
    old = read_measured(tmp_path / "train.json")
    assert isinstance(old, MeasuredTrain) and old.num_stages == 1
    # 64 samples a device of 30 GFLOP in about half a second.
    assert flops == pytest.approx(64 * 3e10 / 0.5, rel=0.1)


def run_of(
    folder: Path,
    *,
    num_lines: int = 6,
    config: dict[str, Any] | None = None,
    passes: Sequence[str] = ("forward", "backward"),
) -> Path:
    """A run on two hosts of four devices, whose steps compute for 0.5 s and wait for others 0.2 s."""
    start = Start(
        run="made", recipe="made", command=[], config=config or {}, num_workers=8, num_hosts=2,
        backend="gloo", device="device", precision="fp32", versions={}, num_parameters=100_000_000,
        total_steps=9, global_batch_size=512, micro_batch_size=32, accumulation_steps=2, unit="samples",
    )  # fmt: skip
    parts = dict.fromkeys(PARTS, 0.0) | {"data": 0.2} | dict.fromkeys(passes, 0.4 / len(passes))
    steps = [
        Step(
            step=number, samples=512 * number, loss=1.0, metrics={}, learning_rate=1.0, loss_scale=1.0,
            grad_norm=1.0, weight_norm=1.0, samples_per_s=700.0, step_s=0.7,
            parts_s=parts | {"optimizer": slow},
        )
        for number, slow in enumerate([5.0] * (num_lines // 2) + [0.1] * (num_lines - num_lines // 2))
    ]  # fmt: skip
    folder.mkdir()
    lines = [json.dumps({"kind": row.kind, **asdict(row)}) for row in (start, *steps)]
    (folder / "record.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_run_tells_what_one_host_computes(tmp_path: Path) -> None:
    """As a file of one host with the same times, of the later half of its lines."""
    file, read = trained(tmp_path), read_measured(run_of(tmp_path / "run"))
    assert isinstance(read, MeasuredTrain)
    assert (read.num_devices, read.global_batch, read.micro_batch) == (4, 256, 32)
    instance = hosts(1).instance
    flops = [each.achieved_flops("made", model(), instance) for each in (read, file)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-5)
    one_stage = read_measured(run_of(tmp_path / "stage", passes=["pipeline"]))  # as T5's
    assert replace(one_stage, path=read.path) == read
    with pytest.raises(UsageError, match="its record has 3 lines about steps, and 4 are needed"):
        read_measured(run_of(tmp_path / "short", num_lines=3))
    for name, value in (("pipeline", 2), ("tensor", 2), ("shard", True)):
        with pytest.raises(UsageError, match="is of a model in stages or shards, whose workers wait"):
            read_measured(run_of(tmp_path / name, config={"parallel": {name: value}}))


def test_files_of_other_recipes_models_and_hardware_are_refused(tmp_path: Path) -> None:
    instance = hosts(1).instance
    with pytest.raises(
        UsageError, match=r"train\.json is of recipe bert-base, not of made: measure that one"
    ):
        trained(tmp_path, recipe="bert-base").achieved_flops("made", model(), instance)
    with pytest.raises(UsageError, match="of a model of 90,000,000 parameters, but made has 100,000,000"):
        trained(tmp_path, num_parameters=90_000_000).achieved_flops("made", model(), instance)
    with pytest.raises(UsageError, match=r"\(device\) is not of host: no rate of computation"):
        trained(tmp_path, samples_s=(1e-6,)).achieved_flops("made", model(), instance)


def comm_file(folder: Path, seconds: dict[str, Any], network: CommNetwork) -> Path:
    rows = [
        CollectiveRow(
            collective="all_reduce",
            num_bytes=num_bytes,
            backend=backend,
            samples_s=[time_of(num_bytes)],
            limit_s=None,
            formula_s=None,
        )
        for backend, time_of in seconds.items()
        for num_bytes in (1 << 16, 1 << 20, 1 << 24)
    ]
    write_json(folder / "comm.json", rows, network, {})
    return folder / "comm.json"


@pytest.mark.parametrize("backend", ["gloo", "shoal", "shoal-colocated"])
def test_rate_and_latency_of_made_times_come_back(tmp_path: Path, backend: str) -> None:
    nic, latency, helpers = 1.25e9, 30e-6, (1.0, 2.0)

    def seconds(num_bytes: int) -> float:
        if backend == "gloo":
            return ring_seconds(num_bytes, [nic] * 4, latency_s=latency)
        rates = [nic * factor for factor in helpers] if backend == "shoal" else []
        return two_hop_seconds(num_bytes, [nic] * 4, rates, latency_s=latency)

    network = CommNetwork(num_workers=4, num_hosts=4, helper_bandwidths=helpers)
    read = read_measured(comm_file(tmp_path, {backend: seconds}, network))
    assert isinstance(read, MeasuredComm)
    assert read.nic_bytes_per_s == pytest.approx(nic) and read.latency_s == pytest.approx(latency)
    applied = read.applied(hosts(16, nic=5e9)).instance
    assert applied.effective_nic == pytest.approx(nic) and applied.network.latency_s == pytest.approx(latency)


def test_of_two_backends_the_one_that_gets_most_out_of_the_links_counts(tmp_path: Path) -> None:
    network = CommNetwork(num_workers=2, num_hosts=2)
    times = {rate: lambda m, rate=rate: ring_seconds(m, [rate] * 2) for rate in (1e9, 2e9)}
    read = read_measured(comm_file(tmp_path, {"gloo": times[1e9], "mpi": times[2e9]}, network))
    assert isinstance(read, MeasuredComm)
    assert read.backend == "mpi" and read.nic_bytes_per_s == pytest.approx(2e9)
    with pytest.raises(
        UsageError, match="carry 16 Gbit/s and the NIC of host 8: it was measured on other hosts"
    ):
        read.applied(hosts(2, nic=1e9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"--measured .*run\.json: is not JSON"),
        ("[]", "is neither of"),
        ('{"kind": "shoal bench train"}', "is damaged or of another version: KeyError"),
        (json.dumps({"network": {"num_hosts": 1, "num_workers": 2}, "rows": []}), "2 workers on 1 hosts"),
        (
            json.dumps({"network": {"num_hosts": 2, "num_workers": 2, "helper_bandwidths": []}, "rows": []}),
            "no all-reduces whose time grows",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_measured(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_measured(tmp_path / "absent.json")


def command(*measured: Path, recipe: str = "albert-base", **options: Any) -> int:
    return plan(
        recipe, request=Request(cluster=("8xp3dn.24xlarge",), start_s=0.0, measured=measured, **options)
    )


def test_the_command_uses_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from shoal.planner.recipe_workloads import workload

    made = workload("albert-base", 512)
    measured = replace(
        RESULT,
        recipe="albert-base",
        sequence_length=512,
        num_parameters=made.num_parameters,
        num_devices=8,
        global_batch=512,
        samples_s=(512 / 931,),
    )
    measured.write(tmp_path / "train.json")
    network = CommNetwork(num_workers=2, num_hosts=2)
    comm = comm_file(tmp_path, {"gloo": lambda m: ring_seconds(m, [2e9] * 2, latency_s=1e-5)}, network)
    plans = {}
    for name, files in (("published", ()), ("train", ("train.json",)), ("both", ("train.json", comm.name))):
        path = tmp_path / f"{name}-plan.json"
        assert command(*(tmp_path / file for file in files), json=path) == 0
        plans[name] = json.loads(path.read_text())
    said = capsys.readouterr().out
    assert "measured: 931 sequences/s of 512 tokens on 8 × device" in said
    assert "measured: 16 Gbit/s a host, 10 µs a hop (gloo on 2 hosts" in said
    rates = {name: plan["best"]["samples_per_s"] for name, plan in plans.items()}
    # The catalog's own figure is the same 931 sequences/s of the post.
    assert rates["train"] == pytest.approx(rates["published"], rel=0.03)
    assert rates["both"] < rates["train"], "a slower network must show"

    with pytest.raises(UsageError, match="is of recipe albert-base, not of bert-base"):
        command(tmp_path / "train.json", recipe="bert-base")
    with pytest.raises(UsageError, match=r"--throughput and --measured .* both give the speed"):
        command(tmp_path / "train.json", throughput=900.0)


def test_presets_are_the_planners_models() -> None:
    pytest.importorskip("transformers")
    from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig
    from shoal.planner.recipe_workloads import workload
    from shoal.train.config import load_toml

    kinds = {
        "albert-base": (AlbertModelConfig, 512),
        "albert-large": (AlbertModelConfig, 512),
        "bert-base": (BertModelConfig, 128),
        "bert-large": (BertModelConfig, 128),
        "t5-3b": (T5ModelConfig, 512),
    }
    for name, (config, length) in kinds.items():
        recipe, preset = name.split("-")
        root = Path(shoal.recipes.__path__[0])
        folder = root / "presets" / recipe
        path = (folder if folder.is_dir() else root / recipe / "presets") / f"{preset}.toml"
        own = config(**load_toml(path)["model"]).num_parameters  # type: ignore[operator]
        # `shoal bench train` writes the one, `--measured` compares with the other.
        assert own == pytest.approx(workload(name, length).num_parameters, rel=0.001), name
