"""A real Chromium for tests, and why there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
WAIT_MS = 60_000

needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt install chromium")
needs_playwright = pytest.mark.skipif(
    find_spec("playwright") is None, reason="no playwright: pip install playwright"
)


@contextmanager
def browser_page(width: int = 1400, height: int = 2000) -> Iterator[Any]:
    """An empty page of a browser that nobody sees."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own sandbox needs rights that a container does not give.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(WAIT_MS)
            yield page
        finally:
            browser.close()
