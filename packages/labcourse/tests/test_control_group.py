"""Control groups of graders that were killed are removed, and those of other programs stay."""

import os

import pytest

from labcourse import control_group
from labcourse.control_group import ControlGroup


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder that looks like the system's control groups, but limits no memory."""
    (tmp_path / "cgroup.procs").touch()
    monkeypatch.setattr(control_group, "TREES", (os.fspath(tmp_path),))
    return tmp_path


def test_only_abandoned_groups_of_graders_are_removed(tree):
    ended = 2**22 + 1  # no process has a number beyond Linux's largest
    others = [
        "labkit-foo-bar",
        "labkit-1",
        f"labkit-{os.getpid()}-7",
        "labkit--",
        f"labkit-{ended}-x",
    ]
    for name in [*others, f"labkit-{ended}-7"]:
        (tree / name).mkdir()
    assert ControlGroup.around(os.getpid(), 1 << 20) is None
    assert sorted(path.name for path in tree.iterdir() if path.is_dir()) == sorted(others)
