"""The type that a run computes in: chosen by the device, not by the processor; outputs and losses in fp32."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from shoal import doctor
from shoal.cli.use import evaluate_checkpoint, predict
from shoal.decide.batch import plan_batch
from shoal.env.worker import alone
from shoal.errors import EXIT_OK, UsageError
from shoal.recipes.albert import AlbertConfig
from shoal.recipes.memory import memory_of
from shoal.recipes.resnet50 import ResNetTrainConfig, sample
from shoal.recipes.t5 import T5Config
from shoal.recipes.t5_classify import T5ClassifyConfig
from shoal.recipes.workloads import preset_settings
from shoal.record import Start, Step, read_record
from shoal.train.config import (
    DistributedConfig,
    LoopConfig,
    RunOutputConfig,
    ServersConfig,
    load_toml,
    precision_here,
    refuses_fp16,
)
from shoal.train.gradients import LossScale, in_fp32
from shoal.train.model_setup import choose_precision
from shoal.train.run import Run, Sizes
from shoal.train.world import choose_device, runs_on

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(params=[(7, 0), (7, 5), (8, 0), (9, 0)], ids=str)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The compute capability of the GPU, whatever there is here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    found: tuple[int, int] = request.param
    return found


def test_auto_on_a_gpu_is_bf16_where_there_is_and_fp16_elsewhere(capability: tuple[int, int]) -> None:
    chosen = choose_precision("auto", GPU)
    name, dtype = ("bf16", torch.bfloat16) if capability >= (8, 0) else ("fp16", torch.float16)
    assert (chosen.name, chosen.dtype, chosen.device_type, chosen.note) == (name, dtype, "cuda", "")
    assert LossScale(enabled=chosen.name == "fp16").dynamic == (name == "fp16")


def test_auto_is_fp32_where_fp16_cannot_be_taken_and_a_line_says_so(capability: tuple[int, int]) -> None:
    chosen = choose_precision("auto", GPU, no_fp16="T5")
    if capability >= (8, 0):
        assert (chosen.name, chosen.note) == ("bf16", "")
    else:
        assert chosen.name == "fp32"
        assert chosen.note == "precision fp32: this GPU has no bf16, and T5 cannot take fp16"
    assert choose_precision("fp16", GPU, no_fp16="T5").name == "fp16"  # asked for


@pytest.mark.parametrize("has_amx", [False, True])
def test_auto_on_a_cpu_is_fp32_whatever_the_processor_has(
    has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for probe in ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: has_amx)
    assert choose_precision("auto", CPU).name == "fp32"
    assert choose_precision("bf16", CPU).name == "bf16"
    with pytest.raises(UsageError, match="'fp8' must be one of auto, fp32, bf16, fp16"):
        choose_precision("fp8", CPU)


def test_what_cannot_take_fp16_with_a_dynamic_scale() -> None:
    def found(
        config: object | None = None, scale: float | None = None, wire: Any = "fp32", **servers: Any
    ) -> str:
        loop, distributed = LoopConfig(loss_scale=scale), DistributedConfig(wire=wire)
        return refuses_fp16(config, loop, distributed, ServersConfig(**servers))

    assert found() == found(AlbertConfig()) == found(mode="sync") == ""
    assert found(T5Config()) == found(T5ClassifyConfig()) == "T5"
    assert found(wire="int8") == "distributed.wire int8"
    assert found(mode="bounded", staleness=2) == "servers.mode bounded"
    assert found(mode="bounded", wait_for=2) == "servers.mode bounded"
    assert found(mode="async") == "servers.mode async"
    assert found(mode="local", local_steps=4) == "servers.mode local"
    assert found(mode="bounded", staleness=2, scale=128.0) == ""  # a fixed scale follows nobody


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (AlbertConfig(), ("fp16", "bf16")),
        (ResNetTrainConfig(), ("fp16", "bf16")),
        (T5Config(), ("fp32", "bf16")),
    ],
    ids=["albert", "resnet50", "t5"],
)
def test_a_dry_run_counts_activations_in_the_type_that_auto_becomes(
    config: Any, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a GPU, with one without bf16, and with one that has it."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr("shoal.train.config.num_gpus", lambda: 0)
    assert precision_here(config) == ("fp32", "cpu")
    monkeypatch.setattr("shoal.train.config.num_gpus", lambda: 8)
    for found, wanted in zip([(7, 0), (8, 0)], names, strict=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=found: found)
        assert precision_here(config) == (wanted, "cuda")
    assert precision_here(replace(config, distributed=DistributedConfig(device="cpu"))) == ("fp32", "cpu")
    for name in ("fp32", "bf16", "fp16"):
        assert precision_here(replace(config, train=replace(config.train, precision=name))) == (name, "cuda")


def test_memory_of_images_follows_the_type() -> None:
    """Most activations are half as large; the copies of the weights come on top."""
    memory = {}
    for name in ("fp32", "bf16"):
        config = preset_settings("resnet50", "tiny")
        config = replace(config, train=replace(config.train, precision=name))
        counted = sample(config)
        memory[name] = memory_of(counted, config, plan_batch(config.train, 1))
    assert memory["bf16"].weights_bytes == memory["fp32"].weights_bytes == 4 * counted.num_parameters
    assert 0.5 < memory["bf16"].activations_bytes / memory["fp32"].activations_bytes < 0.75


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", False),  # torch for CUDA 13
        ((7, 0), "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", True),  # for CUDA 12.6
        ((8, 9), "sm_75 sm_80 sm_86 sm_90", True),  # binaries of 8.6
        ((9, 0), "sm_80 sm_86", False),
        ((9, 0), "sm_80 compute_86", True),
        ((8, 0), "sm_86 sm_90a", False),
        ((9, 0), "sm_90a", True),
        ((12, 0), "sm_90 sm_100 compute_120", True),
        ((9, 4), "gfx90a gfx942", True),  # AMD's: nothing is known
        ((9, 0), "", True),
    ],
)
def test_a_torch_runs_on_the_gpus_that_it_is_built_for(
    capability: tuple[int, int], built: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs_on(capability, built.split()) == runs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.cuda, "get_arch_list", built.split)
    if runs:
        assert choose_device(DistributedConfig(), 1, 2) == torch.device("cuda", 1)
        return
    needed = "sm_{}{}".format(*capability)
    with pytest.raises(UsageError, match=rf"is {needed}, and torch .* built for {built.split()[0]}, .*12\.6"):
        choose_device(DistributedConfig(), 1, 2)
    assert choose_device(DistributedConfig(device="cpu"), 1, 2) == CPU
    memory = SimpleNamespace(name="V100", total_memory=2**34, major=7, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    check = doctor._gpus(torch)
    assert (check.state, check.name) == ("missing", "GPUs") and f"install one that is built for {needed}" in (
        check.remedy
    )


def test_a_model_is_used_in_the_precision_of_its_run_on_gpus_only(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[train]\nprecision = "bf16"\n[model]\npath = "x"\n')
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "config.json").write_text("{}")
    words = ["classify", "texts.tsv", "--model", str(tmp_path)]
    for told, on_gpu, on_cpu in ([], "bf16", "auto"), (["--precision", "fp16"], "fp16", "fp16"):
        _, bound, _ = predict.parse_args([*words, *told])
        settings = bound.arguments["settings"]
        assert (settings.precision_on("cuda"), settings.precision_on("cpu")) == (on_gpu, on_cpu)


def test_a_checkpoint_is_scored_in_the_precision_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise in that of the run, which is in its settings."""
    train(tmp_path, "bf16", until=1)
    commands: list[list[str]] = []
    monkeypatch.setattr("shoal.cli.use.RECIPES", {"script": SimpleNamespace(group="train", command="x")})
    monkeypatch.setattr(os, "execv", lambda program, words: commands.append(words))
    evaluate_checkpoint(tmp_path / "run")
    evaluate_checkpoint(tmp_path / "run", precision="fp32")
    assert ["--train.precision" in words for words in commands] == [False, True]
    assert commands[1][-2:] == ["--train.precision", "fp32"]


