"""The site in a real browser, from a folder: Debian's Chromium, driven by Playwright, with axe for accessibility.

apt-get install chromium; nox -s browser
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_site import BROKEN, HOSTILE, NAMES, site_run

from traceproof.names import path_part
from traceproof.site.build import build

playwright = pytest.importorskip("playwright.sync_api", reason="package_absent: playwright (nox -s browser)")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="package_absent: axe-playwright-python")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("package_absent: no Chromium on PATH (apt-get install chromium)", allow_module_level=True)

SERIOUS = {"serious", "critical"}
KINDS = (
    "index.html", "findings.html", "models.html", "models/tiny.html", "op_types/rmsnorm.html",
    "definitions/gamma.html", "definitions/zeta.html", f"definitions/{path_part(BROKEN)}.html",
)  # fmt: skip
DRAWN = """plot => { // pixels that are not transparent
  const canvas = plot.querySelector("canvas");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let place = 3; place < data.length; place += 4) count += data[place] > 0;
  return count;
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    finished = site_run(tmp_path_factory.mktemp("browser"))
    return build(finished, finished.run / "site").folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as found:
        # As root, which CI runs as, Chromium does without its sandbox; the pages are ours.
        chromium = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Tab:
    """A page of the site, and all that went wrong on it.

    Args:
        browser: the browser.
        url: of the page.
        scheme: `light` or `dark`, what the system asks for.
    """

    def __init__(self, browser: Any, url: str, scheme: str = "light") -> None:  # noqa: ANN401 - no stubs here
        self.wrong: list[str] = []
        self.page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type != "log" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("requestfailed", lambda request: self.wrong.append(request.url))
        self.page.on(
            "request", lambda request: None if request.url.startswith("file:") else self.wrong.append(request.url)
        )
        self.page.goto(url)

    def rows(self) -> list[str]:
        """First cells of the table that is shown."""
        found: list[str] = self.page.locator(".paged tbody th").all_inner_texts()
        return found


@pytest.fixture
def tab(browser: Any, folder: Path, request: pytest.FixtureRequest) -> Iterator[Tab]:  # noqa: ANN401
    """The page that a test names, which must have run without a complaint of the browser's."""
    opened = Tab(browser, (folder / getattr(request, "param", "index.html")).as_uri())
    yield opened
    opened.page.close()
    assert opened.wrong == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_has_no_error_and_no_serious_violation(browser: Any, folder: Path, kind: str, scheme: str) -> None:  # noqa: ANN401
    (path,) = folder.glob(kind)
    tab = Tab(browser, path.as_uri(), scheme)
    tab.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    tab.page.wait_for_load_state("networkidle")
    assert tab.wrong == []
    found = (
        axe.Axe().run(tab.page, options={"preload": False}).response["violations"]
    )  # it may not load style sheets
    assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in SERIOUS] == []
    assert tab.page.evaluate("typeof hacked") == "undefined"
    tab.page.close()


@pytest.mark.parametrize("tab", ["definitions/gamma.html"], indirect=True)
def test_plots_are_drawn_and_have_their_figures_as_tables(tab: Tab) -> None:
    plots = tab.page.locator("figure.plot")
    assert plots.count() == 2
    for place in range(2):
        plot = plots.nth(place)
        assert plot.evaluate(DRAWN) > 2000
        plot.locator("summary").click()
        plot.locator("details tbody tr").first.wait_for()  # `toggle` comes after the click
        assert plot.locator("details tbody tr").count() >= 2


def test_the_overview_is_searched_filtered_and_sorted(tab: Tab) -> None:
    assert sorted(tab.rows()) == sorted([*NAMES, BROKEN])
    tab.page.get_by_label("Search").fill("gam")
    assert tab.rows() == ["gamma"]
    tab.page.get_by_label("Search").fill("")
    tab.page.get_by_label("verdict").select_option("fail")
    assert tab.rows() == ["gamma"]
    tab.page.get_by_label("verdict").select_option("pass")
    tab.page.get_by_label("implementation").select_option("torch")
    assert sorted(tab.rows()) == sorted(NAMES)
    tab.page.get_by_role("button", name="definition", exact=True).click()
    tab.page.get_by_role("button", name="definition", exact=True).click()
    assert tab.rows() == sorted(NAMES, reverse=True)
    assert "4 rows" in tab.page.get_by_role("status").inner_text()


def test_the_choice_stands_in_the_address(browser: Any, tab: Tab) -> None:  # noqa: ANN401
    tab.page.get_by_label("verdict").select_option("fail")
    again = Tab(browser, tab.page.url)
    assert again.rows() == ["gamma"]
    again.page.close()


def test_a_definition_is_reached_with_the_keyboard_alone(tab: Tab) -> None:
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.className") == "skip"
    tab.page.keyboard.press("Enter")
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.textContent") == "beta":
            break
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url(re.compile("definitions/beta"))
    assert tab.page.get_by_role("heading", level=1).inner_text() == "beta"


@pytest.mark.parametrize("tab", ["definitions/zeta.html"], indirect=True)
def test_hostile_text_is_text(tab: Tab) -> None:
    assert HOSTILE[:20] in tab.page.locator("main").inner_text()
    assert tab.page.locator("main img").count() == 0
