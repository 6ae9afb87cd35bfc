"""Feedback on the exercises of the lessons: `labkit.check("01.2", answer)`."""

from dataclasses import replace
from importlib import import_module
from typing import Any

from labkit import cells, courses, processes
from labkit.checks import attempts, checking, limits
from labkit.checks.attempts import Progress
from labkit.checks.checking import Check, Verdict
from labkit.checks.undisturbed import random_state_kept

__all__ = ["Check", "Progress", "Verdict", "check", "exercises", "find", "progress"]


def check(number: str, answer: Any) -> Verdict:
    """Try `answer`, the learner's answer to the exercise `number` (such as "01.2"), on fresh inputs and say what happened.

    What the answer prints is cut after a screenful, and it may run as long as in grading, 30 s. An answer that its cell no longer shows,
    because the cell has an error or defines something else, is not judged. The check leaves the
    random state, the memory of the GPUs, the current device and the current streams unchanged.

    Raises:
        ValueError: there is no such exercise; the message names those that there are.
        RuntimeError: too few GPUs are in use.
    """
    known = find(number)
    if why := cells.not_on_screen(number):
        return Verdict(False, f"not checked: {why}", exercise=number)
    with random_state_kept():
        verdict = _tried(known, answer)
    same = cells.judged_before(number)
    return replace(verdict, message=f"{verdict.message}\n{same}") if same and verdict.message != "not attempted" else verdict


def _tried(known: Check, answer: Any) -> Verdict:
    number, inputs = known.number, checking.drawn(known)
    try:
        if known.children and not checking.is_stub(answer, known.script):
            processes.start_server()
        with limits.in_time(number, answer), limits.a_screenful(), limits.no_questions(), limits.no_exit():
            seen = checking.observe(known, answer, inputs)
    except limits.TookTooLongError as error:
        told = f"your answer took longer than {limits.LIMIT:g} s{_at(error, answer)}."
        return attempts.note(known, replace(checking.not_yet(told), exercise=number), inputs)
    except KeyboardInterrupt as error:
        raise limits.CheckInterrupted(f"{number} was interrupted{_at(error, answer)}.") from None
    return attempts.note(known, checking.judge(known, seen, inputs), inputs)


def _at(error: BaseException, answer: Any) -> str:
    line = "; ".join(checking.own_line(error, answer))
    return f" ({line})" if line else ""


def progress(lesson: str | None = None) -> Progress:
    """Which exercises are right so far: of one lesson, such as "01", or of those that have been tried.

    What was tried outlives the kernel, in `.labkit/progress.json` beside the notebook.

    Raises ValueError, naming those that there are, for a lesson without exercises.
    """
    chosen = sorted(attempts.tried()) if lesson is None else [lesson]
    numbers = [number for each in chosen for number in exercises(each)]
    if lesson is not None and not numbers:
        there = ", ".join(sorted({known[:2] for known in exercises()}))
        raise ValueError(f"there is no lesson {lesson!r} with exercises; there are {there}")
    return Progress(numbers)


def find(number: str) -> Check:
    """The check of one exercise. Raises ValueError, naming the choices, when there is none."""
    there = exercises(number[:2])
    if number not in there:
        raise ValueError(f"there is no exercise {number!r}; there are {', '.join(exercises())}")
    return there[number]


def exercises(lesson: str | None = None) -> dict[str, Check]:
    """Return the checks of one lesson, or of all lessons, by number in reading order.

    Only the modules of these lessons are imported, because a lesson's labs take seconds to import.
    """
    found: dict[str, Check] = {}
    for number, (package, folder) in courses.lessons().items():
        if lesson in (None, number) and (folder / "checks.py").is_file():
            own = import_module(f"{package}.checks").CHECKS
            found |= {check.number: check for check in own}
    return found
