"""An interrupted cell's children end, also one that nobody knows of."""

import multiprocessing
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch.multiprocessing as mp
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import labkit
from labkit.ipython import end_children
from labkit.processes import context

pytestmark = pytest.mark.slow

ENDED, INTERRUPTED = (
    SimpleNamespace(error_in_exec=None),
    SimpleNamespace(error_in_exec=KeyboardInterrupt()),
)


def wait(line):
    line.send("started")
    time.sleep(60)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_they_end_when_the_cell_was_interrupted_and_only_then(method):
    ours, theirs = context().Pipe()
    child = mp.get_context(method).Process(target=wait, args=(theirs,), daemon=True)
    child.start()
    assert ours.recv() == "started"
    end_children(ENDED)
    end_children(SimpleNamespace(error_in_exec=ValueError()))
    assert child.is_alive()
    end_children(INTERRUPTED)
    child.join(120)
    assert not psutil.pid_exists(child.pid)


def test_they_end_when_clearing_up_after_the_interrupt_has_failed():
    ours, theirs = context().Pipe()
    child = context().Process(target=wait, args=(theirs,), daemon=True)
    child.start()
    assert ours.recv() == "started"
    failed = RuntimeError("the pool cannot be terminated")
    failed.__context__ = KeyboardInterrupt()
    end_children(SimpleNamespace(error_in_exec=failed))
    child.join(120)
    assert child.exitcode == -9


def test_one_whose_start_was_interrupted_ends_too(monkeypatch):
    """The parent has started the child, but was interrupted before it read the process id."""
    from multiprocessing import forkserver

    def interrupted(_):
        raise KeyboardInterrupt

    ours, theirs = context().Pipe()
    child = context().Process(target=wait, args=(theirs,), daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(forkserver, "read_signed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            child.start()
    assert ours.recv() == "started"
    theirs.close()
    end_children(INTERRUPTED)
    with pytest.raises(EOFError):  # the child's end is closed
        ours.recv()


@pytest.mark.parametrize("started", [0, 1, 2])
def test_the_workers_of_a_pool_that_was_interrupted_while_it_was_made_end_too(monkeypatch, started):
    """A half-made pool would replace dead workers again and again."""
    start, names = threading.Thread.start, []

    def interrupted(thread):
        names.append(thread.name)
        start(thread)
        if len(names) == started + 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as interrupt:
        patch.setattr(threading.Thread, "start", interrupted)
        context().Pool(2)
    children = multiprocessing.active_children()
    assert len(children) == 2
    end_children(SimpleNamespace(error_in_exec=interrupt.value))
    assert multiprocessing.active_children() == [] and not any(
        psutil.pid_exists(child.pid) for child in children
    )


def test_the_next_child_starts_as_before():
    end_children(INTERRUPTED)
    ours, theirs = context().Pipe()
    child = context().Process(target=wait, args=(theirs,), daemon=True)
    child.start()
    assert ours.recv() == "started"
    child.kill()
    child.join()


def test_use_looks_after_a_notebook():
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    with labkit.use(virtual=True, quiet=True):
        assert end_children in shell.events.callbacks["post_run_cell"]
    InteractiveShell.clear_instance()
