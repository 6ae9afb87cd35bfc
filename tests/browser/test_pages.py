"""Every lesson runs in a page as a learner runs it. Faults of a page are found and reported."""

from pathlib import Path

import pytest

from .keyboard import walk
from .pages import make_notebook, opened

pytestmark = pytest.mark.browser

LESSONS = sorted(path.name for path in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
FAR_DOWN = ["print('down\\n' * 60)"] * 20  # what is far out of sight is not in the page at all
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
HTML = (
    "<p style='color: #999999; background: white'>pale</p>",
    f"<svg width='20' height='20' role='img'></svg><img src='{PIXEL}' width='20' height='20'>",
    f"<img src='{PIXEL}' width='20' height='20' alt='figure 1'>",
    "<script>console.error('something broke')</script>",
    "<div id='panel'><button>1</button><br><button style='position: relative; top: "
    "-40px'>2</button>"
    "<input style='outline: none; border: none' aria-label='unseen'><a tabindex='0' "
    "href='#'>3</a></div>",
)
CELLS = ("from IPython.display import HTML", *(f"HTML({html!r})" for html in HTML))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", LESSONS)
def test_all_cells_run(open_lesson, front_end, name):
    page = open_lesson(name)
    assert page.locator(front_end.cell).count() > 1


def test_an_error_is_found_and_said(open_cells):
    with pytest.raises(
        pytest.fail.Exception,
        match=r"cell 3:\nspeed = 1 / 0\n(?s:.*)ZeroDivisionError: division by zero",
    ):
        open_cells("error", ["1 + 1", "2", "3", "speed = 1 / 0", *FAR_DOWN])


def test_a_traceback_of_a_thread_is_found_too(open_cells):
    thread = (
        "import threading\n\nthread = threading.Thread(target=lambda: [][0])\nthread.start()\n"
        "thread.join()"
    )
    with pytest.raises(
        pytest.fail.Exception,
        match=r"cell 0:\nimport threading(?s:.*)IndexError: list index out of range",
    ):
        open_cells("thread", [thread, *FAR_DOWN])


def test_an_error_that_a_tag_announces_may_come(open_cells):
    page = open_cells("announced", ["1 / 0", *FAR_DOWN], raising=[0])
    assert page.evaluate("document.readyState") == "complete"


def test_each_fault_is_told(server, browser, folder, front_end):
    with pytest.raises(AssertionError) as raised, opened(server, browser) as open_and_run:
        page = open_and_run(make_notebook(folder, "faulty", CELLS))
        panel = page.locator("#panel")
        panel.locator("button").first.focus()
        front_end.select_cell(page, page.locator(front_end.cell).nth(len(HTML)))
        assert sorted(fault.split(":")[0] for fault in walk(page, panel)) == [
            "cannot be seen there",
            "reached too late",
        ]
    told = str(raised.value)
    assert "faulty.ipynb: something broke" in told
    assert "svg-img-alt (serious)" in told
    assert (
        told.count("a picture whose words are") == 2 * len(front_end.themes)
        and "a picture whose words are “figure 1”" in told
    )
    assert all(f"{theme}: color-contrast (serious)" in told for theme in front_end.themes)
