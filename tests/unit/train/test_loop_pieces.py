"""The small pieces of a run: precision, loss scale, timer, running means, progress, configuration."""

from __future__ import annotations

import math
import os
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from shoal.env.worker import alone
from shoal.errors import UsageError
from shoal.recipes.albert import IMMUTABLE, AlbertConfig, DataConfig
from shoal.recipes.finetuning import FinetuneConfig, FinetuneTrainConfig
from shoal.recipes.resnet50 import ResNetTrainConfig
from shoal.recipes.resnet50 import TrainConfig as ImageTrainConfig
from shoal.recipes.t5 import T5Config
from shoal.record import PARTS, Step
from shoal.train import step as steps
from shoal.train import world
from shoal.train.backends import check_backend
from shoal.train.config import (
    DistributedConfig,
    LoopConfig,
    ParallelConfig,
    ServersConfig,
    TrainConfig,
    as_tree,
    check_combination,
    load_toml,
    to_toml,
)
from shoal.train.reporting import EventWriter, Progress, StepTimer, duration, peak_memory_bytes
from shoal.train.run import Run
from shoal.train.run_dir import open_run_dir
from shoal.train.step import RunningMetrics
from shoal.train.world import choose_device

CPU = torch.device("cpu")


@contextmanager
def alone_in_a_world(config: DistributedConfig) -> Iterator[None]:
    with TemporaryDirectory() as folder, world.join_world(alone(Path(folder)), config):
        yield


