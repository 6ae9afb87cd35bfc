"""A grade depends only on what the grader judges. The submission's process is made up here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from labcourse import examination, judging
from labcourse.examination import Examined, examine
from labkit import checks
from labkit.checks import checking
from labkit.processes.time_limits import TimeLimit

from .handed_in import LIMITS, notebook

Reply = Callable[[dict[str, Any]], dict[str, Any]]
RIGHT = "def on_gpu(numbers): return torch.tensor(numbers, device='cuda')"


class Here:
    """A reader that calls its functions in this process."""

    def call(self, function: Callable[..., Any], *arguments: Any, about: str) -> Any:
        return function(*arguments)


class Played:
    """A made-up sandbox, whose process answers with `reply`. `asked` keeps the questions."""

    limits = LIMITS
    memory = 0
    changed = ()
    reader = Here()

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.asked: list[dict[str, Any]] = []

    @contextmanager
    def run(self) -> Iterator["Played"]:
        yield self

    def time_limit(self, seconds: float) -> TimeLimit:
        return TimeLimit(seconds)

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        if "cells" in question:
            return {"errors": [], "figures": []}
        self.asked.append(question)
        return self._reply(question)


def tensor_on(device: str, question: dict[str, Any]) -> dict[str, Any]:
    """Return the observation of a tensor with the requested values."""
    numbers = question["inputs"]
    tensor = {
        "type": "Tensor",
        "device": device,
        "dtype": "torch.float32",
        "shape": [len(numbers)],
        "values": numbers,
    }
    return {"observation": {"observed": tensor, "left": ""}}


def honest(question: dict[str, Any]) -> dict[str, Any]:
    """Return the observation of a right answer, or that of the control if it is tried.

    The control makes its tensor on the CPU, which is wrong, as it should be.
    """
    return tensor_on("cpu" if question["wrong_answer"] else "cuda:0", question)


def examined(course, reply: Reply, student: str = "ada") -> tuple[Examined, list[dict[str, Any]]]:
    played = Played(reply)
    return examine(
        notebook(RIGHT), student, course.lab("00"), course, frozenset(), played
    ), played.asked


def test_a_right_answer_earns_its_point_beside_a_control(course):
    found, asked = examined(course, honest)
    assert (found.status, found.points) == ("graded", 1)
    assert [bool(question["wrong_answer"]) for question in asked].count(False) == course.tries


def test_a_function_with_another_name_is_told_its_name(course):
    def untouched(question):
        if question["wrong_answer"]:
            return honest(question)
        return {"observation": {"attempted": False}}

    played = Played(untouched)
    lab = course.lab("00")
    for source, status in {
        RIGHT.replace("on_gpu", "to_gpu"): "wrong",
        "def on_gpu(numbers):\n    ...": "not attempted",
        "on_gpu = None": "not attempted",
    }.items():
        found = examine(notebook(source), "ada", lab, course, frozenset(), played)
        assert found.exercises[0]["status"] == status
        named = "defines to_gpu. The check needs a function with the name on_gpu"
        assert (named in found.exercises[0]["message"]) == (status == "wrong")


def test_each_exercise_has_one_control_at_a_place_that_differs(course):
    orders = {
        tuple(
            bool(question["wrong_answer"])
            for question in examined(course, honest, f"student {number}")[1]
        )
        for number in range(20)
    }
    assert {sum(order) for order in orders} == {1} and len(orders) == course.tries + 1


def test_a_control_that_looks_right_leaves_the_exercise_to_a_person(course):
    found, _ = examined(course, lambda question: tensor_on("cuda:0", question))
    assert (found.status, found.points) == ("disturbed", None)
    assert "an answer that is known to be wrong was judged as: Right." in found.detail


def test_a_control_that_behaves_in_another_way_is_no_measurement(course):
    found, _ = examined(
        course,
        lambda question: (
            {"observation": {"raised": "ValueError"}}
            if question["wrong_answer"]
            else honest(question)
        ),
    )
    assert (found.status, found.points) == ("disturbed", None)


def broken(*arguments):
    raise KeyError("a bug")


def test_a_judge_with_a_bug_is_the_graders_error(course, monkeypatch):
    check = replace(checks.find("00.1"), judge=broken)
    monkeypatch.setitem(judging.CHECKS, "00.1", check)
    assert_failed(examined(course, honest)[0])


def test_a_draw_with_a_bug_is_the_graders_error(course, monkeypatch):
    check = replace(checks.find("00.1"), draw=broken)
    monkeypatch.setattr(checks, "find", lambda number: check)
    assert_failed(examined(course, honest)[0])


def assert_failed(found: Examined) -> None:
    assert (found.status, found.points) == ("failed", None)
    assert found.detail == "the check of 00.1 raised KeyError: 'a bug'"
    [result] = found.exercises
    assert result["message"] == "the grader has an error here, and not the answer"


def test_other_exercises_keep_their_results_beside_a_check_with_a_bug(course, monkeypatch):
    def verdict(number, observation, inputs):
        if number == "01.1":
            broken()
        return checking.right() if observation["observed"] == "answer" else checking.not_yet("it")

    monkeypatch.setattr(judging, "verdict", verdict)
    monkeypatch.setattr(examination, "control", lambda number: ("it", "a control"))
    lab = course.lab("01")
    lab = replace(lab, exercises=lab.exercises[:2])

    def reply(asked):
        return {"observation": {"observed": asked["wrong_answer"] or "answer", "left": ""}}

    played = Played(reply)
    found = examine(notebook(RIGHT), "ada", lab, course, frozenset(), played)
    assert (found.status, found.points) == ("failed", None)
    assert [result["status"] for result in found.exercises] == ["failed", "right"]


def test_an_observation_that_no_check_returns_is_no_error_of_the_grader(course):
    for observation in ([], {"observed": 1}, {"raised": 1}, {"left": "", "observed": 1}):
        found, _ = examined(course, lambda asked, seen=observation: {"observation": seen})
        assert (found.status, found.points) == ("disturbed", None)


def test_every_try_has_to_be_right(course):
    tries = []

    def right_once(question):
        tries.extend([] if question["wrong_answer"] else [question])
        return honest(question) if len(tries) < course.tries else tensor_on("cpu", question)

    found, _ = examined(course, right_once)
    assert (found.status, found.points, found.exercises[0]["status"]) == ("graded", 0, "wrong")


def test_hidden_inputs_follow_from_the_courses_seed_and_the_student(course):
    def inputs(course, student="ada"):
        return [question["inputs"] for question in examined(course, honest, student)[1]]

    assert inputs(course) == inputs(course)
    assert inputs(course) != inputs(replace(course, seed=course.seed[::-1]))
    assert inputs(course) != inputs(course, "bob")
