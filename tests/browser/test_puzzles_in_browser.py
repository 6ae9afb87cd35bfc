"""The notebook of puzzles as a learner uses it: solutions of all kinds, an interrupt, and hints."""

import nbformat
import pytest

from .conftest import NOTEBOOKS
from .front_ends import JupyterLab
from .keyboard import press, reach
from .pages import FRONT_END, ask, examine

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not isinstance(FRONT_END, JupyterLab), reason="types into JupyterLab's editors"
    ),
]
NAME = "some_puzzles.ipynb"
FIRST = "def softmax_of_rows(scores):\n"
CALL = '\n\nlabkit.puzzle("one launch", softmax_of_rows)'
SOLUTION = "    return scores.softmax(dim=1)"
WRONG = "    return scores.softmax(dim=0)"
FAULTY = "    return scores.soft_max(dim=1)"
ENDLESS = "    while True:\n        pass"


@pytest.fixture
def page(folder, server, browser):
    """The page of a notebook with the rules and the third puzzle."""
    notebook = nbformat.read(NOTEBOOKS / "puzzles.ipynb", as_version=4)
    shown = [cell for cell in notebook.cells if cell.id.startswith(("title", "use", "one-launch"))]
    for cell in shown:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.cells = shown
    nbformat.write(notebook, folder / NAME)
    page = browser.new_page()
    FRONT_END.open(page, server, NAME)
    yield page
    page.close()
    for session in ask(server, "sessions"):
        if session["path"] == NAME:
            ask(server, f"sessions/{session['id']}", "DELETE")


def test_a_puzzle_is_tried_in_five_ways_and_its_hints_open_with_keys(page, look):
    from playwright.sync_api import expect

    page.set_viewport_size({"width": 1600, "height": 1000})
    cells = page.locator(FRONT_END.cell)
    puzzle = cells.nth(1)

    def run(cell, body=None):
        cell.locator(FRONT_END.source).click()
        if body is not None:
            page.keyboard.press("Control+A")
            page.evaluate("text => navigator.clipboard.writeText(text)", FIRST + body + CALL)
            page.keyboard.press("Control+V")
        page.keyboard.press("Control+Enter")

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    run(cells.nth(0))
    expect(cells.nth(0)).to_contain_text("1 virtual GPU")
    run(puzzle)
    expect(puzzle).to_contain_text("the values are right, but the budget is 5")
    expect(puzzle.locator("img")).to_have_count(1)
    look(page, "puzzle_original", puzzle)
    for body, said, name in (
        (WRONG, "the result differs in 40,000 of 40,000 elements", "wrong"),
        (FAULTY, "your function raised AttributeError", "error"),
        (SOLUTION, "Right Your launches: 1. That is par.", "right"),
    ):
        run(puzzle, body)
        expect(puzzle).to_contain_text(said)
        look(page, f"puzzle_{name}", puzzle)
    run(puzzle, ENDLESS)
    expect(puzzle.locator(".jp-InputPrompt")).to_have_text("[*]:")
    page.keyboard.press("Escape")
    page.keyboard.type("ii")
    expect(puzzle).to_contain_text("the puzzle was interrupted while your function ran")
    look(page, "puzzle_interrupted", puzzle)
    run(puzzle, SOLUTION)
    expect(puzzle).to_contain_text("your best so far")

    hints = page.locator(".jp-MarkdownCell summary")
    texts = page.locator(".jp-MarkdownCell details > p")
    expect(hints).to_have_count(3)
    reach(page, puzzle, "Escape")
    page.keyboard.press("ArrowDown")
    for number in range(3):
        expect(texts.nth(number)).to_be_hidden()
        press(page, hints.nth(number), "Enter")
        expect(texts.nth(number)).to_be_visible()
        look(page, f"puzzle_hint_{number + 1}", hints.nth(0))
    page.set_viewport_size({"width": FRONT_END.narrow, "height": 1000})
    look(page, "puzzle_narrow", puzzle)
    assert examine(page, "puzzles") == []
