"""A lab whose kernel has ended shows its last figure, and which cells bring it back."""

import pytest

from .front_ends import JupyterLab
from .labs import Lab
from .pages import FRONT_END, ask, await_cells, make_notebook
from .test_own_lab import CELLS

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not isinstance(FRONT_END, JupyterLab), reason="the error is JupyterLab's own"
    ),
]
NAME = "lab_after_restart"
TOLD = (
    "This is the lab's last figure. The lab ended with its kernel. To use it again, run the set-up "
    "cell at the top of the lesson, the cell that defines step_seconds, and then this cell."
)


@pytest.fixture
def page(folder, server, browser):
    """A page of a stored notebook, with a lab that shows a figure."""
    page = browser.new_page()
    FRONT_END.open(page, server, make_notebook(folder, NAME, CELLS))
    FRONT_END.run_all(page)
    await_cells(page)
    lab = Lab(page)
    lab.takes("2")
    lab.run.click()
    lab.says("times. You predicted 2, which is")
    yield page
    page.close()
    ask(server, f"sessions/{session(server)['id']}", "DELETE")


def session(server):
    """Return the server's description of the page's kernel session."""
    [found] = [each for each in ask(server, "sessions") if each["path"] == f"{NAME}.ipynb"]
    return found


def save(page):
    page.keyboard.press("Control+S")
    page.wait_for_function("!window.jupyterapp.shell.currentWidget.context.model.dirty")


def shows_what_is_kept(page):
    from playwright.sync_api import expect

    kept = page.locator("[class$=-kept]")
    expect(kept).to_be_visible()
    expect(kept.locator("p")).to_have_text(TOLD)
    expect(kept.locator("img").first).to_be_visible()
    expect(page.get_by_label("Your prediction:").locator("visible=true")).to_have_count(0)
    for said in ("model not found", "Loading widget"):
        expect(page.get_by_text(said).locator("visible=true")).to_have_count(0)


def test_after_a_restart_of_the_kernel_and_of_the_server(page, server, look):
    from playwright.sync_api import expect

    kept = page.locator("[class$=-kept]")
    expect(kept).to_be_attached()
    expect(kept).to_be_hidden()
    look(page, "lab_alive", page.get_by_label("Your prediction:"))
    save(page)
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    shows_what_is_kept(page)
    look(page, "lab_kernel_restarted", kept)
    page.reload()
    page.locator(FRONT_END.notebook).wait_for()
    page.evaluate(FRONT_END.ready)
    shows_what_is_kept(page)
    look(page, "lab_next_morning", kept)
    FRONT_END.run_all(page)
    await_cells(page)
    expect(page.get_by_label("Your prediction:")).to_be_visible()
    expect(kept).to_be_hidden()
