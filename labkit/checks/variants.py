"""Variants of exercises, for exams.

A variant has another task and other inputs than its exercise, and no lesson shows its solution. The
list `VARIANTS` of a lesson's `variants.py` has them. A variant's number is that of its exercise
plus 100: "01.101" is the variant of "01.1".
"""

import ast
from dataclasses import dataclass

from labkit.checks.checking import Check

APART = 100  # between the number of an exercise and that of its variant


@dataclass(frozen=True)
class Variant:
    """Exercise that an exam hands out instead of one of a lesson.

    Attributes:
        check: the check, under the variant's number.
        task: what the student has to do, in Markdown.
        stub: the source of the cell that the student gets.
    """

    check: Check
    task: str
    stub: str

    @property
    def name(self) -> str:
        """The name of the function that the student writes."""
        [function] = ast.parse(self.stub).body
        if not isinstance(function, ast.FunctionDef):
            raise ValueError(f"{self.check.number}: the stub is not a function")
        return function.name

    @property
    def replaces(self) -> str:
        """The number of the exercise that the variant replaces."""
        lesson, exercise = self.check.number.split(".")
        return f"{lesson}.{int(exercise) - APART}"
