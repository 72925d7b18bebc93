"""The command line as a user meets it: real processes, what they print, how they exit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App, ArgumentCollection

from forked import shoal
from shoal.cli.settings import shortened
from shoal.env.machine import num_gpus
from synthetic_text import prepare, random_documents


def said(result: subprocess.CompletedProcess[str]) -> str:
    """Return what was printed, with the frames and line breaks of the boxes taken out."""
    words = (result.stdout + result.stderr).replace("│", " ").split()
    return " ".join(words)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared directory of a few documents with a vocabulary of 100."""
    folder = tmp_path_factory.mktemp("text")
    splits = {split: random_documents([100] * 5, vocab_size=100) for split in ("train", "validation")}
    prepare(folder, splits, vocab_size=100)
    return folder


TRAIN = ("train", "albert", "--preset", "tiny")


def test_dry_run_prints_settings_arithmetic_and_memory_and_starts_nothing(data: Path, tmp_path: Path) -> None:
    arguments = ("--data.path", str(data), "--run.dir", str(tmp_path / "run"), "--workers", "2", "--dry-run")
    result = shoal(*TRAIN, *arguments, "--train.micro-batch-size", "4")
    assert result.returncode == 0, result.stderr
    assert "4 sequences × 16 accumulation steps × 2 workers = 128 sequences a step" in result.stdout
    assert "parameters   529,410" in result.stdout
    assert "memory       about" in result.stdout
    if not num_gpus():
        assert "\nbackend      shoal (workers on CPUs); gloo if its process group in C++" in result.stdout
    assert not (tmp_path / "run").exists()
    toml = result.stdout.partition("\nbatch ")[0]
    assert tomllib.loads(toml)["train"]["micro_batch_size"] == 4


def test_a_dry_run_divides_the_optimizer_state_of_the_fullest_worker(data: Path) -> None:
    """ALBERT tiny has 8 bytes of LAMB's state for each of 529,410 parameters, its largest 262,144."""
    arguments = (*TRAIN, "--data.path", str(data), "--workers", "4", "--dry-run", "--train.shard-optimizer")
    result = shoal(*arguments)
    assert result.returncode == 0, result.stderr
    assert "optimizer 2.0 MiB" in result.stdout  # that of the embeddings, 2,048 × 128, alone
    refused = shoal(*arguments, "--parallel.shard")
    assert refused.returncode == 2
    assert "train.shard_optimizer True does not go with a model in stages or shards" in refused.stderr


def test_a_dry_run_for_hosts_of_the_catalog(data: Path) -> None:
    """Workers, precision, memory, backend and network are theirs, whatever this host has."""
    job = (*TRAIN, "--data.path", str(data))
    options = ("--train.micro-batch-size", "1", "--train.precision", "auto")
    for cluster, precision, room in (
        ("8xp4d.24xlarge", "64 A100-40GB in bf16", "36.00 of 40"),
        ("4xp3.16xlarge", "32 V100-16GB in fp16", "14.40 of 16"),
    ):
        result = shoal(*job, "--dry-run", "--cluster", cluster, *options)
        assert result.returncode == 0, result.stderr
        num_workers = int(precision.split()[0])
        assert (
            f"1 sequence × {128 // num_workers} accumulation steps × {num_workers} workers" in result.stdout
        )
        assert f"devices      {precision}; {room} GiB count\n" in result.stdout
        assert "\nbackend      nccl, or shoal if it is 10 % faster" in result.stdout
    assert "network      25 Gbit/s a host (ethernet)" in result.stdout
    for options, message in (
        (("--cluster", "8xp4d.24xlarge"), "--cluster 8xp4d.24xlarge is for dry runs: add --dry-run"),
        (
            ("--dry-run", "--cluster", "8xp4d.24xlarge", "--nnodes", "4"),
            "--nnodes 4 and --workers None do not",
        ),
        (("--dry-run", "--cluster", "8xp4d.24xlarge", "--workers", "16"), "with 8 accelerators each"),
        (("--dry-run", "--cluster", "8xp4x"), "instance type 'p4x' is not in the catalog"),
    ):
        refused = shoal(*job, *options)
        assert refused.returncode == 2 and message in said(refused)


