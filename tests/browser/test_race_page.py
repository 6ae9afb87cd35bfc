"""The page that `trace` writes about a race: the list, the arrow, and the search as one types."""

import subprocess
import sys

import pytest

from .accessibility import GRAVE

pytestmark = pytest.mark.browser

RACE = """
import torch

side = torch.cuda.Stream()
x = torch.ones(2048, 2048, device="cuda")
y = x @ x
with torch.cuda.stream(side):
    z = y + 1
torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def race_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("race")
    (folder / "race.py").write_text(RACE)
    command = [sys.executable, "-m", "labkit", "trace", "--gpus", "1", "race.py"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=240)
    return folder / "race-memory.html"


@pytest.fixture
def page(browser, race_page):
    page = browser.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(race_page.as_uri())
    page.locator(".explorer .frame canvas[data-drawn]").wait_for()
    yield page
    page.close()
    assert wrong == []


def test_a_race_of_the_list_is_shown_on_the_timeline(page, look):
    listed = page.locator(".races")
    assert "nothing orders these launches" in listed.inner_text()
    wait = "torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()) before race.py:8"
    assert wait in listed.inner_text()
    page.get_by_role("button", name="Show race 1 on the timeline").press("Enter")
    chosen = page.locator(".explorer .chosen")
    for words in ("mm on the default stream", "race.py:6", "add on stream 1", "race.py:8"):
        assert words in chosen.inner_text()
    look(page, "race_page", page.locator(".explorer .frame canvas"))
    page.keyboard.press("Escape")  # the focus is on the timeline
    assert "race 1" not in chosen.inner_text()
    page.keyboard.press("r")
    assert "race 1" in chosen.inner_text()


def test_the_search_answers_as_one_types(page):
    box = page.get_by_label("Find a kernel, a block or a line")
    answer = page.locator(".explorer output.found")
    box.press_sequentially("mm")
    assert answer.inner_text().startswith("1 of ")
    assert "mm" in page.locator(".explorer .chosen").inner_text()
    box.press_sequentially("zzz")
    assert answer.inner_text() == "Nothing matches “mmzzz”."
    box.fill("")
    assert answer.inner_text() == ""


@pytest.mark.parametrize("width", [1280, 390])
def test_every_word_of_the_legend_is_explained(page, width):
    from axe_playwright_python.sync_playwright import Axe

    page.set_viewport_size({"width": width, "height": 900})
    page.locator(".explorer .words summary").click()
    shown = set(page.locator(".explorer .legend span").all_inner_texts())
    assert {"kernel", "race", "host waits"} <= shown
    assert shown <= set(page.locator(".explorer .words dt").all_inner_texts())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [each["id"] for each in found if each["impact"] in GRAVE] == []


def test_the_flame_graph_is_zoomed_by_keyboard(page, look):
    graph = page.locator(".flame")
    bar = graph.get_by_role("button", name="race.py:6 y = x @ x")
    whole = bar.bounding_box()["width"]
    bar.press("Enter")
    assert "% of the peak" in graph.locator("output").inner_text()
    bar = graph.get_by_role("button", name="race.py:6 y = x @ x")
    assert bar.bounding_box()["width"] > 1.5 * whole
    look(page, "flame_graph", graph)
    graph.get_by_role("button", name="all at the peak").press("Enter")
    bar = graph.get_by_role("button", name="race.py:6 y = x @ x")
    assert bar.bounding_box()["width"] == whole
