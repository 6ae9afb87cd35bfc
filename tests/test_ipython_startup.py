"""What a fresh kernel says of a cell that needs the kit before the set-up cell has run."""

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FILE = Path(__file__).parents[1] / "labkit" / "ipython_startup.py"
CELLS = {
    "name": "labkit.progress('00')",
    "torch": "torch.ones(3)",
    "nn": "nn.Linear(2, 2)",
    "memory": "%%gpu_memory\nx = 1",
    "ranks": "%%torchrun --ranks 2\nprint(1)",
    "another name": "other",
    "another magic": "%%no_such_magic\nx = 1",
    "names": "print([name for name in dir() if 'hint' in name])",
    "set-up": "import labkit\n%load_ext labkit",
    "a wrong option": "%%gpu_memory --no-such-option\nx = 1",
    "after the set-up": "dist",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The output of each cell, in one kernel that runs the file at its start."""
    folder = tmp_path_factory.mktemp("ipython")
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True)
    shutil.copy(FILE, startup / "50-labkit.py")
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, CELLS.values())])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder))
        client = NotebookClient(notebook, kernel_name="python3", timeout=280, allow_errors=True)
        client.execute()
    printed = [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
    ]
    return dict(zip(CELLS, printed, strict=True))


@pytest.mark.slow
def test_a_name_and_a_magic_that_the_kernel_does_not_know_yet_say_what_to_run(outputs):
    assert "does not know labkit.\nIn a lesson, first run the set-up cell" in outputs["name"]
    assert "does not know torch." in outputs["torch"] and "not know nn." in outputs["nn"]
    for magic in ("memory", "ranks"):
        assert "Run `import labkit` and `%load_ext labkit` in another cell" in outputs[magic]


@pytest.mark.slow
def test_other_errors_say_nothing_more(outputs):
    for other in ("another name", "another magic", "a wrong option", "after the set-up"):
        assert "load_ext labkit`" not in outputs[other] and "set-up" not in outputs[other]
    assert outputs["names"] == "[]\n"
