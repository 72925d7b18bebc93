"""``shoal plan`` as it is typed: its answer, its files, and every refusal in one line with exit status 2."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plan_made import INSTANCE
from shoal.bench.host_entry import HostEntry
from shoal.bench.step_timing import TrainResult
from shoal.cli.app import main
from shoal.errors import EXIT_OK, EXIT_USAGE
from shoal.formatting import duration
from shoal.planner.convergence import convergence_of
from shoal.planner.hardware import Catalog
from shoal.recipes.bert import BertConfig
from shoal.recipes.mask_rcnn import MaskRCNNTrainConfig
from shoal.recipes.resnet50 import ResNetTrainConfig
from shoal.recipes.workloads import plan
from shoal.train.stopping import read_target

CLUSTER = ("--cluster", "8xp3dn.24xlarge")
SMALL = ("--model", "test_plan_command:small_model", "--global-batch", "512")
HUGE = ("--model", "test_plan_command:huge_model", "--global-batch", "512")


def linear(width: int) -> tuple[Any, dict[str, Any], int]:
    import torch
    from torch import nn

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x).sum()
            return out

    return Made(), {"x": torch.zeros(8, 16)}, 8


def small_model() -> tuple[Any, dict[str, Any], int]:
    return linear(32)


def huge_model() -> tuple[Any, dict[str, Any], int]:
    """A layer of 10 billion parameters, which no pipeline can cut."""
    return linear(100_000)


@pytest.fixture(autouse=True)
def _models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run ``shoal plan`` with these words; return the exit status."""
    monkeypatch.setattr(sys, "argv", ["shoal", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_answer_and_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {kind: tmp_path / f"plan.{kind}" for kind in ("json", "page", "trace")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    more = ("--helpers", "4xc5n.18xlarge", "--compare", "--sweep", "nodes=1..8", "--slow-hosts", "1x0.5")
    assert typed(monkeypatch, *SMALL, *CLUSTER, *more, *options) == EXIT_OK
    said = capsys.readouterr().out
    for words in (
        "time to train",
        "where the time goes",
        "the best layouts",
        "4 c5n.18xlarge helpers",
        "by-speed",
        "precision          fp16; needs a torch built for sm_70, such as 2.11 to 2.14 for CUDA 12.6",
    ):
        assert words in said
    plan = json.loads(files["json"].read_text())
    assert [p["cluster"] for p in plan["sweep"]] == [f"{n}xp3dn.24xlarge" for n in (1, 2, 4, 8)]
    assert sum(plan["best"]["where_s"].values()) == pytest.approx(plan["best"]["total_s"])
    assert {each["name"] for each in plan["unequal_hosts"]} == {"by-speed", "equal", "sync"}
    assert "by-speed" in files["page"].read_text()
    page = files["page"].read_text()
    assert page.count("<svg") == 2 and "polyline" in page
    for name in ("ring", "hierarchical-ring", "tree", "torus", "two-hop", "two-hop-helpers"):
        assert re.search(rf">{name}, \d+ %</text>", page), "a curve of each algorithm"
    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert {"forward", "backward", "optimizer"} <= {event["name"] for event in events}


@pytest.mark.parametrize(
    ("hosts", "built", "said"),
    [
        (
            "8xp3dn.24xlarge",
            "12.9",
            "9.9, has no kernels for V100-32GB: builds for CUDA 12.8 and later begin at",
        ),
        ("8xp3dn.24xlarge", "12.6", ""),
        ("8xp4d.24xlarge", "13.2", ""),
    ],
)
def test_the_torch_here_is_compared_with_the_gpus(
    hosts: str,
    built: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "__init__.py").touch()
    (tmp_path / "version.py").write_text(f"__version__ = '9.9'\ncuda: Optional[str] = '{built}'\n")
    where = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("shoal.cli.plan.find_spec", lambda name: where)
    assert typed(monkeypatch, "t5-small", "--cluster", hosts) == EXIT_OK
    text = capsys.readouterr().out
    assert said in text and ("the torch here" in text) == bool(said)
    assert ("fp32, since T5 overflows in fp16" in text) == ("p3dn" in hosts)
    assert ("of the fp32 peak of V100" in text) == ("p3dn" in hosts), "the rate is that of the precision"


def test_time_to_target_where_one_is_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.json"
    assert typed(monkeypatch, "resnet50", *CLUSTER, "--json", str(file)) == EXIT_OK
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "time to target" in line]
    plan = json.loads(file.read_text())
    whole, evaluation = plan["best"]["total_s"], plan["best"]["where_s"]["evaluation"]
    assert evaluation > 0 and plan["target"] == "top1>=0.759"
    assert f"{duration(whole)}, {duration(whole - evaluation)} without evaluation: top1>=0.759" in line


def rows_of(text: str) -> dict[str, str]:
    """Return the lines of a table by their hosts."""
    return {line.split()[0]: line for line in text.splitlines() if re.match(r"  \d+x", line)}


def test_several_clusters_are_compared_by_rates_of_one_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """p3dn.24xlarge has the chip of p3.16xlarge, more memory and four times the network, and is no slower.

    One has a published throughput, the other none: each alone, p3.16xlarge would be the faster.
    """
    clusters, file = ("8xp3.16xlarge", "8xp3dn.24xlarge", "8xp4d.24xlarge"), tmp_path / "plans.json"
    words = [word for each in clusters for word in ("--cluster", each)]
    assert typed(monkeypatch, "albert-base", *words, "--json", str(file)) == EXIT_OK
    out = capsys.readouterr().out
    assert "assumed for all: 35 % of each accelerator's peak" in out
    assert list(rows_of(out)) == list(clusters)
    tree = json.loads(file.read_text())
    seconds = {each["cluster"]: each["total_s"] for each in tree["clusters"]}
    assert seconds["8xp3dn.24xlarge"] <= seconds["8xp3.16xlarge"]
    cost = {each["cluster"]: each["dollars"] for each in tree["clusters"]}
    fastest, cheapest = min(seconds, key=lambda each: seconds[each]), min(cost, key=lambda each: cost[each])
    assert (tree["fastest"], tree["cheapest"]) == (fastest, cheapest)
    assert "fastest" in rows_of(out)[fastest] and "cheapest" in rows_of(out)[cheapest]
    assert shlex.join(tree["clusters"][clusters.index(fastest)]["command"]) in out
    alone = {each: plan("albert-base", each)[0].total_s for each in clusters[:2]}
    assert alone["8xp3.16xlarge"] < alone["8xp3dn.24xlarge"]


def test_numbers_of_hosts_are_compared_by_the_published_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the post on ALBERT; hosts over which the batch does not divide are named beneath."""
    words = ("albert-base", "--cluster", "1xp3dn.24xlarge", *CLUSTER, "--cluster", "3xp3dn.24xlarge")
    assert typed(monkeypatch, *words) == EXIT_OK
    out = capsys.readouterr().out
    assert "basis              published: " in out and "3xp3dn.24xlarge: train.global_batch_size" in out
    best = plan("albert-base", "8xp3dn.24xlarge")[0]
    row = rows_of(out)["8xp3dn.24xlarge"]
    assert f"{best.layouts[0].micro_batch} × {best.steps[0].micro_batches}" in row
    assert duration(best.total_s) in row and f"${best.dollars:,.0f}" in row and row.endswith("fastest")


def test_limits_choose_a_cluster_of_a_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plans.json"
    words = ("albert-base", "--cluster", "2..16xp4d.24xlarge", "--json", str(file))
    assert typed(monkeypatch, *words) == EXIT_OK
    tree = json.loads(file.read_text())
    seconds = {each["cluster"]: each["total_s"] for each in tree["clusters"]}
    assert list(seconds) == [f"{count}xp4d.24xlarge" for count in (2, 4, 8, 16)] and tree["chosen"] is None
    cost = {each["cluster"]: each["dollars"] for each in tree["clusters"]}
    capsys.readouterr()
    limit = f"{math.ceil(seconds['4xp4d.24xlarge'])}s"
    assert typed(monkeypatch, *words, "--by", limit) == EXIT_OK
    assert "chosen             4xp4d.24xlarge, the cheapest of 3 that take at most" in capsys.readouterr().out
    assert json.loads(file.read_text())["chosen"] == "4xp4d.24xlarge"
    budget = str(cost["8xp4d.24xlarge"])
    assert typed(monkeypatch, *words, "--budget", budget) == EXIT_OK
    assert "to train on 8xp4d.24xlarge, on each host" in capsys.readouterr().out
    assert typed(monkeypatch, "albert-base", "--cluster", "8xp4d.24xlarge", "--budget", "1") == EXIT_USAGE
    assert "none of 1 clusters would cost at most 1 dollars" in capsys.readouterr().err


def test_this_host_is_written_as_a_catalog(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = HostEntry(
        device="CPU",
        num_devices=1,
        memory_gib=64,
        memory_gbyte_per_s=100,
        clock_ghz=2.5,
        tflops={"fp32": 1.5},
        nic_gbit_per_s=25,
    )
    monkeypatch.setattr("shoal.bench.host_entry.measure_host", lambda: made)
    path = tmp_path / "mine.toml"
    assert typed(monkeypatch, "--measure", str(path)) == EXIT_OK
    assert f"shoal plan RECIPE --cluster 1xmine --catalog {path}" in capsys.readouterr().out
    assert typed(monkeypatch, *SMALL, "--cluster", "4xmine", "--catalog", str(path)) == EXIT_OK
    said = capsys.readouterr().out
    assert "precision          fp32" in said and "assumed: 35 % of the fp32 peak of mine" in said


def test_a_price_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    assert typed(monkeypatch, *SMALL, *CLUSTER, "--price", "10", "--json", str(file)) == EXIT_OK
    best = json.loads(file.read_text())["best"]
    assert best["dollars"] == pytest.approx(8 * 10 * best["total_s"] / 3600)


def test_helpers_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    words = ("bert-base", "--cluster", "8xp3dn.24xlarge", "--helpers", "auto", "--json", str(file))
    assert typed(monkeypatch, *words) == EXIT_OK
    tree = json.loads(file.read_text())
    with_helpers = {each["helpers"]: each["total_s"] for each in tree["plans"] if each["helpers"]}
    assert {"2xc5n.18xlarge", "4xc5n.18xlarge", "8xc5n.18xlarge"} <= set(with_helpers)
    assert tree["best"]["total_s"] == min(each["total_s"] for each in tree["plans"])
    assert tree["best"]["helpers"] == min(with_helpers, key=lambda each: with_helpers[each])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--sweep", "nodes=1..4"), "--sweep describes one plan: give one --cluster"),
        (("--throughput", "900"), "measured on one kind of host does not hold for 2 of them"),
        (("--price", "9"), "--price 9 is of one kind of host, and there are 2 (p3dn.24xlarge, p5.48xlarge)"),
    ],
    ids=["sweep", "throughput", "price"],
)
def test_options_of_one_plan_do_not_go_with_several_clusters(
    words: tuple[str, ...],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert typed(monkeypatch, *SMALL, *CLUSTER, "--cluster", "1xp5.48xlarge", *words) == EXIT_USAGE
    assert reason in capsys.readouterr().err


def test_hosts_of_a_sweep_that_do_not_divide_the_batch_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("albert-tiny", "--cluster", "2xp3dn.24xlarge", "--sweep", "nodes=1..3", "--global-batch", "64")
    assert typed(monkeypatch, *words) == EXIT_OK
    said = capsys.readouterr().out
    assert "3xp3dn.24xlarge: train.global_batch_size 64 does not divide over 24 workers" in said


def test_a_preset_has_its_own_steps() -> None:
    def steps(name: str) -> list[int]:
        return [run.num_steps for run in plan(name, "1xp5.48xlarge", algorithms=["ring"])[0].runs]

    assert steps("bert-large") == [7038, 1563]
    assert steps("bert-large-lans") == [3519, 782]
    assert steps("t5-base") == steps("t5-3b") == [1_000_000]
    assert steps("mask_rcnn-coco-1x") == [90_000]
    assert steps("resnet50-imagenet-16k") == [7038]  # 90 epochs of 1,281,167 images


def test_the_torch_here_is_read_without_being_imported() -> None:
    import torch

    from shoal.cli.plan import _torch_build

    cuda = tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)
    assert _torch_build() == (str(torch.__version__), cuda)


def planned(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> dict[str, Any]:
    """Return what ``shoal plan --json`` writes."""
    file = folder / "plan.json"
    assert typed(monkeypatch, *words, "--json", str(file)) == EXIT_OK
    tree: dict[str, Any] = json.loads(file.read_text())
    return tree


def test_a_preset_is_an_option_of_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_option = planned(monkeypatch, tmp_path, "albert", "--preset", "tiny", *CLUSTER)
    by_name = planned(monkeypatch, tmp_path, "albert-tiny", *CLUSTER)
    assert by_option["best"] == by_name["best"] and by_option["command"] == by_name["command"]


def test_settings_of_the_recipe_are_planned_and_in_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = planned(monkeypatch, tmp_path, "albert-base", *CLUSTER)
    words = ("--train.total-steps=77", "--train.precision", "fp32", "--train.global-batch-size", "8192")
    own = planned(monkeypatch, tmp_path, "albert-base", *CLUSTER, *words)
    assert own["best"]["num_steps"] == [77] and own["best"]["layouts"][0]["global_batch"] == 8192
    assert usual["basis"][0].startswith("published") and own["basis"][0].startswith(
        "assumed: 35 % of the fp32"
    )
    command = shlex.join(own["command"])
    assert "--train.total-steps=77 --train.precision fp32" in command
    assert command.count("global-batch-size 8192") == 1 == command.count("global-batch-size")
    assert "precision          fp32;" in capsys.readouterr().out


def test_a_changed_model_or_optimizer_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ALBERT's parameters are those of one layer; AdamW has two moments, Muon one of matrices."""
    usual = planned(monkeypatch, tmp_path, "albert-tiny", *CLUSTER)["best"]["memory_bytes"]
    larger = planned(monkeypatch, tmp_path, "albert-tiny", *CLUSTER, "--model.intermediate-size", "4096")
    assert larger["best"]["memory_bytes"] > usual
    small = ("lm", "--preset", "tiny", "--cluster", "1xp4d.24xlarge")
    adamw = planned(monkeypatch, tmp_path, *small)["best"]["memory_bytes"]
    muon = planned(monkeypatch, tmp_path, *small, "--optim.optimizer", "muon")
    assert muon["best"]["memory_bytes"] < adamw and "--optim.optimizer muon" in shlex.join(muon["command"])


def test_a_configuration_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=1000)
    config.save_pretrained(tmp_path)
    words = ("--global-batch", "256", "--sequence-length", "64", "--cluster", "1xp4d.24xlarge")
    tree = planned(monkeypatch, tmp_path, f"hf:{tmp_path / 'config.json'}", *words)
    assert tree["command"] == [] and tree["best"]["layouts"][0]["global_batch"] == 256
    counted = plan(f"hf:{tmp_path}", "1xp4d.24xlarge", global_batch=256, sequence_length=64)[0]
    workload = counted.training.parts[0].workload
    assert workload.num_parameters == sum(each.numel() for each in LlamaForCausalLM(config).parameters())
    assert (workload.tokens_per_sample, workload.unit) == (64, "sequences")


def test_published_targets_are_what_the_recipes_take() -> None:
    for name, recipe in (("resnet50", ResNetTrainConfig), ("mask-rcnn", MaskRCNNTrainConfig)):
        assert read_target(convergence_of(name).target, recipe().scores)
    assert read_target(convergence_of("bert-large-mlperf").target, BertConfig().scores)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*SMALL, "--cluster", "8xp3dn.24xlage"), "not in the catalog. Did you mean 'p3dn.24xlarge'?"),
        ((*SMALL, *CLUSTER, "--helpers", "4xc5n.18xlrge"), "Did you mean 'c5n.18xlarge'?"),
        (("resnet5", *CLUSTER), "recipe 'resnet5' is not known. Did you mean 'resnet50'?"),
        (CLUSTER, "name a recipe"),
        (("resnet50", *SMALL, *CLUSTER), "not both"),
        (
            ("t5-base", "--cluster", "3xp3dn.24xlarge"),
            "train.global_batch_size 2048 does not divide over 24 workers; the nearest sizes that do are",
        ),
        (("bert-large", *CLUSTER, "--sequence-length", "64"), "has phases of 128 and 512 tokens"),
        ((*SMALL[:2], *CLUSTER), "--model needs --global-batch"),
        ((*SMALL[:2], "--global-batch", "0", *CLUSTER), "batch (--global-batch) is 0; it must be at least 1"),
        (("--model", "f", *SMALL[2:], *CLUSTER), "not of the form module:function"),
        ((*SMALL, *CLUSTER, "--by", "noon"), "--by 'noon' is not a time; write it as 90min, 12h or 1d6h"),
        (("albert-tiny",), "name the hosts that train, such as --cluster 8xp4d.24xlarge"),
        (
            ("albert-tiny", "--clster", "8xp4d.24xlarge"),
            "Unknown option: --clster. Did you mean '--cluster'?",
        ),
        (("albert-tiny", "base", *CLUSTER), "'base' is not understood: shoal plan takes one recipe"),
        (("albert", "--preset", "tin", *CLUSTER), "albert has no preset tin: choose one of"),
        (("gpt-13b", "--preset", "base", *CLUSTER), "--preset base is of a recipe, and 'gpt-13b' is none"),
        (("albert-tiny", "--train.totl-steps", "5", *CLUSTER), "Did you mean --train.total-steps?"),
        (("albert-tiny", "--parallel.pipeline", "2", *CLUSTER), "the plan chooses stages and shards"),
        (("hf:nowhere", *CLUSTER), "hf: needs --global-batch"),
        (("hf:nowhere", *CLUSTER, "--global-batch", "8"), "hf:nowhere is no configuration of transformers"),
        ((*SMALL, *CLUSTER, "--preset", "base"), "--model is not a recipe: leave --preset"),
        ((*SMALL, *CLUSTER, "--price", "-5"), "the price (--price) is -5 dollars an hour"),
        ((*SMALL, *CLUSTER, "--price", "sport"), "--price 'sport' is no market. Did you mean 'spot'?"),
        ((*SMALL, *CLUSTER, "--price", "spot", "--goal", "cost"), "has no price per hour in the catalog"),
        ((*SMALL, *CLUSTER, "--budget", "-5"), "--budget is -5; it must be a positive number"),
        ((*SMALL, "--cluster", "8..2xp4d.24xlarge"), "the smaller number first"),
        ((*SMALL, "--cluster", "2xDGX-2", "--by", "9d"), "DGX-2 has no price per hour"),
        ((*SMALL, *CLUSTER, "--sweep", "1..8"), "not of the form nodes=1..256"),
        ((*SMALL, *CLUSTER, "--sweep", "nodes=8..1"), "the smaller number first"),
        ((*SMALL, *CLUSTER, "--slow-hosts", "half"), "'half' is not of the form 1x0.5"),
        ((*SMALL, *CLUSTER, "--slow-hosts", "9x0.5"), "9 slow hosts of 8"),
        ((*SMALL, *CLUSTER, "--jitter", "-1"), "--jitter -1 must lie between 0 and 2"),
        ((*SMALL, *CLUSTER, "--throughput", "-1"), "(--throughput) is -1.0; it must be a positive number"),
        ((*SMALL, *CLUSTER, "--algorithm", "rings"), "Did you mean 'ring'?"),
        ((*SMALL, *CLUSTER, "--algorithm", "two-hop-helpers"), "two-hop-helpers needs --helpers"),
        (
            (*SMALL, *CLUSTER, "--algorithm", "ring", "--helpers", "4xc5n.18xlarge"),
            "--algorithm ring does not use helper hosts, and --helpers 4xc5n.18xlarge are named",
        ),
        ((*SMALL, "--cluster", "8xDGX-2", "--goal", "cost"), "DGX-2 has no price per hour"),
        ((*SMALL, *CLUSTER, "--measured", "absent.json"), "--measured absent.json cannot be read"),
    ],
)
def test_refusals_are_one_line(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert typed(monkeypatch, *words) == EXIT_USAGE
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_what_does_not_fit_says_how_much_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert typed(monkeypatch, *HUGE, *CLUSTER) == EXIT_USAGE
    said = capsys.readouterr().err
    # The stage with that layer alone has 40 GB of weights and gradients.
    assert "fits on no layout of 8xp3dn.24xlarge" in said
    assert "GiB more than there are" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("price_per_hour = 7.5", "price_per_hour = -7.5"), "price_per_hour is -7.5; it must be at least 0"),
        (("nic_gbit_per_s = 40\n", ""), "mine.toml: instance 'mine' lacks nic_gbit_per_s; add it"),
        (
            ("num_accelerators = 4\n", "num_accelerator = 4\n"),
            "unknown key 'num_accelerator'. Did you mean 'num_accelerators'?",
        ),
    ],
)
def test_what_is_wrong_in_a_catalog(
    change: tuple[str, str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(INSTANCE)
    words = (*SMALL, "--cluster", "4xmine", "--catalog", str(path))
    assert typed(monkeypatch, *words) == EXIT_OK
    assert "invoice of May" in capsys.readouterr().out
    path.write_text(INSTANCE.replace(*change))
    assert typed(monkeypatch, *words) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_a_measured_file_of_another_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.json"
    TrainResult(
        recipe="albert-base",
        sequence_length=512,
        num_parameters=12_000_000,
        device="device",
        num_devices=8,
        precision="fp32",
        global_batch=8,
        micro_batch=1,
        samples_s=(1.0,),
        parts_s={"forward": 1.0},
        peak_memory_bytes=1,
        flops_per_sample=1.0,
        matmul_flops_per_s=1.0,
    ).write(path)
    assert typed(monkeypatch, *SMALL, *CLUSTER, "--measured", str(path)) == EXIT_USAGE
    assert f"--measured {path} is of recipe albert-base, not of {SMALL[1]}" in capsys.readouterr().err


def test_the_time_to_read_the_data_is_added_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """150 GB at 1 GB/s of the store, or at a host's 100 Gbit/s as the catalog corrects them."""
    times = []
    for number, words in enumerate(
        ((), ("--data-bytes", "150GB"), ("--data-bytes", "150GB", "--store-rate", "1GB"))
    ):
        out = tmp_path / f"{number}.json"
        assert typed(monkeypatch, *SMALL, *CLUSTER, *words, "--json", str(out)) == EXIT_OK
        times.append(json.loads(out.read_text())["best"]["total_s"])
    rate = Catalog().machines("8xp3dn.24xlarge").instance.effective_nic
    assert times[2] - times[0] == pytest.approx(150.0)
    assert times[1] - times[0] == pytest.approx(150e9 / rate)
    said = " ".join(capsys.readouterr().out.split())
    assert "data read once 150 GB, 2 min 30 s before the first step: 1 GB/s of the store" in said
    assert f"before the first step: {rate / 1e9:.3g} GB/s of a host's network" in said
    cached = ("--data-bytes", "150GB", "--cache-bytes", "10GB")
    assert typed(monkeypatch, *SMALL, *CLUSTER, *cached) == EXIT_OK
    said = " ".join(capsys.readouterr().out.split())
    assert "data read once 80 GB, " in said and "data on a host 10 of 150 GB then; the rest comes" in said
    for words, message in (
        (("--store-rate", "1GB"), "give their size with --data-bytes"),
        (("--data-bytes", "much"), "--data-bytes 'much' must be a number with a unit"),
        (("--data-bytes", "1GB", "--store-rate", "0"), "--store-rate 0 must be at least one byte"),
        (("--cache-bytes", "1GB"), "--cache-bytes is for data in a store: give their size with --data-bytes"),
        (("--data-bytes", "1GB", "--cache-bytes", "0"), "--cache-bytes 0 must be at least one byte"),
    ):
        assert typed(monkeypatch, *SMALL, *CLUSTER, *words) == EXIT_USAGE
        assert message in " ".join(capsys.readouterr().err.split())
