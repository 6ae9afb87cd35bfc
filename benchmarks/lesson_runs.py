"""The lessons' notebooks, and how one of them runs.

This module does not import the kit, because on Colab a lesson installs it.
"""

import time
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def lessons() -> list[Path]:
    """Return the notebooks of the lessons, in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))


def run(path: Path, folder: Path = FOLDER, kernel: str = "python3") -> tuple[float, int]:
    """Run a lesson in `folder`. Return its seconds and its processes' peak memory in bytes.

    The seconds include the kernel's start. Raises nbclient's CellExecutionError if a cell fails.
    """
    from nbclient import NotebookClient

    from benchmarks.process_memory import watched

    resources = {"metadata": {"path": str(folder)}}
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, kernel_name=kernel, resources=resources)
    start = time.perf_counter()
    with client.setup_kernel(), watched(client.km.provisioner.pid) as memory:
        for index, cell in enumerate(client.nb.cells):
            client.execute_cell(cell, index)
        seconds = time.perf_counter() - start
    return seconds, memory.peak
