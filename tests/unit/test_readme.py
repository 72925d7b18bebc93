"""Checks README, CONTRIBUTING and the pages of results and of the log: figures, links and length."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import results_page

import shoal
import shoal.train.config as train_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/results.md", "docs/log/index.md", "docs/log/2026-11.md")
CONTENT = results_page.read_rows()
ROWS = [row for subject in CONTENT["subject"] for row in subject["rows"]]
FIGURE = re.compile(r"\d+(?:[.,:]\d+)*(?:e-?\d+)?")

# ---- pictures and commands -------------------------------------------------------------------------------


def test_the_readme_has_one_picture() -> None:
    assert README.count("](docs/images/") == 1


def test_commands_of_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)`", "".join((ROOT / page).read_text("utf-8") for page in PAGES)))
    assert {"train", "test"} <= named
    assert named <= targets


def test_counted_things_are_as_many() -> None:
    assert "has fifteen scripts" in README and len(list((ROOT / "examples").glob("*.py"))) == 15
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "the 18 names of `import shoal`" in contributing and len(shoal.__all__) == 18 + 1  # its version


def test_the_gallery_has_every_example_with_its_own_command() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    scripts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    rows = re.findall(r"^\| \[(.*?)\]\(\.\./examples/(.*?)\) \|.*\| `(.*)` \|$", page, re.MULTILINE)
    assert sorted(script for script, _, _ in rows) == sorted(scripts)
    for script, link, command in rows:
        assert script == link and command in scripts[script]


def test_settings_that_pages_name_are_there() -> None:
    names = ("RunOutputConfig", "LoopConfig", "DistributedConfig", "ServersConfig")
    classes = {name: getattr(train_config, name) for name in names}
    for page in (ROOT / "docs").rglob("*.md"):
        for name, setting in re.findall(r"(\w+)\((\w+)=", page.read_text(encoding="utf-8")):
            if name in classes:
                assert setting in classes[name].__dataclass_fields__, f"{page}: {name}({setting}=…)"


# ---- links -----------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()).replace(
            " ", "-"
        )
        found.add(anchor)
    return found


def links(page: str) -> Iterator[str]:
    text = re.sub(
        r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith(("http://", "https://")):
            yield link


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    found = list(links(page))
    assert found
    for link in found:
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page} links to {link}, which does not exist"
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), f"{page}: {link} has no such heading"


def test_the_index_of_the_log_has_every_entry() -> None:
    index = (ROOT / "docs/log/index.md").read_text(encoding="utf-8")
    subjects = [re.findall(r"^- .*\]\((.*)\)$", text, re.MULTILINE) for text in index.split("\n## ")[1:]]
    assert all(len(rows) <= 10 for rows in subjects)
    entries = []
    for page in (ROOT / "docs/log").glob("2*.md"):
        titles = re.findall(r"^## 2.*", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert f"]({page.name}) | {len(titles)} |" in index
        entries += [f"{page.name}#{anchor}" for title in titles for anchor in anchors(title)]
    assert sorted(row for rows in subjects for row in rows) == sorted(entries)


# ---- figures ---------------------------------------------------------------------------------------------


def test_the_pages_are_those_of_the_committed_results() -> None:
    """``python -m benchmarks.results_page`` renews them."""
    assert results_page.PAGE.read_text(encoding="utf-8") == results_page.page(CONTENT)
    assert results_page.readme(CONTENT, README) == README
    assert 8 <= sum("readme" in row for row in ROWS) <= 12


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "file" not in row], ids=lambda row: row["setup"][:40].replace(" ", "-")
)
def test_figures_without_samples_stand_in_their_source(row: dict[str, Any]) -> None:
    source = set(FIGURE.findall((ROOT / row["source"]).read_text(encoding="utf-8")))
    assert set(FIGURE.findall(row["reached"])) <= source, f"{row['reached']} is not in {row['source']}"


def test_the_figures_of_the_home_page_are_those_of_the_readme() -> None:
    figures = re.findall(r"[\d.]+×", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert figures and set(figures) <= set(re.findall(r"[\d.]+×", README))


def test_output_of_make_train_is_that_of_a_recorded_run() -> None:
    file = "make_train_epyc-2core_2026-11-27.md"
    recorded = (results_page.RESULTS / file).read_text(encoding="utf-8").split("\n## ")[1].splitlines()
    block = README.split("It prints:")[1].split("![")[0]
    shown = [line for line in block.splitlines() if line.strip() not in ("", "…")]
    assert len(shown) >= 12
    rest = iter(recorded)
    for line in shown:
        assert line in rest, f"{line.strip()!r} is not in {file}, or in another order"


def test_times_of_the_published_targets_are_those_of_the_posts() -> None:
    sentence = README.split("**Published targets.**")[1].split("They need")[0]
    figures = re.findall(r"([\d.]+ (?:min|h|days))", sentence)
    published = " ".join((ROOT / "docs" / "published.md").read_text(encoding="utf-8").split())
    published = published.replace("4.68 or 4.86", "4.68")
    assert len(figures) == 5
    for figure in figures:
        assert figure in published


def test_what_setup_needs_is_checked_first_and_is_what_the_pages_say(tmp_path: Path) -> None:
    packages = "apt-get install g++ make python3-venv python3-dev libssl-dev"
    assert packages in README
    assert packages in (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    command = [sys.executable, ROOT / ".ci" / "prerequisites"]
    finds_no_header = tmp_path / "compiler"
    finds_no_header.write_text("#!/bin/sh\nexit 1\n")
    finds_no_header.chmod(0o755)
    for compiler, missing in (
        ("no-such-compiler", "a C++ compiler; there is no no-such-compiler"),
        (str(finds_no_header), "the headers of OpenSSL 3; the compiler finds no openssl/core_names.h"),
    ):
        without = os.environ | {"CXX": compiler, "OPENSSL_ROOT_DIR": ""}
        child = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
        assert child.returncode == 1
        assert f"\n  - {missing}\n" in child.stderr
        assert packages in child.stderr


def test_the_page_about_plans_shows_the_recorded_times_of_the_planner() -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split("## At scale")[1]
    (file,) = re.findall(r"results/(plan_simulation_[\w-]+)\.json", page)
    rows = json.loads((results_page.RESULTS / f"{file}.json").read_text())["rows"]
    table = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    for column, workers in enumerate(table[0][1:], start=1):
        found = {row["case"]: row["ours"] for row in rows if row["case"].startswith(f"{workers} workers:")}
        assert table[2][column] == f"{found[f'{workers} workers: time']:.2f} s"
        assert table[3][column] == f"{found[f'{workers} workers: peak memory']:.0f} MiB"


def test_every_benchmark_with_samples_has_a_row() -> None:
    older = {"optimizers_lars_novograd_epyc-2core_2026-11-21"}  # measured again the same evening
    files = {path.stem for path in results_page.RESULTS.glob("*.json")}
    assert files - {row.get("file") for row in ROWS} == older


def test_every_missed_target_of_a_result_is_on_the_page() -> None:
    shown = {(row["file"], row["case"]) for row in ROWS if "file" in row}
    for file in sorted({file for file, _ in shown}):
        for one in json.loads((results_page.RESULTS / f"{file}.json").read_text())["rows"]:
            assert one["holds"] or (file, one["case"]) in shown, f"{file}: {one['case']} is left out"


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    one = {
        "case": "sum: 0.25",
        "unit": "ms",
        "ours": 2.5,
        "peer": 3000.0,
        "peer_name": "loop",
        "ratio": 1200.0,
    }
    result = {
        "command": "python -m benchmarks.made",
        "date": "2026-01-02T03:04:05+00:00",
        "rows": [{**one, "target": 1.5, "holds": True, **changes}],
    }
    (tmp_path / "made.json").write_text(json.dumps(result))
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    results_page._result.cache_clear()


ROW = {"file": "made", "case": "sum: 0.25", "setup": "a sum", "peer": "a loop of {peer:.0f} ms"}


@pytest.mark.parametrize(
    ("changes", "row", "reached", "target", "missed"),
    [
        ({}, {}, "1200×", "1.5×", False),
        ({"ratio": 1.234, "holds": False}, {}, "1.23×", "1.5×", True),
        ({"target": None}, {}, "1200×", "–", False),
        ({}, {"show": "{ours:.1%}", "target": "{stated}", "limit": 3}, "250.0 %", "0.25", False),
        ({}, {"show": "{ours} ms", "limit": 2}, "2.5 ms", "–", True),
    ],
)
def test_cells_of_a_measured_row(
    changes: dict[str, Any],
    row: dict[str, Any],
    reached: str,
    target: str,
    missed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made(tmp_path, monkeypatch, **changes)
    cells = results_page.cells({**ROW, **row})
    assert (cells["reached"], cells["target"]) == (reached, target)
    assert (cells["peer"], cells["date"]) == ("a loop of 3000 ms", "2026-01-02")
    assert results_page.is_missed({**ROW, **row}) == missed
    page = results_page.page({"intro": "", "subject": [{"title": "Made", "rows": [{**ROW, **row}]}]})
    assert (f"| **{reached}**" in page) == missed


def test_a_row_needs_its_case_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"made.json has 0 rows for 'other'"):
        results_page.measured({**ROW, "case": "other"})
    with pytest.raises(ValueError, match="0 places for the table"):
        results_page.readme({"subject": []}, "text")
