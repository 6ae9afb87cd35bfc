"""Time limits do not count what a process waits for a core. The clock and the waits are made up."""

import os
import signal
import sys

import pytest

from labcourse import examination, sandbox, session
from labkit.checks import in_ranks, limits
from labkit.processes import time_limits
from labkit.processes.time_limits import TimeLimit, core_waits


class BusyMachine:
    """A made-up clock that a test advances, and made-up waits of threads.

    Attributes:
        asked: the processes whose waits were asked for.
    """

    def __init__(self):
        self.now, self.waited, self.asked = 0.0, {}, []

    def clock(self):
        return self.now

    def waits(self, processes):
        self.asked.append(list(processes))
        return dict(self.waited)

    def limit(self, seconds, processes=None):
        return TimeLimit(seconds, processes, clock=self.clock, waits=self.waits)


@pytest.fixture
def busy():
    return BusyMachine()


def test_a_limit_is_over_after_its_seconds_where_nobody_waits(busy):
    limit = busy.limit(30, [7])
    assert limit.remaining() == 30
    busy.now = 29
    assert limit.remaining() == 1
    busy.now = 30
    assert limit.remaining() == 0
    assert busy.asked == [[7], [7]]  # at first and at its end


def test_the_longest_wait_of_a_thread_since_the_limits_start_is_added(busy):
    busy.waited = {7: 100.0, 8: 5.0}
    limit = busy.limit(30)
    busy.now = 31
    busy.waited = {7: 103.0, 9: 2.0}  # 8 has ended, 9 has started
    assert limit.remaining() == 30 + 3 - 31
    busy.now = 36
    assert limit.remaining() == -3


def test_an_answer_that_never_ends_still_ends(busy):
    limit = busy.limit(30)
    busy.now, busy.waited = 119, {7: 10_000.0}
    assert limit.remaining() == 1
    busy.now = 120
    assert limit.remaining() == 0


def thread(folder, number, schedstat, children=""):
    """Write files that say what Linux shows of a thread.

    `schedstat` has the thread's waits, and `children` the process ids of its children.
    """
    folder = folder / "task" / str(number)
    folder.mkdir(parents=True)
    (folder / "schedstat").write_text(schedstat)
    (folder / "children").write_text(children)


def test_waits_are_those_of_all_threads_and_descendants(tmp_path, monkeypatch):
    monkeypatch.setattr(time_limits, "PROC", tmp_path)
    thread(tmp_path / "7", 7, "99 1500000000 3\n", "20 30 ")
    thread(tmp_path / "7", 8, "99 250000000 3\n")
    thread(tmp_path / "20", 20, "0 2000000000 1\n", "21 ")
    thread(tmp_path / "21", 21, "0 3000000000 1\n")
    (tmp_path / "30" / "task" / "30").mkdir(parents=True)  # it has just ended
    thread(tmp_path / "40", 40, "0 4000000000 1\n")  # another program's
    assert core_waits([7]) == {7: 1.5, 8: 0.25, 20: 2.0, 21: 3.0}
    assert core_waits([]) == core_waits([99]) == {}


def test_where_the_system_reports_no_waits_a_limit_is_plain(tmp_path, monkeypatch, busy):
    monkeypatch.setattr(time_limits, "PROC", tmp_path / "there is none")
    limit = TimeLimit(30, clock=busy.clock)
    busy.now = 30
    assert limit.remaining() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports waits")
def test_linux_reports_the_waits_of_this_process():
    waits = core_waits([os.getpid()])
    assert os.getpid() in waits and all(seconds >= 0 for seconds in waits.values())


def test_a_learners_answer_that_waited_for_a_core_goes_on(busy, monkeypatch):
    """Let the limit pass on the real clock. The answer is then told to end 0.1 s later."""
    asked = []

    class Waited(TimeLimit):
        def remaining(self):
            asked.append(self._seconds)
            return 0.1 if len(asked) == 1 else 0.0

    monkeypatch.setattr(limits, "TimeLimit", Waited)
    monkeypatch.setattr(limits, "PATIENCE", 0.0)
    with pytest.raises(limits.TookTooLongError), limits.in_time("00.1", None):
        while True:
            signal.pause()
    assert asked == [limits.LIMIT] * 2


