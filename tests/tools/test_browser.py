"""The page of `v41 inspect --html` in headless Chromium, where there is one: what one opens, drags and picks works.

It needs a Chromium on the path, and the package playwright, which drives it (extra "browser"); no test of it is run
otherwise. `make browser` installs the package, and fails where there is no Chromium. What the text of the page alone
can show is in test_html_page.py, and runs everywhere.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.small_models import run_of_balanced, run_of_routed
from tests.tools.test_streams_view import run_with_sides
from v41.tools.files import write_whole
from v41.tools.html_page import lanes, page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path is not None), None)
MISSING = f"no page was tried in a browser: none of {', '.join(NAMES)} is on the path"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)


class Opened:
    """A page of the browser, with all that it asked for and complained of since it was opened."""

    def __init__(self, tab: Any, path: Path) -> None:
        self.tab, self.asked, self.complaints = tab, list[str](), list[str]()
        tab.on("request", lambda request: self.asked.append(request.url))
        tab.on("console", lambda message: self.complaints.append(message.text))
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.goto(path.as_uri())
        self.url = path.as_uri()

    def check_quiet(self) -> None:
        """Nothing but the page itself was fetched, and nothing went wrong."""
        assert self.asked == [self.url] and self.complaints == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api")
    with driver.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    write_whole(tmp_path / "page.html", page(run_of_balanced()))
    tab = browser.new_page()
    yield Opened(tab, tmp_path / "page.html")
    tab.close()


def shown(opened: Opened, what: str) -> list[int]:
    """Positions of those elements that a person sees."""
    every = opened.tab.locator(what)
    return [at for at in range(every.count()) if every.nth(at).is_visible()]


def test_the_slider_goes_through_the_passes_one_at_a_time(opened: Opened) -> None:
    names = [run.name for run in run_of_balanced().report.passes]
    slider = opened.tab.get_by_label("pass", exact=True)
    assert opened.tab.locator(".pass").count() == len(names) and shown(opened, ".pass") == [0]
    for at in (1, len(names) - 1, 0):
        slider.fill(str(at))
        assert shown(opened, ".pass") == [at] and names[at] in opened.tab.locator(".pass").nth(at).inner_text()
    slider.focus()
    opened.tab.keyboard.press("ArrowRight")
    assert shown(opened, ".pass") == [1]
    opened.check_quiet()


def test_before_and_after_are_those_of_the_pass(opened: Opened) -> None:
    at, fold = next((i, run) for i, run in enumerate(run_of_balanced().report.passes) if run.name == "fold_sinkhorn")
    opened.tab.get_by_label("pass", exact=True).fill(str(at))
    cells = opened.tab.locator(".pass").nth(at).locator("td").all_inner_texts()
    assert cells[:3] == ["nodes", str(fold.nodes_before), str(fold.nodes_after)]
    assert "sinkhorn_0" in opened.tab.locator(".pass").nth(at).locator("pre").inner_text()
    opened.check_quiet()


def test_layers_open_and_close(opened: Opened) -> None:
    layers = opened.tab.locator("details:has(> table)").filter(has_text="layer")
    assert layers.count() == len(run_of_balanced().layers)
    for at in range(layers.count()):
        layer = layers.nth(at)
        pieces, before = layer.locator("> table"), layer.get_attribute("open") is not None
        assert pieces.is_visible() is before
        layer.locator("> summary").click()
        assert pieces.is_visible() is not before
        layer.locator("> summary").click()
        assert pieces.is_visible() is before
    opened.check_quiet()


def test_a_region_inside_a_layer_shows_its_attributes(opened: Opened) -> None:
    region = opened.tab.locator("details details").first
    if not region.is_visible():
        opened.tab.locator("details:has(> details) > summary").first.click()
    assert not region.locator("td").first.is_visible()
    region.locator("summary").click()
    assert "steps" in region.inner_text() and region.locator("td").first.is_visible()
    opened.check_quiet()


def test_each_kind_of_region_can_be_looked_at(browser: Any, tmp_path: Path) -> None:
    write_whole(tmp_path / "page.html", page(run_of_routed("eager")))
    found = Opened(browser.new_page(), tmp_path / "page.html")
    select = found.tab.get_by_label("region")
    titles = select.locator("option").all_inner_texts()
    assert titles and shown(found, ".drawing") == [0]
    for at in range(len(titles)):
        select.select_option(index=at)
        assert shown(found, ".drawing") == [at]
        box = found.tab.locator(".drawing svg").nth(at).bounding_box()
        assert box is not None and box["width"] > 100 and box["height"] > 100
        widths = (
            found.tab.locator(".drawing")
            .nth(at)
            .locator("g")
            .evaluate_all(
                "all => all.map(g => [g.querySelector('rect').getBBox().width,"
                " ...[...g.querySelectorAll('text')].map(t => t.getBBox().width + 6)])"
            )
        )
        assert widths and all(max(texts) <= box for box, *texts in widths)  # words stay in their boxes
    found.check_quiet()


def test_the_timeline_is_as_wide_as_the_page_and_says_what_each_bar_is(opened: Opened) -> None:
    bars, line = opened.tab.locator(".line i"), opened.tab.locator(".line").bounding_box()
    boxes = [bars.nth(at).bounding_box() for at in range(bars.count())]
    assert line is not None and abs(sum(box["width"] for box in boxes if box) - line["width"]) < 1
    assert all("µs" in str(bars.nth(at).get_attribute("title")) for at in range(bars.count()))
    opened.check_quiet()


def test_streams_are_drawn_one_below_the_other_on_one_scale(browser: Any, tmp_path: Path) -> None:
    run = run_with_sides()
    write_whole(tmp_path / "page.html", page(run, 4))
    found = Opened(browser.new_page(), tmp_path / "page.html")
    lines = found.tab.locator(".lane svg")
    boxes = [lines.nth(at).bounding_box() for at in range(lines.count())]
    assert len(boxes) == 2 and boxes[0]["width"] == boxes[1]["width"] > 300 and boxes[0]["y"] < boxes[1]["y"]
    for at, pieces in enumerate(lanes(run, 4)):
        drawn = lines.nth(at).locator("rect")
        for piece, box in zip(pieces, (drawn.nth(i).bounding_box() for i in range(drawn.count())), strict=True):
            assert box["x"] - boxes[at]["x"] == pytest.approx(piece["from"] / 1000 * boxes[at]["width"], abs=1)
            assert box["width"] == pytest.approx(piece["for"] / 1000 * boxes[at]["width"], abs=1)
    found.check_quiet()


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1400, True)])
def test_no_scrolling_sideways_on_a_phone_or_a_screen(width: int, dark: bool, browser: Any, tmp_path: Path) -> None:
    write_whole(tmp_path / "page.html", page(run_of_balanced()))
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light")
    found = Opened(tab, tmp_path / "page.html")
    for summary in tab.locator("summary").all():
        if summary.is_visible():
            summary.click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    found.check_quiet()


if __name__ == "__main__":
    sys.exit(MISSING if CHROMIUM is None else None)
