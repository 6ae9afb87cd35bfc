"""The first page in JupyterLab: the table of lessons, with progress from another notebook."""

import re

import nbformat
import pytest

from labkit import lesson_copies

from .front_ends import JupyterLab
from .pages import FRONT_END, ask, examine

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not isinstance(FRONT_END, JupyterLab),
        reason="`make lab` opens the contents in JupyterLab alone",
    ),
]
ANSWER = 'def on_gpu(numbers):\n    return torch.tensor(numbers, device="cuda")'


@pytest.fixture
def work(folder, server):
    """A learner's folder in which the exercise of the first lesson is solved."""
    copies = folder / "contents"
    lesson_copies.copy(copies)
    lesson = nbformat.read(copies / "00_start_here.ipynb", as_version=4)
    next(
        cell for cell in lesson.cells if "exercise" in cell.metadata.get("tags", [])
    ).source = ANSWER
    nbformat.write(lesson, copies / "00_start_here.ipynb")
    yield copies
    for session in ask(server, "sessions"):
        if session["path"].startswith("contents/"):
            ask(server, f"sessions/{session['id']}", "DELETE")


def test_the_table_is_there_before_anything_runs_and_counts_an_exercise_done_in_a_lesson(
    work, server, browser
):
    from playwright.sync_api import expect

    page = browser.new_page()
    try:
        FRONT_END.open(page, server, "contents/index.ipynb")
        rows = page.locator(".jp-OutputArea-output tbody tr")
        expect(rows).to_have_count(len(lesson_copies.lesson_files()))
        expect(rows.first).to_contain_text("0 of 1")
        rows.first.get_by_role("link", name="0 Start here").click()
        lesson = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)", has_text="A puzzle")
        expect(lesson.get_by_role("link", name="1 Device basics →").first).to_be_visible()
        page.evaluate(FRONT_END.ready)
        FRONT_END.run_all(page)
        page.wait_for_function(
            f"JSON.stringify({FRONT_END.cells}).includes('Lesson 00: 1 of 1 right')"
        )
        page.get_by_role("tab", name=re.compile("index.ipynb")).click()
        page.evaluate(FRONT_END.ready)
        FRONT_END.run_all(page)
        expect(rows.first).to_contain_text("1 of 1")
        assert examine(page, "contents") == []
    finally:
        page.close()
