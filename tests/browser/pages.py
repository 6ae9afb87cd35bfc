"""Pages of the browser. A test opens a notebook, runs its cells, and examines the page."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from .accessibility import violations, wordless_pictures
from .executed import failures, printed
from .front_ends import SECONDS, TOKEN, ClassicNotebook, JupyterLab
from .pictures import Pictures

ROOT = Path(__file__).parents[2]
STARTED = 180  # seconds until a notebook server answers
DONE = "every cell has run"
PATIENCE = 240  # seconds for all cells of a lesson: many times what they take on two idle cores
FRONT_END = JupyterLab() if find_spec("jupyterlab") else ClassicNotebook()
PICTURES = Pictures(
    Path(os.environ.get("LABKIT_SCREENSHOTS", ROOT / "build" / "screenshots")), FRONT_END.module
)


def make_notebook(
    folder: Path, name: str, cells: Sequence[str], raising: Sequence[int] = ()
) -> str:
    """Write a notebook of these cells, and a cell that says that all have run. Return its name."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in (*cells, f"print('{DONE}')")]
    for number in raising:
        notebook.cells[number].metadata.tags = ["raises-exception"]
    nbformat.write(notebook, folder / f"{name}.ipynb")
    return f"{name}.ipynb"


def ask(address: str, what: str, method: str = "GET") -> object:
    """Return the server's answer to a request of its REST interface.

    `what` is the path of the request, and `method` the HTTP method.
    """
    request = urllib.request.Request(
        f"{address}/api/{what}", method=method, headers={"Authorization": f"token {TOKEN}"}
    )
    with urllib.request.urlopen(request) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def await_answer(address: str, server: subprocess.Popen, log: Path) -> None:
    """Wait until the server answers.

    If it ends or takes too long, the test fails and shows the server's log.
    """
    end = time.monotonic() + STARTED
    while True:
        try:
            ask(address, "status")
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                pytest.fail(f"no notebook server answers at {address}:\n{log.read_text()}")
            time.sleep(0.1)


def await_cells(page: object) -> None:
    """Wait until all cells have run.

    If a cell fails, or after `PATIENCE` seconds, the test fails and takes a picture of the page.
    """
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
    """Return the faults of a page in all themes, and keep a picture of each theme."""
    found = []
    FRONT_END.show_whole(page)
    for theme in FRONT_END.themes:
        FRONT_END.change_theme(page, theme)
        found += [
            f"{name}, {theme}: {said}"
            for said in (
                *violations(page, FRONT_END.drawn),
                *wordless_pictures(page, FRONT_END.drawn),
            )
        ]
        PICTURES.keep(page, f"{name}_{theme.split()[-1].lower()}")
    FRONT_END.change_theme(page, FRONT_END.themes[0])
    return found


@contextmanager
def opened(
    server: str, browser: object, script: str | None = None
) -> Iterator[Callable[[str], object]]:
    """Yield a function that opens a notebook, runs all its cells and returns the page.

    At the end, every page whose cells have run is examined. No page may have had an error in its
    console.

    Args:
        script: JavaScript that runs in each page before the page's own scripts.
    """
    pages, names, finished, wrong = [], [], {}, []

    def open_and_run(name: str) -> object:
        page = browser.new_page()
        if script is not None:
            page.add_init_script(script)
        pages.append(page)
        names.append(name)
        page.on("pageerror", lambda error: wrong.append(f"{name}: {error}"))
        page.on(
            "console",
            lambda message: (
                wrong.append(f"{name}: {message.text}") if message.type == "error" else None
            ),
        )
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
            if session["path"] in names:
                ask(server, f"sessions/{session['id']}", "DELETE")
    assert not wrong, "\n\n".join(wrong)
