"""A server of JupyterLab or the classic notebook, copies of the lessons, and a browser."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

from ..colab_runtime import kernel_settings
from .front_ends import HEIGHT, SECONDS, WIDTH, ClassicNotebook, JupyterLab
from .pages import DONE, FRONT_END, PICTURES, await_answer, make_notebook, opened

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHROMIUMS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TOLD: list[str] = []  # by other processes, of their pictures
# what a page shows after a click, on a machine that is busy with something else
SLOWEST = 60 * SECONDS


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with the notebooks.

    Each has an extra last cell that shows that all cells have run.
    """
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
    options = [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        *FRONT_END.options(folder),
    ]
    # Neither read nor change what the user has set and installed for notebooks.
    settings = {
        name: str(tmp_path_factory.mktemp(name))
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    if isinstance(FRONT_END, ClassicNotebook):  # it stands in for Colab
        settings |= kernel_settings(tmp_path_factory.mktemp("ipython"))
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", FRONT_END.module, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LABKIT_VIRTUAL": "1"} | settings,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        await_answer(address, server, log)
        yield address
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """A Chromium with an empty profile."""
    from playwright.sync_api import expect, sync_playwright

    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        pytest.fail(
            f"no browser found; install one of {', '.join(CHROMIUMS)} (Debian and Ubuntu: apt-get "
            f"install chromium)"
        )
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=program,
            headless=True,
            args=FLAGS,
            viewport={"width": WIDTH, "height": HEIGHT},
        )
        expect.set_options(timeout=SLOWEST)
        context.set_default_timeout(SLOWEST)
        yield context
        context.close()


@pytest.fixture
def open_lesson(server, browser) -> Iterator[Callable[[str], object]]:
    """A function that opens a lesson, runs its cells and returns the page.

    The page is examined at the end of the test.
    """
    with opened(server, browser) as open_and_run:
        yield open_and_run


@pytest.fixture
def open_cells(folder, open_lesson) -> Callable[..., object]:
    """A function that makes a notebook of cells, runs it and returns the page.

    Cells at the positions `raising` have the tag of cells that are meant to fail.
    """
    return lambda name, cells, raising=(): open_lesson(make_notebook(folder, name, cells, raising))


@pytest.fixture(scope="module")
def open_cells_once(folder, server, browser) -> Iterator[Callable[..., object]]:
    """A function like that of `open_cells`, for a page that all tests of a file share."""
    with opened(server, browser) as open_and_run:
        yield lambda name, cells: open_and_run(make_notebook(folder, name, cells))


@pytest.fixture(scope="session")
def look() -> Callable[..., None]:
    """A function that scrolls to an element and takes a picture of the page.

    The picture is kept in a folder for people to look at.
    """

    def photograph(page: object, name: str, element: object = None) -> None:
        if element is not None:
            element.evaluate("element => element.scrollIntoView({block: 'center'})")
        PICTURES.keep(page, name)

    return photograph


# At the end it is said where the pictures are, also where several processes took them.


def pytest_sessionfinish(session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["pictures"] = PICTURES.told()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    TOLD.append(getattr(node, "workeroutput", {}).get("pictures", ""))


def pytest_terminal_summary(terminalreporter) -> None:
    for said in filter(None, [*TOLD, PICTURES.told()]):
        terminalreporter.write_line(said)
