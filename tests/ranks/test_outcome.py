"""Which rank failed first, told from what the ranks said of their ends: no process starts."""

import signal

import pytest

import labkit
from labkit.ranks.job import Job, Life
from labkit.ranks.outcome import outcome
from labkit.ranks.shown import Shown

WELL = {"ended": "returned", "result": 1}


def raised(type_: str, text: str) -> dict:
    return {"ended": "raised", "type": type_, "text": text, "line": 7, "traceback": ""}


def job_of(*lives: Life) -> Job:
    """A job of one attempt, whose ranks ended in this order."""
    request = {"ranks_here": len(lives), "nodes_here": 1, "nodes": 1, "max_restarts": 0}
    job = Job("", request, Shown(len(lives), live=False, quiet=True))
    job._attempts, job.lives = ["0"], list(lives)
    job._note_failures(job.lives)
    return job


def test_ranks_that_all_returned_give_their_results():
    ranks = outcome(job_of(Life(1, 0, 11, WELL | {"result": "b"}, 0), Life(0, 0, 10, WELL | {"result": "a"}, 0)), "torchrun", None)
    assert ranks.results == ["a", "b"]


def test_a_rank_that_lost_another_did_not_fail_first():
    """It is heard first all the same, and so is the rank that torchrun ended because of the others."""
    lost = Life(0, 0, 10, raised("RuntimeError", "Connection closed by peer [127.0.0.1]:1"), 1)
    asked_to_end = Life(2, 0, 12, None, -signal.SIGTERM)
    first = Life(1, 0, 11, raised("ValueError", "a bad batch"), 1)
    with pytest.raises(labkit.TorchrunError, match=r"^rank 1 raised ValueError: a bad batch \(line 7\)") as caught:
        outcome(job_of(lost, asked_to_end, first), "torchrun", None)
    assert (caught.value.rank, caught.value.kind) == (1, "exception")


def test_one_rank_that_returned_is_not_enough():
    with pytest.raises(labkit.TorchrunError, match=r"^rank 1 crashed with a segmentation fault") as caught:
        outcome(job_of(Life(0, 0, 10, WELL, 0), Life(1, 0, 11, None, -signal.SIGSEGV)), "torchrun", None)
    assert caught.value.exit_codes == [0, -signal.SIGSEGV]
