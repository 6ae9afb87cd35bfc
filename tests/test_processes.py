"""Child processes that end with their block: in order, by an error, by an interrupt."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from labkit import processes
from labkit.processes import children, context

pytestmark = pytest.mark.slow


def double(line, number):
    line.send((number * 2, "torch" in sys.modules, os.getpid()))


def wait(line):
    line.send(os.getpid())
    time.sleep(60)


def fail():
    sys.exit(3)


def test_children_answer_and_have_imported_torch_already():
    ours, theirs = context().Pipe()
    with children(double, [(theirs, 1), (theirs, 2)]) as started:
        answers = [ours.recv() for _ in started]
    assert sorted(answer[0] for answer in answers) == [2, 4]
    assert all(answer[1] for answer in answers)
    assert [process.exitcode for process in started] == [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads another process's memory maps")
def test_a_server_that_was_started_has_imported_torch():
    """Run this in a new process, which has no server yet. A child then only has to be forked."""
    told = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=280, check=True
    ).stdout
    assert told == "[True]\n"


STARTED = """
import psutil
from labkit import processes
processes.start_server()
children = psutil.Process().children()
servers = [child for child in children if "forkserver" in " ".join(child.cmdline())]
print([any("libtorch" in mapped.path for mapped in server.memory_maps()) for server in servers])
"""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_block_ends_them(error):
    ours, theirs = context().Pipe()
    with pytest.raises(error), children(wait, [(theirs,), (theirs,)]):
        pids = [ours.recv() for _ in range(2)]
        raise error
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_one_that_does_not_end_by_itself_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    ours, theirs = context().Pipe()
    with children(wait, [(theirs,)]) as (process,):
        pid = ours.recv()
    assert process.exitcode == -9 and not psutil.pid_exists(pid)


def test_those_that_were_started_end_when_the_next_cannot_be():
    ours, theirs = context().Pipe()
    pids = []

    def arguments():
        yield (theirs,)
        pids.append(ours.recv())
        yield (threading.Lock(),)

    with pytest.raises(TypeError, match="pickle"), children(wait, arguments()):
        pass
    assert not psutil.pid_exists(pids[0])


def test_the_status_of_a_child_is_known_after_the_block():
    with children(fail, [()]) as (process,):
        pass
    assert process.exitcode == 3


def test_children_leave_an_interrupt_to_their_parent():
    ours, theirs = context().Pipe()
    with children(wait, [(theirs,)]) as (process,):
        os.kill(ours.recv(), signal.SIGINT)
        process.join(0.5)
        assert process.is_alive()
        process.kill()
