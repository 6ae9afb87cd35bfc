"""As many attempts run at once as there are processors and memory.

An attempt that fails beside others runs again alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gputrace.fit import processes
from gputrace.fit.outcome import Outcome, Wish
from gputrace.fit.processes import Runner

WISHES = [Wish("train.py", [], False, like, 4) for like in ("T4", "L4", "A100", "H100")]


@pytest.mark.parametrize(
    ("processors", "memory", "due"), [(8, 100, 8), (8, 3, 3), (2, 100, 2), (8, 0, 1)]
)
def test_there_are_as_many_at_once_as_have_processors_and_memory(
    monkeypatch, processors, memory, due
):
    monkeypatch.setattr(processes.os, "cpu_count", lambda: processors)
    monkeypatch.setattr(
        processes.psutil, "virtual_memory", lambda: type("Memory", (), {"available": memory << 30})
    )
    runner = Runner(MadeUp([], resident=1 << 30).start)
    list(runner.run_all(WISHES[:1]))
    assert runner.at_once() == due


class MadeUp:
    """Starter of made-up processes, which end at the third poll.

    `running` has the processes that run when another one starts.
    """

    def __init__(self, running: list[list[str]], resident: int = 0) -> None:
        self.running, self.resident, self.under_way = running, resident, []

    def start(self, command: Sequence[str], output: int) -> "Ended":
        like = json.loads(command[1])["like"]
        self.under_way.append(like)
        self.running.append(list(self.under_way))
        taken = len(self.running) > 1 and len(self.under_way) > 1 and like == "L4"
        failed = "the port is taken" * taken or "wrong" * (like == "A100")
        return Ended(self, like, Path(command[2]), {"failed": failed, "resident": self.resident})


class Ended:
    pid, returncode = 0, 0

    def __init__(self, made_up: MadeUp, like: str, file: Path, outcome: dict) -> None:
        self.made_up, self.like, self.file, self.outcome, self.looks = (
            made_up,
            like,
            file,
            outcome,
            0,
        )

    def poll(self) -> int | None:
        self.looks += 1
        if self.looks == 3:
            self.made_up.under_way.remove(self.like)
            self.file.write_text(json.dumps(self.outcome))
        return None if self.looks < 3 else 0

    def wait(self) -> int:
        return 0


@pytest.mark.parametrize("most", [1, 4])
def test_what_fails_beside_others_is_tried_again_alone(monkeypatch, most):
    """Two scripts need the same port, so one fails beside the other. A third one always fails."""
    running: list[list[str]] = []
    monkeypatch.setattr(Runner, "at_once", lambda self: most)
    outcomes = {
        wish.like: outcome.failed for wish, outcome in Runner(MadeUp(running).start).run_all(WISHES)
    }
    assert outcomes == {"T4": "", "L4": "", "A100": "wrong", "H100": ""}
    assert list(outcomes)[-2:] == (["A100", "H100"] if most == 1 else ["L4", "A100"])
    alone = [["T4"], ["L4"], ["A100"], ["H100"]]
    beside = [
        ["T4"],
        ["T4", "L4"],
        ["T4", "L4", "A100"],
        ["T4", "L4", "A100", "H100"],
        ["L4"],
        ["A100"],
    ]
    assert running == (alone if most == 1 else beside)


class Slow:
    """A process that writes its progress at the second poll, and its outcome at the last one."""

    pid, returncode = 0, 0

    def __init__(self, file: Path, outcome: dict) -> None:
        self.file, self.outcome, self.looks = file, outcome, 0

    def poll(self) -> int | None:
        self.looks += 1
        if self.looks == 4:
            self.file.with_name("progress").write_text("3 steps so far")
        if self.looks < 10:
            return None
        self.file.write_text(json.dumps(self.outcome))
        return 0

    def wait(self) -> int:
        return 0


def test_progress_of_a_slow_attempt_is_told(monkeypatch):
    monkeypatch.setattr(processes, "TELLS_AFTER", 0.0)
    told: list[str] = []
    wish = Wish("train.py", [], False, "T4", 4, change="half the batch")
    runner = Runner(lambda command, output: Slow(Path(command[2]), {}), told.append)
    list(runner.run_all([wish]))
    assert told[0] == "T4, half the batch: running for 0 s, nothing on the GPU yet"
    assert told[-1] == "T4, half the batch: running for 0 s, 3 steps so far"


def test_a_script_that_starts_processes_runs_alone_from_the_second_attempt_on(monkeypatch):
    """The processes of such a script meet at a port, which two attempts would share."""
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 8)
    runner = Runner(lambda command, output: Slow(Path(command[2]), {"processes": 2}))
    assert runner.at_once() > 1
    list(runner.run_all(WISHES[:1]))
    assert runner.at_once() == 1


def test_what_a_process_said_last_is_told_where_it_leaves_no_outcome():
    class Broken(Ended):
        def poll(self) -> int:
            return 5

    def start(command: Sequence[str], output: int) -> Broken:
        processes.os.write(output, b"first\nlast words\n")
        broken = Broken(MadeUp([]), "T4", Path(command[2]), {})
        broken.returncode = 5
        return broken

    [(_, outcome)] = Runner(start).run_all(WISHES[:1])
    assert outcome == Outcome(failed="its process ended with status 5: last words")