def test_a_worker_that_does_not_fit_the_hosts_of_a_dry_run(tmp_path: Path) -> None:
    prepare(tmp_path, {"train": random_documents([900, 700], vocab_size=32_000)}, vocab_size=32_000)
    job = ("train", "t5", "--preset", "3b", "--data.path", str(tmp_path), "--dry-run")
    result = shoal(*job, "--cluster", "1xp3.16xlarge", "--train.micro-batch-size", "1")
    assert "8 V100-16GB in fp32; 14.40 of 16 GiB count, and a worker lacks" in result.stdout


def test_a_dry_run_refuses_helpers_that_would_be_idle(data: Path) -> None:
    job = (
        *TRAIN,
        "--data.path",
        str(data),
        "--on",
        "emulated",
        "--hosts",
        "2",
        "--helpers",
        "1",
        "--dry-run",
    )
    result = shoal(*job, "--distributed.backend", "gloo")
    assert result.returncode == 2
    assert "distributed.backend gloo does not use helper hosts, and 1 helper is named" in said(result)
    result = shoal(*job, "--distributed.wire", "int8")
    assert result.returncode == 2
    assert "distributed.wire int8 does not use helper hosts, and 1 helper is named" in said(result)
    assert "\nbackend      shoal (1 helper is named)\n" in shoal(*job).stdout


