"""JupyterLab with copies of the notebooks, in a browser that is installed on this machine."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
TOKEN = "browser-tests"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# The indicator says idle before the front end has the kernel's description; cells run in between are lost, all but the first.
READY = """async () => {
    const session = window.jupyterapp.shell.currentWidget.sessionContext;
    await session.ready;
    await session.session.kernel.info;
    await session.session.kernel.requestKernelInfo();
}"""
SHUT_DOWN = "() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()"
DONE = "every cell has run"
SECONDS = 1000  # Playwright counts in milliseconds


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Copies of the notebooks, so that the stored ones stay as they are; each ends in a cell that says that all have run."""
    copies = tmp_path_factory.mktemp("lessons")
    for path in NOTEBOOKS.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        notebook.cells.append(nbformat.v4.new_code_cell(f"print('{DONE}')"))
        nbformat.write(notebook, copies / path.name)
    return copies


@pytest.fixture(scope="session")
def lab(folder) -> Iterator[str]:
    """The address of a JupyterLab of its own, whose kernels use virtual GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "jupyterlab.log"
    options = f"--no-browser --allow-root --ip=127.0.0.1 --port={port} --ServerApp.port_retries=0 --IdentityProvider.token={TOKEN}"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options.split(), "--LabApp.expose_app_in_browser=True", f"--ServerApp.root_dir={folder}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LABKIT_VIRTUAL": "1"},
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/api?token={TOKEN}").close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                time.sleep(0.25)
        yield address
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """A Chromium with an empty profile."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        pytest.fail(f"no browser found; install one of {', '.join(CHROMIUMS)} (Debian and Ubuntu: apt-get install chromium)")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=program, headless=True, args=FLAGS, viewport={"width": 1200, "height": 1000}
        )
        yield context
        context.close()


@pytest.fixture
def open_lesson(lab, browser, tmp_path) -> Iterator[Callable[[str], object]]:
    """A function that opens a lesson, runs all its cells and returns the page; no page may have had a JavaScript error."""
    pages, errors = [], []

    def open_and_run(name: str) -> object:
        page = browser.new_page()
        pages.append(page)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{lab}/lab/tree/{name}?reset&token={TOKEN}")
        page.locator(".jp-Notebook").wait_for(timeout=60 * SECONDS)
        page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for(timeout=60 * SECONDS)
        page.evaluate(READY)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()
        try:
            page.locator(".jp-OutputArea-output", has_text=DONE).wait_for(timeout=120 * SECONDS)
        except Exception:
            picture = tmp_path / "page.png"
            page.screenshot(path=picture)
            pytest.fail(f"not all cells of {name} have run after 120 s; the page: {picture}")
        return page

    yield open_and_run
    for page in pages:
        page.evaluate(SHUT_DOWN)
        page.close()
    assert errors == []
