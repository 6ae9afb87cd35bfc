"""Lines of a notebook's cell are named after the cell."""

import sysconfig
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from virtualgpu import source_lines

ASKED = "location = source_lines.SourceLine.read(line.__code__.co_filename, 2, 'line').location"


@pytest.fixture
def shell():
    yield InteractiveShell.instance(user_ns={"source_lines": source_lines})
    InteractiveShell.clear_instance()


def test_a_line_of_another_cell_than_the_one_that_runs_is_named_with_its_cell(shell):
    for cell, said in (
        (f"def line():\n    pass\n{ASKED}", "line 2"),
        (ASKED, "line 2 of cell [1]"),
    ):
        shell.run_cell(cell, store_history=True)
        assert shell.user_ns["location"] == said


def test_a_line_of_a_file_is_named_with_its_file(shell):
    assert source_lines.SourceLine("/home/ada/train.py", 12, "<module>").location == "train.py:12"


def test_a_command_that_a_package_installed_is_not_the_users():
    command = Path(sysconfig.get_path("scripts")) / "labkit"
    assert not source_lines.is_users(str(command))
