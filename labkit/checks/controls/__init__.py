"""For each exercise an answer that is known to be wrong, and how its check says so, as a regular expression: a file a lesson.

A grader observes it in the process of each submission: if it looks right there, or wrong in another way, the submission has changed what
answers are observed with. Chosen so that the measurement itself, of memory, order, time or values, has to show what is wrong.
"""

from importlib import import_module

Control = tuple[str, str]


def control(number: str) -> Control:
    """The pattern and the source of an exercise's control. Raises ValueError when it has none: its lab cannot be graded safely."""
    try:
        return import_module(f"{__name__}.lesson_{number[:2]}").CONTROLS[number]
    except (ImportError, KeyError):
        raise ValueError(f"exercise {number} has no control in labkit/checks/controls: write one before it is graded") from None
