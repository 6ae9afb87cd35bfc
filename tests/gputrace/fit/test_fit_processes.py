"""Attempts side by side: as many as there are processors and memory for, and what fails beside others is tried again alone."""

import threading

import pytest

from gputrace.fit import processes
from gputrace.fit.attempt import Outcome, Wish

WISHES = [Wish("train.py", [], False, like, 4) for like in ("T4", "L4", "A100", "H100")]


@pytest.mark.parametrize(("processors", "memory", "due"), [(8, 100, 8), (8, 3, 3), (2, 100, 2), (8, 0, 1)])
def test_there_are_as_many_at_once_as_have_processors_and_memory(monkeypatch, processors, memory, due):
    monkeypatch.setattr(processes.os, "cpu_count", lambda: processors)
    monkeypatch.setattr(processes.resource, "getrusage", lambda who: type("Usage", (), {"ru_maxrss": 1 << 20}))
    monkeypatch.setattr(processes.psutil, "virtual_memory", lambda: type("Memory", (), {"available": memory * processes.RSS_UNIT << 20}))
    assert processes.at_once() == due


@pytest.mark.parametrize("most", [1, 4])
def test_what_fails_beside_others_is_tried_again_alone(monkeypatch, most):
    """Two at once want the same port; one fails wherever it runs."""
    running, lock, asked = [0], threading.Lock(), []
    together = threading.Barrier(most, timeout=120)

    def run(wish: Wish) -> Outcome:
        with lock:
            running[0] += 1
            asked.append(wish.like)
        if len(asked) <= 4:
            together.wait()
        taken = running[0] > 1 and wish.like == "L4"
        if len(asked) <= 4:
            together.wait()
        with lock:
            running[0] -= 1
        return Outcome(failed="the port is taken" * taken or "wrong" * (wish.like == "A100"))

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(processes, "at_once", lambda: most)
    outcomes = {wish.like: outcome.failed for wish, outcome in processes.run_all(WISHES)}
    assert outcomes == {"T4": "", "L4": "", "A100": "wrong", "H100": ""}
    assert sorted(asked) == sorted(outcomes) if most == 1 else asked[4:] == ["L4", "A100"]
