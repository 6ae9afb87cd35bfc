"""The stored notebooks were run from top to bottom, and their outputs name no machine.

nbval needs this. It compares nothing in a cell without an execution count, so a notebook that was
saved without outputs would pass.
"""

import re
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
OF_ONE_MACHINE = re.compile(
    r"object at 0x[0-9a-f]+|/home/\w+|/Users/\w+|/root/|[A-Z]:\\Users|ipykernel_"
)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def texts(output: nbformat.NotebookNode) -> list[str]:
    """Return all the text of an output that a reader sees."""
    data = output.get("data", {})
    return [
        output.get("text", ""),
        *output.get("traceback", []),
        *(str(value) for kind, value in data.items() if kind.startswith("text/")),
    ]


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS][:1] == ["00_start_here.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_valid_and_names_the_usual_kernel(path):
    notebook = read(path)
    nbformat.validate(notebook)
    # from 4.5 on, cells have identities
    assert (notebook.nbformat, notebook.nbformat_minor >= 5) == (
        4,
        True,
    )
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_run_from_top_to_bottom(path):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_errors_are_stored_only_where_a_cell_is_meant_to_raise(path):
    for cell in read(path).cells:
        if any(output.output_type == "error" for output in cell.get("outputs", [])):
            assert "raises-exception" in cell.metadata.get("tags", []), cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_race_is_warned_of(path):
    """Check that no warning of a race is stored. Lessons print planned races themselves."""
    for cell in read(path).cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr" or "RaceWarning" not in output.text, cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_hold_nothing_of_one_machine(path):
    for cell in read(path).cells:
        for output in cell.get("outputs", []):
            for text in texts(output):
                assert not (found := OF_ONE_MACHINE.search(text)), (
                    f"{found[0]!r} in the output of: {cell.source}"
                )
