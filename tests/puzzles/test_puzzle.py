"""`labkit.puzzle`: the process of its own, the messages, the best score and the figure."""

import builtins
import functools
import json
import types
import warnings

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

import labkit
import labkit.puzzles
from gpulessons.puzzles import PUZZLES
from gpulessons.puzzles.time import ONE_LAUNCH
from gputrace import record
from gputrace.figures.comparison import timeline_compared
from labkit import machine
from labkit.checks.left_behind import Followed
from labkit.puzzles import attempt, scores
from labkit.puzzles.attempt import Attempt
from labkit.puzzles.definitions import MODEL, SENT, puzzles
from labkit.puzzles.replaced import Replaced
from virtualgpu import machines
from virtualgpu.machines import Request

from .answers import _softmax, _softmax_by_hand


@pytest.fixture
def no_scores(monkeypatch):
    """Forget the best scores of this process."""
    monkeypatch.setattr(scores, "_best", {})


@pytest.mark.slow
def test_a_notebook_sees_score_par_and_its_best_so_far(no_scores, tmp_path, monkeypatch):
    file = tmp_path / ".labkit" / "progress.json"
    monkeypatch.setenv("LABKIT_PROGRESS", str(file))
    first = labkit.puzzle("one launch", _softmax)
    assert first.solved and first.score == first.best == 1
    assert repr(first).splitlines() == [
        "one launch Right. Your launches: 1. That is par.",
        "score on a virtual H200  1  original 201",
        "budget                   5",
        "par                      1",
        "your best so far         1",
    ]
    assert "original 201" in first.figure.title
    monkeypatch.setattr(scores, "_best", {})  # another kernel
    second = labkit.puzzle("one launch", _softmax_by_hand)
    assert second.score == 5 and second.best == 1
    assert second.verdict.message == "Right. Your launches: 5. Par is 1."
    assert json.loads((file.parent / "scores.json").read_text()) == {"one launch": 1}


@pytest.mark.slow
def test_errors_of_the_function_are_the_message(no_scores):
    def ends_its_process(rows):
        import os

        os._exit(3)

    def fails(rows):
        return rows.no_such_method()

    def prints(rows):
        print("hello")
        return rows + 100  # no probability is as large

    assert "ended with exit status 3" in repr(labkit.puzzle("one launch", ends_its_process))
    failed = labkit.puzzle("one launch", fails)
    assert "your function raised AttributeError" in repr(failed)
    assert failed.figure is None and not failed.solved
    wrong = labkit.puzzle("one launch", prints)
    assert "the result differs in 40,000 of 40,000 elements" in repr(wrong)
    assert wrong.figure is not None and wrong.score is None and wrong.best is None


def test_an_unknown_name_is_an_error_that_lists_all_names():
    with pytest.raises(ValueError, match="There is no puzzle 'none'. Choose one of these: 'free"):
        labkit.puzzle("none", print)
    with pytest.raises(TypeError, match="Give labkit.puzzle a function. You gave 3."):
        labkit.puzzle("one launch", 3)


def test_the_best_score_is_the_lowest_and_an_unreadable_file_has_none(
    no_scores, tmp_path, monkeypatch
):
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "progress.json"))
    assert scores.best("x") is None
    assert [scores.note("x", score) for score in (5, 7, 3)] == [5, 5, 3]
    monkeypatch.setattr(scores, "_best", {})
    assert scores.best("x") == 3
    (tmp_path / "scores.json").write_text("[")
    assert scores.best("x") is None


def test_all_puzzles_are_found_by_their_names():
    assert list(puzzles().values()) == PUZZLES


def test_a_mode_that_stays_active_is_reported():
    mode = BaseTorchFunctionMode()
    followed = Followed(mode.__enter__)
    with machines.use(1, like=MODEL):
        followed()
        mode.__exit__(None, None, None)
    assert "the number of active modes of PyTorch is" in followed.left[0]


def test_functions_that_a_program_replaces_are_found_and_an_optimizers_own_wrapper_is_not(
    monkeypatch,
):
    before = Replaced()
    torch.optim.SGD([torch.zeros(1)])  # PyTorch wraps the method `step`
    assert before.sentence() == ""
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)
    assert "Tensor.cpu" in before.sentence()


