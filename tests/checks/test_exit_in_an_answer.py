"""`exit()` in an answer ends the answer, not the kernel."""

import nbformat
import pytest
from nbclient import NotebookClient

from labkit.checks import limits

CELLS = (
    "import labkit\n\nlabkit.use(gpus=1, virtual=True, quiet=True)",
    "def on_gpu(numbers):\n    LEAVE",
    'print(labkit.check("00.1", on_gpu))',
    "print('still here')",
)


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["exit()", "quit()", "exit(keep_kernel=True)", "raise SystemExit", "import sys; sys.exit(3)"])
def test_the_kernel_lives_and_the_verdict_names_the_line(leave):
    cells = [nbformat.v4.new_code_cell(source.replace("LEAVE", leave)) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    verdict, after = ("".join(output.text for output in cell.outputs) for cell in notebook.cells[2:])
    assert "your answer raised SystemExit" in verdict and f"line 2: {leave}" in verdict
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
