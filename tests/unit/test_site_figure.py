"""Compares the documentation's interactive figure with `shoal.decide.server_assignment`, in a browser."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.decide.server_assignment import ring_seconds, server_shares, two_hop_seconds

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium found: install chromium to run this")

CASES = list(
    itertools.product((2, 3, 4, 8, 33, 64), (0, 1, 3, 8, 128), (1.0, 10.0, 25.0), (2.5, 10.0, 400.0))
)
"""Hosts, helpers, Gbit/s of a host's and of a helper's link."""


def run_page(body: str, folder: Path) -> str:
    """Return the text of the element "out" after a page with the figure's scripts has run."""
    page = folder / "page.html"
    names = ("two_hops.js", "helpers_figure.js")
    scripts = "".join(f"<script>{(ASSETS / name).read_text(encoding='utf-8')}</script>" for name in names)
    page.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><div id="helpers-figure"></div><pre id="out"></pre>{scripts}'
        f"<script>{body}</script>",
        encoding="utf-8",
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [str(BROWSER), *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2_000:]
    return html.unescape(found[1])


def test_the_page_computes_what_the_package_computes(tmp_path: Path) -> None:
    text = run_page(
        f"""const cases = {json.dumps(CASES)};
        document.getElementById("out").textContent = JSON.stringify(cases.map(([n, k, host, helper]) => [
          TwoHops.ringSeconds(440e6, n, host * 125e6),
          TwoHops.twoHopSeconds(440e6, n, host * 125e6, k, helper * 125e6),
          TwoHops.helperShare(n, host, k, helper)]));""",
        tmp_path,
    )
    for (n, k, host, helper), computed in zip(CASES, json.loads(text), strict=True):
        hosts, helpers = [host * 125e6] * n, [helper * 125e6] * k
        share = float(sum(server_shares(hosts, helpers)[n:]))
        expected = [ring_seconds(440e6, hosts), two_hop_seconds(440e6, hosts, helpers), share]
        assert computed == pytest.approx(expected, rel=1e-12), (n, k, host, helper)


def test_the_sliders_move_the_results(tmp_path: Path) -> None:
    text = run_page(
        """const sliders = [...document.querySelectorAll("#helpers-figure input")];
        const shown = () => [...document.querySelectorAll(".results strong")].map((node) => node.textContent);
        const before = shown();
        sliders[1].value = 8;
        sliders[1].dispatchEvent(new Event("input"));
        const label = document.querySelector("#helpers-figure svg").getAttribute("aria-label");
        document.getElementById("out").textContent = JSON.stringify([before, shown(), label]);""",
        tmp_path,
    )
    before, after, label = json.loads(text)
    assert before == ["0.616 s", "0.448 s", "1.38×", "64 %"]
    assert after == ["0.616 s", "0.352 s", "1.75×", "100 %"]
    assert label == "8 helper hosts: 0.352 s instead of 0.616 s"
