"""For each exercise an answer that is known to be wrong, and how its check says so.

A grader observes it in the process of each submission: if it looks right there, or wrong in another way, the submission has changed what
answers are observed with. Chosen so that the measurement itself, of memory, order, time or values, has to show what is wrong.

wrong_answers.txt has them: a line with the exercise, what is wrong, and after => a regular expression for what the check says; below it the
answer's source, indented.
"""

import re
import textwrap
from functools import cache
from importlib import resources

Control = tuple[str, str]


def control(number: str) -> Control:
    """The pattern and the source of an exercise's control. Raises ValueError when it has none: its lab cannot be graded safely."""
    if number not in _controls():
        raise ValueError(f"exercise {number} has no control in labkit/checks/controls: write one before it is graded")
    return _controls()[number]


@cache
def _controls() -> dict[str, Control]:
    text = (resources.files(__package__) / "wrong_answers.txt").read_text(encoding="utf-8")
    return {number: (pattern, source) for number, _, pattern, source in wrong_answers(text)}


def wrong_answers(text: str) -> list[tuple[str, str, str, str]]:
    """Of each answer in a text such as wrong_answers.txt the exercise, what is wrong, the pattern and the source."""
    found = re.findall(r"^(\d\d\.\d+) (.*?) => (.*)\n((?:(?: .*)?\n)+)", text, flags=re.MULTILINE)
    return [(number, name, pattern, "\n" + textwrap.dedent(source).strip("\n") + "\n") for number, name, pattern, source in found]
