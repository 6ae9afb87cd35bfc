"""A grade rests on what the grader itself has judged. The submission's process is played here: no sandbox starts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from handed_in import LIMITS, notebook

from labcourse.examination import Examined, examine

Reply = Callable[[dict[str, Any]], dict[str, Any]]
RIGHT = "def on_gpu(numbers): return torch.tensor(numbers, device='cuda')"


class Played:
    """A sandbox and its process, which answers each question as `reply` does. `asked` keeps the questions."""

    limits = LIMITS
    memory = 0
    changed = reports = ()

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.asked: list[dict[str, Any]] = []

    @contextmanager
    def run(self) -> Iterator["Played"]:
        yield self

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        quiet: dict[str, Any] = {"changed": []}
        if "cells" in question:
            return quiet | {"errors": [], "figures": []}
        self.asked.append(question)
        return quiet | self._reply(question)


def tensor_on(device: str, question: dict[str, Any]) -> dict[str, Any]:
    """What `observe` says of a tensor with the values that were asked for."""
    numbers = question["inputs"]
    tensor = {"type": "Tensor", "device": device, "dtype": "torch.float32", "shape": [len(numbers)], "values": numbers}
    return {"observation": {"observed": tensor, "left": ""}}


def honest(question: dict[str, Any]) -> dict[str, Any]:
    """The answer is right; the control, which makes its tensor on the CPU, looks as it does."""
    return tensor_on("cpu" if question["wrong_answer"] else "cuda:0", question)


def examined(course, reply: Reply, student: str = "ada") -> tuple[Examined, list[dict[str, Any]]]:
    played = Played(reply)
    return examine(notebook(RIGHT), student, course.lab("00"), course, frozenset(), played), played.asked


def test_a_right_answer_earns_its_point_beside_a_control(course):
    found, asked = examined(course, honest)
    assert (found.status, found.points) == ("graded", 1)
    assert [bool(question["wrong_answer"]) for question in asked].count(False) == course.tries


def test_neither_number_nor_place_of_the_controls_is_known_before(course):
    orders = {
        tuple(bool(question["wrong_answer"]) for question in examined(course, honest, f"student {number}")[1]) for number in range(20)
    }
    assert {len(order) - course.tries for order in orders} == {1, 2} and len(orders) > 2 * course.tries


def test_a_result_forged_for_every_question_is_not_accepted(course):
    """What answers in the place of the process cannot tell which of the questions is the control."""
    found, _ = examined(course, lambda question: tensor_on("cuda:0", question))
    assert (found.status, found.points) == ("tampered", None)
    assert found.detail == "an answer to 00.1 that is known to be wrong looked right"


def test_a_control_that_behaves_in_another_way_is_no_measurement(course):
    found, _ = examined(
        course, lambda question: {"observation": {"raised": "ValueError"}} if question["wrong_answer"] else honest(question)
    )
    assert (found.status, found.points) == ("disturbed", None)


@pytest.mark.parametrize("changed", [["torch.allclose"], "nothing", None])
def test_what_the_notebook_replaced_is_asked_for_each_time(course, changed):
    found, _ = examined(course, lambda question: honest(question) | {"changed": changed})
    assert (found.status, found.points) == ("tampered", None)


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