@pytest.mark.parametrize("available, ran_on", [(0, []), (2, []), (4, [4]), (8, [4])])
def test_a_puzzle_runs_on_as_many_real_gpus_as_it_has_if_there_are_enough(
    available, ran_on, monkeypatch
):
    """Check a notebook that uses one GPU, on computers with one and with more."""

    class OneRealGPU:
        virtual, badge = False, "NVIDIA H200"
        request = Request(gpus=1, like=None, memory=None, values=True)

    counts = []

    def run(known, function, gpus, original):
        counts.append(gpus[0].gpus)
        return None, Attempt(None, "nothing was run")

    monkeypatch.setattr(machine, "current", OneRealGPU)
    monkeypatch.setattr(machine, "real_gpus", lambda: available)
    monkeypatch.setattr(labkit.puzzles, "_run", run)
    known = puzzles()["even load"]
    rows = labkit.puzzles._measured(known, known.function)
    assert counts == ran_on and len(rows) == len(ran_on)


def test_bytes_sent_are_those_of_the_gpu_that_sends_most():
    with machines.use(3, like="T4"):
        x = torch.zeros(1 << 18, device="cuda:0")
        with record(timeline=True) as nothing:
            x + 1
        with record(timeline=True) as sent:
            x.to("cuda:1").to("cuda:2").to("cuda:1")
            x.to("cuda:2")
            x.to("cpu")
        assert SENT.read(nothing) == 0
        assert SENT.read(sent) == 2 << 20
        assert SENT.text(2 << 20) == "2.00 MiB"


def test_a_comparison_draws_both_timelines_on_one_axis():
    with machines.use(1, like=MODEL):
        x = torch.ones(1000, device="cuda")
        traces = []
        for count in (1, 20):
            with record(timeline=True) as trace:
                for _ in range(count):
                    x + 1
            traces.append(trace)
        figure = timeline_compared(*traces, "A title", budget=1e-4)
    assert "Yours: " in figure.alt and "The original: " in figure.alt
    original, own = [axes for axes in figure._canvas.axes][::-1]
    assert original.get_xlim() == own.get_xlim()


@pytest.fixture
def nothing_stays_changed():
    """Restore what the changes below replace."""
    tolerance, code, known_sorted = ONE_LAUNCH.tolerance, attempt._apart.__code__, sorted
    trusted, known_torch = attempt._TRUSTED, attempt.torch
    yield
    object.__setattr__(ONE_LAUNCH, "tolerance", tolerance)
    attempt._apart.__code__, builtins.sorted = code, known_sorted
    attempt._TRUSTED, attempt.torch = trusted, known_torch


def _replace_an_operator():
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns once per process of the override
        library.impl("exp", torch.ones_like, "CPU")
    return library


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda: object.__setattr__(ONE_LAUNCH, "tolerance", 1e9), "ONE_LAUNCH.tolerance"),
        (lambda: setattr(attempt._apart, "__code__", (lambda: 0).__code__), "attempt._apart"),
        (lambda: setattr(attempt, "_TRUSTED", ("torch", "__main__")), "attempt._TRUSTED"),
        (lambda: setattr(attempt, "torch", types.ModuleType("torch")), "attempt.torch"),
        (lambda: setattr(builtins, "sorted", functools.partial(sorted)), "builtins.sorted"),
        (_replace_an_operator, "the operator 'exp'"),
    ],
)
def test_what_decides_a_result_cannot_be_changed_unseen(change, name, nothing_stays_changed):
    before = Replaced()
    kept = change()  # an operator stays replaced while its library is alive
    found = before.sentence()
    del kept
    assert name in found


def test_a_score_better_than_par_is_called_so():
    known = puzzles()["one graph"]
    texts = [labkit.puzzles._told(known, score) for score in (1.8e-3, 1.75e-3, 1.7e-3)]
    assert [text.partition("ms. ")[2] for text in texts] == [
        "Par is 1.750 ms.",
        "That is par.",
        "That is better than par, which is 1.750 ms.",
    ]
