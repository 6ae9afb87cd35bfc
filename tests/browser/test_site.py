"""The site that `make docs` builds: everybody reaches what is on it, on a wide page and on a narrow one, in light and in dark."""

from pathlib import Path

import pytest
from accessibility import GRAVE

pytestmark = pytest.mark.browser

SITE = Path(__file__).parents[2] / "build" / "site"
LESSONS = ("notebooks/02_streams", "notebooks/12_several_machines")
PAGES = ("index", *LESSONS, "docs/glossary", "docs/reference", "docs/measured/report_h200_x1")


@pytest.fixture
def page(browser):
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_and_reach_each_page(page, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    for name in PAGES:
        page.goto((SITE / f"{name}.html").as_uri())
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert [(name, each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in GRAVE] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width  # it scrolls in one direction only


def test_a_reader_goes_from_lesson_to_lesson_and_finds_a_word(page):
    from playwright.sync_api import expect

    page.goto((SITE / "index.html").as_uri())
    page.get_by_role("link", name="2 Streams and synchronization").first.click()
    page.get_by_role("link", name="Next 3 DataParallel from the inside").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("3 DataParallel from the inside")
    page.get_by_placeholder("Search").fill("fragmented")
    page.get_by_placeholder("Search").press("Enter")
    expect(page.locator("#search-results li").first).to_be_visible()


def test_solutions_stay_folded(page):
    page.goto((SITE / "notebooks/02_streams.html").as_uri())
    solutions = page.locator("details", has_text="Solution of")
    assert solutions.count() == 5
    assert all(solutions.nth(number).get_attribute("open") is None for number in range(5))
