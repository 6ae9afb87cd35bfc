"""Attempts side by side: as many as there are processors and memory for, and what fails beside others is tried again alone."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gputrace.fit import processes
from gputrace.fit.outcome import Outcome, Wish
from gputrace.fit.processes import Runner

WISHES = [Wish("train.py", [], False, like, 4) for like in ("T4", "L4", "A100", "H100")]


@pytest.mark.parametrize(("processors", "memory", "due"), [(8, 100, 8), (8, 3, 3), (2, 100, 2), (8, 0, 1)])
def test_there_are_as_many_at_once_as_have_processors_and_memory(monkeypatch, processors, memory, due):
    monkeypatch.setattr(processes.os, "cpu_count", lambda: processors)
    monkeypatch.setattr(processes.psutil, "virtual_memory", lambda: type("Memory", (), {"available": memory << 30}))
    runner = Runner(MadeUp([], resident=1 << 30).start)
    list(runner.run_all(WISHES[:1]))
    assert runner.at_once() == due


class MadeUp:
    """Starts processes that are none: each ends at the third look at it. `running` has what is under way when one starts."""

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
        self.made_up, self.like, self.file, self.outcome, self.looks = made_up, like, file, outcome, 0

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
    """Two at once want the same port; one fails wherever it runs."""
    running: list[list[str]] = []
    monkeypatch.setattr(Runner, "at_once", lambda self: most)
    outcomes = {wish.like: outcome.failed for wish, outcome in Runner(MadeUp(running).start).run_all(WISHES)}
    assert outcomes == {"T4": "", "L4": "", "A100": "wrong", "H100": ""}
    assert list(outcomes)[-2:] == (["A100", "H100"] if most == 1 else ["L4", "A100"])
    alone = [["T4"], ["L4"], ["A100"], ["H100"]]
    beside = [["T4"], ["T4", "L4"], ["T4", "L4", "A100"], ["T4", "L4", "A100", "H100"], ["L4"], ["A100"]]
    assert running == (alone if most == 1 else beside)


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