def test_autocast_computes_in_the_type_that_was_asked_for() -> None:
    x = torch.ones(2, 2)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with choose_precision(name, CPU).autocast():
            assert (x @ x).dtype == dtype


# ---- outputs and losses ------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Output:
    logits: Tensor
    others: list[Tensor]
    name: str


def test_outputs_of_any_form_are_fp32_and_keep_their_types() -> None:
    half, ids = torch.tensor([0.1, 3.0], dtype=torch.bfloat16), torch.tensor([1, 2])
    given = {
        "tuple": (half, ids, None, "text"),
        "pair": Pair(half.half(), {"deep": [half]}),
        "frozen": Output(half, [half, ids], "name"),
        "transformers": QuestionAnsweringModelOutput(start_logits=half, end_logits=half, attentions=(half,)),
    }
    found = in_fp32(given)
    assert found["tuple"][0].dtype == torch.float32 and found["tuple"][1] is ids
    assert found["tuple"][2:] == (None, "text")
    assert type(found["pair"]) is Pair and found["pair"].first.dtype == torch.float32
    assert torch.equal(found["pair"].second["deep"][0], half.float())
    assert type(found["frozen"]) is Output and found["frozen"].name == "name"
    assert [each.dtype for each in found["frozen"].others] == [torch.float32, torch.int64]
    model_output = found["transformers"]
    assert type(model_output) is QuestionAnsweringModelOutput
    assert model_output.start_logits is model_output["start_logits"] is model_output[0]
    assert {each.dtype for each in (*model_output[:2], *model_output.attentions)} == {torch.float32}
    assert given["frozen"].logits is half and given["transformers"].end_logits is half  # as they were
    double = torch.ones(2, dtype=torch.float64)
    assert in_fp32(double) is double


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_a_loss_outside_of_autocast_is_one_in_fp32(name: str, tmp_path: Path) -> None:
    """That of docs/run.md: a sum over samples, which in bf16 would have 8 bits, and in fp16 overflow."""
    torch.manual_seed(0)
    net, rows = nn.Linear(4, 2_000), torch.randn(64, 4)
    labels = torch.arange(64)
    (tmp_path / "meet").mkdir()
    loop = LoopConfig(precision=name)  # type: ignore[arg-type]
    with Run.open(tmp_path / "run", loop=loop, worker=alone(tmp_path / "meet")) as run:
        model = run.data_parallel(net)
        logits = model(rows)
        loss = 200 * F.cross_entropy(logits, labels, reduction="sum")
        loss.backward()
        with run.precision.autocast():
            rounded = net(rows)
    assert rounded.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    assert logits.dtype == loss.dtype == torch.float32
    assert torch.equal(logits, rounded.float())
    expected = 200 * F.cross_entropy(rounded.float(), labels, reduction="sum")
    assert torch.equal(loss, expected) and 65_504 < loss < torch.inf
    assert net.weight.grad is not None and net.weight.grad.isfinite().all()


