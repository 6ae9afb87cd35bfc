"""Which rank failed first, told from what the ranks said of their ends: no process starts."""

import signal

import pytest

import labkit
from labkit.ranks.job import TorchrunJob
from labkit.ranks.job_result import result
from labkit.ranks.printing import RankPrinter
from labkit.ranks.rank_process import RankProcess

WELL = {"ended": "returned", "result": 1}


def raised(type_: str, text: str) -> dict:
    return {"ended": "raised", "type": type_, "text": text, "line": 7, "traceback": ""}


def job_of(*processes: RankProcess) -> TorchrunJob:
    """Return a job of one attempt, whose ranks ended in this order."""
    request = {"ranks_of_node": len(processes), "nodes": 1, "max_restarts": 0, "trace": False}
    job = TorchrunJob("", request, RankPrinter(len(processes), live=False, quiet=True))
    job._attempts, job.processes = ["0"], list(processes)
    job._note_failures(job.processes)
    return job


def test_ranks_that_all_returned_give_their_results():
    ranks = result(
        job_of(
            RankProcess(1, 0, 11, WELL | {"result": "b"}, 0),
            RankProcess(0, 0, 10, WELL | {"result": "a"}, 0),
        ),
        None,
    )
    assert ranks.results == ["a", "b"]


def test_a_rank_that_lost_another_did_not_fail_first():
    """The reports of ranks that failed only because of rank 1 come before its own report."""
    lost = RankProcess(
        0, 0, 10, raised("RuntimeError", "Connection closed by peer [127.0.0.1]:1"), 1
    )
    asked_to_end = RankProcess(2, 0, 12, None, -signal.SIGTERM)
    first = RankProcess(1, 0, 11, raised("ValueError", "a bad batch"), 1)
    with pytest.raises(
        labkit.TorchrunError, match=r"^rank 1 raised ValueError: a bad batch \(line 7\)"
    ) as caught:
        result(job_of(lost, asked_to_end, first), None)
    assert (caught.value.rank, caught.value.kind) == (1, "exception")
    caught.value.add_note("In rank 1: …")
    # as IPython asks for it
    assert caught.value._render_traceback_() == [
        f"TorchrunError: {caught.value}",
        "In rank 1: …",
    ]


def test_a_rank_that_was_killed_failed_before_the_one_that_torchrun_then_ended():
    """No rank reports. torchrun reports only the killed rank's exit code."""
    asked_to_end, killed = (
        RankProcess(0, 0, 10, None, None),
        RankProcess(1, 0, 11, None, -signal.SIGKILL),
    )
    with pytest.raises(labkit.TorchrunError, match=r"^rank 1 was killed from outside \(SIGKILL\)"):
        result(job_of(asked_to_end, killed), None)


def test_one_rank_that_returned_is_not_enough():
    with pytest.raises(
        labkit.TorchrunError, match=r"^rank 1 crashed with a segmentation fault"
    ) as caught:
        result(
            job_of(RankProcess(0, 0, 10, WELL, 0), RankProcess(1, 0, 11, None, -signal.SIGSEGV)),
            None,
        )
    assert caught.value.exit_codes == [0, -signal.SIGSEGV]
