"""The page in a real browser: no console message, every figure laid out, nothing wider than the window."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import report_records as records

from shoal.report.page import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium found: install chromium to run this")

# Shows the page in a frame of a given width (a window of Chromium is never narrower than 500 pixels) and
# writes down what it measures.
_HARNESS = """<!DOCTYPE html><meta charset="utf-8">
<iframe id="frame" style="width: %(width)dpx; height: 12000px; border: 0"></iframe><pre id="measured"></pre>
<script>
const frame = document.getElementById("frame");
frame.onload = () => {
  const page = frame.contentDocument, box = (node) => node.getBoundingClientRect();
  page.querySelectorAll("details").forEach((node) => { node.open = true; });
  const figures = [...page.querySelectorAll("svg")];
  const outside = (svg) => [...svg.querySelectorAll("text")].filter((text) => {
    const card = box(svg.closest("figure"));
    return box(text).left < card.left || box(text).right > card.right;
  }).map((text) => text.textContent);
  document.getElementById("measured").textContent = JSON.stringify({
    figures: figures.length,
    small: figures.filter((svg) => box(svg).width < 200 || box(svg).height < 80).length,
    curves: figures.map((svg) => [...svg.querySelectorAll("path")].filter((p) => box(p).width > 50).length),
    outside: figures.flatMap(outside),
    width: page.documentElement.scrollWidth,
    headings: [...page.querySelectorAll("h1, h2")].map((node) => node.innerText),
    colour: getComputedStyle(page.querySelector("svg path[style*='var(--run-0)']")).stroke,
  });
};
frame.srcdoc = %(page)s;
</script>"""


def open_page(page: str, tmp_path: Path, width: int) -> tuple[dict[str, Any], list[str]]:
    """Return what the browser measured and every line of its console."""
    harness = tmp_path / "harness.html"
    text = json.dumps(page).replace("</", "<\\/")
    harness.write_text(_HARNESS % {"width": width, "page": text}, encoding="utf-8")
    flags = [
        "--headless",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1300,12500",
    ]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium's sandbox refuses to run as root, as in a container
    command = [str(BROWSER), *flags, "--dump-dom", harness.as_uri()]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="measured">(.*?)</pre>', child.stdout, flags=re.DOTALL)
    assert found and found[1], child.stderr
    return json.loads(unescape(found[1])), [line for line in child.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("width", [1200, 420])
def test_page_in_a_browser(tmp_path: Path, width: int) -> None:
    runs = [records.write_run(tmp_path / name, records.RUNS[name]()) for name in ("finished", "faster")]
    measured, console = open_page(write_report(runs).read_text(encoding="utf-8"), tmp_path, width)
    assert console == []
    # Loss, four metrics, learning rate, two norms; throughput; the parts of a step of both runs.
    assert measured["figures"] == 5 + 3 + 1 + 2
    assert measured["small"] == 0
    assert all(count >= 2 for count in measured["curves"][:4])
    assert measured["outside"] == []
    assert measured["width"] <= width
    assert measured["headings"][0] == "2 runs side by side"
    assert measured["headings"][1:] == [
        "Summary",
        "Curves",
        "Where the time goes",
        "Timeline",
        "Configuration",
    ]
    assert measured["colour"] == "rgb(0, 114, 178)"


def test_the_browser_would_tell_of_an_error(tmp_path: Path) -> None:
    """A page that asks for something from outside is refused by its own policy, and the console says so."""
    run = records.write_run(tmp_path / "run", records.RUNS["one-step"]())
    page = write_report([run]).read_text(encoding="utf-8")
    broken = page.replace("</main>", '<img src="https://example.invalid/x.png" alt=""></main>')
    _, console = open_page(broken, tmp_path, 800)
    assert any("Content Security Policy" in line for line in console)
