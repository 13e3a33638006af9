"""The site is built strictly, loads nothing from elsewhere, and can be read wide and narrow."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import pytest

from tests.support.browser import browser_page, needs_chromium, needs_playwright

for module in ("material", "mkdocstrings", "plotly"):
    pytest.importorskip(module, reason="no site builder: make site")
ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 390)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning is a failure. KEEP_SITE=DIR keeps it, with pictures of it."""
    kept = os.environ.get("KEEP_SITE")
    built = Path(kept) if kept else tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return built


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that writes no log."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_every_page_of_the_documentation_can_be_reached_from_the_first(site: Path) -> None:
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html"}
    docs = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.with_suffix(".html").as_posix() for path in docs} <= pages
    seen, to_read = set(), ["index.html"]
    while to_read:
        page = to_read.pop()
        seen.add(page)
        links = re.findall(r'href="([^"#:]+\.html)', (site / page).read_text())
        to_read += {os.path.normpath(Path(page).parent / link) for link in links} - seen
        to_read = sorted(set(to_read))
    assert seen >= pages


_WRONG = """() => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const broken = [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src);
  const small = [...document.querySelectorAll("article p, article li")].filter(
    e => e.offsetWidth && parseFloat(getComputedStyle(e).fontSize) < 12).length;
  return {wide: Math.max(0, wide), broken, small};
}"""


@needs_chromium
@needs_playwright
@pytest.mark.timeout(300)
def test_every_page_can_be_read_wide_and_narrow_and_all_that_it_loads_and_links_is_there(
    site: Path, url: str
) -> None:
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    foreign, failed, wrong, links, anchors = [], [], {}, {}, set()
    with browser_page(WIDTHS[0], 900) as page:
        page.on("pageerror", lambda error: failed.append(f"{page.url}: {error}"))
        page.on(
            "response", lambda got: got.status < 400 or failed.append(f"{got.status} {got.url}")
        )

        def local(route: object, request: object) -> None:
            mine = request.url.startswith((url, "data:", "blob:"))
            foreign.extend([] if mine else [request.url])
            route.continue_() if mine else route.abort()

        page.route("**/*", local)
        for name in pages:
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                if width == WIDTHS[0]:
                    page.goto(url + name)
                found = page.evaluate(_WRONG)
                if found != {"wide": 0, "broken": [], "small": 0}:
                    wrong[name, width] = found
                if os.environ.get("KEEP_SITE"):
                    page.screenshot(path=site / f"{name.replace('/', '-')}-{width}.png")
            hrefs = page.eval_on_selector_all("a[href]", "all => all.map(a => a.href)")
            links |= {href: name for href in hrefs if href.startswith(url)}
            ids = page.eval_on_selector_all("[id]", "all => all.map(a => a.id)")
            anchors |= {url + name} | {f"{url}{name}#{anchor}" for anchor in ids}
    for href, name in links.items():
        target, anchor = urldefrag(href)
        path = site / target.removeprefix(url)
        there = path.is_file() or (path / "index.html").is_file()
        if not there or (anchor and not anchor.startswith("__") and href not in anchors):
            failed.append(f"{name} links to {href}")
    assert not foreign
    assert not failed
    assert not wrong


@needs_chromium
@needs_playwright
def test_a_curve_shows_minutes_and_at_a_click_frames_and_the_search_finds_a_word(url: str) -> None:
    with browser_page(390, 900) as page:
        page.goto(urljoin(url, "results.html"))
        curve = page.locator("#curve-ALE-Breakout-v5")
        curve.locator("g.trace.scatter").first.wait_for()
        assert curve.locator(".xtitle").text_content() == "minutes"
        last = curve.locator(".xtick").last.text_content()
        curve.get_by_text("frames", exact=True).first.click()
        curve.locator(".xtitle", has_text="frames").wait_for()
        assert curve.locator(".xtick").last.text_content() != last
        page.goto(urljoin(url, "index.html?q=quarantine"))
        page.locator(".md-search-result__item a[href*='glossary']").first.wait_for(state="attached")
