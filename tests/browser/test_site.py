"""The site of `make docs`: all of it can be reached on wide and narrow pages, light and dark."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from .accessibility import GRAVE

pytestmark = pytest.mark.browser

SITE = Path(__file__).parents[2] / "build" / "site"
LESSONS = ("notebooks/02_streams", "notebooks/12_several_machines")
LIVE = "docs/a-step-on-four-gpus"
PAGES = (
    "index",
    *LESSONS,
    "docs/glossary",
    LIVE,
    f"{LIVE}-explorer",
    f"{LIVE}-trace",
    "docs/reference/labkit",
    "docs/reference/command-line",
    "docs/will-it-fit",
    "docs/measured/report_h200_x1",
)


class Read(HTMLParser):
    """Parser that collects a page's links and pictures, and the anchors that a link may name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.places = [], {""}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.places.add(value)
            elif name in ("href", "src") and not urlsplit(value).scheme:
                self.links.append(urlsplit(value))


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
        assert [
            (name, each["id"], each["nodes"][0]["html"])
            for each in found
            if each["impact"] in GRAVE
        ] == []
        # it scrolls in one direction only
        assert page.evaluate("document.documentElement.scrollWidth") <= width


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


def test_a_recording_is_looked_into_where_scripts_run(page):
    from playwright.sync_api import expect

    page.goto((SITE / f"{LIVE}.html").as_uri())
    page.locator("iframe.live").scroll_into_view_if_needed()
    explorer = page.frame_locator("iframe.live")
    explorer.get_by_label("Find a kernel, a block or a line").fill("attention_backward")
    explorer.get_by_label("Find a kernel, a block or a line").press("Enter")
    expect(explorer.locator(".chosen")).to_contain_text("loss.backward()")
    expect(page.locator("details.picture img")).to_be_hidden()


def test_elsewhere_its_picture_stays(browser):
    silent = browser.browser.new_context(java_script_enabled=False)
    page = silent.new_page()
    page.goto((SITE / f"{LIVE}.html").as_uri())
    assert (
        page.locator("details.picture img").is_visible()
        and not page.locator("iframe.live").is_visible()
    )
    silent.close()


def test_the_picture_is_that_of_the_recording(page):
    """Compare the picture stored for GitHub with the site's picture.

    Each build of the site records its picture again.
    """
    page.goto((SITE / f"{LIVE}-trace.html").as_uri())
    drawn = page.locator("figure img").first.get_attribute("alt").partition(". ")[0]
    page.goto((SITE / f"{LIVE}.html").as_uri())
    assert page.locator("details.picture img").get_attribute("alt").startswith(drawn)


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("run on colab", "Where the lessons run"),
        ("race warning", "2 Streams and synchronization"),
        ("how accurate", "How accurate the virtual GPUs are"),
        ("grade submissions", "Teaching with the kit"),
        ("fit T4", "On your own script"),
        ("torch.cuda.Stream", "2 Streams and synchronization"),
        ("out of memory", "5 The caching allocator"),
        ("license", "License and citation"),
    ],
)
def test_what_a_stranger_looks_for_is_among_the_first_found(page, query, wanted):
    from playwright.sync_api import expect

    page.goto((SITE / "index.html").as_uri())
    page.get_by_placeholder("Search").fill(query)
    page.get_by_placeholder("Search").press("Enter")
    expect(page.locator(".search-summary")).to_contain_text("finished")
    found = [text.splitlines()[0] for text in page.locator("#search-results li").all_inner_texts()]
    assert any(title == wanted or title.endswith(f"> {wanted}") for title in found[:4])


@pytest.mark.parametrize("chosen", ["auto", "light", "dark"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_dark_where_the_page_is(page, scheme, chosen):
    """Check the theme that the reader chooses with the page's switch, and the system's."""
    page.emulate_media(color_scheme=scheme)
    page.goto((SITE / "index.html").as_uri())
    page.evaluate(f"document.body.dataset.theme = '{chosen}'")
    drawn = page.locator("article img").first.evaluate("image => getComputedStyle(image).filter")
    dark = scheme == "dark" if chosen == "auto" else chosen == "dark"
    assert drawn.startswith("invert") is dark


def test_every_link_within_the_site_arrives():
    """Links within the site must lead to a page and to an anchor on it.

    Sphinx does not check the links in HTML.
    """
    pages = {path: Read(path) for path in SITE.rglob("*.html")}
    lost = []
    for path, read in pages.items():
        for link in read.links:
            target = (path.parent / unquote(link.path)).resolve() if link.path else path
            if not target.is_file() or (
                target in pages and unquote(link.fragment) not in pages[target].places
            ):
                lost.append((path.name, link.geturl()))
    assert sum(len(read.links) for read in pages.values()) > 1000 and lost == []
