"""The result or the error that `isolated` makes of how a process ended, without a process."""

import pickle
import signal
import subprocess
from pathlib import Path

import pytest

import labkit
from labkit import isolation


@pytest.fixture
def ends(monkeypatch):
    """A function that sets how the process of the next call of `isolated` ends.

    It gets an exit status, an output, and perhaps a result.
    """

    def set_ending(status, output="", result=None):
        def run(folder, timeout):
            Path(folder, "output").write_text(output)
            if result is not None:
                Path(folder, "result").write_bytes(pickle.dumps(result))
            if status is None:
                raise subprocess.TimeoutExpired("a process", timeout)
            return status

        monkeypatch.setattr(isolation, "_run", run)

    return set_ending


def test_a_process_that_left_a_result(ends):
    ends(0, "words", (3, None))
    assert labkit.isolated(len, [1]) == labkit.Isolated(3, "words")


@pytest.mark.parametrize(
    ("status", "result", "message"),
    [
        (-signal.SIGSEGV, None, "len() crashed with a segmentation fault (SIGSEGV)."),
        (0, None, "len() ended with exit status 0 without returning."),
        (None, None, "len() took longer than 60 s and was stopped."),
        (0, labkit.IsolatedError("len() raised ValueError: bad."), "len() raised ValueError: bad."),
    ],
)
def test_a_process_that_left_no_result(status, result, message, ends):
    ends(status, "words", (None, result) if result else None)
    with pytest.raises(labkit.IsolatedError) as caught:
        labkit.isolated(len, [1])
    assert (str(caught.value), caught.value.output) == (message, "words")


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_is_positive(timeout):
    with pytest.raises(ValueError, match="choose a positive number of seconds, or None"):
        labkit.isolated(len, [], timeout=timeout)


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(labkit.IsolatedError("f() raised.", "words")))
    assert (str(error), error.output) == ("f() raised.", "words")
