"""Feedback on the exercises of the lessons: `labkit.check("01.2", answer)`."""

from dataclasses import replace
from importlib import import_module
from typing import Any

from labkit import cells, courses, processes
from labkit.checks import attempts, checking, limits
from labkit.checks.attempts import Progress
from labkit.checks.checking import Check, Verdict
from labkit.checks.undisturbed import random_state_kept
from labkit.checks.variants import Variant

__all__ = ["Check", "Progress", "Verdict", "check", "exercises", "find", "progress"]


def check(number: str, answer: Any) -> Verdict:
    """Try a learner's answer to an exercise on fresh inputs, and return a verdict with a message.

    `labkit.check("01.2", on_device)` is an example. A notebook shows the verdict below the cell.

    The answer may run for 30 s, as in grading. Only a screenful of what it prints is shown. An
    answer is not judged if its cell no longer defines it, for example because the cell now has an
    error. The check leaves the random state, the memory of the GPUs, the current device and the
    current streams unchanged.

    Args:
        number: the number of the exercise, such as "01.2".
        answer: what the exercise asks for, usually a function.

    Raises:
        ValueError: there is no such exercise. The message names exercises.
        RuntimeError: too few GPUs are in use.
    """
    known = find(number)
    why = cells.not_on_screen(number)
    if why:
        return Verdict(False, f"not checked: {why}", exercise=number)
    with random_state_kept():
        verdict = _tried(known, answer)
    same = cells.judged_before(number)
    if not same or verdict.message == "not attempted":
        return verdict
    return replace(verdict, message=f"{verdict.message}\n{same}")


def _tried(known: Check, answer: Any) -> Verdict:
    """Run the answer within the limits of a check, record the attempt, and return the verdict."""
    number = known.number
    inputs = checking.drawn(known)
    try:
        if known.children and not checking.is_stub(answer, known.script):
            processes.start_server()
        with (
            limits.in_time(number, answer),
            limits.a_screenful(),
            limits.no_questions(),
            limits.no_exit(),
        ):
            seen = checking.observe(known, answer, inputs)
    except limits.TookTooLongError as error:
        told = f"your answer took longer than {limits.LIMIT:g} s{_at(error, answer)}."
        return attempts.note(known, replace(checking.not_yet(told), exercise=number), inputs)
    except KeyboardInterrupt as error:
        raise limits.CheckInterrupted(f"{number} was interrupted{_at(error, answer)}.") from None
    return attempts.note(known, checking.judge(known, seen, inputs), inputs)


def _at(error: BaseException, answer: Any) -> str:
    """Return the line of the answer that raised the error, in brackets, or "" if it is unknown."""
    line = "; ".join(checking.own_line(error, answer))
    return f" ({line})" if line else ""


def progress(lesson: str | int | None = None) -> Progress:
    """Return which exercises of a lesson, such as "01" or 1, are right so far.

    Without a lesson, return the exercises of all lessons of which at least one was tried. Tries
    are kept in `.labkit/progress.json` beside the notebook, so they outlive the kernel.

    Raises ValueError for a lesson without exercises. The message names the lessons with exercises.
    """
    chosen = sorted(attempts.tried()) if lesson is None else [str(lesson).zfill(2)]
    numbers = [number for each in chosen for number in exercises(each)]
    if lesson is not None and not numbers:
        choices = ", ".join(sorted({known[:2] for known in exercises()}))
        raise ValueError(
            f"There is no lesson {lesson!r} with exercises. Choose one of these: {choices}."
        )
    return Progress(numbers)


def find(number: str) -> Check:
    """Return the check of an exercise, such as "01.2".

    Raises ValueError if there is no such exercise. The message names the exercises of the lesson
    that the number begins with, or else of all lessons.
    """
    number = str(number)  # a learner may have written 5.1
    known = exercises(number[:2])
    if number not in known:
        known = with_variants(number[:2])
    if number not in known:
        lesson = number.partition(".")[0].zfill(2)
        choices = ", ".join(exercises(lesson) or exercises())
        raise ValueError(f"There is no exercise {number!r}. Choose one of these: {choices}.")
    return known[number]


def exercises(lesson: str | None = None) -> dict[str, Check]:
    """Return the checks of one lesson, or of all lessons, by exercise number in reading order.

    Only the modules of these lessons are imported, because a lesson's labs take seconds to import.
    """
    found: dict[str, Check] = {}
    for number, (package, folder) in courses.lessons().items():
        if lesson in (None, number) and (folder / "checks.py").is_file():
            own = import_module(f"{package}.checks").CHECKS
            found |= {check.number: check for check in own}
    return found


def with_variants(lesson: str | None = None) -> dict[str, Check]:
    """Return the checks of one lesson, or of all lessons, and those of their exam variants."""
    found = exercises(lesson)
    return found | {each.check.number: each.check for each in variants(lesson).values()}


def variants(lesson: str | None = None) -> dict[str, Variant]:
    """Return the variants of one lesson, or of all lessons, by the exercise that each replaces."""
    found: dict[str, Variant] = {}
    for number, (package, folder) in courses.lessons().items():
        if lesson in (None, number) and (folder / "variants.py").is_file():
            own = import_module(f"{package}.variants").VARIANTS
            found |= {variant.replaces: variant for variant in own}
    return found
