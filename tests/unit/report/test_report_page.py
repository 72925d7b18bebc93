"""The page as a file: complete, self-contained, safe, and one clear error where it cannot be."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_records as records

from shoal.errors import ShoalError, UsageError
from shoal.report.page import write_report

VOID = {"meta", "link", "br", "img", "hr", "input", "path", "use", "rect", "circle", "line", "stop"}


class Page(HTMLParser):
    """Collects a page's text, tags and ids, and whether every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def attributes(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def report(tmp_path: Path, *names: str) -> tuple[str, Page]:
    runs = [records.write_run(tmp_path / name, records.RUNS[name]()) for name in names]
    text = write_report(runs).read_text(encoding="utf-8")
    return text, Page(text)


def test_page_of_one_run_says_what_happened(tmp_path: Path) -> None:
    _, page = report(tmp_path, "finished")
    for said in (
        "first-light finished",
        "albert · 1.87 M parameters · 4 workers on 1 host · cpu, fp32 · batch",
        "batch 64 = 16 × 4 workers × 1 accumulation",
        "1.60 below unigram entropy",
        "13.0 points above chance",
        "Masked-LM loss",
        "Learning rate",
        "Gradient norm",
        "Weight norm",
        "Throughput",
        "gradient wait",
        "resume 400 from checkpoints/step-000400",
        "passed over: step-000720: wrong checksum of shard 1",
        "stop 700 SIGTERM (exit code 75)",
        "21.4 MiB 6.1 ms 184 ms",
        "shoal train albert --preset tiny --run.dir 'runs/first light'",
        "optimizer.learning_rate 0.00176",
        "torch 2.15.0",
    ):
        assert said in page.text, said
    assert "Loss scale" not in page.text  # it was 1 all the time
    assert page.count("svg") == 9


def test_page_of_several_runs_compares(tmp_path: Path) -> None:
    _, page = report(tmp_path, "finished", "faster", "diverged")
    for said in (
        "3 runs side by side",
        "too-hot stopped: the loss was not finite for 5 steps (116 to 120)",
        "adamw-compiled, held-out",
        "Loss scale",
        "Perplexity",
        "too-hot: ▲ 5 values not finite, at step 116, 117, 118, 119, 120.",
        "optimizer.name lamb adamw lamb",
        "Skipped because of an overflow, too-hot: 4 (reported at step 30, 60, 90, 120).",
    ):
        assert said in page.text, said
    marked = [attrs.get("class") for tag, attrs in page.tags if tag == "tr"]
    assert "differs" in marked


@pytest.mark.parametrize("name", ["unstarted", "one-step"])
def test_page_of_a_run_that_has_hardly_begun(tmp_path: Path, name: str) -> None:
    _, page = report(tmp_path, name)
    assert ("No step has been recorded yet." in page.text) == (name == "unstarted")
    assert "running or killed" in page.text
    assert page.count("svg") == (0 if name == "unstarted" else 9)


def test_long_run_is_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    text, page = report(tmp_path, "long")
    assert "6,000 points thinned to 600 that keep every peak." in page.text
    assert "long: one mark for every 2 checkpoints." in page.text
    assert re.search(r"Axis cut at [\d.]+; ▲ marks higher values\.", page.text)
    assert len(text) < 400_000


@pytest.mark.parametrize("names", [("finished",), ("finished", "faster", "diverged")])
def test_page_needs_nothing_from_outside(tmp_path: Path, names: tuple[str, ...]) -> None:
    text, page = report(tmp_path, *names)
    assert "://" not in text
    assert "@import" not in text
    assert not {"script", "iframe", "object", "embed", "img", "base"} & {tag for tag, _ in page.tags}
    links = [link for name in ("href", "src", "srcset", "action", "data") for link in page.attributes(name)]
    assert links
    assert all(link.startswith("#") or link == "data:," for link in links)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_ids_are_unique_and_every_reference_has_its_target(tmp_path: Path) -> None:
    text, page = report(tmp_path, "finished", "faster")
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r"url\(#([^)]*)\)", text))
    wanted |= {link[1:] for link in page.attributes("href") if link.startswith("#")}
    assert wanted
    assert wanted <= set(ids)