def test_options_go_before_the_file_and_the_file_before_the_preset(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[train]\ntotal_steps = 900\nseed = 7\n[optim]\nlearning_rate = 1\n")
    result = shoal(
        *TRAIN, "--data.path", str(data), "--config", str(file), "--train.total_steps", "800", "--dry-run"
    )
    assert result.returncode == 0, result.stderr
    resolved = tomllib.loads(result.stdout.partition("\nbatch ")[0])
    assert resolved["train"]["total_steps"] == 800
    assert resolved["train"]["seed"] == 7
    assert resolved["optim"]["learning_rate"] == 1.0
    assert resolved["train"]["global_batch_size"] == 128  # the preset's
    again = tmp_path / "again.toml"
    again.write_text(result.stdout.partition("\nbatch ")[0])
    assert shoal(*TRAIN, "--config", str(again), "--dry-run").stdout == result.stdout


def test_total_steps_alone_shorten_a_preset(data: Path) -> None:
    command = (*TRAIN, "--data.path", str(data), "--dry-run", "--train.total-steps", "60")
    result = shoal(*command)
    assert result.returncode == 0, said(result)
    resolved = tomllib.loads(result.stdout.partition("\nbatch ")[0])
    assert (resolved["train"]["total_steps"], resolved["optim"]["warmup_steps"]) == (60, 5)
    changes = "optim.warmup_steps 5 instead of 200, run.log_frequency 3 instead of 50"
    assert result.stderr == f"shoal: preset tiny, adapted: {changes}\n"
    result = shoal(*command, "--optim.warmup-steps", "60", "--run.log-frequency", "50")
    resolved = tomllib.loads(result.stdout.partition("\nbatch ")[0])
    assert (resolved["optim"]["warmup_steps"], resolved["run"]["log_frequency"]) == (60, 50)
    assert result.stderr == ""


def test_total_steps_alone_shorten_both_phases_of_bert(data: Path) -> None:
    command = ("train", "bert", "--preset", "tiny", "--data.path", str(data), "--dry-run")
    result = shoal(*command, "--train.total-steps", "60")
    assert result.returncode == 0, said(result)
    resolved = tomllib.loads(result.stdout.partition("\nbatch ")[0])
    first, second = resolved["phase1"], resolved["phase2"]
    assert (first["total_steps"], second["total_steps"]) == (47, 13)  # 60 × 900 / 1,150, and the rest
    assert (first["warmup_steps"], second["warmup_steps"]) == (100 * 47 // 900, 50 * 13 // 250)
    assert resolved["run"]["log_frequency"] == 3
    result = shoal(*command, "--train.total-steps", "60", "--phase1.total-steps", "50")
    assert result.returncode == 2
    assert "train.total_steps 60 is not the sum of phase1.total_steps 50" in said(result)


def test_total_steps_or_epochs_alone_shorten_resnet() -> None:
    command = ("train", "resnet50", "--preset", "tiny", "--dry-run")
    steps = shoal(*command, "--train.total-steps", "60")
    assert steps.returncode == 0, said(steps)
    # 5,000 images in batches of 128: 195 steps in 5 epochs, 39 of them warm-up
    assert "epochs       1.536 of 5,000 images = 60 steps" in steps.stdout
    assert f"in {39 * 60 // 195} steps, then" in steps.stdout
    epochs = shoal(*command, "--train.total-epochs", "0.5")
    assert epochs.returncode == 0, said(epochs)
    assert "epochs       0.5 of 5,000 images = 20 steps" in epochs.stdout
    assert "optim.warmup_epochs 0.1 instead of 1" in epochs.stderr


def test_every_preset_can_be_shortened_and_stays_as_it_is_when_it_is_not() -> None:
    found = 0
    for file in resources.files("shoal.recipes").joinpath("presets").iterdir():
        for preset in file.iterdir():
            tree = tomllib.loads(preset.read_text())
            for section, values in tree.items():
                if steps := values.get("total_steps"):
                    option = f"--{section}.total-steps"
                    short, changes = shortened(tree, {option: "10"})
                    schedule = short.get("optim" if section == "train" else section, {})
                    assert schedule.get("warmup_steps", 0) + schedule.get("constant_steps", 0) <= 10
                    assert all(step < 10 for step in schedule.get("milestones", ()))
                    assert schedule.get("hold_steps", 1) >= 1
                    assert all("instead of" in change for change in changes)
                    assert shortened(tree, {option: str(steps)}) == (tree, [])
                    assert shortened(tree, {option: str(2 * steps)}) == (tree, [])
                    assert shortened(tree, {}) == (tree, [])
                    found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("recipe", "preset"),
    [
        ("albert", "xlarge"),
        # quick in test_a_dry_run_of_bert_shows_both_phases
        pytest.param("bert", "large-lans", marks=pytest.mark.slow),
        *(pytest.param("albert", preset, marks=pytest.mark.slow) for preset in ("tiny", "base", "large")),
        *(pytest.param("bert", preset, marks=pytest.mark.slow) for preset in ("tiny", "base", "large")),
    ],
)
def test_every_preset_resolves(data: Path, recipe: str, preset: str) -> None:
    result = shoal("train", recipe, "--preset", preset, "--data.path", str(data), "--dry-run")
    assert result.returncode == 0, result.stderr


def test_a_dry_run_of_bert_shows_both_phases(data: Path, tmp_path: Path) -> None:
    layers = ("--model.num-hidden-layers", "2")  # of 24, whose memory takes seconds to count
    command = ("train", "bert", "--data.path", str(data), "--workers", "1536", "--dry-run", *layers)
    result = shoal(*command, "--preset", "large-lans")
    assert result.returncode == 0, result.stderr
    assert "phase1: 64 sequences × 1 accumulation step × 1536 workers = 98,304" in result.stdout
    assert "phase1: 3,519 steps, 345,931,776 sequences of 128 tokens" in result.stdout
    assert "phase2: 11 sequences × 2 accumulation steps × 1536 workers = 33,792" in result.stdout
    assert "phase2: 782 steps, 26,425,344 sequences of 512 tokens" in result.stdout
    again = tmp_path / "again.toml"
    again.write_text(result.stdout.partition("\nbatch ")[0])
    # Read back over a preset that clips, it still does not.
    assert tomllib.loads(again.read_text())["optim"]["max_grad_norm"] == "none"
    assert shoal(*command, "--preset", "large", "--config", str(again)).stdout == result.stdout


def test_finetuning_at_several_steps(data: Path, tmp_path: Path) -> None:
    question = {"id": "1", "question": "q", "answers": [{"text": "w", "answer_start": 0}]}
    paragraphs = [{"context": "w", "qas": [question]}]
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    files = ("--finetune.data", str(squad), "--finetune.eval", str(squad), "--finetune.max-seq-length", "64")
    command = (*TRAIN, "--data.path", str(data), "--finetune.at", "400", "800", *files, "--dry-run")
    result = shoal(*command)
    assert result.returncode == 0, said(result)
    resolved = result.stdout.partition("\nbatch ")[0]
    assert tomllib.loads(resolved)["finetune"]["at"] == [400, 800]
    (tmp_path / "again.toml").write_text(resolved)
    assert shoal(*TRAIN, "--config", str(tmp_path / "again.toml"), "--dry-run").stdout == result.stdout
    squad.write_text("{}")
    result = shoal(*command)
    assert result.returncode == 2 and "squad.json" in said(result) and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train.totl-steps", "5"), "Did you mean --train.total-steps?"),
        (("--train.total-steps", "many"), 'unable to convert "many" into int'),
        (("--train.global-batch-size", "33", "--workers", "2"), "does not divide over 2 workers"),
        (("--train.global-batch-size", "0"), "train.global_batch_size 0 must be at least 1"),
        (("--model.vocab-size", "90"), "90"),
        (("--optim.learning-rate", "-1"), "optim.learning_rate -1.0 must be a number of at least 0"),
        (("--optim.power", "-1"), "optim.power -1.0 must be a number of at least 0"),
        (("--optim.end-learning-rate", "nan"), "optim.end_learning_rate nan must be a number of at least 0"),
        (("--optim.warmup-steps", "4000"), "warmup_steps 4000 must lie between 0 and train.total_steps 2400"),
        (("--data.max-seq-length", "256"), "max_seq_length 256 is more than model.max_position_embeddings"),
        (("--config", "nowhere.toml"), "nowhere.toml does not exist"),
        (("--run.dir", "/dev/null/run"), "run.dir /dev/null/run cannot be written"),
        (("--nnodes", "2"), "--rdzv HOST:PORT"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_errors_are_one_message_and_exit_code_2(
    data: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = shoal(*TRAIN, "--data.path", str(data), *arguments, cwd=tmp_path)
    assert result.returncode == 2, said(result)
    assert message in said(result)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("recipe", "message"), [("albert", "nowhere"), ("bert", "--phase2.total-steps 0"), ("t5", "nowhere")]
)
def test_layouts_are_options(recipe: str, message: str, tmp_path: Path) -> None:
    layout = ("--parallel.pipeline", "2", "--parallel.schedule", "1f1b", "--workers", "2")
    result = shoal("train", recipe, "--preset", "tiny", "--data.path", str(tmp_path / "nowhere"), *layout)
    assert result.returncode == 2, said(result)
    assert message in said(result) and "Traceback" not in result.stderr


def test_an_unknown_preset_is_named() -> None:
    result = shoal("train", "albert", "--preset", "tinny")
    assert result.returncode == 2
    assert 'Did you mean "tiny"?' in said(result)


@pytest.mark.parametrize("text", ["[train]\ntotl_steps = 5\n", "[trian]\ntotal_steps = 5\n"])
def test_a_misspelt_key_in_a_file_is_found(data: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    result = shoal(*TRAIN, "--data.path", str(data), "--config", "mine.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert "mine.toml" in said(result) and "Did you mean --train.total-steps?" in said(result)


def test_broken_toml_names_file_and_line(data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[train]\ntotal_steps = = 5\n")
    result = shoal(*TRAIN, "--data.path", str(data), "--config", "mine.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert "mine.toml" in said(result) and "line 2" in said(result)


def test_data_must_be_named() -> None:
    result = shoal(*TRAIN)
    assert result.returncode == 2
    assert "data.path is not set" in said(result) and "shoal prepare text" in said(result)


@pytest.mark.parametrize("arguments", [(), ("train",), ("prepare",), ("train", "albert"), ("report",)])
def test_help_teaches(arguments: tuple[str, ...]) -> None:
    result = shoal(*arguments, "--help")
    assert result.returncode == 0
    assert "Usage: shoal" in result.stdout


@pytest.mark.parametrize(
    ("group", "command"), [("train", "albert"), ("train", "resnet50"), ("finetune", "t5")]
)
def test_help_is_in_groups_with_what_is_required_first_and_an_example(group: str, command: str) -> None:
    from shoal.cli.app import app
    from shoal.recipes import RECIPES

    recipe = next(r for name, r in RECIPES.items() if (r.group, r.command or name) == (group, command))
    help_text = shoal(group, command, "--help").stdout
    assert " ".join(help_text.partition("╭")[0].split()).endswith(f"Example: {recipe.example}")
    titles = re.findall("^╭─ (.*?) ─", help_text, re.MULTILINE)
    assert (
        titles[:3] == ["Required", "Preset and file", "Length, batch, precision"] and titles[-1] == "Workers"
    )
    assert len(set(titles)) == len(titles) > 6 and "Parameters" not in titles
    required = help_text.partition("╭─ Required")[2].partition("╰")[0]
    assert ("│ --data.path " in required) == (group == "train")
    assert ("│ --model " in required) == (group == "finetune")
    # the example is one that the command understands
    _, bound, ignored = app.parse_args(recipe.example.split()[1:], exit_on_error=False, print_error=False)
    assert not ignored and bound.arguments


def test_help_fits_two_screens_and_has_the_options_of_the_chosen_optimizer_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shoal.cli import train
    from shoal.recipes import RECIPES

    def shown(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["shoal", *options])
        monkeypatch.setenv("COLUMNS", "100")
        train.__getattr__(name)(options, result_action="return_value")
        return capsys.readouterr().out

    for name in RECIPES:
        assert 50 < len(shown(name, "--help").splitlines()) <= 100, name
    sgd, every = shown("resnet50", "--help"), shown("resnet50", "--help-all")
    novograd = shown("resnet50", "--optim.optimizer", "novograd", "--help")
    lars = shown("resnet50", "--preset=imagenet-lars-32k", "--help")
    for option, texts in (
        ("--optim.momentum ", [sgd, lars, every]),
        ("--optim.lars-form ", [lars, every]),
        ("--optim.reg-inside-moment ", [novograd, every]),
        ("--optim.clip ", [every]),
        ("--distributed.timeout-s ", [every]),
    ):
        assert [text for text in (sgd, novograd, lars, every) if f"│ {option}" in text] == texts, option
    assert "(novograd, lamb, adamw)" in " ".join(every.replace("│", " ").split())


def test_options_are_assembled_once_for_help_and_anew_for_each_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shoal.cli import train

    once, assemble, found = train.__getattr__("albert"), App.assemble_argument_collection, []

    def counted(app: App, **given: Any) -> ArgumentCollection:
        found.append(assemble(app, **given))
        return found[-1]

    monkeypatch.setattr(App, "assemble_argument_collection", counted)
    monkeypatch.setattr(sys, "argv", ["shoal", "--help"])
    for _ in range(2):
        once(["--help"], result_action="return_value")
    assert len(found) == 1
    first, second = capsys.readouterr().out.split("Usage:")[1:]
    assert first == second and "Optimizer steps of the whole run" in first
    monkeypatch.setattr(sys, "argv", ["shoal"])
    for steps in (7, 8):
        _, bound, _ = once.parse_args(["--train.total-steps", str(steps)], exit_on_error=False)
        assert bound.arguments["section_train"].total_steps == steps


@pytest.mark.slow
def test_tab_completes_commands_and_options(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "--install-completion", "--shell", "bash"]
    subprocess.run(command, check=True, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True)
    (script,) = tmp_path.glob(".local/share/bash-completion/completions/*")
    for words, wanted in (("shoal tr", "train"), ("shoal train albert --train.tot", "--train.total-steps")):
        typed = words.split()
        ask = (
            f"source {script}; COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; "
            f"$(complete -p shoal | sed 's/.*-F \\([^ ]*\\).*/\\1/') shoal {typed[-1]} {typed[-2]}; "
            'echo "${COMPREPLY[@]}"'
        )
        told = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=False)
        assert wanted in told.stdout.split(), told


def test_help_does_not_wait_for_torch() -> None:
    run = "app(['train', 'albert', '--help'], result_action='return_value')"
    check = f"import sys; from shoal.cli.app import app; {run}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "False", result.stderr
