"""Messages about the end of a submission's process. The fork server is made up here."""

import socket

import pytest

from labcourse.sandbox import EndedError, SubmissionProcess

from .handed_in import LIMITS


class Played:
    """A sandbox whose processes end at once. `ended` is the fork server's report."""

    limits, group = LIMITS, None

    def __init__(self, ended):
        self._ended, self._pair = ended, socket.socketpair()

    def fork(self, fds):
        pass

    def fileno(self):
        return self._pair[0].fileno()

    def end_process(self, stop):
        for end in self._pair:
            end.close()
        return self._ended


@pytest.mark.parametrize(
    "reason, status, kind",
    [
        # it was slow to end: on a busy machine the fork server had been told to stop it
        (
            "stopped",
            0,
            "ended",
        ),
        ("stopped", -11, "ended"),
        (None, -9, "ended"),
        ("memory", -9, "memory"),
    ],
)
def test_the_end_of_a_process_has_its_reason(reason, status, kind):
    with (
        SubmissionProcess(Played({"reason": reason, "status": status})) as process,
        pytest.raises(EndedError) as error,
    ):
        process.ask({}, 1)
    assert error.value.kind == kind


class RanOut:
    """A control group in which the system has ended a process because of its memory."""

    def ran_out(self):
        return True


@pytest.mark.parametrize("ended", [{"reason": None, "status": -9}, {}])
def test_a_process_or_a_server_that_the_system_ends_for_its_memory_ran_out_of_memory(
    ended, monkeypatch
):
    monkeypatch.setattr(Played, "group", RanOut())
    with SubmissionProcess(Played(ended)) as process, pytest.raises(EndedError) as error:
        process.ask({}, 1)
    assert error.value.kind == "memory"