def test_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's attention makes a plan for each shape."""
    monkeypatch.setattr(world, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with alone_in_a_world(DistributedConfig(backend="gloo")):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_run_on_a_gpu_is_compiled_where_there_is_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (problem, asked, compiled, noted) in enumerate(
        (
            ("", None, True, []),
            ("no C compiler", None, False, ["not compiled: no C compiler"]),
            ("no C compiler", True, True, []),
            ("", False, False, []),
        )
    ):
        monkeypatch.setattr("shoal.train.model_setup.compiler_problem", lambda problem=problem: problem)
        folder = tmp_path / f"{number}"
        with Run.open(folder, loop=LoopConfig(compile=asked), worker=alone(tmp_path)) as run:
            run.world = replace(run.world, device=torch.device("cuda", 0))
            module = torch.nn.Linear(2, 2)
            run.compile(module)
            assert ((module._compiled_call_impl is not None), run._notes) == (compiled, noted)


def test_the_parts_of_the_timer_sum_up_to_the_step() -> None:
    timer = StepTimer(CPU)
    for _ in range(2):
        timer.begin_step()
        time.sleep(0.02)
        timer.lap("forward")
        timer.lap("backward")
        time.sleep(0.01)
        timer.end_step()
    parts = timer.parts_s()
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(timer.step_s())
    assert parts["forward"] >= 0.02 and parts["other"] >= 0.01
    assert parts["backward"] < parts["forward"]
    timer.reset()
    assert timer.num_steps == 0


class LateEvent:
    """A CUDA event that a GPU passes when it is told to."""

    passed_s = 0.0
    now_s = 0.0

    def __init__(self, **options: object) -> None:
        pass

    def record(self) -> None:
        LateEvent.now_s += 1.0
        self.at_s = LateEvent.now_s

    def synchronize(self) -> None:
        assert self.at_s <= LateEvent.passed_s, "the host waits for the GPU"

    def elapsed_time(self, other: LateEvent) -> float:
        return 1_000 * (other.at_s - self.at_s)


def test_the_timer_does_not_wait_for_the_step_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    timer = StepTimer(torch.device("cuda"))
    for _ in range(3):
        timer.begin_step()
        timer.lap("forward")
        timer.lap("optimizer")
        timer.end_step()  # the events of the step before were passed meanwhile, these are not
        LateEvent.passed_s = LateEvent.now_s
    parts = timer.parts_s()
    assert parts["forward"] == parts["optimizer"] == 1.0


def test_running_means_leave_skipped_steps_out_of_the_norm() -> None:
    metrics = RunningMetrics(lambda sums: [2 * value for value in sums.tolist()])  # two equal workers
    for norm in (1.0, math.inf, 3.0):
        metrics.add_step(0.25, {"error": torch.tensor(10.0).double()}, {"error": 5}, norm)
    assert (metrics.num_skipped(), metrics.mean_grad_norm()) == (1, 2.0)
    assert metrics.means() == (0.5, {"error": 4.0})
    metrics.reset()
    assert metrics.num_skipped() == 0 and math.isnan(metrics.mean_grad_norm())


def test_peak_memory_is_that_of_a_real_process() -> None:
    assert 50e6 < peak_memory_bytes(CPU) < 50e9


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (75.4, "1:15"), (3_725, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_without_a_terminal_there_is_a_plain_line_with_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(100)
    for step in (10, 20, 100):
        progress.step(
            Step(
                step=step,
                samples=step,
                loss=2.5,
                metrics={"mlm_accuracy": 0.25},
                learning_rate=0.0,
                loss_scale=1.0,
                grad_norm=1.0,
                weight_norm=1.0,
                samples_per_s=64.0,
                step_s=0.5,
                parts_s={},
            )
        )
    lines = capsys.readouterr().err.splitlines()
    assert lines == [  # the second line would come too soon, the last always comes
        "step 10/100  loss 2.500  mlm 25.0 %  64 sequences/s  ETA 0:45",
        "step 100/100  loss 2.500  mlm 25.0 %  64 sequences/s  ETA 0:00",
    ]


def test_the_resolved_configuration_reads_back() -> None:
    config = AlbertConfig()
    tree = as_tree(config)
    assert tomllib.loads(to_toml(tree)) == tree
    odd = {"run": {"name": 'a "quoted" \\ name', "flag": True, "rate": 1e-7}}
    assert tomllib.loads(to_toml(odd)) == odd


def test_paths_that_exist_are_written_for_readers_in_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").mkdir()
    monkeypatch.chdir(tmp_path)
    for given, written in (("text", str(tmp_path / "text")), ("hub:text", "hub:text")):
        config = AlbertConfig(data=DataConfig(path=Path(given)))
        assert as_tree(config)["data"]["path"] == written


_CONTROLS = "".join(map(chr, [*range(32), 127, 0x85, 0x2028, 0xFEFF, 0x1F41F]))


@hypothesis.given(st.text(), st.lists(st.text(st.sampled_from("\"\\'#\n\r\t\0\x7fab")), max_size=3))
@hypothesis.example(_CONTROLS, ["\r\n", '"""', "\\u0041"])
def test_any_text_reads_back(tmp_path_factory: pytest.TempPathFactory, text: str, texts: list[str]) -> None:
    tree = {"run": {"name": text, "names": texts}}
    assert tomllib.loads(to_toml(tree)) == tree
    path = tmp_path_factory.getbasetemp() / "text.toml"
    path.write_bytes(to_toml(tree).encode())
    assert load_toml(path) == tree


def test_a_text_that_is_not_utf8_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    with pytest.raises(UsageError, match=r"run\.name 'caf\\udce9' is not UTF-8, as config\.toml is"):
        open_run_dir(tmp_path, {"run": {"name": name}}, ())
    with pytest.raises(UsageError, match=r"run\.names"):
        to_toml({"run": {"names": ["right", name]}})
    assert list(tmp_path.iterdir()) == []


def test_a_config_file_nested_too_deeply_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("a = " + "[" * 100_000)
    with pytest.raises(UsageError, match=r"the config file .*/deep\.toml cannot be read: maximum recursion"):
        load_toml(path)


def test_a_run_directory_holds_its_settings_and_refuses_others(tmp_path: Path) -> None:
    tree = as_tree(AlbertConfig())
    open_run_dir(tmp_path / "run", {"train": {"global_batch_size": 7}}, IMMUTABLE)  # refused before it began
    open_run_dir(tmp_path / "run", tree, IMMUTABLE)
    (tmp_path / "run" / "record.jsonl").touch()
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text()) == tree
    longer = {**tree, "train": {**tree["train"], "total_steps": 7}}
    open_run_dir(tmp_path / "run", longer, IMMUTABLE)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text()) == longer
    other = {**tree, "model": {**tree["model"], "hidden_size": 64}}
    with pytest.raises(UsageError, match=r"model\.hidden_size = 768, and this command sets 64"):
        open_run_dir(tmp_path / "run", other, IMMUTABLE)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text()) == longer
    with pytest.raises(UsageError, match="cannot be written"):
        open_run_dir(tmp_path / "run" / "config.toml" / "below", tree, IMMUTABLE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_devices_without_a_gpu() -> None:
    assert choose_device(DistributedConfig(), 0, 2) == CPU
    with pytest.raises(UsageError, match="2 workers on this host but 0 GPUs"):
        choose_device(DistributedConfig(device="cuda"), 0, 2)


GPU_SIGNS = ("SHOAL_GPUS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch find no GPU, and nothing say that there is one."""
    for name in (*GPU_SIGNS, "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(world, "GPU_DEVICES", ())


def test_the_cpu_in_place_of_gpus_is_said_once(
    no_gpus: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert choose_device(DistributedConfig(), 0, 2) == CPU
    assert capsys.readouterr().err == ""  # nobody expected a GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [choose_device(DistributedConfig(), rank, 2) for rank in range(2)] == [CPU, CPU]
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("shoal: WARNING: training on the CPU of ")
    assert "(CUDA_VISIBLE_DEVICES=0,1): 2 workers on this host but 0 GPUs (torch " in said
    assert choose_device(DistributedConfig(device="cpu"), 0, 2) == CPU
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(world, "GPU_DEVICES", (str(tmp_path / "none"), str(tmp_path)))
    assert choose_device(DistributedConfig(), 0, 1) == CPU
    assert f"({tmp_path}): 1 workers on this host but 0 GPUs" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(world, "not_built_for", lambda gpu: "")
    assert choose_device(DistributedConfig(), 1, 2) == torch.device("cuda", 1)
    assert capsys.readouterr().err == ""
    assert choose_device(DistributedConfig(), 0, 4) == CPU
    assert "4 workers on this host but 2 GPUs; --distributed.device cuda makes" in capsys.readouterr().err


def test_the_cpu_in_place_of_gpus_that_the_job_asked_for_is_an_error(
    no_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_GPUS", "8")
    with pytest.raises(UsageError, match="the job asked for 8 GPUs: 2 workers on this host but 0 GPUs"):
        choose_device(DistributedConfig(), 1, 2)
    assert choose_device(DistributedConfig(device="cpu"), 0, 2) == CPU


def test_backends() -> None:
    assert check_backend("auto", CPU) == "auto"
    assert check_backend("GLOO", CPU) == "gloo"
    with pytest.raises(UsageError, match=r"'glo' is not a backend .* Did you mean 'gloo'\?"):
        check_backend("glo", CPU)
    with pytest.raises(UsageError, match=r"'nccl'.* (is for GPUs|built without it)"):
        check_backend("nccl", CPU)


def test_wires_that_cannot_be_are_refused() -> None:
    int8, bf16 = DistributedConfig(wire="int8"), DistributedConfig(wire="bf16")
    check_combination(LoopConfig(precision="bf16"), int8, ServersConfig(), clip="global")
    check_combination(LoopConfig(precision="fp16"), bf16, ServersConfig(), clip="global")
    check_combination(LoopConfig(precision="fp16"), DistributedConfig(), ServersConfig(), clip="worker")
    with pytest.raises(UsageError, match=r"wire int8 with train\.precision fp16"):
        check_combination(LoopConfig(precision="fp16"), int8, ServersConfig(), clip="global")
    with pytest.raises(UsageError, match=r"wire bf16 with optim\.clip worker"):
        check_combination(LoopConfig(precision="fp32"), bf16, ServersConfig(), clip="worker")
    with pytest.raises(UsageError, match=r"wire int8 with train\.precision fp16"):
        AlbertConfig(distributed=int8, train=TrainConfig(precision="fp16"))
    with pytest.raises(UsageError, match=r"wire int8 with train\.precision fp16"):
        ResNetTrainConfig(distributed=int8, train=ImageTrainConfig(precision="fp16"))
    with pytest.raises(UsageError, match=r"wire int8 with train\.precision fp16"):
        FinetuneConfig(distributed=int8, train=FinetuneTrainConfig(precision="fp16"))
    T5Config(distributed=bf16)
    T5Config(distributed=int8)
    with pytest.raises(UsageError, match=r"wire int8: its residuals would take"):
        T5Config(distributed=int8, parallel=ParallelConfig(shard=True))


def test_a_run_that_goes_on_within_a_second_keeps_the_events_before(tmp_path: Path) -> None:
    for first_step in (None, 4, 6):
        EventWriter(tmp_path, first_step).close()
    names = sorted(tmp_path.glob("*tfevents*"))
    assert names == sorted(names, key=lambda path: path.stat().st_mtime_ns) and len(names) == 3


def test_run_and_step_have_few_methods() -> None:
    """A reader of a recipe holds them in mind; what is added takes the place of something."""
    for kind, most in ((Run, 12), (steps.Step, 8)):
        methods = [
            name for name, member in vars(kind).items() if name[0] != "_" and not isinstance(member, property)
        ]
        assert len(methods) <= most, methods
