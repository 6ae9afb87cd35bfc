"""`%load_ext labkit` and `labkit.use` bring the cell magics. A cell shows a machine once."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import labkit


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """A notebook's shell."""
    InteractiveShell.clear_instance()
    yield InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    InteractiveShell.clear_instance()


def run(shell, cell):
    """Run one cell. Return IPython's result, and what was displayed, as text."""
    with capture_output() as captured:
        result = shell.run_cell(cell, store_history=True)
    shown = [output.data.get("text/plain", "") for output in captured.outputs]
    return result, shown, captured.stdout + captured.stderr


@pytest.mark.slow
def test_load_ext_and_use_bring_it():
    code = """
        import sys
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        import labkit
        assert "gputrace.magics" not in sys.modules
        {cell}
        print(shell.find_cell_magic("gpu_memory") is not None)
    """
    for cell in (
        'shell.run_line_magic("load_ext", "labkit")',
        "labkit.use(gpus=1, virtual=True, quiet=True)",
    ):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code).format(cell=cell)],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout == "True\n"


def test_a_machine_is_shown_once_in_the_cell_that_prints_its_banner(shell):
    try:
        result, shown, printed = run(shell, "import labkit\nlabkit.use(virtual=True)")
        assert result.success and printed.count("labkit: 1 virtual GPU") + len(shown) == 1
        for cell in ("labkit.current()", "labkit.use(virtual=True, quiet=True)"):
            result, shown, printed = run(shell, cell)
            assert result.success and printed.count("<1 virtual GPU") + len(shown) == 1
    finally:
        labkit.use(None)