@pytest.fixture
def alarm():
    before = signal.getsignal(signal.SIGALRM)
    yield session.Alarm(lambda status: None, 75)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_submissions_alarm_rings_again_after_what_it_waited(busy, alarm, monkeypatch):
    monkeypatch.setattr(session, "TimeLimit", busy.limit)
    with alarm.after(30):
        busy.now, busy.waited = 31, {7: 5.0}
        signal.raise_signal(signal.SIGALRM)
        assert 3 < signal.getitimer(signal.ITIMER_REAL)[0] <= 4
        busy.now = 35
        with pytest.raises(session.OutOfTime):
            signal.raise_signal(signal.SIGALRM)


class SlowSandbox:
    """A sandbox whose submission answers when the limit has passed on the real clock."""

    def __init__(self, busy):
        self.busy, self.limits = busy, sandbox.Limits()

    def time_limit(self, seconds):
        return self.busy.limit(seconds, [7])


@pytest.mark.parametrize(("waited", "ends"), [(0.0, True), (20.0, False)])
def test_the_grader_waits_for_a_submission_that_waits_for_a_core(busy, waited, ends):
    process = sandbox.SubmissionProcess.__new__(sandbox.SubmissionProcess)
    process._inbox, looks = sandbox.messages.Inbox(), []

    def listen(seconds):
        looks.append(seconds)
        busy.now += 40
        busy.waited = {8: waited}
        if len(looks) == 2:
            process._inbox.add(sandbox.messages.packed("an answer"))

    def stop(kind, detail=""):
        raise sandbox.EndedError(kind, detail)

    process._listen, process._stop = listen, stop
    limit = SlowSandbox(busy).time_limit(35)
    if ends:
        with pytest.raises(sandbox.EndedError, match="time"):
            process._read(limit)
    else:
        assert process._read(limit) == "an answer"


def test_the_time_of_a_whole_submission_counts_no_waits_either(busy):
    box = SlowSandbox(busy)
    whole = examination._Examination([], "ada", None, None, box, examination.Examined())
    assert whole._seconds(60) == 60
    whole._limit = box.time_limit(240)
    busy.now, busy.waited = 250, {8: 30.0}
    assert whole._seconds(60) == 20
    busy.now = 300
    assert whole._seconds(60) == 0


def test_a_limit_of_a_sandbox_is_about_what_its_server_has_started(monkeypatch):
    made = []
    monkeypatch.setattr(sandbox, "TimeLimit", lambda *given: made.append(given))
    box = sandbox.Sandbox.__new__(sandbox.Sandbox)
    box._server = type("Server", (), {"pid": 7})
    box.time_limit(30)
    box._server = None
    box.time_limit(30)
    assert made == [(30, [7]), (30, [])]


class Rank:
    """A made-up process of a rank, with the time of its end and its number."""

    def __init__(self, number):
        self.pid = number
        self.sentinel, self._line = in_ranks.connection.Pipe(duplex=False)


@pytest.mark.parametrize(("waited", "told"), [(0.0, 1), (15.0, 2)])
def test_ranks_that_wait_for_a_core_may_be_later_than_the_first(busy, monkeypatch, waited, told):
    """Let the first rank return at once and the other 20 s later, with a patience of 10 s."""
    monkeypatch.setattr(in_ranks, "TimeLimit", busy.limit)
    lines, ends = zip(*(in_ranks.connection.Pipe(duplex=False) for _ in range(2)), strict=True)
    ranks = [Rank(7), Rank(8)]
    ends[0].send((in_ranks.RETURNED, "first"))
    wait, looks = in_ranks.connection.wait, []

    def late(ready, remaining):
        looks.append(remaining)
        if len(looks) == 1:
            return wait(ready, 0)
        busy.now += remaining
        busy.waited = {8: waited}
        if busy.now >= 20:
            ends[1].send((in_ranks.RETURNED, "second"))
        return wait(ready, 0)

    monkeypatch.setattr(in_ranks.connection, "wait", late)
    assert len(in_ranks._collected(lines, ranks, 10.0)) == told
    assert busy.asked[0] == [7, 8]
