"""The tests of the built site share one browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from site_browser import BROWSER, SITE, Browser, chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a headless Chromium; skip without one, or without a site."""
    if BROWSER is None:
        pytest.skip("no Chromium found: install chromium to run this")
    if not (SITE / "index.html").is_file():
        pytest.skip("no site found in build/site: `make docs` builds it")
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as started:
        yield started
