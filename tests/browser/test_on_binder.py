"""Whole lessons on Binder's server, with 2 GB for server and kernel together, and one core.

`nox --session binder` has built the image's content in the folder LABKIT_BINDER. The server starts
as the image's entry point starts it. If the system permits it, Linux ends a process that exceeds
the limit. In any case, the memory of all processes is added up every 50 ms.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.platforms import Figures
from benchmarks.process_memory import watched

from .container import Container, container
from .pages import FRONT_END, ask, await_answer, await_cells

pytestmark = pytest.mark.platform

LESSONS = sorted(path.name for path in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
MEMORY = 2 * 10**9  # bytes: mybinder.org's limit
CORES = 1


@pytest.fixture(scope="module")
def built() -> Path:
    folder = Path(os.environ.get("LABKIT_BINDER", ""))
    if not (folder / "bin" / "jupyter").exists():
        pytest.fail(
            "LABKIT_BINDER does not name a folder that nox has made: run `make test-binder`"
        )
    return folder.resolve()


@pytest.fixture(scope="module")
def box() -> Iterator[Container]:
    with container(MEMORY) as made:
        yield made


@pytest.fixture(scope="module")
def figures(built) -> Iterator[Figures]:
    """The lessons' time and memory, which are stored if LABKIT_FIGURES is set."""
    figures = Figures.of_this_machine("Binder stand-in", str(built / "bin" / "python"), CORES)
    yield figures
    figures.store_if_asked("binder")


@pytest.fixture(scope="module")
def started(built, box, folder, tmp_path_factory) -> Iterator[tuple[subprocess.Popen, str, float]]:
    """The server's process, its address, and its start time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    own = {name: str(tmp_path_factory.mktemp(name)) for name in names}
    variables = (
        os.environ
        | own
        | {"PATH": f"{built / 'bin'}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    )
    options = [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        *FRONT_END.options(folder),
    ]
    log = tmp_path_factory.mktemp("log") / "server.log"
    start = time.perf_counter()
    with log.open("w") as output:
        server = subprocess.Popen(
            [built / "repo" / "binder" / "start", "jupyter", "lab", *options],
            cwd=built / "repo",
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            preexec_fn=box.entering(CORES),
        )
    address = f"http://127.0.0.1:{port}"
    try:
        await_answer(address, server, log)
        yield server, address, start
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def server(started) -> str:
    return started[1]


def test_the_first_lesson_opens(started, browser, figures):
    _, address, start = started
    page = browser.new_page()
    FRONT_END.open(page, address, LESSONS[0])
    figures.setup_seconds = time.perf_counter() - start
    page.close()
    end_kernels(address)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", LESSONS)
def test_the_lesson_runs_whole_within_the_memory(started, box, browser, figures, name):
    process, address, _ = started
    page = browser.new_page()
    with watched(process.pid) as memory:
        FRONT_END.open(page, address, name)
        start = time.perf_counter()
        FRONT_END.run_all(page)
        await_cells(page)
        seconds = time.perf_counter() - start
    page.close()
    end_kernels(address)
    figures.lessons[Path(name).stem] = seconds, memory.peak
    assert box.killed() == 0 and memory.peak < MEMORY, f"{memory.peak / 1e6:.0f} MB"


def end_kernels(address: str) -> None:
    for session in ask(address, "sessions"):
        ask(address, f"sessions/{session['id']}", "DELETE")


def test_a_process_that_takes_more_is_ended(box):
    """Check that the limit takes effect, if the system lets us set it."""
    if box.folder is None:
        pytest.skip(
            "this system lets nobody make a control group here; the memory is added up instead"
        )
    greedy = f"b'x' * {MEMORY + (64 << 20)}"
    before = box.killed()
    assert (
        subprocess.run(
            ["python3", "-c", greedy], preexec_fn=box.entering(CORES), stderr=subprocess.DEVNULL
        ).returncode
        == -9
    )
    assert box.killed() > before
