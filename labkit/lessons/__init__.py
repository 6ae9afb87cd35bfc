"""Feedback on the exercises of the lessons: `labkit.check("01.2", answer)`."""

import pkgutil
from importlib import import_module
from typing import Any

from labkit.lessons import checks
from labkit.lessons.checks import Check
from labkit.lessons.verdict import Verdict

__all__ = ["Check", "Verdict", "check", "exercises", "find"]


def check(number: str, answer: Any) -> Verdict:
    """Try `answer`, the learner's answer to the exercise `number` (such as "01.2"), on fresh inputs and say what happened.

    Raises:
        ValueError: there is no such exercise; the message names those that there are.
        RuntimeError: too few GPUs are in use.
    """
    return checks.run(find(number), answer)


def find(number: str) -> Check:
    """The check of one exercise. Raises ValueError, naming the choices, when there is none."""
    there = exercises()
    if number not in there:
        raise ValueError(f"there is no exercise {number!r}; there are {', '.join(there)}")
    return there[number]


def exercises() -> dict[str, Check]:
    """The checks of all lessons by number, in reading order."""
    lessons = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name.startswith("lesson_"))
    return {check.number: check for name in lessons for check in import_module(f"{__name__}.{name}").CHECKS}
