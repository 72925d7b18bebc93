"""Measures every page of the built site in a browser, at the widths of a laptop and of a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_browser import SITE, Browser

PAGES = sorted(SITE.rglob("*.html"))
WIDTHS = (1280, 390)

# Code and tables scroll in their boxes if they are wider: a reader sees a part of them only. So it is with
# whatever ends outside of the window.
MEASURE = """new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => {
  const width = document.documentElement.clientWidth, found = [];
  if (document.scrollingElement.scrollWidth > width) {
    found.push(`scrolls sideways to ${document.scrollingElement.scrollWidth}`);
  }
  const text = (node) => node.innerText?.trim().replace(/\\s+/g, " ") || node.outerHTML;
  for (const node of document.querySelectorAll(".md-content :is(pre > code, .md-typeset__scrollwrap)")) {
    if (node.scrollWidth > node.clientWidth + 1) {
      found.push(`cut at ${node.clientWidth} of ${node.scrollWidth}: ${text(node).slice(0, 60)}`);
    }
  }
  const blocks = ".md-content :is(p, li, td, th, pre, svg, img, h1, h2, h3, h4)";
  for (const node of document.querySelectorAll(blocks)) {
    const box = node.getBoundingClientRect();
    if (box.width && (box.right > width + 1 || box.left < -1)) {
      found.push(`outside of the window: ${text(node).slice(0, 60)}`);
    }
  }
  return found;
})"""


# Entries of the log are read one at a time, and listings of the repository are looked up
MAY_BE_LONG = ("log/", "source/")
MOST_WORDS = 1_800
_WORDS = "document.querySelector('.md-content').innerText.split(/\\s+/).length"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(SITE)))
def test_nothing_is_cut_and_the_page_has_one_subject(browser: Browser, page: Path) -> None:
    browser.resize(WIDTHS[0])
    browser.open(page.as_uri())
    found = []
    for width in WIDTHS:
        browser.resize(width)
        found += [f"{width} px: {line}" for line in browser.run(MEASURE)]
    words = browser.run(_WORDS)
    if words > MOST_WORDS and not str(page.relative_to(SITE)).startswith(MAY_BE_LONG):
        found.append(f"{words} words, more than {MOST_WORDS}")
    assert not found, "\n".join(found)
