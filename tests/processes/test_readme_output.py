"""Runs the commands of ``make train`` on a small text; their lines have the form that the README shows."""

from __future__ import annotations

import re
from pathlib import Path

import pretrain_jobs as jobs

from forked import shoal
from shoal.errors import EXIT_OK

README = Path(__file__).resolve().parents[2] / "README.md"
SMALL = {
    "prepare": ("--tokenizer", "wordpiece", "--vocab-size", "80", "--validation", "0.2"),
    "train": (
        *("--model.hidden-size", "32", "--model.intermediate-size", "64", "--model.vocab-size", "96"),
        *("--train.total-steps", "4", "--optim.warmup-steps", "2", "--train.global-batch-size", "8"),
        *(
            "--workers",
            "2",
            "--run.log-frequency",
            "2",
            "--run.validation-frequency",
            "4",
            "--run.checkpoint-frequency",
            "4",
        ),
    ),
    "report": (),
}


def form(line: str) -> str:
    """Return a line without what its figures decide."""
    plain = re.sub(r"\d[\d.,:]*(?:e[-+]\d+)?", "#", line.replace("workers", "worker"))
    return plain.replace(" above the", " below the").replace("(by guessing: p =", "(by guessing: p <")


def shown() -> tuple[list[list[str]], list[str]]:
    """Return the commands of the README's first example, and the lines that they print."""
    block = README.read_text(encoding="utf-8").split("It prints:")[1].split("![")[0]
    lines = [line.strip() for line in block.splitlines() if line.strip() not in ("", "…")]
    commands = [line.split()[1:] for line in lines if line.startswith(".venv/bin/shoal ")]
    return commands, [line for line in lines if not line.startswith(".venv/bin/shoal ")]


def test_make_train_prints_what_the_readme_shows(tmp_path: Path) -> None:
    commands, lines = shown()
    assert [command[0] for command in commands] == ["prepare", "train", "report"] and len(lines) >= 10
    jobs.small_text(tmp_path / "articles.txt")
    commands[0] = ["prepare", "text", "articles.txt", "--out", "runs/builtin-text"]
    commands[1] = commands[1][: commands[1].index("--workers")]
    printed: list[str] = []
    for command in commands:
        result = shoal(*command, *SMALL[command[0]], cwd=tmp_path)
        assert result.returncode == EXIT_OK, result.stderr
        printed += [*result.stdout.splitlines(), *result.stderr.splitlines()]
    forms = {form(line.strip()) for line in printed}
    for line in lines:
        assert form(line) in forms, f"{line!r} is not among\n" + "\n".join(printed)


def test_make_train_runs_the_commands_of_the_readme() -> None:
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split("\ntrain: ")[1].split("\n\n")[0]
    values = dict(re.findall(r"^(\w+) +\?= (\S+)$", makefile, re.MULTILINE))
    for name, value in values.items():
        recipe = recipe.replace(f"$({name})", value)
    made = [line.strip().split()[1:] for line in recipe.splitlines()[1:]]
    assert made == shown()[0]
