"""JupyterLab or the classic notebook, whichever is installed, with copies of the lessons, in a browser of this machine."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from accessibility import violations, wordless_pictures
from executed import failures, printed
from front_ends import HEIGHT, SECONDS, TOKEN, WIDTH, ClassicNotebook, JupyterLab
from pictures import Pictures

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DONE = "every cell has run"
PATIENCE = 240  # seconds for all cells of a lesson: many times what they take on two idle cores
SLOWEST = 60 * SECONDS  # what a page shows after a click, on a machine that is busy with something else
FRONT_END = JupyterLab() if find_spec("jupyterlab") else ClassicNotebook()
PICTURES = Pictures(Path(os.environ.get("LABKIT_SCREENSHOTS", ROOT / "build" / "screenshots")), FRONT_END.module)


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
def front_end() -> JupyterLab | ClassicNotebook:
    return FRONT_END


@pytest.fixture(scope="session")
def server(folder, tmp_path_factory) -> Iterator[str]:
    """The address of a notebook server of its own, whose kernels use virtual GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", *FRONT_END.options(folder)]
    # Neither read nor change what the user has set and installed for notebooks.
    settings = {name: str(tmp_path_factory.mktemp(name)) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", FRONT_END.module, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LABKIT_VIRTUAL": "1"} | settings,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                ask(address, "status")
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                time.sleep(0.25)
        yield address
    finally:
        server.terminate()
        server.wait(60)


def ask(address: str, what: str, method: str = "GET") -> object:
    """What the server answers to a question of its REST interface."""
    request = urllib.request.Request(f"{address}/api/{what}", method=method, headers={"Authorization": f"token {TOKEN}"})
    with urllib.request.urlopen(request) as answer:
        text = answer.read()
    return json.loads(text) if text else None


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """A Chromium with an empty profile."""
    from playwright.sync_api import expect, sync_playwright

    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        pytest.fail(f"no browser found; install one of {', '.join(CHROMIUMS)} (Debian and Ubuntu: apt-get install chromium)")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=program, headless=True, args=FLAGS, viewport={"width": WIDTH, "height": HEIGHT}
        )
        expect.set_options(timeout=SLOWEST)
        context.set_default_timeout(SLOWEST)
        yield context
        context.close()


def await_cells(page: object) -> None:
    """Wait until all cells have run. The test fails at once when one of them does, and after `PATIENCE`, with a picture of the page."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        cells = page.evaluate(FRONT_END.cells)
        if failed := failures(cells):
            pytest.fail("\n\n".join(failed))
        if DONE in printed(cells[-1]):
            return
        page.wait_for_timeout(0.5 * SECONDS)
    PICTURES.keep(page, "not_all_cells_have_run")
    pytest.fail(f"not all cells have run after {PATIENCE} s; the page: {PICTURES.folder}")


def examine(page: object, name: str) -> list[str]:
    """What is wrong with what the page draws, in any theme. A picture of each is kept."""
    found = []
    FRONT_END.show_whole(page)
    for theme in FRONT_END.themes:
        FRONT_END.change_theme(page, theme)
        found += [f"{name}, {theme}: {said}" for said in (*violations(page, FRONT_END.drawn), *wordless_pictures(page, FRONT_END.drawn))]
        PICTURES.keep(page, f"{name}_{theme.split()[-1].lower()}")
    FRONT_END.change_theme(page, FRONT_END.themes[0])
    return found


@contextmanager
def opened(server: str, browser: object) -> Iterator[Callable[[str], object]]:
    """A function that opens a notebook, runs all its cells and returns the page.

    At the end every page whose cells have run is examined; none may have had an error in its console.
    """
    pages, finished, wrong = [], {}, []

    def open_and_run(name: str) -> object:
        page = browser.new_page()
        pages.append(page)
        page.on("pageerror", lambda error: wrong.append(f"{name}: {error}"))
        page.on("console", lambda message: wrong.append(f"{name}: {message.text}") if message.type == "error" else None)
        FRONT_END.open(page, server, name)
        FRONT_END.run_all(page)
        await_cells(page)
        finished[name] = page
        return page

    try:
        yield open_and_run
        for name, page in finished.items():
            wrong += examine(page, Path(name).stem)
    finally:
        for page in pages:
            page.close()
        for session in ask(server, "sessions"):
            ask(server, f"sessions/{session['id']}", "DELETE")
    assert not wrong, "\n\n".join(wrong)


@pytest.fixture
def open_lesson(server, browser) -> Iterator[Callable[[str], object]]:
    """A function that opens a lesson, runs all its cells and returns the page, which is examined when the test has ended."""
    with opened(server, browser) as open_and_run:
        yield open_and_run


@pytest.fixture
def open_cells(folder, open_lesson) -> Callable[..., object]:
    """A function that makes a notebook of some cells, those at `raising` tagged as meant to fail, runs them and returns the page."""

    def make_and_open(name: str, cells: Sequence[str], raising: Sequence[int] = ()) -> object:
        return open_lesson(make_notebook(folder, name, cells, raising))

    return make_and_open


def make_notebook(folder: Path, name: str, cells: Sequence[str], raising: Sequence[int] = ()) -> str:
    """Write a notebook of these cells, and the one that says that all have run; what it is called."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in (*cells, f"print('{DONE}')")]
    for number in raising:
        notebook.cells[number].metadata.tags = ["raises-exception"]
    nbformat.write(notebook, folder / f"{name}.ipynb")
    return f"{name}.ipynb"


@pytest.fixture(scope="session")
def look() -> Callable[..., None]:
    """A function that photographs the page, with an element in sight, for who wants to look."""

    def photograph(page: object, name: str, element: object = None) -> None:
        if element is not None:
            element.evaluate("element => element.scrollIntoView({block: 'center'})")
        PICTURES.keep(page, name)

    return photograph


def pytest_terminal_summary(terminalreporter) -> None:
    """Say where the pictures are."""
    if said := PICTURES.told():
        terminalreporter.write_line(said)
