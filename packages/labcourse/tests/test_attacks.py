"""Attacks: none stops a grading, reads a file of the course or writes outside the sandbox.

None harms the next submission, either. The attacks are in attacks.txt.
"""

import json
import os

import pytest

from labcourse.control_group import ControlGroup

from .cells import cells
from .handed_in import HURRIED, LIMITS

pytestmark = pytest.mark.slow

RIGHT = "def on_gpu(numbers): return torch.tensor(numbers, device='cuda')"
SECRET = "the seed of this course"
# What the attacks use.
START = """
import ctypes, glob, os, resource, signal, socket, subprocess, sys, threading, time

SECRET = {secret!r}
FOLDER = os.path.dirname(SECRET)
fds = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
for folder in (".", "/dev/shm"):
    open(folder + "/left", "w").close()

def say(path):
    raise ValueError(open(path).read())

def tried(function, *arguments):
    try:
        return function(*arguments)
    except (OSError, ValueError):
        return None

def forks(count, work):
    for _ in range(count):
        if os.fork() == 0:
            try:
                work()
            finally:
                os._exit(0)
"""
ATTACKS = cells("attacks.txt")
ENDLESS = ("another program in its place",)  # nothing of it answers any more


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder of the course outside the sandbox, and the secret text in one of its files."""
    folder = tmp_path_factory.mktemp("course")
    (folder / "secret.txt").write_text(SECRET)
    return folder


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_reaches_nothing(name, tried, sandbox, outside, monkeypatch):
    secret = outside / "secret.txt"
    if name in ENDLESS:
        monkeypatch.setattr(sandbox, "limits", HURRIED)
    examined = tried("00.1", START.format(secret=str(secret)), ATTACKS[name], RIGHT)
    plain = [examined.exercises, examined.cell_errors, examined.remarks]
    json.dumps(plain, allow_nan=False, ensure_ascii=False).encode()
    assert SECRET not in repr(examined) and "['secret.txt']" not in repr(examined.cell_errors)
    assert [path.name for path in outside.iterdir()] == ["secret.txt"]
    assert secret.read_text() == SECRET and not os.path.exists("/mine")
    monkeypatch.setattr(sandbox, "limits", LIMITS)
    look = (
        "import os\nassert not os.path.exists('left') and os.listdir('/dev/shm') == []\n"
        "for folder in ('.', '/tmp', '/dev/shm'): open(folder + '/mine', 'w')"
    )
    after = tried("00.1", look, RIGHT)
    assert (after.status, after.points, after.remarks) == ("graded", 1, [])
    assert after.cell_errors == []


@pytest.fixture(scope="module")
def without_control_group(sandbox):
    """A sandbox of a user who may not create control groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlGroup, "around", lambda pid, memory: None)
        sandbox.close()
        yield
    sandbox.close()


@pytest.mark.usefixtures("without_control_group")
def test_what_waits_in_sockets_counts_where_nobody_may_make_control_groups(tried):
    attack = START.format(secret="/secret.txt")
    examined = tried("00.1", attack, ATTACKS["sockets full of bytes"], RIGHT)
    assert (examined.status, examined.points) == ("memory", None)


@pytest.mark.usefixtures("without_control_group")
def test_memory_that_no_process_shows_is_refused_where_nobody_may_make_control_groups(tried):
    attack = START.format(secret="/secret.txt")
    shared = "import mmap\nmmap.mmap(-1, 1 << 20)"
    own = "import mmap\nmmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE)[0] = 1"
    examined = tried("00.1", attack, shared, own, RIGHT)
    assert (examined.status, examined.points) == ("graded", 1)
    assert [error[:2] for error in examined.cell_errors] == [[3, "PermissionError"]]