def test_a_gan_trains_in_bf16_as_in_fp32(tmp_path: Path) -> None:
    """A loss through a second model: what the first one gives goes into it, wrapped or not."""
    (tmp_path / "meet").mkdir()
    loop = LoopConfig(precision="bf16")
    with Run.open(tmp_path / "run", loop=loop, worker=alone(tmp_path / "meet")) as run:
        judge = nn.Linear(3, 1)
        fake = run.data_parallel(nn.Linear(2, 3))(torch.ones(4, 2))
        assert judge(fake).dtype == torch.float32


# ---- what is stored, and a run that goes on ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    train: LoopConfig
    run: RunOutputConfig


def train(
    folder: Path, precision: str, until: int, wrap: Callable[[Run, nn.Module], nn.Module] = Run.data_parallel
) -> dict[str, Any]:
    """Train up to a step and save it; return the settings in its checkpoint."""
    net = nn.Linear(2, 2)
    config = Settings(
        train=LoopConfig(precision=precision),  # type: ignore[arg-type]
        run=RunOutputConfig(dir=folder / "run", checkpoint_frequency=100),
    )
    (meeting := folder / f"meet-{until}").mkdir()
    with Run.open(config=config, worker=alone(meeting)) as run:
        model = wrap(run, net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run.keep(model=net, optimizer=optimizer)
        for step in run.steps(torch.full((8, 2), 0.1), Sizes(global_batch_size=4), until=until):
            with step:
                for rows in step:
                    step.backward(0.1 * model(rows).sum() / step.num_samples)
                step.update(optimizer)
        assert run.finish() == EXIT_OK
        stored: dict[str, Any] = run._state()["config"]
        return stored


def precisions(run_dir: Path) -> list[str]:
    return [row.precision for row in read_record(run_dir) if isinstance(row, Start)]


def test_a_run_stores_what_auto_has_become_and_says_a_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = train(tmp_path, "auto", until=2)
    assert stored["train"]["precision"] == "fp32"
    assert load_toml(tmp_path / "run" / "config.toml")["train"]["precision"] == "fp32"
    train(tmp_path, "fp32", until=3)
    assert "precision:" not in capsys.readouterr().err
    assert train(tmp_path, "fp16", until=4)["train"]["precision"] == "fp16"
    assert "precision: fp32 up to step 3, fp16 from here on" in capsys.readouterr().err
    assert load_toml(tmp_path / "run" / "config.toml")["train"]["precision"] == "fp16"
    assert precisions(tmp_path / "run") == ["fp32", "fp32", "fp16"]
    (last,) = [row for row in read_record(tmp_path / "run") if isinstance(row, Step) and row.step == 4]
    assert last.loss_scale == 65_536


def test_a_run_says_why_it_is_in_fp32_on_a_gpu_without_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its device were such a GPU, with an option that cannot take fp16."""
    chosen = replace(choose_precision("fp32", CPU), note="precision fp32: this GPU has no bf16, and why")
    monkeypatch.setattr("shoal.train.run.agree_on_precision", lambda *given, no_fp16: chosen)
    train(tmp_path, "auto", until=1)
    assert capsys.readouterr().err.count("precision fp32: this GPU has no bf16, and why\n") == 1


def test_a_model_that_nothing_autocasts_is_recorded_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FSDP2 shards a model in place: it is not wrapped by ``data_parallel``, which would autocast it."""

    def shard(run: Run, net: nn.Module) -> nn.Module:
        return fully_shard(net)

    train(tmp_path, "bf16", until=1, wrap=shard)
    assert precisions(tmp_path / "run") == ["the script's own types"]
    assert "gloo, the script's own types" in capsys.readouterr().err


# ---- the loss scale of fp16 --------------------------------------------------------------------------------


def test_a_dynamic_scale_halves_at_an_overflow_and_doubles_after_the_interval() -> None:
    scale = LossScale(enabled=True, growth_interval=3)
    values = []
    for finite in (False, True, True, True, True, True, False, True):
        scale.update(finite=finite)
        values.append(scale.value / 65_536)
    assert values == [0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 0.5, 0.5]
    other = LossScale(enabled=True, growth_interval=3)
    other.load_state_dict(scale.state_dict())
    for one in (scale, other):
        one.update(finite=True)
        one.update(finite=True)
    assert other.value == scale.value == 65_536


def test_a_static_scale_stays_and_without_fp16_there_is_none() -> None:
    static = LossScale(enabled=True, static=128.0)
    static.update(finite=False)
    assert static.value == 128.0
    assert LossScale(enabled=False, static=128.0).value == 1.0
    with pytest.raises(UsageError, match=r"train\.loss_scale -1 must be above 0"):
        LossScale(enabled=True, static=-1)


def test_a_run_that_goes_on_in_fp16_begins_with_a_fresh_scale() -> None:
    """Of bf16 it has a scale of 1, from which it would take 32,000 steps to grow to where fp16 begins."""
    for without in (LossScale(enabled=False), LossScale(enabled=True, static=8.0)):
        scale = LossScale(enabled=True)
        scale.load_state_dict(without.state_dict())
        assert scale.value == 65_536