def test_colours_come_from_the_style_sheet(tmp_path: Path) -> None:
    """A placeholder that is left would be a wrong colour in one of the two themes."""
    text, _ = report(tmp_path, "finished", "faster")
    figures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "var(--run-0)" in figures
    assert "var(--run-1)" in figures
    assert not re.findall(r"#[0-9a-f]{6}", figures)
    defined = set(re.findall(r"(--[a-z0-9-]+):", text))
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", text)) <= defined


def test_names_with_markup_are_shown_not_run(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> & \"x\" 'y' $a_b$ 鱼"
    start = records.start(run=evil, command=["shoal", evil], config={evil: evil}, versions={evil: evil})
    rows = records.faster_run()
    scored = records.evaluation(1000, records.BEGIN_S + 9000, split=evil, metrics={evil: 1.0})
    made = records.write_run(tmp_path / "run", [start, *rows[1:-1], scored])
    page = Page(write_report([made]).read_text(encoding="utf-8"))
    assert page.count("script") == 0
    assert evil in page.text
    assert any(evil in (label or "") for label in page.attributes("aria-label"))


def test_same_record_gives_the_same_page(tmp_path: Path) -> None:
    made = records.write_run(tmp_path / "run", records.finished_run())
    first = write_report([made], tmp_path / "a.html").read_bytes()
    assert write_report([made], tmp_path / "b.html").read_bytes() == first


def test_page_goes_beside_the_first_run_and_replaces_an_older_one_whole(tmp_path: Path) -> None:
    made = records.write_run(tmp_path / "run", records.RUNS["one-step"]())
    old = made / "report.html"
    old.write_text("old")
    assert write_report([made]) == old
    assert old.read_text().startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in made.iterdir()) == ["record.jsonl", "report.html"]


def test_errors_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one run directory"):
        write_report([])
    with pytest.raises(ShoalError, match=r"holds no record\.jsonl: it is not the directory of a shoal run"):
        write_report([tmp_path])
    made = records.write_run(tmp_path / "run", [records.start()])
    with pytest.raises(ShoalError, match=r"nowhere/page\.html: cannot be written: No such file or directory"):
        write_report([made], tmp_path / "nowhere" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ShoalError, match="folder: cannot be written: Is a directory"):
        write_report([made], tmp_path / "folder")
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_missing_package_names_the_extra(package: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from shoal.errors import ShoalError\n"
        "try:\n    import shoal.report.page\n"
        "except ShoalError as error:\n    print(error)\n"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.startswith(f"a report needs {package}, which cannot be imported (")
    assert child.stdout.endswith("pip install 'matplotlib>=3.9' 'jinja2>=3.1'\n")


def test_values_that_are_not_finite_anywhere_do_not_break_the_page(tmp_path: Path) -> None:
    names = ("loss", "grad_norm", "samples_per_s", "step_s", "learning_rate")
    changes: dict[str, Any] = dict.fromkeys(names, math.nan)
    rows = records.finished_run()
    wild = [replace(row, **changes) if isinstance(row, records.Step) else row for row in rows]
    page = Page(write_report([records.write_run(tmp_path / "run", wild)]).read_text(encoding="utf-8"))
    assert "100 values not finite" in page.text


def test_references_that_differ_have_one_label(tmp_path: Path) -> None:
    runs = []
    for entropy in (6.62, 6.65, 6.63):
        rows = records.training(10, 100, records.BEGIN_S)[0]
        first = records.start(run=f"run-{entropy}", references={"mlm_loss": entropy})
        runs.append(records.write_run(tmp_path / f"{entropy}", [first, *rows]))
    text = Page(write_report(runs).read_text(encoding="utf-8")).text
    assert text.count("unigram entropy 6.620 to 6.650") == 1
    assert "unigram entropy 6.630" not in text
