"""The thread that keeps an answer's time, beside the threads of programs on virtual GPUs."""

import threading

import pytest

import labkit
from labkit.checks import limits
from virtualgpu import hardware


@pytest.fixture
def machine():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield


def test_the_thread_that_keeps_an_answers_time_takes_no_turns(machine):
    """The thread would otherwise wait for its turn while an answer sleeps."""
    with limits.in_time("00.1", None):
        assert not hardware.machine().scheduler.several


def test_a_programs_thread_takes_turns_whoever_made_its_function(machine):
    """A thread of an answer takes turns, even if it runs a function of the check."""
    thread = threading.Thread(target=limits.in_time, args=("00.1", None))
    thread.start()
    thread.join()
    assert hasattr(thread, "_scheduler_state")
