"""The page in headless Chromium: silent, alone, legible at 400 px, in both schemes, sortable.

Skipped, with the reason, where playwright or a Chromium is missing. ``FASTLAYER_SCREENSHOTS=DIR``
keeps a picture of each size and scheme to look at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makers import case, incorrect, run, timing, unsupported
from test_html import ATTACKS, full_case, hostile

from pytest_fastlayer.records import Verdict, Work
from pytest_fastlayer.report import html

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WORK = Work(flops=1e9, bytes=1e6)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        program = next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
        if program is None:
            pytest.skip(f"no Chromium on this machine: looked for {', '.join(NAMES)}")
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """Two records of one device: every part of the page, and all that is hostile."""
    timed = full_case(work=WORK)
    cases = {
        "b": case(speedup=3),
        "a": case(speedup=10),
        "none": unsupported(),
        "d": case(speedup=2),
        "full": timed,
        "slow": full_case(verdict=Verdict.SLOWER, timing=timing(2.5)),
        "wrong": incorrect(),
    }
    new = run(cases, notes=tuple(ATTACKS))
    old = run({"a": case(speedup=9), "full": timed}, created="2026-11-29T08:00:00+00:00")
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.render([new, old, *map(hostile, ATTACKS[:2])]), encoding="utf-8")
    return path


class View:
    """A page that was opened, what it said, and what it asked for."""

    def __init__(self, browser: Any, report: Path, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(report.as_uri())

    def column(self, heading: str, table: int = 0) -> list[str]:
        """First cells of the rows, in the order shown, after a click on a heading."""
        shown = self.page.locator("table.sortable").nth(table)
        if heading:
            shown.locator("thead button", has_text=heading).first.click()
        return shown.locator("tbody th").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_silent_alone_and_legible(browser, report, width, scheme):
    view = View(browser, report, viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = view.page
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    assert view.said == []
    assert view.requests == [report.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) >= 7  # WCAG 2.2, level AAA
    smallest = page.evaluate(SMALLEST_TEXT)
    assert smallest >= 7, f"text of {smallest} px in a drawing"
    folder = os.environ.get("FASTLAYER_SCREENSHOTS")
    if folder:
        page.screenshot(path=f"{folder}/report-{width}-{scheme}.png", full_page=True)
    page.close()


#: Contrast of the page's ink to its ground (WCAG 2.2, relative luminance).
CONTRAST = """() => {
  const light = (css) => {
    const [r, g, b] = css.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(document.body);
  const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""
#: Height of the smallest line of text in any drawing but the sparklines, in pixels.
SMALLEST_TEXT = """() => Math.min(99, ...[...document.querySelectorAll("figure svg text")]
  .filter((text) => text.textContent.trim())
  .map((text) => parseFloat(getComputedStyle(text).fontSize)
    * text.ownerSVGElement.getBoundingClientRect().width
    / text.ownerSVGElement.viewBox.baseVal.width))"""


def test_sorting(browser, report):
    view = View(browser, report, viewport={"width": 1200, "height": 900})
    before = view.column("")
    assert before == ["a", "b", "d", "full", "none", "slow", "wrong"]
    assert view.column("speedup") == ["d", "slow", "b", "full", "a", "none", "wrong"]
    assert view.column("speedup") == ["a", "full", "b", "slow", "d", "none", "wrong"]
    assert view.column("speedup") == before
    assert view.page.locator("th[aria-sort]").count() == 0
    assert view.said == []
    view.page.close()


def test_everything_but_sorting_works_without_script(browser, report):
    context = browser.new_context(
        java_script_enabled=False, viewport={"width": 1200, "height": 900}
    )
    view = View(context, report)
    assert view.page.locator("button").count() == 0
    assert view.page.locator("table").first.is_visible()
    detail = view.page.locator("details", has_text="full").first
    trace = detail.locator("figure svg").first
    assert not trace.is_visible()
    detail.locator("summary").click()
    assert trace.is_visible()
    assert view.page.locator(".plots svg").first.is_visible()
    context.close()


def test_a_narrow_page_names_its_cells(browser, report):
    view = View(browser, report, viewport={"width": 400, "height": 900})
    row = view.page.locator("table.cards").first.locator("tbody tr").first
    cell = row.locator("td", has_text="10.00x").first
    label = cell.evaluate("e => getComputedStyle(e, '::before').content")
    assert label == '"speedup"'
    view.page.close()
