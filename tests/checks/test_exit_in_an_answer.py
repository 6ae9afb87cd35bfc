"""`exit()` in an answer ends the answer, not the kernel."""

import nbformat
import pytest
from nbclient import NotebookClient

from labkit.checks import limits

SETUP = "import labkit\n\nlabkit.use(gpus=1, virtual=True, quiet=True)"
CELLS = (
    "def on_gpu(numbers):\n    LEAVE",
    'print(labkit.check("00.1", on_gpu))',
    "print('still here')",
)
WAYS = ("exit()", "quit()", "exit(keep_kernel=True)", "raise SystemExit", "import sys; sys.exit(3)")


@pytest.fixture(scope="module")
def outputs():
    """The output of a cell for each way to exit. All cells run in one kernel."""
    cells = [
        nbformat.v4.new_code_cell(source.replace("LEAVE", way)) for way in WAYS for source in CELLS
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SETUP), *cells])
    NotebookClient(notebook, kernel_name="python3", timeout=280).execute()
    printed = ["".join(output.text for output in cell.outputs) for cell in cells]
    return {way: printed[len(CELLS) * place :][: len(CELLS)] for place, way in enumerate(WAYS)}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_kernel_lives_and_the_verdict_names_the_line(outputs, way):
    _, verdict, after = outputs[way]
    assert "your answer raised SystemExit" in verdict and f"line 2: {way}" in verdict
    assert after == "still here\n"


def test_the_shell_ends_the_kernel_again_after_the_check(monkeypatch):
    class Shell:
        def ask_exit(self):
            return "ends"

    class IPython:
        shell = Shell()

        @classmethod
        def get_ipython(cls):
            return cls.shell

    monkeypatch.setitem(limits.sys.modules, "IPython", IPython)
    with pytest.raises(SystemExit, match=r"exit\(\) and quit\(\) end the kernel"), limits.no_exit():
        IPython.shell.ask_exit()
    assert IPython.shell.ask_exit() == "ends"
    monkeypatch.setattr(IPython, "shell", None)
    with limits.no_exit():
        pass
